// The runs: a list to search and tick, and the curves of what is ticked, or of what is running.

import { ask } from "./api.js";
import { chart, seriesColour } from "./charts.js";
import { Rows, bare, h, many, remember, show } from "./dom.js";

const DEFAULTS = 6;
const STATUSES = ["running", "finished", "stopped", "diverged", "unreadable"];

export async function runsPage() {
  const state = {
    runs: [], metrics: [], strangers: [], shown: [],
    ticked: new Set(remember("ticked") ?? []),
    words: remember("words") ?? "", status: "", cached: remember("cached") ?? false,
    chosen: remember("metrics"), x: remember("x") ?? "step", smooth: remember("smooth") ?? 0, together: remember("together") ?? true,
  };
  let charts = [];
  let timer = 0;
  let asked = 0;

  const search = h("input", { type: "search", placeholder: "Search runs: method, world, seed, folder …", "aria-label": "Search runs", value: state.words, oninput: () => { state.words = search.value; remember("words", state.words); filter(); } });
  const status = h("select", { "aria-label": "Status", onchange: () => { state.status = status.value; filter(); } }, h("option", { value: "" }, "all"), ...STATUSES.map((s) => h("option", { value: s }, s)));
  const cached = h("input", { type: "checkbox", checked: state.cached, onchange: () => { state.cached = cached.checked; remember("cached", state.cached); load(); } });
  const count = h("span", { class: "quiet", "aria-live": "polite" });
  const list = new Rows({
    height: 52, label: "runs", draw: row,
    act(key, run) {
      if (key === " " || key === "x") toggle(run.id);
      else if (key === "Enter") location.hash = `#/run/${encodeURIComponent(run.id)}`;
      else return false;
      return true;
    },
  });
  const all = h("button", { class: "small", onclick: () => tick(state.shown.filter((r) => !r.problem).slice(0, 200).map((r) => r.id)) }, "tick all");
  const none = h("button", { class: "small", onclick: () => tick([]) }, "untick all");
  const notes = h("div", { class: "notes" });
  const panel = h("section", { class: "curves", "aria-label": "Curves" });
  const element = h("div", { class: "runs-page" },
    h("section", { class: "side", "aria-label": "Runs" },
      h("div", { class: "tools" }, search, h("div", { class: "tool-row" }, status, h("label", { class: "check", title: "Runs that comparisons keep below hidden folders" }, cached, "cached"), h("span", { class: "grow" }), all, none)),
      h("div", { class: "count-row" }, count), list.box, notes),
    panel);

  function row(run) {
    const on = state.ticked.has(run.id);
    const place = [...state.ticked].indexOf(run.id);
    const box = h("span", { class: `tick${on ? " on" : ""}`, "aria-hidden": "true" });
    const title = run.problem ? run.name : `${bare(run.method)} · ${bare(run.world)}`;
    const line = h("div", { class: "run-text" },
      h("a", { class: "run-title", href: `#/run/${encodeURIComponent(run.id)}`, tabindex: "-1" }, title, run.problem ? null : h("span", { class: "seed" }, ` seed ${run.seed ?? "–"}`)),
      h("span", { class: "run-sub", title: run.id }, run.problem ?? run.id));
    const made = h("div", { class: `run ${run.status}`, "aria-selected": String(on), onclick: (event) => { if (!event.target.closest("a")) { list.at = state.shown.indexOf(run); toggle(run.id); } } }, box, line, figures(run));
    if (on && state.colours) box.style.setProperty("--mark", seriesColour(state.colours.get(run.id) ?? place));
    return made;
  }

  function figures(run) {
    if (run.problem) return h("span", { class: "badge bad" }, "unreadable");
    const score = run.before === null && run.after === null ? h("span", { class: "score" }, show(run.reward)) :
      h("span", { class: "score", title: `held-out ${run.measured}, before → now` }, run.before === null ? "" : `${show(run.before, 2)} → `, h("b", {}, show(run.after, 2)));
    const under = run.status === "finished" ? h("span", { class: "quiet" }, `${run.step} steps`) :
      h("span", { class: `badge ${run.status}` }, run.status === "running" ? `${run.step} / ${run.of}` : run.status);
    return h("div", { class: "figures" }, score, under);
  }

  function filter() {
    const words = state.words.toLowerCase().replace(/\bseed\s*=?\s*(\d+)/g, "seed=$1;").split(/\s+/).filter(Boolean);
    state.shown = state.runs.filter((r) => {
      if (state.status && r.status !== state.status) return false;
      const text = `${r.id} ${bare(r.method)} ${bare(r.world)} seed=${r.seed}; ${r.status} ${r.version}`.toLowerCase();
      return words.every((w) => text.includes(w));
    });
    list.set(state.shown);
    count.textContent = state.shown.length === state.runs.length ? `${state.runs.length} runs` : `${state.shown.length} of ${state.runs.length} runs`;
  }

  function toggle(id) {
    const run = state.runs.find((r) => r.id === id);
    if (!run || run.problem) return;
    if (!state.ticked.delete(id)) state.ticked.add(id);
    tick(state.ticked);
  }

  function tick(ids) {
    state.ticked = new Set(ids);
    remember("ticked", [...state.ticked]);
    draw();
  }

  /** The runs whose curves are shown: ticked ones, or those that run now, or the newest few. */
  function subject() {
    const known = new Set(state.runs.map((r) => r.id));
    const ticked = [...state.ticked].filter((id) => known.has(id));
    if (ticked.length) return { why: "", ids: ticked };
    const running = state.runs.filter((r) => r.status === "running").map((r) => r.id);
    if (running.length) return { why: "running now", ids: running.slice(0, 12) };
    return { why: "newest", ids: state.runs.filter((r) => !r.problem).slice(0, 3).map((r) => r.id) };
  }

  const live = (ids) => state.runs.some((r) => r.status === "running" && ids.includes(r.id));

  async function draw() {
    const mine = ++asked;
    const { why, ids } = subject();
    if (!ids.length) { empty(); list.refresh(); return; }
    const first = state.metrics.slice(0, DEFAULTS);
    const wanted = state.chosen ?? first;
    const query = { runs: ids.join("\n"), metrics: wanted.join(","), x: state.x, smooth: state.smooth, together: state.together ? "1" : "0" };
    const [found, differ] = await Promise.all([ask("curves", query), ask("compare", { runs: ids.join("\n") })]);
    if (mine !== asked) return;
    const named = state.chosen ?? found.metrics.slice(0, DEFAULTS);
    if (!state.chosen && named.some((m) => !(m in found.curves))) Object.assign(found.curves, (await ask("curves", { ...query, metrics: named.join(",") })).curves);
    if (mine !== asked) return;
    paint(why, ids, named, found, differ);
    list.refresh();
  }

  function paint(why, ids, named, found, differ) {
    const experiments = Object.values(found.curves)[0] ?? [];
    state.colours = new Map(experiments.flatMap((c, i) => c.runs.map((run) => [run, i])));
    const grid = h("div", { class: "grid" });
    const boxes = named.map((metric) => {
      const curves = (found.curves[metric] ?? []).map((c, i) => ({ ...c, place: i }));
      const lacking = curves.filter((c) => !c.x.length);
      const box = h("div", { class: "plot" });
      grid.append(h("figure", { class: "card", "data-metric": metric }, h("figcaption", {}, metric, lacking.length ? h("span", { class: "quiet" }, lacking.length === curves.length ? "nothing logged yet" : ` not in ${lacking.map((c) => c.label).join(", ")}`) : null), box));
      return [box, metric, curves];
    });
    const legend = h("ul", { class: "legend", "aria-label": "Experiments" }, ...experiments.map((c, i) => {
      const mark = h("i", { class: "mark" });
      mark.style.background = seriesColour(i);
      return h("li", {}, mark, c.label, c.runs.length > 1 ? h("span", { class: "quiet" }, ` ${c.runs.length} seeds`) : null);
    }));
    const title = why ? `${many(ids.length, "run")}, ${why}` : `${many(ids.length, "run")} ticked`;
    const top = panel.scrollTop;
    panel.replaceChildren(
      h("div", { class: "panel-head" }, h("h1", {}, title, live(ids) ? h("span", { class: "badge running live" }, "live") : null), h("span", { class: "grow" }), controls(found.metrics, named)),
      legend, grid, differences(differ), experiments.some((c) => c.runs.length > 1) ? h("p", { class: "quiet foot" }, "Lines are means over seeds; bands reach from the lowest seed to the highest.") : "");
    for (const c of charts) c.destroy();
    charts = boxes.map(([box, metric, curves]) => chart(box, { title: metric, curves, x: state.x, sync: "runs" }));
    panel.scrollTop = top;
  }

  function controls(metrics, named) {
    const set = (key, value) => { state[key] = value; remember(key === "chosen" ? "metrics" : key, value); draw(); };
    const menu = h("details", { class: "menu" }, h("summary", {}, `metrics (${named.length})`), h("div", { class: "menu-box" }, ...metrics.map((m) =>
      h("label", { class: "check" }, h("input", { type: "checkbox", checked: named.includes(m), onchange: (event) => set("chosen", event.target.checked ? [...named, m] : named.filter((n) => n !== m)) }), m))));
    if (state.menuOpen) menu.open = true;
    menu.addEventListener("toggle", () => { state.menuOpen = menu.open; });
    return h("div", { class: "controls" }, menu,
      h("label", {}, "over ", h("select", { onchange: (e) => set("x", e.target.value) }, ...["step", "seconds", "decisions"].map((x) => h("option", { value: x, selected: x === state.x }, x)))),
      h("label", {}, "smooth ", h("input", { type: "range", min: "0", max: "0.95", step: "0.05", value: String(state.smooth), onchange: (e) => set("smooth", Number(e.target.value)) })),
      h("label", { class: "check" }, h("input", { type: "checkbox", checked: state.together, onchange: (e) => set("together", e.target.checked) }), "seeds together"));
  }

  function differences({ labels, rows }) {
    if (labels.length < 2) return "";
    return h("section", { class: "card wide" }, h("h2", {}, "Differences in configuration"), rows.length ? h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", {}, "setting"), ...labels.map((l) => h("th", {}, l)))),
      h("tbody", {}, ...rows.map(([path, values]) => h("tr", {}, h("th", { scope: "row" }, path), ...values.map((v) => h("td", {}, v))))))) : h("p", { class: "quiet" }, "None but the seed."));
  }

  function empty() {
    for (const c of charts) c.destroy();
    charts = [];
    panel.replaceChildren(h("div", { class: "sorry" }, h("h1", {}, "No runs yet"), h("p", {}, "Make one, and its curves appear here while it learns:"), h("pre", {}, "panoply train grpo --world chain")));
  }

  async function load() {
    const found = await ask("runs", { cached: state.cached ? "1" : "0", stamp: state.stamp ?? "" });
    if (found.stamp === state.stamp) return;
    state.stamp = found.stamp;
    document.getElementById("folder").textContent = found.folder;
    Object.assign(state, { runs: found.runs, metrics: found.metrics, strangers: found.strangers });
    notes.replaceChildren(found.strangers.length ? h("p", { class: "quiet" }, `Not runs, so not shown: ${found.strangers.slice(0, 6).join(", ")}${found.strangers.length > 6 ? ", …" : ""}`) : "");
    filter();
    draw().catch((error) => { panel.replaceChildren(h("p", { class: "sorry", role: "alert" }, error.message)); });
  }

  async function tickClock() {
    if (!document.hidden) { try { await load(); } catch { /* the server is gone; what is shown stays */ } }
    timer = setTimeout(tickClock, state.runs.some((r) => r.status === "running") ? 2000 : 8000);
  }

  await load();
  if (!state.runs.length) empty();
  timer = setTimeout(tickClock, 2000);
  return {
    element, title: "Runs",
    shown() { list.paint(); },
    redraw: draw,
    leave() { clearTimeout(timer); asked++; for (const c of charts) c.destroy(); },
    key(event) {
      if (event.key === "/") search.focus();
      else if (event.key === "u") tick([]);
      else if (["ArrowDown", "ArrowUp", "j", "k", " ", "x", "Enter"].includes(event.key) && event.target === document.body) { list.box.focus(); list.box.dispatchEvent(new KeyboardEvent("keydown", { key: event.key })); }
      else return false;
      return true;
    },
  };
}
