// The chosen group: its trajectories, segments and turns, with one colour per token. `n` is an
// index among the sampled tokens of a segment, as in the lists of log-probs; `t` among all of its
// tokens.

// Number of tokens that are drawn immediately; others are drawn when their trajectory is opened.
const OPEN_TOKENS = 12000;
// Number of characters that are shown of the beginning and of the end of a longer observation.
const [LONG, FROM_START, FROM_END] = [2400, 900, 500];
const OPAQUE = 0.62;

function showGroup() {
  release();
  const group = data.groups[state.chosen];
  const facts = [
    ["step", number(group.step, 6)], ["group", String(group.group)],
    ["trained from version", String(group.version)], ["T", number(group.temperature)],
    ["teacher", group.teacher], ["sampled by", group.by_teacher ? "the teacher" : ""],
    ["student log p", group.as_text ? "unknown: an endpoint gave text" : ""],
    ["tag", group.tag], ["source", group.source],
    ["answer", group.answer],
    ["mean KL", fixed(summaries[state.chosen].kl)],
    ...Object.entries(group.metrics).map(([name, value]) => [name, number(value)]),
  ].filter(([, value]) => value);
  const head = make("p", { class: "group-head" }, ...facts.flatMap(([name, value], i) =>
    [i ? " · " : "", `${name} `, make("b", {}, value)]));
  state.tokens = group.members.map(() => []);
  let room = OPEN_TOKENS;
  const members = group.members.map((member, m) => {
    const element = make("details", { class: "member", "data-member": m }, memberHead(member, m));
    element.open = m === 0 || room > 0;
    if (element.open) fill(element);
    room -= member.segments.reduce((sum, s) => sum + s.ids.length - s.prompt, 0);
    return element;
  });
  byId("detail").replaceChildren(head, ...sharedPrompt(group), ...members);
  colour();
}

// The prompt that all members share, shown once; `fill` omits it.
function sharedPrompt(group) {
  const first = group.members[0]?.segments[0];
  if (!first?.prompt) return [];
  return [make("section", { class: "member" }, observedRun(first, 0, first.prompt, 0))];
}

function memberHead(member, m) {
  const kls = everyValue([{ members: [member] }], gap);
  const advantages = everyValue([{ members: [member] }], (s, n) => s.advantages[n]);
  const turns = member.segments.reduce((sum, segment) => sum + segment.actions.length, 0);
  const facts = [
    ["reward", number(member.reward)], ["stop", member.stop], ["turns", turns],
    ["segments", member.segments.length], ["tokens", number(advantages.length, 6)],
    ["mean KL", fixed(mean(kls))],
    ...(advantages.some(Boolean) ? [["mean advantage", fixed(mean(advantages))]] : []),
    ["versions", versionsOf(member.segments.flatMap((segment) => segment.versions))],
    ...Object.entries(member.metrics).map(([name, value]) => [name, number(value)]),
  ];
  return make("summary", {}, make("b", {}, `Trajectory ${m}`),
    ...facts.flatMap(([name, value]) => [` · ${name} `, make("b", {}, String(value))]));
}

function versionsOf(versions) {
  const distinct = [...new Set(versions)].sort((a, b) => a - b);
  return distinct.length > 2 ? `${distinct[0]} to ${distinct.at(-1)}` : distinct.join(", ");
}

function fill(element) {
  const m = Number(element.dataset.member);
  const { segments } = data.groups[state.chosen].members[m];
  let turn = 0;
  segments.forEach((segment, s) => {
    const block = make("section", { class: "segment" });
    if (segments.length > 1) {
      const why = s ? ": the history was rewritten here" : "";
      block.append(make("p", { class: "segment-head" },
        `Segment ${s + 1} of ${segments.length}${why}`));
    }
    let [t, n] = [segment.prompt, 0];
    for (const [start, stop] of segment.actions) {
      if (start > t) block.append(observedRun(segment, t, start, s));
      turn += 1;
      block.append(sampledRun(segment, start, stop, n, turn, m));
      n += stop - start;
      t = stop;
    }
    if (t < segment.ids.length) block.append(observedRun(segment, t, segment.ids.length, s));
    element.append(block);
  });
}

function run(kind, title, lines, text) {
  const head = make("div", { class: "run-head" }, make("b", {}, title),
    ...lines.flatMap((line, i) => (i ? [make("br"), line] : [line])));
  return make("div", { class: `run ${kind}` }, head, text);
}

function observedRun(segment, start, stop, s) {
  const title = start > 0 ? "observed" : s ? "history" : "prompt";
  const special = new Set(segment.special);
  const pieces = [];
  let plain = "";
  for (let t = start; t < stop; t++) {
    const text = shown(segment, t);
    if (!special.has(t) && text.kind !== "special") {
      plain += text.kind === "rest" ? "" : text.text;
      continue;
    }
    pieces.push(...abridged(plain), make("span", { class: "special" }, text.text));
    plain = "";
  }
  pieces.push(...abridged(plain));
  const text = make("div", { class: "text" }, ...pieces);
  return run("observed", title, [`${number(stop - start, 6)} tokens`], text);
}

// The text, or its beginning and end with a button that shows the rest.
function abridged(text) {
  if (text.length <= LONG) return text ? [text] : [];
  const [head, hidden, tail] = [
    text.slice(0, FROM_START), text.slice(FROM_START, -FROM_END), text.slice(-FROM_END),
  ];
  const button = make("button", { type: "button", class: "more" },
    `show ${number(hidden.length, 6)} more characters`);
  button.hiddenText = hidden;
  return [head, button, tail];
}

function sampledRun(segment, start, stop, n, turn, m) {
  const special = new Set(segment.special);
  const text = make("div", { class: "text" });
  const tokens = state.tokens[m];
  for (let t = start; t < stop; t++, n++) {
    const { text: said, kind } = shown(segment, t);
    const style = special.has(t) || kind === "special" ? "t special" : kind === "rest" ? "t rest" : "t";
    const span = make("span", { class: style, "data-token": tokens.length }, said);
    tokens.push({ span, segment, t, n, turn, m });
    text.append(span);
  }
  const here = Array.from({ length: stop - start }, (_, i) => n - (stop - start) + i);
  const versions = versionsOf(here.map((each) => segment.versions[each]));
  const lines = [`${number(stop - start, 6)} tokens, v${versions}`];
  if (segment.teacher) lines.unshift(`mean KL ${fixed(mean(here.map((each) => gap(segment, each))))}`);
  return run("sampled", `turn ${turn}`, lines, text);
}

// Text shown for a token. Invisible characters, and those that move text, are made visible.
function shown(segment, t) {
  if (!segment.texts) return { text: `${segment.ids[t]} `, kind: "" };
  const text = segment.texts[t];
  if (text === null) return { text: "‥", kind: "rest" };
  if (text === "") return { text: `⟨${segment.ids[t]}⟩`, kind: "special" };
  return { text: visible(text), kind: "" };
}

function visible(text) {
  return text.replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t").replace(
    // eslint-disable-next-line no-control-regex
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
    (c) => `⟨U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

// Colours.

function shade(mode, value) {
  if (value === null) return "";
  const share = Math.min(1, Math.abs(value) / mode.scale);
  const colour = value < 0 ? mode.low : mode.high;
  return share < 0.02 ? "" : `rgb(var(${colour}) / ${(OPAQUE * share ** 0.7).toFixed(3)})`;
}

function versionShades() {
  const versions = new Set(segmentsOf(data.groups[state.chosen]).flatMap((s) => s.versions));
  const sorted = [...versions].sort((a, b) => a - b);
  return new Map(sorted.map((version, i) =>
    [version, `color-mix(in srgb, var(--s${i % 6}) 38%, transparent)`]));
}

function colour() {
  const mode = MODES[state.mode];
  const ofVersion = mode.ends ? null : versionShades();
  for (const token of state.tokens.flat()) {
    const value = mode.value(token.segment, token.n);
    token.span.style.backgroundColor = ofVersion ? ofVersion.get(value) : shade(mode, value);
  }
  showLegend(mode, ofVersion);
}

function showLegend(mode, ofVersion) {
  const legend = byId("legend");
  if (ofVersion) {
    legend.replaceChildren(make("span", {}, "sampled by version"), ...[...ofVersion].map(([version, background]) => {
      const chip = make("span", { class: "chip" }, String(version));
      chip.style.backgroundColor = background;
      return chip;
    }));
    return;
  }
  const ramp = make("span", { class: "ramp", "aria-hidden": "true" });
  const stops = [-1, -0.5, -0.2, 0, 0.2, 0.5, 1];
  const oneSided = mode.name === "log-prob";
  const values = oneSided ? stops.filter((share) => share <= 0) : stops;
  ramp.style.backgroundImage = `linear-gradient(to right, ${values.map((share) =>
    shade(mode, share * mode.scale) || "transparent").join(", ")})`;
  const most = oneSided ? "0" : `+${number(mode.scale)}`;
  legend.replaceChildren(
    make("span", {}, `${mode.ends[0]} ${number(-mode.scale)}`), ramp,
    make("span", {}, `${most} ${mode.ends[1]}`),
    make("span", {}, mode.hint && `(${mode.hint})`));
}

function setMode(index) {
  if (!MODES[index]?.known) return;
  state.mode = index;
  byId("modes").querySelectorAll("input")[index].checked = true;
  colour();
}
