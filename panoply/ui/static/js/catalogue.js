// The catalogue: every registered work, and the verdict on its paper's claim.

import { ask } from "./api.js";
import { h, remember } from "./dom.js";
import { difference } from "./work.js";

const COLUMNS = ["work", "kind", "family", "base", "what it is", "verdict", "difference", "seeds"];

export async function cataloguePage() {
  const page = new CataloguePage();
  if (CataloguePage.works) await page.load();
  else page.load();
  return page;
}

class CataloguePage {
  static works = null;

  constructor() {
    this.title = "Catalogue";
    this.element = h("div", { class: "page" }, h("p", { class: "waiting" }, "Looking through the registry…"));
    this.body = h("tbody");
    this.count = h("span", { class: "quiet", "aria-live": "polite" });
    this.kinds = h("select", { "aria-label": "Kind", onchange: () => this.fill() });
    this.search = h("input", {
      type: "search",
      placeholder: "Search works",
      "aria-label": "Search works",
      value: remember("work-words") ?? "",
      oninput: () => this.fill(),
    });
  }

  async load() {
    try {
      CataloguePage.works ??= (await ask("works")).works;
    } catch (error) {
      this.element.replaceChildren(h("p", { class: "sorry", role: "alert" }, error.message));
      return;
    }
    const { works } = CataloguePage;
    const kinds = [...new Set(works.map((w) => w.kind))].map((kind) => h("option", { value: kind }, kind));
    this.kinds.replaceChildren(h("option", { value: "" }, "all kinds"), ...kinds);
    const tested = works.filter((w) => w.claims.length).length;
    const about = tested
      ? `${tested} works have measured claims; a few verdicts will be wrong by chance, one in twenty where nothing makes a difference.`
      : "No claims have been measured here yet: panoply claim measures them.";
    const head = h("tr", {}, ...COLUMNS.map((name) => h("th", {}, name)));
    const table = h("table", { class: "catalogue" }, h("thead", {}, head), this.body);
    const tools = [h("span", { class: "grow" }), this.search, this.kinds];
    this.element.replaceChildren(
      h("div", { class: "panel-head" }, h("h1", {}, "Catalogue"), this.count, ...tools),
      h("p", { class: "quiet" }, about),
      h("div", { class: "card wide scroll" }, table),
    );
    this.fill();
  }

  fill() {
    const words = remember("work-words", this.search.value).toLowerCase().split(/\s+/).filter(Boolean);
    const kind = this.kinds.value;
    const shown = CataloguePage.works.filter((w) => {
      const verdicts = w.claims.map((c) => c.verdict).join(" ");
      const about = `${w.id} ${w.kind} ${w.family} ${w.base} ${w.tags.join(" ")} ${w.about} ${verdicts}`.toLowerCase();
      return (!kind || w.kind === kind) && words.every((word) => about.includes(word));
    });
    this.count.textContent = `${shown.length} of ${CataloguePage.works.length} works`;
    this.body.replaceChildren(...shown.map(row));
  }

  key(event) {
    if (event.key !== "/") return false;
    this.search.focus();
    return true;
  }
}

function row(w) {
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, h("a", { href: `#/work/${encodeURIComponent(w.id)}` }, w.name)),
    h("td", {}, w.kind),
    h("td", {}, w.family ?? "–"),
    h("td", {}, w.base ?? "–"),
    h("td", { class: "about" }, w.about),
    h("td", {}, verdict(w)),
    h("td", { class: "num" }, w.claims.map(difference).join(" ")),
    h("td", { class: "num" }, w.claims.map((c) => c.seeds ?? "").join(" ")),
  );
}

function verdict({ claims, claimed }) {
  if (!claims.length) return h("span", { class: "quiet" }, claimed ? "not measured" : "–");
  return h("span", { class: "claims" }, ...claims.map((c) => h("span", { class: `badge ${c.verdict}` }, c.verdict)));
}
