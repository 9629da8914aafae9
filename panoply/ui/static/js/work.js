// One work: its equation, its parts as a diff, and its claim with what was measured.

import { ask } from "./api.js";
import { chart } from "./charts.js";
import { h, show } from "./dom.js";
import { legend } from "./panel.js";

const card = (title, ...inside) => h("section", { class: "card wide" }, h("h2", {}, title), ...inside);
const command = (text) => h("pre", { class: "command" }, text);

export async function workPage(id) {
  const w = await ask("work", { id });
  const claims = w.claims.map((c) => new Claim(c, w));
  const kind = ` ${w.kind}${w.family ? `, ${w.family}` : ""}`;
  const element = h(
    "div",
    { class: "page" },
    h("p", { class: "crumbs" }, h("a", { href: "#/catalogue" }, "Catalogue"), ` / ${w.id}`),
    h("h1", {}, w.name, h("span", { class: "seed" }, kind)),
    h("div", { class: "doc" }, ...w.doc.split("\n\n").map(paragraph)),
    ...(claims.length ? claims.map((c) => c.element) : [unmeasured(w)]),
    w.equation && card("Equation", h("pre", { class: "equation" }, w.equation.join("\n"))),
    w.changes && card(`Changes from ${w.base}`, table(["part", w.base, w.name], w.changes)),
    w.parts && card("Parts as published", table(["slot", "part", "settings"], w.parts)),
    w.stages && card("Stages", table(["stage", "method"], w.stages)),
    w.kind === "method" && card("Run it", command(`panoply train ${w.name}${w.world ? ` --world ${w.world}` : ""}`)),
  );
  return {
    element,
    title: w.name,
    enter: () => claims.forEach((c) => c.draw()),
    redraw: () => claims.forEach((c) => c.draw()),
    leave: () => claims.forEach((c) => c.drawn?.destroy()),
    key(event) {
      if (event.key !== "Escape") return false;
      location.hash = "#/catalogue";
      return true;
    },
  };
}

/** Text as wide as the page; lines that are indented or listed stay lines. */
const paragraph = (text) => h("p", {}, text.replace(/\n(?![\s-])/g, " "));

/** The difference that was measured, with its interval. */
export function difference({ difference: found, interval }) {
  if (found === undefined || found === null) return "";
  const span = Array.isArray(interval) && interval.length === 2 ? ` [${show(interval[0])}, ${show(interval[1])}]` : "";
  return `${found > 0 ? "+" : ""}${show(found)}${span}`;
}

class Claim {
  constructor(claim, work) {
    this.curves = (claim.curves ?? []).map((c, place) => ({ ...c, place }));
    this.x = Object.keys(claim.budget ?? {})[0] ?? "step";
    this.metric = claim.metric ?? "measured";
    this.box = h("div", { class: "plot" });
    const against = Object.keys(claim.order ?? {}).slice(1);
    const facts = [
      ["difference, interval that decides", difference(claim)],
      ["seeds", claim.seeds],
      ["measured", claim.metric],
      ["world", claim.world],
      ["against", against.join(", ")],
      ["on", claim.date],
    ].filter(([, value]) => value);
    const cell = ([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)));
    const badge = h("span", { class: `badge ${claim.verdict}` }, claim.verdict);
    this.element = card(
      "Claim",
      h("p", {}, badge, " ", claim.says ?? work.says ?? ""),
      h("div", { class: "facts" }, h("dl", {}, ...facts.map(cell))),
      ...(this.curves.length ? [legend(this.curves), this.box] : []),
      claim.command && command(claim.command),
    );
  }

  draw() {
    this.drawn?.destroy();
    if (!this.curves.length) return;
    this.drawn = chart(this.box, { title: this.metric, curves: this.curves, x: this.x, height: 240, sync: "claim" });
  }
}

function unmeasured(w) {
  return w.says && card("Claim, not measured yet", h("p", {}, w.says), command(`panoply claim ${w.name}`));
}

function table(head, rows) {
  if (!rows.length) return h("p", { class: "quiet" }, "None.");
  const row = (cells) => h("tr", {}, ...cells.map((cell, i) => h(i ? "td" : "th", {}, cell)));
  const top = h("thead", {}, h("tr", {}, ...head.map((t) => h("th", {}, t))));
  return h("div", { class: "scroll" }, h("table", {}, top, h("tbody", {}, ...rows.map(row))));
}
