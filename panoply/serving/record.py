"""What `panoply serve --record FILE` wrote, read again: turns with their tokens, and what episodes were worth."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from panoply import files
from panoply.errors import PanoplyError
from panoply.ranges import check_range


class Line(TypedDict):
    """A line is a turn, or a reward."""

    episode: str
    turn: NotRequired[int]
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]
    logprobs: NotRequired[list[float]]
    temperature: NotRequired[float]
    top_p: NotRequired[float]
    reward: NotRequired[float]


TURN = ("prompt_token_ids", "token_ids", "logprobs", "temperature", "top_p")
"""What a turn has, and a reward has not."""


@dataclass(frozen=True)
class Turn:
    """A question in tokens, the tokens that were drawn, and their log-probabilities as they were drawn."""

    prompt: tuple[int, ...]
    said: tuple[int, ...]
    logp: tuple[float, ...]
    temperature: float
    top_p: float
    line: int


@dataclass(frozen=True)
class Told:
    """An episode: its turns, and what it was worth."""

    name: str
    turns: tuple[Turn, ...]
    reward: float

    @property
    def said(self) -> tuple[int, ...]:
        """All that the policy said."""
        return tuple(token for turn in self.turns for token in turn.said)


@dataclass(frozen=True)
class Record:
    """The episodes of a file that can be learned from, and how many cannot, by reason."""

    episodes: tuple[Told, ...]
    left_out: dict[str, int]

    def about(self) -> str:
        turns = sum(len(one.turns) for one in self.episodes)
        rest = "".join(f"; left out: {n} {why}" for why, n in self.left_out.items())
        return f"{len(self.episodes)} recorded episodes of {turns} turns{rest}"


def is_record(file: str) -> bool:
    """Whether the first line of a file is a recorded turn. What cannot be read is said by whoever reads it."""
    try:
        first = next(iter(files.read_lines(file, Line)), None)
    except PanoplyError:
        return False
    return first is not None and "token_ids" in first.value and "prompt_token_ids" in first.value


def read(file: str) -> Record:
    """The episodes of a file, once every line was understood."""
    if not files.is_file(file):
        raise PanoplyError(f"There is no file '{file}': panoply serve RUN --record FILE.jsonl writes one.")
    with files.open_file(file) as opened:
        hash = hashlib.file_digest(opened, "sha256").hexdigest()
    return _read(file, hash)


@functools.lru_cache(maxsize=2)
def _read(file: str, hash: str) -> Record:
    """A file is understood once, however often a plan looks at it, until something else is in it."""
    turns: dict[str, list[Turn]] = {}
    rewards: dict[str, float] = {}
    for number, _, _, line in files.read_lines(file, Line, growing=True):
        if "reward" in line:
            rewards[line["episode"]] = line["reward"]
        else:
            turns.setdefault(line["episode"], []).append(_turn(line, f"Line {number} of {file}", number))
    found, left_out = [], {"without a reward": 0, "with several answers to one question": 0}
    for name, said in turns.items():
        if name not in rewards:
            left_out["without a reward"] += 1
        elif len({turn.prompt for turn in said}) < len(said):
            left_out["with several answers to one question"] += 1
        else:
            found.append(Told(name, tuple(said), rewards[name]))
    return Record(tuple(found), {why: n for why, n in left_out.items() if n})


def _turn(line: Line, where: str, number: int) -> Turn:
    for name in TURN:
        if name not in line:
            raise PanoplyError(
                f"{where} is no turn of panoply serve --record: it has no '{name}', nor a 'reward'."
            )
    said, logp = line["token_ids"], line["logprobs"]
    if not said or not line["prompt_token_ids"]:
        raise PanoplyError(f"{where} has no tokens: a turn has a question and an answer.")
    if len(said) != len(logp):
        raise PanoplyError(f"{where} has {len(said)} tokens and {len(logp)} log-probabilities.")
    if max(logp) > 1e-3:
        raise PanoplyError(f"{where} has the log-probability {max(logp):g}, and none is above 0.")
    check_range(f"{where}: temperature", line["temperature"], "at least 0")
    check_range(f"{where}: top_p", line["top_p"], "above 0 to 1")
    return Turn(
        tuple(line["prompt_token_ids"]), tuple(said), tuple(logp), line["temperature"], line["top_p"], number
    )
