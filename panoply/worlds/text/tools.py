"""Questions that are answered with tools: look-ups in a knowledge base, a calculator, or Python."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np

from panoply.errors import PanoplyError
from panoply.policies.tokenizer import Tokenizer
from panoply.registry import world
from panoply.sandbox import Wanted
from panoply.seeds import numpy_rng, stable_hash
from panoply.worlds.episodic import Episodic
from panoply.worlds.measures import measures
from panoply.worlds.presets import Preset
from panoply.worlds.text.characters import END, CharacterWorld, Draws
from panoply.worlds.text.toolbox import ANSWER, CALL, Calculator, Calls, Lookup, Tool
from panoply.worlds.text.toolbox_python import Interpreter
from panoply.worlds.world import Play, Reply, Task

HELD_OUT = 8
"""One problem in so many is in the test split."""
TOOLS: dict[str, type[Tool]] = {"lookup": Lookup, "calculator": Calculator, "python": Interpreter}
DOT = "."
INSTRUCTIONS = "GKBMHDLJ"
"""Letters that a prompt may begin with, from the one that helps the teacher least to the one that helps it most."""
HELP = 0.7
"""By how much the best instruction lowers the teacher's slip."""
PROBED, ASKED = 16, 256
"""Problems on which each instruction is tried to find the best, and held-out ones on which that is measured."""
HARD: Mapping[str, Any] = {"kind": "calculator", "easy": 0.0, "slip": 0.9}
"""Success is so rare that most groups have none: the start has a model of its own."""


@world("tools@1")
@dataclass(frozen=True)
class Tools(Episodic, CharacterWorld):
    """A turn is a call of the tool (`C…`) or the answer (`A…`), which ends the episode; so do `cap` turns.

    `lookup`: who is r2 of r1 of e? The knowledge base has 16 entities and 6 relations, is the task's own, and is seen
    only through calls. A prompt `e r1 r2 r3 F fe fr fv le lr lv >` (`_` where there is nothing) has the question, a
    fact, and the last call with its result. Easy questions are answered by the fact; others need as many calls as
    they have relations, and questions with one relation come with and without the fact. `Cer` asks, `Ae` answers.

    `calculator`: `xx o yy o zz` from left to right, modulo 100. A prompt `x x o y y o z z r r k >` ends with the last
    result and the number of calls. `Cxxoyy` asks, `Avv` answers. Easy questions are sums of single digits.

    `python`: the same questions, and a call is a program, `C((37+58)*64)%100;`, which runs in a sandbox. The prompt has
    four characters of what it printed, or its error (`__!S` is a SyntaxError), in the place of the last result. The
    teacher who slips forgets a bracket as often as it guesses; at sums of single digits it never does.

    An observation is the whole prompt of a turn. A turn is complete with its grammar; one without grammar does
    nothing and is counted (`invalid`; as a call, too, when it was to be one). `calls` counts calls, `first_call` the
    tokens before the first of them.

    The careless teacher, with probability `slip`, answers too soon: with the entity in hand, or at random; and with
    probability `needless` calls where the fact is enough.

    With `dawdle` a turn may begin with so many dots, which do nothing; the teacher writes any number of them, all
    equally likely. With `instructions` a prompt begins with two letters, on which the teacher's care depends and
    nothing else (`instruct` puts others in their place; `instruction` and `revised` write them). Results that are
    false by `noise`, and what a judge says by `process`, depend on the task and on what was done.
    """

    kind: Literal["lookup", "calculator", "python"] = "lookup"
    easy: float | None = None
    """The share of questions that need no call; none means a half of look-ups, a fifth of calculations."""
    cap: int | None = None
    """Turns in an episode; none means 6 with look-ups, 5 with the calculator."""
    budget: int | None = None
    """Tokens the policy may write in an episode; none means as many as its turns can hold."""
    slip: float | None = None
    """None means 0.6 with look-ups, 0.55 with the calculator, 0.85 with Python."""
    needless: float = 0.5
    dawdle: int = 0
    """Dots a turn may begin with."""
    noise: float = 0.0
    """How often a result is false; asking again draws anew."""
    process: tuple[float, float] = (0.0, 0.0)
    """Noise and bias of a judge of calls, who gives the signal `process` at the end: the share of calls that were on
    the way to the answer, plus noise times a normal number, plus bias times the share of the turns that were calls,
    for a judge is taken in by length."""
    instructions: bool = False
    """Whether prompts begin with two letters that say how to work."""
    sandbox: str = "auto"
    """Of python: where programs run; `auto` takes the first sandbox that is safe here."""

    bounds: ClassVar[Mapping[str, str]] = {
        "easy": "from 0 to 1",
        "cap": "from 1 to 1000",
        "budget": "from 1 to 1000000",
        "slip": "from 0 to 1",
        "needless": "from 0 to 1",
        "dawdle": "from 0 to 30",
        "noise": "from 0 to 0.9",
        "process": "from 0 to 10",
    }

    presets: ClassVar[Mapping[str, Preset]] = {
        "calls": Preset(
            {"easy": 0.0},
            "every question needs calls, and nothing is right without them: rewards by turn, credit to calls",
            0.18,
            budget="steps=24",
        ),
        "dawdle": Preset(
            {"kind": "calculator", "easy": 0.0, "dawdle": 6},
            "turns of any length, calls sooner or later: shaping of behaviour, long ratios, length",
            0.17,
        ),
        "thrift": Preset(
            {"kind": "calculator", "easy": 0.5},
            "half of the questions need no call, and a guess hardly ever helps with the others: thrift",
            0.2,
        ),
        "hard": Preset(
            HARD, "success is rare, most groups have none: replay, process rewards, credit to calls", 0.02
        ),
        "code": Preset(
            {"kind": "python"},
            "half of the questions need no call, the others a program with brackets: calls that fail, and are mended",
            0.42,
        ),
        "instructed": Preset(
            {"easy": 0.0, "instructions": True},
            "how careful the start is depends on two letters before a question: choosing instructions",
            0.22,
        ),
    }

    markov: ClassVar[bool] = True
    imitation: ClassVar[Mapping[str, int]] = {"data.batch": 64, "run.steps": 800}
    """How its warm start is made: a demonstration has several turns, so fewer of them are enough."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.turn_cap <= self.tool.most_calls:
            raise PanoplyError(
                f"tools.cap is more than {self.tool.most_calls}, the calls a question may need."
            )
        if self.sandbox != "auto" and self.kind != "python":
            raise PanoplyError(f"tools.sandbox has no effect: {self.kind} runs no code of others.")

    @property
    def access(self) -> frozenset[str]:  # type: ignore[override]
        usual = frozenset({"verify", "reference", "teacher", "pairs", "tools", "conclusion", "fork"})
        return usual | {"instructions"} if self.instructions else usual

    @property
    def start(self) -> str:
        """Each kind has a model of its own to start from, and so have dots, instructions and the rarest success."""
        hard = {name: getattr(self, name) for name in HARD} == HARD
        words = {
            self.kind: self.kind != "lookup",
            "dawdle": self.dawdle > 0,
            "instructed": self.instructions,
            "hard": hard,
        }
        return "-".join(["tools", *(word for word, said in words.items() if said), "start"])

    @cached_property
    def tool(self) -> Tool:
        return TOOLS[self.kind].of(self)

    @property
    def turn_cap(self) -> int:
        return self.tool.cap if self.cap is None else self.cap

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.of_characters(self.alphabet, specials=(END,))

    @property
    def alphabet(self) -> str:  # type: ignore[override]
        more = (DOT if self.dawdle else "") + (INSTRUCTIONS if self.instructions else "")
        return self.tool.alphabet + more

    @property
    def max_tokens(self) -> int:
        return self.dawdle + max(self.tool.lengths.values())

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return ()

    def complete(self, answer: Sequence[int]) -> bool:
        """By its first token after dots a turn is a call or an answer, as long as these are; or nothing, and over."""
        said = answer[self.dots(answer) :]
        if self.tool.ends and said and self.text(said[-1:]) == self.tool.ends:
            return True
        return bool(said) and len(said) >= self._lengths.get(said[0], 1)

    def dots(self, answer: Sequence[int]) -> int:
        """How many dots a turn begins with; more than `dawdle` are no grammar."""
        most = min(self.dawdle, len(answer))
        return next((n for n in range(most) if answer[n] != self._ids[DOT]), most)

    @cached_property
    def _lengths(self) -> dict[int, int]:
        return {self.tokens(verb)[0]: length for verb, length in self.tool.lengths.items()}

    def task(self, split: str, index: int) -> Task:
        return self._first(split, index, lambda draws: self._question(draws, split))

    def _question(self, draws: Draws, split: str) -> Task | None:
        easy = self.tool.easy if self.easy is None else self.easy
        question = self.tool.question(draws, easy=draws.below(1 << 20) < easy * (1 << 20))
        id = stable_hash(self.name, self.kind, question)
        if (id % HELD_OUT == 0) != (split == "test"):
            return None
        letters = "".join(INSTRUCTIONS[draws.below(len(INSTRUCTIONS))] for _ in range(2 * self.instructions))
        data = {"question": question} | ({"letters": letters} if letters else {})
        return Task(id, self.prompt(data, []), self.tool.needed(question), data)

    def prompt(self, data: Mapping[str, Any], calls: Calls) -> tuple[int, ...]:
        """What is seen of a question and its calls."""
        return tuple(self.tokens(data.get("letters", "") + self.tool.observe(data["question"], calls)))

    def instruct(self, task: Task, letters: str) -> Task:
        """The same task with another instruction."""
        if not self.instructions:
            raise PanoplyError("tools has no instructions; world.instructions=true gives it some.")
        if len(letters) != 2 or not set(letters) <= set(INSTRUCTIONS):
            raise PanoplyError(f"An instruction of tools is two letters of {INSTRUCTIONS}, not {letters!r}.")
        data = {**task.data, "letters": letters}
        return replace(task, prompt=self.prompt(data, []), data=data)

    def instruction(self, rng: np.random.Generator) -> str:
        """Any of them, as one to begin with."""
        return "".join(rng.choice(list(INSTRUCTIONS), 2))

    def revised(
        self, instruction: str, failures: Sequence[Mapping[str, str]], rng: np.random.Generator
    ) -> str:
        """A proposer who reads failures: one letter is another, seldom one that stood before many of them.

        A failure has the `instruction` it happened under, and its `text`, which this proposer does not understand.
        """
        blamed = "".join(failure["instruction"] for failure in failures)
        place = int(rng.integers(len(instruction)))
        others = [letter for letter in INSTRUCTIONS if letter != instruction[place]]
        trust = np.array([1 / (1 + blamed.count(letter)) for letter in others])
        letter = str(rng.choice(others, p=trust / trust.sum()))
        return instruction[:place] + letter + instruction[place + 1 :]

    @measures("instructed")
    def best_instructed(self, policy: Any, seed: int) -> float:
        """Held-out success under the instruction that suits a policy best, of all there are, on other problems."""
        from panoply.rollout.text import Collector

        def right(split: str, letters: Sequence[str], n: int) -> np.ndarray:
            collect = Collector(self, policy, seed=seed, split=split)
            asked = [self.instruct(task, said) for said in letters for task in collect.pool(n)]
            found = collect.episodes(asked, 1)
            earned = found.by("episode").sum(found["signal:success"].float())
            return earned.view(len(letters), n).mean(-1).cpu().numpy()

        every = [a + b for a in INSTRUCTIONS for b in INSTRUCTIONS]
        best = every[int(right("train", every, PROBED).argmax())]
        return float(right("test", [best], ASKED)[0])

    @property
    def sandboxed(self) -> Wanted | None:
        return Wanted(self.sandbox) if self.kind == "python" else None

    def play(self, task: Task) -> Session:
        return Session(self, task)

    def act_all(self, plays: Sequence[Play], answers: Sequence[Sequence[int]]) -> Sequence[Reply]:
        self.tool.prepare(self.said(answer) for answer in answers)
        return super().act_all(plays, answers)

    def said(self, answer: Sequence[int]) -> str:
        """A turn as text, without dots."""
        return self.text(answer[self.dots(answer) :])

    def verdict(self, prompt: Sequence[int], answer: Sequence[int]) -> str:
        return self.tool.verdict(self.said(answer))

    def expert(self, play: Play) -> list[int]:
        """Who asks again where a result was false, and in the last turn knows the answer all the same."""
        assert isinstance(play, Session)
        question, calls = play.question, play.calls
        if self.noise and play.turn == self.turn_cap - 1:
            return self.tokens(ANSWER + self.tool.answer(question))
        false = self.noise and calls and self.tool.call(question, calls[-1][0]) != calls[-1][1]
        return self.tokens(CALL + calls[-1][0] if false else self.tool.careful(question, calls))

    def careless(self, play: Play, rng: np.random.Generator) -> list[int]:
        assert isinstance(play, Session)
        said = self.tool.careless(play.question, play.calls, rng, self.slips(play.task), self.needless)
        return self.tokens(DOT * int(rng.integers(self.dawdle + 1)) + said if self.dawdle else said)

    def slips(self, task: Task) -> float:
        """How often the teacher answers too soon; with instructions 0.9 under the worst, 0.7 less under the best."""
        usual = 0.9 if self.instructions else self.tool.slip
        slip = usual if self.slip is None else self.slip
        return max(0.0, slip - HELP * helpful(task.data["letters"])) if self.instructions else slip

    def conclusion(self, task: Task) -> tuple[list[int], list[int]]:
        return self.tokens(ANSWER), self.tokens(self.tool.answer(task.data["question"]))

    def mistakes(self, task: Task) -> list[list[int]]:
        """Also: another answer, and answering after one call too few."""
        tool, gold = self.tool, self.gold(task)
        right = tool.answer(task.data["question"])
        wrong = next(a for a in tool.answers if a != right)
        short = [] if task.level else [self.tokens(CALL)]
        calls = gold[: -len(right) - 1]
        return [*super().mistakes(task), *short, [*calls, *self.tokens(ANSWER + wrong)]]


def helpful(letters: str) -> float:
    """How much an instruction helps the teacher, from 0 to 1: both of its letters count alike."""
    return sum(INSTRUCTIONS.index(letter) for letter in letters) / (2 * (len(INSTRUCTIONS) - 1))


class Session(Play):
    """An episode. Its state is the question and what the policy sees of its calls; not the turn."""

    def __init__(self, world: Tools, task: Task):
        self.world, self.task, self.tool = world, task, world.tool
        self.question: str = task.data["question"]
        self.calls: Calls = []
        self.turn, self.spent, self.asked, self.right = 0, 0, 0, 0
        super().__init__(task.prompt, self._state(task.prompt))

    def act(self, answer: Sequence[int]) -> Reply:
        dots = self.world.dots(answer)
        text = self.world.said(answer)
        verb, rest = text[:1], text[1:]
        before, self.spent, self.turn = self.spent + dots, self.spent + len(answer), self.turn + 1
        result = self._result(verb, rest)
        answered = verb == ANSWER and rest in self.tool.answers
        prompt = self.world.prompt(self.task.data, self.calls)
        self.state = self._state(prompt)
        late = not answered and (self.turn >= self.world.turn_cap or self._broke())
        signals = {
            "success": float(answered and rest == self.tool.answer(self.question)),
            "calls": float(verb == CALL),
            "invalid": float(result is None and not answered),
            "first_call": float(before if verb == CALL and not self.asked else 0),
        }
        if verb == CALL:
            self.asked, self.right = self.asked + 1, self.right + (rest in self.tool.chain(self.question))
        signals["process"] = self._judged(*self.world.process) if answered or late else 0.0
        return Reply(signals, prompt, done=answered or late, truncated=late)

    def fork(self) -> Session:
        other = copy.copy(self)
        other.calls = list(self.calls)
        return other

    def _result(self, verb: str, asked: str) -> str | None:
        """What a turn gives, true or not; it is remembered."""
        result = self.tool.result(self.question, verb, asked, self.calls)
        if result is None:
            return None
        draws = Draws(f"noise/{self.task.id}/{len(self.calls)}/{asked}") if self.world.noise else None
        if draws and draws.below(1 << 20) < self.world.noise * (1 << 20):
            others = [other for other in self.tool.answers if other != result]
            result = others[draws.below(len(others))]
        self.calls.append((asked if verb == CALL else verb + asked, result))
        return result

    def _judged(self, noise: float, bias: float) -> float:
        """What the judge says of the calls; of none at all, that they are right where none was needed."""
        share = self.right / self.asked if self.asked else float(self.task.level == 0)
        if noise:
            chance = numpy_rng("judge", self.task.id, self.spent, *(asked for asked, _ in self.calls))
            share += noise * float(chance.normal())
        return share + bias * self.asked / self.world.turn_cap

    def _broke(self) -> bool:
        return self.world.budget is not None and self.spent >= self.world.budget

    def _state(self, prompt: tuple[int, ...]) -> int:
        return stable_hash(self.task.id, prompt)
