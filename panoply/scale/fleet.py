"""A collector whose episodes are played elsewhere: by samplers, each some whole groups.

Numbers of episodes and groups are given out here, as in one process, and seeds are hashes of numbers; so the rows that
come back, put in the order in which one process writes them, are the same with one sampler or three, whoever died.
What does not go to samplers is played here, by the driver's own copy of the policy (`plays_here` says what, and why).
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from panoply.experience import Column, Experience, Ragged, Table, distinct
from panoply.policies.moving import Weights, checksum, moving
from panoply.rollout.answer_likelihood import answer_likelihood
from panoply.rollout.engine import STEADY, OnStop, Request, Rollouts
from panoply.rollout.engines import engine_of
from panoply.rollout.sampling import Sampling
from panoply.rollout.text import Collector, check_turns
from panoply.scale import travel, wire
from panoply.scale.crew import Crew, Published
from panoply.scale.merging import in_order, numbered_prompts, together
from panoply.scale.sampler import FAILED, Sampler
from panoply.scale.weights import Stored
from panoply.selves import LEARNER
from panoply.worlds.world import Task

if TYPE_CHECKING:
    from panoply.planning import Plan
    from panoply.policies.text import TextPolicy
    from panoply.rollout.masks import BatchMask
    from panoply.scale.spread import Spread

KILLED = "every sampler that played it died"
"""Why a task was left out that killed whoever was asked for it."""
Share = dict[str, Any]


class Fleet(Collector):
    """`episodes` are played by samplers, and tokens drawn by them wherever the driver asks for tokens alone (trees,
    windows, continuations): worlds, grades and trees are then the driver's."""

    def __init__(
        self,
        world: Any,
        policy: TextPolicy,
        seed: int,
        split: str = "train",
        needs: frozenset[str] = frozenset(),
        *,
        plan: Plan,
        spread: Spread,
        source: str = "",
    ):
        super().__init__(world, policy, seed, split, needs)
        self._steady()
        self.own, options = policy, plan.options
        self.names = tuple(moving(policy))
        """Of the weights that travel."""
        self.board: str | None = None
        """Where samplers look for newer weights in the midst of answers, where they do."""
        cluster, parcel = spread.cluster, travel.packed(plan)
        self.crew: Crew[Share] = Crew(
            cluster,
            options.samplers,
            lambda n: cluster.place("sampler", n, Sampler, parcel, source, gpus=spread.gpus),
            Stored(cluster.put),
            options.patience,
            halves,
            lambda share: float(sum(share["sizes"])),
        )
        self._published: dict[str, Published] = {}
        self._why: Counter[str] = Counter()
        self._told = time.perf_counter()

    def beside(self, world: Any, policy: TextPolicy) -> Fleet:
        """Another with the same samplers, in a world and with a policy of its own."""
        made = copy.copy(self)
        made.world, made.policy, made.own = world, policy, policy
        made._published, made.selves = {}, None
        made.__dict__.pop("_complete", None)
        made._steady()
        return made

    def _steady(self) -> None:
        """What is drawn here is the same in whatever company, too."""
        if not self.policy.masked:
            self._engine = engine_of(self.policy, least=STEADY)

    # -------------------------------------------------------------- who plays

    def plays_here(self) -> str:
        """Why the driver plays itself, with its own copy of the policy; empty where samplers do."""
        if self.policy.masked:
            return "a masked-diffusion model is filled in as the sample part says"
        if self.policy.thoughts is not None:
            return "the policy reads vectors of its own"
        if self._heat is not None:
            return "temperatures depend on what is drawn from"
        if self._carried() is None:
            return "who acts is another model than the one that learns"
        return ""

    def _carried(self) -> Weights | None:
        """The weights of who acts, under the names that those of the learner have; None where it is made otherwise."""
        names = self.names
        if not hasattr(self.policy.model, "named_parameters"):
            return None
        theirs: dict[str, Tensor] = dict(self.policy.named_parameters()) | dict(
            self.policy.model.named_buffers()
        )
        return {name: theirs[name] for name in names} if set(names) <= theirs.keys() else None

    def _acting(self) -> Published:
        """Who acts, whose weights are sent before anybody is asked; only where they have changed."""
        who = LEARNER if self.policy is self.own else f"actor-{self.actor}"
        weights = self._carried()
        assert weights is not None
        known, now = self._published.get(who), (self.version, checksum(weights))
        if known is None or (known.version, known.checksum) != now:
            known = self._published[who] = self.crew.published(who, *now, weights)
        return known

    # -------------------------------------------------------------- episodes

    def episodes(
        self,
        tasks: Sequence[Task],
        group: int | Sequence[int] = 1,
        *,
        into: Tensor | None = None,
        prefixes: Sequence[Tensor | None] = (),
        **how: Any,
    ) -> Experience:
        if not tasks or prefixes or self.plays_here():
            return super().episodes(tasks, group, into=into, prefixes=prefixes, **how)
        sampling = self._checked(how)
        sizes = [group] * len(tasks) if isinstance(group, int) else list(group)
        asked, keys = self._groups(tasks, group, into)
        first, published = self.state["episodes"], self._acting()
        whole = {
            "who": published.who,
            "counted": self.counted,
            "version": published.version,
            "board": self.board,
            "how": {**how, "temperature": _table(sampling)},
        }
        shares = dealt(tasks, sizes, [keys[at] for at in starts(sizes)], first, len(self.crew.members), whole)
        return self._made(asked, first, self.crew.asked("play", shares, published))

    def _checked(self, how: Mapping[str, Any]) -> Sampling:
        """Refuse here what a sampler would refuse."""
        given = {name: value for name, value in how.items() if name != "turns"}
        check_turns(how.get("turns"))
        return self._sampling(given.pop("temperature", 1.0), **given)

    def _made(self, tasks: Sequence[Task], first: int, answers: list[tuple[Share, Any]]) -> Experience:
        """The rows of all shares as one process writes them, and what it counts."""
        self._number(len(tasks))
        self._of_tasks(tasks)
        for _, answer in answers:
            self._why.update(answer["why"])
        killed = [s["first"] - first + i for s in self.crew.left_out for i in range(sum(s["sizes"]))]
        if killed:
            self._why[KILLED] += len(killed)
        rounds = [answer["longest"] for _, answer in answers]
        longest = [max(lengths) for lengths in zip_longest(rounds)]
        self.state["decode_steps"] += sum(longest)
        if self.counted is not None:
            more = round(sum(answer["signal"] for _, answer in answers))
            self.state[f"signal:{self.counted}"] = self.state.get(f"signal:{self.counted}", 0) + more
        if not answers:
            return self._graded(Experience(Table({}), Table({})), torch.zeros(0), killed, len(tasks))
        found = together([wire.unpacked(answer["experience"]) for _, answer in answers])
        found = in_order(found, self.world.markov)
        self._count(found.decisions)
        row = found["episode"] - first
        more_columns: dict[str, Column] = {}
        if self.selves and self.selves.actors:
            more_columns["actor"] = torch.full_like(row, self.actor)
        if "answer_likelihood" in self.needs:
            local = found.decisions.plus({"episode": row})
            more_columns["answer_likelihood"] = answer_likelihood(
                self.world, self.policy, tasks, local, found.context
            )
        failed = killed + distinct(row[found[FAILED]])[0].tolist() if FAILED in found else killed
        found = found.without(FAILED).with_columns(**more_columns)
        return self._graded(found, row, failed, len(tasks)) if failed else found

    # -------------------------------------------------------------- tokens alone

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        on_stop: OnStop | None = None,
        *,
        mask: BatchMask | None = None,
        entropy: bool = False,
    ) -> Rollouts:
        plain = on_stop is None and mask is None and not any(r.mask or r.prefix is not None for r in requests)
        if not requests or not plain or sampling.heat is not None or self.plays_here():
            return super().generate(requests, sampling, on_stop, mask=mask, entropy=entropy)
        published = self._acting()
        given = {f.name: getattr(sampling, f.name) for f in dataclasses.fields(sampling) if f.name != "heat"}
        whole = {
            "who": published.who,
            "sampling": {**given, "temperature": _table(sampling)},
            "entropy": entropy,
        }
        shares = []
        for low, high in blocks([len(r.seeds) for r in requests], len(self.crew.members)):
            some = requests[low:high]
            sent = [(list(r.prompt), list(r.seeds), r.most, r.begun) for r in some]
            shares.append({**whole, "first": low, "sizes": [len(r.seeds) for r in some], "requests": sent})
        found = drawn(requests, self.crew.asked("draw", shares, published))
        if found.decisions.rows:
            self.state["decode_steps"] += int(found.decisions.tensor("context").bincount().max())
        return found

    # -------------------------------------------------------------- what else a run asks

    def failures(self) -> dict[str, int]:
        return dict(Counter(super().failures()) + self._why)

    def workers(self, step: int) -> list[dict[str, Any]]:
        """For `workers.jsonl`: what each sampler did since the last step."""
        now, before = time.perf_counter(), self._told
        self._told = now
        return self.crew.workers(step, now - before)

    def close(self) -> None:
        self.crew.close()
        super().close()


def _table(sampling: Sampling) -> Any:
    """A temperature as it travels: a number, or what a schedule says at every place of a turn."""
    if not callable(sampling.temperature):
        return sampling.temperature
    table = sampling.temperatures()
    return 1.0 if table is None else table.numpy()


def zip_longest(rounds: Sequence[Sequence[int]]) -> list[list[int]]:
    """The first numbers of all, then the second of those that have one, …"""
    return [[r[i] for r in rounds if len(r) > i] for i in range(max(map(len, rounds), default=0))]


# ------------------------------------------------------------------ shares


def starts(sizes: Sequence[int]) -> list[int]:
    """Where each group begins among the episodes."""
    ends = torch.tensor(list(sizes)).cumsum(0)
    return (ends - torch.tensor(list(sizes))).tolist()


def blocks(sizes: Sequence[int], among: int) -> list[tuple[int, int]]:
    """Neighbours go together: about as many rows in each of at most so many blocks."""
    total, found, low = sum(sizes), [], 0
    begun = [*starts(sizes), total]
    for i in range(1, among + 1):
        high = min(range(low, len(sizes) + 1), key=lambda at: abs(begun[at] - total * i / among))
        if high > low:
            found.append((low, high))
            low = high
    return found


def dealt(
    tasks: Sequence[Task],
    sizes: Sequence[int],
    keys: Sequence[int],
    first: int,
    among: int,
    whole: Mapping[str, Any],
) -> list[Share]:
    begun = starts(sizes)
    return [
        {
            **whole,
            "tasks": list(tasks[low:high]),
            "sizes": list(sizes[low:high]),
            "keys": list(keys[low:high]),
            "first": first + begun[low],
        }
        for low, high in blocks(sizes, among)
    ]


def halves(share: Share) -> list[Share]:
    """A share cut in two; one of a single task, or of requests that cannot be left out, stays whole."""
    n = len(share["sizes"])
    if n == 1 or "tasks" not in share:
        return [share]
    cut = n // 2
    lists = ("tasks", "sizes", "keys")
    one = {**share, **{name: share[name][:cut] for name in lists}}
    other = {**share, **{name: share[name][cut:] for name in lists}}
    return [one, {**other, "first": share["first"] + sum(one["sizes"])}]


def drawn(requests: Sequence[Request], answers: Sequence[tuple[Share, Any]]) -> Rollouts:
    """What shares of requests gave, as one call of an engine gives it."""
    parts = [wire.unpacked(answer["experience"]) for _, answer in answers]
    found = together(parts)
    request = torch.cat([wire.tensor(a["request"]).long() + s["first"] for s, a in answers])
    reasons = Ragged.from_lists([row for _, answer in answers for row in answer["reasons"]])
    end = torch.cat([wire.tensor(answer["end"]).long() for _, answer in answers])
    context = found.context.plus(
        {"prompt": numbered_prompts(found.context, torch.arange(found.context.rows))}
    )
    keys = tuple(requests[i].key for i in request.tolist())
    return Rollouts(found.decisions, context, request, keys, reasons, end)
