"""What `panoply show` says: every setting with its meaning, bare names of parts, the settings of a run."""

from __future__ import annotations

import dataclasses

import pytest

from panoply import registry
from panoply.errors import PanoplyError
from panoply.lora import Lora
from panoply.parts import Part, part
from panoply.planning import Options
from panoply.report import meanings
from panoply.report.pages import shown
from panoply.worlds.text.chain import Chain


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.split("\n")]


def test_settings_of_a_run_are_shown() -> None:
    page = lines(shown("run"))
    assert {line.split()[0] for line in page if line.startswith("run.") and "=" not in line} == {
        f"run.{field.name}" for field in dataclasses.fields(Options)
    }
    assert any(
        line.startswith("run.held_out a whole number, from 1 to 1000000 256 Problems never trained on")
        for line in page
    )
    assert set(meanings.of_fields(Options)) == {field.name for field in dataclasses.fields(Options)}


def test_settings_of_adapters_are_shown() -> None:
    page = lines(shown("lora"))
    assert {line.split()[0] for line in page if line.startswith("lora.")} == {
        f"lora.{field.name}" for field in dataclasses.fields(Lora)
    }
    assert any(line.startswith("lora.base whole, int8 or nf4 whole How the weights under") for line in page)
    assert set(meanings.of_fields(Lora)) == {field.name for field in dataclasses.fields(Lora)}


def test_a_part_needs_no_slot_where_its_name_is_the_only_one() -> None:
    assert shown("segment_gain") == shown("credit.segment_gain")
    with pytest.raises(PanoplyError, match=r"Did you mean 'reduce.constant' or 'schedule.constant'"):
        shown("constant")


def test_worlds_say_what_their_settings_mean() -> None:
    page = lines(shown("chain"))
    assert "world.slip a number, from 0 to 1 0.7 How often the teacher does `*` as `+`." in page
    assert "slip" in meanings.of_fields(Chain)


def test_meanings_stand_in_docstrings_in_two_forms(registries: None) -> None:
    @part("credit")
    def toy(experience: object, *, a: int = 1, b: int = 2, c: int = 3, lr: float = 0.1) -> None:
        """What it does.

        More of it: not a setting.
        a    the first,
             on two lines
        b, c: both others

        The end.
        """

    cls = registry.parts("credit")["toy"]
    text, found = meanings.split_doc(cls)
    assert text == "What it does.\n\nMore of it: not a setting.\n\nThe end."
    assert found == {"a": "the first, on two lines", "b": "both others", "c": "both others"}
    assert meanings.of_part(cls) == found, "the meaning of update.lr is not that of credit.lr"


@pytest.mark.parametrize("name", ["grpo", "ppo", "dapo", "dpo", "kto", "ipo", "simpo", "reinforce++"])
def test_every_setting_of_a_base_method_has_a_meaning(name: str) -> None:
    held: list[Part] = [p for _, p in registry.find("method", name).build().parts()]
    for made in held:
        cls = type(made)
        assert set(meanings.of_part(cls)) == set(cls.annotations()), made.info.id
