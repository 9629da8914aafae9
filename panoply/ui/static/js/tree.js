// Branched episodes as a tree. Where every branch is an episode of its own they have a `parent`; where episodes are whole
// and have beginnings in common, their decisions have a `node`, and a branch is what lies between two forks.

import { h, many, show } from "./dom.js";

const SNIPPET = 80;

/** The recorded episodes of the tree that one is part of; none where nothing branches. */
export function family(episodes, here) {
  const step = episodes.filter((e) => e.step === here.step);
  if (here.nodes) return step.filter((e) => e.group === here.group);
  if (here.parent === null || here.parent === undefined) return [];
  const known = new Map(step.map((e) => [e.episode, e]));
  const root = (e) => (known.has(e.parent) && e.parent < e.episode ? root(known.get(e.parent)) : e.parent);
  return step.filter((e) => root(e) === root(here));
}

/** A tree of branches, `{ of, members, decisions, children }`: of one episode its decisions, on the way of its members. */
export function branches(members) {
  return members[0]?.row.nodes ? shared(members) : owned(members);
}

function owned(members) {
  const made = new Map(members.map((of) => [of.row.episode, branch(of, [...of.episode.record.position.keys()])]));
  const roots = [];
  for (const one of made.values()) (made.get(one.of.row.parent)?.children ?? roots).push(one);
  return roots;
}

function shared(members) {
  const made = new Map();
  const roots = [];
  for (const of of members) {
    let last = null;
    (of.episode.record.node ?? []).forEach((node, i) => {
      if (!made.has(node)) {
        made.set(node, branch(of, []));
        (last === null ? roots : made.get(last).children).push(made.get(node));
      }
      const one = made.get(node);
      if (one.of === of) one.decisions.push(i);
      if (one.members.at(-1) !== of) one.members.push(of);
      last = node;
    });
  }
  return roots.map(whole);
}

/** Pieces that nothing forks from, and the one behind each, are one branch. */
function whole(one) {
  while (one.children.length === 1 && one.children[0].of === one.of && one.children[0].members.length === one.members.length) {
    const [next] = one.children;
    one.decisions.push(...next.decisions);
    one.children = next.children;
  }
  one.children = one.children.map(whole);
  return one;
}

const branch = (of, decisions) => ({ of, members: [], decisions, children: [] });

const said = ({ of, decisions }) => decisions.map((i) => of.episode.text(i)).join("");

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

/** Its own number where it is an episode; the mean of those that come through it where they share it. */
function worth({ of, members }) {
  return members.length ? mean(members.map((m) => m.episode.total("reward") ?? 0)) : of.episode.total("reward");
}

/** The mean advantage; a beginning that several share has a credit in each of them, at the same decisions. */
function credit({ of, members, decisions }) {
  const known = (members.length ? members : [of])
    .map((m) => m.episode.mean("advantage", decisions))
    .filter((a) => a !== null);
  return known.length ? mean(known) : null;
}

/** Ends that are the same stand once. */
function merged(children, here) {
  const kept = new Map();
  for (const one of children) {
    const same = one.children.length ? one : [said(one), worth(one), credit(one)].join("|");
    const held = kept.get(same);
    kept.set(same, { ...(held && one.of.row !== here ? held : one), count: (held?.count ?? 0) + 1 });
  }
  return [...kept.values()];
}

/** The tree on the page. `open(row, i)` goes to a decision of an episode; `scale` colours credit. */
export function drawn(roots, here, scale, open) {
  const through = ({ of, members, children }) =>
    of.row === here || members.some((m) => m.row === here) || (!members.length && children.some(through));
  const item = (one) => {
    const { of, members, decisions, children, count } = one;
    const text = said(one);
    const advantage = credit(one);
    const facts = {
      class: `branch${through(one) ? " on" : ""}`,
      "aria-current": of.row === here || members.some((m) => m.row === here) ? "true" : null,
      title: text.slice(0, 1000),
      onclick: () => open(members.find((m) => m.row === here)?.row ?? of.row, decisions[0] ?? 0),
    };
    const button = h(
      "button",
      facts,
      h("span", { class: "branch-said" }, text.trim().slice(0, SNIPPET) || "·"),
      count > 1 && h("span", { class: "count", title: "branches that are the same" }, `× ${count}`),
      advantage !== null &&
        h("span", { class: `credit ${scale.shade(advantage)}`, title: "mean advantage" }, `Â ${show(advantage, 2)}`),
      h("span", { class: "cost", title: "what episodes through here earn on average" }, `R ${show(worth(one), 2)}`),
      members.length > 1 && h("span", { class: "cost" }, many(members.length, "episode")),
      of.row.left_out ? h("span", { class: "cost" }, "left out") : null,
    );
    return h("li", {}, button, children.length ? list(children) : null);
  };
  const list = (children) => h("ul", {}, ...merged(children, here).map(item));
  const prompt = roots[0]?.of.episode.turns[0]?.context ?? "";
  return [
    h("p", { class: "tree-prompt" }, prompt.trim().slice(-2 * SNIPPET)),
    h("div", { class: "tree" }, list(roots)),
  ];
}
