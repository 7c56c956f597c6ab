// Line charts with uPlot: several runs on one axis, raw and smoothed, error bars, values under the cursor.
import { cssColor, h } from "./dom.js";
import { formatCount, formatNumber } from "./format.js";

const RUN_COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A6FDF", "#7A7A00"];
const AXIS_LABELS = { step: "step", tokens: "tokens", hours: "hours" };

export function runColor(index) {
  return RUN_COLORS[index % RUN_COLORS.length];
}

export function axisLabel(axis) {
  return AXIS_LABELS[axis];
}

// Turns series of the server into lines: of each the raw points, and the smoothed ones above them.
export function linesFromSeries(found, runs, axis, label) {
  const lines = [];
  for (const series of found) {
    const color = runColor(runs.indexOf(series.run));
    const points = { x: series[axis], color, label: label(series) };
    const few = series.y.length < 60;
    if (series.smooth) {
      lines.push({ ...points, y: series.y, faint: true, label: null, error: null });
      lines.push({ ...points, y: series.smooth, error: null });
    } else {
      lines.push({ ...points, y: series.y, error: series.error || null, dots: few });
    }
  }
  return lines;
}

export class Chart {
  constructor(container, { height = 200, xLabel = "step", group = null, onClick = null } = {}) {
    this.container = container;
    this.settings = { height, xLabel, group, onClick };
    this.legend = h("div", { class: "legend" });
    this.holder = h("div", { class: "plot" });
    container.append(this.holder, this.legend);
    this.plot = null;
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.holder);
  }

  close() {
    this.observer.disconnect();
    if (this.plot) this.plot.destroy();
    this.plot = null;
  }

  resize() {
    const width = Math.floor(this.holder.clientWidth);
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: this.settings.height });
  }

  draw(lines, xLabel = this.settings.xLabel) {
    const usable = lines.filter((line) => line.x.length);
    if (this.plot) this.plot.destroy();
    this.plot = null;
    this.lines = usable;
    if (!usable.length) {
      this.legend.replaceChildren(h("span", { class: "muted" }, "no points"));
      return;
    }
    const data = joinLines(usable);
    const width = Math.max(160, Math.floor(this.holder.clientWidth));
    this.plot = new uPlot(this.options(usable, xLabel, width), data, this.holder);
    this.showLegend(null);
  }

  options(lines, xLabel, width) {
    const text = cssColor("--text");
    const grid = { stroke: cssColor("--grid"), width: 1 };
    const font = "11px system-ui, sans-serif";
    const common = { stroke: text, grid, ticks: grid, font };
    return {
      width,
      height: this.settings.height,
      legend: { show: false },
      cursor: { sync: this.settings.group ? { key: this.settings.group } : undefined, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { range: (_, low, high) => padRange(low, high) } },
      axes: [
        { ...common, label: xLabel, labelSize: 16, labelFont: font, size: 28, values: (_, ticks) => ticks.map(formatCount) },
        { ...common, size: 58, values: (_, ticks) => ticks.map((tick) => formatNumber(tick)) },
      ],
      series: [{}, ...lines.map(seriesOptions)],
      hooks: {
        setCursor: [(plot) => this.showLegend(plot.cursor.idx)],
        draw: [(plot) => drawErrors(plot, lines)],
        ready: [(plot) => this.listen(plot)],
      },
    };
  }

  listen(plot) {
    if (!this.settings.onClick) return;
    plot.over.addEventListener("click", () => {
      if (plot.cursor.idx !== null && plot.cursor.idx !== undefined) this.settings.onClick(plot.data[0][plot.cursor.idx]);
    });
  }

  // Under the chart: each run's newest value, or that under the cursor.
  showLegend(index) {
    if (!this.plot) return;
    const data = this.plot.data;
    const entries = [];
    this.lines.forEach((line, number) => {
      if (line.label === null) return;
      const column = data[number + 1];
      const at = index === null || index === undefined ? lastIndex(column) : nearestIndex(column, index);
      const swatch = h("i", { class: "swatch" });
      swatch.style.backgroundColor = line.color;
      const where = at === null ? "" : ` at ${formatCount(data[0][at])}`;
      const value = at === null ? "–" : formatNumber(column[at]);
      entries.push(h("span", { class: "entry" }, swatch, line.label ? `${line.label} ` : "", h("b", null, value), h("span", { class: "muted" }, where)));
    });
    this.legend.replaceChildren(...entries);
  }
}

function padRange(low, high) {
  if (low === null || high === null) return [0, 1];
  const pad = high > low ? 0.06 * (high - low) : Math.abs(low) * 0.1 || 0.5;
  return [low - pad, high + pad];
}

function seriesOptions(line) {
  return {
    stroke: line.faint ? `${line.color}55` : line.color,
    width: line.faint ? 1 : 1.8,
    spanGaps: true,
    fill: line.fill || undefined,
    points: { show: Boolean(line.dots), size: 5, stroke: line.color, fill: line.color },
  };
}

// One horizontal axis for lines that have points at different places.
export function joinLines(lines) {
  const places = new Set();
  for (const line of lines) for (const x of line.x) if (x !== null) places.add(x);
  const xs = Array.from(places).sort((a, b) => a - b);
  const position = new Map(xs.map((x, index) => [x, index]));
  const columns = lines.map((line) => {
    const column = new Array(xs.length).fill(null);
    line.x.forEach((x, index) => {
      if (x !== null) column[position.get(x)] = line.y[index];
    });
    return column;
  });
  return [xs, ...columns];
}

function drawErrors(plot, lines) {
  const context = plot.ctx;
  const ratio = devicePixelRatio || 1;
  context.save();
  context.beginPath();
  context.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
  context.clip();
  for (const line of lines) {
    if (!line.error) continue;
    context.strokeStyle = `${line.color}66`;
    context.lineWidth = ratio;
    context.beginPath();
    line.x.forEach((x, index) => {
      if (line.y[index] === null || line.error[index] === null) return;
      const place = plot.valToPos(x, "x", true);
      context.moveTo(place, plot.valToPos(line.y[index] - line.error[index], "y", true));
      context.lineTo(place, plot.valToPos(line.y[index] + line.error[index], "y", true));
    });
    context.stroke();
  }
  context.restore();
}

function lastIndex(column) {
  for (let index = column.length - 1; index >= 0; index -= 1) if (column[index] !== null) return index;
  return null;
}

function nearestIndex(column, index) {
  for (let away = 0; away < column.length; away += 1) {
    if (column[index - away] !== null && column[index - away] !== undefined) return index - away;
    if (column[index + away] !== null && column[index + away] !== undefined) return index + away;
  }
  return null;
}
