"""Heterogeneous Adaptive Policy Optimization: how uncertain a token was decides how it is sampled and learned."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from panoply.batch import Batch, Values
from panoply.costs import Lengths, Tokens, own_episodes
from panoply.evidence.claims import Ranks, Shows
from panoply.experience import Experience
from panoply.methods.base.dapo import TINY as DAPO_TINY
from panoply.methods.base.dapo import dapo
from panoply.parts import Finding, Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.selves import LEARNER, acts, by_whom
from panoply.slots.credit.groups import episode_returns, group
from panoply.slots.reward.shaping import overlong, verdict
from panoply.slots.sample.dynamic import dynamic
from panoply.slots.sample.groups import LIMITS, greedy_cuts, greedy_groups
from panoply.slots.schedule.schedules import constant
from panoply.slots.surrogate.ratios import STAYS, needs_against, ratio_stats, stays_at_one
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.rollout.text import Collector

LEAST = 1e-8
"""Entropies, deviations and largest distances are at least this."""


# ------------------------------------------------------------------ how uncertain


def standards(entropy: Tensor, pivot: float) -> dict[str, float]:
    """What log-entropies of many decisions are compared with: their quantile, their distance from it, and the ends.

    The distance is the root of the mean square from the *quantile*, not from the mean.
    """
    logs = entropy.double().clamp(min=LEAST).log().flatten()
    centre = logs.kthvalue(round(pivot * (len(logs) - 1)) + 1).values
    spread = (logs - centre).square().mean().clamp(min=LEAST).sqrt()
    h = (logs - centre) / spread
    ends = {"above": h.max().clamp(min=LEAST), "below": (-h.min()).clamp(min=LEAST)}
    return {name: float(x) for name, x in {"centre": centre, "spread": spread, **ends}.items()}


def uncertainties(entropy: Tensor, by: dict[str, float], signed: bool) -> Tensor:
    """ĥ: from −1, the surest, over 0, the quantile, to 1, the most uncertain of those compared with."""
    h = (entropy.clamp(min=LEAST).log() - by["centre"]) / by["spread"]
    below = by["below"] if signed else -by["below"]
    return torch.where(h > 0, h / by["above"], h / below)


def heat(logits: Tensor, by: dict[str, float], temperature: float, tau: float, signed: bool) -> Tensor:
    """1 + τ·ĥ of the distributions that logits stand for at a temperature, ĥ being between −1 and 1."""
    entropy = torch.special.entr((logits.float() / temperature).softmax(-1)).sum(-1)
    return 1 + tau * uncertainties(entropy, by, signed).clamp(-1, 1)


@part(
    "select",
    equation=lambda held: f"ĥ = (log H − quantile_{held.pivot:g}) over its largest on either side",
    needs={"engine:entropy"},
    gives=("column:uncertainty",),
    bounds={"pivot": "from 0 to 1"},
)
def uncertainty(experience: Experience, *, pivot: float = 0.8, signed: bool = True) -> Experience:
    """All decisions, with the column `uncertainty`: ĥ from −1 to 1, by the entropy each was drawn with.

    pivot: the quantile of log-entropies that has ĥ = 0
    signed: whether ĥ is below 0 under the pivot, as the paper has it; false: above it, as the released code has it
    """
    if not len(experience):
        return experience.with_columns(uncertainty=experience["entropy"])
    found = uncertainties(experience["entropy"], standards(experience["entropy"], pivot), signed)
    return experience.with_columns(uncertainty=found)


def _cost(held: Any, of: Lengths) -> Tokens:
    sampled, trained = own_episodes(held, of)
    return sampled * held.rounds, trained


def _inert(held: Any, method: Any, world: Any) -> list[Finding]:
    found = greedy_cuts(held, method, world)
    if held.temperature == 0:
        found += [
            (name, "at temperature 0 the likeliest token is taken") for name in ("tau", "pivot", "signed")
        ]
    elif held.tau == 0:
        found += [(name, "tau is 0, and the temperature the same for all") for name in ("pivot", "signed")]
    return found


@part(
    "sample",
    equation=lambda held: (
        f"{held.prompts} prompts × {held.group} episodes at temperature {held.temperature:g}·(1 + {held.tau:g}·ĥ) "
        f"whose {held.name} varies, in at most {held.rounds} rounds{by_whom(held.by)}"
    ),
    needs=lambda held: (
        frozenset({"world:verify", "world:text", f"signal:{held.name}", "engine:entropy"})
        | ({"engine:heat"} if held.tau else set())
        | acts(held.by)
    ),
    state=dict,
    bounds={**LIMITS, "rounds": "at least 1", "tau": "from 0 up to 1", "pivot": "from 0 to 1"},
    impossible=greedy_groups,
    inert=_inert,
    cost=_cost,
)
def heated(
    state: dict[str, float],
    collect: Collector,
    *,
    prompts: int = 16,
    group: int = 8,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    max_tokens: int | None = None,
    rounds: int = 10,
    name: str = "success",
    by: str = LEARNER,
    tau: float = 0.05,
    pivot: float = 0.8,
    signed: bool = True,
) -> tuple[dict[str, float], Experience]:
    """Dynamic sampling in which uncertain tokens are drawn hotter and sure ones colder: T·(1 + τ·ĥ).

    ĥ is of the distribution at hand at temperature T, by what the *last* step's decisions were like: this one's are not
    known yet. In the first step nothing is. What each token was drawn at is recorded, so ratios are of the
    distributions really drawn from. On a GPU such text is decoded without captured graphs.

    tau: how much hotter the most uncertain, and colder the surest
    pivot, signed: as of select.uncertainty
    """
    plain = dynamic(
        prompts=prompts,
        group=group,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        max_tokens=max_tokens,
        rounds=rounds,
        name=name,
        by=by,
    )
    known = partial(heat, by=state, temperature=temperature, tau=tau, signed=signed)
    with collect.heated(known if state and tau and temperature else None):
        found: Experience = plain(collect)
    return standards(found["entropy"], pivot), found


# ------------------------------------------------------------------ what is learned


@part(
    "credit",
    equation=lambda held: (
        f"A = (R − mean) / (std + ε) over the group's tokens; a group with |A| ≥ {held.limit:g}: over its episodes"
    ),
    bounds={"limit": "above 0", "epsilon": "from 0 to 1"},
)
def token_average(experience: Experience, *, limit: float = 5.0, epsilon: float = 1e-6) -> Tensor:
    """Returns against the mean over all *tokens* of the group: a long answer weighs as much as it is long.

    So advantages sum to 0 over the tokens of a group and not over its answers, and with one mean over all tokens
    neither long nor short answers pull. Where a short answer among long ones would stand out by `limit` deviations, the
    group is compared answer by answer, as in GRPO.
    """
    returns, _ = episode_returns(experience)
    earned, asked = experience.by("episode").rows(returns), experience.by("group")
    found = (earned - asked.rows(asked.mean(earned))) / (
        asked.rows(asked.std(earned, correction=0)) + epsilon
    )
    odd = asked.rows(asked.max(found.abs()) >= limit)
    found = torch.where(odd, group(epsilon=epsilon)(experience), found)
    return found.masked_fill(asked.rows(asked.constant(earned)), 0.0)


def _clip_inert(held: Any, method: Any) -> list[Finding]:
    still = stays_at_one(held.against, method)
    return [(name, STAYS) for name in ("low", "high", "alpha", "dual")] if still else []


@part(
    "surrogate",
    equation=lambda held: (
        f"min(ρA′, clip(ρ, 1 − {held.low:g}·(1 + {held.alpha:g}·(−ĥ)⁺), 1 + {held.high:g}·(1 + {held.alpha:g}·ĥ⁺))·A′)"
        + (f", at least {held.dual:g}·A′ where A′ < 0" if held.dual else "")
        + f",  A′ = A·(1 + {held.beta:g}·ĥ) if ĥ > 0 and ρ is out of the inner half, or ĥ ≤ 0 and it is inside"
    ),
    idle="advantage",
    needs=lambda held: needs_against(held) | {"column:uncertainty"},
    inert=_clip_inert,
    bounds={
        "low": "from 0 to 1",
        "high": "at least 0",
        "alpha": "at least 0",
        "beta": "from 0 to 1",
        "dual": "above 1",
        "weight": "above 0",
    },
)
def uncertain_clip(
    batch: Batch,
    *,
    low: float = 0.2,
    high: float = 0.2,
    alpha: float = 1.0,
    beta: float = 1.0,
    dual: float | None = 10.0,
    against: str = "behaviour",
    weight: float | Part = 1.0,
) -> Values:
    """PPO's bounded ratio with bounds and advantages by how uncertain each token was (HAPO, arXiv 2509.16591).

    Uncertain tokens (ĥ > 0) may rise further and count for more once they are moving, out of the inner half of their
    bounds; sure ones (ĥ ≤ 0) may fall further, and count for less while they stand still, inside of it. So at ratio 1
    the surest token has no gradient at all.

    alpha: how much wider the bound is: low·(1 − αĥ) below where ĥ ≤ 0, high·(1 + αĥ) above where ĥ > 0
    beta: how much an advantage is changed
    dual: floor c·A′ for A′ < 0, c > 1
    """
    h, log_ratio = batch["uncertainty"], batch.log_ratio(against)
    ratio, now = log_ratio.exp(), log_ratio.detach().exp()
    lower, upper = low * (1 + alpha * (-h).clamp(min=0)), high * (1 + alpha * h.clamp(min=0))
    inner = (now > 1 - lower / 2) & (now < 1 + upper / 2)
    advantage = batch["advantage"] * torch.where((h > 0) ^ inner, 1 + beta * h, 1.0)
    free, held = ratio * advantage, now.clamp(1 - lower, 1 + upper) * advantage
    acted = (free > held).detach()  # then the smaller one is the bound, which has no gradient
    value = torch.where(acted, held, free)
    stats = {"clip_high": acted & (now > 1 + upper), "clip_low": acted & (now < 1 - lower)}
    if dual is not None:
        floored = (advantage < 0) & (value < dual * advantage)
        value = torch.where(floored, dual * advantage, value)
        stats["clip_dual"] = floored.detach()
    return value, {**ratio_stats(batch, against), **stats}


TINY = {**DAPO_TINY, "update.minibatches": 4}
"""Several mini-batches, or no ratio would leave 1."""
PUBLISHED: Published = {
    "starriver030515/HAPO, recipe/qwen2.5_math_7b.sh": {
        "sample.prompts": 512,
        "sample.group": 16,
        "sample.rounds": 16,
        "sample.temperature": 1.0,
        "sample.tau": 0.05,
        "sample.pivot": 0.8,
        "select.uncertainty.pivot": 0.8,
        "reward.limit": 10240,
        "reward.cache": 4096,
        "surrogate.low": 0.2,
        "surrogate.high": 0.2,
        "surrogate.alpha": 1.0,
        "surrogate.beta": 1.0,
        "surrogate.dual": 10.0,
        "reduce": "token_mean",
        "regularise.kl.weight": None,
        "update.lr": 1e-6,
        "update.schedule.warmup": 10,
        "update.weight_decay": 0.1,
        "update.clip": 1.0,
        "update.minibatches": 16,
    },
    "starriver030515/HAPO, verl/trainer/ppo/core_algos.py": {"credit.limit": 5.0, "credit.epsilon": 1e-6},
    "arXiv 2509.16591": {"sample.signed": True, "select.uncertainty.signed": True},
}
CLAIM = Ranks(
    "Where many answers are right, treating tokens by how uncertain they were keeps more different right answers than "
    "DAPO with as many updates does after as many episodes, and loses at most five points of success.",
    ("", "dapo:update.minibatches=4"),
    "manyanswers:coverage",
    "episodes=12800",
    metric="distinct@32",
    keeps={"success": 0.05},
    also=("success", "pass@32", "entropy", "total_decisions"),
    shows=(Shows("success", least=0.3),),
    waives={"problems": "what differs are the 32 answers to each of the numbers held out"},
)


@method("hapo@1", paper=55, base="dapo", presets={"tiny": TINY}, claim=CLAIM, published=PUBLISHED)
def hapo() -> OnPolicy:
    """Heterogeneous Adaptive Policy Optimization (arXiv 2509.16591): no two tokens are treated alike.

    Few tokens decide where an answer goes, and they are the uncertain ones; most only carry it on. So DAPO is changed
    in four places, three of them by ĥ, how uncertain a token was among all of the batch, from −1 to 1: its temperature
    is T·(1 + 0.05·ĥ); a bound is wider above for uncertain tokens and below for sure ones; and advantages grow for
    uncertain tokens that move, and shrink for sure ones that stand still. Fourth, they are against the mean over a
    group's tokens, and not over its answers.

    What is surprising: where most tokens are certain the pivot, the quantile 0.8, may lie among those that are, and ĥ
    then tells rounding errors apart. The released code divides by a negative number, which makes ĥ positive for sure
    tokens as well, so that no branch for them is ever taken; the paper is followed, and the code's way is
    `select.uncertainty.signed=false` and `sample.signed=false`. Its temperatures cannot have run as released. ĥ is
    made here of the entropies that tokens were drawn with, over the whole batch of a step; the code makes it anew of
    each micro-batch at the weights of the moment. The authors advise to drop the penalty for length
    (`reward=verdict`) where answers get short.
    """
    return dapo().but(
        sample=heated(prompts=512, group=16, rounds=16),
        reward=overlong(reward=verdict(), limit=10240, cache=4096),
        select=(uncertainty(),),
        credit=token_average(),
        surrogate=uncertain_clip(),
        update=adam(lr=1e-6, weight_decay=0.1, schedule=constant(warmup=10), minibatches=16),
    )
