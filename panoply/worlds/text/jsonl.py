"""Your own data: prompts, answers or preferences from a file, rewards from a function of yours."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from panoply import files
from panoply.confined.limits import Limits
from panoply.errors import PanoplyError, unknown
from panoply.policies.chat import Refused, check_append_only, render_all
from panoply.policies.tokenizer import Tokenizer
from panoply.policies.words import tokenizer_of
from panoply.registry import world
from panoply.rewards.functions import RewardFunction, call_all
from panoply.rewards.here import HereFunction, is_here
from panoply.rewards.walled import WalledFunction, wanted
from panoply.sandbox import Wanted
from panoply.seeds import numpy_rng, stable_hash
from panoply.worlds.text.forms import Brought, Line, Rated, Row, brought
from panoply.worlds.world import SPLITS, Task, TextWorld

DOMAINS = 20
"""Kinds of problems whose success is reported apart; more are no kinds."""


@world("jsonl@1")
@dataclass(frozen=True)
class Jsonl(TextWorld):
    """Your own data: one JSON object a line.

    It has `prompt` (text, or a list of chat messages) and, as the method needs, `completion` (with `label`: whether it
    is good), or `chosen` and `rejected`, or `completions` with ratings, or whatever fields the reward functions ask
    for. The forms are those of TRL, OpenRLHF and UltraFeedback (docs/preferences.md); `panoply plan` says which was
    found.

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
    rated: Literal["pairs", "best", "lists"] = "pairs"
    """What several rated answers to a prompt become: all pairs of different ratings, one pair of the best and another
    by lot, or one list, which losses of lists take."""
    rating: str = ""
    """The rating they are compared by, such as helpfulness; none means the first that is known (`rating`, `score`,
    `fine-grained_score`, `overall_score`, then the mean of all)."""
    seconds: float = 10.0
    """Time limit of one call of a reward function."""
    memory: float = 8.0
    """GiB of memory a reward function may take; 0 sets no limit."""
    network: bool = False
    """Whether reward functions may reach the network, as those that ask a judge must."""
    sandbox: str = ""
    """What reward functions run in: `auto`, or a sandbox by name (`--sandbox`). None is a process with limits."""

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
        if self.sandbox and self.network:
            raise PanoplyError("There is no network in a sandbox: leave out world.network, or --sandbox.")
        if self.sandbox and not self.rewards:
            raise PanoplyError("--sandbox has no effect: there are no reward functions to run in it.")
        if self.sandbox and (own := [name for name in self.rewards if is_here(name)]):
            raise PanoplyError(
                f"The reward function '{own[0].partition(':')[2]}' lives in this process and cannot go into a sandbox: "
                "put it into a file."
            )
        if not 0 < self.held_out_share < 1:
            raise PanoplyError(f"jsonl.held_out_share is between 0 and 1, not {self.held_out_share:g}.")

    # -------------------------------------------------------------- what there is

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if not self.model:
            raise PanoplyError("Your own data needs a model of your own: name its folder with --model.")
        return tokenizer_of(self.model)

    @property
    def max_tokens(self) -> int:
        return self.longest

    @cached_property
    def access(self) -> frozenset[str]:  # type: ignore[override]
        named = {name for row in self._brought.rows for name in row.answers}
        given = {"verify"} if self.rewards else set()
        given |= {"teacher", "reference"} if named else set()
        given |= {"pairs"} if "chosen" in named else set()
        given |= {"lists"} if any(row.rated for row in self._brought.rows) else set()
        return frozenset(given)

    @property
    def asks(self) -> Mapping[str, Any]:
        """Single answers with labels are taken one by one."""
        if not self.data or not any(row.form == "labelled answers" for row in self._brought.rows):
            return {}
        return {"data.data": "demonstrations", "data.data.batch": 32}

    def about(self) -> str:
        return self._brought.said()

    def check(self, needs: frozenset[str]) -> None:
        """Every line, before anything is computed: it has a prompt, and the answers that the method learns from."""
        for row in self._brought.rows:
            if row.prompt is None:
                raise self._refused(row, row.wrong or "has no field 'prompt' with text or messages")
            fields = ["chosen", "rejected"] if "world:pairs" in needs else []
            if not fields and needs & {"world:teacher", "world:reference", "world:lists"}:
                fields = [self._given(row)]
            for field in fields:
                said = row.answers.get(field)
                if said is None or len(said.encode()) >= self.longest:  # a token is a byte at least
                    self._said_by(row, field)

    def _refused(self, row: Row, why: str) -> PanoplyError:
        return PanoplyError(f"Line {row.number} of {self.data} {why}: mend the line, or leave it out.")

    @cached_property
    def _brought(self) -> Brought:
        if not self.data:
            raise PanoplyError("The world jsonl is your own data: name its file with --data FILE.jsonl.")
        found = _read(self.data, _hash(self.data), self.rated, self.rating)
        if not found.rows:
            raise PanoplyError(f"Nothing is left of {self.data}: left out are {'; '.join(found.left_out())}.")
        return found

    @cached_property
    def _tasks(self) -> dict[str, list[Task]]:
        """Every line as a task, held out or not by a hash of its prompt."""
        found: dict[str, list[Task]] = {split: [] for split in SPLITS}
        long = []
        prompts = self._prompts()
        for row in self._brought.rows:
            prompt = prompts[row.number]
            if len(prompt) > self.longest_prompt:
                long.append(row.number)
                prompt = prompt[-self.longest_prompt :]
                if self.too_long == "drop":
                    continue
            id = stable_hash("jsonl", *prompt)
            split = "test" if id % 10_000 < 10_000 * self.held_out_share else "train"
            found[split].append(Task(id, tuple(prompt), 0, {"row": row}))
        if long and self.too_long == "refuse":
            raise PanoplyError(
                f"{len(set(long))} of {len(prompts)} prompts of {self.data} are longer than {self.longest_prompt} "
                f"tokens, the first on line {long[0]}: set world.too_long to drop or cut, or raise "
                "world.longest_prompt."
            )
        if not found["train"]:
            raise PanoplyError(f"{self.data} leaves no prompt to train on.")
        found["test"] = found["test"] or found["train"][:1]
        return found

    def _prompts(self) -> dict[int, list[int]]:
        """The tokens of every line's prompt; all conversations go through the template at once."""
        given = {row.number: row.prompt for row in self._brought.rows}
        chats = {number: prompt for number, prompt in given.items() if isinstance(prompt, list)}
        if chats:
            check_append_only(self.tokenizer)
        try:
            rendered = render_all(self.tokenizer, list(chats.values())) if chats else []
        except Refused as error:
            raise PanoplyError(f"Line {list(chats)[error.number]} of {self.data}: {error}") from error
        found = {n: self.tokenizer.encode(text) for n, text in zip(chats, rendered, strict=True)}
        for row in self._brought.rows:
            if row.number in found:
                continue
            if not isinstance(row.prompt, str):
                raise self._refused(row, row.wrong or "has no field 'prompt' with text or messages")
            found[row.number] = self.tokenizer.encode_prompt(row.prompt)
        return found

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
        return self._said_by(task.data["row"], self._given(task.data["row"]))

    def gold(self, task: Task) -> list[int]:
        return self.demonstrate(task, np.random.default_rng(0))

    def pair(self, task: Task, rng: np.random.Generator) -> tuple[list[int], list[int]] | None:
        """None where both answers are the same once they are cut."""
        row: Row = task.data["row"]
        chosen, rejected = self._said_by(row, "chosen"), self._said_by(row, "rejected")
        return None if chosen == rejected else (chosen, rejected)

    def known_of_pair(self, task: Task) -> Mapping[str, float]:
        row: Row = task.data["row"]
        known = {"p": row.p, "margin": row.margin}
        found = {name: value for name, value in known.items() if value is not None}
        return found if row.annotator is None else {**found, "annotator": self._people[row.annotator]}

    def person(self, annotator: int) -> str:
        return self._brought.annotators[annotator]

    def part_of(self, task: Task) -> str:
        """The `domain` of its line, where there are a few of them."""
        return self._domain(task.data["row"]) if len(self._domains) <= DOMAINS else ""

    @staticmethod
    def _domain(row: Row) -> str:
        said = row.line.get("domain")
        return said if isinstance(said, str) else ""

    @cached_property
    def _domains(self) -> set[str]:
        return {self._domain(row) for row in self._brought.rows}

    @cached_property
    def _people(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self._brought.annotators)}

    def rated_answers(self, task: Task) -> list[tuple[list[int], float]]:
        row: Row = task.data["row"]
        return [(self._tokens(row, "completions", text), worth) for text, worth in row.rated]

    def _given(self, row: Row) -> str:
        """The field of the answer to be imitated; of a row that has none, what the file's other rows have."""
        pairs = "chosen" in row.answers or (not row.answers and "pairs" in self.access)
        return "chosen" if pairs else "completion"

    def _said_by(self, row: Row, field: str) -> list[int]:
        """The tokens of a given answer, its end included."""
        if field not in row.answers:
            raise self._refused(row, row.wrong or f"has no field '{field}' with text")
        return self._tokens(row, field, row.answers[field])

    def _tokens(self, row: Row, field: str, said: str) -> list[int]:
        end = self.tokenizer.eos_id
        answer = [*self.tokenizer.encode(said), *([] if end is None else [end])]
        if len(answer) > self.longest and self.too_long != "cut":
            raise PanoplyError(
                f"The field '{field}' on line {row.number} of {self.data} has {len(answer)} tokens, and an answer at "
                f"most {self.longest}: raise world.longest, or set world.too_long to cut."
            )
        return answer[: self.longest]

    # -------------------------------------------------------------- rewards

    @property
    def sandboxed(self) -> Wanted | None:
        return wanted(self.sandbox, self.rewards) if self.sandbox else None

    @cached_property
    def _functions(self) -> list[RewardFunction]:
        limits = Limits(memory=self.memory, network=self.network)
        found: list[RewardFunction] = []
        for source in self.rewards:
            if self.sandboxed:
                found.append(WalledFunction(source, self.seconds, self.memory, self.sandboxed))
            elif is_here(source):
                found.append(HereFunction(source, self.seconds))
            else:
                found.append(RewardFunction(source, self.seconds, limits))
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
        rows: list[Row] = [t.data["row"] for t in tasks]
        said = [self._said(row, answer) for row, answer in zip(rows, answers, strict=True)]
        return self.rewarded(rows, said, answers)

    def rewarded(
        self, rows: Sequence[Row], said: Sequence[Any], answers: Sequence[Sequence[int]]
    ) -> list[dict[str, float] | None]:
        """What the reward functions make of what was said, as text or messages, and of its tokens."""
        lines = [row.line for row in rows]
        names = dict.fromkeys(name for line in lines for name in line if name not in ("prompt", "messages"))
        fields: dict[str, list[Any]] = {name: [line.get(name) for line in lines] for name in names}
        fields["prompts"] = [row.prompt for row in rows]
        fields["completions"] = list(said)
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

    def _said(self, row: Row, answer: Sequence[int]) -> str | list[dict[str, str]]:
        """An answer as TRL gives it to reward functions: text, or to chat prompts a list of one message."""
        text = self.tokenizer.decode([token for token in answer if token != self.tokenizer.eos_id])
        return [{"role": "assistant", "content": text}] if isinstance(row.prompt, list) else text

    def _matches(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        """Without reward functions: whether the answer is the given one, and that a good one."""
        row: Row = task.data["row"]
        same = bool(row.answers) and row.good and list(answer) == self.gold(task)
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


@functools.lru_cache(maxsize=2)
def _read(file: str, hash: str, rated: Rated, rating: str) -> Brought:
    """A file is understood once, however often a plan looks at it, until something else is in it."""
    return brought(list(read_lines(file)), rated, rating)


def _hash(file: str) -> str:
    try:
        with files.open_file(file) as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except (PanoplyError, OSError):
        return ""  # said by whoever reads it


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
