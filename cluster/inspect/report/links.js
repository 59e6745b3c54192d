// Links say where one is.

// #step=40&group=1280&member=1&token=17: a kept group, and the place of a token in a trajectory.
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

if (data.groups.length) {
  showLink();
  addEventListener("hashchange", showLink);
  for (const kind of ["click", "keyup"]) document.addEventListener(kind, noteLink);
}
