// The curves of some runs: a chart for each chosen metric, what the colours mean, and how the runs differ.

import { ask } from "./api.js";
import { chart, seriesColour } from "./charts.js";
import { h, many, remember } from "./dom.js";

const DEFAULTS = 6;
const AXES = ["step", "seconds", "decisions"];

export class Panel {
  /** `drawn` is called after each drawing, when `colours` says which run has which colour. */
  constructor(drawn) {
    this.drawn = drawn;
    this.colours = new Map();
    this.charts = [];
    this.turn = 0;
    this.menuOpen = false;
    this.view = {
      metrics: remember("metrics"),
      x: remember("x") ?? "step",
      smooth: remember("smooth") ?? 0,
      together: remember("together") ?? true,
    };
    this.element = h("section", { class: "curves", "aria-label": "Curves" });
  }

  /** `subject` has the `ids` of the runs, `why` it is these, whether they are `live`, and `metrics` that may be drawn. */
  async show(subject) {
    this.subject = subject;
    const turn = ++this.turn;
    if (!subject.ids.length) {
      this.empty();
      return;
    }
    const runs = subject.ids.join("\n");
    const { x, smooth, together } = this.view;
    const curves = (metrics) => ask("curves", { runs, metrics, x, smooth, together: together ? "1" : "0" });
    const first = this.view.metrics ?? subject.metrics.slice(0, DEFAULTS);
    const [found, differ] = await Promise.all([curves(first.join(",")), ask("compare", { runs })]);
    const named = this.view.metrics ?? found.metrics.slice(0, DEFAULTS);
    if (named.some((m) => !(m in found.curves))) Object.assign(found.curves, (await curves(named.join(","))).curves);
    if (turn === this.turn) this.paint(named, found, differ);
  }

  paint(named, found, differ) {
    const { ids, why, live } = this.subject;
    const experiments = Object.values(found.curves)[0] ?? [];
    this.colours = new Map(experiments.flatMap((c, i) => c.runs.map((run) => [run, i])));
    const figures = named.map((metric) => new Figure(metric, found.curves[metric] ?? []));
    const shape = JSON.stringify([
      named,
      experiments.map((c) => [c.label, c.runs.length]),
      differ,
      this.subject,
      this.view,
    ]);
    if (shape === this.shape && figures.every((f, i) => this.charts[i].update(f.curves))) return;
    const top = this.element.scrollTop;
    const title = `${many(ids.length, "run")}${why ? ", " : " "}${why || "ticked"}`;
    this.clear();
    this.shape = shape;
    this.element.replaceChildren(
      h(
        "div",
        { class: "panel-head" },
        h("h1", {}, title, live && h("span", { class: "badge running live" }, "live")),
        h("span", { class: "grow" }),
        this.controls(found.metrics, named),
      ),
      legend(experiments),
      h("div", { class: "grid" }, ...figures.map((f) => f.element)),
      differences(differ),
      h("p", { class: "quiet foot" }, experiments.some((c) => c.runs.length > 1) && BANDS),
    );
    this.charts = figures.map((f) => chart(f.box, { title: f.metric, curves: f.curves, x: this.view.x, sync: "runs" }));
    this.element.scrollTop = top;
    this.drawn();
  }

  controls(metrics, named) {
    const choose = (metric, on) => this.set("metrics", on ? [...named, metric] : named.filter((n) => n !== metric));
    const choices = metrics.map((m) => check(m, named.includes(m), (on) => choose(m, on)));
    const menu = h(
      "details",
      { class: "menu" },
      h("summary", {}, `metrics (${named.length})`),
      h("div", { class: "menu-box" }, ...choices),
    );
    menu.open = this.menuOpen;
    menu.addEventListener("toggle", () => (this.menuOpen = menu.open));
    const axes = AXES.map((x) => h("option", { value: x, selected: x === this.view.x }, x));
    const smooth = { type: "range", min: "0", max: "0.95", step: "0.05", value: String(this.view.smooth) };
    return h(
      "div",
      { class: "controls" },
      menu,
      h("label", {}, "over ", h("select", { onchange: (e) => this.set("x", e.target.value) }, ...axes)),
      h("label", {}, "smooth ", h("input", { ...smooth, onchange: (e) => this.set("smooth", Number(e.target.value)) })),
      check("seeds together", this.view.together, (on) => this.set("together", on)),
    );
  }

  set(name, value) {
    this.view[name] = remember(name, value);
    this.show(this.subject);
  }

  empty() {
    this.clear();
    this.element.replaceChildren(
      h(
        "div",
        { class: "sorry" },
        h("h1", {}, "No runs yet"),
        h("p", {}, "Make one, and its curves appear here while it learns:"),
        h("pre", {}, "panoply train grpo --world chain"),
      ),
    );
    this.drawn();
  }

  clear() {
    this.shape = null;
    for (const c of this.charts) c.destroy();
    this.charts = [];
  }

  /** Draw anew in the colours of now. */
  redraw() {
    this.shape = null;
    if (this.subject) this.show(this.subject);
  }

  leave() {
    this.turn++;
    this.clear();
  }
}

const BANDS = "Lines are means over seeds; bands reach from the lowest seed to the highest.";

/** The frame of one chart; runs that do not log its metric are named. */
class Figure {
  constructor(metric, curves) {
    this.metric = metric;
    this.curves = curves.map((c, place) => ({ ...c, place }));
    this.box = h("div", { class: "plot" });
    const lacking = curves.filter((c) => !c.x.length).map((c) => c.label);
    const note = lacking.length === curves.length ? "nothing logged yet" : `not in ${lacking.join(", ")}`;
    const caption = h("figcaption", {}, metric, lacking.length > 0 && h("span", { class: "quiet" }, note));
    this.element = h("figure", { class: "card", "data-metric": metric }, caption, this.box);
  }
}

export function legend(experiments) {
  const entry = (c, i) => {
    const mark = h("i", { class: "mark" });
    mark.style.background = seriesColour(i);
    return h("li", {}, mark, c.label, c.runs.length > 1 && h("span", { class: "quiet" }, ` ${c.runs.length} seeds`));
  };
  return h("ul", { class: "legend", "aria-label": "Experiments" }, ...experiments.map(entry));
}

function differences({ labels, rows }) {
  if (labels.length < 2) return "";
  const head = h("tr", {}, h("th", {}, "setting"), ...labels.map((label) => h("th", {}, label)));
  const row = ([path, values]) => h("tr", {}, h("th", { scope: "row" }, path), ...values.map((v) => h("td", {}, v)));
  const table = h("table", {}, h("thead", {}, head), h("tbody", {}, ...rows.map(row)));
  const none = h("p", { class: "quiet" }, "None but the seed.");
  return h(
    "section",
    { class: "card wide" },
    h("h2", {}, "Differences in configuration"),
    rows.length ? h("div", { class: "scroll" }, table) : none,
  );
}

function check(name, on, change) {
  const box = h("input", { type: "checkbox", checked: on, onchange: (event) => change(event.target.checked) });
  return h("label", { class: "check" }, box, name);
}
