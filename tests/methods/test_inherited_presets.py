"""Presets: a method has those of its base, as far as they fit, and states its own only where they differ."""

from __future__ import annotations

import dataclasses

from panoply import compose, registry
from panoply.methods.base.grpo import grpo
from panoply.regimes import Method
from panoply.registry import method


def test_nobody_states_what_it_would_inherit() -> None:
    based = [e for e in registry.entries("method") if e.base is not None and e.stated is not None]
    repeated = [e.id for e in based if e.stated == dataclasses.replace(e, stated=None).presets]
    assert repeated == []


def test_the_bases_presets_as_far_as_they_fit(registries: None) -> None:
    tiny = {
        "surrogate.high": 0.3,
        "update": "sgd",
        "update.momentum": 0.5,
        "update.beta2": 0.9,
        "run.steps": 3,
    }

    @method("first@1", presets={"tiny": tiny})
    def first() -> Method:
        return grpo()

    @method("second@1", base="first")
    def second() -> Method:
        return compose.assign(grpo(), "surrogate", "ratio")

    @method("third@1", base="second", presets={})
    def third() -> Method:
        return second()

    found = {name: registry.find("method", name).presets for name in ("first", "second", "third")}
    fits = {"update": "sgd", "update.momentum": 0.5, "run.steps": 3}
    assert found == {"first": {"tiny": tiny}, "second": {"tiny": fits}, "third": {}}
    assert compose.resolve("second", preset="tiny").method.settings()["update.momentum"] == 0.5
