// What is said of a turn: the credit it was given, what it earned and cost, and what came of it where it was run.

import { h, show } from "./dom.js";

const TOLD = new Set(["success", "reward"]);
const LONGEST = 240;

/** The verdict on a turn: whether it is good, in a word, and what was said of it. None where nobody judges. */
export function verdict(episode, k) {
  const earned = episode.earned[k];
  const has = (name) => name in episode.record.signals;
  const got = (name) => earned.get(name) ?? 0;
  const said = episode.verdicts[k];
  if (said) {
    const fell = (has("ran") && !got("ran")) || (has("valid") && !got("valid")) || (has("ended") && !got("ended"));
    if (got("success") > 0) return { good: true, word: "right", said };
    return { good: false, word: fell ? "did not run" : "ran, and is wrong", said };
  }
  if (got("invalid") > 0) return { good: false, word: "invalid", said: "" };
  if (got("errors") > 0) return { good: false, word: got("errors") > 1 ? `${got("errors")} errors` : "error", said: "" };
  return got("calls") > 0 ? { good: true, word: "answered", said: "" } : null;
}

/** The verdict as a line below what was said. */
export function judged(episode, k) {
  const found = verdict(episode, k);
  if (!found) return null;
  return h(
    "p",
    { class: `verdict ${found.good ? "good" : "bad"}` },
    h("b", {}, `${found.good ? "✓" : "✗"} ${found.word}`),
    found.said && h("code", {}, found.said),
  );
}

/** Credit, reward and costs of a turn, for its head. */
export function account(episode, k) {
  const { decisions } = episode.turns[k];
  const advantage = episode.mean("advantage", decisions);
  const reward = episode.total("reward", decisions);
  const gated = decisions.filter((i) => episode.gates.has(i)).length;
  return [
    advantage !== null &&
      h(
        "span",
        { class: "credit", "data-credit": String(advantage), title: "credit: the mean advantage of this turn" },
        `Â ${show(advantage, 2)}`,
      ),
    reward ? h("span", { class: reward > 0 ? "good" : "bad", title: "reward" }, `r ${show(reward, 2)}`) : null,
    ...costs(episode.earned[k]),
    gated ? h("span", { class: "gate" }, `${gated} gated`) : null,
  ];
}

/** Signals beside the reward: what was counted, and what it cost. */
export function costs(earned) {
  return [...earned]
    .filter(([name, value]) => value && !TOLD.has(name))
    .map(([name, value]) => h("span", { class: "cost", title: `signal ${name}` }, `${name} ${show(value, 2)}`));
}

/** Whether an output is short enough to stand open in a conversation. */
export const brief = (text) => text.length <= LONGEST;
