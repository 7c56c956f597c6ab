// Why is it slow: the time of a step by phase, part and cause against the limit of the device, rates, the slowest trajectories, and
// what would help most.
import { query } from "./api.js";
import { Chart } from "./chart.js";
import { h, numberTitle, replaceContent, table, visible } from "./dom.js";
import { formatCount, formatNumber, formatSeconds, formatShare } from "./format.js";
import { linkTo } from "./state.js";

export const PHASE_COLORS = { rollout: "#0072B2", offload: "#56B4E9", train: "#D55E00", publish: "#009E73", evaluate: "#CC79A7", save: "#E69F00", other: "#888888" };
const PHASE_TEXTS = {
  rollout: "waiting for the groups of the batch",
  offload: "handing the device over between trainer and engines",
  train: "the training step",
  publish: "weight update of the engines",
  evaluate: "held-out sets, per step",
  other: "between the phases",
};

const CAUSE_TEXTS = { compute: "matmul peak", memory: "memory bandwidth", link: "bandwidth between devices", beyond: "beyond the limit", waiting: "waiting for generation" };

export async function showTiming(root, state) {
  const charts = [];
  const sections = state.runs.map((run) => {
    const section = h("section", null);
    root.append(section);
    return { run, section, chart: null };
  });
  const refresh = async () => {
    for (const each of sections) {
      const found = await query("time", { run: each.run });
      if (each.chart) each.chart.close();
      const figure = h("figure", { class: "card wide" }, h("figcaption", null, "seconds of each phase over the run"));
      const slowest = await query("slowest", { run: each.run });
      replaceContent(each.section, drawSplit(each.run, found, state), drawSlowest(each.run, slowest, found.groups || {}), found.chart ? figure : null);
      if (found.chart) {
        each.chart = new Chart(figure, { height: 220 });
        each.chart.draw(stackPhases(found.chart));
        charts.push(each.chart);
      }
    }
  };
  await refresh();
  return { refresh, close: () => charts.forEach((chart) => chart.close()) };
}

function drawSplit(run, found, state) {
  if (!found.steps) return h("p", null, visible(run), ": no step is finished yet.");
  const bar = h("div", { class: "split", role: "img", "aria-label": found.phases.map((phase) => `${phase.name} ${formatShare(phase.share)}`).join(", ") },
    found.phases.filter((phase) => phase.share > 0.002).map((phase) => {
      const part = h("span", { title: `${phase.name} ${formatShare(phase.share)}` }, phase.share > 0.07 ? phase.name : "");
      part.style.flexGrow = phase.share;
      part.style.backgroundColor = PHASE_COLORS[phase.name];
      return part;
    }));
  const rows = found.phases.flatMap((phase) => [
    h("tr", null, h("th", { scope: "row" }, phase.name), h("td", null, PHASE_TEXTS[phase.name] || ""), h("td", { class: "number" }, formatSeconds(phase.seconds)), h("td", { class: "number" }, formatShare(phase.share)), ...drawLimit(phase)),
    ...phase.parts.map((part) => h("tr", { class: "part" }, h("td", null, ""), h("td", null, visible(part.name)), h("td", { class: "number" }, formatSeconds(part.seconds)), h("td", { class: "number" }, formatShare(part.seconds / found.seconds_per_step)), ...drawLimit(part))),
  ]);
  const rates = Object.entries(found.rates).map(([name, value]) => h("li", null, describeRate(name, value)));
  const advice = found.advice.map((each) => h("li", null, each.text, " ", h("a", { href: linkTo("docs", state.runs, { page: each.page }) }, each.page)));
  return [
    h("h2", null, visible(run), ": ", formatSeconds(found.seconds_per_step), " per step"),
    h("p", { class: "muted" }, `mean of steps ${found.first_step} to ${found.last_step}`),
    bar,
    advice.length ? [h("h3", null, "What would help most"), h("ol", { class: "advice" }, advice)] : null,
    table(["phase", "", numberTitle("seconds"), numberTitle("share"), numberTitle("limit"), numberTitle("share of the limit")], rows),
    drawLimits(found),
    h("ul", { class: "rates" }, rates),
  ];
}

function drawLimit(row) {
  const known = row.limit !== null && row.limit !== undefined;
  return [h("td", { class: "number" }, known ? formatSeconds(row.limit) : ""), h("td", { class: "number" }, row.of_limit ? formatShare(row.of_limit) : "")];
}

// What each phase could not be shorter than, on this device, for the tokens that the steps had.
function drawLimits(found) {
  const limit = found.limit;
  if (!limit || limit.seconds === null) return h("p", { class: "limit muted" }, `No limit known: ${limit ? limit.why : "there is no step yet"}.`);
  const causes = limit.causes.filter((each) => each.seconds > 0);
  const total = causes.reduce((sum, each) => sum + each.seconds, 0);
  const bar = h("div", { class: "split causes", role: "img", "aria-label": causes.map((each) => `${each.phase}, ${CAUSE_TEXTS[each.cause] || each.cause}: ${formatSeconds(each.seconds)}`).join("; ") },
    causes.filter((each) => each.seconds / total > 0.002).map((each) => {
      const part = h("span", { title: `${each.phase}, ${CAUSE_TEXTS[each.cause] || each.cause}: ${formatSeconds(each.seconds)}` }, each.seconds / total > 0.1 ? each.cause : "");
      part.style.flexGrow = each.seconds / total;
      part.style.backgroundColor = PHASE_COLORS[each.phase];
      part.style.opacity = ["compute", "memory", "link"].includes(each.cause) ? 1 : 0.45;
      return part;
    }));
  const rows = found.phases.flatMap((phase) => [
    ...(phase.limits || []).map((part) => h("tr", null, h("td", null, visible(part.name)), h("td", { class: "number" }, formatSeconds(part.seconds)), h("td", null, describeBounds(part.by_bound)))),
    ...(phase.unknown || []).map((part) => h("tr", null, h("td", null, visible(part.name)), h("td", { class: "number" }, "no limit known"), h("td", null, visible(part.why)))),
  ]);
  const planned = limit.planned ? ` The plan's limit, for ${limit.workload}: ${formatSeconds(limit.planned)}.` : "";
  return h("section", { class: "limit" },
    h("h3", null, `At least ${formatSeconds(limit.seconds)} per step: `, formatShare(limit.of_limit || 0), " of the limit is reached"),
    h("p", { class: "muted" }, visible(`${limit.device}, ${limit.source === "data sheet" ? "peaks of its data sheet" : `peaks ${limit.source}`}; for the tokens that these steps had.${planned}`)),
    bar, table(["part", numberTitle("limit"), "bounded by"], rows));
}

function describeBounds(bounds) {
  const total = Object.values(bounds).reduce((sum, value) => sum + value, 0);
  const names = Object.entries(bounds).sort((a, b) => b[1] - a[1]).map(([name, value]) => (value / total > 0.99 ? CAUSE_TEXTS[name] : `${CAUSE_TEXTS[name]} ${formatShare(value / total)}`));
  return names.join(", ") || "nothing moves";
}

function describeRate(name, value) {
  const [plane, figure] = name.replace("perf/", "").split(/_(.*)/);
  if (name === "straggler_ratio") return `slowest rank: ${value.toFixed(2)} times the others`;
  if (figure === "tflops") return `${plane}: ${formatNumber(value)} TFLOP/s per device`;
  if (figure === "mfu") return `${plane}: ${formatShare(value)} of the device's FLOPs (MFU)`;
  if (figure === "mbu") return `${plane}: ${formatShare(value)} of the memory bandwidth`;
  if (figure === "gb_per_second") return `${plane}: ${formatNumber(value)} GB/s of weights and KV cache read`;
  return `${name}: ${formatCount(value)} tokens per second`;
}

function drawSlowest(run, found, groups) {
  if (!found.generate.length) return null;
  const list = (title, rows, name) => h("section", { class: "slowest" }, h("h3", null, title), table(["trajectory", numberTitle("prompt"), numberTitle("group"), "status", numberTitle("seconds")], rows.map((row) =>
    h("tr", null, h("td", null, h("a", { href: linkTo("trajectory", [run], { step: row.step, index: row.index }) }, `step ${row.step}, number ${row.index}`)),
      h("td", { class: "number" }, row.prompt_id), h("td", { class: "number" }, row.ticket), h("td", null, row.status), h("td", { class: "number" }, formatSeconds(row[name])))), { class: name }));
  const summary = groups.median === undefined ? null
    : h("p", { class: "muted" }, `A group takes ${formatSeconds(groups.median)} (median; 95th percentile ${formatSeconds(groups.p95)}): generation ${formatSeconds(groups.generate)}, grading ${formatSeconds(groups.grade)} for the slowest of its trajectories.`);
  return [h("h3", null, "Groups"), summary, h("div", { class: "panes panes-2" }, list("Slowest to generate", found.generate, "generate_seconds"), list("Slowest to grade", found.grade, "grade_seconds"))];
}

// Lines of cumulated phases, the topmost first, so that the areas below are drawn over it.
function stackPhases(chart) {
  const sums = chart.step.map(() => 0);
  const lines = [];
  for (const [phase, values] of Object.entries(chart.phases)) {
    values.forEach((value, index) => (sums[index] += value || 0));
    lines.push({ x: chart.step, y: [...sums], color: PHASE_COLORS[phase], fill: `${PHASE_COLORS[phase]}55`, label: `up to ${phase}`, error: null });
  }
  return lines.reverse();
}
