// The runs: a list to search and tick, beside the curves of what is ticked, or of what is running.

import { ask } from "./api.js";
import { seriesColour } from "./charts.js";
import { Rows, bare, h, remember, show } from "./dom.js";
import { Panel } from "./panel.js";

const STATUSES = ["running", "finished", "stopped", "diverged", "unreadable"];
const MOST = 200;
const open = (run) => `#/run/${encodeURIComponent(run.id)}`;

export async function runsPage() {
  const page = new RunsPage();
  await page.load();
  page.wait();
  return page;
}

class RunsPage {
  constructor() {
    this.title = "Runs";
    this.runs = [];
    this.metrics = [];
    this.shown = [];
    this.ticked = new Set(remember("ticked") ?? []);
    this.panel = new Panel(() => this.list.refresh());
    this.list = new Rows({
      height: 52,
      label: "runs",
      draw: (run) => this.row(run),
      act: (key, run) => this.act(key, run),
    });
    this.search = h("input", {
      type: "search",
      placeholder: "Search runs: method, world, seed, folder …",
      "aria-label": "Search runs",
      value: remember("words") ?? "",
      oninput: () => this.filter(),
    });
    const statuses = STATUSES.map((status) => h("option", { value: status }, status));
    this.status = h(
      "select",
      { "aria-label": "Status", onchange: () => this.filter() },
      h("option", { value: "" }, "all"),
      ...statuses,
    );
    this.cached = h("input", { type: "checkbox", checked: remember("cached") ?? false, onchange: () => this.load() });
    this.count = h("span", { class: "quiet", "aria-live": "polite" });
    this.notes = h("div", { class: "notes" });
    this.element = this.layout();
  }

  layout() {
    const button = (name, act) => h("button", { class: "small", onclick: act }, name);
    const tools = h(
      "div",
      { class: "tool-row" },
      this.status,
      h("label", { class: "check", title: "Runs that comparisons keep below hidden folders" }, this.cached, "cached"),
      h("span", { class: "grow" }),
      button("tick all", () =>
        this.tick(
          this.shown
            .filter((r) => !r.problem)
            .slice(0, MOST)
            .map((r) => r.id),
        ),
      ),
      button("untick all", () => this.tick([])),
    );
    const side = h(
      "section",
      { class: "side", "aria-label": "Runs" },
      h("div", { class: "tools" }, this.search, tools),
      h("div", { class: "count-row" }, this.count),
      this.list.box,
      this.notes,
    );
    return h("div", { class: "runs-page" }, side, this.panel.element);
  }

  // ---------------------------------------------------------------- the list

  row(run) {
    const on = this.ticked.has(run.id);
    const box = h("span", { class: `tick${on ? " on" : ""}`, "aria-hidden": "true" });
    const place = this.panel.colours.get(run.id);
    if (on && place !== undefined) box.style.setProperty("--mark", seriesColour(place));
    const title = run.problem ? run.name : `${bare(run.method)} · ${bare(run.world)}`;
    const seed = run.problem ? null : h("span", { class: "seed" }, ` seed ${run.seed ?? "–"}`);
    const text = h(
      "div",
      { class: "run-text" },
      h("a", { class: "run-title", href: open(run), tabindex: "-1" }, title, seed),
      h("span", { class: "run-sub", title: run.id }, run.problem ?? run.id),
    );
    const click = (event) => {
      if (event.target.closest("a")) return;
      this.list.at = this.shown.indexOf(run);
      this.toggle(run);
    };
    return h(
      "div",
      { class: `run ${run.status}`, "aria-selected": String(on), onclick: click },
      box,
      text,
      figures(run),
    );
  }

  act(key, run) {
    if (key === " " || key === "x") this.toggle(run);
    else if (key === "Enter") location.hash = open(run);
    else return false;
    return true;
  }

  filter() {
    const text = remember("words", this.search.value).toLowerCase();
    const words = text
      .replace(/\bseed\s*=?\s*(\d+)/g, "seed=$1;")
      .split(/\s+/)
      .filter(Boolean);
    this.shown = this.runs.filter((r) => {
      if (this.status.value && r.status !== this.status.value) return false;
      const about = `${r.id} ${bare(r.method)} ${bare(r.world)} seed=${r.seed}; ${r.status} ${r.version}`.toLowerCase();
      return words.every((word) => about.includes(word));
    });
    this.list.set(this.shown);
    const all = this.shown.length === this.runs.length;
    this.count.textContent = all ? `${this.runs.length} runs` : `${this.shown.length} of ${this.runs.length} runs`;
  }

  toggle(run) {
    if (run.problem) return;
    if (!this.ticked.delete(run.id)) this.ticked.add(run.id);
    this.tick(this.ticked);
  }

  tick(ids) {
    this.ticked = new Set(ids);
    remember("ticked", [...this.ticked]);
    this.draw();
  }

  // ---------------------------------------------------------------- the curves

  /** The runs whose curves are shown: ticked ones, or those that run now, or the newest few. */
  subject() {
    const running = this.runs.filter((r) => r.status === "running").map((r) => r.id);
    const known = new Set(this.runs.map((r) => r.id));
    const ticked = [...this.ticked].filter((id) => known.has(id));
    if (ticked.length) return { why: "", ids: ticked, live: ticked.some((id) => running.includes(id)) };
    if (running.length) return { why: "running now", ids: running.slice(0, 12), live: true };
    const newest = this.runs.filter((r) => !r.problem).slice(0, 3);
    return { why: "newest", ids: newest.map((r) => r.id), live: false };
  }

  draw() {
    const sorry = (error) =>
      this.panel.element.replaceChildren(h("p", { class: "sorry", role: "alert" }, error.message));
    this.panel.show({ ...this.subject(), metrics: this.metrics }).catch(sorry);
  }

  async load() {
    remember("cached", this.cached.checked);
    const found = await ask("runs", { cached: this.cached.checked ? "1" : "0", stamp: this.stamp ?? "" });
    if (found.stamp === this.stamp) return;
    this.stamp = found.stamp;
    this.runs = found.runs;
    this.metrics = found.metrics;
    document.getElementById("folder").textContent = found.folder;
    const strangers = found.strangers.slice(0, 6).join(", ") + (found.strangers.length > 6 ? ", …" : "");
    this.notes.replaceChildren(strangers ? h("p", { class: "quiet" }, `Not runs, so not shown: ${strangers}`) : "");
    this.filter();
    this.draw();
  }

  /** Look again and again, more often while something runs. */
  wait() {
    const running = this.runs.some((r) => r.status === "running");
    this.timer = setTimeout(
      async () => {
        // where the server is gone, what is shown stays
        if (!document.hidden) await this.load().catch(() => {});
        if (this.timer) this.wait();
      },
      running ? 2000 : 4000,
    );
  }

  // ---------------------------------------------------------------- as a page

  enter() {
    this.list.paint();
  }

  redraw() {
    this.panel.redraw();
  }

  leave() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.panel.leave();
  }

  key(event) {
    if (event.key === "/") this.search.focus();
    else if (event.key === "u") this.tick([]);
    else if (
      ["ArrowDown", "ArrowUp", "j", "k", " ", "x", "Enter"].includes(event.key) &&
      event.target === document.body
    ) {
      this.list.box.focus();
      this.list.box.dispatchEvent(new KeyboardEvent("keydown", { key: event.key }));
    } else return false;
    return true;
  }
}

function figures(run) {
  if (run.problem) return h("span", { class: "badge bad" }, "unreadable");
  const from = run.before === null ? "" : `${show(run.before, 2)} → `;
  const measured = run.before !== null || run.after !== null;
  const score = measured
    ? h(
        "span",
        { class: "score", title: `held-out ${run.measured}, before → now` },
        from,
        h("b", {}, show(run.after, 2)),
      )
    : h("span", { class: "score", title: "reward" }, show(run.reward));
  const word = run.status === "running" ? `${run.step} / ${run.of}` : run.status;
  const under =
    run.status === "finished"
      ? h("span", { class: "quiet" }, `${run.step} steps`)
      : h("span", { class: `badge ${run.status}` }, word);
  return h("div", { class: "figures" }, score, under);
}
