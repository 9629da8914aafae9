"""A small kit: a tabular policy, hand-made experience, and a comparison of gradients."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import panoply as pp
from panoply import registry
from panoply.batch import Batch
from panoply.errors import PanoplyError
from panoply.experience import Column, Experience, Ragged, Table
from panoply.loops.learner import Learner
from panoply.parts import Part, part
from panoply.regimes import Dataset, OnPolicy
from panoply.slots.credit.groups import group
from panoply.slots.data.teacher import demonstrations
from panoply.slots.reduce.averages import token_mean
from panoply.slots.reward.signals import signal
from panoply.slots.sample.groups import groups
from panoply.slots.surrogate.ratios import log_likelihood
from panoply.slots.update.optimisers import sgd

STATES, ACTIONS = 5, 4


class Tabular:
    """π(a|s) is a softmax over row s of a table. Decisions say in column `state` which row they were taken in."""

    def __init__(
        self, seed: int = 0, states: int = STATES, actions: int = ACTIONS, dtype: torch.dtype = torch.float64
    ):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(states, actions, generator=generator, dtype=torch.float64)
        self.logits = nn.Parameter(logits.to(dtype))
        self.scored: list[int] = []
        """How many decisions each forward pass had."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield "logits", self.logits

    def score(self, experience: Experience, needs: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        self.scored.append(len(experience))
        logits = self.logits[experience["state"]]
        if "temperature" in experience:
            logits = logits / experience["temperature"][:, None]
        logp = logits.log_softmax(-1)
        found = {"logp": logp.gather(1, experience["action"][:, None])[:, 0]}
        if "entropy" in needs:
            found["entropy"] = -(logp.exp() * logp).sum(-1)
        return found


def hand(pairs: Sequence[tuple[int, int]] | None = None, **columns: Any) -> Experience:
    """Experience from columns written out. Each episode is a context row of its own, of as many tokens."""
    decisions: dict[str, Column] = {k: _column(v) for k, v in columns.items()}
    rows = len(next(iter(decisions.values())))
    decisions.setdefault("episode", torch.arange(rows))
    decisions.setdefault("action", torch.zeros(rows, dtype=torch.long))
    episode = decisions["episode"]
    assert isinstance(episode, Tensor)
    _, context, lengths = episode.unique(return_inverse=True, return_counts=True)
    decisions.setdefault("context", context)
    number = len(lengths) if "context" not in columns else int(decisions["context"].max()) + 1  # type: ignore[union-attr]
    sizes = torch.bincount(decisions["context"], minlength=number)  # type: ignore[arg-type]
    tokens = Ragged.from_lists([[0] * n for n in sizes.tolist()])
    table = None
    if pairs is not None:
        chosen, rejected = zip(*pairs, strict=True)
        table = Table({"chosen": torch.tensor(chosen), "rejected": torch.tensor(rejected)})
    return Experience(Table(decisions), Table({"tokens": tokens}), table)


def _column(values: Any) -> Column:
    if isinstance(values, Tensor | Ragged):
        return values
    if any(isinstance(v, float) for v in values):
        return torch.tensor(values, dtype=torch.float64)
    return torch.tensor(values)


RAGGED = ((2, 1, 3), (1, 4), (5,), (2, 2, 2, 1))
"""Lengths of the episodes of four groups."""


def ragged(seed: int = 0, lengths: Sequence[Sequence[int]] = RAGGED, drift: float = 0.3) -> Experience:
    """Random experience of groups of unequal size and episodes of unequal length.

    `logp` and `logp@reference` are off from `Tabular(seed)` by up to `drift`, so that ratios leave bounds.
    """
    dice = random.Random(seed)
    columns: dict[str, list[Any]] = {
        n: [] for n in ("group", "episode", "turn", "state", "action", "advantage", "reward")
    }
    episode = 0
    for g, sizes in enumerate(lengths):
        for size in sizes:
            advantage = dice.uniform(-2, 2)
            for t in range(size):
                columns["group"].append(10 + g)
                columns["episode"].append(100 + episode)
                columns["turn"].append(t // 2)
                columns["state"].append(dice.randrange(STATES))
                columns["action"].append(dice.randrange(ACTIONS))
                columns["advantage"].append(advantage)
                columns["reward"].append(float(dice.randrange(3)) if t == size - 1 else 0.0)
            episode += 1
    made = hand(**columns)
    with torch.no_grad():
        logp = Tabular(seed).score(made)["logp"]
    off = [torch.tensor([dice.uniform(-drift, drift) for _ in range(len(made))]).double() for _ in range(2)]
    return made.with_columns(**{"logp": logp + off[0], "logp@reference": logp + off[1]})


def batch(experience: Experience, **now: Any) -> Batch:
    """What a term sees, with the policy's numbers written out; the numbers are leaves to differentiate."""
    return Batch(
        experience, {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in now.items()}
    )


def slopes(values: Tensor, of: Tensor) -> list[float]:
    """d Σ values / d of."""
    (found,) = torch.autograd.grad(values.sum(), of)
    return found.tolist()


def on_policy(**slots: Any) -> OnPolicy:
    """REINFORCE with a token mean, but for the slots given."""
    plain: dict[str, Any] = {
        "sample": groups(),
        "reward": signal(),
        "credit": group(),
        "surrogate": log_likelihood(),
        "reduce": token_mean(),
        "update": sgd(lr=0.1, clip=0.0),
    }
    return OnPolicy(**{**plain, **slots})


def dataset(*losses: Part, **slots: Any) -> Dataset:
    plain: dict[str, Any] = {
        "data": demonstrations(),
        "reduce": token_mean(),
        "update": sgd(lr=0.1, clip=0.0),
    }
    return Dataset(losses=losses, **{**plain, **slots})


def learner(policy: Any, method: OnPolicy | Dataset, micro_tokens: int = 10**9, steps: int = 10) -> Learner:
    return Learner(policy, method, total_steps=steps, micro_tokens=micro_tokens)


def gradient(method: OnPolicy | Dataset, experience: Experience, seed: int = 0, **options: Any) -> Tensor:
    """The learner's gradient for a tabular policy."""
    return learner(Tabular(seed), method, **options).gradient(experience)["logits"]


def assert_same(
    found: Tensor | Mapping[str, Tensor], expected: Tensor | Mapping[str, Tensor], rel: float = 1e-6
) -> None:
    """Equal up to `rel` of the largest entry, which must not be zero."""
    if isinstance(found, Tensor):
        found = {"": found}
    if isinstance(expected, Tensor):
        expected = {"": expected}
    assert found.keys() == expected.keys()
    largest = max(float(x.abs().max()) for x in expected.values())
    assert largest > 0, "nothing is compared: the expected gradient is zero"
    for name, value in expected.items():
        error = float((found[name] - value).abs().max()) / largest
        assert error <= rel, f"{name}: off by {error:.2g} of the largest entry"


def shuffled(experience: Experience, seed: int = 0) -> Experience:
    """The same decisions in another order, and the same context rows in another order."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(experience), generator=generator)
    rows = torch.randperm(experience.context.rows, generator=generator)
    place = rows.argsort()
    decisions = experience.decisions.take(order)
    moved = decisions.plus({"context": place[decisions.tensor("context")]})
    return Experience(moved, experience.context.take(rows), experience.pairs, experience.lists)


# ------------------------------------------------------------------ slow references: plain loops over plain lists


class Slow:
    """The same table of logits, read one decision at a time."""

    def __init__(self, seed: int = 0, states: int = STATES):
        self.logits = Tabular(seed, states).logits

    def logp(self, state: int, action: int) -> Tensor:
        row = self.logits[state]
        total = sum((row[a].exp() for a in range(len(row))), torch.zeros((), dtype=torch.float64))
        return row[action] - total.log()

    def entropy(self, state: int) -> Tensor:
        every = [self.logp(state, a) for a in range(self.logits.shape[1])]
        return -sum((x.exp() * x for x in every), torch.zeros((), dtype=torch.float64))

    def gradient(self, loss: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(loss, self.logits)
        return found


@functools.cache
def world_for(method: str) -> str:
    """The first world that serves a method: `chain`, its home, or the first by name, those of text before others."""
    refused = []
    others = [e for e in registry.entries("world") if e.name != "chain"]
    others.sort(key=lambda e: getattr(e.build, "medium", "text") != "text")
    home = registry.find("method", method).world
    for world in ["chain", *([home] if home else []), *(e.name for e in others)]:
        try:
            pp.plan(method, world)
        except PanoplyError as error:
            refused.append(str(error))
        else:
            return world
    raise AssertionError(f"no world serves {method}: {refused}")


def rows_of(experience: Experience, **where: int) -> list[dict[str, Any]]:
    """Decisions as dictionaries, those with the given keys."""
    names = [n for n, c in experience.decisions.items() if isinstance(c, Tensor)]
    lists = {n: experience[n].tolist() for n in names}
    rows = [{n: lists[n][i] for n in names} for i in range(len(experience))]
    return [r for r in rows if all(r[k] == v for k, v in where.items())]


def values_of(experience: Experience, key: str) -> list[int]:
    return sorted(set(experience[key].tolist()))


# ------------------------------------------------------------------ toy parts


@part("reduce", equation="Σ share")
def toy_shares(experience: Experience, mask: Tensor) -> Tensor:
    """The weights written in a column: an exact expectation where they are probabilities."""
    return experience["share"] * mask
