"""What a step is about, in a few numbers: functions that somebody, often a language model, wrote for one task.

A function is Python source that defines `factors(observation, action)`, two lists of numbers, and returns a list of
numbers. It runs in a sandbox, always (`panoply.sandbox`): nobody has read it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence

from panoply.errors import PanoplyError
from panoply.sandbox import Limits, Sandbox, Wanted

FUNCTION = "factors"
INSIDE = f"""
import json, sys
for line in sys.stdin:
    seen, done = json.loads(line)
    print(json.dumps([float(x) for x in {FUNCTION}(seen, done)]))
"""
"""What calls the function: a row in, its factors out."""
LIMITS = Limits(seconds=30.0, output=32 * 2**20)
Rows = Sequence[tuple[Sequence[float], Sequence[float]]]
"""What was seen and what was done, for each step."""
Ask = Callable[[str, float], str]
"""A language model: a prompt and a temperature in, a text out."""


class Failed(PanoplyError):
    """A function that cannot be used, and why; what a language model is told of it."""


class FactorFunction:
    """A function's source in a sandbox, called with many steps at once."""

    def __init__(self, source: str, sandbox: Sandbox | None = None):
        self.source = source
        self.sandbox = sandbox or Wanted(needs=frozenset({"python", "stdin"})).find()

    def __call__(self, rows: Rows) -> list[list[float]]:
        """[steps, factors]. Raises `Failed` with a sentence where the function does not do what it should."""
        asked = "\n".join(json.dumps([[*map(float, seen)], [*map(float, done)]]) for seen, done in rows)
        result = self.sandbox.run(self.source + "\n" + INSIDE, stdin=asked, limits=LIMITS)
        if result.ended == "time":
            raise Failed(f"The factors of {len(rows)} steps took longer than {LIMITS.seconds:g} seconds.")
        if not result.ok:
            last = (result.said.strip().splitlines() or ["it ended without a word"])[-1]
            raise Failed(f"The function of factors failed: {last[:300]}")
        return _read(result.said, len(rows))


def _read(said: str, steps: int) -> list[list[float]]:
    lines = said.splitlines()
    if len(lines) != steps:
        raise Failed(f"The function of factors was asked about {steps} steps and said {len(lines)} lines.")
    try:
        found = [[float(x) for x in json.loads(line)] for line in lines]
    except (ValueError, TypeError):
        raise Failed("The function of factors gave something else than a list of numbers.") from None
    counts = {len(row) for row in found}
    if len(counts) != 1 or not min(counts):
        raise Failed("The function of factors must give as many numbers for every step, and at least one.")
    if not all(math.isfinite(x) for row in found for x in row):
        raise Failed("The function of factors gave a number that is not finite.")
    return found


# ------------------------------------------------------------------ having it written


ROLE = "You know well what makes behaviour in such a task good or bad, and how to measure it."
SHAPE = (
    f"Answer with one block of Python that defines {FUNCTION}(observation, action). Both are lists of numbers; return "
    "a list of numbers, each of which measures one thing that matters for doing the task well. Use the standard "
    "library alone."
)


def write_factors(
    ask: Ask, task: str, rows: Rows, *, candidates: int = 5, retries: int = 5, sandbox: Sandbox | None = None
) -> FactorFunction:
    """Let a language model write a function of factors for a task, and see that it runs (LaRe, arXiv 2412.11120).

    ask          the language model
    task         what the task is, what an observation and an action consist of
    rows         some steps on which a function must work before it is used
    candidates   functions that are written apart, at temperature 1, and then put together by the model itself, at 0.3;
                 with 1 that one is taken as it is
    retries      how often an error is shown to the model to be mended
    """
    if candidates < 1 or retries < 0 or not rows:
        raise PanoplyError(
            "write_factors needs a candidate and a step to try it on, and counts retries from 0."
        )
    prompt = f"{ROLE}\n\n{task}\n\n{SHAPE}"
    written = [_block(ask(prompt, 1.0)) for _ in range(candidates)]
    source = written[0]
    if candidates > 1:
        shown = "\n\n".join(f"```python\n{each}\n```" for each in written)
        merge = "These were written for it. Write one function that has all that matters of them."
        source = _block(ask(f"{prompt}\n\n{merge}\n\n{shown}", 0.3))
    for attempt in range(retries + 1):
        made = FactorFunction(source, sandbox)
        try:
            made(rows)
            return made
        except Failed as error:
            if attempt == retries:
                raise Failed(f"No function of factors ran after {retries} corrections. {error}") from None
            source = _block(
                ask(f"{prompt}\n\nThis function fails.\n\n```python\n{source}\n```\n\n{error}", 0.3)
            )
    raise AssertionError


def _block(said: str) -> str:
    """The code of an answer: its last block, or all of it."""
    blocks = re.findall(r"```(?:python)?\s*\n(.*?)```", said, re.S)
    return (blocks[-1] if blocks else said).strip()
