// Entry of the dashboard: header, choice of runs, views by address, live updates, keyboard, theme.
import { isReport, query, watchRuns } from "./api.js";
import { runColor } from "./chart.js";
import { showCluster } from "./cluster.js";
import { showConfig } from "./config.js";
import { showCurves } from "./curves.js";
import { button, h, replaceContent, visible } from "./dom.js";
import { showOverview } from "./overview.js";
import { showReading } from "./reading.js";
import { showRuns } from "./runs.js";
import { linkTo, readState } from "./state.js";
import { showTimeline } from "./timeline.js";
import { showTiming } from "./timing.js";
import { showTrajectory } from "./trajectory.js";

const VIEWS = [
  ["overview", "Overview", showOverview],
  ["curves", "Curves", showCurves],
  ["timing", "Why slow", showTiming],
  ["timeline", "Timeline", showTimeline],
  ["reading", "Reading", showReading],
  ["cluster", "Cluster", showCluster],
  ["config", "Config", showConfig],
  ["runs", "Runs", showRuns],
];
const HIDDEN_VIEWS = { trajectory: showTrajectory, docs: showDocs };
const page = { current: null, runs: [], number: 0 };

function setStatus(text) {
  document.getElementById("status").textContent = text;
}

async function loadRuns() {
  page.runs = (await query("runs")).runs;
}

// The runs that are looked at: those of the address, or the one that changed last.
function chosenRuns(state) {
  const known = new Set(page.runs.map((run) => run.name));
  const chosen = state.runs.filter((name) => known.has(name));
  if (chosen.length) return chosen;
  if (isReport) return page.runs.map((run) => run.name);
  const newest = [...page.runs].sort((a, b) => b.changed - a.changed)[0];
  return newest ? [newest.name] : [];
}

function shownRows() {
  const names = chosenRuns(readState());
  return page.runs.filter((run) => names.includes(run.name));
}

function drawHeader(state, runs) {
  const links = VIEWS.map(([name, label], index) =>
    h("a", { href: linkTo(name, runs), "aria-current": name === state.view ? "page" : null, title: `key ${index + 1}` }, label));
  const chips = runs.map((name, index) => {
    const dot = h("i", { class: "swatch" });
    dot.style.backgroundColor = runColor(index);
    const status = page.runs.find((run) => run.name === name)?.status || "";
    const others = runs.filter((other) => other !== name);
    const remove = others.length
      ? h("a", { href: linkTo(state.view, others), "aria-label": `Hide ${name}`, class: "remove" }, "×") : null;
    return h("span", { class: "chip" }, dot, visible(name), h("span", { class: `status ${status.replace(" ", "-")}` }, status), remove);
  });
  const rest = page.runs.filter((run) => !runs.includes(run.name));
  const picker = rest.length
    ? h("select", { "aria-label": "Add a run", onchange: (event) => (location.hash = linkTo(state.view, [...runs, event.target.value])) },
      h("option", { value: "" }, "add a run …"), rest.map((run) => h("option", { value: run.name }, visible(run.name))))
    : null;
  replaceContent(document.getElementById("header"),
    h("div", { class: "bar" }, h("strong", null, "Miles"), h("nav", { "aria-label": "Views" }, links),
      button("◐", toggleTheme, { "aria-label": "Light or dark", title: "key d" })),
    h("div", { class: "bar runs" }, chips, picker));
}

async function showPage() {
  const number = (page.number += 1);
  const state = readState();
  const root = h("div", { class: `view ${state.view}` });
  try {
    if (!page.runs.length || state.runs.some((name) => !page.runs.find((run) => run.name === name))) await loadRuns();
    const runs = chosenRuns(state);
    const show = VIEWS.find(([name]) => name === state.view)?.[2] || HIDDEN_VIEWS[state.view];
    if (number !== page.number) return;
    closeCurrent();
    drawHeader(state, runs);
    replaceContent(document.getElementById("content"), root);
    document.title = `Miles: ${state.view} ${runs[0] || ""}`;
    if (!show) throw new Error(`There is no view ${state.view}.`);
    const shown = (await show(root, { ...state, runs, allRuns: page.runs })) || {};
    if (number === page.number) page.current = shown;
    else if (shown.close) shown.close();
  } catch (error) {
    if (number !== page.number) return;
    replaceContent(document.getElementById("content"), h("p", { class: "problem", role: "alert" }, visible(error.message)));
  }
  root.setAttribute("data-ready", "1");
}

function closeCurrent() {
  if (page.current && page.current.close) page.current.close();
  page.current = null;
}

async function refreshPage() {
  await loadRuns();
  const state = readState();
  drawHeader(state, chosenRuns(state));
  if (page.current && page.current.refresh) await page.current.refresh(page.runs);
}

async function showDocs(root, { params }) {
  const [name, anchor] = (params.get("page") || "").split("#");
  const { text } = await query("docs", { page: name });
  const parts = text.split(/^(?=#+ )/m).map((part) => {
    const id = part.split("\n")[0].replace(/^#+ /, "").toLowerCase().replace(/[^\w\- ]/g, "").trim().replace(/ /g, "-");
    return h("pre", { class: "docs", "data-anchor": id }, part);
  });
  replaceContent(root, parts);
  if (anchor) root.querySelector(`[data-anchor="${CSS.escape(anchor)}"]`)?.scrollIntoView();
}

// -- theme and keyboard

function toggleTheme() {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  setTheme(dark ? "light" : "dark");
  showPage();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("miles-theme", theme);
  } catch {
    // A page opened from a file may have no storage.
  }
}

function restoreTheme() {
  try {
    const theme = localStorage.getItem("miles-theme");
    if (theme) document.documentElement.dataset.theme = theme;
  } catch {
    // as above
  }
}

function pressKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const view = VIEWS[Number(event.key) - 1];
  if (view) {
    location.hash = linkTo(view[0], chosenRuns(readState()));
  } else if (event.key === "d") {
    toggleTheme();
  } else if (event.key === "/") {
    const search = document.querySelector("input[type=search]");
    if (search) {
      event.preventDefault();
      search.focus();
    }
  } else if (page.current && page.current.pressKey) {
    page.current.pressKey(event);
  }
}

restoreTheme();
addEventListener("hashchange", showPage);
addEventListener("keydown", pressKey);
watchRuns(shownRows, refreshPage, (error) => setStatus(error ? error.message : ""));
showPage();
