"""V0: what a policy will earn on a prompt, told by what it has earned on others; rollouts go where groups differ."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional

from panoply.evidence.claims import Learns, Shows
from panoply.experience import OWN, Column, Experience, Ragged, Segments, Table
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.seeds import torch_rng
from panoply.slots.model.in_context import QueryAdapter
from panoply.slots.model.model import Model
from panoply.slots.model.prompts import asked_about
from panoply.slots.model.remembered import Remembered
from panoply.slots.reduce.averages import prompt_mean
from panoply.slots.sample.groups import LIMITS, greedy_cuts, greedy_groups

if TYPE_CHECKING:
    from panoply.loops.seat import Seat
    from panoply.rollout.text import Collector

RIGHT = 0.5
"""A prompt counts as one that a policy can do if its mean score is at least this."""
SPARE = 4
"""How many times the support is kept in the log, since what is asked about again does not count."""
Context = Literal["recent", "first"]


class Generalist(Remembered):
    """A frozen encoder of prompts, an adapter that learns, and a log of what the policy earned on prompts."""

    def __init__(self, encoder: Any, seed: int, settings: Mapping[str, Any]):
        self.encoder, self.seed, self.settings = encoder, seed, settings
        shape = (settings[name] for name in ("queries", "dim", "heads", "bottleneck", "dropout"))
        self.adapter = QueryAdapter(seed, encoder.model.config.width, *shape)
        self.optimiser = torch.optim.AdamW(
            self.adapter.parameters(), lr=settings["lr"], weight_decay=settings["weight_decay"]
        )
        self.prompts = Ragged.from_lists([])
        self.tasks, self.scores = torch.zeros(0, dtype=torch.long), torch.zeros(0)
        """The log: prompts, of which task, and the mean score of the policy's answers. The latest stand last."""

    # -------------------------------------------------------------- what it says

    def ask(self, tasks: Sequence[Any]) -> Tensor:
        """P(success) of tasks before anybody acts."""
        ids = torch.tensor([task.id for task in tasks], dtype=torch.long)
        return self.expects(Ragged.from_lists([list(task.prompt) for task in tasks]), ids)

    @torch.no_grad()
    def expects(self, prompts: Ragged, tasks: Tensor) -> Tensor:
        return self._logits(prompts, tasks).sigmoid()

    def _logits(self, prompts: Ragged, tasks: Tensor, dice: torch.Generator | None = None) -> Tensor:
        """From the support: prompts of the log, none of which is among those that are asked about."""
        others = (~torch.isin(self.tasks, tasks)).nonzero().flatten()
        size = self.settings["support"]
        others = others[-size:] if self.settings["context"] == "recent" else others[:size]
        states, there = self._states(Ragged.cat([self.prompts.take(others), prompts]))
        known, asked = self.adapter(states, there, dice).tensor_split([len(others)])
        return self.adapter.logits(known, self.scores[others] >= RIGHT, asked)

    @torch.no_grad()
    def _states(self, prompts: Ragged) -> tuple[Tensor, Tensor]:
        """[prompts, tokens, width] of the encoder, and which tokens are there."""
        lengths = prompts.lengths
        row = torch.arange(len(lengths)).repeat_interleave(lengths)
        inside = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
        asked = {"context": row, "position": inside + 1, "action": torch.zeros_like(row)}
        found = self.encoder.states(Experience(Table(asked), Table({"tokens": prompts}))).float().cpu()
        states = torch.zeros(len(lengths), int(lengths.max()), found.shape[-1])
        states[row, inside] = found
        return states, torch.arange(states.shape[1]) < lengths[:, None]

    def columns(self, experience: Experience) -> dict[str, Column]:
        """`expected` of each row's prompt: it depends on the prompt and on earlier steps alone."""
        prompts, tasks, of = asked_about(experience)
        return {"expected": of.rows(self.expects(prompts, tasks)).float()}

    # -------------------------------------------------------------- what it learns

    def learn(self, collected: Experience, step: int) -> dict[str, float]:
        """Try to foretell this step from the log, learn from that, then write the step down."""
        rows = collected.take(collected["source"] == OWN) if "source" in collected else collected
        prompts, tasks, of = asked_about(rows)
        episodes = rows.by("episode")
        groups = Segments(episodes.first(of.index))
        scores = groups.mean(episodes.sum(rows["reward"].float())).clamp(0, 1)
        value = self.expects(prompts, tasks)
        found = {"brier": float((value - scores).square().mean()), "spread": float(value.std(correction=0))}
        found["rows"] = float(len(self.scores))
        losses = [self._fit(prompts, tasks, scores, step, i) for i in range(self.settings["fit"])]
        if done := [loss for loss in losses if loss is not None]:
            found["loss"] = sum(done) / len(done)
        self.prompts = Ragged.cat([self.prompts, prompts])
        self.tasks, self.scores = torch.cat([self.tasks, tasks]), torch.cat([self.scores, scores])
        every, size = torch.arange(len(self.tasks)), SPARE * self.settings["support"]
        kept = every[-size:] if self.settings["context"] == "recent" else every[:size]
        self.prompts, self.tasks, self.scores = self.prompts.take(kept), self.tasks[kept], self.scores[kept]
        return found

    @torch.enable_grad()
    def _fit(self, prompts: Ragged, tasks: Tensor, scores: Tensor, step: int, i: int) -> float | None:
        """One step on pairs of prompts of which the policy could do one, or none where there are no such pairs."""
        dice = torch_rng("generalist", self.seed, step, i)
        right = scores >= RIGHT
        sides = [side.nonzero().flatten() for side in (right, ~right)]
        if not all(len(side) for side in sides):
            return None
        drawn = [side[torch.randint(len(side), (self.settings["pairs"],), generator=dice)] for side in sides]
        chosen = torch.cat(drawn)
        loss = pair_loss(
            self._logits(prompts.take(chosen), tasks[chosen], dice), scores[chosen], self.settings["alpha"]
        )
        if not loss.requires_grad:  # a support without both sides says the same of all prompts
            return None
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.adapter.parameters(), 1.0)
        self.optimiser.step()
        return float(loss.detach())

    # -------------------------------------------------------------- saving

    def state(self) -> dict[str, Tensor]:
        log = {"tokens": self.prompts.values, "offsets": self.prompts.offsets, "tasks": self.tasks}
        kept = {f"adapter:{name}": tensor for name, tensor in self.adapter.state_dict().items()}
        for i, held in self.optimiser.state_dict()["state"].items():
            kept |= {f"optimiser:{i}:{name}": torch.as_tensor(x) for name, x in held.items()}
        return {**log, "scores": self.scores, **kept}

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        self.prompts = Ragged(named["tokens"], named["offsets"])
        self.tasks, self.scores = named["tasks"], named["scores"]
        own = {n.removeprefix("adapter:"): x for n, x in named.items() if n.startswith("adapter:")}
        self.adapter.load_state_dict(own)
        held: dict[int, dict[str, Tensor]] = {}
        for name, tensor in named.items():
            if name.startswith("optimiser:"):
                _, number, key = name.split(":")
                held.setdefault(int(number), {})[key] = tensor
        groups = self.optimiser.state_dict()["param_groups"]
        self.optimiser.load_state_dict({"state": held, "param_groups": groups})


def pair_loss(logits: Tensor, scores: Tensor, alpha: float) -> Tensor:
    """Of log-odds whose first half is of prompts that went well and whose second half of others, pair by pair."""
    well, badly = logits.tensor_split(2)
    ordered = -functional.logsigmoid(well - badly).mean()
    return alpha * ordered + (1 - alpha) * functional.binary_cross_entropy_with_logits(
        logits, scores.double()
    )


LEARNING = ("dropout", "pairs", "lr", "weight_decay", "alpha")


def _generalist_impossible(held: Any, method: Any) -> list[Finding]:
    if held.dim % held.heads:
        return [
            (
                "heads",
                f"they share {held.dim} numbers of a query (models.generalist.dim), which do not divide",
            )
        ]
    return []


@part(
    "model",
    equation="V(x; π) = kernel logistic regression of {support} prompts and π's scores on them, at adapter(encoder(x))",
    needs={"world:text"},
    gives={"model:generalist", "column:expected"},
    inert=lambda held, method: [(name, "fit is 0") for name in LEARNING if not held.fit],
    impossible=_generalist_impossible,
    bounds={
        **dict.fromkeys(("queries", "dim", "heads", "bottleneck", "support", "pairs"), "at least 1"),
        "fit": "at least 0",
        "dropout": "from 0 up to 1",
        "lr": "above 0",
        "weight_decay": "at least 0",
        "alpha": "from 0 to 1",
    },
)
def generalist(
    seat: Seat,
    *,
    queries: int = 168,
    dim: int = 6,
    heads: int = 3,
    bottleneck: int = 128,
    dropout: float = 0.2,
    support: int = 256,
    context: Context = "recent",
    fit: int = 1,
    pairs: int = 4,
    alpha: float = 0.25,
    lr: float = 2e-4,
    weight_decay: float = 0.01,
) -> Model:
    """What a policy will earn on prompts it has not seen, from what it has just earned on others: a value in context.

    The encoder is the policy as the run began, and stays so. Adds the column `expected`. Metrics: `generalist_brier`,
    the mean squared error of what it foretold of a step, and `generalist_spread`, how far it tells prompts apart.

    queries, dim, heads, bottleneck, dropout   of the adapter that makes vectors of a prompt's token states
    support   how many prompts of the log it looks at, never one that it is asked about
    context   which of them: the latest, or the first, for a comparison with a value of an old policy
    fit       steps by which the adapter learns in each step of the policy; 0: it stays as it was drawn
    pairs     prompts that went well, and as many that did not, in each of them
    alpha     the share of the loss that orders pairs; the rest is cross-entropy
    """
    settings = {
        "queries": queries, "dim": dim, "heads": heads, "bottleneck": bottleneck, "dropout": dropout,
        "support": support, "context": context, "fit": fit, "pairs": pairs, "alpha": alpha, "lr": lr,
        "weight_decay": weight_decay,
    }  # fmt: skip
    encoder = seat.open(seat.options.model)
    wanted = "column:expected" in cast(OnPolicy, seat.method).credit.needs()
    return Model(
        Generalist(encoder, seat.options.seed, settings),
        columns=Generalist.columns if wanted else None,
        ask=Generalist.ask,
        learn=Generalist.learn,
    )


# ------------------------------------------------------------------ rollouts


def differs(p: Tensor, n: Tensor | int) -> Tensor:
    """How likely n answers, each right with probability p, are neither all right nor all wrong."""
    return 1 - p**n - (1 - p) ** n


def allocation(p: Tensor, total: int, least: int, most: int, weigh: str = "alike") -> list[int]:
    """Sizes n_i of groups, `total` in all: the largest Σ w(p_i)·differs(p_i, n_i), one answer after another.

    What one more answer adds falls with n, so that the best next one is always part of the best whole.
    """
    weight = p * (1 - p) if weigh == "doubt" else torch.ones_like(p)

    def gain(i: int, n: int) -> float:
        return float(weight[i] * (differs(p[i], n + 1) - differs(p[i], n)))

    sizes = [least] * len(p)
    queue = [(-gain(i, least), i) for i in range(len(p)) if least < most]
    heapq.heapify(queue)
    for _ in range(total - least * len(p)):
        _, i = heapq.heappop(queue)
        sizes[i] += 1
        if sizes[i] < most:
            heapq.heappush(queue, (-gain(i, sizes[i]), i))
    return sizes


def _allocated_impossible(held: Any, method: Any) -> list[Finding]:
    if not held.least <= held.group <= held.most:
        return [
            ("group", f"{held.prompts} groups of {held.least} to {held.most} episodes have another mean size")
        ]
    return greedy_groups(held, method)


@part(
    "sample",
    equation=lambda held: (
        f"{held.prompts} prompts × {held.group} episodes on average, {held.least} to {held.most} each where groups are "
        f"likeliest to differ, at temperature {held.temperature:g}"
    ),
    needs={"model:generalist"},
    inert=greedy_cuts,
    impossible=_allocated_impossible,
    bounds={**LIMITS, "least": "at least 2", "most": "at least 2"},
)
def allocated(
    collect: Collector,
    *,
    prompts: int = 16,
    group: int = 8,
    least: int = 2,
    most: int = 32,
    weigh: Literal["alike", "doubt"] = "alike",
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    max_tokens: int | None = None,
) -> Experience:
    """Some tasks, and for each as many episodes as are worth it, `prompts` × `group` in all.

    With p from the model, a group of n differs with probability 1 − pⁿ − (1 − p)ⁿ; as many groups as possible shall.
    Average by prompt (`reduce=prompt_mean`), or prompts that are asked more often count for more.

    group   the mean number of episodes
    least   of each prompt, so that there is something to compare with
    weigh   `doubt`: a group counts by p(1 − p)
    """
    tasks = collect.tasks(prompts)
    sizes = allocation(collect.models["generalist"](tasks).double(), prompts * group, least, most, weigh)
    return collect.episodes(
        tasks,
        sizes,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        max_tokens=max_tokens,
    )


TINY = {
    "sample.group": 8,
    "sample.most": 32,
    "models.generalist.queries": 8,
    "models.generalist.bottleneck": 32,
    "surrogate.high": 0.28,
    "regularise.kl": "none",
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "run.steps": 150,
}


CLAIM = Learns(
    "Among problems of mixed difficulty, dealing out the same number of answers to prompts by what a value in context "
    "expects of them learns more than GRPO's equal groups.",
    race="frontier",
    also=("success", "mean:degenerate_groups", "generalist_brier", "total_decisions"),
    shows=(Shows("mean:degenerate_groups", least=0.3),),
)


PUBLISHED: Published = {
    "Now-Join-Us/V0, main_train.sh": {
        "models.generalist.queries": 168,
        "models.generalist.dim": 6,
        "models.generalist.heads": 3,
        "models.generalist.bottleneck": 128,
        "models.generalist.dropout": 0.2,
        "models.generalist.support": 256,
        "models.generalist.pairs": 4,
        "models.generalist.alpha": 0.25,
        "models.generalist.lr": 2e-4,
        "models.generalist.weight_decay": 0.01,
    },
}
"""Of the value alone: no code of its use in training is released. The greedy rule is reconstructed from a summary, and
so are `sample.least`, `most` and `weigh`."""


@method("v0@1", paper=35, base="grpo", presets={"tiny": TINY}, claim=CLAIM, published=PUBLISHED)
def v0() -> OnPolicy:
    """V0, a generalist value model (arXiv 2602.03584). GRPO with n_i answers where 1 − p^n − (1 − p)^n gains most.

    V(x; π) foretells how often a policy succeeds on a prompt from a list of other prompts and how that very policy did
    on them. When the policy moves, only the list changes: nothing is trained again to follow it. Here the list is the
    latest steps of the run, and V says how many answers each new prompt gets, at least two.

    What is surprising: a prompt may never be in the list it is judged by, and answers of earlier selves make a value
    of an earlier self. It depends on prompts and the past alone, so it can be a baseline (`--credit over_expected`).

    Three things differ from what is published: the head is a kernel logistic regression and not TabPFN, a large
    pretrained network, but gradients flow through it to the adapter likewise; the encoder is the policy as it began and
    not an embedding model; and the adapter is not trained beforehand on many policies but learns along
    (`models.generalist.fit`). A router among several models, and the release's clustering of the list, are not built.
    """
    return grpo().but(sample=allocated(group=64, most=256), models=(generalist(),), reduce=prompt_mean())
