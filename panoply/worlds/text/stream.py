"""The largest or smallest of a stream of numbers that is longer than the context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from panoply.errors import PanoplyError
from panoply.registry import world
from panoply.seeds import stable_hash
from panoply.worlds.episodic import Episodic
from panoply.worlds.text.characters import DIGITS, CharacterWorld, Draws
from panoply.worlds.windows import Keep, Window, Windowed
from panoply.worlds.world import Play, Reply, Task

LARGEST, SMALLEST, TURN = "M", "m", ">"
NEXT, AGAIN, ANSWER, SUMMARY = "N", "R", "A", "S"
LENGTHS = {NEXT: 1, AGAIN: 1, ANSWER: 2, SUMMARY: 2}
"""Tokens of a turn by its first."""
LAST, NOTHING, ASK = ".", "_", "?"
HELD_OUT = 8
"""One stream in so many is in the test split."""


@world("stream@1")
@dataclass(frozen=True)
class Stream(Episodic, CharacterWorld):
    """`M>N3N5N1N0?` — asked for the largest (`m`: the smallest) number, four were read, and the context is full.

    A turn is `N`, which shows the next number (`7`, the last one `7.`), `R`, which shows the last one again, or an
    answer such as `A7`, which ends the episode. Where a round would not fit into `window` tokens, it is dropped,
    though its number was read, and the policy is asked to sum up (`?`): it says `S5`, and goes on in `M>S5`, where
    `R` shows the number that was dropped. The extreme number is there once, anywhere, and as likely 3 as 9 (`m`: 6 as
    0), so that nothing is guessed.

    `calls` counts numbers shown, `summaries` resets; `invalid` is a turn that shows or answers nothing. `keep=last`
    puts the last number into a full context's place, without a turn of the policy, `nothing` forgets, `cut` ends the
    episode.

    The careless teacher sums up by the last number with probability `slip`, and with probability `dawdle` reads on
    after the last one: such episodes may be cut off by `cap`, turns, or by `summaries`.
    """

    length: tuple[int, int] = (8, 14)
    """Fewest and most numbers."""
    window: int = 10
    """Tokens of the working context."""
    keep: Keep = "summary"
    summaries: int | None = None
    """The most of an episode; none means as many as its turns allow."""
    cap: int = 26
    """Turns in an episode, summaries included."""
    slip: float = 0.75
    dawdle: float = 0.3

    bounds: ClassVar[Mapping[str, str]] = {
        "length": "from 1 to 1000",
        "window": "from 8 to 1000",
        "summaries": "from 0 to 1000",
        "cap": "from 1 to 10000",
        "slip": "from 0 to 1",
        "dawdle": "from 0 to 1",
    }
    alphabet: ClassVar[str] = DIGITS + LARGEST + SMALLEST + TURN + "".join(LENGTHS) + LAST + NOTHING + ASK
    access: ClassVar[frozenset[str]] = frozenset({"verify", "reference", "teacher", "pairs", "fork"})
    markov: ClassVar[bool] = True
    imitation: ClassVar[Mapping[str, int]] = {"data.batch": 32, "run.steps": 600}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length[0] > self.length[1]:
            raise PanoplyError(f"stream.length is a range, fewest first, not {self.length}.")
        turns, summaries = self._needed()
        if turns > self.cap:
            raise PanoplyError(f"A stream of {self.length[1]} numbers takes {turns} turns: raise stream.cap.")
        if self.summaries is not None and summaries > self.summaries:
            raise PanoplyError(
                f"A stream of {self.length[1]} numbers takes {summaries} summaries: raise stream.summaries."
            )

    @property
    def max_tokens(self) -> int:
        return max(LENGTHS.values())

    @property
    def turn_cap(self) -> int:
        return self.cap

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return ()

    def complete(self, answer: Sequence[int]) -> bool:
        return len(answer) >= LENGTHS.get(self.text(answer[:1]), 1)

    def task(self, split: str, index: int) -> Task:
        return self._first(split, index, lambda draws: self._numbers(draws, split))

    def _numbers(self, draws: Draws, split: str) -> Task | None:
        fewest, most = self.length
        count = fewest + draws.below(most - fewest + 1)
        top, at, small = 3 + draws.below(7), draws.below(count), draws.below(2)
        numbers = [top if i == at else draws.below(top) for i in range(count)]
        text = "".join(DIGITS[9 - n if small else n] for n in numbers)
        asked = SMALLEST if small else LARGEST
        id = stable_hash("stream", asked, text)
        if (id % HELD_OUT == 0) != (split == "test"):
            return None
        return Task(id, tuple(self.tokens(asked + TURN)), count, {"asked": asked, "numbers": text})

    def play(self, task: Task) -> Windowed:
        return Windowed(Reading(self, task), self._window())

    def expert(self, play: Play) -> list[int]:
        """By what is in the context alone, whose digits are the numbers read and the summary of those before."""
        assert isinstance(play, Windowed)
        seen = self.text(play.context)
        best = max if seen[0] == LARGEST else min
        found = best((c for c in seen if c in DIGITS), default=NOTHING)
        if play.asked:
            return self.tokens(SUMMARY + found)
        if seen.endswith(LAST):
            return self.tokens(ANSWER + found)
        return self.tokens(AGAIN if len(seen) == 4 and seen[2] == SUMMARY else NEXT)

    def careless(self, play: Play, rng: np.random.Generator) -> list[int]:
        assert isinstance(play, Windowed)
        slips, dawdles = (rng.random(2) < (self.slip, self.dawdle)).tolist()
        seen = self.text(play.context)
        if play.asked and slips:
            return self.tokens(SUMMARY + [c for c in seen if c in DIGITS][-1])
        return self.tokens(NEXT) if seen.endswith(LAST) and dawdles else self.expert(play)

    def mistakes(self, task: Task) -> list[list[int]]:
        """Also: another answer."""
        gold, (one, two) = self.gold(task), self.tokens("12")
        return [*super().mistakes(task), [*gold[:-1], two if gold[-1] == one else one]]

    def _window(self) -> Window:
        ask, empty = tuple(self.tokens(ASK)), tuple(self.tokens(SUMMARY + NOTHING))
        return Window(self.window, ask, empty, self.keep, self.summaries, self.cap)

    def _needed(self) -> tuple[int, int]:
        """Turns and summaries that the longest stream takes."""
        prompt = tuple(self.tokens(LARGEST + TURN))
        task = Task(0, prompt, 0, {"asked": LARGEST, "numbers": "5" * self.length[1]})
        free = replace(self._window(), keep="summary", summaries=None, turns=None)
        play = Windowed(Reading(self, task), free)
        while not play.act(self.expert(play)).done:
            pass
        return play.turn, play.resets


class Reading(Play):
    """A stream as it is read. Its state is the stream and how far it was read."""

    def __init__(self, world: Stream, task: Task):
        self.world, self.task, self.read = world, task, 0
        self.numbers: str = task.data["numbers"]
        super().__init__(task.prompt, self._state())

    def act(self, answer: Sequence[int]) -> Reply:
        said = self.world.text(answer)
        shown = self._shown(said)
        self.state = self._state()
        answered = len(said) == 2 and said[0] == ANSWER and said[1] in DIGITS
        best = max if self.task.data["asked"] == LARGEST else min
        signals = {
            "success": float(answered and said[1] == best(self.numbers)),
            "calls": float(bool(shown)),
            "invalid": float(not shown and not answered),
        }
        return Reply(signals, tuple(self.world.tokens(shown or NOTHING)), done=answered)

    def _shown(self, said: str) -> str:
        """What a call shows: the next number or the last one again, with a mark where it is the stream's last."""
        if said == NEXT and self.read < len(self.numbers):
            self.read += 1
        elif said != AGAIN or not self.read:
            return ""
        return self.numbers[self.read - 1] + (LAST if self.read == len(self.numbers) else "")

    def _state(self) -> int:
        return stable_hash(self.task.id, self.read)
