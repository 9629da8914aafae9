"""A quest on a small grid: fetch the key, then open the door."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from panoply.errors import PanoplyError
from panoply.policies.tokenizer import Tokenizer
from panoply.registry import world
from panoply.seeds import stable_hash
from panoply.worlds.episodic import Episodic
from panoply.worlds.presets import Preset
from panoply.worlds.text.characters import DIGITS, END, CharacterWorld, Draws
from panoply.worlds.text.quests import NONE, OPEN, PICK, STEPS, Cell, Layout, Quest
from panoply.worlds.world import Lesson, Play, Task

HELD_OUT = 8
"""One layout in so many is in the test split."""
WORDS = {"N": "n", "S": "down", "E": "right", "W": "westward", PICK: "take", OPEN: "unlock"}
"""Actions as words, of one letter to eight; each ends with a full stop."""
COLOURS = "abcd"
HARD: Mapping[str, Any] = {"slip": 0.8, "quest": (6, 10)}
GUIDED: Mapping[str, Any] = {"slip": 0.9, "quest": (6, 10), "hints": True}
ALIASED: Mapping[str, Any] = {"alias": True, "history": 2}
WIDE: Mapping[str, Any] = {"size": 7, "quest": (3, 15), "cap": 20}
STARTS: Mapping[str, Mapping[str, Any]] = {"hard": HARD, "guided": GUIDED, "aliased": ALIASED, "wide": WIDE}
"""Presets that have a warm start of their own, by name."""
SHOWN: dict[str, Any] = {"history": 0, "words": False, "rooms": 1, "objects": 1, "hints": False}
"""Settings by which prompts and answers are other ones: a model that was made without them cannot read them."""


@world("keydoor@1")
@dataclass(frozen=True)
class Keydoor(Episodic, CharacterWorld):
    """`240031_>` means: agent at (2, 4), key at (0, 0), door at (3, 1), key not in hand (`k` if it is).

    ```
    4  .  .  A  .  .
    3  .  .  .  .  .     WWSSSSP fetches the key,
    2  .  .  .  .  .     EEENO opens the door
    1  .  .  .  D  .
    0  K  .  .  .  .
       0  1  2  3  4
    ```

    Such an observation is the whole prompt of a turn, and a turn is one token: a step `N` `S` `E` `W`, `P` to pick
    the key up, `O` to open the door. Success is opening the door with the key within `cap` turns. What cannot be
    done changes nothing and is counted (`invalid`). An episode's clones start in the same layout, its task.

    Rewards: `success` is sparse, 1 on the turn that opens the door; `progress` is dense, the turn's share of the
    shortest way, negative for a step away from it. Both sum to 1 in an episode that succeeds.

    The careless teacher, without the key and with probability `slip`, heads for the door and opens it in vain.

    A prompt shows more where it is asked for. With `history=1,objects=2,rooms=2,hints=true` it is `__2400a12b31b4__>`:
    where the agent was before (nowhere), where it is, two keys with their colours, the door with its own, the row of
    the gap in the wall between two rooms, what is in hand (nothing), and the hint (none).
    """

    size: int = 5
    cap: int = 12
    """Turns in an episode."""
    quest: tuple[int, int] = (5, 10)
    """Fewest and most turns of the shortest way."""
    slip: float = 0.5
    legal: bool = False
    """Whether only actions that can be done may be drawn."""
    alias: bool = False
    """Whether what is in hand is hidden, so that two states look alike."""
    history: int = 0
    """How many of the places where the agent was before a prompt begins with."""
    words: bool = False
    """Whether actions are words, `n.` `down.` `right.` `westward.` `take.` `unlock.`, one token a letter."""
    rooms: int = 1
    """Rooms side by side; the wall between two has one gap."""
    objects: int = 1
    """Keys, of which the one of the door's colour fits."""
    chance: float = 0.0
    """How often the door sticks; it can be tried again in the next turn."""
    hints: bool = False
    """Whether a prompt has a place for the next subgoal, `P` or `O`, which is `_` unless a task is `guided`."""

    bounds: ClassVar[Mapping[str, str]] = {
        "size": "from 2 to 10",
        "cap": "from 1 to 1000000",
        "quest": "from 1 to 1000",
        "slip": "from 0 to 1",
        "history": "from 0 to 16",
        "rooms": "from 1 to 5",
        "objects": f"from 1 to {len(COLOURS)}",
        "chance": "from 0 up to 1",
    }

    presets: ClassVar[Mapping[str, Preset]] = {
        "far": Preset(
            {"quest": (8, 10)},
            "the longest ways, where one early turn decides late: credit over turns, recurring states",
            0.26,
            budget="steps=12",
        ),
        "hard": Preset(
            HARD,
            "nearly every group fails as a whole: replay of what once succeeded, exploration",
            0.01,
        ),
        "aliased": Preset(
            ALIASED,
            "two states look alike, and what was seen before tells them apart: credit by history",
            0.07,
        ),
        "wide": Preset(
            WIDE,
            "ways of three turns to fifteen, so that a cap on turns leaves out the long ones: schedules of turns",
            0.41,
        ),
        "guided": Preset(
            GUIDED,
            "nothing succeeds without a hint that is not there when it counts: guided attempts",
            0.01,
        ),
    }

    markov: ClassVar[bool] = True
    imitation: ClassVar[Mapping[str, int]] = {"data.batch": 32, "run.steps": 600}
    """How its warm start is made: a demonstration has several turns, so fewer of them are enough."""

    def __post_init__(self) -> None:
        super().__post_init__()
        shortest, longest = self.quest
        if not shortest <= longest <= self.cap:
            raise PanoplyError(
                f"keydoor.quest is a range of turns within keydoor.cap ({self.cap}), not {shortest} to {longest}."
            )
        if self.rooms > self.size:
            raise PanoplyError(f"keydoor.rooms: {self.rooms} rooms do not fit into {self.size} columns.")

    @property
    def access(self) -> frozenset[str]:  # type: ignore[override]
        every = frozenset({"verify", "reference", "teacher", "pairs", "fork"})
        return every | {"guided"} if self.hints else every

    @property
    def start(self) -> str:
        """Presets of another skill, or of other prompts, have models of their own."""

        def has(settings: Mapping[str, Any]) -> bool:
            return all(getattr(self, name) == value for name, value in settings.items())

        kind = next((kind for kind, settings in STARTS.items() if has(settings)), "")
        if not has(SHOWN | {name: v for name, v in STARTS.get(kind, {}).items() if name in SHOWN}):
            return "keydoor-start-of-other-prompts"
        return f"keydoor-{kind}-start" if kind else "keydoor-start"

    @property
    def _alphabet(self) -> str:
        """The characters that the settings call for: a model that need not know a character has none for it."""
        colours = COLOURS[: self.objects] if self.objects > 1 else ""
        letters = "".join(sorted(set("".join(WORDS.values())))) + "." if self.words else ""
        return "".join(dict.fromkeys(f"{DIGITS}k_>{''.join(STEPS)}{PICK}{OPEN}{colours}{letters}"))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.of_characters(self._alphabet, specials=(END,))

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {character: self.tokenizer.id(character) for character in self._alphabet + END}

    @property
    def max_tokens(self) -> int:
        return max(map(len, WORDS.values())) + 1 if self.words else 1

    @property
    def turn_cap(self) -> int:
        return self.cap

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return ()

    def complete(self, answer: Sequence[int]) -> bool:
        return len(answer) == self.max_tokens or (self.words and self.text(answer[-1:]) == ".")

    def word(self, action: str) -> str:
        """What is said to do something."""
        return f"{WORDS[action]}." if self.words else action

    def action(self, answer: Sequence[int]) -> str:
        """What is done where that is said; nothing that can be done where it means nothing."""
        said = self.text(answer)
        return said if not self.words else next((a for a in WORDS if self.word(a) == said), "?")

    # -------------------------------------------------------------- tasks

    def task(self, split: str, index: int) -> Task:
        return self._first(split, index, lambda draws: self._draw(draws, split))

    def _draw(self, draws: Draws, split: str) -> Task | None:
        def cell() -> Cell:
            return draws.below(self.size), draws.below(self.size)

        agent, key, door = (cell() for _ in range(3))
        keys = (key, *(cell() for _ in range(self.objects - 1)))
        fits = draws.below(self.objects)
        gaps = tuple(draws.below(self.size) for _ in range(self.rooms - 1))
        walls = tuple(round(self.size * i / self.rooms) for i in range(1, self.rooms))
        layout = Layout(agent, keys, fits, door, walls, gaps)
        turns = layout.left(agent, NONE)
        more = (keys[1:], fits, gaps) if self.objects > 1 or self.rooms > 1 else ()
        id = stable_hash("keydoor", self.size, agent, key, door, *more)
        different = len({agent, *keys, door}) == len(keys) + 2
        if not different or not self.quest[0] <= turns <= self.quest[1]:
            return None
        if (id % HELD_OUT == 0) != (split == "test"):
            return None
        task = self._asked(id, turns, layout)
        return task if self.chance == 0 or self.grade(task, self.gold(task))["success"] else None

    def _asked(self, id: int, turns: int, layout: Layout, guided: str = "") -> Task:
        bare = Task(id, (), turns, {"layout": layout, "guided": guided})
        return dataclasses.replace(bare, prompt=self.shown(Quest(self, bare)))

    def play(self, task: Task) -> Quest:
        return Quest(self, task)

    def shown(self, play: Quest) -> tuple[int, ...]:
        """The prompt of an episode as it stands."""
        layout, several = play.layout, self.objects > 1
        before = "".join(map(_digits, play.trail)).rjust(2 * self.history, "_")
        colour = {i: COLOURS[i] if several else "" for i in range(self.objects)}
        keys = "".join(_digits(key) + colour[i] for i, key in enumerate(layout.keys))
        door = _digits(layout.door) + colour[layout.fits] + "".join(DIGITS[row] for row in layout.gaps)
        hand = "_" if self.alias or play.has == NONE else colour[play.has] or "k"
        hint = (play.subgoal if self._told(play) else "_") if self.hints else ""
        return tuple(self.tokens(f"{before}{_digits(play.agent)}{keys}{door}{hand}{hint}>"))

    # -------------------------------------------------------------- hints

    def guided(self, task: Task, failed: Sequence[int] | None = None) -> Task:
        """The same problem with the next subgoal in every prompt; or, of an attempt that failed, with what it missed.

        That is the first subgoal that it did not reach, which is told until it is reached, and no other.
        """
        self._check_hints()
        told = PICK + OPEN
        if failed is not None:
            play = self.play(task)
            for said in self._split(failed):
                play.act(said)
            told = play.subgoal
        return self._asked(task.id, task.level, task.data["layout"], guided=told)

    def unguided(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """The same prompt without its hint."""
        self._check_hints()
        return (*prompt[:-2], *self.tokens("_"), prompt[-1])

    @staticmethod
    def _told(play: Quest) -> bool:
        """Whether the next subgoal is one that the task tells."""
        return play.subgoal in play.task.data["guided"]

    def _check_hints(self) -> None:
        if not self.hints:
            raise PanoplyError("keydoor has no place for hints in its prompts unless keydoor.hints is true.")

    # -------------------------------------------------------------- expert and teacher

    def expert(self, play: Play) -> list[int]:
        """A shortest way: first east or west, then north or south."""
        assert isinstance(play, Quest)
        aim = play.layout.door if play.held else play.layout.key
        return self._said(play.layout.towards(play.agent, aim, play.subgoal))

    def careless(self, play: Play, rng: np.random.Generator) -> list[int]:
        """Whoever is told the next subgoal slips half as often."""
        assert isinstance(play, Quest)
        slips = bool(rng.random() < self.slip / (2 if self._told(play) else 1))
        layout = play.layout
        return self._said(layout.towards(play.agent, layout.door, OPEN)) if slips else self.expert(play)

    def lessons(self, task: Task, rng: np.random.Generator) -> list[Lesson]:
        """Where there are hints, half of the lessons have them, so that a model knows what they mean."""
        told = self.hints and bool(rng.random() < 0.5)
        return super().lessons(self.guided(task) if told else task, rng)

    def mistakes(self, task: Task) -> list[list[int]]:
        """Also: leaving the key, opening before the end, and waiting until there are too few turns left."""
        gold = [self.action(said) for said in self._split(self.gold(task))]
        at = gold.index(PICK)
        idle = [PICK] * (self.cap - task.level + 1)
        left = [[*gold[:at], *gold[at + 1 :]], [*gold[:at], OPEN, *gold[at + 1 :]]]
        late = [*idle, *gold] if at else [*gold[:1], *idle, *gold[1:]]
        said = [[token for action in actions for token in self._said(action)] for actions in (*left, late)]
        return [*super().mistakes(task), *said]

    def _said(self, action: str) -> list[int]:
        return self.tokens(self.word(action))


def _digits(cell: Cell) -> str:
    return f"{DIGITS[cell[0]]}{DIGITS[cell[1]]}"
