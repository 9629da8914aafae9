// What is known of one decision: its token, what acted on it, and its numbers.

import { h, show } from "./dom.js";
import { COLUMNS } from "./scale.js";

const SOURCES = ["own", "teacher", "demonstration", "replay", "synthetic"];
const GATES = {
  clip_high: "the ratio is above its upper bound and credit asks for more: no gradient",
  clip_low: "the ratio is below its lower bound and credit asks for less: no gradient",
  clip_dual: "a bad decision that has become much likelier: its pull is floored (dual clip)",
};

/** The parts of the panel beside the lanes; the column that colours decisions now is set off. */
export function detail(episode, i, column) {
  const r = episode.record;
  const acted = episode.gates.get(i) ?? [];
  const numbers = Object.keys(COLUMNS).filter((c) => r[c]);
  const earned = Object.entries(r.signals).flatMap(([name, rows]) =>
    rows.filter(([row]) => row === i).map(([, value]) => [name, show(value)]),
  );
  return [
    h("div", { class: "token-big" }, h("code", {}, JSON.stringify(episode.text(i)).slice(1, -1) || "·")),
    h("p", { class: "quiet" }, place(episode, i)),
    h("h3", {}, "What acted on it"),
    acted.length ? h("ul", { class: "gates" }, ...acted.map(gate)) : h("p", { class: "gates-none" }, untouched(r, i)),
    h("h3", {}, "Numbers"),
    list(numbers.map((c) => [COLUMNS[c].name, show(r[c][i], 4), c === column ? "on" : ""])),
    ...(earned.length ? [h("h3", {}, "Signals earned here"), list(earned)] : []),
    ...(r.source?.[i] ? [h("p", {}, `Source: ${SOURCES[r.source[i]] ?? r.source[i]}`)] : []),
    ...(r.train && !r.train[i] ? [h("p", {}, "Does not learn.")] : []),
  ];
}

/** What is said of a decision under the pointer. */
export function glance(episode, i, column) {
  const acted = episode.gates.get(i) ?? [];
  const value = `${COLUMNS[column]?.name ?? column} ${show(episode.record[column]?.[i], 4)}`;
  return [h("b", {}, value), ...acted.map((name) => h("span", { class: "gate" }, name.replace(":", " · ")))];
}

function place(episode, i) {
  const { tokens, position } = episode.record;
  const turns = new Set(episode.turns.map((t) => t.turn)).size;
  const turn = episode.turns.length > 1 ? `, turn ${episode.turns[episode.turnIndex[i]].turn + 1} of ${turns}` : "";
  return `decision ${i + 1} of ${episode.length}${turn}${tokens ? `, token id ${tokens[position[i]]}` : ""}`;
}

function gate(name) {
  const [part, stat] = name.split(":");
  return h(
    "li",
    {},
    h("b", {}, stat),
    h("span", { class: "quiet" }, ` in ${part}`),
    GATES[stat] && h("p", {}, GATES[stat]),
  );
}

/** Why nothing acted. */
function untouched(r, i) {
  const unseen = (r.ratio?.[i] ?? null) === null && (r["logp@now"]?.[i] ?? null) === null;
  if (r.left_out) return "This episode was left out by select, before credit was given.";
  if (unseen && r.advantage?.[i] === 0)
    return "All advantages here are exactly 0, so it was left out of the forward pass: no gradient, no ratio.";
  if (unseen) return "What the learner did with this decision is not recorded.";
  return "No gate or clip acted on this decision.";
}

function list(rows) {
  const cells = rows.flatMap(([name, value, look = ""]) => [
    h("dt", { class: look }, name),
    h("dd", { class: look }, value),
  ]);
  return h("dl", { class: "numbers-list" }, ...cells);
}
