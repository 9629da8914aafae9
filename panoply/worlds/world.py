"""What a text world is: tasks that can be asked for by number, and a verifier that knows what success is."""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from panoply.errors import PanoplyError, unknown
from panoply.parts import check_fields
from panoply.policies.tokenizer import Tokenizer
from panoply.sandbox import Wanted
from panoply.sandbox.contract import named
from panoply.worlds.measures import Measuring
from panoply.worlds.presets import Preset

Lesson = tuple[tuple[int, ...], list[int]]
"""A prompt and an answer to imitate."""
Signal = float | Sequence[float]
"""What a turn earned: a number, which goes on its last decision, or one for each of its tokens."""
Signals = Mapping[str, Signal]
SPLITS = ("train", "test")
"""No problem is in both."""


def earned(signal: Signal) -> float:
    """All that a signal is worth, on whichever tokens it was earned."""
    return float(sum(signal) if isinstance(signal, Sequence) else signal)


@dataclass(frozen=True)
class Task:
    """A problem as a policy gets to see it, and what its world needs to grade an answer."""

    id: int
    """Hash of the world and the problem: the same in every batch, run and process, hinted or not."""
    prompt: tuple[int, ...]
    level: int = 0
    data: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def given(self) -> tuple[int, ...]:
        """The hint: the first tokens of the answer, which stand at the end of the prompt."""
        return tuple(self.data.get("given", ()))


@dataclass(frozen=True)
class Reply:
    """What a world answers to a turn of the policy."""

    signals: Signals
    """What the turn earned. `success` belongs to the turn that decides it."""
    observation: tuple[int, ...] = ()
    """What the policy sees next; context, not decisions."""
    done: bool = True
    truncated: bool = False
    """Ended by a limit of the world's and not by what was done."""
    failed: bool = False
    """The episode is over and could not be graded, so that it is left out."""


@dataclass(frozen=True)
class Correction:
    """What an expert makes of an answer: only what is wrong is rewritten, sentence by sentence."""

    answer: list[int]
    severity: list[int]
    """Of every token that was said: how its sentence is, from 1, badly wrong, to 4, right."""
    replaced: list[int]
    """Of every token of the corrected answer: how the sentence was that it stands for."""
    misread: list[bool]
    """Of every token of it: whether it stands for what was misread in a picture."""


@dataclass(frozen=True)
class Proposal:
    """What came of an episode in which a question was to be written whose answer was given."""

    question: Task | None
    """A task that is graded by the answer that was given, whether it is the right one or not; None where nothing was
    asked."""
    documents: tuple[Any, ...] = ()
    """What was found on the way, as the world's `reading` takes it; plain JSON."""
    searches: tuple[str, ...] = ()
    """What was searched for, in order."""
    tells: bool = False
    """Whether the answer stands in the question."""


class Play(ABC):
    """One episode under way. `state` is a hash of the world's own state, by which recurring states are found."""

    def __init__(self, prompt: Sequence[int], state: int = 0):
        self.prompt, self.state = tuple(prompt), state

    @abstractmethod
    def act(self, answer: Sequence[int]) -> Reply:
        """Take the policy's turn, and move `state` to what it is after it."""

    def allowed(self, said: Sequence[int]) -> Sequence[int] | None:
        """The ids of tokens that may follow what this turn has said so far; None for all of them.

        Others cannot be drawn, and are scored as such. Asked before every token where a play has its own; it must leave
        one, such as a stop token.
        """
        return None

    @property
    def restricts(self) -> bool:
        """Whether some tokens may not be drawn."""
        return type(self).allowed is not Play.allowed

    def fork(self) -> Play:
        """Another episode that stands where this one does; what is done in one changes nothing in the other.

        A plain copy. A play that changes something it holds, such as a list, copies that too. A world whose plays can
        be forked says so (`access`).
        """
        return copy.copy(self)


class OneTurn(Play):
    """A question, an answer, a grade."""

    def __init__(self, world: TextWorld, task: Task):
        super().__init__(task.prompt, task.id)
        self.world, self.task = world, task

    def act(self, answer: Sequence[int]) -> Reply:
        return Reply(self.world.grade(self.task, answer))

    def allowed(self, said: Sequence[int]) -> Sequence[int] | None:
        return self.world.allowed(self.task, said)

    @property
    def restricts(self) -> bool:
        return self.world.restricts


@dataclass(frozen=True, init=False, eq=False, repr=False)
class TextWorld(Measuring, ABC):
    """Problems in tokens with a verifier. A world is a frozen dataclass whose fields are its options."""

    stop: tuple[str, ...] = field(default=(), kw_only=True)
    """Text that ends a turn, beside the world's own ends; it stays in the answer. `sample.stop` says the same."""

    medium: ClassVar[str] = "text"
    """Which file of panoply/kinds/ says how such a world is played."""
    access: ClassVar[frozenset[str]] = frozenset({"verify"})
    """What a method may ask for beside tasks and grades: `reference` (gold answers), `teacher`, `teachers`
    (right answers of several), `hint`, `knowledge` and `plan` (aids that stand before a problem), `guided` (aids in
    every turn, which can be taken out again: `guided`, `unguided`), `pairs`, `conclusion` (a final answer that can be
    asked for), `prefer` (annotators), `preference` (how likely they prefer), `judge` (which steps are right), `referee`
    (answers can be put to a policy to be scored), `privileged` (what a prompt leaves out can be shown), `expert` (who
    corrects answers: `corrected`), `picture` (of which a part can be `blotted` out), `writers` (scripted policies by
    number, who answer: `written_by`), `modes` (ways to answer that can be asked for: `ways`, `in_mode`, `mode`),
    `lines` (an expert's text by lines, and what may stand before each: `lines`, `before_line`), `masks` (its model
    fills in masks), `looks` (vectors may stand between two of its tokens), `instructions` (what stands before a
    problem can be changed: `instruct`, and be written: `instruction`, `revised`), `proposals` (questions are written by
    a policy too: `proposal`, `proposed`, `reading`), `fork`."""
    keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of its decisions beside those that all have: `domain`, where `part_of` tells kinds of problem apart."""
    preset: ClassVar[str] = "tiny"
    """The hyper-parameters, by name, that suit a model of this world's size."""
    markov: ClassVar[bool] = False
    """Whether an observation is the whole next prompt. Otherwise it is appended to what came before."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Settings of a method that this world asks for, where the method has them and the user says nothing."""
    presets: ClassVar[Mapping[str, Preset]] = {}
    """Named settings on which a baseline was seen to learn: `--world chain:wall`."""
    limit: ClassVar[str] = ""
    """The setting of this world that says how long an answer may be, where it has one."""
    teachers: ClassVar[tuple[str, ...]] = ("reference", "careless")
    """Who may be asked to `teach`, by name: the reference answers, the careless teacher, and a world's own."""
    step_tokens: ClassVar[int] = 1
    """Tokens of one step of a reference answer. Hints give whole steps."""

    def __post_init__(self) -> None:
        check_fields(self, self.name)
        if "" in self.stop:
            raise PanoplyError(f"{self.name}.stop holds an empty text, which is everywhere: leave it out.")

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @property
    def asks(self) -> Mapping[str, Any]:
        """The same as `settings`, where it depends on the world's own options."""
        return {}

    @property
    def start(self) -> str:
        """The name under which a warm start is shipped. Options that change the task may change it."""
        return f"{self.name}-start"

    @property
    def sandboxed(self) -> Wanted | None:
        """The sandbox that it asks for, where it runs code of others: `Wanted(self.sandbox, …)`."""
        return None

    def walls(self) -> str:
        """What keeps code of others in, for plans and records; empty where none is run."""
        return named(self.sandboxed.find()) if self.sandboxed else ""

    def about(self) -> str:
        """What a plan says of its data, where a user has brought them."""
        return ""

    def check(self, needs: frozenset[str]) -> None:
        """Refuse what cannot serve these needs of a method, in all of the world's data, before a run begins."""

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer: ...

    @property
    @abstractmethod
    def max_tokens(self) -> int:
        """The longest answer a turn may have, the stop token included."""

    @property
    def turn_cap(self) -> int:
        """The most turns an episode can have."""
        return 1

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        end = self.tokenizer.eos_id
        return () if end is None else (end,)

    def complete(self, answer: Sequence[int]) -> bool:
        """Whether a turn needs no more tokens. A world that says so itself, without a stop token, overrides this."""
        return False

    def allowed(self, task: Task, said: Sequence[int]) -> Sequence[int] | None:
        """The ids of tokens that may follow what an answer has said so far; None for all of them.

        For formats and grammars in worlds of one turn; plays of several turns have their own.
        """
        return None

    @property
    def restricts(self) -> bool:
        """Whether it has such formats or grammars, so that it has to be asked before every token."""
        return type(self).allowed is not TextWorld.allowed

    @abstractmethod
    def task(self, split: str, index: int) -> Task:
        """Task number `index` of a split: always the same one, and there is no last one."""

    @abstractmethod
    def grade(self, task: Task, answer: Sequence[int]) -> Signals:
        """Named signals of an answer to `task.prompt`. `success`, 0 or 1, is always among them.

        A list with a number for every token of the answer is put on its decisions, one each.
        """

    def grade_all(self, tasks: Sequence[Task], answers: Sequence[Sequence[int]]) -> Sequence[Signals | None]:
        """Grades of many answers at once; None where grading failed, so that the sample is left out."""
        return [self.grade(task, answer) for task, answer in zip(tasks, answers, strict=True)]

    def verdict(self, prompt: Sequence[int], answer: Sequence[int]) -> str:
        """What came of a turn that is a program, in words for those who look at episodes; empty where nothing was run.

        Asked for the few turns that are recorded. What it costs is small where grading remembers what it ran.
        """
        return ""

    def signals(self) -> frozenset[str] | None:
        """The names of the signals it gives; None where that shows only in play."""
        if type(self).play is not TextWorld.play:
            return None
        return frozenset(self.grade(self.task("train", 0), []))

    def part_of(self, task: Task) -> str:
        """The kind of problem, where there are several, whose success is reported apart."""
        return ""

    @property
    def judged_by(self) -> str:
        """The signal that held-out answers are judged by, and the best checkpoint chosen."""
        return "success"

    def failures(self) -> dict[str, int]:
        """Why grading failed, and how often."""
        return {}

    def listen(self, say: Callable[[str], None]) -> None:
        """Told by a run where to say what a user must know at once."""

    def close(self) -> None:
        """End what grading has started; it starts again when needed."""

    def pair(self, task: Task, rng: np.random.Generator) -> tuple[list[int], list[int]] | None:
        """A good answer and a bad one: the reference, and a demonstration the verifier refuses.

        None where the teacher does not err in 64 demonstrations.
        """
        attempts = (self.demonstrate(task, rng) for _ in range(64))
        wrong = next((a for a in attempts if not self.grade(task, a)["success"]), None)
        return None if wrong is None else (self.gold(task), wrong)

    def wrong_answers(self, task: Task, n: int, rng: np.random.Generator) -> list[list[int]]:
        """Up to so many different answers that the verifier refuses: demonstrations of a teacher who errs, unless a
        world breaks right answers itself."""
        found: list[list[int]] = []
        for answer in (self.demonstrate(task, rng) for _ in range(16 * n)):
            if answer not in found and not self.grade(task, answer)["success"]:
                found.append(answer)
            if len(found) == n:
                break
        return found

    def known_of_pair(self, task: Task) -> Mapping[str, float]:
        """What else is known of that pair: `p` (how likely the good one is preferred), `margin`, `annotator`."""
        return {}

    def rated_answers(self, task: Task) -> list[tuple[list[int], float]]:
        """Several answers to a task with what each is worth to those who rated them."""
        raise PanoplyError(f"{self.name} has no rated answers.")

    def gold(self, task: Task) -> list[int]:
        """The reference answer, from where the prompt ends."""
        raise PanoplyError(f"{self.name} has no reference answers.")

    def solutions(self, task: Task) -> list[list[int]]:
        """Right answers to a task, one of each teacher: the reference alone, unless a world has several teachers."""
        return [self.gold(task)]

    def teach(self, task: Task, teacher: str, rng: np.random.Generator) -> list[int]:
        """An answer of one of the teachers, right or not."""
        if teacher not in self.teachers:
            raise unknown(f"teacher of {self.name}", teacher, self.teachers)
        return self.gold(task) if teacher == "reference" else self.demonstrate(task, rng)

    def demonstrate(self, task: Task, rng: np.random.Generator) -> list[int]:
        """The answer of a careless teacher, who has the skill but not the habit."""
        raise PanoplyError(f"{self.name} has no teacher.")

    def written_by(self, task: Task, number: int, rng: np.random.Generator) -> list[int]:
        """An answer of a scripted policy, by any whole number: answers of the same one are alike."""
        raise PanoplyError(f"{self.name} has no scripted policies.")

    def lessons(self, task: Task, rng: np.random.Generator) -> list[Lesson]:
        """What imitation learns of a task: prompts, and what the teacher says to them.

        In a world of several turns the teacher *plays* carefully and *says* carelessly, or the late turns would
        never be seen.
        """
        return [(task.prompt, self.demonstrate(task, rng))]

    def expert(self, play: Play) -> list[int]:
        """The right answer in an episode as it stands."""
        assert isinstance(play, OneTurn)
        return self.gold(play.task)

    def turns(self, task: Task, answer: Sequence[int]) -> list[Lesson]:
        """An answer to a task as prompts and what it says to each."""
        return [(task.prompt, list(answer))]

    def conclusion(self, task: Task) -> tuple[list[int], list[int]]:
        """What leads up to a final answer in any turn, and the right one.

        By the probability a policy gives to it, what the policy knows by then is measured.
        """
        raise PanoplyError(
            f"{self.name} has no final answer that could be asked for in the midst of an episode."
        )

    def mistakes(self, task: Task) -> list[list[int]]:
        """Answers the verifier must refuse: nothing at all, the reference without its end, and with two."""
        gold = self.gold(task)
        return [[], gold[:-1], [*gold, *gold[-1:]]]

    def prefer(
        self,
        task: Task,
        a: Sequence[int],
        b: Sequence[int],
        rng: np.random.Generator,
        annotator: int | None = None,
    ) -> bool:
        """Whether an annotator, by number or anyone, who is asked which of two answers is better says the first."""
        chance = self.preference(task, a, b, annotator)
        return bool(rng.random() < chance)

    def person(self, annotator: int) -> str:
        """What an annotator is told apart from others by: a name, or their group."""
        return str(annotator)

    def preference(
        self, task: Task, a: Sequence[int], b: Sequence[int], annotator: int | None = None
    ) -> float:
        """The probability that the first answer is preferred: by one annotator, or by one drawn from all."""
        raise PanoplyError(f"{self.name} has no preferences.")

    def spans(self, task: Task, answer: Sequence[int]) -> list[tuple[int, int]]:
        """Where the steps of an answer begin and end among its tokens."""
        raise PanoplyError(f"{self.name} does not know steps of an answer.")

    def judge(self, task: Task, answer: Sequence[int], rng: np.random.Generator) -> list[bool]:
        """Whether a judge, who may err, finds each step of an answer right: one verdict for each of `spans`."""
        raise PanoplyError(f"{self.name} has no judge of single steps.")

    def referee(self, task: Task, answers: Sequence[Sequence[int]]) -> Task | None:
        """The task that asks a policy to score answers to an open task; None where the world can check them itself."""
        raise PanoplyError(f"{self.name} has no question that asks for scores of answers.")

    def scores(self, task: Task, answer: Sequence[int]) -> list[float] | None:
        """What an answer to such a task gives each of the answers it was shown; None where that cannot be read."""
        raise PanoplyError(f"{self.name} has no question that asks for scores of answers.")

    def proposal(self, task: Task) -> Task:
        """A task to write a question, given nothing but the answer to this one."""
        raise PanoplyError(f"{self.name} lets nobody write questions.")

    def proposed(self, task: Task, said: Sequence[int]) -> Proposal:
        """What came of an episode of such a task, in which all of this was said."""
        raise PanoplyError(f"{self.name} lets nobody write questions.")

    def reading(self, question: Task, documents: Sequence[Any]) -> Task:
        """The task to answer a question from these documents alone; its `gold` answer is that of a perfect reader."""
        raise PanoplyError(f"{self.name} has no documents to read.")

    def corrected(self, task: Task, answer: Sequence[int]) -> Correction:
        """What an expert, who is shown an answer, would have said in its place."""
        raise PanoplyError(f"{self.name} has no expert who corrects answers.")

    def blotted(self, task: Task, share: float, rng: np.random.Generator) -> Task:
        """The same problem with that share of its picture blotted out."""
        raise PanoplyError(f"{self.name} has no pictures.")

    def privileged(self, task: Task) -> Task:
        """The same problem with what its prompt leaves out, such as rules that are to be known by heart."""
        raise PanoplyError(f"{self.name} has nothing that its prompts leave out.")

    def play(self, task: Task) -> Play:
        """A fresh episode of a task. Worlds of several turns give their own."""
        return OneTurn(self, task)

    def act_all(self, plays: Sequence[Play], answers: Sequence[Sequence[int]]) -> Sequence[Reply]:
        """Take turns that ended together, of different episodes; a slow world may work on them side by side."""
        return [play.act(answer) for play, answer in zip(plays, answers, strict=True)]

    def held_out(self, n: int) -> list[Task]:
        """The first `n` different problems of the test split."""
        found: dict[int, Task] = {}
        for index in range(64 * n):
            task = self.task("test", index)
            found.setdefault(task.id, task)
            if len(found) == n:
                break
        if len(found) < n:
            raise PanoplyError(
                f"{self.name} has too few problems to hold out {n}: {len(found)} were found. Lower run.held_out "
                "(in an evaluation, --problems)."
            )
        return list(found.values())

    def validation(self, n: int) -> list[Task]:
        """As many problems to choose settings by: those of the test split that follow the held-out ones.

        In a world whose few held-out problems come round again they are the same ones, answered anew.
        """
        return self.held_out(2 * n)[n:]

    def hint(self, task: Task, fraction: float) -> Task:
        """The same problem with that share of the reference answer, in whole steps, already in the prompt."""
        if not 0 <= fraction <= 1:
            raise PanoplyError(
                f"A hint is a share of the reference answer between 0 and 1, not {fraction:g}."
            )
        bare = task.prompt[: len(task.prompt) - len(task.given)]
        gold = [*task.given, *self.gold(task)]
        given = tuple(gold[: round(fraction * (len(gold) - 1) / self.step_tokens) * self.step_tokens])
        return dataclasses.replace(task, prompt=bare + given, data={**task.data, "given": given})

    def aid(self, task: Task, kind: str) -> list[list[int]]:
        """What helps with a task and is no part of its answer, in pieces: `knowledge`, facts that it needs, in an
        order that tells nothing; `plan`, what is to be done, without results."""
        raise PanoplyError(f"{self.name} has no {kind} that could help with a problem.")

    def aided(self, task: Task, kind: str, fraction: float = 1.0) -> Task:
        """The same problem after that share of an aid, in whole pieces. It is graded as it was."""
        pieces = self.aid(task, kind)
        told = [token for piece in pieces[: round(fraction * len(pieces))] for token in piece]
        return dataclasses.replace(task, prompt=(*told, *task.prompt))

    def render(self, task: Task, answer: Sequence[int]) -> str:
        """Prompt and answer as text, for people."""
        return f"{self.tokenizer.decode(list(task.prompt))} → {self.tokenizer.decode(list(answer))}"

    def default_model(self) -> dict[str, Any]:
        """The decoder this world was sized for, as `DecoderConfig` takes it."""
        vocabulary = self.tokenizer.vocab_size
        return {"vocab_size": vocabulary, "width": 64, "layers": 2, "heads": 4, "inner": 192, "tied": True}

    def self_test(self, n: int = 64) -> None:
        """Grade reference answers and mistakes on `n` tasks of each split; the first surprise is an error."""
        for task in (self.task(split, index) for split in SPLITS for index in range(n)):
            self._expect(task, self.gold(task), success=1)
            for answer in self.mistakes(task):
                self._expect(task, answer, success=0)
            if "hint" in self.access:
                hinted = self.hint(task, 0.5)
                self._expect(hinted, self.gold(hinted), success=1)
            for kind in self.access & {"knowledge", "plan"}:
                aided = self.aided(task, kind)
                self._expect(aided, self.gold(aided), success=1)

    def _expect(self, task: Task, answer: Sequence[int], *, success: int) -> None:
        graded = self.grade(task, answer).get("success")
        if graded != success:
            kind = "reference" if success else "wrong"
            raise PanoplyError(
                f"{self.name} grades the {kind} answer {self.render(task, answer)!r} with success {graded}, "
                f"not {success}."
            )
