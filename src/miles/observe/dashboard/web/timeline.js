// Timeline: a track for each plane, rank and engine, spans by phase, waiting drawn hatched, and gauges over the same time;
// drag, wheel, arrows and + - move it.
import { query } from "./api.js";
import { button, cssColor, h, replaceContent, visible } from "./dom.js";
import { formatNumber, formatSeconds } from "./format.js";
import { rememberParams } from "./state.js";
import { PHASE_COLORS } from "./timing.js";

const TRACK_HEIGHT = 30;
const TRACK_GAP = 22;
const TIMELINE_TOP = 24;
const GAUGE_HEIGHT = 44;
const GAUGE_COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"];

export async function showTimeline(root, state) {
  const view = new TimelineView(root, state);
  await view.load();
  return { refresh: () => view.follow(), close: () => view.close(), pressKey: (event) => view.pressKey(event) };
}

class TimelineView {
  constructor(root, state) {
    this.run = state.runs[0];
    this.start = state.params.has("from") ? Number(state.params.get("from")) : null;
    this.end = state.params.has("to") ? Number(state.params.get("to")) : null;
    this.canvas = h("canvas", { tabindex: 0, "aria-label": "Timeline; arrows move, plus and minus zoom" });
    this.info = h("p", { class: "muted info", role: "status" }, " ");
    const zoom = (factor) => () => this.zoom(factor, 0.5);
    root.append(
      h("div", { class: "controls" }, h("strong", null, visible(this.run)), button("+", zoom(0.5), { "aria-label": "Zoom in" }), button("−", zoom(2), { "aria-label": "Zoom out" }),
        button("◀", () => this.move(-0.3), { "aria-label": "Earlier" }), button("▶", () => this.move(0.3), { "aria-label": "Later" }),
        button("whole run", () => this.show(this.found.first, this.found.last)), button("newest", () => this.show(null, null)), drawKey()),
      this.info, this.canvas);
    this.canvas.addEventListener("wheel", (event) => this.turnWheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.drag(event));
    this.canvas.addEventListener("pointermove", (event) => this.describe(event));
    this.observer = new ResizeObserver(() => this.found && this.draw());
    this.observer.observe(this.canvas);
  }

  close() {
    this.observer.disconnect();
  }

  async load() {
    this.found = await query("timeline", { run: this.run, start: this.start, end: this.end });
    this.draw();
  }

  async follow() {
    if (this.start === null) await this.load();
  }

  async show(start, end) {
    this.start = start;
    this.end = end;
    rememberParams({ from: start === null ? null : start.toFixed(3), to: end === null ? null : end.toFixed(3) });
    await this.load();
  }

  zoom(factor, centre) {
    const length = this.found.end - this.found.start;
    const middle = this.found.start + centre * length;
    this.show(middle - centre * length * factor, middle + (1 - centre) * length * factor);
  }

  move(share) {
    const length = this.found.end - this.found.start;
    this.show(this.found.start + share * length, this.found.end + share * length);
  }

  turnWheel(event) {
    event.preventDefault();
    this.zoom(event.deltaY > 0 ? 1.3 : 0.77, event.offsetX / this.canvas.clientWidth);
  }

  drag(event) {
    const from = event.clientX;
    const stop = (last) => {
      removeEventListener("pointerup", stop);
      const share = (from - last.clientX) / this.canvas.clientWidth;
      if (Math.abs(share) > 0.01) this.move(share);
    };
    addEventListener("pointerup", stop);
  }

  pressKey(event) {
    const actions = { ArrowLeft: () => this.move(-0.3), ArrowRight: () => this.move(0.3), "+": () => this.zoom(0.5, 0.5), "-": () => this.zoom(2, 0.5) };
    if (actions[event.key]) {
      event.preventDefault();
      actions[event.key]();
    }
  }

  place(time) {
    return ((time - this.found.start) / (this.found.end - this.found.start)) * this.canvas.clientWidth;
  }

  draw() {
    if (this.found.first === null) {
      replaceContent(this.info, "The run has recorded no spans yet.");
      return;
    }
    const ratio = devicePixelRatio || 1;
    const height = this.gaugesTop() + this.gauges().length * GAUGE_HEIGHT;
    this.canvas.style.height = `${height}px`;
    const width = this.canvas.clientWidth;
    if (!width) return;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    this.drawRuler(context, width, height);
    this.found.tracks.forEach((track, index) => this.drawTrack(context, track, TIMELINE_TOP + index * (TRACK_HEIGHT + TRACK_GAP)));
    this.gauges().forEach(([name, points], index) => this.drawGauge(context, name, points, this.gaugesTop() + index * GAUGE_HEIGHT, GAUGE_COLORS[index % GAUGE_COLORS.length]));
  }

  gauges() {
    return Object.entries(this.found.counters);
  }

  gaugesTop() {
    return TIMELINE_TOP + this.found.tracks.length * (TRACK_HEIGHT + TRACK_GAP);
  }

  // A gauge keeps its value until it changes.
  drawGauge(context, name, points, top, color) {
    const most = Math.max(...points.map(([, value]) => value), 0);
    const bottom = top + GAUGE_HEIGHT - 4;
    const level = (value) => bottom - (most ? (value / most) * (GAUGE_HEIGHT - 20) : 0);
    context.fillStyle = cssColor("--text");
    context.fillText(`${visible(name)}, up to ${formatNumber(most)}`, 2, top + 11);
    context.beginPath();
    context.moveTo(this.place(points[0][0]), bottom);
    points.forEach(([time, value], index) => {
      const next = index + 1 < points.length ? points[index + 1][0] : Math.min(this.found.end, this.found.last);
      context.lineTo(this.place(time), level(value));
      context.lineTo(this.place(Math.max(time, next)), level(value));
    });
    context.lineTo(this.place(Math.min(this.found.end, this.found.last)), bottom);
    context.strokeStyle = color;
    context.stroke();
    context.fillStyle = `${color}44`;
    context.fill();
  }

  drawRuler(context, width, height) {
    const length = this.found.end - this.found.start;
    const step = 10 ** Math.floor(Math.log10(length / 4));
    const wide = length / step > 20 ? step * 5 : length / step > 8 ? step * 2 : step;
    context.fillStyle = cssColor("--muted");
    context.strokeStyle = cssColor("--grid");
    const origin = this.found.first;
    for (let at = Math.ceil((this.found.start - origin) / wide) * wide; at < this.found.end - origin; at += wide) {
      const x = this.place(origin + at);
      context.beginPath();
      context.moveTo(x, 14);
      context.lineTo(x, height);
      context.stroke();
      context.fillText(`${formatNumber(at)} s`, x + 2, 11);
    }
  }

  drawTrack(context, track, top) {
    context.fillStyle = cssColor("--text");
    context.fillText(visible(track.name), 2, top + 12);
    for (const [start, seconds, name, count, waits] of track.spans) {
      const x = this.place(start);
      const width = Math.max(1, this.place(start + seconds) - x - 0.5);
      context.fillStyle = waits ? hatch(context) : spanColor(name);
      context.fillRect(x, top + 16, width, TRACK_HEIGHT - 6);
      if (width > 46 && count === 1) {
        context.save();
        context.beginPath();
        context.rect(x, top + 16, width - 2, TRACK_HEIGHT - 6);
        context.clip();
        context.fillStyle = waits ? cssColor("--text") : "#ffffff";
        context.fillText(visible(name), x + 4, top + 32);
        context.restore();
      }
    }
  }

  describe(event) {
    if (!this.found || this.found.first === null) return;
    const time = this.found.start + (event.offsetX / this.canvas.clientWidth) * (this.found.end - this.found.start);
    if (event.offsetY >= this.gaugesTop()) {
      const gauge = this.gauges()[Math.floor((event.offsetY - this.gaugesTop()) / GAUGE_HEIGHT)];
      const point = gauge && gauge[1].filter(([at]) => at <= time).pop();
      replaceContent(this.info, point ? `${visible(gauge[0])} ${formatNumber(point[1])}` : " ");
      return;
    }
    const track = this.found.tracks[Math.floor((event.offsetY - TIMELINE_TOP) / (TRACK_HEIGHT + TRACK_GAP))];
    const span = track && track.spans.find(([start, seconds]) => start <= time && time <= start + seconds);
    replaceContent(this.info, span ? `${visible(track.name)}: ${describeSpan(span)}` : " ");
  }
}

function describeSpan([, seconds, name, count, waits, about]) {
  const waiting = waits && name.startsWith("rollout") ? ": the loop waits for the rollout plane" : "";
  return `${visible(name)}${waiting}, ${formatSeconds(seconds)}${count > 1 ? `, ${count} spans together` : ""}${about ? `, ${visible(about)}` : ""}`;
}

function spanColor(name) {
  const phase = name.split(/[ /]/)[0];
  return PHASE_COLORS[phase] || { generate: PHASE_COLORS.rollout }[phase] || PHASE_COLORS.other;
}

function drawKey() {
  return h("span", { class: "key" }, Object.entries(PHASE_COLORS).filter(([name]) => name !== "save").map(([name, color]) => {
    const swatch = h("i", { class: "swatch" });
    swatch.style.backgroundColor = color;
    return h("span", { class: "entry" }, swatch, name === "rollout" ? "generating, or waiting (hatched)" : name);
  }));
}

function hatch(context) {
  const tile = document.createElement("canvas");
  tile.width = 8;
  tile.height = 8;
  const inner = tile.getContext("2d");
  inner.fillStyle = `${PHASE_COLORS.rollout}33`;
  inner.fillRect(0, 0, 8, 8);
  inner.strokeStyle = PHASE_COLORS.rollout;
  inner.lineWidth = 1.5;
  inner.beginPath();
  inner.moveTo(0, 8);
  inner.lineTo(8, 0);
  inner.stroke();
  return context.createPattern(tile, "repeat");
}
