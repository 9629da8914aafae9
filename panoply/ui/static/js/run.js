// One run: what it was told, how it went, and its recorded episodes.

import { ask } from "./api.js";
import { chart } from "./charts.js";
import { Rows, bare, duration, h, remember, show } from "./dom.js";
import { about, address, distinct, episodeRow, orders, sorted } from "./recorded.js";
import { Workers } from "./workers.js";

const FIRST = 6;
const MOST = 24;

export async function runPage(id) {
  const found = await ask("run", { run: id });
  if (found.facts.problem) throw new Error(found.facts.problem);
  const page = new RunPage(id, found, await ask("episodes", { run: id }));
  await Promise.all([page.draw(), page.work()]);
  page.wait();
  return page;
}

class RunPage {
  constructor(id, found, { episodes, unreadable }) {
    Object.assign(this, { id, found, episodes, unreadable, facts: found.facts });
    this.title = `${bare(this.facts.method)} on ${bare(this.facts.world)}`;
    this.order = remember("order") ?? "newest";
    this.charts = [];
    this.all = false;
    this.head = h("div", { class: "facts" });
    this.grid = h("div", { class: "grid" });
    this.more = h("button", { class: "small", onclick: () => this.switchAll() });
    this.drawn = h("section", { "aria-label": "Reward model" });
    this.workers = new Workers();
    this.about = h("p", { class: "quiet" });
    this.number = h("h2");
    this.words = h("input", {
      type: "search",
      placeholder: "Search what was said",
      "aria-label": "Search episodes",
      oninput: () => this.fill(),
    });
    this.list = new Rows({
      height: 58,
      label: "episodes",
      draw: (e) => episodeRow(id, e),
      act: (key, e) => key === "Enter" && ((location.hash = address(id, e)), true),
    });
    this.list.box.classList.add("boxed");
    this.element = this.layout();
    this.tell();
    this.fill();
    this.judge(found.drawings ?? []);
  }

  /** Pictures of a reward model, or of how far the run has gone after one. */
  judge(found) {
    const head = h("h2", {}, "Reward model");
    this.drawn.replaceChildren(...(found.length ? [head, h("div", { class: "grid" }, ...found.map(drawing))] : []));
  }

  layout() {
    const { id, facts, found } = this;
    const known = found.command && found.command !== "python";
    return h(
      "div",
      { class: "page run-page" },
      h("p", { class: "crumbs" }, h("a", { href: "#/runs" }, "Runs"), " / ", id),
      h("h1", {}, this.title, h("span", { class: "seed" }, ` seed ${facts.seed ?? "–"}`)),
      this.head,
      known && h("pre", { class: "command" }, found.command),
      this.grid,
      this.more,
      this.workers.element,
      this.drawn,
      found.equation && method(found),
      h("div", { class: "two" }, this.recorded(), configuration(found)),
    );
  }

  recorded() {
    const choice = orders(this.order, (order) => {
      this.order = order;
      this.fill();
    });
    const head = h("div", { class: "panel-head" }, this.number, h("span", { class: "grow" }), this.words, choice);
    return h("section", { class: "card wide", "aria-label": "Episodes" }, head, this.about, this.list.box);
  }

  /** The facts at the top, which change while the run goes on. */
  tell() {
    const f = this.facts;
    const from = f.before === null ? "" : `${show(f.before, 2)} → `;
    const cells = [
      ["status", h("span", { class: `badge ${f.status}` }, f.status)],
      ["steps", `${f.step} of ${f.of ?? "?"}`],
      ["time", duration(f.seconds)],
      f.after !== null && [`held-out ${f.measured}`, h("span", {}, from, h("b", {}, show(f.after, 2)))],
      ["seed", String(f.seed ?? "–")],
      ["started", (f.created ?? "").replace("T", " ")],
      ["panoply", f.version],
    ];
    const cell = ([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
    this.head.replaceChildren(h("dl", {}, ...cells.filter(Boolean).map(cell)));
    if (f.why) this.head.append(h("p", { class: "bad-text", role: "alert" }, f.why));
  }

  fill() {
    const text = this.words.value.toLowerCase();
    const matching = distinct(this.episodes).filter((e) => e.snippet.toLowerCase().includes(text));
    this.list.set(sorted(matching, this.order));
    this.number.textContent = `Episodes (${this.episodes.length})`;
    this.about.textContent = this.episodes.length
      ? about(this.order, this.unreadable)
      : "None recorded yet: run.episodes_every says how often some are.";
  }

  async draw() {
    const curves = (metrics) => ask("curves", { runs: this.id, metrics: metrics.join(","), together: "0" });
    const { metrics } = await curves([]);
    const named = metrics.slice(0, this.all ? MOST : FIRST);
    const found = (await curves(named)).curves;
    const drawn = (metric) => found[metric].map((c) => ({ ...c, place: 0 }));
    const same = named.join() === this.named?.join();
    if (same && named.every((m, i) => this.charts[i].update(drawn(m)))) return;
    this.named = named;
    for (const c of this.charts) c.destroy();
    const boxes = named.map(() => h("div", { class: "plot" }));
    const figures = named.map((metric, i) => h("figure", { class: "card" }, h("figcaption", {}, metric), boxes[i]));
    const none = h("p", { class: "quiet" }, "No step has been logged yet.");
    this.grid.replaceChildren(...(named.length ? figures : [none]));
    this.charts = named.map((m, i) => chart(boxes[i], { title: m, curves: drawn(m), height: 190, sync: "run" }));
    this.more.textContent = this.all ? "fewer metrics" : `all ${metrics.length} metrics`;
    this.more.hidden = metrics.length <= FIRST;
  }

  /** Who made the steps, where it was more than one process. */
  async work() {
    const asked = ([path, value]) => (path === "run.learners" || path === "run.samplers") && value !== "0";
    this.workers.set(await ask("workers", { run: this.id }), this.found.settings.some(asked));
  }

  switchAll() {
    this.all = !this.all;
    this.draw();
  }

  /** Look again and again, and draw what has changed. */
  wait() {
    const look = async () => {
      const { facts, drawings } = await ask("run", { run: this.id });
      if (JSON.stringify(facts) === JSON.stringify(this.facts)) return;
      this.facts = facts;
      this.tell();
      this.judge(drawings ?? []);
      await Promise.all([this.draw(), this.work()]);
      Object.assign(this, await ask("episodes", { run: this.id }));
      this.fill();
    };
    this.timer = setTimeout(
      async () => {
        // where the server is gone, what is shown stays
        if (!document.hidden) await look().catch(() => {});
        if (this.timer) this.wait();
      },
      this.facts.status === "running" ? 2000 : 8000,
    );
  }

  // ---------------------------------------------------------------- as a page

  enter() {
    this.list.paint();
  }

  redraw() {
    this.named = null;
    this.draw();
    this.workers.redraw();
  }

  leave() {
    clearTimeout(this.timer);
    this.timer = 0;
    for (const c of this.charts) c.destroy();
    this.workers.leave();
  }

  key(event) {
    if (event.key !== "Escape") return false;
    location.hash = "#/runs";
    return true;
  }
}

const SHAPES = new Set(["line", "polyline", "circle", "rect", "text"]);

/** A picture that the server gives as shapes: a tag, attributes, and a text. */
function drawing({ title, note, size, shapes }) {
  const label = `${title}: ${note}`;
  const picture = svg("svg", { class: "drawn", viewBox: `0 0 ${size.join(" ")}`, role: "img", "aria-label": label });
  for (const [tag, attributes, text] of shapes.filter(([tag]) => SHAPES.has(tag))) {
    const made = svg(tag, attributes);
    if (tag === "text") made.textContent = text;
    else if (text) made.append(Object.assign(svg("title"), { textContent: text }));
    picture.append(made);
  }
  return h("figure", { class: "card" }, h("figcaption", {}, title), picture, h("p", { class: "quiet" }, note));
}

function svg(tag, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function method({ equation, against, changes }) {
  const row = ([path, then, now]) => h("tr", {}, h("th", { scope: "row" }, path), h("td", {}, then), h("td", {}, now));
  const head = h("tr", {}, ...["setting", `${against} as published`, "this run"].map((name) => h("th", {}, name)));
  const table = h("table", {}, h("thead", {}, head), h("tbody", {}, ...changes.map(row)));
  const none = h("p", { class: "quiet" }, `Set as ${against} is published.`);
  return h(
    "section",
    { class: "card wide", "aria-label": "Method" },
    h("h2", {}, "Equation"),
    h("pre", { class: "equation" }, equation.join("\n")),
    h("h2", {}, `Changes from ${against}`),
    changes.length ? h("div", { class: "scroll" }, table) : none,
  );
}

function configuration({ settings, chosen }) {
  const mine = new Set(chosen);
  const row = ([path, value]) =>
    h("tr", { class: mine.has(path) ? "chosen" : "" }, h("th", { scope: "row" }, path), h("td", {}, value));
  const table = h("table", { class: "settings" }, h("tbody", {}, ...settings.map(row)));
  return h(
    "section",
    { class: "card wide", "aria-label": "Configuration" },
    h("h2", {}, "Configuration"),
    h("p", { class: "quiet" }, "Settings the user chose are marked."),
    h("div", { class: "scroll tall" }, table),
  );
}
