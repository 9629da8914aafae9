"""POISE: a probe of the policy's own states is the critic, and each answer is measured by what its siblings promise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.evidence.claims import Learns, Shows
from panoply.experience import OWN, Column, Experience, Segments
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.groups import centre, episode_returns
from panoply.slots.model.inside import Entropies, pooled_states, token_entropies
from panoply.slots.model.model import Model
from panoply.slots.model.regressions import Fitted, Kind, fitted
from panoply.slots.model.remembered import Remembered
from panoply.slots.reduce.averages import token_mean
from panoply.slots.sample.groups import groups
from panoply.slots.schedule.schedules import constant
from panoply.slots.surrogate.ratios import clip
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.loops.seat import Seat
    from panoply.policies.text import TextPolicy

Target = Literal["others", "group"]
# ------------------------------------------------------------------ the probe

BLOCKS = ("prompt", "answer", "entropy")


class Probe(Remembered):
    """A regression for each kind of problem, from an answer to what its siblings earn, on the latest answers."""

    def __init__(self, policy: TextPolicy, settings: Mapping[str, Any]):
        self.policy, self.settings = policy, settings
        self.after = _tokens(policy, settings["after"])
        if settings["block"] > policy.model.config.layers:
            raise PanoplyError(
                f"models.probe.block is {settings['block']}, and the model has {policy.model.config.layers} blocks."
            )
        self.steps = 0
        self.rows: dict[str, Tensor] = {}
        """The buffer: of each answer its features, what it is to predict, its group and its kind of problem."""
        self.fits: dict[int, Fitted] = {}
        self._seen: tuple[Tensor, dict[str, Tensor], Tensor] | None = None
        """Of this step's episodes their numbers, features and predictions, from the weights that they were made by."""

    def columns(self, experience: Experience) -> dict[str, Column]:
        """What is expected by each episode's own signs, for its siblings to use; NaN before there is a probe."""
        held, episodes = self.settings, experience.by("episode")
        prompt, answer = pooled_states(self.policy, experience, held["block"], held["last"])
        told = token_entropies(experience, self.after, held["entropies"])
        features = {"prompt": prompt, "answer": answer, "entropy": told, "domain": _domain(experience)}
        value = torch.full((len(episodes),), torch.nan)
        for domain, fit in self.fits.items():
            mine = features["domain"] == domain
            value[mine] = fit([features[name][mine] for name in BLOCKS]).clamp(held["low"], held["high"])
        self._seen = episodes.keys, features, value
        return {"expected": episodes.rows(value)}

    def learn(self, collected: Experience, step: int) -> dict[str, float]:
        """Keep this step's answers with their targets, and fit anew; advantages were given before."""
        assert self._seen is not None
        self.steps += 1
        (keys, features, value), self._seen = self._seen, None
        returns, siblings = episode_returns(collected)
        target = crossed_targets(returns, siblings, self.settings["target"])
        episodes = collected.by("episode")
        group, source = episodes.first(collected["group"]), episodes.first(collected["source"])
        usable = (siblings.rows(siblings.count) > 1) & (source == OWN)
        at = torch.searchsorted(keys, episodes.keys)[usable]
        new = {name: column[at] for name, column in features.items()}
        self._keep({**new, "target": target[usable], "group": group[usable]})
        if self.steps >= self.settings["bootstrap"]:
            for domain in Segments(new["domain"]).keys.tolist():
                self._fit(domain)
        found = {"rows": float(len(self.rows["target"]))}
        known = value[at].isfinite()
        if bool(known.any()):
            off, spread = value[at][known] - target[usable][known], target[usable][known].std(correction=0)
            found["error"] = float(off.square().mean().sqrt())
            found["skill"] = 1 - (found["error"] / float(spread)) ** 2 if float(spread) > 0 else 0.0
        return found

    def _keep(self, new: dict[str, Tensor]) -> None:
        """The latest rows of each kind of problem, by whole groups."""
        rows = {n: torch.cat([self.rows[n], x]) for n, x in new.items()} if self.rows else new
        kept = torch.zeros(len(rows["target"]), dtype=torch.bool)
        for domain in Segments(rows["domain"]).keys.tolist():
            mine = (rows["domain"] == domain).nonzero().flatten()
            groups_ = Segments(rows["group"][mine])
            newest = groups_.count.flip(0).cumsum(0).flip(0) <= self.settings["buffer"]
            kept[mine] = groups_.rows(newest)
        self.rows = {name: column[kept] for name, column in rows.items()}

    def _fit(self, domain: int) -> None:
        held, mine = self.settings, self.rows["domain"] == domain
        if not bool(mine.any()):
            return
        most = (held["prompt_axes"], held["answer_axes"], 0)
        blocks = [self.rows[name][mine] for name in BLOCKS]
        self.fits[domain] = fitted(blocks, self.rows["target"][mine], most, held["alpha"], held["kind"])

    # -------------------------------------------------------------- saving

    def state(self) -> dict[str, Tensor]:
        fits = {f"fit:{d}:{n}": x for d, fit in self.fits.items() for n, x in fit.tensors.items()}
        return {"steps": torch.tensor(self.steps), **{f"rows:{n}": x for n, x in self.rows.items()}, **fits}

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        self.steps = int(named["steps"])
        self.rows = {n.removeprefix("rows:"): x for n, x in named.items() if n.startswith("rows:")}
        found: dict[int, dict[str, Tensor]] = {}
        for name, tensor in named.items():
            kind, _, rest = name.partition(":")
            if kind == "fit":
                domain, _, of = rest.partition(":")
                found.setdefault(int(domain), {})[of] = tensor
        self.fits = {domain: Fitted(self.settings["kind"], tensors) for domain, tensors in found.items()}


def crossed_targets(returns: Tensor, siblings: Segments, target: Target) -> Tensor:
    """What an answer's signs are to predict: what the others of its group earned, or the group with itself in it."""
    if target == "group":
        return siblings.rows(siblings.mean(returns))
    return returns - centre(returns, siblings, "leave_one_out")


def _domain(experience: Experience) -> Tensor:
    episodes = experience.by("episode")
    if "domain" in experience:
        return episodes.first(experience["domain"])
    return torch.zeros(len(episodes), dtype=torch.long)


def _tokens(policy: TextPolicy, after: str | None) -> list[int]:
    if after is None:
        return []
    try:
        return policy.tokenizer.encode(after)
    except PanoplyError as error:
        raise PanoplyError(
            f"models.probe.after is {after!r}, by which no answer can end its reasoning: {error} Where answers are not "
            "in two parts it is none."
        ) from None


def _probe_impossible(held: Any, method: Any) -> list[Finding]:
    found = []
    if held.low >= held.high:
        found.append(("low", f"it is not below high, which is {held.high:g}"))
    if not method.acts_alone:
        found.append(("", "another self acts, whose states the policy does not have"))
    return found


@part(
    "model",
    equation=lambda held: (
        f"g(z) = {held.kind} of [{held.prompt_axes} axes of h_prompt, {held.answer_axes} of h_answer, entropies] "
        f"within {held.low:g} and {held.high:g}, fitted to "
        + ("what the others of the group earned" if held.target == "others" else "the group's mean")
    ),
    needs={"world:text", "engine:entropy"},
    gives={"column:expected"},
    impossible=_probe_impossible,
    bounds={
        "block": "at least 1",
        "last": "at least 1",
        "prompt_axes": "at least 0",
        "answer_axes": "at least 0",
        "alpha": "above 0",
        "buffer": "at least 2",
        "bootstrap": "at least 0",
        "low": "any number",
        "high": "any number",
    },
    cost=lambda held: 1,
)
def probe(
    seat: Seat,
    *,
    kind: Kind = "ridge",
    alpha: float = 100.0,
    target: Target = "others",
    block: int = 19,
    last: int = 10,
    prompt_axes: int = 32,
    answer_axes: int = 64,
    entropies: Entropies = "mean",
    after: str | None = "</think>",
    buffer: int = 4096,
    bootstrap: int = 16,
    low: float = 0.0,
    high: float = 1.0,
) -> Model:
    """What an answer's own states and entropies say about its prompt: the column `expected`, one value an episode.

    It is an estimate from the outcome of another answer, so that a group's members can be measured by each other's. One
    probe and buffer for each kind of problem (`domain`). Refitted at the end of every step, when advantages are given.

    kind          ridge, logistic, or an MLP of 64 units
    alpha         how much weights are held down
    target        what it is fitted to: what the others of the group earned, or the mean of the whole group
    block         after how many blocks of the policy its states are read
    last          of how many last tokens of prompt and answer the mean is taken
    prompt_axes, answer_axes   principal components of each, over all of the buffer; 0: the states as they are
    entropies     of tokens: their mean, or also the last, the largest and the least
    after         what ends the reasoning of an answer, whose entropies before and after count by themselves
    buffer        the latest answers that it is fitted to
    bootstrap     steps in which it only collects; nothing is expected till then
    low, high     what it may predict
    """
    settings = {
        "kind": kind, "alpha": alpha, "target": target, "block": block, "last": last, "prompt_axes": prompt_axes,
        "answer_axes": answer_axes, "entropies": entropies, "after": after, "buffer": buffer,
        "bootstrap": bootstrap, "low": low, "high": high,
    }  # fmt: skip
    return Model(Probe(cast(Any, seat.policy), settings), columns=Probe.columns, learn=Probe.learn)


def _crossed_impossible(held: Any, method: Any) -> list[Finding]:
    if method.sample.settings().get("group") == 1:
        return [("", "an answer is measured by the others of its group, and sample.group is 1")]
    return []


@part(
    "credit",
    equation="A_i = R_i − mean of g(z_j) over the others j of the group",
    needs={"column:expected"},
    impossible=_crossed_impossible,
)
def crossed(experience: Experience) -> Tensor:
    """An episode's return minus what the others of its group promise, which its own actions had no part in.

    Where nothing is expected yet (NaN), what the others earned takes its place (RLOO); an episode on its own gets 0.
    """
    episodes = experience.by("episode")
    returns, siblings = episode_returns(experience)
    value = episodes.first(experience["expected"]).to(returns.dtype)
    promised = value - centre(value, siblings, "leave_one_out")
    earned = returns - centre(returns, siblings, "leave_one_out")
    advantage = returns - torch.where(promised.isfinite(), promised, earned)
    return episodes.rows(advantage.masked_fill(siblings.rows(siblings.count) == 1, 0.0))


TINY = {
    "sample.prompts": 64,
    "models.probe.block": 1,
    "models.probe.after": None,
    "models.probe.bootstrap": 4,
    "models.probe.buffer": 1024,
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.weight_decay": 0.0,
    "update.minibatches": 1,
    "run.steps": 150,
}
"""Answers have no part that is reasoning, and a small policy moves fast: what it said ten steps ago is old."""


CLAIM = Learns(
    "Among problems of mixed difficulty, pairs of answers to four times as many prompts, each measured by what the "
    "other's states promise, learn more from as many answers than GRPO's groups of eight, of which many teach nothing.",
    race="frontier",
    also=("success", "probe_skill", "gradient_norm", "total_decisions"),
    shows=(Shows("mean:degenerate_groups", least=0.3),),
)


PUBLISHED: Published = {
    "holi-lab/POISE, src/poise/config/estimator_fit_config_qwen3_4b.json": {
        "models.probe.kind": "ridge",
        "models.probe.alpha": 100.0,
        "models.probe.target": "others",
        "models.probe.prompt_axes": 32,
        "models.probe.answer_axes": 64,
        "models.probe.low": 0.0,
        "models.probe.high": 1.0,
    },
    "holi-lab/POISE, src/poise/config/feature_builder_config_qwen3_4b.json": {
        "models.probe.block": 19,
        "models.probe.last": 10,
        "models.probe.entropies": "mean",
    },
    "holi-lab/POISE, scripts/train/_poise.sh": {
        "sample.prompts": 256,
        "sample.group": 2,
        "models.probe.buffer": 4096,
        "models.probe.bootstrap": 16,
    },
    "holi-lab/POISE, scripts/train/lib/config.sh": {
        "surrogate.low": 0.2,
        "surrogate.high": 0.28,
        "surrogate.dual": 10.0,
        "regularise.kl.weight": None,
        "reduce": "token_mean",
        "update.lr": 1e-6,
        "update.weight_decay": 0.01,
        "update.schedule.warmup": 10,
        "update.minibatches": 8,
        "update.clip": 1.0,
    },
}
"""Buffers of code and of other problems have 3,072 rows there. Its principal components are randomised, here exact."""


@method("poise@1", paper=59, base="grpo", presets={"tiny": TINY}, claim=CLAIM, published=PUBLISHED)
def poise() -> OnPolicy:
    """POISE (arXiv 2605.07579). A_1 = r_1 − g(z_2), A_2 = r_2 − g(z_1): two answers, each the other's critic.

    A small regression g reads what the policy itself thought: states at the end of the prompt and of the answer, and
    how sure its tokens were. Two answers a prompt are enough, so that a step can have four times as many prompts as
    GRPO's; no group is wasted because its answers agree, and there is no critic to train but a ridge regression.

    What is surprising: g(z_1) would predict r_1 far better, and may not be used for it: z_1 depends on the actions
    whose baseline it would be, and the gradient would be biased. z_2 is independent of answer 1, so that
    E[∇log π(y_1)·g(z_2)] = 0 whatever g is. It is fitted across, too: from z_1 to r_2. Advantages are of the probe as
    it was before this step's rewards, and of states of the very weights that answered. The first steps have no probe
    yet and are RLOO. Text alone: a control policy has no states to read. The release's ensembles are not built.
    """
    return grpo().but(
        sample=groups(prompts=256, group=2),
        models=(probe(),),
        credit=crossed(),
        surrogate=clip(low=0.2, high=0.28, dual=10.0),
        regularise=(),
        reduce=token_mean(),
        update=adam(lr=1e-6, weight_decay=0.01, minibatches=8, schedule=constant(warmup=10)),
    )
