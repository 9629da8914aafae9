"""Which estimator of policies' values picks a good portfolio at little risk?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from panoply.errors import PanoplyError
from panoply.evaluation.sharpe import portfolio, sharpe_ratio_at_k
from panoply.evidence.claims import Ahead
from panoply.registry import protocol
from panoply.seeds import numpy_rng

if TYPE_CHECKING:
    from panoply.evaluation.judged import Judged
    from panoply.worlds.control.mdp import MDP
    from panoply.worlds.logged.data import LoggedData

Array = NDArray[Any]
POLICIES = 10
PORTFOLIOS = range(4, 8)
"""The numbers of policies that are deployed: those among which a wrong one can be."""


def estimators(seed: int) -> tuple[Array, Array, Array]:
    """True values, best first, and two estimates of them, equal in squared error and in rank correlation.

    The first takes a near-best policy for a poor one, the second a near-worst one for a good one: the first seen from
    below, with true values that lie symmetrically.
    """
    gaps = numpy_rng("sharpe", seed).uniform(0.5, 1.5, POLICIES // 2)
    true = np.append(0, np.cumsum(np.concatenate([gaps, gaps[-2::-1]])))[::-1]
    order = [0, 2, 3, 4, 5, 6, 1, 7, 8, 9]
    careful = np.empty(POLICIES)
    careful[order] = true
    risky = true[0] - careful[::-1]
    return true, careful, risky


def measure(seed: int) -> dict[str, float]:
    """By how much the careful estimator's ratio is higher, on average over the sizes of portfolios."""
    true, careful, risky = estimators(seed)
    behaviour = float(np.median(true))
    ratio = [
        np.mean([sharpe_ratio_at_k(of, true, behaviour, k) for k in PORTFOLIOS]) for of in (careful, risky)
    ]
    errors = [float(((of - true) ** 2).mean()) for of in (careful, risky)]
    ranks = [float(np.corrcoef(_ranks(of), _ranks(true))[0, 1]) for of in (careful, risky)]
    return {
        "SharpeRatio@k": float(ratio[0] - ratio[1]),
        "squared error": errors[0] - errors[1],
        "rank correlation": ranks[0] - ranks[1],
    }


def _ranks(values: Array) -> Array:
    return np.argsort(np.argsort(values))


# ------------------------------------------------------------------ estimators of logged data

GAMMA, HORIZON, EPISODES, CANDIDATES = 0.95, 8, 1000, 12


def logged_values(seed: int, episodes: int = EPISODES) -> tuple[Array, float, dict[str, Array]]:
    """True values of twelve policies, that of the behaviour policy, and what each estimator makes of logged episodes.

    A random MDP of five states. Behaviour is half greedy, half any action; candidates are policies of perturbed values,
    more or less soft. DM is fitted Q evaluation; PDIS, WPDIS (self-normalised) and DR weigh the logged steps.
    """
    from panoply.evaluation import off_policy as ope
    from panoply.worlds.control.mdp import softmax
    from panoply.worlds.control.tabular import Tabular

    mdp = Tabular("random", size=5, actions=3, horizon=HORIZON, seed=seed).mdp
    dice = numpy_rng("sharpe policies", seed)
    best = mdp.optimal(GAMMA)
    policies = [
        softmax((best + dice.normal(size=best.shape) * best.std()) / (best.std() * temperature))
        for temperature in np.geomspace(0.1, 3.0, CANDIDATES)
    ]
    behaviour = 0.5 * softmax(best / (0.2 * best.std())) + 0.5 / best.shape[1]
    data = _logged(mdp, behaviour, episodes, numpy_rng("sharpe data", seed))
    found: dict[str, list[float]] = {name: [] for name in ("DM", "PDIS", "WPDIS", "DR")}
    features = ope.one_hot(mdp.states * HORIZON)
    for policy in policies:
        target = np.tile(policy, (HORIZON, 1)).__getitem__
        q = ope.fitted_q(data, target, features, GAMMA)
        found["DM"].append(ope.direct(data, target, q))
        found["PDIS"].append(ope.per_decision(data, target, GAMMA).value)
        found["WPDIS"].append(ope.weighted_per_decision(data, target, GAMMA).value)
        found["DR"].append(ope.doubly_robust(data, target, q, GAMMA).value)
    true = np.array([mdp.value(policy, GAMMA, HORIZON) for policy in policies])
    estimates = {name: np.array(values) for name, values in found.items()}
    return true, float(mdp.value(behaviour, GAMMA, HORIZON)), estimates


def _logged(mdp: MDP, behaviour: Array, episodes: int, dice: np.random.Generator) -> LoggedData:
    """Episodes of a policy in an MDP, all of them at once. They end at the horizon, so time is part of what is seen."""
    from panoply.worlds.logged.data import LoggedData

    state = dice.choice(mdp.states, episodes, p=mdp.start)
    steps = []
    for _ in range(HORIZON):
        action = (behaviour[state].cumsum(-1) > dice.random((episodes, 1))).argmax(-1)
        after = (mdp.transitions[state, action].cumsum(-1) > dice.random((episodes, 1))).argmax(-1)
        steps.append((state, action, mdp.rewards[state, action, after]))
        state = after
    seen, action, reward = (np.stack(column, 1).ravel() for column in zip(*steps, strict=True))
    turn = np.tile(np.arange(HORIZON), episodes)
    last = turn == HORIZON - 1
    columns = {"observation": turn * mdp.states + seen, "action": action, "reward": reward, "turn": turn}
    columns |= {"terminated": last, "truncated": np.zeros(len(seen), bool), "final": state}
    columns |= {"episode": np.repeat(np.arange(episodes), HORIZON)}
    return LoggedData({**columns, "logp": np.log(behaviour[seen, action])})


def judged(seed: int, episodes: int = EPISODES) -> dict[str, dict[str, float]]:
    """Each estimator's squared error, and its SharpeRatio@k for every k."""
    true, behaviour, estimates = logged_values(seed, episodes)
    return {
        name: {"squared error": float(((of - true) ** 2).mean())}
        | {f"@{k}": sharpe_ratio_at_k(of, true, behaviour, k) for k in range(2, len(true) + 1)}
        for name, of in estimates.items()
    }


def of_run(
    judged: Judged, *, k: int = 3, problems: int = 50, gamma: float = 0.99, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Each estimator's k favourites among the checkpoints of a run on logged data, by what they really earn.

    Estimates are made of the run's own data and only rank; true values are mean returns from held-out starts. DM is
    fitted Q evaluation, linear in squares and products of what is observed.
    """
    from panoply.evaluation import off_policy as ope

    data = getattr(judged.world, "data", None)
    if data is None or "logp" not in data.columns:
        raise PanoplyError(
            f"{judged.world.name} has no logged data whose behaviour's probabilities are known (logp), so no estimator "
            "can be judged: train on --world logged:WORLD-MIX."
        )
    steps = judged.steps()
    if not 2 <= k <= len(steps):
        raise PanoplyError(
            f"k is from 2 to the {len(steps)} checkpoints that are kept, not {k}: see run.keep."
        )
    policies = [judged.policy(step) for step in steps]
    true = np.array([judged.score(policy, problems, seed) for policy in policies])
    found: dict[str, list[float]] = {name: [] for name in ("DM", "PDIS", "WPDIS")}
    for policy in policies:
        q = ope.fitted_q(data, policy.chances, ope.squares(data), gamma, ridge=1e-3)
        found["DM"].append(ope.direct(data, policy.chances, q))
        found["PDIS"].append(ope.per_decision(data, policy.chances).value)
        found["WPDIS"].append(ope.weighted_per_decision(data, policy.chances).value)
    behaviour = float(ope.Episodes(data, policies[0].chances).reward.sum(1).mean())
    table = {}
    for name, of in found.items():
        picked = portfolio(np.array(of), true, k)
        ratio = sharpe_ratio_at_k(np.array(of), true, behaviour, k)
        table[name] = {
            f"SharpeRatio@{k}": ratio,
            "best": picked.best,
            "worst": picked.worst,
            "std": picked.std,
        }
    return {**table, "behaviour": {"best": behaviour}}


CLAIM = Ahead(
    "Of two estimators equal in squared error and in rank correlation, SharpeRatio@k prefers the one that underrates "
    "near-best policies to the one that overrates near-worst ones.",
    measure,
)


@protocol("sharpe-ratio-at-k@1", paper=28, claim=CLAIM, judge=of_run)
def sharpe(seed: int = 0) -> dict[str, float]:
    """SharpeRatio@k (arXiv 2311.18207): an off-policy estimator is judged by deploying the k policies it ranks highest.

    max(best true value among them − J(behaviour), 0) over the deviation of their true values: what is gained by the
    best of them, per risk taken while finding out which it is (`panoply.evaluation.sharpe`). `judged` judges the direct
    method, PDIS, its self-normalised form and DR that way, on 1,000 episodes logged in a random MDP and on twelve
    policies. Not there: marginal importance sampling, distributions of returns (CVaR, quantiles), and the paper's
    benchmark worlds.
    """
    return measure(seed)
