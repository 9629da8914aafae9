"""Every number that can be set has a range, or says that any number will do; nonsense is refused before it trains."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from panoply import registry
from panoply.errors import PanoplyError
from panoply.parts import SLOTS, Part, options
from panoply.planning import Options, make_plan
from panoply.policies.control import PolicySpec
from panoply.ranges import ANY, SEED, check_range, merged, within


def is_numeric(annotation: Any) -> bool:
    """Whether a setting may be a number, or a list of them."""
    inner = [a for o in options(annotation) for a in (o, *typing.get_args(o))]
    return int in inner or float in inner


def numeric_settings() -> Iterator[tuple[str, Any, str | None]]:
    """Every number that a built-in part, world, policy or run takes: its name, default and range."""
    registry.entries()
    for slot in SLOTS:
        for cls in registry.parts(slot).values():
            if cls.__module__.startswith("panoply."):
                for name, annotation in cls.annotations().items():
                    if is_numeric(annotation):
                        yield f"{cls.info.id}.{name}", getattr(cls, name, None), cls.info.bounds.get(name)
    worlds = [
        (e.name, e.build) for e in registry.entries("world") if e.build.__module__.startswith("panoply.")
    ]
    for prefix, cls in [*worlds, ("policy", PolicySpec), ("run", Options)]:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if is_numeric(hints[field.name]):
                yield f"{prefix}.{field.name}", field.default, merged(cls).get(field.name)


def test_every_numeric_setting_has_a_range_that_holds_its_default() -> None:
    found = list(numeric_settings())
    assert len(found) > 300
    lacking = [name for name, _, bound in found if bound is None]
    assert not lacking, f"say which numbers these may be, in bounds, or 'any number': {lacking}"
    for name, default, bound in found:
        assert bound is not None
        within(0.5, bound)  # a range that can be read
        if default is not dataclasses.MISSING:
            check_range(name, default, bound)


@pytest.mark.parametrize(
    ("bound", "inside", "outside"),
    [
        ("above 0", [1e-9, 5], [0, -1]),
        ("at least -1.5", [-1.5, 3], [-1.6]),
        ("from 0 to 1", [0, 1], [-0.1, 1.1]),
        ("from 0 up to 1", [0, 0.99], [1]),
        ("above 0 to 1", [0.01, 1], [0, 1.1]),
        (ANY, [-5, 1e9], [math.inf, math.nan, 1e30, 10**10, 10**400]),
        (SEED, [2**62], [2**64]),
    ],
)
def test_ranges(bound: str, inside: list[float], outside: list[float]) -> None:
    for value in inside:
        check_range("x", value, bound)
        check_range("x", (value,), bound)
    for value in outside:
        with pytest.raises(PanoplyError, match=r"^x must be "):
            check_range("x", value, bound)
        with pytest.raises(PanoplyError):
            check_range("x", (inside[0], value), bound)


def test_a_range_that_cannot_be_read() -> None:
    with pytest.raises(PanoplyError, match="is no range"):
        within(1, "about 3")


@pytest.mark.parametrize(
    ("method", "path", "value"),
    [
        ("dpo", "losses.logistic", 0),
        ("dpo", "losses.logistic.beta", -1),
        ("grpo", "surrogate.weight", -1),
        ("grpo", "surrogate.weight", True),
        ("grpo", "surrogate.low", 2),
        ("grpo", "update.schedule.warmup", -1),
        ("grpo", "update.weight_decay", math.inf),
        ("grpo", "update.epsilon", math.inf),
        ("grpo", "credit.epsilon", math.nan),
        ("grpo", "sample.temperature", 1e30),
        ("grpo", "sample.prompts", 10**12),
        ("grpo", "sample.prompts", 10**400),
        ("grpo", "update.lr", 10**400),
        ("grpo", "world.operations", 10**6),
        ("grpo", "run.seed", 10**30),
        ("grpo", "run.steps", 10**18),
        ("grpo", "run.threads", 10**6),
        ("grpo", "run.minutes", math.inf),
        ("grpo", "run.device", ".inf"),
        ("ppo", "policy.hidden", (10**9, 10**9)),
        ("ppo", "sample.envs", 10**9),
    ],
)
def test_nonsense_is_refused_by_the_plan(method: str, path: str, value: Any) -> None:
    settings = {path: value, **({"update.schedule": "linear"} if "schedule.warmup" in path else {})}
    world = "cartpole" if method == "ppo" else "chain"
    for given in (value, repr(value)) if not isinstance(value, int) or abs(value) < 10**100 else (value,):
        with pytest.raises(PanoplyError) as told:
            make_plan(method, world, settings={**settings, path: given}, model="fresh")
        assert "\n" not in str(told.value)
        assert path.rpartition(".")[2] in str(told.value)


def test_a_part_of_a_plug_in_needs_no_ranges_and_is_finite_all_the_same(registries: None) -> None:
    from panoply.parts import part

    @part("reward")
    def own(experience: Any, *, gain: float = 1.0) -> Any: ...

    assert isinstance(own(gain=-3.0), Part)
    with pytest.raises(PanoplyError, match=r"reward\.own\.gain must be a finite number"):
        own(gain=math.inf)
