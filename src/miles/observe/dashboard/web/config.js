// Config: every option of a run, or the options in which two runs differ.
import { query } from "./api.js";
import { h, replaceContent, table, visible } from "./dom.js";
import { formatValue } from "./format.js";
import { rememberParams } from "./state.js";

export async function showConfig(root, state) {
  if (state.runs.length >= 2) {
    const pair = state.runs.slice(0, 2);
    const { difference } = await query("config", { run: pair });
    const rows = difference.map(([name, first, second]) =>
      h("tr", null, h("th", { scope: "row" }, name), h("td", null, visible(formatValue(first))), h("td", null, visible(formatValue(second)))));
    root.append(h("h2", null, `${difference.length} options differ`), table(["option", visible(pair[0]), visible(pair[1])], rows, { class: "config" }));
    return {};
  }
  const { config } = await query("config", { run: state.runs[0] });
  const search = h("input", { type: "search", value: state.params.get("q") || "", placeholder: "option or value …  (/)", "aria-label": "Search options" });
  const holder = h("div", null);
  root.append(h("div", { class: "controls" }, search), holder);
  const draw = () => {
    const word = search.value.toLowerCase();
    const sections = Object.entries(config).map(([section, values]) => {
      const found = Object.entries(values).filter(([name, value]) => `${name} ${formatValue(value)}`.toLowerCase().includes(word));
      const rows = found.map(([name, value]) => h("tr", null, h("th", { scope: "row" }, name), h("td", null, visible(formatValue(value)))));
      return rows.length ? [h("h3", null, section), table(["option", "value"], rows, { class: "config" })] : null;
    });
    replaceContent(holder, sections);
  };
  search.addEventListener("input", () => {
    rememberParams({ q: search.value });
    draw();
  });
  draw();
  return {};
}
