"""What a `model` part returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from panoply.experience import Column, Experience
from panoply.parts import Part
from panoply.regimes import Fit


class Model:
    """What a `model` part returns when it is called with a seat: a model, and what is done with it.

    columns   what it adds to experience
    ask       what it says of tasks before anybody acts on them: a sample part that needs `model:NAME` asks
              `collect.models[NAME](tasks)`, and the part of that name says that it `gives` it
    fit       how it learns on its own, by gradients, from experience with credit
    losses    or with the policy, terms of one objective
    learn     or without gradients, as a ridge regression does: from all that was collected, when the policy has
              moved already; returns metrics
    joins     or with the policy, by terms of the method, which need an output of its
    warmup    steps in which only the model learns
    stays     whether it learns in those alone, and stays as it is afterwards
    among     what of the experience it is fitted to; left out, what the policy learns from
    instead   what the policy learns from in place of what was collected, and metrics: a model that learns from what
              was collected, before anything is credited, and lets the policy act elsewhere
    thinks    whether it is `Thoughts` (policies/thoughts.py), which become a part of the policy itself
    steers    whether it is `TokenValues` (policies/steering.py), which become a part of it, too, and act in its place
    """

    def __init__(
        self,
        model: Any,
        columns: Callable[[Any, Experience], Mapping[str, Column]] | None = None,
        fit: Fit | None = None,
        warmup: int = 0,
        losses: tuple[Part, ...] = (),
        ask: Callable[[Any, Sequence[Any]], Tensor] | None = None,
        learn: Callable[[Any, Experience, int], Mapping[str, float]] | None = None,
        among: Callable[[Experience], Experience] | None = None,
        thinks: bool = False,
        instead: Callable[[Any, Experience, int], tuple[Experience, Mapping[str, float]]] | None = None,
        joins: bool = False,
        stays: bool = False,
        steers: bool = False,
    ):
        self.model, self.columns, self.fit, self.warmup, self.losses = model, columns, fit, warmup, losses
        self.ask, self.learn, self.among, self.thinks = ask, learn, among, thinks
        self.instead, self.joins, self.stays, self.steers = instead, joins, stays, steers
