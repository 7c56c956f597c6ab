// Overview: the verdict on each run with its reasons, and the curves that show it.
import { query, queryMetrics, querySeries } from "./api.js";
import { Chart, linesFromSeries } from "./chart.js";
import { h, replaceContent, visible } from "./dom.js";
import { formatCount, formatNumber, formatSeconds } from "./format.js";
import { linkTo } from "./state.js";

const GOOD_VERDICTS = ["learning", "learned, now flat"];
const OVERVIEW_CHARTS = ["reward", "eval", "response_length", "entropy"];

export async function showOverview(root, state) {
  const strips = h("div", { class: "strips" });
  const cards = h("div", { class: "cards" });
  root.append(strips, cards);
  const charts = new Map();
  const refresh = async () => {
    const found = await Promise.all(state.runs.map((run) => query("overview", { run })));
    replaceContent(strips, found.map((each) => drawStrip(each, state.runs)));
    await drawOverviewCharts(cards, charts, state);
  };
  await refresh();
  return { refresh, close: () => charts.forEach((chart) => chart.close()) };
}

function drawStrip(found, runs) {
  const { run, verdict, reason, checks } = found;
  const level = GOOD_VERDICTS.includes(verdict) ? "ok" : verdict === "too early" ? "none" : "bad";
  const steps = run.steps ? `${run.step} of ${run.steps} steps` : `${run.step} steps`;
  const best = Object.entries(run.best).map(([name, value]) =>
    h("span", { class: "fact" }, `held-out ${name}: `, h("b", null, formatNumber(value.last)), ` (best ${formatNumber(value.best)} at step ${value.step})`));
  const order = { bad: 0, warn: 1, ok: 2, none: 3 };
  const sorted = [...checks].sort((a, b) => order[a.level] - order[b.level]);
  return h("section", { class: "strip" },
    h("div", { class: `verdict ${level}` },
      h("h2", null, verdict),
      h("p", { class: "reason" }, reason),
      h("p", { class: "facts" },
        h("span", { class: "fact" }, visible(run.name), `, ${run.status}, ${steps}`),
        h("span", { class: "fact" }, `${formatCount(run.tokens)} tokens sampled in ${formatSeconds(run.hours * 3600)}`), best)),
    h("ul", { class: "checks" }, sorted.map((check) => drawCheck(check, run.name, runs))));
}

function drawCheck(check, run, runs) {
  const title = check.metric
    ? h("a", { href: linkTo("curves", runs, { q: check.metric }) }, check.name) : h("span", null, check.name);
  return h("li", { class: `check ${check.level}` },
    h("div", null, h("i", { class: "light", "aria-label": check.level }), title, h("b", null, check.value)),
    h("p", { class: "muted" }, check.threshold),
    check.level === "ok" ? null : h("p", null, check.cure, " "),
    check.level === "ok" ? null : h("a", { href: linkTo("docs", [run], { page: check.page }) }, check.page));
}

async function drawOverviewCharts(cards, charts, state) {
  const metrics = await queryMetrics(state.runs);
  const names = metrics.map((metric) => metric.name);
  for (const wanted of OVERVIEW_CHARTS) {
    const chosen = wanted === "eval" ? names.filter((name) => /^eval\/.*\/reward$/.test(name)) : names.filter((name) => name === wanted);
    if (!chosen.length) continue;
    const found = await querySeries(state.runs, chosen, 0, { points: 400 });
    if (!charts.has(wanted)) {
      const card = h("figure", { class: "card" }, h("figcaption", null, wanted === "eval" ? "held-out reward" : wanted));
      cards.append(card);
      charts.set(wanted, new Chart(card, { height: 160 }));
    }
    const label = (series) => (state.runs.length > 1 || chosen.length > 1 ? visible(`${series.run} ${chosen.length > 1 ? series.name : ""}`) : "");
    charts.get(wanted).draw(linesFromSeries(found, state.runs, "step", label));
  }
}
