// The whole episode as one strip of colour: where in ten thousand decisions something happened. A click goes there.

import { colour } from "./charts.js";
import { h } from "./dom.js";

const HEIGHT = 34;
const WIDEST = 22;

export class Strip {
  constructor(pick) {
    this.canvas = h("canvas", {
      class: "strip",
      role: "img",
      "aria-label": "The whole episode at a glance",
      height: HEIGHT,
    });
    this.here = h("div", { class: "strip-here" });
    this.element = h("div", { class: "strip-box" }, this.canvas, this.here);
    this.at = 0;
    const go = (event) => {
      const box = this.canvas.getBoundingClientRect();
      if (this.episode?.length) pick(Math.floor(((event.clientX - box.left) / box.width) * this.episode.length));
    };
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      go(event);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (event.buttons) go(event);
    });
    new ResizeObserver(() => this.paint()).observe(this.element);
  }

  set(episode, scale) {
    Object.assign(this, { episode, scale });
    this.paint();
  }

  mark(i) {
    this.at = i;
    const wide = Math.max(5, this.width / this.episode.length);
    this.here.style.width = `${wide}px`;
    this.here.style.transform = `translateX(${Math.min(this.width - wide, (i * this.width) / this.episode.length)}px)`;
  }

  paint() {
    if (!this.episode?.length || !this.element.clientWidth) return;
    const width = Math.min(this.element.clientWidth, this.episode.length * WIDEST);
    this.width = width;
    this.canvas.style.width = `${width}px`;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = width * ratio;
    this.canvas.height = HEIGHT * ratio;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const { length, record, gates, turns } = this.episode;
    const values = record[this.scale.column] ?? [];
    const { diverging } = this.scale.kind;
    const low = colour("--low"),
      high = colour("--high"),
      single = colour("--single");
    const columns = Math.min(width, length);
    for (let c = 0; c < columns; c++) {
      const from = Math.floor((c * length) / columns),
        to = Math.max(from + 1, Math.floor(((c + 1) * length) / columns));
      let far = 0,
        sign = 0;
      for (let i = from; i < to; i++) {
        const p = this.scale.place(values[i]);
        if (p === null) continue;
        const strength = diverging ? Math.abs(p - 0.5) * 2 : p;
        if (strength >= far) {
          far = strength;
          sign = p - 0.5;
        }
      }
      if (!far) continue;
      pen.globalAlpha = 0.15 + 0.85 * far;
      pen.fillStyle = diverging ? (sign < 0 ? low : high) : single;
      const x = (c * width) / columns;
      pen.fillRect(x, 6, Math.max(1, width / columns - (width / columns > 4 ? 1 : 0)), HEIGHT - 14);
    }
    pen.globalAlpha = 1;
    pen.fillStyle = colour("--gate");
    for (const i of gates.keys()) pen.fillRect((i * width) / length, HEIGHT - 6, Math.max(2, width / length - 1), 4);
    pen.fillStyle = colour("--quiet");
    if (turns.length > 1 && turns.length < width / 3)
      for (const turn of turns) pen.fillRect((turn.decisions[0] * width) / length, 2, 1, HEIGHT - 8);
    this.mark(this.at);
  }
}
