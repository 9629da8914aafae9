"""What is said about a name that does not exist."""

from __future__ import annotations

import pytest

from panoply.errors import nearest, unknown

NAMES = ["chain", "credit.group", "dr-grpo", "grpo", "ppo", "regularise.kl", "sample.groups", "spo-segment"]


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("gropo", ["grpo"]),
        ("pp0", ["ppo"]),
        ("group", ["credit.group"]),
        ("grup", ["credit.group"]),
        ("KL", ["regularise.kl"]),
        ("segment", ["spo-segment"]),
        ("spo", ["spo-segment"]),
        ("zebra", []),
        ("GRPO", ["grpo"]),
        ("gpro", ["grpo"]),
        ("--grpo", ["grpo"]),
        ("lr", []),
    ],
)
def test_what_was_probably_meant(asked: str, meant: list[str]) -> None:
    assert nearest(asked, NAMES) == meant


def test_words_that_merely_share_letters_are_not_offered() -> None:
    assert str(unknown("slot", "credit", ["data", "losses", "reduce", "update"])) == (
        "Unknown slot 'credit'. There is: data, losses, reduce, update."
    )


def test_several_may_have_been_meant() -> None:
    message = str(unknown("part", "clip", ["surrogate.clip", "surrogate.sequence_clip", "update.adam"]))
    assert message == "Unknown part 'clip'. Did you mean 'surrogate.clip' or 'surrogate.sequence_clip'?"
