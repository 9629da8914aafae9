"""Dual RL: implicit maximisation as the dual of a divergence, and with which divergence."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from panoply.batch import Values
from panoply.evidence.claims import Identity, Learns
from panoply.methods.base.iql import iql
from panoply.parts import Finding, Part, part
from panoply.regimes import Offline
from panoply.registry import Published, method
from panoply.seeds import torch_rng
from panoply.slots.loss.bellman import q_of_v, wanted
from panoply.transitions import ActorCritic, Transitions

Divergence = Literal["chi2", "tv", "reverse-kl"]


def dual_loss(gap: Tensor, divergence: Divergence, lam: float) -> Tensor:
    """λ·f̄(x) − (1 − λ)·x of gaps x = Q − V.

    f̄ is the conjugate on weights that cannot be negative, so it is flat where x < 0: data worse than V has no say but
    in the second term. For χ² the textbook's max(x + x²/4, 0) would rise again below −4.
    """
    better = gap.clamp(min=0)
    above = better + better.square() / 4 if divergence == "chi2" else better
    return lam * above - (1 - lam) * gap


def gumbel_loss(gap: Tensor, temperature: float, clip: float | None) -> Tensor:
    """e^z − z − 1 with z = x/α, in units of the batch's largest e^z: XQL's regression (arXiv 2301.02328)."""
    z = gap / temperature
    if clip is None:
        return z.exp() - z - 1
    z = z.clamp(max=clip)
    top = z.detach().max().clamp(min=-1)
    return (z - top).exp() - (z + 1) * (-top).exp()


def _equation(held: Any) -> str:
    x = "x = min_j Q′_j(s,a) − V(s)"
    if held.divergence == "reverse-kl":
        return f"e^z − z − 1, z = x/{held.temperature:g}, {x}"
    above = "(x + x²/4)₊" if held.divergence == "chi2" else "x₊"
    return f"{held.lam:g}·{above} − {1 - held.lam:g}·x, {x}"


def _inert(held: Any, method: Any) -> list[Finding]:
    if held.divergence == "reverse-kl":
        return [("lam", "the reverse KL has a temperature instead")]
    return [(name, f"{held.divergence} has lam instead") for name in ("temperature", "clip")]


def _impossible(held: Any, method: Any) -> list[Finding]:
    low = held.divergence == "tv" and held.lam <= 0.5
    return (
        [("lam", "with the total variation V is the (2λ − 1)/λ quantile, so it is above 0.5")] if low else []
    )


@part(
    "loss",
    equation=_equation,
    unit="transition",
    learns=("v",),
    needs={"target:q", "network:q", "network:v"},
    inert=_inert,
    impossible=_impossible,
    bounds={"lam": "from 0 up to 1", "temperature": "above 0", "clip": "above 0"},
)
def dual_v(
    learned: ActorCritic,
    rows: Transitions,
    *,
    divergence: Divergence = "chi2",
    lam: float = 0.7,
    temperature: float = 2.0,
    clip: float | None = 7.0,
    update: Part | None = None,
) -> Values:
    """V as the best in the data, by the dual of a divergence between what is done and the data.

    divergence    Pearson's `chi2`, total variation `tv`, or `reverse-kl`, which is XQL's Gumbel regression
    lam           towards 1, V goes to the largest Q in the data; of `tv` it is the (2λ − 1)/λ quantile
    temperature   of `reverse-kl`: towards 0, V goes to the largest Q
    clip          of `reverse-kl`: the most that x/α may be, and the batch rescaled by its largest; none: neither
    """
    value = learned.networks["v"](rows.observation)
    gap = wanted(learned, rows) - value
    if divergence == "reverse-kl":
        return gumbel_loss(gap, temperature, clip), {"v": value.detach()}
    return dual_loss(gap, divergence, lam), {"v": value.detach(), "above": (gap > 0).float()}


# ------------------------------------------------------------------ what V is, in one state


def best_value(qs: Tensor, divergence: Divergence, lam: float) -> float:
    """The V that minimises the mean loss over values Q of one state: where its slope changes sign, by bisection."""
    low, high = float(qs.min()) - 10 * float(qs.std()) - 10, float(qs.max()) + 10
    for _ in range(80):
        middle = torch.tensor((low + high) / 2, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(dual_loss(qs - middle, divergence, lam).mean(), middle)
        low, high = (float(middle.detach()), high) if slope < 0 else (low, float(middle.detach()))
    return high


def quantiles(seed: int) -> Mapping[str, float]:
    """61 values of Q in one state, one of them far out: what V comes to, for λ from 0.55 to 0.95.

    61, so that no quantile falls between two values.
    """
    qs = torch.randn(61, generator=torch_rng("dual-rl", seed), dtype=torch.float64)
    qs[0] = 30.0
    grid = torch.arange(0.55, 0.96, 0.05, dtype=torch.float64)
    found = {d: [best_value(qs, d, float(lam)) for lam in grid] for d in ("chi2", "tv")}
    exact = qs.sort().values[((2 * grid - 1) / grid * len(qs)).ceil().long() - 1]
    off = float((torch.tensor(found["tv"]) - exact).abs().max())
    falls = max(a - b for values in found.values() for a, b in itertools.pairwise(values))
    beyond = max(max(values) - float(qs.max()) for values in found.values())
    gumbel = gumbel_loss(100 * (qs.float() - qs.float().mean()), 1.0, None)
    return {
        "largest violation": max(off, falls, beyond, 0.0),
        "V at 0.95, chi2": found["chi2"][-1],
        "V at 0.95, tv": found["tv"][-1],
        "Gumbel loss finite, values times 100": float(gumbel.isfinite().all()),
    }


IDENTITY = Identity(
    "In one state V of the total variation is the (2λ − 1)/λ quantile of Q, and with either divergence it rises with λ "
    "and never above the largest Q, an outlier among them or not.",
    measure=quantiles,
    within=1e-5,
)
CLAIM = Learns(
    "With rewards of a tenth, V by the dual of χ² earns no less than IQL's expectile: within a twentieth of the room "
    "from chance to the best.",
    over="iql",
    margins=(50.0,),
    world="logged:pendulum-mixed",
    budget="steps=12",
    metric="success",
    best=-150.0,
    settings={
        "policy.hidden": (64, 64),
        "replay.batch": 64,
        "replay.gamma": 0.95,
        "targets.tau": 0.05,
        "replay.scale": 0.1,
        "losses.advantage_weighted.beta": 3.0,
        "run.held_out": 100,
    },
    tune={"update.lr": (3e-4, 1e-3, 3e-3)},
    reworded="it failed with rewards ten times as large, with which no side learns, IQL included.",
)


def _dual(huber: float | None = None, **settings: Any) -> Offline:
    _, policy, _ = iql().losses
    return iql().but(losses=(dual_v(**settings), policy, q_of_v(huber=huber)))


PUBLISHED: Published = {
    "arXiv 2302.08560, appendix": {
        "update.lr": 0.0003,
        "replay.gamma": 0.99,
        "targets.tau": 0.005,
        "losses.advantage_weighted.most": 100.0,
        "control:policy.hidden": (256, 256),
        "losses.dual_v.divergence": "chi2",
        "losses.dual_v.lam": 0.7,
    },
}
"""λ was tuned to each task, from 0.5 to 0.8."""


@method(
    "dual-rl@1",
    paper=198,
    base="iql",
    world="logged:pendulum-mixed",
    claim=CLAIM,
    published=PUBLISHED,
)
def dual_rl() -> Offline:
    """f-DVL of Dual RL (arXiv 2302.08560): V as the best in the data, by the dual of Pearson's χ².

    Staying near the data in a divergence, with Bellman's flow as the constraint, has an unconstrained dual in V. Each
    divergence gives an implicit maximum; XQL's is the reverse KL, whose exponential explodes on outliers.
    """
    return _dual(divergence="chi2", lam=0.7)


TV_PUBLISHED: Published = {
    "arXiv 2302.08560, appendix": {
        "update.lr": 0.0003,
        "replay.gamma": 0.99,
        "targets.tau": 0.005,
        "losses.advantage_weighted.most": 100.0,
        "control:policy.hidden": (256, 256),
        "losses.dual_v.divergence": "tv",
        "losses.dual_v.lam": 0.7,
    },
}


@method(
    "dual-rl-tv@1",
    paper=198,
    base="iql",
    world="logged:pendulum-mixed",
    claim=IDENTITY,
    published=TV_PUBLISHED,
)
def dual_rl_tv() -> Offline:
    """f-DVL of Dual RL (arXiv 2302.08560) with the total variation: V is the (2λ − 1)/λ quantile of Q in the data.

    The loss has no curvature, so it wants a lower rate of learning than χ².
    """
    return _dual(divergence="tv", lam=0.7)


XQL_PUBLISHED: Published = {
    "released code, offline/critic.py": {
        "losses.q_of_v.huber": 20.0,
        "losses.dual_v.divergence": "reverse-kl",
    },
    "released code, offline/reproduce/mujoco/mujoco_consistent.sh": {
        "losses.dual_v.temperature": 2.0,
        "losses.dual_v.clip": 7.0,
        "replay.batch": 256,
    },
    "released code, offline/configs/mujoco_config.py": {
        "losses.advantage_weighted.beta": 3.0,
        "update.lr": 0.0003,
        "replay.gamma": 0.99,
        "targets.tau": 0.005,
        "control:policy.hidden": (256, 256),
    },
    "released code, offline/learner.py": {
        "losses.advantage_weighted.schedule": "cosine",
    },
}


@method(
    "xql@1",
    base="iql",
    world="logged:pendulum-mixed",
    published=XQL_PUBLISHED,
)
def xql() -> Offline:
    """Extreme Q-Learning (arXiv 2301.02328): V by Gumbel regression, the soft maximum of Q in the data.

    Q's error is Huber's, a line from 20 on, and temperature and clip are the released code's for locomotion, where V
    also normalises its layers; here it does not.
    """
    return _dual(huber=20.0, divergence="reverse-kl", temperature=2.0, clip=7.0)
