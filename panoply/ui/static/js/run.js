// One run: what it was told, how it went, and its recorded episodes.

import { ask } from "./api.js";
import { chart } from "./charts.js";
import { Rows, bare, duration, h, remember, show } from "./dom.js";

export const ORDERS = {
  newest: { name: "newest first", by: (e) => e.step ?? 0 },
  return: { name: "highest return", by: (e) => e.return ?? -Infinity },
  surprise: { name: "most surprising", by: (e) => e.surprise },
  gated: { name: "most gated", by: (e) => e.gated / Math.max(1, e.decisions) },
};

export const SURPRISING = "High reward for text that was not expected: the product of an episode's ranks by return and by mean −log-probability among all that were recorded. A hacked reward shows here first.";

export function sorted(episodes, order) {
  const { by } = ORDERS[order];
  return [...episodes].sort((a, b) => by(b) - by(a) || a.at - b.at);
}

export function episodeRow(run, e, current = null) {
  return h("a", { class: `episode${e.at === current ? " current" : ""}`, href: `#/run/${encodeURIComponent(run)}/episode/${e.at}`, tabindex: "-1", title: e.left_out ? "left out by select" : "" },
    h("span", { class: "said" }, e.snippet || "–"),
    h("span", { class: "numbers" },
      h("span", { class: "pill" }, `step ${e.step}`),
      h("span", { class: e.return > 0 ? "pill good" : "pill" }, `R ${show(e.return, 2)}`),
      e.gated ? h("span", { class: "pill gate" }, `${e.gated} gated`) : null,
      h("span", { class: "pill", title: "surprise, 0 to 1" }, `✦ ${show(e.surprise, 2)}`),
      e.turns > 1 && e.turns < e.decisions ? h("span", { class: "pill" }, `${e.turns} turns`) : null,
      h("span", { class: "pill" }, `${e.decisions} dec.`),
      e.left_out ? h("span", { class: "pill" }, "left out") : null));
}

export async function runPage(id) {
  const found = await ask("run", { run: id });
  const facts = found.facts;
  if (facts.problem) throw new Error(facts.problem);
  const recorded = await ask("episodes", { run: id });
  let charts = [];
  let timer = 0;
  let all = false;
  let order = remember("order") ?? "newest";
  const grid = h("div", { class: "grid" });
  const head = h("div", { class: "facts" });
  const more = h("button", { class: "small", onclick: () => { all = !all; draw(); } });

  const list = new Rows({ height: 58, label: "episodes", draw: (e) => episodeRow(id, e), act(key, e) { if (key !== "Enter") return false; location.hash = `#/run/${encodeURIComponent(id)}/episode/${e.at}`; return true; } });
  const about = h("p", { class: "quiet" });
  const orders = h("select", { "aria-label": "Order of episodes", onchange: () => { order = remember("order", orders.value); fill(); } }, ...Object.entries(ORDERS).map(([key, o]) => h("option", { value: key, selected: key === order }, o.name)));
  const words = h("input", { type: "search", placeholder: "Search what was said", "aria-label": "Search episodes", oninput: fill });

  function fill() {
    const text = words.value.toLowerCase();
    list.set(sorted(recorded.episodes.filter((e) => e.snippet.toLowerCase().includes(text)), order));
    about.textContent = order === "surprise" ? SURPRISING : "";
  }

  function tell(f) {
    const score = f.after === null ? null : [f.before === null ? "" : `${show(f.before, 2)} → `, h("b", {}, show(f.after, 2))];
    const cell = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
    head.replaceChildren(h("dl", {},
      cell("status", h("span", { class: `badge ${f.status}` }, f.status)),
      cell("steps", `${f.step} of ${f.of ?? "?"}`), cell("time", duration(f.seconds)),
      score ? cell(`held-out ${f.measured}`, h("span", {}, ...score)) : "", cell("seed", String(f.seed ?? "–")),
      cell("started", (f.created ?? "").replace("T", " ")), cell("panoply", f.version)));
    if (f.why) head.append(h("p", { class: "bad-text", role: "alert" }, f.why));
  }

  async function draw() {
    const first = await ask("curves", { runs: id, metrics: "", together: "0" });
    const metrics = all ? first.metrics : first.metrics.slice(0, 6);
    const answer = metrics.length ? await ask("curves", { runs: id, metrics: metrics.slice(0, 24).join(","), together: "0" }) : { curves: {} };
    for (const c of charts) c.destroy();
    charts = [];
    grid.replaceChildren();
    more.textContent = all ? "fewer metrics" : `all ${first.metrics.length} metrics`;
    more.hidden = first.metrics.length <= 6;
    if (!metrics.length) grid.append(h("p", { class: "quiet" }, "No step has been logged yet."));
    for (const metric of Object.keys(answer.curves)) {
      const box = h("div", { class: "plot" });
      grid.append(h("figure", { class: "card" }, h("figcaption", {}, metric), box));
      charts.push(chart(box, { title: metric, curves: answer.curves[metric].map((c) => ({ ...c, place: 0 })), height: 170, sync: "run" }));
    }
  }

  async function watch() {
    if (!document.hidden) {
      try {
        const now = await ask("run", { run: id });
        if (JSON.stringify(now.facts) !== JSON.stringify(found.facts)) {
          found.facts = now.facts;
          tell(now.facts);
          await draw();
          const size = recorded.episodes.length;
          recorded.episodes = (await ask("episodes", { run: id })).episodes;
          if (recorded.episodes.length !== size) fill();
        }
      } catch { /* the server is gone; what is shown stays */ }
    }
    timer = setTimeout(watch, found.facts.status === "running" ? 2000 : 10000);
  }

  tell(facts);
  fill();
  await draw();
  timer = setTimeout(watch, 2000);
  const chosen = new Set(found.chosen);
  const command = found.command && found.command !== "python" ? h("pre", { class: "command" }, found.command) : "";
  const element = h("div", { class: "page run-page" },
    h("p", { class: "crumbs" }, h("a", { href: "#/runs" }, "Runs"), " / ", id),
    h("h1", {}, `${bare(facts.method)} on ${bare(facts.world)}`, h("span", { class: "seed" }, ` seed ${facts.seed ?? "–"}`)),
    head, command, grid, more,
    h("div", { class: "two" },
      h("section", { class: "card wide", "aria-label": "Episodes" }, h("div", { class: "panel-head" }, h("h2", {}, `Episodes (${recorded.episodes.length})`), h("span", { class: "grow" }), words, orders), about,
        recorded.episodes.length ? list.box : h("p", { class: "quiet" }, "None recorded yet. run.episodes_every says how often some are.")),
      h("section", { class: "card wide", "aria-label": "Configuration" }, h("h2", {}, "Configuration"), h("p", { class: "quiet" }, "Settings the user chose are marked."),
        h("div", { class: "scroll tall" }, h("table", { class: "settings" }, h("tbody", {}, ...found.settings.map(([path, value]) => h("tr", { class: chosen.has(path) ? "chosen" : "" }, h("th", { scope: "row" }, path), h("td", {}, value)))))))));
  list.box.classList.add("boxed");
  return { element, title: `${bare(facts.method)} on ${bare(facts.world)}`, shown: () => list.paint(), redraw: draw, leave() { clearTimeout(timer); for (const c of charts) c.destroy(); },
    key(event) { if (event.key === "Escape") { location.hash = "#/runs"; return true; } return false; } };
}
