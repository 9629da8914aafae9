"""Your own data: prompts, answers or preferences from a file, rewards from a function of yours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeGuard

import numpy as np

from panoply import files
from panoply.confined.limits import Limits
from panoply.errors import PanoplyError, unknown
from panoply.policies.chat import Refused, check_append_only, render_all
from panoply.policies.tokenizer import Tokenizer
from panoply.registry import world
from panoply.rewards.functions import RewardFunction, call_all
from panoply.rewards.here import HereFunction, is_here
from panoply.seeds import numpy_rng, stable_hash
from panoply.worlds.world import SPLITS, Task, TextWorld

Line = Mapping[str, Any]


@world("jsonl@1")
@dataclass(frozen=True)
class Jsonl(TextWorld):
    """Your own data: one JSON object a line.

    It has `prompt` (text, or a list of chat messages) and, as the method needs, `completion`, or `chosen` and
    `rejected`, or whatever fields the reward functions ask for.

    The reward is the weighted sum of the functions' values; `success` says whether it reached `threshold`.
    """

    data: str = ""
    """The file."""
    model: str = ""
    """The folder whose tokenizer is used: the run's own."""
    rewards: tuple[str, ...] = ()
    """Functions, FILE.py:NAME."""
    weights: tuple[float, ...] = ()
    """One for each function; none means 1 each."""
    threshold: float = 0.5
    longest: int = 256
    """Tokens of an answer at most, sampled or given. `sample.max_tokens` says the same where it is set."""
    longest_prompt: int = 1024
    too_long: Literal["refuse", "drop", "cut"] = "refuse"
    """What to do with longer prompts: refuse the file, leave them out, or keep their last tokens.

    Given answers that are longer than `longest` are refused, or cut at their end.
    """
    held_out_share: float = 0.1
    seconds: float = 10.0
    """Time limit of one call of a reward function."""
    memory: float = 8.0
    """GiB of memory a reward function may take; 0 sets no limit."""
    network: bool = False
    """Whether reward functions may reach the network, as those that ask a judge must."""

    bounds: ClassVar[Mapping[str, str]] = {
        "weights": "any number",
        "threshold": "any number",
        "longest": "from 1 to 10000000",
        "longest_prompt": "from 1 to 10000000",
        "held_out_share": "from 0 to 1",
        "seconds": "above 0",
        "memory": "at least 0",
    }

    preset: ClassVar[str] = "published"
    limit: ClassVar[str] = "longest"
    settings: ClassVar[Mapping[str, Any]] = {"reward.name": "reward"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights and len(self.weights) != len(self.rewards):
            raise PanoplyError(
                f"There are {len(self.weights)} weights for {len(self.rewards)} reward functions."
            )
        if len(set(self._names)) < len(self._names):
            raise PanoplyError(
                "Two reward functions have the same name in files of the same name: rename one of them."
            )
        if not 0 < self.held_out_share < 1:
            raise PanoplyError(f"jsonl.held_out_share is between 0 and 1, not {self.held_out_share:g}.")

    # -------------------------------------------------------------- what there is

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if not self.model:
            raise PanoplyError("Your own data needs a model of your own: name its folder with --model.")
        return Tokenizer.load(self.model)

    @property
    def max_tokens(self) -> int:
        return self.longest

    @cached_property
    def access(self) -> frozenset[str]:  # type: ignore[override]
        named = {name for _, line in self._lines for name in line}
        given = {"verify"} if self.rewards else set()
        given |= {"teacher", "reference"} if named & {"completion", "chosen"} else set()
        given |= {"pairs"} if "chosen" in named else set()
        return frozenset(given)

    def check(self, needs: frozenset[str]) -> None:
        """Every line, before anything is computed: it has a prompt, and the answers that the method learns from."""
        for number, line in self._lines:
            if not _is_prompt(line.get("prompt", line.get("messages"))):
                raise self._lacks(number, "prompt", "text or messages")
            fields = ["chosen", "rejected"] if "world:pairs" in needs else []
            if not fields and needs & {"world:teacher", "world:reference"}:
                fields = [_given(line)]
            for field in fields:
                said = _text(line, field)
                if said is None or len(said.encode()) >= self.longest:  # a token is a byte at least
                    self._said_by(line, number, field)

    def _lacks(self, number: int, field: str, what: str) -> PanoplyError:
        return PanoplyError(f"Line {number} of {self.data} has no field '{field}' with {what}.")

    @cached_property
    def _lines(self) -> list[tuple[int, Line]]:
        if not self.data:
            raise PanoplyError("The world jsonl is your own data: name its file with --data FILE.jsonl.")
        return list(read_lines(self.data))

    @cached_property
    def _tasks(self) -> dict[str, list[Task]]:
        """Every line as a task, held out or not by a hash of its prompt."""
        found: dict[str, list[Task]] = {split: [] for split in SPLITS}
        long = []
        for (number, line), prompt in zip(self._lines, self._prompts(), strict=True):
            if len(prompt) > self.longest_prompt:
                long.append(number)
                prompt = prompt[-self.longest_prompt :]
                if self.too_long == "drop":
                    continue
            id = stable_hash("jsonl", *prompt)
            split = "test" if id % 10_000 < 10_000 * self.held_out_share else "train"
            found[split].append(Task(id, tuple(prompt), 0, {"line": line, "number": number}))
        if long and self.too_long == "refuse":
            raise PanoplyError(
                f"{len(long)} of {len(self._lines)} prompts of {self.data} are longer than {self.longest_prompt} "
                f"tokens, the first on line {long[0]}: set world.too_long to drop or cut, or raise "
                "world.longest_prompt."
            )
        if not found["train"]:
            raise PanoplyError(f"{self.data} leaves no prompt to train on.")
        found["test"] = found["test"] or found["train"][:1]
        return found

    def _prompts(self) -> Iterator[list[int]]:
        """The tokens of every line's prompt; all conversations go through the template at once."""
        given = {number: line.get("prompt", line.get("messages")) for number, line in self._lines}
        chats = {number: prompt for number, prompt in given.items() if isinstance(prompt, list) and prompt}
        if chats:
            check_append_only(self.tokenizer)
        try:
            texts = (
                dict(zip(chats, render_all(self.tokenizer, list(chats.values())), strict=True))
                if chats
                else {}
            )
        except Refused as error:
            raise PanoplyError(f"Line {list(chats)[error.number]} of {self.data}: {error}") from error
        for number, prompt in given.items():
            if number in texts:
                yield self.tokenizer.encode(texts[number])
            elif isinstance(prompt, str) and prompt:
                yield self.tokenizer.encode_prompt(prompt)
            else:
                raise self._lacks(number, "prompt", "text or messages")

    def task(self, split: str, index: int) -> Task:
        """Epoch after epoch, each in an order of its own."""
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        tasks = self._tasks[split]
        epoch, place = divmod(index, len(tasks))
        return tasks[int(self._order(split, epoch)[place])]

    def _order(self, split: str, epoch: int) -> np.ndarray[Any, Any]:
        held = self.__dict__.setdefault("_orders", {})
        if (split, epoch) not in held:
            held.clear()
            held[split, epoch] = numpy_rng("epoch", split, epoch).permutation(len(self._tasks[split]))
        order: np.ndarray[Any, Any] = held[split, epoch]
        return order

    def held_out(self, n: int) -> list[Task]:
        return self._tasks["test"][:n]

    # -------------------------------------------------------------- answers

    def demonstrate(self, task: Task, rng: np.random.Generator) -> list[int]:
        return self._answer(task, _given(task.data["line"]))

    def gold(self, task: Task) -> list[int]:
        return self.demonstrate(task, np.random.default_rng(0))

    def pair(self, task: Task, rng: np.random.Generator) -> tuple[list[int], list[int]] | None:
        return self._answer(task, "chosen"), self._answer(task, "rejected")

    def _answer(self, task: Task, field: str) -> list[int]:
        return self._said_by(task.data["line"], task.data["number"], field)

    def _said_by(self, line: Line, number: int, field: str) -> list[int]:
        """The tokens of a given answer, its end included."""
        said = _text(line, field)
        if said is None:
            raise self._lacks(number, field, "text")
        end = self.tokenizer.eos_id
        answer = [*self.tokenizer.encode(said), *([] if end is None else [end])]
        if len(answer) > self.longest and self.too_long != "cut":
            raise PanoplyError(
                f"The field '{field}' on line {number} of {self.data} has {len(answer)} tokens, and an answer at most "
                f"{self.longest}: raise world.longest, or set world.too_long to cut."
            )
        return answer[: self.longest]

    # -------------------------------------------------------------- rewards

    @cached_property
    def _functions(self) -> list[RewardFunction]:
        limits = Limits(memory=self.memory, network=self.network)
        found = [
            HereFunction(source, self.seconds)
            if is_here(source)
            else RewardFunction(source, self.seconds, limits)
            for source in self.rewards
        ]
        for function in found:
            function.say = self.__dict__.get("_say", function.say)
        return found

    def listen(self, say: Callable[[str], None]) -> None:
        self.__dict__["_say"] = say
        for function in self.__dict__.get("_functions", ()):
            function.say = say

    def close(self) -> None:
        for function in self.__dict__.get("_functions", ()):
            function.close()

    @cached_property
    def _names(self) -> list[str]:
        """A column for each function: its name, and where files share one, the file's before it."""
        split = [source.rpartition(":") for source in self.rewards]
        names = [name for _, _, name in split]
        return [
            name
            if names.count(name) == 1 and name not in ("reward", "success")
            else f"{Path(file).stem}.{name}"
            for file, _, name in split
        ]

    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        return self.grade_all([task], [answer])[0] or {"success": 0.0, "reward": 0.0}

    def grade_all(
        self, tasks: Sequence[Task], answers: Sequence[Sequence[int]]
    ) -> list[dict[str, float] | None]:
        """None where a function failed: that sample is lost, and no other."""
        if not self.rewards:
            return [self._matches(task, answer) for task, answer in zip(tasks, answers, strict=True)]
        lines = [t.data["line"] for t in tasks]
        names = dict.fromkeys(name for line in lines for name in line if name not in ("prompt", "messages"))
        fields: dict[str, list[Any]] = {name: [line.get(name) for line in lines] for name in names}
        fields["prompts"] = [line.get("prompt", line.get("messages")) for line in lines]
        fields["completions"] = [
            self._said(line, answer) for line, answer in zip(lines, answers, strict=True)
        ]
        fields["completion_ids"] = [list(answer) for answer in answers]
        columns = call_all(self._functions, fields)
        weights = self.weights or (1.0,) * len(self.rewards)
        graded: list[dict[str, float] | None] = []
        for row in zip(*columns, strict=True):
            values = [v for v in row if v is not None]
            if len(values) < len(row):
                graded.append(None)
                continue
            total = sum(w * v for w, v in zip(weights, values, strict=True))
            parts = dict(zip(self._names, values, strict=True))
            graded.append({**parts, "reward": total, "success": float(total >= self.threshold)})
        return graded

    def _said(self, line: Line, answer: Sequence[int]) -> str | list[dict[str, str]]:
        """An answer as TRL gives it to reward functions: text, or to chat prompts a list of one message."""
        text = self.tokenizer.decode([token for token in answer if token != self.tokenizer.eos_id])
        chat = isinstance(line.get("prompt", line.get("messages")), list)
        return [{"role": "assistant", "content": text}] if chat else text

    def _matches(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        """Without reward functions: whether the answer is the given one."""
        same = "teacher" in self.access and list(answer) == self.gold(task)
        return {"success": float(same), "reward": float(same)}

    def signals(self) -> frozenset[str] | None:
        return frozenset({"success", "reward", *self._names})

    @property
    def judged_by(self) -> str:
        """Rewards of one's own are what is learned; a threshold may be far from all of them."""
        return "reward" if self.rewards else "success"

    def failures(self) -> dict[str, int]:
        """Why reward functions failed, and how often."""
        functions = self._functions if "_functions" in self.__dict__ else []
        return {f"{f.source}: {why}": n for f in functions for why, n in f.failures.items()}


def _given(line: Line) -> str:
    """The field of the answer to be imitated."""
    return "completion" if "completion" in line else "chosen"


def _text(line: Line, field: str) -> str | None:
    """What a field says: its text, or the last message of a conversation; None where there is neither."""
    said = line.get(field)
    if isinstance(said, list) and said and isinstance(said[-1], dict):
        said = said[-1].get("content")
    return said if _is_text(said) else None


def _is_text(said: Any) -> TypeGuard[str]:
    """Half of a surrogate pair, which JSON can spell, is no text: it cannot be tokenised."""
    return isinstance(said, str) and not any("\ud800" <= c <= "\udfff" for c in said)


def _is_prompt(said: Any) -> bool:
    if isinstance(said, list):
        return bool(said) and all(isinstance(message, dict) for message in said)
    return _is_text(said) and said != ""


def read_lines(file: str) -> Iterator[tuple[int, Line]]:
    """The objects of a JSON Lines file with the numbers of their lines; a bad line is named by its number."""
    if not files.is_file(file):
        raise PanoplyError(f"There is no data file '{file}'.")
    empty = True
    for line in files.read_lines(file, dict[str, Any]):
        empty = False
        yield line.number, line.value
    if empty:
        raise PanoplyError(f"{file} holds no data.")
