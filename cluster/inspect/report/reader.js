// Actions of the reader: inspection of a token, navigation, keys.

function tokenAt(target) {
  const span = target.closest?.(".t");
  if (!span) return null;
  const member = span.closest(".member").dataset.member;
  return state.tokens[member][span.dataset.token];
}

function showTip(token) {
  const { segment, t, n, turn, span } = token;
  const text = segment.texts ? segment.texts[t] : null;
  const whole = text === null && segment.texts ? "part of the character before it" : text;
  const { version } = data.groups[state.chosen];
  const behind = version - segment.versions[n];
  const facts = [
    ["token id", segment.ids[t]], ["turn", turn], ["place in segment", t],
    ["student log p", fixed(segment.student[n])],
    ["teacher log q", segment.teacher ? fixed(segment.teacher[n]) : null],
    ["KL, log p − log q", segment.teacher ? fixed(gap(segment, n)) : null],
    ["advantage", number(segment.advantages[n], 4)],
    ["bonus", segment.bonuses ? number(segment.bonuses[n], 4) : null],
    ["weight version", behind ? `${segment.versions[n]} (${behind} behind)` : segment.versions[n]],
  ].filter(([, value]) => value !== null);
  const list = make("dl", {}, ...facts.flatMap(([name, value]) =>
    [make("dt", {}, name), make("dd", {}, String(value))]));
  const tip = byId("tip");
  const heading = whole === null ? "" : JSON.stringify(whole);
  tip.replaceChildren(make("code", {}, heading.length > 200 ? `${heading.slice(0, 200)}…` : heading),
    list, ...alternativesTo(token));
  tip.hidden = false;
  placeTip(tip, span.getClientRects()[0] ?? span.getBoundingClientRect());
}

// The teacher's likeliest tokens at a token's position, if the run requested them.
function alternativesTo({ segment, t, n }) {
  if (!segment.top) return [];
  const texts = data.groups[state.chosen].alternatives ?? {};
  const rows = segment.top[n].flatMap(([id, logprob]) => [
    make("dt", id === segment.ids[t] ? { class: "said" } : {},
      texts[id] ? JSON.stringify(texts[id]) : `⟨${id}⟩`),
    make("dd", {}, fixed(logprob)),
  ]);
  return [make("p", { class: "hint" }, "the teacher's likeliest, log q"), make("dl", {}, ...rows)];
}

function placeTip(tip, beside) {
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(beside.left, document.documentElement.clientWidth - width - 8);
  const below = beside.bottom + 6;
  const top = below + height > window.innerHeight ? beside.top - height - 6 : below;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${Math.max(8, top)}px`;
}

function hold(token) {
  release();
  state.held = token;
  token.span.classList.add("held");
  token.span.scrollIntoView({ block: "nearest" });
  showTip(token);
}

function release() {
  state.held?.span.classList.remove("held");
  state.held = null;
  byId("tip").hidden = true;
}

function step(by) {
  const all = state.tokens.flat();
  const at = state.held ? all.indexOf(state.held) + by : 0;
  if (all[at]) hold(all[at]);
}

// One listener per kind of event, for all tokens.

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") return release();
  const { type } = event.target; // type of an input; arrow keys move between radio buttons
  if (["search", "range"].includes(type)) return;
  if (type === "radio" && event.key.startsWith("Arrow")) return;
  const inList = byId("groups").contains(event.target);
  const inDetail = byId("detail").contains(event.target);
  const last = state.order.length;
  const actions = {
    j: () => move(1), k: () => move(-1), "/": () => byId("filter").focus(),
    ...(inList && {
      ArrowDown: () => move(1, true), ArrowUp: () => move(-1, true),
      Home: () => move(-last, true), End: () => move(last, true),
    }),
    ...((inDetail || state.held) && !inList && {
      ArrowRight: () => step(1), ArrowLeft: () => step(-1),
    }),
  };
  const digit = Number(event.key);
  const action = actions[event.key] ?? (digit >= 1 && digit <= MODES.length
    ? () => setMode(digit - 1) : null);
  if (!action || event.target.closest?.(".chart")) return;
  event.preventDefault();
  action();
}

function onDetailClick(event) {
  if (event.target.matches(".more")) {
    event.target.replaceWith(event.target.hiddenText);
    return;
  }
  const token = tokenAt(event.target);
  if (!token || token === state.held) release();
  else hold(token);
}

function listen() {
  const [detail, list] = [byId("detail"), byId("groups")];
  detail.addEventListener("pointerover", (event) => {
    const token = tokenAt(event.target);
    if (token) showTip(token);
    else if (state.held) showTip(state.held);
    else byId("tip").hidden = true;
  });
  detail.addEventListener("pointerleave", () => {
    if (!state.held) byId("tip").hidden = true;
  });
  detail.addEventListener("click", onDetailClick);
  detail.addEventListener("toggle", (event) => {
    if (event.target.open && event.target.children.length === 1) {
      fill(event.target);
      colour();
    }
  }, true);
  list.addEventListener("click", (event) =>
    choose(Number(event.target.closest("tr").dataset.group), true));
  byId("columns").addEventListener("click", (event) => {
    const column = event.target.dataset.column;
    if (column === undefined) return;
    state.falling = Number(column) === state.sort ? !state.falling : Number(column) > 1;
    state.sort = Number(column);
    showList();
    byId("columns").querySelectorAll("button")[state.sort].focus();
  });
  byId("filter").addEventListener("input", showList);
  byId("modes").addEventListener("change", (event) => setMode(Number(event.target.value)));
  document.addEventListener("keydown", onKey);
  window.addEventListener("scroll", () => {
    if (state.held) showTip(state.held);
    else byId("tip").hidden = true;
  }, { passive: true });
}

if (data.note) {
  byId("rollouts-note").textContent = data.note;
  byId("rollouts-note").hidden = false;
}
if (data.groups.length) {
  byId("rollouts").hidden = false;
  prepareModes();
  showList();
  showGroup();
  listen();
}
