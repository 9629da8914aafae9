"""Rows, and rewards of a script, to be handed over in Python."""

from __future__ import annotations

ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(12)]
SMALL = {"sample.prompts": 2, "sample.group": 4, "sample.max_tokens": 4, "run.held_out": 2}


def right(completions: list[str], answer: list[str]) -> list[float]:
    return [brief(text) + (text == known) for text, known in zip(completions, answer, strict=True)]


def brief(text: str) -> float:
    return -len(text) / LONGEST


LONGEST = 8.0


for of_a_script in (right, brief):  # not to be found by import
    of_a_script.__module__ = "__main__"
