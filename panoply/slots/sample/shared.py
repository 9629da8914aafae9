"""Own groups, and some that other nodes of a swarm have published in a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from panoply.costs import Lengths, Tokens
from panoply.episodes import varied
from panoply.errors import PanoplyError
from panoply.experience import REPLAY, Experience
from panoply.parts import Finding, part
from panoply.rollouts import (
    NODE,
    SCHEMA,
    Dropped,
    Exchange,
    Group,
    Ledger,
    answer_of,
    tokens_of,
    vocabulary_of,
)
from panoply.seeds import torch_rng
from panoply.slots.sample.answers import answers_of
from panoply.slots.sample.groups import LIMITS, greedy_cuts, greedy_groups

if TYPE_CHECKING:
    from panoply.rollout.text import Collector
    from panoply.worlds.world import Task

FAULTS = (PanoplyError, ArithmeticError, LookupError, TypeError, ValueError)
"""What a world may raise about a problem or an answer that is not its own."""
EVEN = "even"
"""All answers of a group earn the same, so that there is nothing to learn from it: no fault of who offers it."""


def _impossible(held: Any, method: Any) -> list[Finding]:
    if not NODE.fullmatch(held.node):
        return [
            ("node", "a node is named by at most 40 letters, digits, - and _, since that names its folder")
        ]
    return greedy_groups(held, method)


def _inert(held: Any, method: Any, world: Any) -> list[Finding]:
    found = greedy_cuts(held, method, world)
    if not held.folder:
        return found + [(name, "a node without a folder is alone") for name in ("node", "window", "name")]
    return found if held.theirs else [*found, ("name", "nothing is taken over (theirs=0)")]


def _cost(held: Any, of: Lengths) -> Tokens:
    """The least that is sampled; groups that nobody offers are sampled, too."""
    groups = held.prompts + held.theirs
    return held.prompts * held.group * of.answer, groups * (of.prompt + held.group * of.context)


@part(
    "sample",
    equation=lambda held: (
        f"{held.prompts} prompts × {held.group} episodes at temperature {held.temperature:g}, and {held.theirs} groups "
        + (f"of other nodes in {held.folder}" if held.folder else "more: no other nodes")
    ),
    needs=lambda held: frozenset({"world:text", "world:verify", f"signal:{held.name}"}),
    bounds={**LIMITS, "theirs": "at least 0", "window": "at least 1"},
    impossible=_impossible,
    inert=_inert,
    cost=_cost,
    state=lambda: {"seen": []},
)
def shared(
    state: dict[str, Any],
    collect: Collector,
    *,
    folder: str = "",
    node: str = "a",
    prompts: int = 4,
    theirs: int = 4,
    group: int = 8,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    max_tokens: int | None = None,
    window: int = 4,
    name: str = "success",
) -> tuple[dict[str, Any], Experience]:
    """A round of a node (SAPO, arXiv 2509.08721): own groups, which it publishes, and groups that others published.

    Nobody waits: what others do not offer is made up by own groups, so that a round has prompts + theirs of them.
    Others' groups are taken whole, each once, by lot among those whose answers earn different signals in the node's own
    world. Their `logp` is the node's own, scored before the round's first update: the ratio starts at 1, and nothing
    corrects for who acted. What cannot be used is dropped and counted (`swarm_dropped`).

    folder   where nodes share rollouts (panoply/rollouts.py); none: the node is alone
    node     its name
    prompts  own groups
    theirs   groups of others
    window   how many of each node's last rounds are looked at
    name     the signal that must differ within a group
    """

    def own(count: int) -> tuple[Experience, list[Group]]:
        first = collect.state["tasks"]
        tasks = collect.tasks(count)
        found = collect.episodes(
            tasks,
            group,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            max_tokens=max_tokens,
        )
        return found, _as_groups(found, tasks, [collect.place(first + i) for i in range(count)], collect)

    found, published = own(prompts)
    if not folder:
        return state, Experience.mix([found, own(theirs)[0]]) if theirs else found
    exchange = Exchange(Path(folder), node, window)
    round, digest = collect.version, _digest(published)
    kept = exchange.noted(round, digest)
    if kept is None:
        kept = _look(exchange, collect, theirs, round, digest, state["seen"], varied(name))
    head, taken = kept
    collect.notes = head["counts"]
    rows = [found]
    if len(taken) < theirs:
        more, filled = own(theirs - len(taken))
        rows, published = [found, more], [*published, *filled]
    if taken:
        rows.append(_scored(_played(collect, taken), collect, temperature))
    exchange.offer(round, published, vocabulary_of(collect.policy.tokenizer))
    return {"seen": head["seen"]}, Experience.mix(rows) if len(rows) > 1 else found


def _as_groups(
    experience: Experience, tasks: Sequence[Task], places: Sequence[int], collect: Collector
) -> list[Group]:
    """Own groups as they are shared, in the order of their tasks."""
    tokenizer, episodes = collect.policy.tokenizer, experience.by("episode")
    of = torch.searchsorted(experience.by("group").keys, episodes.first(experience["group"])).tolist()
    groups: list[Group] = [
        {"task": place, "id": task.id, "prompt": tokenizer.decode(task.prompt), "answers": []}
        for task, place in zip(tasks, places, strict=True)
    ]
    for at, tokens in zip(of, answers_of(experience), strict=True):
        groups[at]["answers"].append(answer_of(tokens, tokenizer))
    return groups


def _digest(groups: Sequence[Group]) -> str:
    said = [(group["id"], [answer["tokens"] for answer in group["answers"]]) for group in groups]
    return hashlib.sha256(repr(said).encode()).hexdigest()[:32]


def _look(
    exchange: Exchange,
    collect: Collector,
    theirs: int,
    round: int,
    own: str,
    seen: Sequence[str],
    differ: Callable[[Experience], Tensor],
) -> tuple[Ledger, list[Group]]:
    """Draw groups by lot from what others offer until there are enough that vary, and write them down."""
    dropped = Dropped()
    offers, still = exchange.offered(seen, dropped) if theirs else ([], [])
    order = torch.randperm(len(offers), generator=torch_rng("swarm", collect.seed, round)).tolist()
    taken: list[Group] = []
    even: list[str] = []
    for at in order:
        if len(taken) == theirs:
            break
        group = offers[at]
        why = _refused(group, collect, differ)
        if why is None:
            taken.append(group)
        elif why[0] == EVEN:
            even.append(group["key"])
        else:
            dropped.add(group["key"], *why)
    counts: dict[str, float] = {
        "swarm_offered": len(offers),
        "swarm_taken": len(taken),
        "swarm_even": len(even),
        "swarm_dropped": dropped.counts.total(),
        **{f"swarm_dropped_{reason}": count for reason, count in sorted(dropped.counts.items())},
    }
    head: Ledger = {
        "panoply": "taken",
        "schema": SCHEMA,
        "own": own,
        "counts": counts,
        "seen": [*still, *dropped.seen, *even, *(group["key"] for group in taken)],
    }
    if theirs:
        exchange.note(round, head, taken, dropped)
    return head, taken


def _refused(
    group: Group, collect: Collector, differ: Callable[[Experience], Tensor]
) -> tuple[str, str] | None:
    """Why a group cannot be learned from, as a reason and a sentence. It counts as nothing collected."""
    counted = dict(collect.state)
    try:
        task = collect.task(group["task"])
        if task.id != group["id"]:
            return "foreign", f"'{group['prompt'][:40]}' is not the problem of {collect.world.name} there"
    except FAULTS as problem:
        return "foreign", f"{collect.world.name} has no problem {group['task']}: {problem}"
    try:
        _tokens(group, collect)
    except FAULTS as problem:
        return "malformed", str(problem)
    try:
        rows = _played(collect, [group])
        longest = int(rows.context.ragged("tokens").lengths.max())
        if longest > collect.policy.context_length:
            return "malformed", f"An episode of {longest} tokens does not fit the model's context."
        return None if bool(differ(rows).any()) else (EVEN, "")
    except FAULTS as problem:
        return "ungraded", str(problem)
    finally:
        collect.state.update(counted)


def _tokens(group: Group, collect: Collector) -> list[list[int]]:
    """The answers of a group in the node's own tokens."""
    tokenizer = collect.policy.tokenizer
    same = group.get("vocabulary") == vocabulary_of(tokenizer)
    return [tokens_of(answer, same, tokenizer) for answer in group["answers"]]


def _played(collect: Collector, groups: Sequence[Group]) -> Experience:
    """Answers of others, each group by itself, played and graded in the node's own world."""
    tasks = [collect.task(group["task"]) for group in groups]
    first, sizes = collect.state["groups"], torch.tensor([len(group["answers"]) for group in groups])
    collect.state["groups"] += len(groups)
    every = torch.arange(len(groups)).repeat_interleave(sizes)
    answers = [tokens for group in groups for tokens in _tokens(group, collect)]
    return collect.answers([tasks[i] for i in every.tolist()], answers, into=first + every, source=REPLAY)


def _scored(rows: Experience, collect: Collector, temperature: float) -> Experience:
    """The rows as if the node had said them now: with its own log-probabilities and entropies."""
    if temperature not in (0.0, 1.0):
        rows = rows.with_columns(temperature=torch.full((len(rows),), temperature))
    with torch.no_grad():
        found = collect.policy.score(rows, frozenset({"entropy"}))
    return rows.with_columns(logp=found["logp"].detach().cpu(), entropy=found["entropy"].detach().cpu())
