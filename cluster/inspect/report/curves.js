// Small multiples over the optimizer step. A pointer on one chart reads all of them at its step.

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [360, 180, 46, 8, 8, 22];
const DASHES = ["", "6 3", "2 3", "8 3 2 3", "4 2", "1 2"];
// No two of the first 36 lines have both their colour and their dashes in common.
const dashes = (index) => DASHES[(index + Math.floor(index / 6)) % 6];
const LONG_RUN = 200;
// Fewer points than these are each drawn as a dot, and joined as they are.
const SPARSE = 40;
const lastStep = Math.max(1, ...data.charts.flatMap((c) => c.lines.flatMap((l) => l.steps)));
const x = (step) => LEFT + (step / lastStep) * (WIDTH - LEFT - RIGHT);
const drawnCharts = [];

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((s) => s * power >= rough) * power;
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

// The mean of `window` values around each; at the ends, of those that there are.
function smoothed(values, window) {
  const sums = [0];
  for (const value of values) sums.push(sums.at(-1) + value);
  const half = Math.floor(window / 2);
  return values.map((_, i) => {
    const [from, to] = [Math.max(0, i - half), Math.min(values.length, i + half + 1)];
    return (sums[to] - sums[from]) / (to - from);
  });
}

function path(steps, values, y) {
  return steps.map((s, i) => `${i ? "L" : "M"}${x(s).toFixed(1)} ${y(values[i]).toFixed(1)}`).join("");
}

function range(lines) {
  // Not Math.min(...): a long run has more points than a call has room for.
  let [low, high] = [Infinity, -Infinity];
  for (const line of lines) {
    for (const values of [line.values, line.low ?? [], line.high ?? []]) {
      for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
    }
  }
  if (low > 0 && low < high / 2) low = 0;
  const room = (high - low || Math.abs(high) || 1) * 0.05;
  return [low === 0 ? 0 : low - room, high + room];
}

function drawAxes(svg, low, high, y) {
  for (const value of ticks(low, high, 3)) {
    svg.append(
      shape("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
      shape("text", { x: LEFT - 5, y: y(value) + 4, "text-anchor": "end" }, number(value)));
  }
  for (const step of ticks(0, lastStep, 4)) {
    if (!Number.isInteger(step)) continue;
    const anchor = x(step) > WIDTH - 25 ? "end" : "middle";
    svg.append(shape("text", { x: x(step), y: HEIGHT - 5, "text-anchor": anchor }, number(step, 4)));
  }
}

function drawLine(svg, line, index, y, share) {
  const style = { stroke: `var(--s${index % 6})`, "stroke-dasharray": dashes(index) };
  const window = smoothingWindow(line, share);
  const smooth = window > 1;
  const values = smooth ? smoothed(line.values, window) : line.values;
  if (line.low && line.high) {
    line.steps.forEach((step, i) => svg.append(shape("line", {
      class: "whisker", stroke: style.stroke, x1: x(step), x2: x(step), y1: y(line.low[i]),
      y2: y(line.high[i]),
    })));
  }
  if (smooth) {
    svg.append(shape("path", {
      class: "stroke raw", stroke: style.stroke, d: path(line.steps, line.values, y),
    }));
  }
  svg.append(shape("path", { class: "stroke", ...style, d: path(line.steps, values, y) }));
  if (line.values.length <= SPARSE) {
    line.steps.forEach((step, i) =>
      svg.append(shape("circle", { cx: x(step), cy: y(line.values[i]), r: 2.4, fill: style.stroke })));
  }
}

function makeChart(chart) {
  const [low, high] = range(chart.lines);
  const y = (value) => TOP + ((high - value) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const said = chart.lines.map((line) =>
    `${line.label} from ${number(line.values[0])} to ${number(line.values.at(-1))}`);
  const svg = shape("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: 0,
    "aria-label": `${chart.title}: ${said.join("; ")}`,
  });
  const wide = chart.lines.some((line) => line.low) ? " wide" : "";
  const legend = make("div", { class: `legend-line${wide}` });
  const where = make("output");
  const figure = make("figure", { class: "chart" },
    make("figcaption", {}, make("span", {}, chart.title), where), legend, svg);
  const draw = (share) => {
    svg.replaceChildren();
    drawAxes(svg, low, high, y);
    chart.lines.forEach((line, i) => drawLine(svg, line, i, y, share));
    cross = svg.appendChild(shape("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM }));
    read(null);
  };
  let cross;
  const read = (step) => {
    cross.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) for (const end of ["x1", "x2"]) cross.setAttribute(end, x(step));
    const { steps } = chart.lines[0];
    where.textContent = `step ${steps[nearest(steps, step ?? lastStep)]}`;
    legend.replaceChildren(...chart.lines.map((line, i) => legendEntry(line, i, step)));
  };
  return { figure, svg, draw, read };
}

function legendEntry(line, index, step) {
  const at = nearest(line.steps, step ?? line.steps.at(-1));
  const swatch = make("span", { class: "swatch" });
  swatch.style.borderTopColor = `var(--s${index % 6})`;
  swatch.style.borderTopStyle = index % 6 ? "dashed" : "solid";
  const value = make("b", {}, number(line.values[at]));
  const ends = line.low && line.high ? ` [${number(line.low[at])}, ${number(line.high[at])}]` : "";
  return make("span", {}, swatch, `${line.label} `, value, ends);
}

function nearest(steps, step) {
  let [low, high] = [0, steps.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}

let readStep = null;
function readAll(step) {
  readStep = step;
  for (const chart of drawnCharts) chart.read(step);
}

function stepAt(svg, event) {
  const box = svg.getBoundingClientRect();
  const share = ((event.clientX - box.left) / box.width) * WIDTH;
  const step = ((share - LEFT) / (WIDTH - LEFT - RIGHT)) * lastStep;
  return Math.round(Math.min(lastStep, Math.max(0, step)));
}

function moveByKey(event) {
  const far = Math.max(1, Math.round(lastStep / 20));
  const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -far, PageDown: far }[event.key];
  if (by === undefined) return;
  event.preventDefault();
  readAll(Math.min(lastStep, Math.max(0, (readStep ?? lastStep) + by)));
}

// Points that are averaged, an odd number: a share of the line's own, or 1 where it has few.
function smoothingWindow(line, share) {
  const points = line.values.length;
  return points <= SPARSE ? 1 : 1 + 2 * Math.round((share * points) / 2);
}

// The slider's position, from 0 to 1, as a share of each line: finer near its beginning.
function drawCurves() {
  const share = Number(byId("smoothing").value) ** 2 / 4;
  byId("smoothing-value").textContent =
    share > 0 ? `mean of ${number(100 * share, 2)} % of a line's points` : "off";
  for (const chart of drawnCharts) chart.draw(share);
}

function showCurves() {
  for (const chart of data.charts) {
    const drawn = makeChart(chart);
    drawnCharts.push(drawn);
    drawn.svg.addEventListener("pointermove", (event) => readAll(stepAt(drawn.svg, event)));
    drawn.svg.addEventListener("pointerleave", () => readAll(null));
    drawn.svg.addEventListener("keydown", moveByKey);
    drawn.svg.addEventListener("blur", () => readAll(null));
    byId("charts").append(drawn.figure);
  }
  const longest = Math.max(0, ...data.charts.map((c) => c.lines[0].values.length));
  if (longest > LONG_RUN) byId("smoothing").value = 0.45;
  byId("smoothing").addEventListener("input", drawCurves);
  if (drawnCharts.length) drawCurves();
}

showCurves();
