"""Episodes that are longer than what a policy may see at once: a working context that is summed up and begun anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from panoply.seeds import stable_hash
from panoply.worlds.world import Play, Reply

Keep = Literal["summary", "last", "nothing", "cut"]
"""What is left of a full context: what the policy says when it is asked, the last of what it was shown, nothing; or the
episode is cut off there."""


@dataclass(frozen=True)
class Window:
    """How long a working context may be, and what happens when it is full.

    limit       tokens of it, prompt and summary included
    ask         what is put after a full one, so that the policy sums it up
    empty       what stands for a summary where nothing is kept
    summaries   how often; once more, and the episode is cut off
    turns       of the policy, summaries included; then the episode is cut off
    """

    limit: int
    ask: tuple[int, ...]
    empty: tuple[int, ...]
    keep: Keep = "summary"
    summaries: int | None = None
    turns: int | None = None


class Windowed(Play):
    """An episode whose context is reset when it is full (arXiv 2510.06727, eq. 2).

    s' = (s, a, o) while that fits into the window. When it does not, the round (a, o) is dropped from the context,
    though it has happened in the world; the policy sees s' = (s, ask), and what it then says, z, is all that is left
    of the past: s' = (the first prompt, z). Every context is the whole prompt of its turn, so the world is `markov`.

    Signals beside the world's own: `summaries`, 1 for a reset, and `dropped`, 1 for a round that is in no context.
    """

    def __init__(self, inner: Play, window: Window):
        self.inner, self.window = inner, window
        self.context = inner.prompt
        self.asked = False
        """Whether the policy is to sum up."""
        self.resets, self.turn = 0, 0
        super().__init__(inner.prompt, self._state())

    def act(self, answer: Sequence[int]) -> Reply:
        self.turn += 1
        reply = self._summed_up(answer) if self.asked else self._round(answer)
        late = not reply.done and self.turn == self.window.turns
        self.state = self._state()
        return replace(reply, done=reply.done or late, truncated=reply.truncated or late)

    def allowed(self, said: Sequence[int]) -> Sequence[int] | None:
        """What the world says; a summary is free."""
        return None if self.asked else self.inner.allowed(said)

    @property
    def restricts(self) -> bool:
        return self.inner.restricts

    def fork(self) -> Windowed:
        other = super().fork()
        assert isinstance(other, Windowed)
        other.inner = self.inner.fork()
        return other

    def _round(self, answer: Sequence[int]) -> Reply:
        reply = self.inner.act(answer)
        longer = (*self.context, *answer, *reply.observation)
        if reply.done or len(longer) <= self.window.limit:
            self.context = longer
            return self._seen(reply, dropped=0.0, summaries=0.0)
        if self.window.keep == "cut" or self.resets == self.window.summaries:
            return self._seen(replace(reply, done=True, truncated=True), dropped=1.0, summaries=0.0)
        if self.window.keep == "summary":
            self.context, self.asked = (*self.context, *self.window.ask), True
            return self._seen(reply, dropped=1.0, summaries=0.0)
        last = self.window.keep == "last" and len(self.context) > len(self.inner.prompt)
        self._reset((*self.window.empty[:-1], self.context[-1]) if last else self.window.empty)
        return self._seen(reply, dropped=1.0, summaries=1.0)

    def _summed_up(self, summary: Sequence[int]) -> Reply:
        self._reset(summary)
        return self._seen(Reply({"success": 0.0}, done=False), dropped=0.0, summaries=1.0)

    def _reset(self, summary: Sequence[int]) -> None:
        self.context, self.asked = (*self.inner.prompt, *summary), False
        self.resets += 1

    def _seen(self, reply: Reply, **signals: float) -> Reply:
        return replace(reply, signals={**reply.signals, **signals}, observation=self.context)

    def _state(self) -> int:
        return stable_hash(self.inner.state, *self.context)
