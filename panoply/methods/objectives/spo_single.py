"""Single-stream policy optimization: one answer a prompt, against what is remembered of the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from panoply import episodes
from panoply.errors import PanoplyError
from panoply.evidence.claims import Learns, Shows
from panoply.experience import OWN, Column, Experience, Segments, Table, distinct
from panoply.methods.base.grpo import CONTROL as GRPO_CONTROL
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.seeds import torch_rng
from panoply.slots.credit.expected import over_expected
from panoply.slots.model.model import Model
from panoply.slots.model.remembered import Remembered
from panoply.slots.reduce.averages import token_mean
from panoply.slots.sample.groups import LIMITS, greedy_cuts, greedy_groups
from panoply.slots.surrogate.ratios import clip
from panoply.slots.task_memory import TaskMemory
from panoply.slots.update.optimisers import adam
from panoply.units import ALTERING

if TYPE_CHECKING:
    from panoply.loops.seat import Seat
    from panoply.rollout.text import Collector

AT_ONCE = 2048
"""Rollouts of an estimate that are made together."""
SCORED = {"task", "episode", "turn", "context", "position", "action", "logp", *ALTERING}
"""Columns of an answer that is kept to be scored again."""
SAMPLING = LIMITS.keys() - {"prompts", "group", "pool"}


class Tracker(Remembered):
    """Of each task pseudo-counts of what was won, α, and of how often it was tried, α + β; and its last answers."""

    def __init__(self, seat: Seat, half: float, least: float, most: float, estimate: int):
        self.seat, self.half, self.least, self.most, self.estimate = seat, half, least, most, estimate
        self.memory = TaskMemory()
        self.last: Experience | None = None
        """The last answers to each task, with their log-probabilities when the step they were given in was over."""
        self.estimates = 0
        """Rollouts that were spent on nothing but estimates."""

    def expected(self, tasks: Tensor) -> Tensor:
        """v̂ of each task by its id; ½ of one that nothing is known of."""
        won, tried = self._counts(tasks)
        return won / tried

    def _counts(self, tasks: Tensor) -> tuple[Tensor, Tensor]:
        known = self.memory.look(tasks, won=0.5, tried=1.0)
        return known["won"].double(), known["tried"].double()

    # -------------------------------------------------------------- before anybody acts

    def ask(self, tasks: Sequence[Any]) -> Tensor:
        """What to expect of tasks; those that are new are tried first, where estimates are wanted."""
        ids = torch.tensor([task.id for task in tasks])
        if self.estimate:
            new = (self.memory.look(ids, tried=0.0)["tried"] == 0).nonzero().flatten().tolist()
            size = max(1, AT_ONCE // self.estimate)
            for first in range(0, len(new), size):
                self._try([tasks[i] for i in new[first : first + size]])
        return self.expected(ids)

    def _try(self, tasks: Sequence[Any]) -> None:
        """Begin with 1/(1 − ρ_min) tries, as large a share of them won as of real ones and half of one more."""
        method, collect = cast(OnPolicy, self.seat.method), cast(Any, self.seat.collect)
        asked = {
            name: v for name, v in method.sample.settings().items() if name in SAMPLING and v is not None
        }
        rows = collect.episodes(tasks, self.estimate, **asked)
        for annotate in self.seat.annotators:
            rows = annotate(rows)
        rows = _own(rows.with_columns(reward=self.seat.parts["reward"](rows)))
        tried, returns = _by_task(rows)
        tries = torch.full((len(tried),), 1 / (1 - self.least), dtype=torch.double)
        share = (tried.sum(returns) + 0.5) / (tried.count + 1)
        self.memory = self.memory.write(tried.keys, won=tries * share, tried=tries)
        self.estimates += len(returns)

    # -------------------------------------------------------------- after the policy has moved

    def learn(self, collected: Experience, step: int) -> dict[str, float]:
        """α ← ρα + r, β ← ρβ + 1 − r, with a ρ that is the smaller the further the policy has moved on a task."""
        rows = _own(collected)
        asked, returns = _by_task(rows)
        drift, seen = self._drift(asked.keys)
        rho = (2.0 ** (-drift / self.half)).clamp(self.least, self.most)
        won, tried = self._counts(asked.keys)
        won, tried = rho * won + asked.sum(returns), rho * tried + asked.count
        self.memory = self.memory.write(asked.keys, won=won, tried=tried)
        if self.least < self.most:
            self._keep(rows)
        told = {"rho": rho, "drift": drift, "tries": tried, "first": ~seen}
        return {name: float(x.double().mean()) for name, x in told.items()} | {"estimates": self.estimates}

    def _drift(self, tasks: Tensor) -> tuple[Tensor, Tensor]:
        """Of each task the mean |Δ log π| of its last answers since they were given, 0 where there are none."""
        drift, seen = torch.zeros(len(tasks), dtype=torch.double), torch.zeros(len(tasks), dtype=torch.bool)
        known = None if self.last is None else self.last.take(torch.isin(self.last["task"], tasks))
        if known is None or not len(known):
            return drift, seen
        of = known.by("task")
        at = torch.searchsorted(tasks, of.keys)
        drift[at] = of.mean((self._logp(known) - known["logp"]).abs().double())
        seen[at] = True
        return drift, seen

    def _keep(self, rows: Experience) -> None:
        """These answers, in the place of earlier ones to the same tasks."""
        new = _to_score(rows.with_columns(logp=self._logp(rows)))
        if self.last is not None:
            old = self.last.take(~torch.isin(self.last["task"], rows["task"]))
            new = Experience.mix([_to_score(old), new]) if len(old) else new
        self.last = new

    def _logp(self, rows: Experience) -> Tensor:
        found: Tensor = self.seat.policy.score(rows, frozenset())["logp"]
        return found.to(rows["action"].device)

    # -------------------------------------------------------------- saving

    def state(self) -> dict[str, Tensor]:
        kept = {} if self.last is None else episodes.as_tensors(self.last)
        return {**self.memory.state(), **kept, "estimates": torch.tensor(self.estimates)}

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        self.memory = TaskMemory.of(named)
        self.last = episodes.from_tensors(named) if "decisions:action" in named else None
        self.estimates = int(named["estimates"])


def _own(rows: Experience) -> Experience:
    """Without what is learned from again."""
    return rows.take(rows["source"] == OWN) if "source" in rows else rows


def _by_task(rows: Experience) -> tuple[Segments, Tensor]:
    """Episodes by their task, and what each earned."""
    of = rows.by("episode")
    return Segments(of.first(rows["task"])), of.sum(rows["reward"].double())


def _to_score(rows: Experience) -> Experience:
    """No more of some answers than a policy needs to say how likely they are."""
    used, renumbered = distinct(rows["context"])
    kept = {name: column for name, column in rows.decisions.items() if name in SCORED}
    return Experience(Table({**kept, "context": renumbered}), rows.context.take(used))


def _tracker_inert(held: Any, method: Any) -> list[Finding]:
    found = [("half", "least is most, so that drift changes nothing")] if held.least == held.most else []
    if "model:tracker" not in method.sample.needs():
        found.append(("estimate", f"sample.{method.sample.info.name} does not ask it before anybody acts"))
    return found


def _tracker_impossible(held: Any, method: Any) -> list[Finding]:
    return [("least", f"it is above most, which is {held.most:g}")] if held.least > held.most else []


@part(
    "model",
    equation="v̂ = α/(α + β),  α ← ρα + r,  β ← ρβ + 1 − r,  ρ = 2^(−D/{half}) within {least} and {most}",
    gives={"model:tracker", "column:expected"},
    inert=_tracker_inert,
    impossible=_tracker_impossible,
    bounds={
        "half": "above 0",
        "least": "from 0 up to 1",
        "most": "from 0 to 1",
        "estimate": "at least 0",
    },
    cost=lambda held: 0 if held.least == held.most else 2,
)
def tracker(
    seat: Seat, *, half: float = 0.06, least: float = 0.875, most: float = 0.96, estimate: int = 8
) -> Model:
    """What to expect of each task, by all that was ever earned on it; the sooner forgotten the more the policy moved.

    D is the mean |Δ log π| of the last answer's tokens from the end of the step it was given in to the end of this one,
    and 0 on a first visit. Adds the column `expected`, as it is before an episode's own reward counts. Answers to one
    task in one step count one by one.

    half       the D at which half of what was known is forgotten
    least      the least share of it that is kept; equal to `most` it is a constant, and nothing is scored again
    most       the largest
    estimate   episodes by which a task is estimated when it is first asked about; 0: it begins with α = β = ½
    """
    return Model(
        Tracker(seat, half, least, most, estimate), columns=_expected, ask=Tracker.ask, learn=Tracker.learn
    )


def _expected(model: Tracker, experience: Experience) -> dict[str, Column]:
    tasks = experience.by("task")
    return {"expected": tasks.rows(model.expected(tasks.keys)).float()}


def _uncertain_inert(held: Any, method: Any, world: Any) -> list[Finding]:
    found = greedy_cuts(held, method, world)
    return [*found, ("explore", "draw is uniform")] if held.draw == "uniform" else found


def _uncertain_impossible(held: Any, method: Any) -> list[Finding]:
    if held.pool < held.prompts:
        return [("pool", f"a pool of {held.pool} tasks is smaller than a batch of {held.prompts} prompts")]
    return greedy_groups(held, method)


@part(
    "sample",
    equation=lambda held: (
        f"{held.prompts} of the same {held.pool} prompts, drawn "
        + ("alike" if held.draw == "uniform" else f"by √(v̂(1 − v̂)) + {held.explore:g}")
        + f", × {held.group} episodes at temperature {held.temperature:g}"
    ),
    needs={"model:tracker"},
    inert=_uncertain_inert,
    impossible=_uncertain_impossible,
    bounds={**LIMITS, "pool": "at least 1", "explore": "at least 0"},
)
def uncertain(
    collect: Collector,
    *,
    prompts: int = 128,
    group: int = 1,
    pool: int = 1024,
    explore: float = 0.05,
    draw: Literal["uncertain", "uniform"] = "uncertain",
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    max_tokens: int | None = None,
) -> Experience:
    """Prompts of a fixed pool, none twice in a step, the likelier the less certain it is whether they succeed.

    pool      how many training tasks there are to come back to
    explore   added to each weight, so that nothing is given up
    draw      `uniform`: all are as likely
    """
    every = list({task.id: task for task in collect.pool(pool)}.values())
    if len(every) < prompts:
        raise PanoplyError(
            f"The pool of {pool} tasks has {len(every)} different ones, fewer than the {prompts} prompts of a batch: "
            "raise sample.pool, or lower sample.prompts."
        )
    value = collect.models["tracker"](every)
    weight = torch.ones_like(value) if draw == "uniform" else doubt(value) + explore
    names = ("pool", collect.seed, collect.state["groups"])
    # Gumbel noise: the largest of log w + noise are drawn one after another, without putting any back
    noise = -torch.empty_like(weight).exponential_(generator=torch_rng(*names)).log()
    chosen = (weight.log() + noise).topk(prompts).indices.sort().values.tolist()
    return collect.episodes(
        [every[i] for i in chosen],
        group,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        max_tokens=max_tokens,
    )


def doubt(value: Tensor) -> Tensor:
    """√(v(1 − v)), the deviation of a success of that probability."""
    if not bool(((value >= 0) & (value <= 1)).all()):
        odd = float(value[(value - 0.5).abs().argmax()])
        raise PanoplyError(
            f"A task is expected to earn {odd:.3g}, which is no probability: to draw prompts by their uncertainty, "
            "rewards must lie from 0 to 1 (sample.draw=uniform takes any)."
        )
    return (value * (1 - value)).sqrt()


TINY = {
    "sample.prompts": 128,
    "sample.pool": 512,
    "models.tracker.estimate": 0,
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "update.weight_decay": 0.0,
    "update.minibatches": 1,
    "run.steps": 150,
}
CONTROL = {
    **{path: value for path, value in GRPO_CONTROL.items() if path not in ("reduce", "regularise.kl")},
    "sample.prompts": 32,
    "sample.group": 1,
    "sample.pool": 64,
    "sample.draw": "uniform",
    "models.tracker.estimate": 0,
    "update.weight_decay": 0.0,
}
"""One episode from each of 32 starts, which are drawn alike: returns are no probabilities."""


CLAIM = Learns(
    "Where most prompts are all right or all wrong, one answer to each of eight times as many prompts, drawn by doubt "
    "and measured against what is remembered of the prompt, learns more from as many rollouts than GRPO's groups.",
    race="skew",
    also=("success", "total_episodes", "tracker_estimates", "total_decisions"),
    shows=(Shows("mean:degenerate_groups", least=0.4),),
)


PUBLISHED: Published = {
    "verl-project/verl-recipe, spo/spo_ray_trainer.py": {
        "models.tracker.half": 0.06,
        "models.tracker.most": 0.96,
        "sample.explore": 0.05,
        "credit.scale": "batch",
        "credit.epsilon": 1e-8,
    },
    "verl-project/verl-recipe, spo/config/spo_trainer.yaml": {
        "models.tracker.least": 0.875,
        "models.tracker.estimate": 8,
    },
    "verl-project/verl-recipe, spo/train.sh": {
        "sample.prompts": 1024,
        "sample.group": 1,
        "sample.pool": 14000,
        "surrogate.low": 0.2,
        "surrogate.high": 0.28,
        "surrogate.dual": 10.0,
        "regularise.kl.weight": None,
        "update.lr": 1e-6,
        "update.minibatches": 8,
    },
    "verl, trainer/config/ppo_trainer.yaml": {
        "reduce": "token_mean",
        "update.clip": 1.0,
        "update.weight_decay": 0.01,
    },
}


@method(
    "spo-single@1",
    paper=66,
    base="grpo",
    presets={"tiny": TINY, "control": CONTROL},
    claim=CLAIM,
    published=PUBLISHED,
)
def spo_single() -> OnPolicy:
    """Single-stream Policy Optimization (arXiv 2509.13232). A = r − v̂(x), then in deviations of the batch.

    One answer a prompt. What it is measured against is not its group but a memory: v̂ = α/(α + β) of that prompt, of
    which a share ρ is kept when the next reward comes. ρ = 2^(−D/0.06), within 0.875 and 0.96, is the smaller the
    further the policy has moved on the prompt's last answer, so that 8 to 25 rewards are remembered. No answer is
    without an advantage because its group agrees. Prompts are drawn by √(v̂(1 − v̂)) + 0.05.

    What is surprising: v̂ is the one before the answer's own reward counts, or it would be its own baseline in part. It
    needs prompts that come again (`sample.pool`); seen once, each is expected to be ½, and the mean of the batch is
    all that is left. Eight answers to each prompt of the pool are spent on a first estimate; they count as episodes of
    the run (`tracker_estimates`). A constant ρ is `models.tracker.least` = `most`; the other ablations are
    `credit.scale=none` and `sample.draw=uniform`. Its other merit, that a batch of single answers is not held up by
    the longest of a group, shows where many machines sample at once, and is not measured here.
    """
    return grpo().but(
        sample=uncertain(prompts=1024, pool=14000),
        models=(tracker(),),
        credit=over_expected(),
        surrogate=clip(low=0.2, high=0.28, dual=10.0),
        regularise=(),
        reduce=token_mean(),
        update=adam(lr=1e-6, weight_decay=0.01, minibatches=8),
    )
