"""PF-PPO: of several answers to a prompt, only those whose rewards can be trusted are learned from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from panoply.evaluation.r2 import r_squared
from panoply.evidence.claims import Ahead, Learns
from panoply.evidence.races import SIX_PROMPTS
from panoply.experience import Experience, Segments
from panoply.methods.base.ppo import TINY as PPO_TINY
from panoply.methods.base.ppo import ppo
from panoply.parts import Finding, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method, protocol
from panoply.seeds import numpy_rng, torch_rng
from panoply.slots.credit.groups import episode_returns
from panoply.slots.sample.groups import groups

if TYPE_CHECKING:
    from panoply.evaluation.judged import Judged

Rule = Literal["none", "best", "best_random", "best_worst", "pow"]
RULES: tuple[Rule, ...] = get_args(Rule)


def kept(reward: Tensor, peers: Segments, rule: Rule, keep: int, power: float, seed: int) -> Tensor:
    """Which episodes a filter keeps: `keep` of each set of peers, by the ranks of their rewards; all of smaller sets.

    Ranks 1, 2, … are by reward, the highest first; among equals the first in order is ahead.
    """
    lots = torch.from_numpy(numpy_rng("filtered", seed).random(len(reward))).to(reward.device)
    chosen = torch.zeros(len(reward), dtype=torch.bool, device=reward.device)
    for row in peers.grid():
        at = row[row >= 0]
        order = at[reward[at].argsort(descending=True, stable=True)]
        best = {"best": keep, "best_random": (keep + 1) // 2, "best_worst": (keep + 1) // 2}.get(rule, 0)
        chosen[order[:best]] = True
        rest = order[best:]
        if rule == "best_worst":
            chosen[rest[max(0, len(rest) - keep // 2) :]] = True
        elif rule == "pow":  # the largest of u^(1/w) are a draw without repetition by weights w
            keys = lots[rest].log() / (reward[rest].abs().double() ** power).clamp(min=1e-8)
            chosen[rest[keys.argsort(descending=True)[:keep]]] = True
        elif rule != "best":
            chosen[rest[lots[rest].argsort()[: keep - best]]] = True
    return chosen


def _impossible(held: Any, method: Any) -> list[Finding]:
    size = method.sample.settings().get("group")
    if isinstance(size, int) and held.keep > size:
        return [("keep", f"a prompt has {size} answers (sample.group)")]
    if held.keep == 1 and held.rule in ("best_random", "best_worst"):
        return [("keep", f"{held.rule} keeps two answers or more")]
    return []


def _inert(held: Any, method: Any) -> list[Finding]:
    if held.keep == method.sample.settings().get("group"):
        return [(name, "all answers to a prompt are kept") for name in ("rule", "power", "among", "name")]
    return [] if held.rule == "pow" else [("power", f"ranks alone count (rule={held.rule})")]


def _needs(held: Any) -> frozenset[str]:
    return frozenset({"world:verify", f"signal:{held.name}"}) if held.name else frozenset()


@part(
    "select",
    equation=lambda held: f"{held.keep} answers to each {held.among}, by rank of reward: {held.rule}",
    needs=_needs,
    impossible=_impossible,
    inert=_inert,
    bounds={"keep": "at least 1", "power": "above 0"},
)
def ranked(
    experience: Experience,
    *,
    rule: Rule = "best_worst",
    keep: int = 2,
    power: float = 2.0,
    among: Literal["prompt", "batch"] = "prompt",
    name: str | None = None,
) -> Experience:
    """Of each prompt's answers only some, by the ranks of their rewards (arXiv 2409.06957).

    rule    `none` draws them by lot; `best` takes the best; `best_worst` half of them from above and half from below,
            `best_random` half from above and the rest by lot; `pow` draws them by |reward|^power
    keep    how many of a prompt's answers learn
    among   what is ranked: a prompt's answers, or the whole batch, as released code does, of which then as many are
            kept, whosever they are
    name    the signal that says the reward; none means what the method earns

    What is kept is learned from as it was sampled: no weight makes up for the filter. Credit is given afterwards, so
    that means and deviations are of what is kept.
    """
    returns, peers = episode_returns(experience)
    episodes = experience.by("episode")
    if name:
        returns = episodes.sum(experience[f"signal:{name}"].float())
    number = keep
    if among == "batch":
        number, peers = keep * len(peers), Segments(torch.zeros_like(peers.index))
    chosen = kept(returns, peers, rule, number, power, int(episodes.keys[0]))
    return experience.take(episodes.rows(chosen))


# ------------------------------------------------------------------ which filter to take


def fits(
    reward: Tensor, worth: Tensor, peers: Segments, keep: int, bins: int = 0, seed: int = 0
) -> dict[str, float]:
    """R² of rewards and true worths on what each filter keeps of each prompt's answers."""
    found: dict[str, float] = {}
    for rule in RULES:
        chosen = kept(reward, peers, rule, keep, 2.0, seed)
        found[rule] = r_squared(reward[chosen], worth[chosen], min(bins, int(chosen.sum())))
    return found


def of_run(
    judged: Judged,
    *,
    problems: int = 64,
    answers: int = 8,
    keep: int = 4,
    bins: int = 0,
    reward: str = "proxy",
    true: str = "true",
    seed: int = 0,
) -> dict[str, float]:
    """R² of a run's reward for each filter, on answers of its last checkpoint to held-out problems."""
    from panoply.rollout.text import Collector

    collect = Collector(judged.world, judged.policy(max(judged.steps())), seed, split="test")
    made = collect.episodes(judged.world.held_out(problems), answers)
    episodes = made.by("episode")
    said, worth = (episodes.sum(made[f"signal:{name}"].double()) for name in (reward, true))
    return fits(said, worth, Segments(episodes.first(made["group"])), keep, bins, seed)


def planted(seed: int, middle: bool = True, error: float = 0.25, prompts: int = 256) -> dict[str, float]:
    """R² of each filter for worths between 0 and 1, and rewards that err on middling answers, or on all alike.

    error: its deviation on answers worth ½; where all err alike, what that is on average
    """
    answers = 8
    rng = torch_rng("filters", seed)
    worth = torch.rand(prompts * answers, generator=rng, dtype=torch.float64)
    size = 4 * worth * (1 - worth) if middle else torch.full_like(worth, 2 / 3)
    reward = worth + error * size * torch.randn(len(worth), generator=rng, dtype=torch.float64)
    peers = Segments(torch.arange(prompts).repeat_interleave(answers))
    return fits(reward, worth, peers, 4, seed=seed)


def ahead(seed: int) -> dict[str, float]:
    """By how much the best and the worst tell more of true worths than a random half, by where rewards err."""
    here, everywhere = planted(seed), planted(seed, middle=False)
    return {
        "ahead": here["best_worst"] - here["none"],
        "errors everywhere": everywhere["best_worst"] - everywhere["none"],
        "best alone": here["best"] - here["none"],
    }


@protocol(
    "reward-fit@1",
    paper=13,
    judge=of_run,
    claim=Ahead(
        "Where rewards err on middling answers, R² of rewards and true worths is larger on the best and the worst of "
        "each prompt's answers than on a random half.",
        ahead,
    ),
)
def reward_fit(*, seed: int = 0) -> dict[str, dict[str, float]]:
    """R² of rewards and true worths on what a filter keeps (PF-PPO, arXiv 2409.06957), by which a filter is chosen.

    Shown on worths at random with rewards that err on middling answers, or on all alike. `panoply eval RUN --by
    reward-fit` measures it for a run's own answers, in a world that says what they are truly worth; the higher, the
    better the filter. With `bins` means of answers of similar reward are fitted, as the paper has it.

    Extremes spread rewards out, which raises R² wherever the errors are. And where errors are as large as what is to be
    told, what ranks first and last are middling answers with large errors: then hardly anything is gained.
    """
    cases = {
        "errors in the middle": planted(seed),
        "everywhere": planted(seed, middle=False),
        "large in the middle": planted(seed, error=1.0),
    }
    return {rule: {case: found[rule] for case, found in cases.items()} for rule in RULES}


# ------------------------------------------------------------------ the method

TINY: dict[str, Any] = {
    **PPO_TINY,
    "sample.prompts": 16,
    "sample.group": 8,
    "select.ranked.keep": 4,
    "run.steps": 100,
}

CLAIM = Learns(
    "Where rewards err on middling answers, PPO learns more from the best two and the worst two of eight answers to a "
    "prompt than from four of them by lot, at as many answers sampled and learned from.",
    over="a random half=pf-ppo:select.ranked.rule=none",
    world="strings:noisy",
    budget="episodes=5120",
    also=("success", "true", "world:kl"),
    waives={"problems": SIX_PROMPTS},
)


PUBLISHED: Published = {
    "arXiv 2409.06957, by notes on it": {
        "sample.group": 5,
        "select.ranked.rule": "best_worst",
        "select.ranked.among": "prompt",
        "surrogate.low": 0.2,
        "surrogate.high": 0.2,
    },
    "DtYXs/verl, examples/ppo_trainer/run_deepseek7b_llm_pfppo.sh": {
        "select.ranked.power": 2.0,
        "update.lr": 1e-6,
        "update.minibatches": 4,
        "models.critic.update.lr": 1e-5,
    },
}
"""The paper has a KL penalty in the reward (`reward=minus_kl`), of a weight that could not be read; its released script
has none."""


@method("pf-ppo@1", paper=13, base="ppo", presets={"tiny": TINY}, claim=CLAIM, published=PUBLISHED)
def pf_ppo() -> OnPolicy:
    """PF-PPO (arXiv 2409.06957): N answers to a prompt, ranked by reward; PPO learns from the best and the worst.

    A reward model is right about very good and very bad answers and guesses in between. So what it ranks in the middle
    is left out before credit is given, and nothing else changes: old log-probabilities stay as they are, and the filter
    is not made up for. Which filter to take is told beforehand by R² of reward and true worth on what it would keep
    (`panoply eval RUN --by reward-fit`). The best alone is a trap: nothing is left to be better than.

    At equal answers learned from it may be ahead of a random half; all N sampled answers may well teach more than both.
    The paper draws ranks with repetition, by probabilities ½ and ½; here answers are kept once, and of more than two
    the next best and next worst follow. Released code ranks the whole batch (`among=batch`), and its third rule is
    `pow`. Not measured: training where the reward errs alike everywhere (`--world strings:static`), and whether R² puts
    filters in the order of what is learned with them.
    """
    return ppo().but(sample=groups(prompts=128, group=5), select=(ranked(rule="best_worst", keep=2),))
