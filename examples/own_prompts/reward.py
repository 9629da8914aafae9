"""Two rewards. Each gets lists of equal length, one entry an answer, and gives one number for each of them.

`completions` are what the model wrote; any other name is a field of the data (`answer` here). A function is called in a
process of its own, with a time limit: if it raises or hangs, the answer in question is left out and the run goes on.
"""

import asyncio


def correct(completions: list[str], answer: list[str]) -> list[float]:
    """1 where the first word is the right answer."""
    return [float(text.split()[:1] == [right]) for text, right in zip(completions, answer, strict=True)]


async def brief(completions: list[str], **_: object) -> list[float]:
    """From 1 for nothing at all down to 0 for 32 characters. Async, as if a server were asked: all answers at once."""

    async def judge(text: str) -> float:
        await asyncio.sleep(0.001)
        return max(0.0, 1 - len(text) / 32)

    return list(await asyncio.gather(*(judge(text) for text in completions)))
