"""Every surrogate and regulariser, with every word its settings may be, has one gradient however a batch is split.

Here each turn is a context of its own, as where a world replies in between. Only there does it show whether a term that
looks at its whole episode, or group, has said so.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from kit import Tabular, assert_same, learner, on_policy, ragged
from torch import Tensor
from toys import with_keys, with_pairs

from panoply import registry
from panoply.experience import Experience, Ragged, Segments, Table
from panoply.parts import Part

SLOTS = ("surrogate", "regularise")
ELSEWHERE = {
    "mirror": "its divergence is between whole policies: tests/policies/test_divergence.py",
    "group_preference": "its sets are given answers, a stream of their own: tests/methods/test_oorl_gepo.py",
}


class Talkative(Tabular):
    """A table that gives whatever a term may ask of a policy."""

    def score(self, experience: Experience, needs: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        found = super().score(experience, needs)
        logp = self.logits[experience["state"]].log_softmax(-1)
        for need in needs - found.keys():
            if need == "mean_logp":
                found[need] = logp.mean(-1)
            elif need.startswith("logp:"):
                found[need] = found["logp"] * 0.5
        return found


def turns_apart() -> Experience:
    """Ragged episodes whose turns have contexts of their own, with every column that a term may read."""
    made = with_keys(with_pairs(ragged(drift=0.5)))
    turns = Segments(made["episode"] * 100 + made["turn"])
    tokens = Ragged.from_lists([[0] * int(n) for n in turns.count])
    made = Experience(made.decisions.plus({"context": turns.index}), Table({"tokens": tokens}), made.pairs)
    dice = torch.Generator().manual_seed(1)
    more = {name: torch.rand(len(made), generator=dice, dtype=torch.float64) - 0.5 for name in COLUMNS}
    more |= {"logp@old": made["logp"], "position": torch.arange(len(made)), "alone": made["episode"] % 3 - 1}
    more |= {"tag": more["position"] % 2, "right": made["episode"] % 2}
    return made.with_columns(**more)


COLUMNS = ("value", "target", "uncertainty", "share", "mean_logp@old", "logp:6:raw@old", "logp:6:normed@old")


def choices(cls: type[Part]) -> Iterator[tuple[str, Part]]:
    """A part as it comes, and with each of the words that one of its settings may be."""
    plain = cls()
    yield "", plain
    for name, hint in typing.get_type_hints(cls.info.function).items():
        if get_origin(hint) is Literal:
            for word in get_args(hint):
                if word != getattr(plain, name):
                    yield f"{name}={word}", dataclasses.replace(plain, **{name: word})  # type: ignore[type-var]


def cases() -> Iterator[Any]:
    registry.import_all()
    for slot in SLOTS:
        for key, cls in sorted(registry.parts(slot).items()):
            if cls.info.name not in ELSEWHERE and cls.__module__.startswith("panoply."):
                yield from (
                    pytest.param(slot, held, id=f"{key} {said}".strip()) for said, held in choices(cls)
                )


@pytest.mark.parametrize(("slot", "held"), [*cases()])
def test_one_gradient(slot: str, held: Part) -> None:
    made = turns_apart()
    method = on_policy(**{slot: held if slot == "surrogate" else (held,)})
    whole = learner(Talkative(), method).gradient(made)["logits"]
    policy = Talkative()
    assert_same(learner(policy, method, micro_tokens=1).gradient(made)["logits"], whole, rel=1e-10)
    assert len(policy.scored) > 1, "the mini-batch was never split"
