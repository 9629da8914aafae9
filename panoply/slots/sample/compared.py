"""Own answers that the world's annotators compare."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from panoply.costs import Lengths, Tokens, own_episodes
from panoply.experience import Experience, Table
from panoply.parts import Finding, part
from panoply.seeds import numpy_rng
from panoply.selves import LEARNER, acts, by_whom
from panoply.slots.sample.answers import answers_of, preference_of
from panoply.slots.sample.groups import LIMITS, greedy_cuts, greedy_groups

if TYPE_CHECKING:
    from panoply.rollout.text import Collector

Pair = tuple[int, int]


def _needs(held: Any) -> frozenset[str]:
    return (
        frozenset({"world:preference" if held.soft else "world:prefer"}) | acts(held.by) | acts(held.against)
    )


def _impossible(held: Any, method: Any) -> list[Finding]:
    if held.group == 1 and held.against == LEARNER:
        return [("group", "an answer needs another one to be compared with")]
    return greedy_groups(held, method)


def _cost(held: Any, of: Lengths) -> Tokens:
    sampled, trained = own_episodes(held, of)
    sides = 1 if held.against == LEARNER else 2
    return sides * sampled, sides * trained


def _equation(held: Any) -> str:
    others = "one other" if held.asked == "once" else "every other"
    others += "" if held.against == LEARNER else f" of {held.against}"
    said = "with the probability that it is preferred" if held.soft else "by an annotator"
    return f"{held.prompts} prompts × {held.group} episodes{by_whom(held.by)}, each compared with {others} {said}"


@part(
    "sample",
    equation=_equation,
    needs=_needs,
    gives={"pairs", "signal:wins"},
    bounds=LIMITS,
    impossible=_impossible,
    inert=greedy_cuts,
    cost=_cost,
)
def compared(
    collect: Collector,
    *,
    prompts: int = 16,
    group: int = 8,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    max_tokens: int | None = None,
    asked: Literal["once", "all"] = "once",
    soft: bool = False,
    by: str = LEARNER,
    against: str = LEARNER,
) -> Experience:
    """Groups of own answers, of which an annotator is asked again and again which of two is better.

    Every question makes a pair, the preferred answer first, and the signal `wins` is an answer's share of the questions
    that it won (½ where it was in none). By `reward.name=wins` credit and `select.best_worst` go by it, which no score
    of single answers could stand in for: preferences may go round in a circle. How many were asked is `questions` among
    a step's metrics.

    asked   whether an answer is compared with one other of its group, by lot, or with all others
    soft    no answer is asked for: the pairs' column `p` is the probability that the first is preferred, and `wins` the
            mean of these
    by      who answers, the policy that learns or another self of it (`mix:0.25:reference`)
    against whose answers they are compared with: the group's own, or as many of a snapshot (`reference`, `behind:10`),
            which are then in the group too
    """
    tasks, first_group = collect.tasks(prompts), collect.state["groups"]
    how: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "max_tokens": max_tokens,
    }
    with collect.acted_by(by):
        found = collect.episodes(tasks, group, **how)
    others = collect.state["episodes"] if against != LEARNER else None
    if against != LEARNER:
        with collect.acted_by(against):
            into = torch.arange(first_group, first_group + prompts)
            found = Experience.mix([found, collect.episodes(tasks, group, into=into, **how)])
    episodes, known = found.by("episode"), {task.id: task for task in tasks}
    keys, said = episodes.keys.tolist(), answers_of(found)
    asking = [known[i] for i in episodes.first(found["task"]).tolist()]
    firsts, seconds, chances = [], [], []
    for a, b in _questions(episodes.first(found["group"]).tolist(), keys, asked, collect.seed, others):
        firsts.append(a)
        seconds.append(b)
        if soft:
            chances.append(preference_of(collect.world, asking[a], said[a], said[b]))
        else:
            rng = numpy_rng("compared", collect.seed, keys[a], keys[b])
            chances.append(float(collect.world.prefer(asking[a], said[a], said[b], rng)))
    first, second, p = torch.tensor(firsts), torch.tensor(seconds), torch.tensor(chances)
    won = torch.zeros(len(keys)).index_add(0, first, p).index_add(0, second, 1 - p)
    times = torch.cat([first, second]).bincount(minlength=len(keys))
    wins = torch.where(times > 0, won / times.clamp(min=1), 0.5)
    turned = p < 0.5
    pairs = {
        "chosen": episodes.keys[torch.where(turned, second, first)],
        "rejected": episodes.keys[torch.where(turned, first, second)],
    }
    columns = {"signal:wins": episodes.rows(wins) * episodes.is_last()}
    collect.notes = {**collect.notes, "questions": len(firsts)}
    more = {"p": torch.where(turned, 1 - p, p)} if soft else {}
    return found.with_columns(**columns).with_pairs(Table({**pairs, **more}))


def _questions(
    groups: Sequence[int], keys: Sequence[int], asked: str, seed: int, others: int | None
) -> Iterator[Pair]:
    """Which episodes, by their place, are compared: all of a group with one another, or two and two by lot.

    Where there are `others`, episodes from that number on, one of each pair is theirs.
    """
    members: dict[int, list[int]] = {}
    for place, key in enumerate(groups):
        members.setdefault(key, []).append(place)
    for several in members.values():
        rng = numpy_rng("pairing", seed, keys[several[0]])
        if others is None:
            order = rng.permutation(several).tolist() if asked == "once" else several
            every = itertools.combinations(order, 2)
            yield from zip(order[::2], order[1::2], strict=False) if asked == "once" else every
            continue
        mine = [i for i in several if keys[i] < others]
        theirs = [i for i in several if keys[i] >= others]
        if asked == "once":
            yield from zip(rng.permutation(mine).tolist(), rng.permutation(theirs).tolist(), strict=False)
        else:
            yield from itertools.product(mine, theirs)
