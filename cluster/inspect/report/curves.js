// Charts over the optimizer step, or time. A pointer on one reads the values of all charts of its
// axis at that position.

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [360, 180, 46, 8, 8, 22];
const DASHES = ["", "6 3", "2 3", "8 3 2 3", "4 2", "1 2"];
// Colour and dashes of each line of a chart. If two runs are compared, a run has one colour in all
// charts; otherwise no two of the first 36 lines share both.
function looks(lines) {
  return lines.map((line, index) => {
    if (line.run === undefined) {
      return { colour: index % 6, dashes: DASHES[(index + Math.floor(index / 6)) % 6] };
    }
    const before = lines.slice(0, index).filter((other) => other.run === line.run).length;
    return { colour: line.run, dashes: DASHES[before % 6] };
  });
}
const LONG_RUN = 200;
// Lines of fewer points are not smoothed, and each point is drawn as a dot.
const SPARSE = 40;
const lastStep = Math.max(1, ...data.charts.flatMap((c) => c.lines.flatMap((l) => l.at)));

// State that charts share. Ticks are multiples of `unit`; `format` returns the text of a position
// in the head of a chart.
function makeAxis(last, unit, format) {
  return { last, unit, format, charts: [], place: null, events: [] };
}

const steps = makeAxis(lastStep, 1, (place, line) => `step ${line.at[nearest(line.at, place)]}`);
const xOf = (axis, frame) => (place) =>
  frame.left + (place / axis.last) * (frame.width - frame.left - RIGHT);

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((s) => s * power >= rough) * power;
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

// Mean of the `window` values around each value; at the ends, of the values that exist.
function smoothed(values, window) {
  const sums = [0];
  for (const value of values) sums.push(sums.at(-1) + value);
  const half = Math.floor(window / 2);
  return values.map((_, i) => {
    const [from, to] = [Math.max(0, i - half), Math.min(values.length, i + half + 1)];
    return (sums[to] - sums[from]) / (to - from);
  });
}

// A step line has a value from its position on ("after"), or from the position before up to its own
// ("before").
function path(at, values, x, y, stairs) {
  return at.map((place, i) => {
    const [here, there] = [x(place).toFixed(1), y(values[i]).toFixed(1)];
    if (!i) return `M${here} ${there}`;
    if (!stairs) return `L${here} ${there}`;
    return stairs === "after" ? `H${here}V${there}` : `V${there}H${here}`;
  }).join("");
}

function range(lines, fromZero) {
  // Not Math.min(...): a long run has more points than the maximum number of arguments.
  let [low, high] = [Infinity, -Infinity];
  for (const line of lines) {
    for (const values of [line.values, line.low ?? [], line.high ?? []]) {
      for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
    }
  }
  if (low > 0 && (low < high / 2 || fromZero)) low = 0;
  const room = (high - low || Math.abs(high) || 1) * 0.05;
  return [low === 0 ? 0 : low - room, high + room];
}

function drawAxes(svg, low, high, y) {
  for (const value of ticks(low, high, 3)) {
    svg.append(
      shape("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
      shape("text", { x: LEFT - 5, y: y(value) + 4, "text-anchor": "end" }, number(value)));
  }
}

function drawPlaces(svg, axis, frame, wanted) {
  const x = xOf(axis, frame);
  for (const place of axis.events) {
    const at = { x1: x(place), x2: x(place), y1: TOP, y2: frame.height - BOTTOM };
    svg.append(shape("line", { class: "event", ...at }));
  }
  for (const tick of ticks(0, axis.last / axis.unit, wanted)) {
    if (axis === steps && !Number.isInteger(tick)) continue;
    const here = x(tick * axis.unit);
    const anchor = here > frame.width - 25 ? "end" : "middle";
    svg.append(
      shape("text", { x: here, y: frame.height - 5, "text-anchor": anchor }, number(tick, 4)));
  }
}

function drawLine(svg, line, look, x, y, share, stairs) {
  const style = { stroke: `var(--s${look.colour})`, "stroke-dasharray": look.dashes };
  const window = smoothingWindow(line, share);
  const smooth = window > 1;
  const values = smooth ? smoothed(line.values, window) : line.values;
  if (line.low && line.high) {
    line.at.forEach((place, i) => svg.append(shape("line", {
      class: "whisker", stroke: style.stroke, x1: x(place), x2: x(place), y1: y(line.low[i]),
      y2: y(line.high[i]),
    })));
  }
  if (smooth) {
    svg.append(shape("path", {
      class: "stroke raw", stroke: style.stroke, d: path(line.at, line.values, x, y),
    }));
  }
  svg.append(shape("path", { class: "stroke", ...style, d: path(line.at, values, x, y, stairs) }));
  if (dotted(line, stairs)) {
    line.at.forEach((place, i) =>
      svg.append(shape("circle", { cx: x(place), cy: y(line.values[i]), r: 2.4, fill: style.stroke })));
  }
  if (line.best !== undefined) {
    const at = { cx: x(line.best), cy: y(line.values[nearest(line.at, line.best)]), r: 6 };
    svg.append(shape("circle", { class: "best", stroke: style.stroke, ...at }));
  }
}

// A single point has no line.
function dotted(line, stairs) {
  return line.values.length === 1 || (line.values.length <= SPARSE && !stairs);
}

function makeChart(chart, axis) {
  const frame = { width: WIDTH, height: HEIGHT, left: LEFT };
  const [low, high] = range(chart.lines, axis !== steps);
  const y = (value) => TOP + ((high - value) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const said = chart.lines.map((line) =>
    `${line.label} from ${number(line.values[0])} to ${number(line.values.at(-1))}`);
  const svg = shape("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: 0,
    "aria-label": `${chart.title}: ${said.join("; ")}`,
  });
  const wide = chart.lines.some((line) => line.low || line.run !== undefined) ? " wide" : "";
  const look = looks(chart.lines);
  const legend = make("div", { class: `legend-line${wide}` });
  const where = make("output");
  const figure = make("figure", { class: "chart" },
    make("figcaption", {}, make("span", { title: chart.about ?? chart.title }, chart.title), where),
    legend, svg);
  const draw = (share) => {
    svg.replaceChildren();
    drawAxes(svg, low, high, y);
    drawPlaces(svg, axis, frame, 4);
    chart.lines.forEach((line, i) =>
      drawLine(svg, line, look[i], xOf(axis, frame), y, share, chart.stairs));
    moveCross = addCross(svg, axis, frame);
    read(null);
  };
  let moveCross;
  const read = (place) => {
    moveCross(place);
    where.textContent = axis.format(place ?? axis.last, chart.lines[0]);
    legend.replaceChildren(
      ...chart.lines.map((line, i) => legendEntry(line, look[i], place, chart.stairs)));
  };
  listenTo(svg, axis, frame);
  return { figure, draw, read };
}

function addCross(svg, axis, frame) {
  const y = { y1: TOP, y2: frame.height - BOTTOM };
  const cross = svg.appendChild(shape("line", { class: "cross", ...y }));
  return (place) => {
    cross.setAttribute("visibility", place === null ? "hidden" : "visible");
    if (place === null) return;
    for (const end of ["x1", "x2"]) cross.setAttribute(end, xOf(axis, frame)(place));
  };
}

function legendEntry(line, look, place, stairs) {
  const at = held(line.at, place ?? line.at.at(-1), stairs);
  const swatch = make("span", { class: "swatch" });
  swatch.style.borderTopColor = `var(--s${look.colour})`;
  swatch.style.borderTopStyle = look.dashes ? "dashed" : "solid";
  const value = make("b", {}, number(line.values[at]));
  const ends = line.low && line.high ? ` [${number(line.low[at])}, ${number(line.high[at])}]` : "";
  const best = line.best === undefined ? "" : ` (ring: best, step ${line.best})`;
  const label = make("span", { class: "label", title: line.label }, line.label);
  return make("span", {}, swatch, label, make("span", {}, value, ends, best));
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

// Index of the value that is drawn at a position; for a step line, the value that is valid there.
function held(at, place, stairs) {
  const near = nearest(at, place);
  if (stairs === "after" && at[near] > place) return Math.max(0, near - 1);
  if (stairs === "before" && at[near] < place) return Math.min(at.length - 1, near + 1);
  return near;
}

function readAll(axis, place) {
  axis.place = place;
  for (const chart of axis.charts) chart.read(place);
}

function listenTo(svg, axis, frame) {
  const whole = (place) =>
    Math.min(axis.last, Math.max(0, axis === steps ? Math.round(place) : place));
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width) * frame.width - frame.left;
    readAll(axis, whole((share / (frame.width - frame.left - RIGHT)) * axis.last));
  });
  svg.addEventListener("pointerleave", () => readAll(axis, null));
  svg.addEventListener("blur", () => readAll(axis, null));
  svg.addEventListener("keydown", (event) => {
    const far = Math.max(1, Math.round(axis.last / 20));
    const near = axis === steps ? 1 : axis.last / 200;
    const by = { ArrowLeft: -near, ArrowRight: near, PageUp: -far, PageDown: far }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    readAll(axis, whole((axis.place ?? axis.last) + by));
  });
}

// Number of points that are averaged, an odd number: a share of the line's points, or 1 for short
// lines.
function smoothingWindow(line, share) {
  const points = line.values.length;
  return points <= SPARSE ? 1 : 1 + 2 * Math.round((share * points) / 2);
}

// The slider's position, from 0 to 1, sets the share of each line, in finer steps near 0.
function drawCurves() {
  const share = Number(byId("smoothing").value) ** 2 / 4;
  byId("smoothing-value").textContent =
    share > 0 ? `mean of ${number(100 * share, 2)} % of a line's points` : "off";
  for (const chart of steps.charts) chart.draw(share);
}

function showCurves() {
  for (const chart of data.charts) {
    const drawn = makeChart(chart, steps);
    steps.charts.push(drawn);
    byId("charts").append(drawn.figure);
  }
  const longest = Math.max(0, ...data.charts.map((c) => c.lines[0].values.length));
  if (longest > LONG_RUN) byId("smoothing").value = 0.45;
  byId("smoothing").addEventListener("input", drawCurves);
  if (steps.charts.length) drawCurves();
}

showCurves();
