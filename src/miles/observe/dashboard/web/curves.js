// Curves: all metrics, searched, smoothed, against steps, tokens or hours, several runs on one chart.
import { isReport, queryMetrics, querySeries } from "./api.js";
import { axisLabel, Chart, linesFromSeries } from "./chart.js";
import { field, h, replaceContent, select, visible } from "./dom.js";
import { chooseAxis, linkTo, readInteger, rememberParams } from "./state.js";

const FIRST_METRICS = ["reward", "response_length", "zero_std_ratio", "truncated_ratio", "entropy", "kl", "loss", "grad_norm", "parity_mean_abs", "staleness"];
const CURVE_POINTS = 1000;

export async function showCurves(root, state) {
  const view = new CurvesView(root, state);
  await view.loadNames();
  view.drawControls();
  view.layOut();
  return { refresh: () => view.refresh(), close: () => view.close() };
}

class CurvesView {
  constructor(root, state) {
    this.state = state;
    this.axis = chooseAxis(state.params);
    this.smooth = readInteger(state.params, "smooth", 0);
    this.search = state.params.get("q") || "";
    this.controls = h("form", { class: "controls", onsubmit: (event) => event.preventDefault() });
    this.grid = h("div", { class: "cards" });
    root.append(this.controls, this.grid);
    this.cards = new Map();
    this.observer = new IntersectionObserver((entries) => this.seeCards(entries), { rootMargin: "300px" });
  }

  async loadNames() {
    this.metrics = await queryMetrics(this.state.runs);
  }

  drawControls() {
    const search = h("input", { type: "search", value: this.search, placeholder: "reward, eval, seconds …  (/)", "aria-label": "Search metrics" });
    search.addEventListener("input", () => this.change({ search: search.value }));
    const smooth = h("input", { type: "range", min: 0, max: 100, value: this.smooth, "aria-label": "Smoothing" });
    const amount = h("output", null, this.smooth);
    smooth.addEventListener("input", () => {
      amount.textContent = smooth.value;
      this.change({ smooth: Number(smooth.value) });
    });
    const axes = ["step", "tokens", "hours"].map((axis) => [axis, axis]);
    const difference = this.state.runs.length === 2
      ? h("a", { href: linkTo("config", this.state.runs) }, "difference of their configs") : null;
    replaceContent(this.controls, field("metrics", search), field("against", select(axes, this.axis, (axis) => this.change({ axis }), "Horizontal axis")),
      field("smoothing", h("span", null, smooth, amount)), difference);
  }

  change(settings) {
    Object.assign(this, settings);
    rememberParams({ q: this.search, x: this.axis === "step" ? null : this.axis, smooth: this.smooth || null });
    if ("search" in settings) {
      this.layOut();
    } else {
      this.cards.forEach((card) => (card.series = null));
      this.drawSeen();
    }
  }

  // Metrics that every word of the search is part of, the usual ones first.
  chosenMetrics() {
    const words = this.search.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.metrics.filter(({ name, meaning }) => words.every((word) => name.includes(word) || meaning.toLowerCase().includes(word)));
    const rank = ({ name }) => {
      if (/^eval\/.*\/reward$/.test(name)) return 0.5;
      const place = FIRST_METRICS.indexOf(name);
      return place >= 0 ? place : name.startsWith("seconds/") ? 1000 : name.startsWith("eval/") ? 100 : 500;
    };
    return found.sort((a, b) => rank(a) - rank(b) || a.name.localeCompare(b.name));
  }

  layOut() {
    const wanted = this.chosenMetrics();
    const names = new Set(wanted.map((metric) => metric.name));
    this.cards.forEach((card, name) => {
      if (!names.has(name)) this.removeCard(name);
    });
    const elements = wanted.map((metric) => (this.cards.get(metric.name) || this.addCard(metric)).element);
    replaceContent(this.grid, elements.length ? elements : h("p", null, "No metric matches."));
  }

  addCard({ name, unit, meaning }) {
    const element = h("figure", { class: "card", "data-metric": name },
      h("figcaption", { title: meaning }, visible(name), unit ? h("span", { class: "muted" }, ` ${unit}`) : null));
    const card = { name, element, chart: null, series: null, isSeen: false };
    this.cards.set(name, card);
    this.observer.observe(element);
    return card;
  }

  removeCard(name) {
    const card = this.cards.get(name);
    this.observer.unobserve(card.element);
    if (card.chart) card.chart.close();
    this.cards.delete(name);
  }

  seeCards(entries) {
    for (const entry of entries) {
      const card = [...this.cards.values()].find((each) => each.element === entry.target);
      if (card) card.isSeen = entry.isIntersecting;
    }
    this.drawSeen();
  }

  async drawSeen() {
    const waiting = [...this.cards.values()].filter((card) => card.isSeen && !card.series);
    for (const card of waiting) card.series = [];
    for (let start = 0; start < waiting.length; start += 8) {
      const part = waiting.slice(start, start + 8);
      const found = await querySeries(this.state.runs, part.map((card) => card.name), this.smooth, { points: CURVE_POINTS });
      for (const card of part) {
        card.series = found.filter((series) => series.name === card.name);
        this.drawCard(card);
      }
    }
  }

  drawCard(card) {
    if (!this.cards.has(card.name)) return;
    const open = (x) => this.openStep(x);
    card.chart ||= new Chart(card.element, { height: 190, group: "curves", onClick: open });
    const label = (series) => (this.state.runs.length > 1 ? visible(series.run) : "");
    card.chart.draw(linesFromSeries(card.series, this.state.runs, this.axis, label), axisLabel(this.axis));
  }

  openStep(x) {
    if (this.axis === "step" && x > 0) location.hash = linkTo("reading", this.state.runs, { step: Math.round(x) });
  }

  // New points alone are asked for while a curve has all of its points; smoothing and long curves are asked for again.
  async refresh() {
    if (isReport) return;
    const count = this.metrics.length;
    await this.loadNames();
    if (this.metrics.length !== count) this.layOut();
    for (const card of this.cards.values()) {
      if (!card.isSeen) card.series = null;
    }
    const seen = [...this.cards.values()].filter((card) => card.isSeen && card.series && card.series.length);
    const growing = this.smooth ? [] : seen.filter((card) => card.series.every((series) => series.total < CURVE_POINTS));
    for (const card of seen.filter((each) => !growing.includes(each))) card.series = null;
    await this.appendPoints(growing);
    await this.drawSeen();
  }

  async appendPoints(cards) {
    if (!cards.length) return;
    const known = cards.flatMap((card) => card.series.map((series) => series.last_step ?? -1));
    const since = Math.min(...known);
    const found = await querySeries(this.state.runs, cards.map((card) => card.name), 0, { points: CURVE_POINTS, since });
    for (const card of cards) {
      for (const fresh of found.filter((series) => series.name === card.name)) {
        const series = card.series.find((each) => each.run === fresh.run);
        if (series) extendSeries(series, fresh);
        else card.series.push(fresh);
      }
      this.drawCard(card);
    }
  }

  close() {
    this.observer.disconnect();
    this.cards.forEach((card) => card.chart && card.chart.close());
  }
}

function extendSeries(series, fresh) {
  fresh.step.forEach((step, index) => {
    if (series.last_step !== null && step <= series.last_step) return;
    for (const name of ["step", "tokens", "hours", "y", "error"]) {
      if (series[name] && fresh[name]) series[name].push(fresh[name][index]);
    }
    series.total += 1;
  });
  series.last_step = fresh.last_step;
}
