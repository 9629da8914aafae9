// The decision inspector: an episode and its group, every decision coloured by what is known of it.

import { ask } from "./api.js";
import { Rows, h, remember, show } from "./dom.js";
import { Episode, Lane } from "./episode.js";
import { ORDERS, SURPRISING, episodeRow, sorted } from "./run.js";
import { COLUMNS, Scale } from "./scale.js";
import { Strip } from "./strip.js";

const SOURCES = ["own", "teacher", "demonstration", "replay", "synthetic"];
const GATES = {
  clip_high: "the ratio is above its upper bound and credit asks for more: no gradient",
  clip_low: "the ratio is below its lower bound and credit asks for less: no gradient",
  clip_dual: "a bad decision that has become much likelier: its pull is floored (dual clip)",
};

export async function inspectorPage(run, at) {
  const { episodes } = await ask("episodes", { run });
  const here = episodes.find((e) => e.at === at);
  if (!here) throw new Error("There is no such episode in this run.");
  const siblings = episodes.filter((e) => e.step === here.step && e.group === here.group).sort((a, b) => a.episode - b.episode);
  let wide = remember("group") ?? siblings.length > 1;
  let column = remember("column") ?? "advantage";
  let order = remember("order") ?? "newest";
  let lanes = [];
  const scales = new Map();
  let lane = null;
  let gone = false;

  const records = new Map([[at, await ask("episode", { run, at: String(at) })]]);
  const tip = document.getElementById("tip");
  const scroller = h("div", { class: "lanes", tabindex: "-1" });
  const detail = h("aside", { class: "detail", "aria-label": "Decision", "aria-live": "polite" });
  const legend = h("div", { class: "scale" });
  const strip = new Strip((i) => select(i));
  const colours = h("div", { class: "segments", role: "radiogroup", "aria-label": "Colour by" });
  const groupButton = h("button", { class: "small", title: "The whole group, or this episode alone (g)", "aria-pressed": "false", onclick: () => setGroup(!wide) }, "");
  const folds = h("button", { class: "small", title: "Fold or open all turns (t)", onclick: foldAll }, "turns ▾");
  const contexts = h("button", { class: "small", title: "Open or fold prompts and tool outputs (o)", onclick: openContexts }, "prompts ▸");

  const list = new Rows({
    height: 58, label: "recorded episodes", draw: (e) => episodeRow(run, e, at),
    act(key, e) { if (key !== "Enter") return false; open(e); return true; },
  });
  const orders = h("select", { "aria-label": "Order of episodes", onchange: () => { order = remember("order", orders.value); fill(); } }, ...Object.entries(ORDERS).map(([key, o]) => h("option", { value: key, selected: key === order }, o.name)));
  const about = h("p", { class: "quiet small-text" });
  let listed = [];

  function fill() {
    listed = sorted(episodes, order);
    list.at = listed.findIndex((e) => e.at === at);
    list.set(listed);
    about.textContent = order === "surprise" ? SURPRISING : "";
  }

  const open = (e) => { location.hash = `#/run/${encodeURIComponent(run)}/episode/${e.at}`; };

  async function draw() {
    const wanted = wide ? siblings : [here];
    await Promise.all(wanted.map(async (e) => { if (!records.has(e.at)) records.set(e.at, await ask("episode", { run, at: String(e.at) })); }));
    if (gone) return;
    for (const old of lanes) old.leave();
    scales.clear();
    const chosen = Math.max(0, lane?.selected ?? 0);
    lanes = wanted.map((e) => {
      const made = new Lane(new Episode(records.get(e.at)), e, {
        scroller,
        pick: (i) => { if (e.at === at) select(i, { scroll: false }); else { remember("picked", i); open(e); } },
        hover: (i, token) => hover(made, i, token),
      });
      made.element.classList.toggle("current", e.at === at);
      return made;
    });
    lane = lanes[wanted.indexOf(here)];
    scroller.classList.toggle("several", lanes.length > 1);
    scroller.replaceChildren(...lanes.map((l) => l.element));
    groupButton.textContent = wide ? `group of ${siblings.length}` : "this episode alone";
    groupButton.setAttribute("aria-pressed", String(wide));
    groupButton.hidden = siblings.length < 2;
    folds.hidden = lane.episode.turns.length < 2;
    contexts.hidden = !scroller.querySelector(".context");
    paint();
    const picked = remember("picked");
    remember("picked", null);
    select(Math.min(picked ?? (order === "surprise" && !chosen ? lane.episode.oddest() : chosen), lane.episode.length - 1));
    centre();
  }

  /** Put this episode's lane in the middle of its group. */
  function centre() {
    const { element } = lane;
    scroller.scrollLeft = element.offsetLeft - scroller.offsetLeft - (scroller.clientWidth - element.clientWidth) / 2;
  }

  function paint() {
    const shown = lanes.map((l) => l.episode.record);
    const offered = Object.keys(COLUMNS).filter((c) => lanes.some((l) => l.episode.has(c)));
    if (!offered.includes(column)) column = offered[0] ?? "advantage";
    if (!scales.has(column)) scales.set(column, new Scale(column, shown));
    const scale = scales.get(column);
    strip.set(lane.episode, scale);
    for (const l of lanes) l.paint(scale);
    colours.replaceChildren(...offered.map((c) => h("button", { role: "radio", "aria-checked": String(c === column), "data-column": c, title: `${COLUMNS[c].about} (key ${COLUMNS[c].key})`, onclick: () => setColumn(c) }, COLUMNS[c].name)));
    const [low, high] = scale.ends();
    const ramp = h("span", { class: `ramp ${scale.kind.diverging ? "diverging" : "sequential"}`, role: "img", "aria-label": `colours from ${show(low)} to ${show(high)}` });
    legend.replaceChildren(h("span", {}, show(low)), ramp, h("span", {}, show(high)), h("span", { class: "quiet" }, scale.kind.about ?? ""));
  }

  function setColumn(c) { column = remember("column", c); paint(); tell(); }

  function setGroup(on) { wide = remember("group", on); draw(); }

  function foldAll() {
    const folded = !lane.sections.every((_, k) => lane.folded(k));
    for (const l of lanes) l.foldAll(folded);
    folds.textContent = folded ? "turns ▸" : "turns ▾";
  }

  function openContexts() {
    const open = contexts.getAttribute("aria-pressed") !== "true";
    contexts.setAttribute("aria-pressed", String(open));
    contexts.textContent = open ? "prompts ▾" : "prompts ▸";
    for (const l of lanes) l.openContexts(open);
  }

  function select(i, options) {
    if (!lane.episode.length) { detail.replaceChildren(h("p", { class: "quiet" }, "This episode has no decisions.")); return; }
    lane.select(Math.max(0, Math.min(lane.episode.length - 1, i)), options);
    strip.mark(lane.selected);
    tell();
  }

  function tell() {
    const { episode, selected: i } = lane;
    const r = episode.record;
    const turn = episode.turns[episode.turnIndex[i]];
    const numbers = Object.keys(COLUMNS).filter((c) => r[c]);
    const acted = episode.gates.get(i) ?? [];
    const earned = Object.entries(r.signals).flatMap(([name, rows]) => rows.filter(([row]) => row === i).map(([, v]) => [name, v]));
    const unseen = (r.ratio?.[i] ?? null) === null && r["logp@now"]?.[i] === undefined;
    const gateList = acted.map((name) => {
      const [part, stat] = name.split(":");
      return h("li", {}, h("b", {}, stat), h("span", { class: "quiet" }, ` in ${part}`), GATES[stat] ? h("p", {}, GATES[stat]) : null);
    });
    let quiet = "No gate or clip acted on this decision.";
    if (r.left_out) quiet = "This episode was left out by select, before credit was given.";
    else if (unseen && r.advantage?.[i] === 0) quiet = "All advantages here are exactly 0, so it was left out of the forward pass: no gradient, no ratio.";
    else if (unseen) quiet = "What the learner did with this decision is not recorded.";
    detail.replaceChildren(
      h("div", { class: "token-big" }, h("code", {}, JSON.stringify(episode.text(i)).slice(1, -1) || "·")),
      h("p", { class: "quiet" }, `decision ${i + 1} of ${episode.length}`, episode.turns.length > 1 ? `, turn ${turn.turn + 1} of ${new Set(episode.turns.map((t) => t.turn)).size}` : "", r.tokens ? `, token id ${r.tokens[r.position[i]]}` : ""),
      h("h3", {}, "What acted on it"), acted.length ? h("ul", { class: "gates" }, ...gateList) : h("p", { class: "gates-none" }, quiet),
      h("h3", {}, "Numbers"),
      h("dl", { class: "numbers-list" }, ...numbers.flatMap((c) => [h("dt", { class: c === column ? "on" : "" }, COLUMNS[c].name), h("dd", { class: c === column ? "on" : "" }, show(r[c][i], 4))])),
      earned.length ? h("h3", {}, "Signals earned here") : "", earned.length ? h("dl", { class: "numbers-list" }, ...earned.flatMap(([name, v]) => [h("dt", {}, name), h("dd", {}, show(v))])) : "",
      r.source?.[i] ? h("p", {}, `Source: ${SOURCES[r.source[i]] ?? r.source[i]}`) : "", r.train && !r.train[i] ? h("p", {}, "Does not learn.") : "");
  }

  function hover(l, i, token) {
    tip.hidden = i < 0;
    if (i < 0) return;
    const r = l.episode.record;
    const acted = l.episode.gates.get(i) ?? [];
    tip.replaceChildren(h("b", {}, `${COLUMNS[column]?.name ?? column} ${show(r[column]?.[i], 4)}`), ...acted.map((name) => h("span", { class: "gate" }, name.replace(":", " · "))));
    const box = token.getBoundingClientRect();
    tip.style.left = `${Math.min(box.left, innerWidth - 260)}px`;
    tip.style.top = `${box.bottom + 6}px`;
  }

  function turnBy(step) {
    const { episode, selected } = lane;
    const to = episode.turns[episode.turnIndex[selected] + step];
    if (to) select(to.decisions[0]);
  }

  function nextGated() {
    const all = [...lane.episode.gates.keys()].sort((a, b) => a - b);
    if (all.length) select(all.find((i) => i > lane.selected) ?? all[0]);
  }

  function episodeBy(step) {
    const to = listed[listed.findIndex((e) => e.at === at) + step];
    if (to) open(to);
  }

  const keys = {
    ArrowRight: () => select(lane.selected + 1), ArrowLeft: () => select(lane.selected - 1),
    ArrowDown: () => turnBy(1), ArrowUp: () => turnBy(-1), j: () => episodeBy(1), k: () => episodeBy(-1),
    Home: () => select(0), End: () => select(lane.episode.length - 1), c: nextGated, g: () => setGroup(!wide),
    f: () => lane.fold(lane.episode.turnIndex[lane.selected]), t: foldAll, o: openContexts,
    Escape: () => { location.hash = `#/run/${encodeURIComponent(run)}`; },
  };

  fill();
  const element = h("div", { class: "inspector" },
    h("section", { class: "side", "aria-label": "Episodes" }, h("div", { class: "tools" }, h("div", { class: "tool-row" }, h("b", {}, `${episodes.length} episodes`), h("span", { class: "grow" }), orders), about), list.box),
    h("section", { class: "stage", "aria-label": "Decisions" },
      h("p", { class: "crumbs" }, h("a", { href: "#/runs" }, "Runs"), " / ", h("a", { href: `#/run/${encodeURIComponent(run)}` }, run), ` / step ${here.step}, group ${here.group}, episode ${here.episode}`),
      h("div", { class: "toolbar" }, colours, h("span", { class: "grow" }), contexts, folds, groupButton),
      legend, strip.element, scroller),
    detail);
  await draw();
  return {
    element, title: `Episode ${here.episode}`,
    shown() { list.go(list.at); strip.paint(); lane.select(lane.selected); centre(); },
    redraw: () => strip.paint(),
    leave() { gone = true; tip.hidden = true; for (const l of lanes) l.leave(); },
    key(event) {
      const column = Object.keys(COLUMNS).find((c) => COLUMNS[c].key === event.key);
      if (column && lanes.some((l) => l.episode.has(column))) setColumn(column);
      else if (keys[event.key]) keys[event.key]();
      else return false;
      return true;
    },
  };
}
