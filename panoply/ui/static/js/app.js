// The shell: which page is shown, light or dark, and the help.

import { cataloguePage } from "./catalogue.js";
import { h } from "./dom.js";
import { inspectorPage } from "./inspector.js";
import { runPage } from "./run.js";
import { runsPage } from "./runs.js";
import { workPage } from "./work.js";

const view = document.getElementById("view");
let turn = 0;
let current = {};
let shown = "";
const left = new Map();
const LISTS = /^#\/catalogue$/;

const ROUTES = [
  [/^#\/run\/(.+)\/episode\/(\d+)$/, (m) => inspectorPage(decodeURIComponent(m[1]), Number(m[2]))],
  [/^#\/run\/(.+)$/, (m) => runPage(decodeURIComponent(m[1]))],
  [/^#\/catalogue$/, () => cataloguePage()],
  [/^#\/work\/(.+)$/, (m) => workPage(decodeURIComponent(m[1]))],
  [/^(#\/runs)?$/, () => runsPage()],
];

async function go() {
  const mine = ++turn;
  const hash = location.hash;
  const [route, open] = ROUTES.find(([pattern]) => pattern.test(hash)) ?? ROUTES.at(-1);
  const page = /catalogue|work/.test(hash) ? "catalogue" : "runs";
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.page === page) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  let made;
  try {
    made = await open(route.exec(hash) ?? []);
  } catch (error) {
    made = {
      element: h(
        "div",
        { class: "page" },
        h(
          "div",
          { class: "sorry", role: "alert" },
          h("h1", {}, "This cannot be shown"),
          h("p", {}, error.message),
          h("p", {}, h("a", { href: "#/runs" }, "Back to the runs")),
        ),
      ),
    };
  }
  if (mine !== turn) {
    made.leave?.();
    return;
  }
  left.set(shown, view.scrollTop);
  current.leave?.();
  current = made;
  shown = hash;
  document.title = made.title ? `${made.title} – Panoply` : "Panoply";
  view.replaceChildren(made.element);
  made.enter?.();
  view.scrollTop = LISTS.test(hash) ? (left.get(hash) ?? 0) : 0;
}

const root = document.documentElement;
const kept = (() => {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null;
  }
})();
if (kept) root.dataset.theme = kept;

function switchTheme() {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("theme", root.dataset.theme);
  } catch {
    /* not kept */
  }
  current.redraw?.();
}

const KEYS = [
  [
    "anywhere",
    [
      ["?", "these keys"],
      ["d", "light or dark"],
      ["Esc", "back, or close"],
    ],
  ],
  [
    "runs",
    [
      ["/", "search"],
      ["↑ ↓  j k", "move"],
      ["space  x", "tick a run"],
      ["Enter", "open it"],
      ["u", "untick all"],
    ],
  ],
  [
    "decisions",
    [
      ["← →", "decision before, after"],
      ["↑ ↓", "turn before, after"],
      ["j k", "next, previous episode"],
      ["Home End", "first, last decision"],
      ["1 … 9", "colour by advantage, ratio, entropy …"],
      ["c", "next decision on which a gate acted"],
      ["g", "whole group, or this episode alone"],
      ["b", "the tree of branched episodes"],
      ["f", "fold this turn"],
      ["t", "fold or open all turns"],
      ["o", "open or fold prompts and tool outputs"],
    ],
  ],
];

function help() {
  const box = document.getElementById("help");
  if (box.open) {
    box.close();
    return;
  }
  const close = h("button", { class: "plain", onclick: () => box.close(), "aria-label": "Close" }, "✕");
  box.replaceChildren(
    h("header", {}, h("h2", {}, "Keys"), close),
    ...KEYS.map(([title, rows]) =>
      h(
        "section",
        {},
        h("h3", {}, title),
        h("dl", {}, ...rows.flatMap(([key, about]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, about)])),
      ),
    ),
  );
  box.showModal();
}

document.getElementById("theme").addEventListener("click", switchTheme);
document.getElementById("keys").addEventListener("click", help);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => current.redraw?.());
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  if (document.getElementById("help").open) return;
  if (event.key === "?") help();
  else if (event.key === "d") switchTheme();
  else if (current.key?.(event)) event.preventDefault();
});
addEventListener("hashchange", go);
go();
