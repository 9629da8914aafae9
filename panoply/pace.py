"""How long a step will take on this machine, measured on a few short answers before a run; and smaller steps.

Decoding a token takes a time for the weights, however few rows there are, and one for each row; two sizes of batch tell
them apart. Learning takes its time by the token. Answers are taken to be as long as they may be, and reward functions
are not counted.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from panoply import devices
from panoply.costs import Cost, Lengths, cost, part_tokens
from panoply.experience import Experience
from panoply.kinds import is_text, kind_of
from panoply.parts import Part
from panoply.policies.build import judges, learning
from panoply.rollout.engine import Request, Rollouts
from panoply.rollout.engines import engine_of
from panoply.rollout.sampling import Sampling

if TYPE_CHECKING:
    from panoply.planning import Plan
    from panoply.policies.text import TextPolicy

LONG = 60.0
"""Seconds of a step from which on smaller ones are suggested."""
ROWS, TOKENS = 32, 6
"""The larger batch that is measured, and how many tokens each of its rows gets."""
SLOTS = 512
"""Rows that the engine decodes at once."""
BRIEF = 0.2
"""Seconds; what takes less is measured again, for the least disturbed time."""
LARGE = 4 * 2**30
"""Bytes of weights that a plan does not open on a CPU only to measure them."""
SMALL = 10_000_000
"""Weights up to which a world of ours is not worth measuring: its steps take a second or two."""


@dataclass(frozen=True)
class Pace:
    """Seconds, on this machine and with this model."""

    token: float
    """Of a token for all rows that are decoded at once, whatever their number."""
    row: float
    """Of a token, for every row more."""
    read: float
    """Of a prompt's token."""
    learned: float
    """Of a token that is learned from, a sixth of a pass forward and backward: what an operation a weight takes."""


def measure(policy: TextPolicy, prompt: Sequence[int], rows: int = ROWS, tokens: int = TOKENS) -> Pace:
    """Write some short answers and take a gradient of them, without moving a weight or any random stream."""
    engine = engine_of(policy, slots=SLOTS)
    found: dict[tuple[int, int], Any] = {}

    def write(rows: int, tokens: int) -> float:
        request = Request(list(prompt), list(range(rows)))

        def generate() -> Rollouts:
            return engine.generate([request], Sampling(max_tokens=tokens))

        if policy.device.type == "cuda":
            generate()  # a GPU's graph for so many rows is made once
        seconds, found[rows, tokens] = _timed(generate)
        return seconds

    write(2, 2)  # what happens once only: kernels compiled, memory taken
    began = write(2, 1)
    if policy.device.type == "cuda":
        rows, tokens = SLOTS, 8 * tokens  # rows are next to free there: no fewer than there will be
    elif began < BRIEF:  # a small model, of which more is needed to tell anything
        rows, tokens = 2 * rows, 4 * tokens
    many, few = rows, rows // 8
    each_few = max(0.0, write(few, tokens) - write(few, 1)) / (tokens - 1)
    each_many = max(0.0, write(many, tokens) - write(many, 1)) / (tokens - 1)
    row = max(0.0, each_many - each_few) / (many - few)
    learned = _learning(policy, found[few, tokens], found[many, tokens])
    return Pace(max(0.0, each_few - few * row), row, began / len(prompt), learned)


def _learning(policy: TextPolicy, few: Rollouts, many: Rollouts) -> float:
    """Seconds of an operation a weight and token, by what a pass over more answers takes more."""
    weights = list(policy.parameters())
    whole = len(weights) == len(list(policy.model.parameters()))

    def passed(rollouts: Rollouts) -> tuple[int, float]:
        experience = Experience(rollouts.decisions, rollouts.context)

        def learn() -> None:
            logp = policy.score(experience)["logp"]
            torch.autograd.grad(logp.sum(), weights, allow_unused=True)

        return len(experience), _timed(learn)[0]

    passed(few)
    (few_tokens, short), (many_tokens, long) = passed(few), passed(many)
    slope = max((long - short) / (many_tokens - few_tokens), long / many_tokens / 10)
    return slope / (6 if whole else 4)


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    taken: list[float] = []
    while len(taken) < 3 and sum(taken) < BRIEF:
        start = now()
        result = call()
        taken.append(now() - start)
    return min(taken), result


# ------------------------------------------------------------------ a plan at that pace


@dataclass(frozen=True)
class Step:
    """What decides how long a step takes: its settings by path, and what follows from them."""

    settings: dict[str, int]
    """Those that make it smaller."""
    answers: int
    length: int
    sampling: float
    learning: float

    @property
    def seconds(self) -> float:
        return self.sampling + self.learning

    def __str__(self) -> str:
        parts = f"sampling {_clock(self.sampling)}, learning {_clock(self.learning)}"
        answers = f", {self.answers:,} answers of up to {self.length:,} tokens" if self.answers else ""
        return f"about {_clock(self.seconds)} ({parts}){answers}"


class Estimate:
    """A plan's step at a pace, and smaller ones."""

    def __init__(self, plan: Plan, pace: Pace):
        self.plan, self.pace = plan, pace
        world = plan.world()
        assert is_text(world)
        slots: dict[str, Any] = plan.method.slots()
        self.slot = "sample" if slots.get("sample") else "data"
        self.source: Part = slots[self.slot]
        self.longest = self.source.settings().get("max_tokens")
        self.of: Lengths = kind_of(world).lengths(world, self.longest)
        self.needed: Cost = cost(plan)

    def step(self, **changed: int) -> Step:
        """The step as planned, or with some of its settings changed: `prompts`, `group`, `batch`, `length`."""
        length = changed.pop("length", self.of.answer)
        of = dataclasses.replace(
            self.of, answer=length, context=self.of.context * length // max(1, self.of.answer)
        )
        source = dataclasses.replace(cast(Any, self.source), **changed)
        sampled, trained = part_tokens(source, of)
        answers = sampled // max(1, length)
        prompts = source.settings().get("prompts", answers)
        reading = self.pace.read * prompts * of.prompt if answers else 0.0
        work = self.needed.operations - 2 * self.needed.parameters * self.needed.sampled_tokens
        share = trained / max(1, self.needed.trained_tokens)
        learning = self.pace.learned * work / self.needed.parameters * share
        settings = {f"{self.slot}.{name}": value for name, value in changed.items()}
        if length != self.of.answer:
            settings[self._length_setting()] = length
        return Step(settings, answers, length, reading + self._decoding(answers, length), learning)

    def _decoding(self, rows: int, tokens: int) -> float:
        waves = -(-rows // SLOTS)
        return tokens * (waves * self.pace.token + rows * self.pace.row)

    def evaluation(self) -> float:
        """Seconds of an evaluation: held-out problems answered by chance, and greedily where that is measured."""
        world = self.plan.world()
        problems = len(world.held_out(self.plan.options.held_out)) if is_text(world) else 0
        answers = problems * (1 + self.plan.options.greedy)
        return self._decoding(answers, self.of.answer) + answers * self.of.prompt * self.pace.read

    def smaller(self, seconds: float = LONG) -> Step:
        """Halve what a step is made of, one setting after another, until it takes no longer, or can be no smaller."""
        least = {"prompts": max(1, int(self._update("minibatches"))), "group": 2, "batch": 1, "length": 32}
        held = self.source.settings()
        now = {
            name: int(held[name]) for name in ("prompts", "group", "batch") if isinstance(held.get(name), int)
        }
        if self._length_setting():
            now["length"] = self.of.answer
        changed: dict[str, int] = {}
        found = self.step()
        while found.seconds > seconds:
            before = dict(changed)
            for name in [n for n in ("prompts", "batch", "length", "group") if n in now]:
                half = max(least[name], changed.get(name, now[name]) // 2)
                if found.seconds > seconds and half < changed.get(name, now[name]):
                    changed[name] = half
                    found = self.step(**changed)
            if changed == before:
                break
        return found

    def _update(self, name: str) -> Any:
        update = self.plan.method.slots()["update"]
        assert isinstance(update, Part)
        return update.settings().get(name, 1)

    def _length_setting(self) -> str:
        """The setting by which answers are made shorter, where there is one."""
        if self.longest is not None:
            return f"{self.slot}.max_tokens"
        return "world.longest" if self.plan.world_id.startswith("jsonl@") and self.of.answer else ""

    def lines(self) -> list[str]:
        """What to say of it: a line, and where a step is long a second one with smaller settings."""
        step, options = self.step(), self.plan.options
        total = step.seconds * options.steps
        lines = [
            f"A step: {step}; {options.steps:,} steps about {_clock(total)}, "
            f"an evaluation about {_clock(self.evaluation())}."
        ]
        if step.seconds <= LONG:
            return lines
        smaller = self.smaller()
        if smaller.settings:
            words = " ".join(f"--set {path}={value}" for path, value in smaller.settings.items())
            lines.append(f"Smaller steps, about {_clock(smaller.seconds)} each: {words}")
        return lines


def worth_measuring(plan: Plan, opened: bool) -> bool:
    """Whether a user would want to know: own data, or a model that is not tiny.

    A plan (not `opened`) does not read large weights for it where there is no GPU.
    """
    world = plan.world()
    if not is_text(world) or plan.method.regime not in ("on_policy", "dataset"):
        return False
    sizes = kind_of(world).shapes(plan.options.model, world, {}).values()
    weights = sum(torch.Size(shape).numel() for shape in sizes)
    if not opened and 4 * weights > LARGE and not torch.cuda.is_available():
        return False
    return plan.world_id.startswith("jsonl@") or weights > SMALL


def estimate(plan: Plan, policy: Any) -> Estimate:
    """Measure a policy, and what the plan's step takes by it."""
    world = plan.world()
    assert is_text(world)
    return Estimate(plan, measure(policy, world.task("train", 0).prompt))


def planned_lines(plan: Plan) -> list[str]:
    """The same before there is a run: the model is opened for it, if it is there and not too large, and so is the
    device."""
    world, options = plan.world(), plan.options
    if devices.missing(options.device) or not worth_measuring(plan, opened=False):
        return []
    if "judged" in plan.method.needs() and judges(options.model, cast(Any, world)):
        return []
    policy = learning(kind_of(world).open_policy(options.model, world, options, plan.policy_options))
    return estimate(plan, cast("TextPolicy", policy)).lines()


def _clock(seconds: float) -> str:
    """`75.3` as `75 s`, `5400` as `90 min`."""
    if seconds < 0.95:
        return f"{seconds:.1g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
