"""SPEAR: learn the ropes, then trust the wins. Self-imitation of good episodes, on a bag of tricks for GRPO."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from panoply.batch import Batch, Values
from panoply.episodes import as_tensors, earlier, from_tensors
from panoply.evidence.claims import Ranks, Shows
from panoply.evidence.races import find
from panoply.experience import OWN, Experience
from panoply.methods.base.dr_grpo import TINY as DR_TINY
from panoply.methods.base.dr_grpo import dr_grpo
from panoply.parts import Finding, Part, part, show_value
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.seeds import torch_rng
from panoply.slots.credit.groups import episode_returns, group
from panoply.slots.reduce.averages import constant
from panoply.slots.reward.shaping import annealed
from panoply.slots.reward.shaping import sum as both
from panoply.slots.reward.signals import signal
from panoply.slots.sample.groups import groups
from panoply.slots.schedule.schedules import half_cosine
from panoply.slots.select.filters import overlong_filter
from panoply.slots.surrogate.ratios import clip, needs_against
from panoply.slots.update.optimisers import adam

NOW, AGAIN = 0, 1
"""Values of `stage`: this step's rows, and remembered ones, which are learned from after them."""
FULL = 1.5
"""The memory is learned from when it holds more usable episodes than so many times what is drawn."""
_CREDIT, _RISING = group(scale="none"), half_cosine(first=0.0, last=1.0, steps=200)


# ------------------------------------------------------------------ the memory


def _impossible(held: Any, method: Any) -> list[Finding]:
    if "column:recalibrated" not in method.credit.needs():
        return [("", "the credit does not look at what is recalibrated: take credit=spear/recalibrated")]
    if method.select[-1].info.name != held.info.name:
        return [("", "what it brings back passes no other filter, so it is the last in select")]
    return []


@part(
    "select",
    equation=lambda held: (
        f"and once more than {FULL:g}·{held.size} are there that earned more than P50, {held.size} of the last "
        f"{held.fresh} steps' episodes with R > mean_group(R) and {held.where}"
    ),
    state=lambda: {"means": [], "spreads": [], "step": 0},
    needs=lambda held: frozenset({"world:text", f"signal:{held.where}"}),
    gives=("column:stage", "column:recalibrated"),
    impossible=_impossible,
    bounds={"size": "at least 1", "fresh": "at least 1", "history": "at least 1"},
)
def and_wins(
    state: dict[str, Any],
    experience: Experience,
    *,
    size: int = 2048,
    fresh: int = 5,
    history: int = 10240,
    where: str = "calls",
    scale: Literal["none", "std"] = "none",
) -> tuple[dict[str, Any], Experience]:
    """This step's rows and, when enough are remembered, good episodes of earlier steps, with the `logp` of who acted.

    An episode is remembered that earned more than its group's mean and called a tool. It is drawn by what it earned
    against P50, the median of the mean rewards of earlier groups, which rises as the policy gets better: the column
    `recalibrated` is R − P50, and only what is above 0 is usable. What was drawn from is forgotten.

    size      episodes that are learned from at a time
    fresh     steps for which an episode is remembered
    history   groups whose mean P50 is the median of
    where     the signal an episode must have earned some of
    scale     `std` divides by the median of the groups' deviations, for a credit that divides by them
    """
    step = int(state["step"])
    held = {n: t for n, t in state.items() if n not in ("means", "spreads", "step")}
    found = _staged(experience, NOW, torch.zeros(len(experience)))
    if held and state["means"]:
        again = _usable(from_tensors(held), state, scale)
        episodes = again.by("episode").keys if len(again) else torch.zeros(0)
        if len(episodes) > FULL * size:
            order = torch.randperm(len(episodes), generator=torch_rng("wins", step))[:size]
            chosen = again.take(torch.isin(again["episode"], episodes[order]))
            found, held = Experience.mix([found, chosen]), {}
    means, spreads = (torch.tensor(state[n], dtype=torch.float64) for n in ("means", "spreads"))
    if len(experience):
        held = _with_wins(held, experience, fresh, where)
        returns, groups = episode_returns(experience)
        means = torch.cat([means, groups.mean(returns).double().cpu()])[-history:]
        spreads = torch.cat([spreads, groups.std(returns).double().cpu()])[-history:]
    return {"means": means.tolist(), "spreads": spreads.tolist(), "step": step + 1, **held}, found


def _staged(rows: Experience, stage: int, recalibrated: Tensor) -> Experience:
    device = rows["action"].device
    marks = torch.full((len(rows),), stage, device=device)
    return rows.with_columns(stage=marks, recalibrated=recalibrated.to(device))


def _usable(rows: Experience, state: dict[str, Any], scale: str) -> Experience:
    """Remembered episodes that earned more than P50, and by how much."""
    episodes = rows.by("episode")
    above = episodes.sum(rows["reward"].float()) - _median(state["means"])
    if scale == "std":
        above = above / (_median(state["spreads"]) + 1e-6)
    marked = _staged(rows, AGAIN, episodes.rows(above))
    return marked.take(marked["recalibrated"] > 0)


def _median(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(0.5))


def _with_wins(held: dict[str, Tensor], experience: Experience, fresh: int, where: str) -> dict[str, Tensor]:
    """The memory with this step's wins, without what is too old."""
    returns, groups = episode_returns(experience)
    episodes = experience.by("episode")
    wins = (returns > groups.rows(groups.mean(returns))) & (
        episodes.sum(experience[f"signal:{where}"].float()) > 0
    )
    mine = episodes.rows(wins) & (experience["source"] == OWN)
    new = earlier(experience.take(mine & experience["train"] if "train" in experience else mine))
    together = Experience.mix([from_tensors(held), new]) if held else new
    newest = int(experience["version"].max())
    together = together.take(together["version"] > newest - fresh)
    return as_tensors(together) if len(together) else {}


@part(
    "credit",
    equation=lambda held: f"{held.credit.equation()}; again: A = {show_value(held.weight)}·(R − P50)",
    needs={"column:stage", "column:recalibrated"},
    impossible=lambda held, method: (
        [] if held.credit.info.slot == "credit" else [("credit", "it gives no advantages")]
    ),
    bounds={"weight": "at least 0"},
)
def recalibrated(experience: Experience, *, credit: Part = _CREDIT, weight: float | Part = _RISING) -> Tensor:
    """Another credit for this step's rows, and for remembered ones what they earned above P50, times κ.

    weight   κ, as a schedule: how much self-imitation counts, little before the agent knows its tools
    """
    now = experience["stage"] == NOW
    found = float(weight) * experience["recalibrated"].float()  # type: ignore[arg-type]  # what κ is in this step
    if bool(now.any()):
        found = found.masked_scatter(now, credit(experience.take(now)).float())
    return found


# ------------------------------------------------------------------ covariance


def _lots(batch: Batch, drawn: int) -> Tensor:
    """A number between 0 and 1 for every decision, which depends on what it is and on the draw alone."""
    x = torch.full_like(batch["episode"], 7919 * (drawn + 1))
    for name in ("episode", "turn", "position"):
        if name in batch:
            x = (x ^ batch[name]) * 6364136223846793005 + 1442695040888963407
            x = x ^ (x >> 29)
    return (x & ((1 << 40) - 1)).double() / (1 << 40)


def _covariances(batch: Batch, means: tuple[float, float]) -> Tensor:
    return (batch["advantage"] - means[0]) * (batch.now["logp"].detach() - means[1])


def _free(batch: Batch, low: float, high: float, against: str) -> Tensor:
    """Decisions that PPO's bounds leave alone."""
    ratio, advantage = batch.log_ratio(against).detach().exp(), batch["advantage"]
    return ratio * advantage <= ratio.clamp(1 - low, 1 + high) * advantage


def _drawn(
    state: dict[str, Any],
    batch: Batch,
    *,
    share: float,
    least: float,
    most: float,
    low: float,
    high: float,
    against: str,
    **_: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Means over the mini-batch, and below which lot a decision of high covariance is left out."""
    drawn = int(state["drawn"])
    means = (float(batch["advantage"].mean()), float(batch.now["logp"].detach().mean()))
    cov = _covariances(batch, means)
    lots = _lots(batch, drawn)[(cov > least) & (cov < most) & _free(batch, low, high, against)]
    number = max(int(share * len(cov)), 1)
    line = float(lots.sort().values[number - 1]) if len(lots) > number else 1.0
    return {"drawn": drawn + 1}, {"means": means, "line": line, "drawn": drawn}


@part(
    "surrogate",
    equation=lambda held: (
        f"min(ρA, clip(ρ, {1 - held.low:g}, {1 + held.high:g})·A), 0 on {held.share:g} of the tokens by lot, of those "
        f"with {held.least:g} < (A − Ā)(log π − mean) < {held.most:g}"
    ),
    idle="advantage",
    needs=needs_against,
    prepare=_drawn,
    state=lambda: {"drawn": 0},
    impossible=lambda held, method: (
        [] if held.least < held.most else [("most", "it is above least, or no covariance is between them")]
    ),
    bounds={
        "low": "from 0 to 1",
        "high": "at least 0",
        "share": "above 0 to 1",
        "least": "any number",
        "most": "any number",
        "weight": "above 0",
    },
)
def clip_cov(
    batch: Batch,
    *,
    low: float = 0.2,
    high: float = 0.28,
    share: float = 0.02,
    least: float = 1.0,
    most: float = 40.0,
    against: str = "behaviour",
    weight: float | Part = 1.0,
) -> Values:
    """PPO's bounded ratio without a few tokens whose likelihood and advantage are high together (arXiv 2505.22617).

    Those are what entropy is lost on. Among the tokens of a mini-batch that the bounds leave alone and whose covariance
    is between `least` and `most`, as many as `share` of all its tokens, at least one, are drawn by lot and not learned.
    """
    told = batch.prepared["clip_cov"]
    cov = _covariances(batch, told["means"])
    out = (cov > least) & (cov < most) & _free(batch, low, high, against)
    out = out & (_lots(batch, told["drawn"]) <= told["line"])
    value, stats = clip(low=low, high=high, against=against)(batch)
    return torch.where(out, 0.0, value), {**stats, "clip_cov": out}


# ------------------------------------------------------------------ rewards and groups


@part(
    "reward",
    equation="min({most}, {each}·{name})",
    needs=lambda held: frozenset({"world:verify", f"signal:{held.name}"}),
    bounds={"each": "at least 0", "most": "above 0"},
)
def for_calls(experience: Experience, *, each: float = 0.1, most: float = 1.0, name: str = "calls") -> Tensor:
    """So much for every call of an episode, up to `most` in all, on its last decision."""
    episodes = experience.by("episode")
    earned = (each * episodes.sum(experience[f"signal:{name}"].float())).clamp(max=most)
    return episodes.rows(earned) * episodes.is_last()


@part("select", equation="the {share} of groups whose returns vary most", bounds={"share": "above 0 to 1"})
def most_varied_groups(experience: Experience, *, share: float = 0.75) -> Tensor:
    """Keep so large a share of the groups, those whose returns have the largest deviation; at least one."""
    returns, of = episode_returns(experience)
    number = max(1, int(share * len(of)))
    kept = of.keys[of.std(returns).argsort(descending=True, stable=True)[:number]]
    return torch.isin(experience["group"], kept)


BOT = {
    "langfengQ/verl-agent as released with TencentYoutuResearch/SPEAR, run_alfworld_spear.sh": {
        "sample.prompts": 32,
        "sample.group": 8,
        "select.most_varied_groups.share": 0.75,
        "surrogate.low": 0.2,
        "surrogate.high": 0.28,
        "regularise.kl.weight": None,
        "reduce": "constant",
        "update.lr": 1e-6,
    },
}
TINY = {
    **{k: v for k, v in DR_TINY.items() if k != "surrogate.high"},
    "sample.prompts": 16,
    "reduce.length": 20,
}


@method("dr-bot@1", base="dr-grpo", world="tools", presets={"tiny": TINY}, published=BOT)
def dr_bot() -> OnPolicy:
    """Dr.BoT: a bag of tricks for agents, which SPEAR builds on (arXiv 2509.22601).

    GRPO without a KL term and without dividing by a deviation, tokens over a fixed length, an upper bound of 1.28,
    tokens of high covariance left out by lot, episodes that were cut off not learned from, and of all groups the three
    quarters whose rewards vary most. Filters of the paper for repeated and unreadable text have no counterpart here.
    """
    return dr_grpo().but(
        sample=groups(prompts=32, group=8),
        select=(overlong_filter(), most_varied_groups()),
        surrogate=clip_cov(),
        reduce=constant(length=512),
        update=adam(lr=1e-6),
    )


RARE = find("rare")
CLAIM = Ranks(
    "Where success is rare, paying for calls at first and imitating the own wins later, more and more, learns more "
    "from as many episodes than GRPO, and more than imitating them as much from the first step on.",
    ("", RARE.baseline, "as much from the first step on=spear:credit.weight=1.0"),
    RARE.world,
    RARE.budget,
    settings=RARE.settings,
    tune=RARE.tune,
    leads=True,
    also=("success", "entropy", "calls"),
    shows=(Shows("mean:degenerate_groups", least=0.3),),
)

PUBLISHED: Published = {
    **BOT,
    "TencentYoutuResearch/SPEAR, run_alfworld_spear.sh": {
        "select.and_wins.size": 2048,
        "select.and_wins.fresh": 5,
        "select.and_wins.history": 10240,
        "select.and_wins.scale": "none",
        "reward.second.weight.steps": 200,
        "reward.second.reward.each": 0.1,
        "reward.second.reward.most": 1.0,
        "credit.credit.scale": "none",
    },
    "TencentYoutuResearch/SPEAR, README.md": {"credit.weight.steps": 200, "credit.weight.last": 1.0},
    "TencentYoutuResearch/SPEAR, run_qwen2-32b_spear.sh": {
        "surrogate.share": 0.02,
        "surrogate.least": 1.0,
        "surrogate.most": 40.0,
    },
}


@method(
    "spear@1",
    paper=180,
    base="dr-bot",
    world="tools",
    presets={
        "tiny": {
            **TINY,
            "select.and_wins.size": 64,
            "select.and_wins.fresh": 10,
            "reward.second.weight.steps": 0.5,
            "credit.weight.steps": 0.5,
        }
    },
    claim=CLAIM,
    published=PUBLISHED,
)
def spear() -> OnPolicy:
    """SPEAR: self-imitation with progressive exploration (arXiv 2509.22601).

    Early an agent is paid for calling tools, r + μ·min(1, 0.1·calls) with μ falling to 0 along half a cosine, or it
    would spam tools for ever. Later it learns again from its own wins: episodes above their group's mean that called a
    tool wait in a memory; when that holds enough, they are learned from in updates of their own, with the
    log-probabilities they were drawn with in PPO's ratio, and an advantage that is estimated anew,

        κ·(R − P50),  κ rising to 1 along half a cosine,

    P50 being the median of the mean rewards of earlier groups. What was a win then and is usual now teaches nothing.
    Wins of a step are remembered after it, so that none counts twice in one.

    The memory is learned from only when it is full, so how often depends on success. The released code draws a power of
    two of them, and pays a right answer the whole bonus for a single call. It reads one set of covariance bounds for
    both kinds of rows, as is done here, and its dual clip has no effect beside clip-cov: it is left out.
    """
    return dr_bot().but(
        reward=both(
            first=signal(),
            second=annealed(reward=for_calls(), weight=half_cosine(first=1.0, last=0.0, steps=200)),
        ),
        select=(overlong_filter(), most_varied_groups(), and_wins()),
        credit=recalibrated(),
    )
