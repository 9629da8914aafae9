// Recorded episodes as a list: how they are ordered, and what a row says.

import { h, many, remember, show } from "./dom.js";

const ORDERS = {
  newest: { name: "newest first", by: (e) => e.step ?? 0 },
  advantage: { name: "highest advantage", by: (e) => e.advantage ?? -Infinity },
  disadvantage: { name: "lowest advantage", by: (e) => -(e.advantage ?? Infinity) },
  return: { name: "highest return", by: (e) => e.return ?? -Infinity },
  surprise: { name: "most surprising", by: (e) => e.surprise },
  gated: { name: "most gated", by: (e) => e.gated / Math.max(1, e.decisions) },
};

const SURPRISING =
  "High reward for text that was not expected: the product of an episode's ranks by return and by mean " +
  "−log-probability among all that were recorded. A hacked reward shows here first.";

/** What a reader should know of a list in this order. */
export function about(order, unreadable = 0) {
  const lost = unreadable ? `${many(unreadable, "recorded line")} could not be read. ` : "";
  return lost + (order === "surprise" ? SURPRISING : "");
}

/** Episodes of one group that are the same stand once, with how many they are. */
export const distinct = (episodes) => episodes.filter((e) => e.like === e.at);

export const address = (run, e) => `#/run/${encodeURIComponent(run)}/episode/${e.at}`;

export function sorted(episodes, order) {
  const { by } = ORDERS[order];
  return [...episodes].sort((a, b) => by(b) - by(a) || a.at - b.at);
}

/** A choice of order, kept for the next page. */
export function orders(chosen, change) {
  const options = Object.entries(ORDERS).map(([key, o]) =>
    h("option", { value: key, selected: key === chosen }, o.name),
  );
  const pick = (event) => change(remember("order", event.target.value));
  return h("select", { "aria-label": "Order of episodes", onchange: pick }, ...options);
}

export function episodeRow(run, e, current = null) {
  const pill = (text, look = "", title = null) => h("span", { class: `pill ${look}`, title }, text);
  const facts = [
    e.count > 1 && pill(`× ${e.count}`, "count", `${e.count} episodes of this group are the same`),
    pill(`step ${e.step}`),
    pill(`R ${show(e.return, 2)}`, e.return > 0 ? "good" : "", "return"),
    e.advantage !== null && pill(`Â ${show(e.advantage, 2)}`, "", "mean advantage"),
    e.gated > 0 && pill(`${e.gated} gated`, "gate"),
    pill(`✦ ${show(e.surprise, 2)}`, "", "surprise, 0 to 1"),
    e.turns > 1 && e.turns < e.decisions && pill(`${e.turns} turns`),
    pill(`${e.decisions} dec.`),
    e.left_out && pill("left out", "", "dropped by select"),
  ];
  const look = `episode${e.at === current ? " current" : ""}`;
  const said = h("span", { class: "said" }, e.snippet || "–");
  return h(
    "a",
    { class: look, href: address(run, e), tabindex: "-1" },
    said,
    h("span", { class: "numbers" }, ...facts),
  );
}
