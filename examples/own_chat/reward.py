"""A reward for chat: each completion is a list of messages, here of one, as in TRL."""

Message = dict[str, str]


def mentions(completions: list[list[Message]], answer: list[str]) -> list[float]:
    """1 where the reply contains the right answer."""
    return [float(right in said[-1]["content"]) for said, right in zip(completions, answer, strict=True)]
