"""Errands in a given order at doors that stick: done as a whole, or by a planner and a grounder of one's own each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal, cast, get_args

import numpy as np

from panoply.errors import PanoplyError
from panoply.registry import world
from panoply.seeds import stable_hash
from panoply.worlds.episodic import Episodic
from panoply.worlds.text.characters import DIGITS, CharacterWorld, Draws
from panoply.worlds.world import Lesson, Play, Reply, Task

if TYPE_CHECKING:
    from panoply.rollout.text import Collector

DOORS, ERRANDS, PLACES = "abcdefgh", 3, 4
STOP, OPENED, STUCK, NONE, TURN = ".", "+", "-", "_", ">"
LETTER = {"whole": "W", "integrated": "I", "planner": "P", "grounder": "G"}
UNSEEN = 8
"""One order in so many is in the test split alone; that of the alphabet never is."""
Module = Literal["whole", "integrated", "planner", "grounder"]
Form = Literal["iterative", "onetime"]


@world("errands@1")
@dataclass(frozen=True)
class Errands(Episodic, CharacterWorld):
    """`Wa1b0c5d9_bca.-c` — of the errands b, c and a, the door c was tried last and stuck; who goes to 5 tries again.

    ```
    whole       Wa1b0c5d9_bca.+_  0     b opens
                Wa1b0c5d9_bca.+b  5     c sticks
                Wa1b0c5d9_bca.-c  5     and opens
                Wa1b0c5d9_bca.+c  1     a opens
                Wa1b0c5d9_bca.+a  .     that is all: success

    integrated  Ia1b0c5d9_bca.-c  c5    the same, and the door is said first
    planner     P_bca.-c          c     subgoals, and what came of the last
    grounder    Ga1b0c5d9c        5     what is done about one of them
    ```

    Three of eight doors are to be opened in an order, at addresses that are drawn anew; one more address is of no use.
    A door sticks (`chance`) and can be tried again, six goes in all; at any other address nothing happens. `.` says
    that all is done, which is success where it is.

    A `planner` says which door is next; that it is opened is left to a `grounder`, a model in a folder, or to hands
    that never err, where none is named. A `grounder` is told the doors by a planner that never errs; it sees neither
    those that come later nor what came of the others. With `form=onetime` all is planned at once (`bca`), all is done
    at once (`051`), and nobody sees a door stick.

    Held-out tasks have orders that are never seen in training. Since addresses are drawn by lot, and no such order is
    that of the alphabet, whoever does not follow the order fails.

    The careless teacher takes every door it was at for open, with probability `slip`.
    """

    module: Module = "whole"
    form: Form = "iterative"
    grounder: str = ""
    """The folder of the model that opens doors for a planner."""
    chance: float = 0.4
    """How often a door sticks."""
    cap: int = 6
    """Goes at doors in an episode."""
    slip: float = 0.9
    every: bool = False
    """Whether imitation learns all modules and forms, one a task: how the shipped start is made, which serves all."""

    bounds: ClassVar[Mapping[str, str]] = {
        "chance": "from 0 up to 1",
        "cap": f"from {ERRANDS} to 100",
        "slip": "from 0 to 1",
    }
    alphabet: ClassVar[str] = DIGITS + DOORS + STOP + OPENED + STUCK + NONE + TURN + "".join(LETTER.values())
    access: ClassVar[frozenset[str]] = frozenset({"verify", "reference", "teacher", "pairs"})
    markov: ClassVar[bool] = True
    imitation: ClassVar[Mapping[str, int]] = {"data.batch": 64, "run.steps": 1000}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grounder and self.module != "planner":
            raise PanoplyError(f"errands.grounder opens doors for a planner; module is '{self.module}'.")

    @property
    def at_once(self) -> bool:
        return self.form == "onetime"

    @property
    def at_a_time(self) -> int:
        """Doors that a turn is about."""
        return ERRANDS if self.at_once else 1

    @property
    def max_tokens(self) -> int:
        """A door is a letter, and an address a digit."""
        return (2 if self.module == "integrated" else 1) * self.at_a_time

    @property
    def turn_cap(self) -> int:
        return 1 if self.at_once else self.cap + 1

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return ()

    def complete(self, answer: Sequence[int]) -> bool:
        return len(answer) == self.max_tokens or self.text(answer) == STOP

    # -------------------------------------------------------------- tasks

    def task(self, split: str, index: int) -> Task:
        return self._first(split, index, lambda draws: self._drawn(draws, split))

    def _drawn(self, draws: Draws, split: str) -> Task | None:
        left, free = list(DOORS), list(DIGITS)
        there = "".join(left.pop(draws.below(len(left))) for _ in range(PLACES))
        doors = "".join(door + free.pop(draws.below(len(free))) for door in sorted(there))
        order = there[:ERRANDS]
        if unseen(order) != (split == "test"):
            return None
        bare = Task(stable_hash("errands", order, doors), (), ERRANDS, {"order": order, "doors": doors})
        patient = self._patient
        if not patient.grade(bare, patient.gold(bare))["success"]:
            return None
        return dataclasses.replace(bare, prompt=self.shown(Round(self, bare)))

    @cached_property
    def _patient(self) -> Errands:
        """Who can do all that can be done: tasks are the same for every module and form."""
        return dataclasses.replace(self, module="whole", form="iterative", grounder="")

    def play(self, task: Task) -> Round:
        return Round(self, task)

    def shown(self, play: Round) -> tuple[int, ...]:
        """What a module is shown of an episode as it stands."""
        order, doors = play.task.data["order"], play.task.data["doors"]
        plan = f"{NONE}{order}{STOP}" + (TURN if self.at_once else play.seen)
        if self.module == "grounder":
            return tuple(self.tokens(self.told(order if self.at_once else play.next, doors)))
        return tuple(self.tokens(LETTER[self.module] + (plan if self.module == "planner" else doors + plan)))

    def told(self, subgoals: str, doors: str) -> str:
        """What a grounder sees: addresses, and one door, or all of them in one pass."""
        return f"{LETTER['grounder']}{doors}{subgoals}" + (TURN if self.at_once else "")

    # -------------------------------------------------------------- two modules

    def act_all(self, plays: Sequence[Play], answers: Sequence[Sequence[int]]) -> Sequence[Reply]:
        """Where a planner's doors are opened by a grounder, it is asked for all of them together."""
        if self.module != "planner" or not self.grounder:
            return super().act_all(plays, answers)
        rounds, told = cast("Sequence[Round]", plays), [self.text(answer) for answer in answers]
        known = [i for i, said in enumerate(told) if said and set(said) <= set(DOORS)]
        ground = dataclasses.replace(self, module="grounder", grounder="")
        asked = [self.told(told[i], rounds[i].task.data["doors"]) for i in known]
        done = dict(zip(known, grounded(ground, self.grounder, asked), strict=True))
        return [play.take(told[i], done.get(i, "")) for i, play in enumerate(rounds)]

    # -------------------------------------------------------------- expert and teacher

    def lessons(self, task: Task, rng: np.random.Generator) -> list[Lesson]:
        if not self.every:
            return super().lessons(task, rng)
        module, form = get_args(Module)[rng.integers(4)], get_args(Form)[rng.integers(4) // 3]
        one = dataclasses.replace(self, module=module, form=form, grounder="", every=False)
        return one.lessons(dataclasses.replace(task, prompt=one.shown(Round(one, task))), rng)

    def expert(self, play: Play) -> list[int]:
        assert isinstance(play, Round)
        return self.tokens(self._said(play, play.next))

    def careless(self, play: Play, rng: np.random.Generator) -> list[int]:
        """Who is told what to do does it."""
        assert isinstance(play, Round)
        slips = self.module != "grounder" and not self.at_once and rng.random() < self.slip
        return self.tokens(self._said(play, play.passed if slips else play.next))

    def _said(self, play: Round, door: str) -> str:
        doors = play.task.data["order"] if self.at_once else door
        if self.module == "planner" or doors == STOP:
            return str(doors)
        first = doors if self.module == "integrated" else ""
        return first + "".join(play.address(door) for door in doors)

    def mistakes(self, task: Task) -> list[list[int]]:
        """Also: the same in another order."""
        other = dataclasses.replace(task, data={**task.data, "order": task.data["order"][::-1]})
        wrong = [] if self.module == "grounder" and not self.at_once else [self.gold(other)]
        return [*super().mistakes(task), *wrong]


class Round(Play):
    """An episode. Its state is the task and what came of every go."""

    def __init__(self, world: Errands, task: Task):
        self.world, self.task = world, task
        self.seen, self.done, self.goes, self.turn = OPENED + NONE, 0, 0, 0
        super().__init__(task.prompt, task.id)

    def address(self, door: str) -> str:
        doors = self.task.data["doors"]
        return str(doors[doors.index(door) + 1]) if door in doors else ""

    @property
    def next(self) -> str:
        """The door that is to be opened, or the end."""
        return self.task.data["order"][self.done] if self.done < ERRANDS else STOP

    @property
    def passed(self) -> str:
        """The same for whoever takes every door it was at for open."""
        order = NONE + self.task.data["order"] + STOP
        return str(order[order.index(self.seen[1]) + 1])

    def act(self, answer: Sequence[int]) -> Reply:
        """A planner's doors are opened by hands that never err."""
        said = self.world.text(answer)
        doors = said if self.world.module == "planner" and set(said) <= set(DOORS) else ""
        return self.take(said, "".join(map(self.address, doors)))

    def take(self, said: str, done: str) -> Reply:
        """A turn: what was said, and the addresses that a grounder made of it where that was a planner."""
        module, n = self.world.module, self.world.at_a_time
        named = {"planner": said, "integrated": said[:n]}.get(module, DOORS[:n])
        addresses = {"planner": done, "integrated": said[n:]}.get(module, said)
        goes = len(named) == n and set(named) <= set(DOORS) and len(addresses) == n and addresses.isdecimal()
        for address in addresses if goes else "":
            self._go(address)
        stops = said == STOP and not self.world.at_once
        over = stops or self.world.at_once or (module == "grounder" and self.done == ERRANDS)
        self.turn += 1
        spent = self.goes >= self.world.cap and self.done < ERRANDS
        late = not over and (spent or self.turn == self.world.turn_cap)
        signals = {
            "success": float(over and self.done == ERRANDS),
            "goes": float(n if goes else 0),
            "invalid": float(not goes and not stops),
        }
        self.state = stable_hash(self.task.id, self.seen, self.goes)
        return Reply(signals, self.world.shown(self), done=over or late, truncated=late)

    def _go(self, address: str) -> None:
        """Go to an address. Nothing happens at one that is not that of the next door."""
        sticks = stable_hash("sticks", self.task.id, self.goes) % 2**32 < self.world.chance * 2**32
        self.goes += 1
        if self.done < ERRANDS and address == self.address(self.next):
            self.seen = (STUCK if sticks else OPENED) + self.next
            self.done += not sticks


def unseen(order: str) -> bool:
    return stable_hash("errands", order) % UNSEEN == 0 and list(order) != sorted(order)


def grounded(of: Errands, folder: str, asked: Sequence[str]) -> list[str]:
    """What the grounder in a folder does about each, as it finds likeliest."""
    from panoply.rollout.requests import Request

    if not asked:
        return []
    collect = _hands(of, folder)
    requests = [Request(tuple(of.tokens(text)), [0]) for text in asked]
    return [of.text(said) for said in collect.generate(requests, collect._sampling(0.0)).completions()]


@lru_cache(maxsize=4)
def _hands(of: Errands, folder: str) -> Collector:
    from panoply.policies.build import open_policy
    from panoply.rollout.text import Collector

    return Collector(of, open_policy(folder, of, 0, "cpu"), seed=0)
