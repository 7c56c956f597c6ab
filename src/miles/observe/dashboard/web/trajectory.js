// One trajectory, or two side by side: the conversation, and every token coloured by one of its numbers.
import { isReport, query } from "./api.js";
import { button, field, h, replaceContent, select, visible } from "./dom.js";
import { formatNumber, formatSeconds, formatValue } from "./format.js";
import { linkTo, readInteger, rememberParams } from "./state.js";

const TOKEN_PAGE = 2000;
const THINK = /<think>([\s\S]*?)(<\/think>|$)/g;

export async function showTrajectory(root, state) {
  const { params, runs } = state;
  const settings = {
    mode: params.get("mode") === "tokens" ? "tokens" : "conversation",
    color: params.get("color") || "logprob",
    layer: readInteger(params, "layer", 0),
  };
  const places = [{ step: readInteger(params, "step", 1), index: readInteger(params, "index", 0) }];
  const other = /^(\d+):(\d+)$/.exec(params.get("other") || "");
  if (other) places.push({ step: Number(other[1]), index: Number(other[2]) });
  const panes = places.map((place) => new TrajectoryPane(runs[0], place, settings));
  const controls = h("div", { class: "controls" });
  root.append(controls, h("div", { class: `panes panes-${panes.length}` }, panes.map((pane) => pane.element)));
  const drawAll = () => Promise.all(panes.map((pane) => pane.draw()));
  await Promise.all(panes.map((pane) => pane.load()));
  drawTrajectoryControls(controls, { panes, settings, runs, places, drawAll });
  await drawAll();
  const open = (index) => (location.hash = linkTo("trajectory", runs, { step: places[0].step, index, mode: settings.mode === "tokens" ? "tokens" : null, color: settings.color === "logprob" ? null : settings.color }));
  const pressKey = (event) => {
    if (event.key === "j" || event.key === "ArrowRight") open(places[0].index + 1);
    if ((event.key === "k" || event.key === "ArrowLeft") && places[0].index > 0) open(places[0].index - 1);
    if (event.key === "t") controls.querySelector("select").focus();
  };
  return { pressKey };
}

function drawTrajectoryControls(controls, { panes, settings, runs, places, drawAll }) {
  const change = (changes) => {
    Object.assign(settings, changes);
    rememberParams({ mode: settings.mode === "tokens" ? "tokens" : null, color: settings.color === "logprob" ? null : settings.color, layer: settings.layer || null });
    drawAll();
    drawLayers();
  };
  const layers = panes[0].tokens ? panes[0].tokens.expert_layers || 0 : 0;
  const known = [["logprob", "log-prob"], ["engine_trainer_difference", "engine − trainer log-prob"], ["entropy", "entropy"], ["advantage", "advantage"], ["version", "version"], ["author", "author"]];
  const there = panes[0].tokens ? ["version", "author", "logprob", ...panes[0].tokens.fields] : known.map(([name]) => name);
  const colors = [...known.filter(([name]) => there.includes(name)), ...(layers ? [["experts", "chosen experts"]] : []), ...panes[0].extraFields(known.map(([name]) => name))];
  const layerField = h("span", null);
  const drawLayers = () => replaceContent(layerField, settings.color === "experts" && layers > 1
    ? field("MoE layer", select(Array.from({ length: layers }, (_, at) => [String(at), String(at)]), String(settings.layer), (layer) => change({ layer: Number(layer) }), "MoE layer")) : null);
  drawLayers();
  const compare = h("input", { type: "text", placeholder: "step:number", "aria-label": "Compare with", size: 10, disabled: isReport });
  compare.addEventListener("change", () => (location.hash = linkTo("trajectory", runs, { ...places[0], other: compare.value })));
  const { step, index } = places[0];
  replaceContent(controls,
    h("a", { href: linkTo("reading", runs, { step }) }, `step ${step}`),
    button("◀ k", () => (location.hash = linkTo("trajectory", runs, { step, index: index - 1 })), { disabled: index === 0, "aria-label": "Previous trajectory" }),
    button("j ▶", () => (location.hash = linkTo("trajectory", runs, { step, index: index + 1 })), { "aria-label": "Next trajectory" }),
    field("show", select([["conversation", "conversation"], ["tokens", "tokens"]], settings.mode, (mode) => change({ mode }), "Show")),
    field("coloured by", select(colors, settings.color, (color) => change({ color }), "Colour")),
    layerField,
    field("beside", compare));
}

class TrajectoryPane {
  constructor(run, place, settings) {
    this.run = run;
    this.place = place;
    this.settings = settings;
    this.first = 0;
    this.branch = 0;
    this.body = h("div", { class: "body" });
    this.info = h("p", { class: "info", role: "status" }, " ");
    this.head = h("div", { class: "head" });
    this.element = h("section", { class: "pane" }, this.head, this.info, this.body);
  }

  params() {
    return { run: this.run, step: this.place.step, index: this.place.index };
  }

  async load() {
    this.found = await query("trajectory", this.params());
    this.tokens = null;
    try {
      this.tokens = await query("tokens", { ...this.params(), branch: 0, first: 0, limit: TOKEN_PAGE, layer: this.settings.layer || null });
      this.loadedLayer = this.settings.layer;
      this.loadedBranch = 0;
    } catch (error) {
      if (!isReport) throw error;
    }
    this.drawFacts();
  }

  extraFields(known) {
    return (this.tokens ? this.tokens.fields : []).filter((name) => !known.includes(name)).map((name) => [name, name.replaceAll("_", " ")]);
  }

  drawFacts() {
    const { found } = this;
    const parts = Object.entries(found.parts).map(([name, value]) => `${name} ${formatNumber(value)}`).join(", ");
    const facts = [
      ["reward", `${formatNumber(found.reward)}${parts ? ` (${parts})` : ""}`], ["advantage", formatNumber(found.advantage)], ["status", found.status],
      ["tokens", found.length], ["mean log-prob", formatNumber(found.logprob)], ["versions", found.versions.join(" to ")], ["prompt", `${found.prompt_id}, epoch ${found.epoch}`],
      ["sample", `${found.sample} of ${found.group_size}`], ["generated in", found.generate_seconds === null ? null : formatSeconds(found.generate_seconds)],
      ["graded in", found.grade_seconds === null ? null : formatSeconds(found.grade_seconds)], ["label", found.label], ...Object.entries(found.metadata).map(([name, value]) => [name, formatValue(value)])];
    replaceContent(this.head, h("h2", null, `trajectory ${found.index} of step ${found.step}`),
      h("dl", { class: "facts" }, facts.filter(([, value]) => value !== null && value !== "").map(([name, value]) => h("div", null, h("dt", null, name.replaceAll("_", " ")), h("dd", null, visible(String(value)))))),
      found.tokenizer_error ? h("p", { class: "problem" }, visible(found.tokenizer_error)) : null);
  }

  async draw() {
    if (this.settings.mode === "tokens") await this.drawTokens();
    else this.drawConversation();
  }

  drawConversation() {
    const messages = this.found.messages;
    const prompt = messages.length
      ? messages.map((message) => h("article", { class: "turn prompt" }, h("h3", null, visible(String(message.role || "prompt"))), drawContent(message.content))) : [];
    const branches = this.found.branches.map((branch, number) => [
      this.found.branches.length > 1 ? h("h3", null, `branch ${number}${branch.role ? `, ${visible(branch.role)}` : ""}`) : null,
      branch.spans.filter((span, place) => !(place === 0 && span.author === "prompt" && messages.length && !span.images.length)).map((span) => this.drawSpan(span))]);
    replaceContent(this.info, " ");
    replaceContent(this.body, prompt, branches);
  }

  drawSpan(span) {
    const title = span.author === "policy" ? `policy, version ${span.version}${span.turn > 1 ? `, turn ${span.turn}` : ""}` : span.author === "env" ? "environment" : span.author;
    const images = span.images.map((image) => (isReport ? h("p", { class: "muted" }, `[${image.kind} ${image.source.slice(0, 12)}]`)
      : h("img", { src: `/media?run=${encodeURIComponent(this.run)}&source=${encodeURIComponent(image.source)}`, alt: `${image.kind} ${image.source.slice(0, 12)}`, loading: "lazy" })));
    const calls = span.calls.map((call) => h("pre", { class: "call" }, "call ", visible(call)));
    const cut = span.cut ? h("p", { class: "muted" }, `${span.cut} more characters are left out here; the token view has all.`) : null;
    return h("article", { class: `turn ${span.author}` }, h("h3", null, visible(title), h("span", { class: "muted" }, ` ${span.tokens} tokens`)), images, foldReasoning(span.text), cut, calls);
  }

  async drawTokens() {
    const { layer } = this.settings;
    if (!this.tokens || this.tokens.first !== this.first || this.loadedBranch !== this.branch || this.loadedLayer !== layer) {
      this.tokens = await query("tokens", { ...this.params(), branch: this.branch, first: this.first, limit: TOKEN_PAGE, layer: layer || null });
      this.loadedBranch = this.branch;
      this.loadedLayer = layer;
    }
    const range = colorRange(this.tokens, this.settings.color);
    const spans = this.tokens.spans.map((span) => h("div", { class: `tokens ${span.author}` }, drawPieces(span, this.settings.color, range, this.info)));
    replaceContent(this.info, describeScale(this.settings.color, range));
    replaceContent(this.body, this.drawPages(), spans, this.drawPages());
  }

  drawPages() {
    const { total } = this.tokens;
    const branches = this.found.branches.length > 1
      ? select(this.found.branches.map((_, number) => [String(number), `branch ${number}`]), String(this.branch), (value) => this.turnTo(0, Number(value)), "Branch") : null;
    if (total <= TOKEN_PAGE) return branches;
    return h("p", { class: "pages" }, branches, button("◀", () => this.turnTo(Math.max(0, this.first - TOKEN_PAGE), this.branch), { disabled: this.first === 0, "aria-label": "Earlier tokens" }),
      ` tokens ${this.first} to ${Math.min(total, this.first + TOKEN_PAGE)} of ${total} `,
      button("▶", () => this.turnTo(this.first + TOKEN_PAGE, this.branch), { disabled: this.first + TOKEN_PAGE >= total, "aria-label": "Later tokens" }));
  }

  turnTo(first, branch) {
    this.first = first;
    this.branch = branch;
    this.drawTokens();
  }
}

// Text with <think> parts folded.
function foldReasoning(text) {
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(THINK)) {
    parts.push(h("pre", { class: "text" }, visible(text.slice(end, found.index))));
    parts.push(h("details", { class: "reasoning" }, h("summary", null, `reasoning, ${found[1].length} characters`), h("pre", { class: "text" }, visible(found[1]))));
    end = found.index + found[0].length;
  }
  parts.push(h("pre", { class: "text" }, visible(text.slice(end))));
  return parts;
}

function drawContent(content) {
  if (typeof content === "string") return foldReasoning(content);
  if (!Array.isArray(content)) return h("pre", { class: "text" }, visible(formatValue(content)));
  return content.map((part) => (part && typeof part.text === "string" ? foldReasoning(part.text) : h("p", { class: "muted" }, visible(formatValue(part).slice(0, 200)))));
}

function drawPieces(span, color, range, info) {
  let at = 0;
  return span.texts.map((text, place) => {
    const token = at;
    at += span.counts[place];
    const shown = text.trim() ? visible(text) : visible(text).replaceAll(" ", "·").replaceAll("\n", "↵\n");
    const piece = h("span", { class: "token", tabindex: -1 }, shown);
    piece.style.backgroundColor = tokenColor(span, token, color, range);
    piece.addEventListener("mouseenter", () => replaceContent(info, describeToken(span, token, text)));
    return piece;
  });
}

function describeToken(span, token, text) {
  const values = Object.entries(span.values).map(([name, column]) => `${name.replaceAll("_", " ")} ${formatNumber(column[token])}`);
  if (span.experts && span.experts[token].length) values.push(`experts ${span.experts[token].join(" ")}`);
  return `token ${span.first + token}: ${JSON.stringify(visible(text))} id ${span.tokens[token]}, ${span.author}${span.version === null ? "" : ` version ${span.version}`}${values.length ? `, ${values.join(", ")}` : ""}`;
}

function colorRange(tokens, color) {
  if (color === "version") {
    const versions = tokens.spans.map((span) => span.version).filter((version) => version !== null);
    return { low: Math.min(...versions), high: Math.max(...versions) };
  }
  let most = 0;
  for (const span of tokens.spans) for (const value of span.values[color] || []) most = Math.max(most, Math.abs(value || 0));
  return { low: -most, high: most };
}

// Red for unlikely tokens and negative numbers, green or blue for positive ones; nothing where there is no number.
function tokenColor(span, token, color, range) {
  if (color === "author") return { policy: "rgba(0,158,115,.25)", env: "rgba(230,159,0,.25)", prompt: "transparent" }[span.author] || "transparent";
  if (color === "version") {
    if (span.version === null) return "transparent";
    return `hsla(${200 + (160 * (span.version - range.low)) / Math.max(1, range.high - range.low)}, 70%, 50%, .3)`;
  }
  if (color === "experts") {
    const experts = (span.experts && span.experts[token]) || [];
    return experts.length ? `hsla(${(experts[0] * 137.5) % 360}, 70%, 50%, .35)` : "transparent";
  }
  const value = span.values[color] ? span.values[color][token] : null;
  if (value === null || value === undefined) return "transparent";
  if (color === "logprob") return `rgba(213,94,0,${Math.min(0.85, -value / 6).toFixed(3)})`;
  const strength = range.high ? 0.7 * Math.abs(value) / range.high : 0;
  return value < 0 ? `rgba(213,94,0,${strength.toFixed(3)})` : `rgba(0,114,178,${strength.toFixed(3)})`;
}

function describeScale(color, range) {
  if (color === "logprob") return "The darker, the less likely the token was; a log-prob of −6 or less is darkest. Point at a token for its numbers.";
  if (color === "author") return "Green: policy, yellow: environment.";
  if (color === "experts") return "A colour for each expert: that of the first one the token was routed to in this layer. Point at a token for all.";
  if (color === "entropy") return `The darker, the less certain the trainer was before the token, up to ${formatNumber(range.high)} nats.`;
  if (color === "engine_trainer_difference") return `Blue: the engine found the token more likely than the trainer, red: less likely; up to ${formatNumber(range.high)} nats.`;
  if (color === "version") return `Versions ${formatNumber(range.low)} to ${formatNumber(range.high)}.`;
  return `Blue positive, red negative, up to ${formatNumber(range.high)}.`;
}
