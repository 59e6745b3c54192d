// Reloads a served page when the run has written new data.

const LOOK_EVERY_MS = 3000;

async function look() {
  try {
    const answer = await fetch("version", { cache: "no-store" });
    const { version } = await answer.json();
    const typing = byId("filter").value !== "";
    if (version !== data.live && !typing) return location.reload();
    byId("live").textContent = version === data.live ? "live" : "live; there is more: clear the filter";
  } catch {
    byId("live").textContent = "the report is no longer served";
  }
  setTimeout(look, LOOK_EVERY_MS);
}

byId("live").hidden = false;
setTimeout(look, LOOK_EVERY_MS);
