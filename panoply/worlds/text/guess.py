"""Games of question and answer: something is hidden, and turns bring it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np

from panoply.policies.tokenizer import Tokenizer
from panoply.registry import world
from panoply.seeds import stable_hash
from panoply.worlds.measures import measures
from panoply.worlds.presets import Preset
from panoply.worlds.text.characters import END, CharacterWorld, Draws
from panoply.worlds.text.gatekeeper import Gatekeeper
from panoply.worlds.text.logs import Logged
from panoply.worlds.text.riddles import Heard, Items, Riddle
from panoply.worlds.text.slots import Slots
from panoply.worlds.text.wordle import Wordle
from panoply.worlds.world import Lesson, Play, Reply, Task

HELD_OUT = 8
"""One problem in so many is in the test split."""
LOOKED_AT = 128
"""Held-out problems on which a policy's turns are looked at."""
RIDDLES: dict[str, Riddle] = {
    "items": Items(),
    "gatekeeper": Gatekeeper(),
    "slots": Slots(),
    "wordle": Wordle(),
}


@world("guess@1")
@dataclass(frozen=True)
class Guess(Logged, CharacterWorld):
    """What is said and heard is one text, to which every turn and its reply are appended.

    `items`: one of six candidates is meant. `bdfhkm>` names them; `Q3` asks whether the fourth of eight facts holds of
    it and hears `y` or `N`; `Gk` guesses, and ends the episode, as six turns do. Which facts hold of which of the 16
    items is the same in every task and has to be known by heart.

    Signals of items: `success`; `score`, −1 for every question, and for a wrong guess −1 for every turn that was left;
    `wasted`, a question whose answer was known; `invalid`, a turn without grammar, to which `_` is heard. The
    careless teacher asks what halves the candidates, and with probability `slip` guesses among those that are left.

    `gatekeeper`: `fbd3>` names three topics and a mood, 0 to 5, which says in which of six orders they must be raised.
    A turn is `TxQy.`, a thought and a question, and hears `+` (right, go on), `-` (wrong, or not listened to, which is
    so one time in ten), `?` (its tags are not where they belong) or, to the third right one, `!`: success. Four turns
    are all.

    Signals of the gatekeeper: `success`; `malformed`, a turn without its tags; `astray`, a question about none of the
    three. The careless teacher raises topics as they stand, whatever the mood, with probability `slip`, and mixes up
    its two tags in one turn of ten.

    `slots`: `dbacabdc?3>` is a profile of eight facts and a user's question for fact 3. A reply states it, `F3c.`, or
    says that it was told, `K3.`; `!` before the point is an appeal. Four questions come, one of them perhaps twice.

    Signals of slots, of each reply: `passed`, without a fault; `contradicted`, another value than the profile's, or
    told where it was not; `repeated`, what an earlier reply has stated; `appeal`; `invalid`; and `success` where all
    four passed. The careless teacher, with probability `slip`, gives the next fact's value, or states again what was
    told.

    `wordle`: `cfa_Y_>` is a first guess of a hidden word and its marks, letter by letter: `G` in its place, `Y`
    elsewhere, `_` not there, or not once more. Every turn is one of 64 words of three letters, which are to be known by
    heart, and hears its marks; five turns are all.

    Signals of wordle: `success`; `score`, −1 for every guess that is wrong; `wasted`, a word that the marks had ruled
    out; `invalid`, no word at all, to which `?` is heard. The careless teacher says the last word again with
    probability `slip`. Its log is of three players, who heed the marks twice as often as that, as often, or half as
    often; imitation of the log is the warm start.
    """

    kind: Literal["items", "gatekeeper", "slots", "wordle"] = "items"
    slip: float | None = None
    """None means 0.5 with items, 0.6 with the gatekeeper, 0.3 with slots, 0.75 in wordle."""

    bounds: ClassVar[Mapping[str, str]] = {"slip": "from 0 to 1"}
    presets: ClassVar[Mapping[str, Preset]] = {
        "gate": Preset(
            {"kind": "gatekeeper"},
            "questions in the right order, in turns whose form can break: trees of dialogues, rewards by turn",
            0.25,
            budget="steps=40",
        ),
        "talk": Preset(
            {"kind": "slots"},
            "replies that must neither contradict a profile nor repeat themselves: detectors, demonstrations",
            0.16,
            budget="steps=40",
        ),
        "talk-hard": Preset(
            {"kind": "slots", "slip": 0.8},
            "the same where hardly any conversation passes: replay, hints, a reward for every reply",
            0.016,
        ),
        "words": Preset(
            {"kind": "wordle"},
            "guesses that are worth what they tell, and a log of players who heed it more or less often",
            0.27,
            budget="steps=160",
        ),
        "words-hard": Preset(
            {"kind": "wordle", "slip": 0.98},
            "the same where hardly any word is found: replay, hints, exploration",
            0.015,
        ),
    }
    imitation: ClassVar[Mapping[str, int]] = {"data.batch": 64, "run.steps": 800}
    """How its warm start is made: a demonstration has several turns, so fewer of them are enough."""

    @property
    def start(self) -> str:
        """Each kind has a model of its own to start from, and so has a teacher who is hardly ever right."""
        hard = self.slip is not None and self.slip == self.riddle.hard
        return f"guess-{self.kind}-{'hard-' if hard else ''}start"

    @property
    def access(self) -> frozenset[str]:  # type: ignore[override]
        every = frozenset({"verify", "reference", "teacher", "pairs", "fork"})
        return every | {"writers"} if self.riddle.players else every

    @property
    def least(self) -> float:
        return -float(self.turn_cap)

    @property
    def riddle(self) -> Riddle:
        return RIDDLES[self.kind]

    @property
    def turn_cap(self) -> int:
        return self.riddle.cap

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.of_characters(self.riddle.alphabet, specials=(END,))

    @property
    def alphabet(self) -> str:  # type: ignore[override]
        return self.riddle.alphabet

    @property
    def max_tokens(self) -> int:
        return self.riddle.longest

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return ()

    def complete(self, answer: Sequence[int]) -> bool:
        return self.riddle.complete(self.text(answer))

    def task(self, split: str, index: int) -> Task:
        return self._first(split, index, lambda draws: self._problem(draws, split))

    def _problem(self, draws: Draws, split: str) -> Task | None:
        secret = self.riddle.secret(draws)
        id = stable_hash(self.name, self.kind, secret)
        if secret is None or (id % HELD_OUT == 0) != (split == "test"):
            return None
        return Task(id, tuple(self.tokens(self.riddle.prompt(secret))), data={"secret": secret})

    def play(self, task: Task) -> Dialogue:
        return Dialogue(self, task)

    def expert(self, play: Play) -> list[int]:
        assert isinstance(play, Dialogue)
        return self.tokens(self.riddle.expert(play.secret, play.said))

    def careless(self, play: Play, rng: np.random.Generator) -> list[int]:
        assert isinstance(play, Dialogue)
        return self.tokens(self.riddle.careless(play.secret, play.said, rng, self._slip))

    def written_by(self, task: Task, number: int, rng: np.random.Generator) -> list[int]:
        """A whole episode of one of the players of its kind, who take turns."""
        if not self.riddle.players:
            return super().written_by(task, number, rng)

        def say(play: Play) -> list[int]:
            assert isinstance(play, Dialogue)
            return self.tokens(self.riddle.written(play.secret, play.said, number, rng, self._slip))

        return [token for _, said in self._walk(task, say) for token in said]

    def lessons(self, task: Task, rng: np.random.Generator) -> list[Lesson]:
        """Of players what they said, where they said it; else what the teacher would say where an expert stands."""
        return (
            self.turns(task, self.demonstrate(task, rng))
            if self.riddle.players
            else super().lessons(task, rng)
        )

    @property
    def _slip(self) -> float:
        return self.riddle.slip if self.slip is None else self.slip

    @measures("well_formed")
    def well_formed(self, policy: Any, seed: int) -> float:
        """The share of turns, on held-out problems, that have the form of one."""
        from panoply.rollout.text import Collector

        rows = Collector(self, policy, seed, split="test").episodes(self.held_out(LOOKED_AT))
        broken = next(name for name in ("signal:malformed", "signal:invalid") if name in rows)
        return 1 - float(rows[broken].sum()) / len(rows.by("turn"))

    def mistakes(self, task: Task) -> list[list[int]]:
        wrong = self.riddle.wrong(task.data["secret"])
        return [*super().mistakes(task), *(self.tokens("".join(turns)) for turns in wrong)]


class Dialogue(Play):
    """An episode. Its state is the task and all that was said."""

    def __init__(self, world: Guess, task: Task):
        self.world, self.task = world, task
        self.secret: str = task.data["secret"]
        self.said: tuple[tuple[str, str], ...] = ()
        super().__init__(task.prompt, stable_hash(task.id))

    def act(self, answer: Sequence[int]) -> Reply:
        turn = self.world.text(answer)
        heard: Heard = self.world.riddle.hear(self.secret, self.said, turn)
        self.said = (*self.said, (turn, heard.reply))
        self.state = stable_hash(self.task.id, self.said)
        late = not heard.done and len(self.said) >= self.world.turn_cap
        observation = tuple(self.world.tokens(heard.reply))
        return Reply(heard.signals, observation, done=heard.done or late, truncated=late)
