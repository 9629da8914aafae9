// The decision inspector: an episode and its group, every decision coloured by what is known of it.

import { ask } from "./api.js";
import { detail, glance } from "./detail.js";
import { Rows, h, remember, show } from "./dom.js";
import { Episode, Lane } from "./episode.js";
import { about, address, distinct, episodeRow, orders, sorted } from "./recorded.js";
import { COLUMNS, Scale } from "./scale.js";
import { Strip } from "./strip.js";
import { branches, drawn, family } from "./tree.js";

export async function inspectorPage(run, at) {
  const { episodes } = await ask("episodes", { run });
  const asked = episodes.find((e) => e.at === at);
  const here = asked && episodes.find((e) => e.at === asked.like);
  if (!here) throw new Error("There is no such episode in this run.");
  const page = new Inspector(run, episodes, here, asked);
  await page.draw();
  return page;
}

class Inspector {
  /** `here` is the first of the episodes that are the same as the one `asked` for, whose place in a tree is its own. */
  constructor(run, episodes, here, asked) {
    Object.assign(this, { run, episodes, here, asked });
    this.title = `Episode ${here.episode}`;
    const same = (e) => e.step === here.step && e.group === here.group;
    this.group = episodes.filter(same).length;
    this.family = family(episodes, asked);
    this.treed = remember("tree") ?? true;
    this.siblings = sorted(distinct(episodes).filter(same), "advantage");
    this.wide = remember("group") ?? this.siblings.length > 1;
    this.column = remember("column") ?? "advantage";
    this.order = remember("order") ?? "newest";
    this.records = new Map();
    this.lanes = [];
    this.lane = null;
    this.scales = new Map();
    this.tip = document.getElementById("tip");
    this.strip = new Strip((i) => this.select(i));
    this.list = new Rows({
      height: 58,
      label: "recorded episodes",
      draw: (e) => episodeRow(run, e, here.at),
      act: (key, e) => key === "Enter" && (this.open(e), true),
    });
    this.element = this.layout();
    this.fill();
  }

  layout() {
    const { run, here } = this;
    const button = (title, act) => h("button", { class: "small", title, onclick: () => act.call(this) });
    this.scroller = h("div", { class: "lanes", tabindex: "-1" });
    this.detail = h("aside", { class: "detail", "aria-label": "Decision", "aria-live": "polite" });
    this.legend = h("div", { class: "scale" });
    this.colours = h("div", { class: "segments", role: "radiogroup", "aria-label": "Colour by" });
    this.grouping = button("The whole group, or this episode alone (g)", this.switchGroup);
    this.tree = h("nav", { class: "tree-box", "aria-label": "Branches" });
    this.treeing = button("The tree of branches (b)", this.switchTree);
    this.folding = button("Fold or open all turns (t)", this.foldAll);
    this.opening = button("Open or fold prompts and tool outputs (o)", this.openContexts);
    this.folding.textContent = "turns ▾";
    this.opening.textContent = "prompts ▸";
    this.about = h("p", { class: "quiet small-text" });
    const choice = orders(this.order, (order) => {
      this.order = order;
      this.fill();
    });
    const head = h(
      "div",
      { class: "tool-row" },
      h("b", {}, `${this.episodes.length} episodes`),
      h("span", { class: "grow" }),
      choice,
    );
    const where = ` / step ${here.step}, group ${here.group}, episode ${here.episode}`;
    const back = h("a", { href: `#/run/${encodeURIComponent(run)}` }, run);
    return h(
      "div",
      { class: "inspector" },
      h(
        "section",
        { class: "side", "aria-label": "Episodes" },
        h("div", { class: "tools" }, head, this.about),
        this.list.box,
      ),
      h(
        "section",
        { class: "stage", "aria-label": "Decisions" },
        h("p", { class: "crumbs" }, h("a", { href: "#/runs" }, "Runs"), " / ", back, where),
        h(
          "div",
          { class: "toolbar" },
          this.colours,
          h("span", { class: "grow" }),
          this.treeing,
          this.opening,
          this.folding,
          this.grouping,
        ),
        this.legend,
        this.strip.element,
        this.tree,
        this.scroller,
      ),
      this.detail,
    );
  }

  // ---------------------------------------------------------------- which episodes

  fill() {
    this.listed = sorted(distinct(this.episodes), this.order);
    this.list.at = this.listed.indexOf(this.here);
    this.list.set(this.listed);
    this.about.textContent = about(this.order);
  }

  open(e, decision = null) {
    remember("picked", decision);
    location.hash = address(this.run, e);
  }

  async draw() {
    const wanted = this.wide ? this.siblings : [this.here];
    const fetched = [...new Set([...wanted, ...this.family])].map(async (e) => {
      if (!this.records.has(e.at)) this.records.set(e.at, await ask("episode", { run: this.run, at: String(e.at) }));
    });
    await Promise.all(fetched);
    if (this.gone) return;
    const chosen = Math.max(0, this.lane?.selected ?? 0);
    for (const old of this.lanes) old.leave();
    this.scales.clear();
    this.lanes = wanted.map((e) => this.made(e));
    this.lane = this.lanes[wanted.indexOf(this.here)];
    this.scroller.classList.toggle("several", this.lanes.length > 1);
    this.scroller.replaceChildren(...this.lanes.map((l) => l.element));
    this.grouping.textContent = this.wide ? `group of ${this.group}` : "this episode alone";
    this.grouping.setAttribute("aria-pressed", String(this.wide));
    this.grouping.hidden = this.siblings.length < 2;
    this.folding.hidden = this.lane.episode.turns.length < 2;
    this.opening.hidden = !this.scroller.querySelector(".context");
    this.paint();
    this.drawTree();
    const first = this.order === "surprise" && !chosen ? this.lane.episode.oddest() : chosen;
    this.select(remember("picked") ?? first);
    remember("picked", null);
    this.centre();
  }

  made(e) {
    const mine = e === this.here;
    const lane = new Lane(new Episode(this.records.get(e.at)), e, {
      scroller: this.scroller,
      pick: (i) => (mine ? this.select(i, { scroll: false }) : this.open(e, i)),
      hover: (i, token) => this.hover(lane, i, token),
    });
    lane.element.classList.toggle("current", mine);
    return lane;
  }

  /** Put this episode's lane in the middle of its group. */
  centre() {
    const { scroller, lane } = this;
    const before = lane.element.offsetLeft - scroller.offsetLeft;
    scroller.scrollLeft = before - (scroller.clientWidth - lane.element.clientWidth) / 2;
  }

  /** The tree that this episode is part of, where episodes branch. */
  drawTree() {
    this.treeing.hidden = this.family.length < 2;
    this.tree.hidden = this.treeing.hidden || !this.treed;
    this.treeing.textContent = this.treed ? "tree ▾" : "tree ▸";
    if (this.tree.hidden) return;
    const members = this.family.map((row) => ({ row, episode: new Episode(this.records.get(row.at)) }));
    const scale = new Scale(
      "advantage",
      members.map((m) => m.episode.record),
    );
    const go = (row, i) => (row === this.asked ? this.select(i) : this.open(row, i));
    this.tree.replaceChildren(...drawn(branches(members), this.asked, scale, go));
    this.findInTree();
  }

  findInTree() {
    const here = this.tree.querySelector("[aria-current]");
    if (here) this.tree.scrollTop = here.offsetTop - this.tree.offsetTop - this.tree.clientHeight / 2;
  }

  switchTree() {
    this.treed = remember("tree", !this.treed);
    this.drawTree();
  }

  switchGroup() {
    this.wide = remember("group", !this.wide);
    this.draw();
  }

  // ---------------------------------------------------------------- colours

  paint() {
    const offered = Object.keys(COLUMNS).filter((c) => this.lanes.some((l) => l.episode.has(c)));
    if (!offered.includes(this.column)) this.column = offered[0] ?? "advantage";
    const { column } = this;
    const scale = this.scaleOf(column);
    this.strip.set(this.lane.episode, scale);
    for (const l of this.lanes) {
      l.paint(scale);
      l.credit(this.scaleOf("advantage"));
    }
    this.colours.replaceChildren(...offered.map((c) => this.choice(c)));
    const [low, high] = scale.ends().map((v) => show(v));
    const look = `ramp ${scale.kind.diverging ? "diverging" : "sequential"}`;
    const ramp = h("span", { class: look, role: "img", "aria-label": `colours from ${low} to ${high}` });
    const about = h("span", { class: "quiet" }, scale.kind.about ?? "");
    this.legend.replaceChildren(h("span", {}, low), ramp, h("span", {}, high), about);
  }

  scaleOf(column) {
    const { scales, lanes } = this;
    if (!scales.has(column)) {
      const records = lanes.map((l) => l.episode.record);
      scales.set(column, new Scale(column, records));
    }
    return scales.get(column);
  }

  choice(c) {
    const { name, about, key } = COLUMNS[c];
    const facts = { role: "radio", "aria-checked": String(c === this.column), "data-column": c };
    return h("button", { ...facts, title: `${about} (key ${key})`, onclick: () => this.colourBy(c) }, name);
  }

  colourBy(column) {
    this.column = remember("column", column);
    this.paint();
    this.tell();
  }

  // ---------------------------------------------------------------- decisions

  select(i, options) {
    const { lane } = this;
    if (!lane.episode.length) {
      this.detail.replaceChildren(h("p", { class: "quiet" }, "This episode has no decisions."));
      return;
    }
    lane.select(Math.max(0, Math.min(lane.episode.length - 1, i)), options);
    this.strip.mark(lane.selected);
    this.tell();
  }

  tell() {
    this.detail.replaceChildren(...detail(this.lane.episode, this.lane.selected, this.column));
  }

  hover(lane, i, token) {
    this.tip.hidden = i < 0;
    if (i < 0) return;
    this.tip.replaceChildren(...glance(lane.episode, i, this.column));
    const box = token.getBoundingClientRect();
    this.tip.style.left = `${Math.min(box.left, innerWidth - 260)}px`;
    this.tip.style.top = `${box.bottom + 6}px`;
  }

  byDecision(step) {
    this.select(this.lane.selected + step);
  }

  byTurn(step) {
    const { episode, selected } = this.lane;
    const to = episode.turns[episode.turnIndex[selected] + step];
    if (to) this.select(to.decisions[0]);
  }

  byEpisode(step) {
    const to = this.listed[this.listed.indexOf(this.here) + step];
    if (to) this.open(to);
  }

  nextGated() {
    const gated = [...this.lane.episode.gates.keys()].sort((a, b) => a - b);
    if (gated.length) this.select(gated.find((i) => i > this.lane.selected) ?? gated[0]);
  }

  foldAll() {
    const folded = !this.lane.sections.every((_, k) => this.lane.folded(k));
    for (const l of this.lanes) l.foldAll(folded);
    this.folding.textContent = folded ? "turns ▸" : "turns ▾";
  }

  openContexts() {
    const open = this.opening.getAttribute("aria-pressed") !== "true";
    this.opening.setAttribute("aria-pressed", String(open));
    this.opening.textContent = open ? "prompts ▾" : "prompts ▸";
    for (const l of this.lanes) l.openContexts(open);
  }

  // ---------------------------------------------------------------- as a page

  enter() {
    this.list.go(this.list.at);
    this.strip.paint();
    this.findInTree();
    this.lane.select(this.lane.selected);
    this.centre();
  }

  redraw() {
    this.strip.paint();
  }

  leave() {
    this.gone = true;
    this.tip.hidden = true;
    for (const l of this.lanes) l.leave();
  }

  key({ key }) {
    const column = Object.keys(COLUMNS).find((c) => COLUMNS[c].key === key);
    if (column && this.lanes.some((l) => l.episode.has(column))) this.colourBy(column);
    else if (KEYS[key]) KEYS[key](this);
    else return false;
    return true;
  }
}

const KEYS = {
  ArrowRight: (page) => page.byDecision(1),
  ArrowLeft: (page) => page.byDecision(-1),
  ArrowDown: (page) => page.byTurn(1),
  ArrowUp: (page) => page.byTurn(-1),
  j: (page) => page.byEpisode(1),
  k: (page) => page.byEpisode(-1),
  Home: (page) => page.select(0),
  End: (page) => page.select(Infinity),
  c: (page) => page.nextGated(),
  g: (page) => page.switchGroup(),
  b: (page) => page.switchTree(),
  f: (page) => page.lane.fold(page.lane.episode.turnIndex[page.lane.selected]),
  t: (page) => page.foldAll(),
  o: (page) => page.openContexts(),
  Escape: (page) => (location.hash = `#/run/${encodeURIComponent(page.run)}`),
};
