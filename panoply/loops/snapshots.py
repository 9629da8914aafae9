"""Other selves of the policy: kept, renewed by their rules, compared with, and let act."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from panoply import selves
from panoply.experience import OWN, Experience
from panoply.kinds import Policy
from panoply.policies import divergence
from panoply.policies.low_rank import merge
from panoply.policies.moving import take
from panoply.regimes import Method

PREFIX = "snapshot:"
"""Of the names under which a run saves the weights of snapshots."""
LOOKED_AT = 8
"""Episodes of each actor on which it is asked again how likely they were."""
Weights = dict[str, Tensor]


class Snapshots:
    """Other selves of the policy, by their names (see panoply/selves.py); the column `X@NAME` is output X of NAME.

    `own@NAME` is what terms of the policy itself compare with where a temperature or a cut made the distribution
    sampled from another one; `distribution@NAME` is all that determines a distribution.
    """

    def __init__(self, method: Method, policy: Policy, reference: Callable[[], Policy]):
        self.policy, self.method, needs = policy, method, method.needs()
        self.actors = selves.actors(needs)
        self.own = method.snapshots("policy")
        self.distributions = sorted({to for _, _, to in divergence.parse(needs)})
        self.asked = _asked(needs)
        """Outputs by snapshot, of the distribution that was sampled from."""
        self._compared = set(method.snapshots("sampled"))
        self.compares = bool(self.asked or self.own or self.distributions)
        """Whether any column is asked of them."""
        named = selves.named(needs)
        self.kept = {one.name: Kept(one, policy) for one in named if one.kind in KEPT}
        self.reference = reference() if any(one.kind == "reference" for one in named) else None
        self._mixed = {one.name: one for one in named if one.kind == "mix"}

    def policy_of(self, name: str) -> Any:
        if name in self._mixed:
            from panoply.rollout.mixture import mixed

            one = self._mixed[name]
            return mixed(cast(Any, self.policy), self.policy_of(one.other), one.number)
        if name == "reference":
            return self.reference
        return self.kept[name].policy if name in self.kept else self.policy

    def step_of(self, name: str) -> int:
        """The step whose policy it is; of a mean and of a mixture, that of its newest."""
        return self.kept[name].step if name in self.kept else 0

    def begin(self, step: int) -> None:
        """Where parts act in phases: be asked for what those of this step need."""
        self.asked = _asked(self.method.needs(step))

    # -------------------------------------------------------------- columns

    @torch.no_grad()
    def score(self, experience: Experience) -> Experience:
        """Add the columns that the method's parts need."""
        altered = experience.altered
        columns: dict[str, Any] = {}
        for name, outputs in sorted(self.asked.items()):
            wanted = outputs - {"logp"} if altered and name not in self._compared else outputs
            if wanted:
                found = self.policy_of(name).score(experience, frozenset(wanted))
                columns |= {f"{output}@{name}": found[output] for output in sorted(wanted)}
        for name in self.own if altered else ():
            columns[f"own@{name}"] = self.policy_of(name).score(experience.unaltered(), frozenset())["logp"]
        for name in self.distributions:
            columns[f"distribution@{name}"] = self.policy.remember(name, self.policy_of(name), experience)
        beside = experience["action"].device
        return experience.with_columns(**{name: column.to(beside) for name, column in columns.items()})

    @torch.no_grad()
    def gap(self, experience: Experience, now: int) -> float | None:
        """Where several may act: the mean |Δ log-probability| between sampling and scoring, each by who acted.

        The largest over actors, on a few episodes of each; of the learner on episodes that it has played as it is
        `now`. None where there are none.
        """
        gaps: list[float] = []
        experience = experience.take(experience["source"] == OWN)
        for number, name in enumerate([selves.LEARNER, *self.actors]):
            rows = experience.take(experience["actor"] == number) if "actor" in experience else experience
            if name == selves.LEARNER and "version" in rows:
                whole = (
                    rows.by("episode").min(rows["version"]) == now
                )  # earlier weights stay in what it has read
                rows = rows.take(rows.by("episode").rows(whole))
            if not len(rows):
                continue
            episodes = rows.by("episode")
            rows = rows.take(episodes.index < LOOKED_AT)
            policy = self.policy if name == selves.LEARNER else self.policy_of(name)
            scored = policy.score(rows, frozenset())["logp"]
            gaps.append(float((scored - rows["logp"].to(scored.device)).abs().mean()))
        return max(gaps, default=None)

    # -------------------------------------------------------------- over time

    def renew(self, step: int, best: bool) -> None:
        """After a step: take over what the rules say. `best`: whether it did best on held-out problems so far."""
        for kept in self.kept.values():
            kept.renew(step, best)

    def state(self) -> Weights:
        return {
            f"{PREFIX}{name}:{key}": w for name, kept in self.kept.items() for key, w in kept.state().items()
        }

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        for name, kept in self.kept.items():
            prefix = f"{PREFIX}{name}:"
            kept.load_state({k.removeprefix(prefix): w for k, w in named.items() if k.startswith(prefix)})


def _asked(needs: Iterable[str]) -> dict[str, set[str]]:
    """Outputs that columns are made of, by snapshot."""
    found: dict[str, set[str]] = defaultdict(set)
    for need in needs:
        output, _, name = need.partition("@")
        if name and not need.startswith((selves.ACTS, divergence.NEED)):
            found[name].add(output)
    return found


KEPT = ("behind", "past", "ema", "best")


class Kept:
    """A self with weights of its own, of some step.

    They are written in place, so that whoever samples from it (on a GPU by a graph that reads fixed addresses) sees
    them without being told.
    """

    def __init__(self, rule: selves.Self, policy: Policy):
        self.rule, self.learner, self.policy, self.step = rule, policy, policy.copy(), 0
        self.weights = self._weights(self.policy)
        self.waiting: list[Weights] = []
        """Of `past`: the selves that come next, the earliest first."""
        narrow = rule.kind == "ema" and any(w.element_size() < 4 for w in self.weights.values())
        self.mean = {n: _wide(w) for n, w in self.weights.items()} if narrow else self.weights
        """Of `ema`: in float32, or small changes of narrower weights would be lost."""

    def renew(self, step: int, best: bool) -> None:
        kind, number = self.rule.kind, self.rule.number
        if kind == "ema":
            self.step = step
            self._mix(number)
        elif kind == "past":
            self.waiting.append({n: w.detach().clone() for n, w in self._weights(self.learner).items()})
            self.step = max(0, step - int(number))
            if len(self.waiting) > number:
                self._take(self.waiting.pop(0))
        elif best if kind == "best" else step % int(number) == 0:
            self.step = step
            self._take(self._weights(self.learner))

    def _take(self, weights: Weights) -> None:
        take(self.policy.model, {name: weights[name] for name in self.weights})

    @torch.no_grad()
    def _mix(self, share: float) -> None:
        """(1 − share)·mean + share·now; what only counts, such as how often something was seen, is taken over."""
        now = self._weights(self.learner)
        for name, mean in self.mean.items():
            if mean.is_floating_point() and now[name].requires_grad:
                mean.lerp_(now[name].to(mean.dtype), share)
            else:
                mean.copy_(now[name])
            self.weights[name].copy_(mean)
        merge(self.policy.model)

    def _weights(self, policy: Any) -> Weights:
        """What changes in a run: weights that learn, and what a normalisation has seen."""
        learning = {n for n, p in self.learner.named_parameters() if p.requires_grad}
        buffers = dict(policy.model.named_buffers())
        return {n: p for n, p in policy.named_parameters() if n in learning} | buffers

    def state(self) -> Weights:
        """Weights by place and name: `now:` those it has, `mean:` of a mean in float32, `0:`, `1:`, … those waiting."""
        places = {"now": self.weights, **{str(i): weights for i, weights in enumerate(self.waiting)}}
        if self.mean is not self.weights:
            places["mean"] = self.mean
        named = {f"{place}:{n}": w.detach() for place, weights in places.items() for n, w in weights.items()}
        return {**named, "step": torch.tensor(self.step)}

    @torch.no_grad()
    def load_state(self, named: Mapping[str, Tensor]) -> None:
        places: dict[str, Weights] = defaultdict(dict)
        for key, weight in named.items():
            place, _, name = key.partition(":")
            places[place][name] = weight
        self.step = int(places.pop("step")[""])
        self._take(places.pop("now"))
        if self.mean is not self.weights:
            for name, mean in places.pop("mean").items():
                self.mean[name].copy_(mean)
        device = next(iter(self.weights.values())).device
        waiting = [places[place] for place in sorted(places, key=int)]
        self.waiting = [{n: w.clone().to(device) for n, w in weights.items()} for weights in waiting]


def _wide(weight: Tensor) -> Tensor:
    """A copy in float32 or wider, never the weight itself: both are saved, and a file holds no memory twice."""
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)
