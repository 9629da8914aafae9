// The workers of a spread run: a lane for each, busy, waiting or neither, step after step; and the lag as a band.

import { chart, colour, seriesColour } from "./charts.js";
import { Rows, duration, h, many, show } from "./dom.js";

const HEIGHT = 24;
const ROW = 40;
const IN_SIGHT = 12;
const ROLES = ["learner", "sampler"];

const total = (column) => column.reduce((sum, value) => sum + (value ?? 0), 0);
const last = (column) => column.findLast((value) => value !== null && value !== undefined) ?? null;
const percent = (share) => `${Math.round(share * 100)} %`;
const place = (role) => Math.max(0, ROLES.indexOf(role));
const busyShare = (lanes, longest) => total(lanes.flatMap((l) => l.busy)) / (lanes.length * total(longest) || 1);

export class Workers {
  constructor() {
    this.lanes = new Rows({ height: ROW, label: "workers", draw: (lane) => this.lane(lane) });
    this.lanes.box.classList.add("boxed");
    this.about = h("p", { class: "quiet" });
    this.key = h("ul", { class: "legend" });
    this.plot = h("div", { class: "plot" });
    this.caption = h("figcaption", {}, "lag", h("span", { class: "quiet" }, "versions between who drew and who learns"));
    this.figure = h("figure", { class: "lag" }, this.caption, this.plot);
    this.empty = h("p", { class: "quiet" }, "No worker has finished a step yet.");
    this.full = h("div", {}, this.about, this.key, this.lanes.box, this.figure);
    this.element = h(
      "section",
      { class: "card wide workers", "aria-label": "Workers", hidden: true },
      h("h2", {}, "Workers"),
      this.empty,
      this.full,
    );
    this.tip = document.getElementById("tip");
  }

  /** `expected` says whether the run was asked to have workers: without any, one process has no such section. */
  set(found, expected) {
    this.found = found;
    const some = found.lanes.length > 0;
    this.element.hidden = !some && !expected;
    this.empty.hidden = some;
    this.full.hidden = !some;
    if (!some) return;
    this.tell();
    this.lanes.box.style.height = `${Math.min(found.lanes.length, IN_SIGHT) * ROW + 2}px`;
    this.lanes.set(found.lanes);
    this.band();
  }

  /** In a sentence: who they are, how busy they were, and what came back to life. */
  tell() {
    const { lanes, longest, left_out, unreadable } = this.found;
    const roles = [...new Set(lanes.map((l) => l.role))];
    const of = (role) => lanes.filter((l) => l.role === role);
    const kinds = roles.map((role) => `${many(of(role).length, role)} (${percent(busyShare(of(role), longest))} busy)`);
    const nodes = new Set(lanes.map((l) => l.node).filter(Boolean)).size;
    const restarts = total(lanes.map((l) => last(l.restarts)));
    const words = [
      `${kinds.join(", ")} on ${many(nodes || 1, "machine")}`,
      restarts ? many(restarts, "restart") : "no restart",
      left_out ? `${left_out} more workers are not drawn` : "",
      unreadable ? `${many(unreadable, "line")} of workers.jsonl cannot be read` : "",
    ];
    this.about.textContent = `${words.filter(Boolean).join("; ")}.`;
    const marks = [
      ...roles.map((role) => [seriesColour(place(role)), 1, `${role} busy`]),
      [colour("--quiet"), 0.35, "waiting"],
      [colour("--bad"), 1, "restarted"],
    ];
    const mark = ([shade, alpha, words]) => {
      const square = h("span", { class: "mark" });
      Object.assign(square.style, { background: shade, opacity: alpha });
      return h("li", {}, square, words);
    };
    this.key.replaceChildren(...marks.map(mark));
  }

  lane(lane) {
    const busy = percent(busyShare([lane], this.found.longest));
    const version = last(lane.version);
    const restarts = last(lane.restarts) ?? 0;
    const told = `${lane.worker}: ${busy} busy, version ${show(version)}, ${many(restarts, "restart")}`;
    const canvas = h("canvas", { class: "lane-time", role: "img", "aria-label": told });
    const row = h(
      "div",
      { class: "worker" },
      h("div", { class: "run-text" }, h("b", {}, lane.worker), h("span", { class: "run-sub" }, lane.node || lane.role)),
      canvas,
      h(
        "div",
        { class: "figures" },
        h("span", {}, `${busy} · v${show(version)}`),
        restarts > 0 && h("span", { class: "bad-text" }, many(restarts, "restart")),
      ),
    );
    canvas.addEventListener("pointermove", (event) => this.point(lane, canvas, event));
    canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    new ResizeObserver(() => this.paint(canvas, lane)).observe(canvas);
    return row;
  }

  paint(canvas, lane) {
    const width = canvas.clientWidth;
    if (!width) return;
    const ratio = devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = HEIGHT * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const { longest } = this.found;
    const wide = width / longest.length;
    const gap = wide > 5 ? 1 : 0;
    const shades = [
      [lane.busy, seriesColour(place(lane.role)), 1],
      [lane.wait, colour("--quiet"), 0.35],
    ];
    longest.forEach((most, at) => {
      let top = HEIGHT;
      for (const [seconds, shade, alpha] of shades) {
        const tall = most ? ((seconds[at] ?? 0) / most) * HEIGHT : 0;
        Object.assign(pen, { fillStyle: shade, globalAlpha: alpha });
        pen.fillRect(at * wide, top - tall, Math.max(1, wide - gap), tall);
        top -= tall;
      }
      if ((lane.restarts[at] ?? 0) <= (last(lane.restarts.slice(0, at)) ?? 0)) return;
      Object.assign(pen, { fillStyle: colour("--bad"), globalAlpha: 1 });
      pen.fillRect(at * wide, 0, 2, HEIGHT);
      pen.fillRect(at * wide, 0, Math.max(2, wide - gap), 4);
    });
  }

  point(lane, canvas, event) {
    const box = canvas.getBoundingClientRect();
    const { columns } = this.found;
    const at = Math.min(columns.length - 1, Math.floor(((event.clientX - box.left) / box.width) * columns.length));
    const [first, end] = columns[at];
    const memory = lane.memory_mb[at];
    const lines = [
      h("b", {}, first === end ? `step ${first}` : `steps ${first} to ${end}`),
      `busy ${duration(lane.busy[at])}, waiting ${duration(lane.wait[at])}`,
      `${show(lane.tokens[at], 0)} tokens, ${memory === null ? "–" : show(memory / 1024, 1)} GB`,
      `version ${show(lane.version[at])}, ${many(lane.restarts[at] ?? 0, "restart")}`,
    ];
    this.tip.replaceChildren(...lines.map((line) => h("span", {}, line)));
    this.tip.hidden = false;
    this.tip.style.left = `${Math.min(event.clientX + 12, innerWidth - 260)}px`;
    this.tip.style.top = `${box.bottom + 6}px`;
  }

  band() {
    const { lag } = this.found;
    this.figure.hidden = !lag;
    if (!lag) return;
    const curves = [{ ...lag, place: 2 }];
    if (this.chart?.update(curves)) return;
    this.chart?.destroy();
    this.chart = chart(this.plot, { title: "lag", curves, height: 130, sync: "run" });
  }

  redraw() {
    this.chart?.destroy();
    this.chart = null;
    if (this.found) this.set(this.found, true);
  }

  leave() {
    this.tip.hidden = true;
    this.chart?.destroy();
  }
}
