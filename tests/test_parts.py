"""Parts: named, frozen, printable values made of typed functions."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from panoply import registry
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.parts import SLOTS, Part, check, describe, part
from panoply.slots.credit.groups import group
from panoply.slots.credit.moving import moving_baseline
from panoply.slots.regularise.terms import kl
from panoply.slots.schedule.schedules import constant, linear
from panoply.slots.update.optimisers import adam
from panoply.values import part_from_json

_GROUP = group()


def examples() -> list[Part]:
    """Every built-in part with its defaults, and as methods use it."""
    methods = [e.build() for e in registry.entries("method") if e.build.__module__.startswith("panoply.")]
    found = [held for method in methods for _, held in method.parts()]
    found += [v for held in found for v in held.settings().values() if isinstance(v, Part)]
    for slot in SLOTS:
        for cls in registry.parts(slot).values():
            required = [f for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]  # type: ignore[arg-type]
            if cls.__module__.startswith("panoply.") and not required:
                found.append(cls())
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("made", examples(), ids=lambda p: p.info.id)
def test_every_part(made: Part) -> None:
    """It prints, hashes, equals itself after JSON, and has an equation and a docstring."""
    again = part_from_json(json.loads(json.dumps(made.to_json())))
    assert again == made
    assert hash(again) == hash(made)
    assert str(made).startswith(made.info.name)
    assert made.equation()
    assert "{" not in made.equation()
    assert made.info.summary
    assert isinstance(made.needs(), frozenset)


def test_a_part_is_a_frozen_value() -> None:
    assert group() == group(baseline="mean")
    assert group() != group(baseline="median")
    assert len({group(), group(), group(scale="none")}) == 2
    assert str(kl(weight=0.5)) == "kl(weight=0.5, estimator=k3, descends=none, to=reference)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        group().baseline = "median"  # type: ignore[attr-defined]


def test_but() -> None:
    made = adam(lr=0.1).but(schedule=linear(warmup=3))
    assert made == adam(lr=0.1, schedule=linear(warmup=3))
    with pytest.raises(
        PanoplyError, match=r"Unknown setting of credit.group 'basline'. Did you mean 'baseline'\?"
    ):
        group().but(basline="mean")


def test_nested_parts_round_trip() -> None:
    made = adam(schedule=linear(end=0.1, warmup=5))
    text = json.dumps(made.to_json())
    assert json.loads(text)["schedule"] == {"part": "schedule.linear", "end": 0.1, "warmup": 5, "start": 0.0}
    assert part_from_json(json.loads(text)) == made
    with pytest.raises(PanoplyError, match="Did you mean 'warmup'"):
        part_from_json({"part": "schedule.linear", "warmupp": 5})


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: group(baseline="men"),
            "credit.group.baseline takes mean, leave_one_out, median, batch_mean or none, not 'men'.",
        ),
        (lambda: group(epsilon="x"), "credit.group.epsilon takes a number, not 'x'."),
        (lambda: adam(epochs=1.5), "update.adam.epochs takes a whole number, not 1.5."),
        (lambda: adam(epochs=True), "update.adam.epochs takes a whole number, not True."),
        (lambda: adam(schedule=3), "update.adam.schedule takes a part, not 3."),
        (lambda: kl(weight="much"), "regularise.kl.weight takes a number or a part, not 'much'."),
    ],
)
def test_wrong_types_are_one_sentence(make: Any, sentence: str) -> None:
    with pytest.raises(PanoplyError) as caught:
        make()
    assert str(caught.value) == sentence


def test_harmless_coercion() -> None:
    made = adam(lr=1)
    assert isinstance(made.settings()["lr"], float)
    assert made == adam(lr=1.0)
    assert check("x", [1, 2], tuple[int, ...]) == (1, 2)
    assert check("x", None, float | None) is None
    with pytest.raises(PanoplyError):
        check("x", [1, 2, 3], tuple[int, int])
    assert describe(float | None) == "a number or none"


def test_a_part_that_remembers_takes_its_state_first() -> None:
    assert moving_baseline().info.state() == {"baseline": None}
    assert group().info.state is None


def test_a_part_that_remembers_stands_in_a_slot(registries: None) -> None:
    """Inside another part nobody would keep its state."""

    @part("credit")
    def toy_scaled(experience: Experience, *, of: Part = _GROUP) -> None: ...

    assert toy_scaled(of=group(scale="none"))
    with pytest.raises(PanoplyError) as caught:
        toy_scaled(of=moving_baseline())
    assert str(caught.value) == (
        "credit.toy_scaled.of cannot be moving_baseline: a part that remembers must stand in a slot."
    )


def test_needs_include_those_of_parts_inside(registries: None) -> None:
    @part("schedule", needs={"entropy"})
    def toy_watching(step: int, total: int) -> float:
        return 1.0

    assert kl(weight=toy_watching()).needs() == {"entropy", "logp@reference"}
    assert kl(weight=constant()).needs() == {"logp@reference"}


@pytest.mark.parametrize(
    ("declared", "sentence"),
    [
        ({"slot": "credits"}, "Unknown slot 'credits'. Did you mean 'credit'?"),
        ({"slot": "credit", "unit": "episodes"}, "Unknown unit 'episodes'. Did you mean 'episode'?"),
        (
            {"slot": "credit", "stream": "imitations"},
            "Unknown stream 'imitations'. Did you mean 'imitation'?",
        ),
    ],
)
def test_declarations_are_checked(declared: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PanoplyError) as caught:
        part(**declared)
    assert str(caught.value) == sentence


def test_a_setting_needs_a_type(registries: None) -> None:
    with pytest.raises(PanoplyError, match=r"setting 'scale' of credit.toy_untyped has no type"):

        @part("credit")
        def toy_untyped(experience: Experience, *, scale=1.0) -> None:  # type: ignore[no-untyped-def]
            ...


def test_a_name_is_taken_once(registries: None) -> None:
    def group(experience: Experience) -> None: ...

    with pytest.raises(PanoplyError, match=r"'credit.group' is registered twice"):
        part("credit")(group)
