// The catalogue: every registered work, its parts as a diff, and what was measured of it.

import { ask } from "./api.js";
import { chart, seriesColour } from "./charts.js";
import { h, remember, show } from "./dom.js";

let works = null;

function verdict({ claims, claimed }) {
  if (!claims.length) return h("span", { class: "quiet" }, claimed ? "not measured" : "–");
  return h("span", { class: "claims" }, ...claims.map((c) => h("span", { class: `badge ${c.verdict}` }, c.verdict)));
}

function difference(c) {
  if (c.difference === undefined || c.difference === null) return "";
  const span = Array.isArray(c.interval) && c.interval.length === 2 ? ` [${show(c.interval[0])}, ${show(c.interval[1])}]` : "";
  return `${c.difference > 0 ? "+" : ""}${show(c.difference)}${span}`;
}

export async function cataloguePage() {
  const holder = h("div", { class: "page" }, h("p", { class: "waiting" }, "Looking through the registry…"));
  const state = { words: remember("work-words") ?? "", kind: "" };
  const body = h("tbody");
  const count = h("span", { class: "quiet", "aria-live": "polite" });
  const search = h("input", { type: "search", placeholder: "Search works", "aria-label": "Search works", value: state.words, oninput: () => { state.words = remember("work-words", search.value); fill(); } });
  const kinds = h("select", { "aria-label": "Kind", onchange: () => { state.kind = kinds.value; fill(); } });

  function fill() {
    const words = state.words.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = works.filter((w) => (!state.kind || w.kind === state.kind) && words.every((x) => `${w.id} ${w.kind} ${w.family} ${w.base} ${w.about} ${w.claims.map((c) => c.verdict).join(" ")}`.toLowerCase().includes(x)));
    count.textContent = `${shown.length} of ${works.length} works`;
    body.replaceChildren(...shown.map((w) => h("tr", {}, h("th", { scope: "row" }, h("a", { href: `#/work/${encodeURIComponent(w.id)}` }, w.name)),
      h("td", {}, w.kind), h("td", {}, w.family ?? "–"), h("td", {}, w.base ?? "–"), h("td", { class: "about" }, w.about),
      h("td", {}, verdict(w)), h("td", { class: "num" }, w.claims.map(difference).join(" ")), h("td", { class: "num" }, w.claims.map((c) => (Array.isArray(c.seeds) ? c.seeds.length : c.seeds) ?? "").join(" ")))));
  }

  async function load() {
    try {
      works ??= (await ask("works")).works;
    } catch (error) {
      holder.replaceChildren(h("p", { class: "sorry", role: "alert" }, error.message));
      return;
    }
    kinds.replaceChildren(h("option", { value: "" }, "all kinds"), ...[...new Set(works.map((w) => w.kind))].map((k) => h("option", { value: k }, k)));
    const tested = works.filter((w) => w.claims.length).length;
    holder.replaceChildren(h("div", { class: "panel-head" }, h("h1", {}, "Catalogue"), count, h("span", { class: "grow" }), search, kinds),
      h("p", { class: "quiet" }, tested ? `${tested} works have measured claims; each verdict rests on a 95 % interval, so a few will be wrong by chance.` : "No claims have been measured here yet: panoply claim measures them."),
      h("div", { class: "card wide" }, h("table", { class: "catalogue" }, h("thead", {}, h("tr", {}, ...["work", "kind", "family", "base", "what it is", "verdict", "difference", "seeds"].map((t) => h("th", {}, t)))), body)));
    fill();
  }

  load();
  return { element: holder, title: "Catalogue", key(event) { if (event.key !== "/") return false; search.focus(); return true; } };
}

export async function workPage(id) {
  const w = await ask("work", { id });
  const table = (head, rows) => h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ...head.map((t) => h("th", {}, t)))), h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((cell, i) => h(i ? "td" : "th", {}, cell)))))));
  const card = (title, ...inside) => h("section", { class: "card wide" }, h("h2", {}, title), ...inside);
  const measured = (c) => {
    c.box = h("div", { class: "plot" });
    const facts = [["difference, 95 % interval", difference(c)], ["seeds", String(c.seeds ?? "–")], ["measured", c.metric ?? "–"], ["world", c.world ?? "–"], ["against", Object.keys(c.order ?? {}).slice(1).join(", ") || "–"], ["on", c.date ?? "–"]];
    const legend = h("ul", { class: "legend" }, ...(c.curves ?? []).map((x, i) => { const mark = h("i", { class: "mark" }); mark.style.background = seriesColour(i); return h("li", {}, mark, x.label); }));
    return card("Claim", h("p", {}, h("span", { class: `badge ${c.verdict}` }, c.verdict), " ", c.says ?? w.says ?? ""),
      h("div", { class: "facts" }, h("dl", {}, ...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))))),
      c.curves?.length ? legend : "", c.curves?.length ? c.box : "", c.command ? h("pre", { class: "command" }, c.command) : "");
  };
  const element = h("div", { class: "page" },
    h("p", { class: "crumbs" }, h("a", { href: "#/catalogue" }, "Catalogue"), ` / ${w.id}`),
    h("h1", {}, w.name, h("span", { class: "seed" }, ` ${w.kind}${w.family ? `, ${w.family}` : ""}`)),
    h("p", { class: "doc" }, w.doc),
    w.claims.length ? "" : w.says ? card("Claim, not measured yet", h("p", {}, w.says), h("pre", { class: "command" }, `panoply claim ${w.name}`)) : "",
    ...w.claims.map(measured),
    w.equation ? card("Equation", h("pre", { class: "equation" }, w.equation.join("\n"))) : "",
    w.changes ? card(`Changes from ${w.base}`, w.changes.length ? table(["part", w.base, w.name], w.changes) : h("p", { class: "quiet" }, "None.")) : "",
    w.parts ? card("Parts as published", table(["slot", "part", "settings"], w.parts)) : "",
    w.stages ? card("Stages", table(["stage", "method"], w.stages)) : "",
    w.kind === "method" ? card("Run it", h("pre", { class: "command" }, `panoply train ${w.name}${w.world ? ` --world ${w.world}` : ""}`)) : "");
  const charts = w.claims.filter((c) => c.curves?.length).map((c) => chart(c.box, { title: `claim of ${w.name}`, curves: c.curves.map((x, place) => ({ ...x, place })), x: Object.keys(c.budget ?? { step: 0 })[0], height: 240, sync: "claim" }));
  return { element, title: w.name, leave() { for (const c of charts) c.destroy(); }, key(event) { if (event.key !== "Escape") return false; location.hash = "#/catalogue"; return true; } };
}
