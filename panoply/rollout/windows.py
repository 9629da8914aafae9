"""Answers of which each step samples a window: those that are not over wait, and go on in the next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from panoply.errors import PanoplyError, Resumable
from panoply.experience import (
    OPEN,
    OWN,
    REPLAY,
    TERMINATED,
    TRUNCATED,
    Column,
    Experience,
    Ragged,
    Segments,
    Table,
)
from panoply.rollout.requests import Request
from panoply.rollout.rollouts import STOP
from panoply.worlds.world import Signals, Task, earned

if TYPE_CHECKING:
    from panoply.rollout.rollouts import Rollouts
    from panoply.rollout.text import Collector

ANSWERS = ("number", "group", "episode", "length")
"""What is remembered of an answer: which task it is to, its keys, and how many tokens of it there are."""
TOKENS = {"action": torch.long, "logp": torch.float32, "entropy": torch.float32, "version": torch.long}
"""What is remembered of its tokens: all that was recorded when each was drawn."""


def nothing_open() -> dict[str, Any]:
    """What is remembered before the first step: one entry an answer, or one for each token of all of them.

    `ungraded` counts answers that could not be graded since the last that could.
    """
    answers = {name: torch.zeros(0, dtype=torch.long) for name in ANSWERS}
    return {**answers, **{name: torch.zeros(0, dtype=kind) for name, kind in TOKENS.items()}, "ungraded": 0}


@dataclass(frozen=True)
class _Window:
    """A window of every answer that is under way, the earlier ones first."""

    tasks: list[Task]
    answers: Mapping[str, Tensor]
    """`ANSWERS` as they were before the window."""
    rows: Table
    """All tokens so far, answer after answer: `context` (which answer), `TOKENS`, and whether they are `new`."""
    tokens: Ragged
    """Prompts and answers."""
    end: Tensor
    """How each answer stands after it: OPEN, TERMINATED or TRUNCATED."""

    def said(self, answer: int) -> list[int]:
        found: list[int] = self.tokens[answer].tolist()
        return found[len(self.tasks[answer].prompt) :]

    def left_open(self) -> dict[str, Tensor]:
        """What is remembered for the next step."""
        stays = self.end == OPEN
        row = self.rows.tensor("context")
        found = {name: column[stays] for name, column in self.answers.items()}
        found["length"] = row.bincount(minlength=len(stays))[stays]
        return found | {name: self.rows.tensor(name)[stays[row]] for name in TOKENS}


def next_window(
    collect: Collector, open: Mapping[str, Any], slots: int, window: int, temperature: float = 1.0
) -> tuple[dict[str, Any], Experience]:
    """Go on with all answers that are `open`, and begin as many new ones as there are slots left.

    Each is sampled for `window` more tokens, or to its end. Returns what is open then, and the experience: every
    answer with all its tokens so far. Those of earlier windows keep the `logp`, `entropy` and `version` they were drawn
    with; they do not learn (`train` is false) and are of an earlier self (source 3). What is still open has `end` 0 on
    its last row. A row's chance depends on its seed and on the place of the token alone, so that on unchanged weights
    windows change nothing.
    """
    _check(collect, "An answer in windows")
    made = _sampled(collect, open, slots, window, temperature)
    over = (made.end != OPEN).nonzero().flatten().tolist()
    graded = collect.world.grade_all([made.tasks[i] for i in over], [made.said(i) for i in over])
    failed = all(signals is None for signals in graded) * (open["ungraded"] + len(graded))
    if failed >= slots:
        why = "; ".join(collect.world.failures())
        raise Resumable(f"Not one of {failed} answers could be graded: {why}.")
    experience = _experience(collect, made, dict(zip(over, graded, strict=True)), temperature)
    return {**made.left_open(), "ungraded": failed}, experience


def from_prefixes(collect: Collector, prefixes: Sequence[Sequence[int]], temperature: float) -> Experience:
    """An answer to each of the next tasks that begins with given tokens, none or some, and is sampled to its end.

    The given ones are rows of it like the others, with the log-probability that who goes on from them gives them; they
    do not learn (`train` is false), are no decisions that were made (nothing counts them) and have source 3.
    """
    _check(collect, "An answer that begins with given tokens")
    said = [token for prefix in prefixes for token in prefix]
    first: int = collect.state["tasks"]
    begun = _with_new(collect, nothing_open(), len(prefixes))
    assert begun["number"].tolist() == list(range(first, first + len(prefixes)))
    begun["length"] = torch.tensor([len(prefix) for prefix in prefixes])
    unknown = torch.full((len(said),), torch.nan)
    tokens = {"action": torch.tensor(said, dtype=torch.long), "logp": unknown, "entropy": unknown}
    tokens["version"] = torch.full_like(tokens["action"], collect.version)
    made = _sampled(collect, {**begun, **tokens}, len(prefixes), collect.world.max_tokens, temperature)
    answers = [made.said(i) for i in range(len(prefixes))]
    graded = collect.world.grade_all(made.tasks, answers)
    if all(signals is None for signals in graded):
        why = "; ".join(collect.world.failures())
        raise Resumable(f"Not one of {len(graded)} answers could be graded: {why}.")
    found = _experience(collect, made, dict(enumerate(graded)), temperature)
    given = ~found["train"]
    if not bool(given.any()):
        return found
    with torch.no_grad():
        scored = collect.policy.score(found, frozenset({"logp", "entropy"}))
    return found.with_columns(
        **{
            name: torch.where(given, scored[name].to(found[name]), found[name])
            for name in ("logp", "entropy")
        }
    )


def _check(collect: Collector, what: str) -> None:
    collect.check_tokens_alone(what)
    if collect._complete is not None or collect._mask([collect.world.play(collect.task(0))]) is not None:
        raise PanoplyError(
            f"{collect.world.name} says itself when an answer is complete, or which tokens may be drawn, and answers "
            "that go on from what was said before do not ask."
        )


def _sampled(
    collect: Collector, open: Mapping[str, Tensor], slots: int, window: int, temperature: float
) -> _Window:
    answers = _with_new(collect, open, slots)
    tasks = collect.numbered(answers["number"].tolist())
    before = [said.tolist() for said in open["action"].split(open["length"].tolist())]  # type: ignore[no-untyped-call]
    before += [[]] * (len(tasks) - len(before))
    longest = collect.world.max_tokens
    requests = [
        Request(
            (*task.prompt, *said),
            [collect._draw(episode)],
            most=min(window, longest - len(said)),
            begun=len(said),
        )
        for task, said, episode in zip(tasks, before, answers["episode"].tolist(), strict=True)
    ]
    rollouts = collect.generate(requests, collect._sampling(temperature, max_tokens=window), entropy=True)
    collect._count(rollouts.decisions)
    rows = _joined(answers["length"], open, rollouts, collect.version)
    tokens = rollouts.context.ragged("tokens")
    return _Window(tasks, answers, rows, tokens, _ends(collect, tasks, tokens, rollouts))


def _with_new(collect: Collector, open: Mapping[str, Tensor], slots: int) -> dict[str, Tensor]:
    """The answers that are open, and new ones in the slots that are free."""
    free, state = max(0, slots - len(open["number"])), collect.state
    new = {
        "number": torch.arange(state["tasks"], state["tasks"] + free),
        "group": torch.arange(state["groups"], state["groups"] + free),
        "episode": collect._number(free),
        "length": torch.zeros(free, dtype=torch.long),
    }
    state["tasks"], state["groups"] = state["tasks"] + free, state["groups"] + free
    return {name: torch.cat([open[name], new[name]]) for name in ANSWERS}


def _joined(length: Tensor, open: Mapping[str, Tensor], rollouts: Rollouts, version: int) -> Table:
    """Rows of earlier windows and of this one, in the order of answers and, in each, of its tokens."""
    drawn = rollouts.decisions
    row = drawn.tensor("context")
    recorded = {
        **{n: drawn.tensor(n) for n in TOKENS if n in drawn},
        "version": torch.full_like(row, version),
    }
    answer = torch.cat([torch.arange(len(length)).repeat_interleave(length), row])
    columns: dict[str, Column] = {n: torch.cat([open[n], recorded[n].to(open[n].dtype)]) for n in TOKENS}
    columns |= {"context": answer, "new": torch.arange(len(answer)) >= len(open["action"])}
    return Table(columns).take(answer.argsort(stable=True))


def _ends(collect: Collector, tasks: Sequence[Task], tokens: Ragged, rollouts: Rollouts) -> Tensor:
    """An answer is over when it has stopped, is as long as the world allows, or fills the policy's context."""
    stopped = torch.tensor([reasons[-1] == STOP for reasons in rollouts.reasons.tolist()], dtype=torch.bool)
    said = tokens.lengths - torch.tensor([len(task.prompt) for task in tasks])
    full = (said >= collect.world.max_tokens) | (tokens.lengths >= collect.policy.context_length)
    return torch.where(stopped, TERMINATED, torch.where(full, TRUNCATED, OPEN))


def _experience(
    collect: Collector, made: _Window, graded: Mapping[int, Signals | None], temperature: float
) -> Experience:
    """All rows with keys; signals and ends on the last ones. Answers that could not be graded are left out."""
    row, new = (made.rows.tensor(name) for name in ("context", "new"))
    of, last = Segments(row), Segments(row).is_last()
    shared = torch.tensor([len(task.prompt) for task in made.tasks])
    place = torch.arange(len(row)) - (of.count.cumsum(0) - of.count)[row]
    prompts: dict[tuple[int, ...], int] = {}
    prompt = torch.tensor([prompts.setdefault(task.prompt, len(prompts)) for task in made.tasks])
    columns: dict[str, Column] = {
        **{name: column[row] for name, column in collect._of_tasks(made.tasks).items()},
        "state": torch.tensor([task.id for task in made.tasks])[row],
        "group": made.answers["group"][row],
        "episode": made.answers["episode"][row],
        "turn": torch.zeros_like(row),
        "position": shared[row] + place,
        "source": torch.where(new, OWN, REPLAY),
        "train": new,
        "end": made.end[row].masked_fill(~last, OPEN),
        **({"temperature": torch.full((len(row),), temperature)} if temperature != 1 else {}),
        **({"actor": torch.zeros_like(row)} if collect.selves and collect.selves.actors else {}),
    }
    names = sorted({name for signals in graded.values() for name in signals or ()})
    for name in names or sorted(collect.world.signals() or ("success",)):
        worth = torch.zeros(len(made.tasks))
        for answer, signals in graded.items():
            worth[answer] = earned((signals or {}).get(name, 0.0))
        columns[f"signal:{name}"] = worth[row] * last
    decisions = Table({name: column for name, column in made.rows.items() if name != "new"}).plus(columns)
    experience = Experience(decisions, Table({"tokens": made.tokens, "prompt": prompt, "shared": shared}))
    failed = [answer for answer, signals in graded.items() if signals is None]
    return experience.take(~torch.isin(row, torch.tensor(failed))) if failed else experience
