// Small helpers for making and updating the page. Text is always set as text, never as markup.

export function h(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (name in made && name !== "list" && typeof value !== "string") made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((c) => c !== null && c !== undefined && c !== false));
  return made;
}

export function show(number, digits = 3) {
  if (number === null || number === undefined || Number.isNaN(number)) return "–";
  if (typeof number !== "number") return String(number);
  const size = Math.abs(number);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return number.toExponential(1).replace("-", "−");
  const fixed = Number.isInteger(number) ? String(number) : number.toFixed(size >= 100 ? 1 : digits);
  return fixed.replace("-", "−");
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export const many = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

export const bare = (id) => String(id ?? "?").split("@")[0];

export function remember(key, value) {
  try {
    if (value === undefined) return JSON.parse(sessionStorage.getItem(key) ?? "null");
    sessionStorage.setItem(key, JSON.stringify(value));
  } catch {
    /* a browser that keeps nothing still shows everything */
  }
  return value ?? null;
}

/** A list of which only the rows in sight exist. Rows are options of a listbox; arrows move, the caller acts. */
export class Rows {
  constructor({ height, label, draw, act }) {
    this.height = height;
    this.draw = draw;
    this.items = [];
    this.at = 0;
    this.made = new Map();
    this.space = h("div", { class: "space" });
    this.box = h(
      "div",
      { class: "rows", role: "listbox", "aria-label": label, "aria-multiselectable": "true", tabindex: "0" },
      this.space,
    );
    this.box.addEventListener("scroll", () => this.paint(), { passive: true });
    this.box.addEventListener("keydown", (event) => {
      const steps = {
        ArrowDown: 1,
        ArrowUp: -1,
        j: 1,
        k: -1,
        PageDown: 10,
        PageUp: -10,
        Home: -Infinity,
        End: Infinity,
      };
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key in steps) this.go(this.at + steps[event.key]);
      else if (!act || !this.items.length || !act(event.key, this.items[this.at], this.at)) return;
      event.preventDefault();
      event.stopPropagation();
    });
    new ResizeObserver(() => this.paint()).observe(this.box);
  }

  set(items) {
    this.items = items;
    this.at = Math.max(0, Math.min(this.at, items.length - 1));
    this.space.style.height = `${items.length * this.height}px`;
    this.refresh();
  }

  refresh() {
    for (const row of this.made.values()) row.remove();
    this.made.clear();
    this.paint();
  }

  go(to) {
    if (!this.items.length) return;
    this.at = Math.max(0, Math.min(this.items.length - 1, to));
    const top = this.at * this.height;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top + this.height > this.box.scrollTop + this.box.clientHeight)
      this.box.scrollTop = top + this.height - this.box.clientHeight;
    this.paint();
  }

  paint() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / this.height) - 4);
    const last = Math.min(
      this.items.length - 1,
      Math.ceil((this.box.scrollTop + this.box.clientHeight) / this.height) + 4,
    );
    for (const [i, row] of this.made) {
      if (i < first || i > last) {
        row.remove();
        this.made.delete(i);
      }
    }
    for (let i = first; i <= last; i++) {
      if (!this.made.has(i)) {
        const row = this.draw(this.items[i], i);
        row.setAttribute("role", "option");
        row.setAttribute("aria-posinset", i + 1);
        row.setAttribute("aria-setsize", this.items.length);
        row.id = `${this.box.getAttribute("aria-label")}-${i}`.replace(/\W+/g, "-");
        row.classList.add("row");
        row.style.transform = `translateY(${i * this.height}px)`;
        this.space.append(row);
        this.made.set(i, row);
      }
      this.made.get(i).classList.toggle("here", i === this.at);
    }
    const here = this.made.get(this.at);
    if (here) this.box.setAttribute("aria-activedescendant", here.id);
  }
}
