// Cluster: placement, sessions, engines that joined and left, checkpoints, stack dumps of stalls.
import { query } from "./api.js";
import { button, h, replaceContent, table, visible } from "./dom.js";
import { formatTime, formatValue } from "./format.js";

const EVENT_LEVELS = { SaveFailed: "bad", EngineLeft: "warn", RunEnded: "none", RunStarted: "ok", EngineJoined: "ok" };
const PLACEMENT_DEFAULTS = new Set(["null", "[]", "\"{}\"", "\"\""]);

export async function showCluster(root, state) {
  const refresh = async () => {
    const sections = [];
    for (const run of state.runs) {
      const found = await query("events", { run });
      sections.push(h("section", null, h("h2", null, visible(run)), drawPlacement(found.placement), drawEvents(found.events), drawLogs(run, found.logs)));
    }
    replaceContent(root, sections);
  };
  await refresh();
  return { refresh };
}

function drawPlacement(placement) {
  const rows = Object.entries(placement).flatMap(([section, values]) =>
    Object.entries(values).filter(([, value]) => !PLACEMENT_DEFAULTS.has(JSON.stringify(value))).map(([name, value]) =>
      h("tr", null, h("td", { class: "muted" }, section), h("th", { scope: "row" }, name), h("td", null, visible(formatValue(value))))));
  return h("details", null, h("summary", null, "Placement and fault tolerance"), table(["section", "option", "value"], rows));
}

function drawEvents(events) {
  const rows = [...events].reverse().map((event) => {
    const { event: name, time, ...rest } = event;
    const text = Object.entries(rest).map(([key, value]) => `${key} ${formatValue(value)}`).join(", ");
    return h("tr", { class: `event ${EVENT_LEVELS[name] || "none"}` }, h("td", null, formatTime(time)), h("th", { scope: "row" }, visible(String(name))), h("td", null, visible(text)));
  });
  return [h("h3", null, `${events.length} events, the newest first`), table(["time", "event", ""], rows)];
}

function drawLogs(run, logs) {
  if (!logs.length) return null;
  const shown = h("pre", { class: "log" });
  const open = async (name) => (shown.textContent = visible((await query("log", { run, name })).text));
  return [h("h3", null, "Stack dumps of stalls"), h("p", null, logs.map((name) => button(name, () => open(name)))), shown];
}
