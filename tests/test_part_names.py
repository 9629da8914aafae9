"""Parts in a method's file have the method's name before theirs, so that two works may each have a `clip`."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from torch import Tensor

from panoply import compose, registry
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.parts import Part, part
from panoply.values import part_from_json

pytestmark = pytest.mark.usefixtures("registries")


def toy_of(work: str) -> Callable[..., Part]:
    """A part `halved` as the file of a work would define it."""

    def halved(experience: Experience, *, by: float = 2.0) -> Tensor:
        """Half of the reward."""
        return experience["reward"] / by

    halved.__module__ = f"panoply.methods.toys.{work}"
    return part("credit")(halved)


def test_two_works_may_have_parts_of_one_name() -> None:
    first, second = toy_of("one"), toy_of("other_plus_bc")
    assert first().info.id == "credit.one/halved"
    assert second().info.id == "credit.other+bc/halved"
    for made in (first(by=3.0), second(by=4.0)):
        assert part_from_json(json.loads(json.dumps(made.to_json()))) == made
    assert first() != second()

    method = compose.resolve("grpo", slots={"credit": "other+bc/halved"}, settings={"credit.by": 5}).method
    assert method.slots()["credit"] == second(by=5.0)
    assert compose.method_from_json(json.loads(json.dumps(method.to_json()))) == method
    with pytest.raises(PanoplyError, match=r"several works: name one/halved or other\+bc/halved\."):
        compose.resolve("grpo", slots={"credit": "halved"})
    with pytest.raises(PanoplyError, match=r"Unknown credit part 'one/haved'\. Did you mean 'one/halved'\?"):
        registry.find_part("credit", "one/haved")


def test_a_short_name_will_do_where_it_is_the_only_one() -> None:
    toy_of("one")
    assert part_from_json({"part": "credit.halved", "by": 3.0}).to_json()["part"] == "credit.one/halved"
    with pytest.raises(PanoplyError, match=r"Did you mean 'one/halved'\?"):
        registry.find_part("credit", "haved")


def test_paths_of_several_parts_take_both_names() -> None:
    short = compose.resolve("mdpo", settings={"regularise.mirror.weight": 0.5}).method
    whole = compose.resolve("mdpo", settings={"regularise.mdpo/mirror.weight": 0.5}).method
    assert short == whole
    assert short.settings()["regularise.mirror.weight"] == 0.5
    assert (
        "regularise.mirror.weight"
        not in compose.resolve("mdpo", settings={"regularise.mirror": "none"}).method.settings()
    )


def test_a_part_of_a_plugin_keeps_its_name_and_comes_first() -> None:
    toy_of("one")

    @part("credit")
    def halved(experience: Experience) -> Tensor:
        """Half of the reward, as a plug-in has it."""
        return experience["reward"] / 2

    assert registry.find_part("credit", "halved") is halved
    assert registry.find_part("credit", "one/halved") is not halved
