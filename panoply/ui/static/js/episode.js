// An episode as turns, and the lane that shows it. Long episodes are cut into chunks that are made when they come into sight.

import { h, many, show } from "./dom.js";
import { account, brief, costs, judged } from "./turns.js";

const LONG = 1500;
const CHUNK = 200;
const KEPT = 12;
const A_FRAME = 3;
const ENDS = { 0: "open", 1: "ended", 2: "truncated" };

/** Where decisions, prompts and tool outputs lie in a record. */
export class Episode {
  constructor(record) {
    this.record = { gates: {}, signals: {}, verdicts: [], ...record };
    this.length = record.position.length;
    const { pieces, position } = record;
    const decisionAt = new Int32Array(pieces.length).fill(-1);
    position.forEach((p, i) => {
      if (p >= 0 && p < pieces.length) decisionAt[p] = i;
    });
    const turnOf = (i) => record.turn?.[i] ?? 0;
    this.turns = [];
    let context = [];
    for (let p = 0; p < pieces.length; p++) {
      const i = decisionAt[p];
      if (i < 0) {
        context.push(pieces[p]);
        continue;
      }
      const last = this.turns.at(-1);
      if (!last || context.length || (record.tokens && last.turn !== turnOf(i))) {
        // actions follow one another without a word between
        this.turns.push({
          turn: turnOf(i),
          context: context.join(""),
          again: last?.turn === turnOf(i),
          decisions: [],
        });
        context = [];
      }
      this.turns.at(-1).decisions.push(i);
    }
    this.after = context.join("");
    this.turnIndex = new Int32Array(this.length).fill(0);
    this.turns.forEach((turn, k) =>
      turn.decisions.forEach((i) => {
        this.turnIndex[i] = k;
      }),
    );
    this.earned = this.turns.map(() => new Map());
    for (const [name, rows] of Object.entries(this.record.signals))
      for (const [row, value] of rows) {
        const earned = this.earned[this.turnIndex[row]];
        earned?.set(name, (earned.get(name) ?? 0) + value);
      }
    this.verdicts = this.turns.map(() => "");
    for (const [row, said] of this.record.verdicts) this.verdicts[this.turnIndex[row]] = said;
    this.gates = new Map();
    for (const [name, rows] of Object.entries(this.record.gates))
      for (const i of rows) this.gates.set(i, [...(this.gates.get(i) ?? []), name]);
  }

  has(column) {
    return this.record[column]?.some((v) => v !== null) ?? false;
  }

  /** The decision that was least expected. */
  oddest() {
    const logp = this.record["logp@reference"] ?? this.record.logp ?? [];
    return logp.reduce((best, v, i) => (v !== null && v < (logp[best] ?? Infinity) ? i : best), 0);
  }

  /** Signals of the whole episode. */
  spent() {
    const all = new Map();
    for (const earned of this.earned) for (const [name, value] of earned) all.set(name, (all.get(name) ?? 0) + value);
    return all;
  }

  text(i) {
    return this.record.pieces[this.record.position[i]] ?? "";
  }

  total(column, decisions = null) {
    const values = this.record[column];
    if (!values) return null;
    return (decisions ? decisions.map((i) => values[i]) : values).reduce((a, b) => a + (b ?? 0), 0);
  }

  mean(column, decisions = null) {
    const values = this.record[column] ?? [];
    const known = (decisions ? decisions.map((i) => values[i] ?? null) : values).filter((v) => v !== null);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  }
}

const waiting = [];

/** Work that may come a frame or two later, a little at a time, so that no frame is late. */
function soon(work) {
  waiting.push(work);
  if (waiting.length === 1) requestAnimationFrame(next);
}

function next() {
  for (const work of waiting.splice(0, A_FRAME)) work();
  if (waiting.length) requestAnimationFrame(next);
}

function visible(text) {
  if (text === "") return "·";
  return text.replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t");
}

/** The column of one episode. `pick(i)` is called with a decision that was clicked, `hover(i, element)` with one under the pointer. */
export class Lane {
  constructor(episode, summary, { pick, hover, scroller }) {
    this.episode = episode;
    this.scale = null;
    this.chunks = [];
    this.selected = -1;
    this.chunkOf = new Int32Array(episode.length);
    this.filled = [];
    this.watcher = new IntersectionObserver(
      (seen) => {
        for (const {
          target: { chunk },
          isIntersecting,
          boundingClientRect,
        } of seen) {
          chunk.near = isIntersecting;
          if (isIntersecting)
            soon(() => {
              if (chunk.near) this.show(chunk);
            });
          else if (chunk.filled) chunk.height = boundingClientRect.height;
        }
      },
      { root: scroller, rootMargin: "400px 0px" },
    );
    const r = episode.record;
    const odd = episode.mean(r["logp@reference"] ? "logp@reference" : "logp");
    this.title = h(
      "button",
      { class: "lane-title", onclick: () => pick(0) },
      h("b", {}, `episode ${r.episode}`),
      summary?.count > 1 && h("span", { class: "count", title: "episodes that are the same" }, `× ${summary.count}`),
      h("span", {}, `R ${show(episode.total("reward"), 2)}`),
      h("span", {}, `Â ${show(episode.mean("advantage"), 2)}`),
      h("span", { title: "mean log-probability" }, `log π ${show(odd, 2)}`),
      h("span", { title: "surprise" }, `✦ ${show(summary?.surprise, 2)}`),
      h("span", {}, many(episode.length, "decision")),
      h("span", {}, ENDS[r.end] ?? ""),
      ...(episode.turns.length > 1 ? costs(episode.spent()) : []),
      r.left_out ? h("span", { class: "pill" }, "left out by select") : null,
    );
    this.sections = episode.turns.map((turn, k) => this.section(turn, k));
    this.body = h(
      "div",
      { class: "lane-body" },
      ...this.sections,
      episode.after ? this.context(episode.after, "after") : null,
    );
    this.element = h("article", { class: "lane", "aria-label": `episode ${r.episode}` }, this.title, this.body);
    this.body.addEventListener("click", (event) => {
      const token = event.target.closest("[data-i]");
      if (token) pick(Number(token.dataset.i));
    });
    this.body.addEventListener("pointermove", (event) => {
      const token = event.target.closest?.("[data-i]");
      hover(token ? Number(token.dataset.i) : -1, token);
    });
    this.body.addEventListener("pointerleave", () => hover(-1, null));
  }

  context(text, name, open = false) {
    const made = h(
      "button",
      {
        class: "context",
        "aria-expanded": String(open),
        title: name,
        onclick: () => made.setAttribute("aria-expanded", String(made.getAttribute("aria-expanded") !== "true")),
      },
      h("span", { class: "context-name" }, name),
      h("span", { class: "context-text" }, text),
    );
    return made;
  }

  section(turn, k) {
    const several = this.episode.turns.length > 1;
    const body = h("div", { class: "turn-body" });
    if (turn.context && k === 0) body.append(this.context(turn.context, "prompt"));
    const long = this.episode.length > LONG;
    const speech = h("div", { class: several ? "speech" : "" });
    const size = long ? CHUNK : turn.decisions.length;
    for (let start = 0; start < turn.decisions.length; start += size) {
      const box = h("div", { class: "chunk" });
      const chunk = { box, decisions: turn.decisions.slice(start, start + size), filled: false };
      box.chunk = chunk;
      for (const i of chunk.decisions) this.chunkOf[i] = this.chunks.length;
      this.chunks.push(chunk);
      if (long) {
        box.style.minHeight = `${Math.ceil(chunk.decisions.length / 18) * 22}px`;
        this.watcher.observe(box);
      }
      speech.append(box);
    }
    body.append(speech);
    const found = judged(this.episode, k);
    if (found) body.append(found);
    const output = this.episode.turns[k + 1]?.context;
    if (output) body.append(this.context(output, "output", !long && brief(output)));
    if (!several) return h("section", { class: "turn" }, body);
    const head = h(
      "button",
      { class: "turn-head", "aria-expanded": "true", onclick: () => this.fold(k) },
      h("b", {}, `turn ${turn.turn + 1}${turn.again ? " (goes on)" : ""}`),
      h("span", {}, many(turn.decisions.length, "decision")),
      ...account(this.episode, k),
      h(
        "span",
        { class: "first-words" },
        turn.decisions
          .slice(0, 40)
          .map((i) => this.episode.text(i))
          .join(""),
      ),
    );
    return h("section", { class: "turn", "data-turn": String(k) }, head, body);
  }

  folded(k) {
    return this.sections[k].classList.contains("folded");
  }

  fold(k, folded = !this.folded(k)) {
    this.sections[k].classList.toggle("folded", folded);
    this.sections[k].querySelector(".turn-head")?.setAttribute("aria-expanded", String(!folded));
  }

  foldAll(folded) {
    this.sections.forEach((_, k) => this.fold(k, folded));
  }

  openContexts(open) {
    for (const c of this.element.querySelectorAll(".context")) c.setAttribute("aria-expanded", String(open));
  }

  fill(chunk) {
    if (chunk.filled) return;
    chunk.filled = true;
    chunk.stale = false;
    const made = document.createDocumentFragment();
    for (const i of chunk.decisions) {
      const token = document.createElement("span");
      token.dataset.i = i;
      token.textContent = visible(this.episode.text(i));
      token.className = this.look(i);
      made.append(token);
    }
    chunk.box.replaceChildren(made);
    chunk.box.style.minHeight = "";
    if (this.episode.length <= LONG) return;
    this.filled.push(chunk);
    if (this.filled.length > KEPT)
      this.empty(this.filled.find((c) => !c.near && c !== chunk && !c.decisions.includes(this.selected)));
  }

  /** Out of sight: keep its height and let its tokens go. */
  empty(chunk) {
    if (!chunk) return;
    if (chunk.height) chunk.box.style.minHeight = `${chunk.height}px`;
    chunk.box.replaceChildren();
    chunk.filled = false;
    this.filled = this.filled.filter((c) => c !== chunk);
  }

  look(i) {
    const r = this.episode.record;
    let look = "t";
    if (this.scale) look += ` ${this.scale.shade(r[this.scale.column]?.[i] ?? null)}`;
    if (this.episode.gates.has(i)) look += " gated";
    if (r.train && !r.train[i]) look += " mute";
    if (r.source?.[i]) look += " foreign";
    if (i === this.selected) look += " selected";
    return look;
  }

  /** Colour the credit of turns. */
  credit(scale) {
    for (const chip of this.element.querySelectorAll(".turn-head .credit"))
      chip.className = `credit ${scale.shade(Number(chip.dataset.credit))}`;
  }

  /** Colour by another scale: what is in sight now, the rest when it comes into sight. */
  paint(scale) {
    this.scale = scale;
    for (const chunk of this.chunks) {
      chunk.stale = chunk.filled;
      if (chunk.near || this.episode.length <= LONG) this.show(chunk);
    }
  }

  show(chunk) {
    this.fill(chunk);
    if (!chunk.stale) return;
    chunk.stale = false;
    for (const token of chunk.box.children) token.className = this.look(Number(token.dataset.i));
  }

  /** Bring a token into sight, and back where turns that are drawn above it push it out again. */
  reveal(token, frames = 30) {
    const { top, bottom } = token.getBoundingClientRect();
    if (frames === 30) token.scrollIntoView({ block: "nearest", inline: "nearest" });
    else if (top < 0 || bottom > innerHeight) token.scrollIntoView({ block: "center", inline: "nearest" });
    if (frames) requestAnimationFrame(() => token.classList.contains("selected") && this.reveal(token, frames - 1));
  }

  /** Mark a decision and bring it into sight. */
  select(i, { scroll = true } = {}) {
    this.token(this.selected)?.classList.remove("selected");
    this.selected = i;
    if (i < 0) return;
    const k = this.episode.turnIndex[i];
    if (this.folded(k)) this.fold(k, false);
    this.show(this.chunks[this.chunkOf[i]]);
    const token = this.token(i);
    token?.classList.add("selected");
    if (scroll && token) this.reveal(token);
  }

  token(i) {
    if (i < 0 || i >= this.episode.length) return null;
    const chunk = this.chunks[this.chunkOf[i]];
    return chunk?.filled ? (chunk.box.children[i - chunk.decisions[0]] ?? null) : null;
  }

  leave() {
    this.watcher.disconnect();
  }
}
