"""From a text world to experience: tasks in, graded episodes out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import DEMONSTRATION, OPEN, OWN, TERMINATED, Column, Experience, Ragged, Table
from panoply.policies.text import TextPolicy
from panoply.rollout.engine import Request, TextEngine, Turn
from panoply.rollout.rollouts import Rollouts
from panoply.rollout.sampling import Sampling
from panoply.seeds import numpy_rng, stable_hash
from panoply.worlds.world import Task, TextWorld

Temperature = float | Callable[[Tensor], Tensor]


class Collector:
    """Draws training tasks in order and lets the policy, or the world's teacher, act on them.

    What it must remember to go on is three counters (`state`), so a resumed run sees the same tasks and draws.
    """

    def __init__(self, world: TextWorld, policy: TextPolicy, seed: int, split: str = "train"):
        self.world, self.policy, self.seed, self.split = world, policy, seed, split
        self.engine = TextEngine(policy.model, policy.tokenizer)
        self.state = {"tasks": 0, "groups": 0, "episodes": 0}
        self.version = 0

    def tasks(self, n: int) -> list[Task]:
        """The next `n` tasks of the split; another seed starts elsewhere in the endless list."""
        start = self.state["tasks"] + (stable_hash("tasks", self.seed) >> 16)
        self.state["tasks"] += n
        return [self.world.task(self.split, start + i) for i in range(n)]

    def episodes(
        self,
        tasks: Sequence[Task],
        group: int = 1,
        *,
        temperature: Temperature = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        max_tokens: int | None = None,
    ) -> Experience:
        """A group of the policy's own episodes for each task, with the world's signals on their last decisions."""
        sampling = Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k or None,
            max_tokens=min(max_tokens or self.world.max_tokens, self.world.max_tokens),
            stop_tokens=self.world.stop_tokens,
        )
        first = self.state["episodes"]
        requests = [
            Request(t.prompt, [self._draw(first + i * group + g) for g in range(group)], t)
            for i, t in enumerate(tasks)
        ]
        turns: dict[int, list[list[int]]] = defaultdict(list)

        def reply(turn: Turn) -> Sequence[int] | None:
            turns[turn.row].append(turn.sampled)
            return self.world.reply(turn.key, turns[turn.row])

        return self._experience(tasks, self.engine.generate(requests, sampling, reply, entropy=True))

    def demonstrations(self, tasks: Sequence[Task]) -> Experience:
        """One demonstration a task by the world's careless teacher."""
        first = self.state["episodes"]
        rngs = (numpy_rng("teacher", self.seed, first + i) for i in range(len(tasks)))
        return self._given(
            tasks, [self.world.demonstrate(t, rng) for t, rng in zip(tasks, rngs, strict=True)]
        )

    def teacher_pairs(self, tasks: Sequence[Task], tries: int = 64) -> Experience:
        """For each task the reference answer, preferred to a demonstration that the verifier refuses.

        A task on which the teacher does not err in `tries` demonstrations is left out.
        """
        first, doubled, answers = self.state["episodes"], [], []
        for i, task in enumerate(tasks):
            rng = numpy_rng("teacher", self.seed, first + i)
            attempts = (self.world.demonstrate(task, rng) for _ in range(tries))
            wrong = next((a for a in attempts if not self.world.grade(task, a)["success"]), None)
            if wrong is not None:
                doubled += [task, task]
                answers += [self.world.gold(task), wrong]
        if not doubled:
            raise PanoplyError(
                f"The teacher of {self.world.name} made no mistakes, so there are no pairs to learn from."
            )
        experience = self._given(doubled, answers)
        chosen = torch.arange(first, first + len(doubled), 2)
        return experience.with_pairs(Table({"chosen": chosen, "rejected": chosen + 1}))

    # -------------------------------------------------------------- tables

    def _experience(self, tasks: Sequence[Task], rollouts: Rollouts) -> Experience:
        episode = self._number(len(rollouts))
        group = self.state["groups"] + rollouts.request
        self.state["groups"] += len(tasks)
        row = rollouts.decisions.tensor("context")
        ids = torch.tensor([t.id for t in tasks])
        last = rollouts.decisions.tensor("end") != OPEN
        graded = [
            self.world.grade(tasks[r], answer)
            for r, answer in zip(rollouts.request.tolist(), rollouts.completions(), strict=True)
        ]
        columns: dict[str, Column] = {
            "task": ids[rollouts.request][row],
            "group": group[row],
            "episode": episode[row],
            "version": torch.full_like(row, self.version),
            "source": torch.full_like(row, OWN),
            **_on_last(graded, last),
        }
        return Experience(rollouts.decisions.plus(columns), rollouts.context)

    def _given(self, tasks: Sequence[Task], answers: Sequence[Sequence[int]]) -> Experience:
        """Foreign episodes: no behaviour log-probability, since no policy of ours took these decisions."""
        episode = self._number(len(tasks))
        prompts = {task.prompt: i for i, task in enumerate(tasks)}
        lengths = torch.tensor([len(a) for a in answers])
        shared = torch.tensor([len(t.prompt) for t in tasks])
        row = torch.arange(len(tasks)).repeat_interleave(lengths)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        inside = torch.arange(len(row)) - offsets[row]
        last = inside == lengths[row] - 1
        graded = [self.world.grade(t, a) for t, a in zip(tasks, answers, strict=True)]
        decisions: dict[str, Column] = {
            "task": torch.tensor([t.id for t in tasks])[row],
            "group": (self.state["groups"] + torch.tensor([prompts[t.prompt] for t in tasks]))[row],
            "episode": episode[row],
            "turn": torch.zeros_like(row),
            "version": torch.full_like(row, self.version),
            "context": row,
            "position": shared[row] + inside,
            "action": torch.tensor([token for a in answers for token in a]),
            "source": torch.full_like(row, DEMONSTRATION),
            "end": torch.where(last, TERMINATED, OPEN),
            **_on_last(graded, last),
        }
        self.state["groups"] += len(tasks)
        context: dict[str, Column] = {
            "tokens": Ragged.from_lists([[*t.prompt, *a] for t, a in zip(tasks, answers, strict=True)]),
            "prompt": torch.tensor([prompts[t.prompt] for t in tasks]),
            "shared": shared,
        }
        return Experience(Table(decisions), Table(context))

    def _number(self, episodes: int) -> Tensor:
        first = self.state["episodes"]
        self.state["episodes"] += episodes
        return torch.arange(first, first + episodes)

    def _draw(self, episode: int) -> int:
        return stable_hash("draw", self.seed, self.split, episode)


def _on_last(graded: Sequence[dict[str, float]], last: Tensor) -> dict[str, Any]:
    """Each signal as a column: an episode's value on its last decision, zero before it."""
    columns = {}
    for name in graded[0] if graded else ():
        column = torch.zeros(len(last))
        column[last] = torch.tensor([g[name] for g in graded])
        columns[f"signal:{name}"] = column
    return columns
