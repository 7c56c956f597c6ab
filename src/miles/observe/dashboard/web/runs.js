// Runs: a table of all runs below the folder, sorted by any column; the ticked ones are compared.
import { query } from "./api.js";
import { button, h, replaceContent, table, visible } from "./dom.js";
import { formatCount, formatNumber, formatSeconds, formatTime } from "./format.js";
import { linkTo, rememberParams } from "./state.js";

const RUN_COLUMNS = [
  ["name", "run", (run) => run.name],
  ["status", "status", (run) => run.status],
  ["step", "step", (run) => run.step],
  ["reward", "reward", (run) => run.reward],
  ["best", "best held-out", (run) => Math.max(-Infinity, ...Object.values(run.best).map((each) => each.best))],
  ["tokens", "tokens", (run) => run.tokens],
  ["hours", "time", (run) => run.hours],
  ["model", "model", (run) => run.model],
  ["algorithm", "algorithm", (run) => run.algorithm],
  ["started", "started", (run) => run.started],
];

export async function showRuns(root, state) {
  let runs = state.allRuns;
  let sort = state.params.get("sort") || "started";
  let isDescending = state.params.get("order") !== "asc";
  let words = state.params.get("q") || "";
  const chosen = new Set(state.runs);
  const holder = h("div", null);
  const search = h("input", { type: "search", value: words, placeholder: "name, model, status …  (/)", "aria-label": "Search runs" });
  const open = button("Compare the ticked runs", () => (location.hash = linkTo("curves", [...chosen])));
  root.append(h("div", { class: "controls" }, search, open), holder);
  const draw = () => replaceContent(holder, drawTable());
  search.addEventListener("input", () => {
    words = search.value;
    rememberParams({ q: words });
    draw();
  });

  function drawTable() {
    const value = RUN_COLUMNS.find(([name]) => name === sort)?.[2] || RUN_COLUMNS[0][2];
    const shown = runs.filter((run) => words.toLowerCase().split(/\s+/).every((word) => `${run.name} ${run.model} ${run.status} ${run.algorithm}`.toLowerCase().includes(word)));
    shown.sort((a, b) => compareValues(value(a), value(b)) * (isDescending ? -1 : 1));
    const head = [h("th", null, ""), ...RUN_COLUMNS.map(([name, label]) =>
      h("th", { scope: "col", "aria-sort": name === sort ? (isDescending ? "descending" : "ascending") : null }, button(label, () => sortBy(name))))];
    return table(head, shown.map(drawRow), { class: "runs" });
  }

  function sortBy(name) {
    isDescending = name === sort ? !isDescending : true;
    sort = name;
    rememberParams({ sort, order: isDescending ? null : "asc" });
    draw();
  }

  function drawRow(run) {
    const tick = h("input", { type: "checkbox", checked: chosen.has(run.name), "aria-label": `Compare ${run.name}`,
      onchange: (event) => (event.target.checked ? chosen.add(run.name) : chosen.delete(run.name)) });
    const best = Object.entries(run.best).map(([name, each]) => `${name} ${formatNumber(each.best)} at ${each.step}`).join(", ");
    return h("tr", { "data-run": run.name }, h("td", null, tick),
      h("th", { scope: "row" }, h("a", { href: linkTo("overview", [run.name]) }, visible(run.name))),
      h("td", null, h("span", { class: `status ${run.status.replace(" ", "-")}` }, run.status)),
      h("td", { class: "number" }, run.steps ? `${run.step}/${run.steps}` : run.step),
      h("td", { class: "number" }, formatNumber(run.reward)), h("td", null, visible(best)),
      h("td", { class: "number" }, formatCount(run.tokens)), h("td", { class: "number" }, formatSeconds(run.hours * 3600)),
      h("td", null, visible(run.model)), h("td", null, run.algorithm || ""), h("td", null, formatTime(run.started)));
  }

  draw();
  const reload = async () => {
    runs = (await query("runs")).runs;
    draw();
  };
  return { refresh: reload };
}

function compareValues(a, b) {
  if (a === null || a === undefined) return -1;
  if (b === null || b === undefined) return 1;
  return typeof a === "string" ? a.localeCompare(b) : a - b;
}
