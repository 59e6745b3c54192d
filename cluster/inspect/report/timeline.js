// Timeline: lanes of marks, and charts over the same time. `t` and `seconds` are in seconds.

const [LANE_HEIGHT, LANE_LEFT, LANE_WIDTH] = [22, 96, 1100];
const UNITS = [[1, "s", 300], [60, "min", 3 * 3600], [3600, "h", Infinity]];

function makeTime({ seconds, lanes }) {
  const last = Math.max(seconds, 1);
  const [unit, name] = UNITS.find(([, , below]) => last < below);
  const time = makeAxis(last, unit, (place) => `${number(place / unit)} ${name}`);
  const marked = lanes.filter(({ title }) => ["deaths", "rewinds"].includes(title));
  time.events = marked.flatMap((lane) => lane.marks.map((mark) => mark.t));
  return time;
}

function makeLanes(lanes, time) {
  const height = TOP + lanes.length * LANE_HEIGHT + BOTTOM;
  const frame = { width: LANE_WIDTH, height, left: LANE_LEFT };
  const counted = lanes.map(({ title, marks }) => `${title}: ${marks.length}`).join("; ");
  const svg = shape("svg", {
    viewBox: `0 0 ${LANE_WIDTH} ${height}`, role: "img", tabindex: 0, "aria-label": counted,
  });
  svg.style.aspectRatio = `${LANE_WIDTH} / ${height}`;
  const legend = make("div", { class: "legend-line" });
  const where = make("output");
  const figure = make("figure", { class: "chart lanes" },
    make("figcaption", {}, make("span", {}, "What happened"), where), legend, svg);
  drawPlaces(svg, time, frame, 10);
  lanes.forEach((lane, i) => drawLane(svg, lane, i, xOf(time, frame)));
  const moveCross = addCross(svg, time, frame);
  const read = (place) => {
    moveCross(place);
    where.textContent = time.format(place ?? time.last);
    legend.replaceChildren(...lanes.map((lane, i) => laneEntry(lane, i, place ?? time.last)));
  };
  listenTo(svg, time, frame);
  return { figure, read };
}

function drawLane(svg, lane, index, x) {
  const middle = TOP + (index + 0.5) * LANE_HEIGHT;
  svg.append(
    shape("line", { class: "grid", x1: LANE_LEFT, x2: LANE_WIDTH - RIGHT, y1: middle, y2: middle }),
    shape("text", { x: LANE_LEFT - 8, y: middle + 4, "text-anchor": "end" }, lane.title));
  // A bar as long as the event, with a visible minimum.
  const bars = lane.marks.map(({ t, seconds }) => {
    const [begin, end] = [x(Math.max(0, t - seconds)), x(t)];
    return `M${begin.toFixed(1)} ${middle - 6}h${Math.max(2.5, end - begin).toFixed(1)}v12H${begin.toFixed(1)}z`;
  });
  svg.append(shape("path", { class: "marks", fill: `var(--s${index % 6})`, d: bars.join("") }));
}

// Number of marks up to a time, and the last of them.
function laneEntry(lane, index, place) {
  const past = lane.marks.filter((mark) => mark.t <= place);
  const swatch = make("span", { class: "swatch" });
  swatch.style.borderTopColor = `var(--s${index % 6})`;
  const latest = make("span", { class: "label" }, past.at(-1)?.text ?? "");
  return make("span", {}, swatch, lane.title, make("b", {}, number(past.length)), latest);
}

// All marks as text, except pushes, which are as many as steps.
function showHappened(lanes, time) {
  const rows = lanes.filter(({ title }) => title !== "weight pushes")
    .flatMap(({ title, marks }) => marks.map((mark) => ({ title, ...mark })))
    .sort((a, b) => a.t - b.t);
  const cell = (text) => make("td", {}, text);
  byId("happened").append(...rows.map(({ title, t, text, why }) =>
    make("tr", {}, cell(time.format(t)), cell(title), cell(text), cell(why))));
  byId("happened-title").textContent = rows.length === 1 ? "1 event, as text" : `${number(rows.length, 6)} events, as text`;
  byId("happened").closest("details").hidden = rows.length === 0;
}

function showTimeline({ seconds, lanes, charts }) {
  const time = makeTime({ seconds, lanes });
  if (lanes.length) time.charts.push(makeLanes(lanes, time));
  for (const chart of charts) {
    const drawn = makeChart(chart, time);
    drawn.draw(0);
    time.charts.push(drawn);
  }
  byId("time-charts").append(...time.charts.map((chart) => chart.figure));
  showHappened(lanes, time);
  readAll(time, null);
  byId("timeline").hidden = false;
}

if (data.timeline) showTimeline(data.timeline);
