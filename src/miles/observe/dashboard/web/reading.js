// Reading: steps, the groups of a step, and its trajectories, filtered, sorted and searched; two steps side by side.
import { isReport, query } from "./api.js";
import { button, field, h, numberTitle, replaceContent, select, table, visible } from "./dom.js";
import { formatNumber, formatSeconds } from "./format.js";
import { linkTo, readInteger, rememberParams } from "./state.js";

const READING_FILTERS = ["q", "status", "min_reward", "max_reward", "min_length", "max_length", "advantage", "tools", "sort", "order", "group"];
const READING_ROWS = 50;

export async function showReading(root, state) {
  const beside = readInteger(state.params, "beside", null);
  const panes = h("div", { class: `panes panes-${beside === null ? 1 : 2}` });
  root.append(panes);
  const view = new ReadingView(panes, state);
  await view.loadSteps();
  if (view.steps.length) await view.load();
  if (beside !== null && view.steps.length) {
    view.other = new ReadingView(panes, state, { isOther: true });
    await view.other.loadSteps();
    await view.other.load();
    view.drawHead();
  }
  return { refresh: () => view.follow(), pressKey: (event) => view.pressKey(event) };
}

class ReadingView {
  // With isOther it is the second of two, which has the filters of the first and a step of its own.
  constructor(root, state, { isOther = false } = {}) {
    this.isOther = isOther;
    this.other = null;
    this.run = state.runs[0];
    this.runs = state.runs;
    this.filters = {};
    for (const name of READING_FILTERS) this.filters[name] = state.params.get(name) || "";
    if (isOther) this.filters.group = "";
    this.everywhere = !isOther && state.params.get("step") === "all";
    this.wanted = readInteger(state.params, isOther ? "beside" : "step", null);
    this.offset = isOther ? 0 : readInteger(state.params, "offset", 0);
    this.head = h("div", { class: "controls" });
    this.form = h("form", { class: "controls", onsubmit: (event) => event.preventDefault() });
    this.groups = h("div", { class: "groups" });
    this.list = h("div", null);
    root.append(h("section", { class: "pane" }, this.head, isOther ? null : this.form, this.groups, this.list));
  }

  async loadSteps() {
    const found = await query("steps", { run: this.run });
    this.steps = found.steps;
    this.rewards = found.rewards;
    if (!this.steps.length) {
      replaceContent(this.list, h("p", null, visible(this.run), " has no rollout files: it finished no step, or was run with --disable-save-rollouts."));
      return;
    }
    this.step = this.steps.includes(this.wanted) ? this.wanted : this.steps[this.steps.length - 1];
    this.drawHead();
    this.drawFilters();
  }

  async follow() {
    const isNewest = this.steps.length === 0 || this.step === this.steps[this.steps.length - 1];
    if (this.wanted === null && isNewest && !this.everywhere) {
      await this.loadSteps();
      if (this.steps.length) await this.load();
    }
  }

  drawHead() {
    const place = this.steps.indexOf(this.step);
    const slider = h("input", { type: "range", min: 0, max: this.steps.length - 1, value: place, "aria-label": "Step" });
    const number = h("output", null);
    const describe = (at) => replaceContent(number, `step ${this.steps[at]}, reward ${formatNumber(this.rewards[at])}`);
    describe(place);
    slider.addEventListener("input", () => describe(Number(slider.value)));
    slider.addEventListener("change", () => this.goTo(this.steps[Number(slider.value)]));
    const all = h("input", { type: "checkbox", checked: this.everywhere, disabled: isReport, onchange: (event) => this.change({ everywhere: event.target.checked }) });
    const name = this.isOther ? "the other step" : "step";
    const compare = this.isOther
      ? h("a", { href: this.link(null) }, "close")
      : h("a", { href: this.link(this.steps[0]), hidden: this.other !== null || this.steps.length < 2 }, "beside another step");
    replaceContent(this.head, h("strong", null, visible(this.run)), button("◀", () => this.goBy(-1), { "aria-label": `Previous of ${name}` }), slider,
      button("▶", () => this.goBy(1), { "aria-label": `Next of ${name}` }), number, this.isOther ? null : field("search all steps", all), compare);
  }

  // The address of this view with another step beside the first one.
  link(beside) {
    const first = this.isOther ? readInteger(new URLSearchParams(location.hash.split("?")[1] || ""), "step", null) : this.step;
    return linkTo("reading", this.runs, { step: first, beside });
  }

  goBy(away) {
    const place = this.steps.indexOf(this.step) + away;
    if (this.steps[place] !== undefined) this.goTo(this.steps[place]);
  }

  goTo(step) {
    this.step = step;
    this.wanted = step;
    this.filters.group = "";
    this.drawHead();
    this.change({ everywhere: false });
  }

  drawFilters() {
    const input = (name, type, text) => {
      const control = h("input", { type, value: this.filters[name], "aria-label": text, step: "any", disabled: isReport });
      control.addEventListener(type === "search" ? "input" : "change", () => this.setFilter(name, control.value));
      return field(text, control);
    };
    const choose = (name, options, text) => field(text, select(options, this.filters[name], (value) => this.setFilter(name, value), text));
    const statuses = ["completed", "truncated", "aborted", "failed"].map((name) => [name, name]);
    const signs = ["positive", "negative", "zero"].map((name) => [name, name]);
    const sorts = ["reward", "length", "advantage", "logprob", "generate_seconds", "grade_seconds"].map((name) => [name, name.replaceAll("_", " ")]);
    replaceContent(this.form, isReport ? null : [
      input("q", "search", "text  (/)"), choose("status", [["", "any"], ...statuses], "status"), input("min_reward", "number", "reward from"),
      input("max_reward", "number", "to"), input("min_length", "number", "tokens from"), input("max_length", "number", "to"),
      choose("advantage", [["", "any"], ...signs], "advantage"), choose("tools", [["", "any"], ["1", "with tool calls"]], "tools"),
      choose("sort", [["", "as trained"], ...sorts], "sort by"), choose("order", [["", "ascending"], ["desc", "descending"]], "order")]);
  }

  setFilter(name, value) {
    this.filters[name] = value;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.change({}), name === "q" ? 200 : 0);
  }

  change(settings) {
    Object.assign(this, { offset: 0 }, settings);
    if (this.isOther) rememberParams({ beside: this.wanted });
    else rememberParams({ ...this.filters, step: this.everywhere ? "all" : this.wanted, offset: this.offset || null });
    this.load();
    if (this.other) {
      Object.assign(this.other, { filters: { ...this.filters, group: "" }, offset: 0 });
      this.other.load();
    }
  }

  async load() {
    const params = { run: this.run, step: this.everywhere ? "all" : this.step, ...this.filters, offset: this.offset || null };
    const request = (this.request = {});
    let found;
    try {
      found = await query("trajectories", params);
    } catch (error) {
      replaceContent(this.list, h("p", { class: "problem", role: "alert" }, visible(error.message)));
      return;
    }
    if (request !== this.request) return;
    this.drawGroups(found.groups || []);
    this.drawRows(found);
  }

  // A row of squares for each group, one a trajectory, as bright as its reward.
  drawGroups(groups) {
    const values = groups.flatMap((group) => group.rewards).filter((reward) => reward !== null);
    const low = Math.min(...values);
    const high = Math.max(...values);
    const items = groups.map((group) => {
      const squares = group.rewards.map((reward) => {
        const square = h("i", { class: "square", title: `reward ${formatNumber(reward)}` });
        if (reward === null) square.classList.add("none");
        else square.style.opacity = high > low ? 0.12 + (0.88 * (reward - low)) / (high - low) : 0.5;
        return square;
      });
      const isChosen = this.filters.group === String(group.ticket);
      return button([...squares], () => this.setFilter("group", isChosen ? "" : String(group.ticket)),
        { class: `group${isChosen ? " chosen" : ""}`, "aria-label": `Group of prompt ${group.prompt_id}`, title: `prompt ${group.prompt_id}`, disabled: isReport });
    });
    replaceContent(this.groups, items);
  }

  drawRows(found) {
    this.rows = found.rows;
    const rows = found.rows.map((row) => {
      const link = linkTo("trajectory", this.runs, { step: row.step, index: row.index });
      return h("tr", { onclick: () => (location.hash = link), class: "link" },
        h("td", { class: "number" }, h("a", { href: link }, `${this.everywhere ? `${row.step}/` : ""}${row.index}`)),
        h("td", { class: "number" }, formatNumber(row.reward)), h("td", { class: "number" }, formatNumber(row.advantage, 3)),
        h("td", { class: "number" }, row.length), h("td", { class: "number" }, formatNumber(row.logprob, 3)),
        h("td", { class: "number", title: describeSeconds(row) }, row.generate_seconds === null ? "" : formatSeconds(row.generate_seconds + (row.grade_seconds || 0))),
        h("td", null, h("span", { class: `status ${row.status}` }, row.status)), h("td", { class: "number" }, row.prompt_id),
        h("td", { class: "number" }, row.tools || ""), h("td", { class: "preview" }, visible(row.text)));
    });
    const counted = found.searched === undefined
      ? `${found.matched} of ${found.total} trajectories` : `${found.matched} found in the newest ${found.searched} of ${found.steps} steps`;
    const pages = found.searched === undefined && found.matched > READING_ROWS
      ? [button("◀ previous", () => this.change({ offset: Math.max(0, this.offset - READING_ROWS) }), { disabled: this.offset === 0 }),
        ` ${this.offset + 1} to ${Math.min(found.matched, this.offset + READING_ROWS)} `,
        button("next ▶", () => this.change({ offset: this.offset + READING_ROWS }), { disabled: this.offset + READING_ROWS >= found.matched })] : null;
    replaceContent(this.list, h("p", { class: "muted", role: "status" }, counted),
      table(["", ...["reward", "advantage", "tokens", "log-prob", "time"].map(numberTitle), "status", ...["prompt", "tools"].map(numberTitle), "response"], rows, { class: "trajectories" }), h("p", null, pages));
  }

  pressKey(event) {
    if (event.key === "ArrowLeft") this.goBy(-1);
    if (event.key === "ArrowRight") this.goBy(1);
    if (event.key === "Enter" && this.rows && this.rows.length) {
      location.hash = linkTo("trajectory", this.runs, { step: this.rows[0].step, index: this.rows[0].index });
    }
  }
}

function describeSeconds(row) {
  if (row.generate_seconds === null) return "";
  return `generated in ${formatSeconds(row.generate_seconds)}${row.grade_seconds === null ? "" : `, graded in ${formatSeconds(row.grade_seconds)}`}`;
}
