// Links to places on the page.

// #step=40&group=1280&member=1&token=17: a kept group, and the position of a token in a trajectory.
function showLink() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const at = data.groups.findIndex((group) =>
    String(group.step) === wanted.get("step") && String(group.group) === wanted.get("group"));
  if (at < 0) return;
  if (at !== state.chosen) choose(at);
  const member = byId("detail").querySelector(`[data-member="${Number(wanted.get("member"))}"]`);
  if (!wanted.has("token") || !member) return;
  member.open = true;
  if (member.children.length === 1) {
    fill(member);
    colour();
  }
  const token = state.tokens[Number(wanted.get("member"))]?.[Number(wanted.get("token"))];
  if (token) hold(token);
}

function noteLink() {
  const group = data.groups[state.chosen];
  if (!group) return;
  const link = new URLSearchParams({ step: group.step, group: group.group });
  if (state.held) {
    const member = state.tokens.findIndex((tokens) => tokens.includes(state.held));
    link.set("member", member);
    link.set("token", state.tokens[member].indexOf(state.held));
  }
  history.replaceState(null, "", `#${link}`);
}

// Table of the tokens with the largest |log p - log q|, with links to their positions.
function showApart() {
  const head = ["token", "id", "student log p", "teacher log q", "log p − log q", "where"];
  const rows = data.apart.map((token) => {
    const link = new URLSearchParams({
      step: token.step, group: token.group, member: token.member, token: token.place,
    });
    const where = `step ${token.step}, group ${token.group}, trajectory ${token.member}`;
    const cells = [
      token.text === null ? "–" : JSON.stringify(token.text), String(token.id),
      fixed(token.student), fixed(token.teacher), fixed(token.student - token.teacher),
      make("a", { href: `#${link}` }, where),
    ];
    return make("tr", {}, ...cells.map((cell) => make("td", {}, cell)));
  });
  fillTable("apart", head, rows);
}

// Table of the tokens with the largest shares of a whole step's KL, whether kept or not.
function showShares() {
  const { step, rows } = data.by_share;
  byId("by-share-title").textContent = `Tokens with most of the KL of step ${number(step, 6)}`;
  const head = ["token", "id", "sampled", "mean log p − log q", "share of |log p − log q|"];
  fillTable("by-share", head, rows.map((token) => {
    const cells = [
      token.text === null ? "–" : JSON.stringify(token.text), String(token.id),
      number(token.times, 6), fixed(token.mean), `${number(100 * token.share)} %`,
    ];
    return make("tr", {}, ...cells.map((cell) => make("td", {}, cell)));
  }));
}

function fillTable(id, head, rows) {
  byId(`${id}-table`).append(
    make("thead", {}, make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...rows));
  byId(id).hidden = false;
}

if (data.apart.length) showApart();
if (data.by_share) showShares();
if (data.groups.length) {
  showLink();
  addEventListener("hashchange", showLink);
  for (const kind of ["click", "keyup"]) document.addEventListener(kind, noteLink);
}
