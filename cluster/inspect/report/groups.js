// Kept groups: a summary of each, the list, and the values by which their tokens are coloured.

// The data has a prompt that all members share only once.
for (const group of data.groups) {
  for (const segment of group.members.flatMap((member) => member.segments)) {
    if (!segment.prompt) continue;
    segment.ids = [...group.prompt.ids, ...segment.ids];
    if (segment.texts) segment.texts = [...group.prompt.texts, ...segment.texts];
  }
}

const gap = (segment, n) => (segment.teacher ? segment.student[n] - segment.teacher[n] : null);
const MODES = [
  { name: "KL", value: gap, high: "--high", low: "--low",
    ends: ["teacher likelier", "student likelier"],
    hint: "log p − log q, nats" },
  { name: "advantage", value: (s, n) => s.advantages[n], high: "--low", low: "--high",
    ends: ["discouraged", "encouraged"], hint: "" },
  { name: "log-prob", value: (s, n) => s.student[n], high: "--low", low: "--depth",
    ends: ["unlikely", "certain"], hint: "student, nats" },
  { name: "bonus", value: (s, n) => (s.bonuses ? s.bonuses[n] : null), high: "--low",
    low: "--high", ends: ["costs", "pays"], hint: "" },
  { name: "version", value: (s, n) => s.versions[n] },
];
const COLUMNS = [
  ["step", (s) => s.step], ["group", (s) => s.group], ["reward", (s) => s.reward],
  ["KL", (s) => s.kl], ["tokens", (s) => s.tokens], ["tag", (s) => s.tag],
];
const state = {
  order: [], sort: 0, falling: false, chosen: 0, mode: 0, tokens: [], held: null,
};

const segmentsOf = (group) => group.members.flatMap((member) => member.segments);

function everyValue(groups, value) {
  const found = [];
  for (const group of groups) {
    for (const segment of segmentsOf(group)) {
      for (let n = 0; n < segment.student.length; n++) {
        const each = value(segment, n);
        if (each !== null) found.push(each);
      }
    }
  }
  return found;
}

function summaryOf(group) {
  const rewards = group.members.map((member) => member.reward);
  return {
    step: group.step, group: group.group, reward: mean(rewards), rewards,
    kl: mean(everyValue([group], gap)),
    tokens: segmentsOf(group).reduce((sum, segment) => sum + segment.student.length, 0),
    tag: group.tag ?? (group.source || group.teacher),
  };
}

const summaries = data.groups.map(summaryOf);

// One scale for all groups, which covers 98 % of the tokens.
function scaleOf(mode) {
  const sizes = Float64Array.from(everyValue(data.groups, mode.value), Math.abs)
    .filter((size) => size > 0).sort();
  const size = sizes.length ? sizes[Math.floor(0.98 * (sizes.length - 1))] : 0;
  return Number(size.toPrecision(2)) || 1;
}

function prepareModes() {
  for (const mode of MODES) {
    mode.known = everyValue(data.groups, mode.value).length > 0;
    if (mode.ends && mode.known) mode.scale = scaleOf(mode);
  }
  state.mode = Math.max(0, MODES.findIndex((mode) => mode.known));
  byId("modes").append(...MODES.map((mode, i) => {
    const input = make("input", { type: "radio", name: "mode", value: i });
    input.checked = i === state.mode;
    input.disabled = !mode.known;
    return make("label", mode.known ? {} : { title: "this run has none" }, input, mode.name);
  }));
}

// List of groups.

function searchText(i) {
  const { tag, source, teacher, members } = data.groups[i];
  const texts = members.map((member) =>
    `${member.stop}\n${member.segments.map((s) => (s.texts ?? s.ids).join("")).join("\n")}`);
  return `${tag ?? ""}\n${source}\n${teacher}\n${texts.join("\n")}`.toLowerCase();
}

function orderGroups() {
  const wanted = byId("filter").value.trim().toLowerCase();
  const key = COLUMNS[state.sort][1];
  const indices = summaries.map((_, i) => i).filter((i) => {
    if (!wanted) return true;
    summaries[i].search ??= searchText(i);
    return summaries[i].search.includes(wanted);
  });
  indices.sort((a, b) => compare(key(summaries[a]), key(summaries[b])) || a - b);
  state.order = state.falling ? indices.reverse() : indices;
}

function compare(a, b) {
  if (typeof a === "string" || typeof b === "string") return String(a).localeCompare(String(b));
  return (a ?? -Infinity) - (b ?? -Infinity) || 0;
}

function showList() {
  orderGroups();
  byId("columns").replaceChildren(...COLUMNS.map(([name], i) => {
    const sorted = i === state.sort;
    const arrow = sorted ? (state.falling ? " ▾" : " ▴") : "";
    const direction = state.falling ? "descending" : "ascending";
    return make("th", { scope: "col", "aria-sort": sorted ? direction : "none" },
      make("button", { type: "button", "data-column": i }, name + arrow));
  }));
  byId("groups").replaceChildren(...state.order.map((i) => {
    const s = summaries[i];
    const rewards = s.rewards.map((reward) => number(reward)).join(", ");
    const row = make("tr", { "data-group": i }, make("td", {}, number(s.step, 6)),
      make("td", {}, String(s.group)), make("td", { title: `rewards: ${rewards}` }, number(s.reward)),
      make("td", {}, number(s.kl)), make("td", {}, number(s.tokens, 6)),
      make("td", { title: s.tag }, s.tag));
    return row;
  }));
  const those = data.groups.length < data.kept ? `, of ${data.kept} that were kept` : "";
  byId("listed").textContent = `${state.order.length} of ${data.groups.length} groups${those}`;
  markChosen();
}

function markChosen() {
  const rows = [...byId("groups").rows];
  const inList = state.order.includes(state.chosen);
  rows.forEach((row, i) => {
    const chosen = Number(row.dataset.group) === state.chosen;
    row.setAttribute("aria-selected", chosen);
    row.tabIndex = chosen || (!inList && i === 0) ? 0 : -1;
  });
}

function choose(group, focus) {
  if (group === undefined) return;
  state.chosen = group;
  markChosen();
  const row = byId("groups").querySelector("[aria-selected=true]");
  if (focus) row?.focus({ preventScroll: true });
  row?.scrollIntoView({ block: "nearest" });
  showGroup();
}

function move(by, focus) {
  const at = state.order.indexOf(state.chosen);
  const to = at < 0 ? 0 : Math.min(state.order.length - 1, Math.max(0, at + by));
  choose(state.order[to], focus);
}
