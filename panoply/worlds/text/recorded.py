"""Episodes that `panoply serve --record` wrote down, to be learned from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from panoply.errors import PanoplyError, unknown
from panoply.policies.talk import Talk
from panoply.policies.tokenizer import Tokenizer
from panoply.policies.words import tokenizer_of
from panoply.registry import world
from panoply.seeds import numpy_rng, stable_hash
from panoply.serving.record import Record, Told, read
from panoply.worlds.world import SPLITS, Lesson, Play, Reply, Task, TextWorld


@world("recorded@1")
@dataclass(frozen=True)
class Recorded(TextWorld):
    """What clients of `panoply serve RUN --record FILE.jsonl` asked, what the policy said, and what that was worth.

    A task is how an episode began; episodes that began alike are a group. Methods on own episodes learn from them with
    the log-probabilities that they were drawn with (`sample.recorded`), imitation from those that earned at least
    `threshold`, and preferences from the best and the worst of a task. Whoever asked is not there any more: a held-out
    answer succeeds if it repeats, turn by turn, an episode that did, and what would have come of any other is unknown
    and counts as nothing. `panoply eval RUN --world agent:FILE.py:FUNCTION` asks the agent itself.
    """

    data: str = ""
    """The file."""
    model: str = ""
    """The folder whose tokenizer is used: the run's own."""
    threshold: float = 1.0
    """Success is a reward of that much."""
    longest: int = 512
    """Tokens of a held-out answer at most."""
    held_out_share: float = 0.1
    """Of the tasks, by a hash of how they began."""

    bounds: ClassVar[Mapping[str, str]] = {
        "threshold": "any number",
        "longest": "from 1 to 10000000",
        "held_out_share": "from 0 up to 1",
    }
    preset: ClassVar[str] = "published"
    limit: ClassVar[str] = "longest"
    markov: ClassVar[bool] = True
    settings: ClassVar[Mapping[str, Any]] = {"reward.name": "score", "sample": "recorded"}

    # -------------------------------------------------------------- what there is

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if not self.model:
            raise PanoplyError(
                "A record is learned from by the model that made it: name its folder with --model."
            )
        return tokenizer_of(self.model)

    @property
    def max_tokens(self) -> int:
        return self.longest

    @cached_property
    def turn_cap(self) -> int:
        return max(len(one.turns) for one in self.record.episodes)

    @cached_property
    def access(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"verify", "teacher", "reference", "pairs", "record"})

    @cached_property
    def record(self) -> Record:
        if not self.data:
            raise PanoplyError(
                "The world recorded is what panoply serve wrote: name its file with --data FILE.jsonl."
            )
        found = read(self.data)
        if not found.episodes:
            told = "; ".join(f"{n} {why}" for why, n in found.left_out.items())
            raise PanoplyError(
                f"There is no episode to learn from in {self.data}{f': {told}' if told else ''}. What one was worth is "
                "told to the endpoint, POST /v1/rewards."
            )
        most = self.tokenizer.vocab_size
        for turn in (turn for one in found.episodes for turn in one.turns):
            if min(*turn.prompt, *turn.said) < 0 or max(*turn.prompt, *turn.said) >= most:
                raise PanoplyError(
                    f"Line {turn.line} of {self.data} has tokens that are none of the model's {most}: it was recorded "
                    "with another model."
                )
        return found

    def about(self) -> str:
        return self.record.about()

    def check(self, needs: frozenset[str]) -> None:
        """Every line is understood, and there is what the method learns from."""
        train = self._tasks["train"]
        if "world:pairs" in needs and not any(
            len({one.reward for one in self.groups[t.id]}) > 1 for t in train
        ):
            raise PanoplyError(
                f"No two episodes of {self.data} began alike and earned differently: there are no pairs."
            )
        if needs & {"world:teacher", "world:reference"} and "world:pairs" not in needs and not self._good:
            raise PanoplyError(
                f"No episode of {self.data} earned {self.threshold:g} (world.threshold): there is none to imitate."
            )

    # -------------------------------------------------------------- tasks

    @cached_property
    def groups(self) -> dict[int, list[Told]]:
        """Episodes by their task."""
        found: dict[int, list[Told]] = {}
        for one in self.record.episodes:
            found.setdefault(stable_hash("recorded", *one.turns[0].prompt), []).append(one)
        return found

    @cached_property
    def _tasks(self) -> dict[str, list[Task]]:
        found: dict[str, list[Task]] = {split: [] for split in SPLITS}
        for id, episodes in self.groups.items():
            split = "test" if id % 10_000 < 10_000 * self.held_out_share else "train"
            found[split].append(Task(id, episodes[0].turns[0].prompt))
        if not found["train"]:
            raise PanoplyError(f"{self.data} leaves no episode to train on: lower world.held_out_share.")
        found["test"] = found["test"] or found["train"][:1]
        return found

    @property
    def tasks(self) -> int:
        """How many there are to train on."""
        return len(self._tasks["train"])

    def task(self, split: str, index: int) -> Task:
        """Epoch after epoch, each in an order of its own."""
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        tasks = self._tasks[split]
        epoch, place = divmod(index, len(tasks))
        return tasks[int(numpy_rng("epoch", split, epoch).permutation(len(tasks))[place])]

    def held_out(self, n: int) -> list[Task]:
        return self._tasks["test"][:n]

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return self._talk.stop_tokens

    @cached_property
    def _talk(self) -> Talk:
        return Talk(self.tokenizer)

    # -------------------------------------------------------------- what was said

    def play(self, task: Task) -> Play:
        return Again(self, task)

    def worth(self, reward: float) -> dict[str, float]:
        return {"success": float(reward >= self.threshold - 1e-9), "score": reward}

    def signals(self) -> frozenset[str]:
        return frozenset(self.worth(0.0))

    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        """What the episode was worth in which just this was said; nothing where it was not."""
        rewards = [one.reward for one in self.groups[task.id] if one.said == tuple(answer)]
        return self.worth(float(np.mean(rewards))) if rewards else {"success": 0.0, "score": 0.0}

    def turns(self, task: Task, answer: Sequence[int]) -> list[Lesson]:
        same = next((one for one in self.groups[task.id] if one.said == tuple(answer)), None)
        return [(task.prompt, list(answer))] if same is None else _lessons(same)

    def gold(self, task: Task) -> list[int]:
        """What was said in the episode that earned most."""
        return list(max(self.groups[task.id], key=lambda one: one.reward).said)

    def demonstrate(self, task: Task, rng: np.random.Generator) -> list[int]:
        return [token for _, said in self.lessons(task, rng) for token in said]

    @cached_property
    def _good(self) -> dict[int, list[Told]]:
        """Training episodes that are worth imitating, by their task."""
        ids = [task.id for task in self._tasks["train"]]
        good = {id: [one for one in self.groups[id] if self.worth(one.reward)["success"]] for id in ids}
        return {id: found for id, found in good.items() if found}

    def lessons(self, task: Task, rng: np.random.Generator) -> list[Lesson]:
        """An episode of the task that succeeded, turn by turn; where none did, one of another task."""
        if task.id not in self._good:
            task_ids = list(self._good)
            return _lessons(_one(self._good[task_ids[int(rng.integers(len(task_ids)))]], rng))
        return _lessons(_one(self._good[task.id], rng))

    def pair(self, task: Task, rng: np.random.Generator) -> tuple[list[int], list[int]] | None:
        """The best and the worst episode of a task; None where all earned the same."""
        ordered = sorted(self.groups[task.id], key=lambda one: one.reward)
        worst, best = ordered[0], ordered[-1]
        return None if best.reward == worst.reward else (list(best.said), list(worst.said))


class Again(Play):
    """An episode that goes the way of recorded ones, as long as what is said is what was said in one of them."""

    def __init__(self, world: Recorded, task: Task):
        super().__init__(task.prompt, task.id)
        self.world, self.along, self.turn = world, world.groups[task.id], 0

    def act(self, answer: Sequence[int]) -> Reply:
        at, said = self.turn, tuple(answer)
        self.turn += 1
        self.along = [one for one in self.along if one.turns[at].said == said]
        ended = [one.reward for one in self.along if len(one.turns) == self.turn]
        if ended:
            return Reply(self.world.worth(float(np.mean(ended))))
        if not self.along:
            return Reply({"success": 0.0, "score": 0.0}, truncated=True)
        shown = self.along[0].turns[self.turn].prompt
        self.along = [one for one in self.along if one.turns[self.turn].prompt == shown]
        self.state = stable_hash("recorded", *shown)
        return Reply({"success": 0.0, "score": 0.0}, shown, done=False)


def _one(episodes: Sequence[Told], rng: np.random.Generator) -> Told:
    return episodes[int(rng.integers(len(episodes)))]


def _lessons(episode: Told) -> list[Lesson]:
    return [(turn.prompt, list(turn.said)) for turn in episode.turns]
