"""Losses of critics on transitions: how far they are from r + γ·V(s′)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from panoply.batch import Values
from panoply.experience import Segments
from panoply.parts import Part, part
from panoply.policies.deterministic import ActionValues
from panoply.transitions import ActorCritic, Transitions, squares

if TYPE_CHECKING:
    from panoply.replay import Replay


def _hubers(values: list[Tensor], target: Tensor, delta: float) -> Tensor:
    """Σ_i of each row: ½·(Q_i − y)² up to `delta` from y, and a line from there on."""
    return sum(
        (F.huber_loss(v, target.to(v.dtype), reduction="none", delta=delta) for v in values), target * 0
    )


@part(
    "loss",
    equation="Σ_i (Q_i(s,a) − (r + γ·min_j Q′_j(s′, π′(s′) + ε)))², ε ~ clip(N(0,{noise}²), ±{clip})",
    unit="transition",
    learns=("q",),
    needs={"target:q", "target:policy", "network:q", "policy:bounded", "world:continuous actions"},
    bounds={"noise": "at least 0", "clip": "at least 0"},
)
def smooth_q(
    learned: ActorCritic,
    rows: Transitions,
    *,
    noise: float = 0.2,
    clip: float = 0.5,
    update: Part | None = None,
) -> Values:
    """Clipped double Q-learning with a smoothed target policy (arXiv 1802.09477); with one Q and no noise DDPG's."""
    target = smooth_target(learned, rows, noise, clip)
    values = learned.networks["q"](rows.observation, learned.taken(rows))
    return squares(values, target), {"q": values[0].detach(), "target": target}


@torch.no_grad()
def smooth_next(learned: ActorCritic, rows: Transitions, noise: float, clip: float) -> Tensor:
    """The target policy's action at s′ with noise upon it, once an update."""

    def action() -> Tensor:
        plain = learned.act(rows.next_observation, target=True)
        if not noise:
            return plain
        return (plain + (noise * learned.noise(*plain.shape)).clamp(-clip, clip)).clamp(-1, 1)

    return rows.once(f"smooth next {noise} {clip}", action)


@torch.no_grad()
def smooth_target(learned: ActorCritic, rows: Transitions, noise: float, clip: float) -> Tensor:
    """r + γ·min_j Q′_j of that action, once an update."""
    return rows.once(
        f"smooth target {noise} {clip}",
        lambda: rows.target(
            learned.targets["q"].least(rows.next_observation, smooth_next(learned, rows, noise, clip))
        ),
    )


def _expected_needs(held: Any) -> frozenset[str]:
    needed = {"target:q", "network:q", "policy:noisy"}
    return frozenset(needed | ({"target:policy"} if held.follow == "target" else set()))


@part(
    "loss",
    equation=lambda held: (
        "Σ_i (Q_i(s,a) − (r + γ·E min_j Q′_j(s′,a′)))², a′ ~ " + ("π′" if held.follow == "target" else "π")
    ),
    unit="transition",
    learns=("q",),
    needs=_expected_needs,
    bounds={"samples": "at least 1"},
)
def expected_q(
    learned: ActorCritic,
    rows: Transitions,
    *,
    follow: Literal["policy", "target"] = "policy",
    samples: int = 1,
    update: Part | None = None,
) -> Values:
    """Q of the policy itself, of any kind of action: what comes next is worth what the policy gets of it on average.

    follow    whose actions a′ are: those of the policy (AWAC), or of its target (CRR)
    samples   how many are drawn; where actions can be counted, all are weighed by their probability instead
    """
    after = learned.worth(
        learned.targets["q"], rows.next_observation, samples, rows.next_legal, target=follow == "target"
    )
    target = rows.target(after)
    values = learned.networks["q"](rows.observation, learned.taken(rows))
    return squares(values, target), {"q": values[0].detach(), "target": target}


# ------------------------------------------------------------------ without acting


def wanted(learned: ActorCritic, rows: Transitions) -> Tensor:
    """min_j Q′_j(s, a) of what was done, once an update."""
    with torch.no_grad():
        return rows.once(
            "least target", lambda: learned.targets["q"].least(rows.observation, learned.taken(rows))
        )


@part(
    "loss",
    equation="|{expectile} − 1(u < 0)|·u², u = min_j Q′_j(s,a) − V(s)",
    unit="transition",
    learns=("v",),
    needs={"target:q", "network:q", "network:v"},
    bounds={"expectile": "from 0 up to 1"},
)
def expectile_v(
    learned: ActorCritic, rows: Transitions, *, expectile: float = 0.7, update: Part | None = None
) -> Values:
    """V as an upper expectile of Q over the actions in the data (arXiv 2110.06169): the best that was done there."""
    value = learned.networks["v"](rows.observation)
    gap = wanted(learned, rows) - value
    weight = (expectile - (gap < 0).to(gap.dtype)).abs()
    return weight * gap.square(), {"v": value.detach()}


@part(
    "loss",
    equation=lambda held: (
        "Σ_i (Q_i(s,a) − (r + γ·V(s′)))²"
        if held.huber is None
        else f"Σ_i huber(Q_i(s,a) − (r + γ·V(s′)), {held.huber:g})"
    ),
    unit="transition",
    learns=("q",),
    needs={"network:q", "network:v"},
    bounds={"huber": "above 0"},
)
def q_of_v(
    learned: ActorCritic, rows: Transitions, *, huber: float | None = None, update: Part | None = None
) -> Values:
    """Q from V of what came next: no action is asked about that the data does not have (arXiv 2110.06169).

    huber: the error from which on ½·error² is a line (XQL, arXiv 2301.02328); none: error², whatever it is
    """
    target = rows.target(learned.after(rows))
    values = learned.networks["q"](rows.observation, learned.taken(rows))
    stats = {"q": values[0].detach(), "target": target}
    return (squares(values, target) if huber is None else _hubers(values, target, huber)), stats


# ------------------------------------------------------------------ returns


@torch.no_grad()
def lambda_returns(learned: ActorCritic, replay: Replay, *, lam: float, **_: object) -> dict[str, Tensor]:
    """R = V + Σ_k (γλ)^k·δ_k of every step of whole episodes, and how much more it is than V, normalised."""
    every = replay.rows(torch.arange(len(replay)))
    value = learned.networks["v"](every.observation)
    after = learned.networks["v"](every.next_observation)
    gains = Segments(replay.episodes()).to_go(every.target(after) - value, replay.gamma * lam)
    return {"return": value + gains, "advantage": (gains - gains.mean()) / (gains.std() + 1e-5)}


@part(
    "loss",
    equation="½·(V(s) − R_λ)²,  λ = {lam}",
    unit="transition",
    learns=("v",),
    needs={"network:v"},
    gives={"column:advantage"},
    annotate=lambda_returns,
    bounds={"lam": "from 0 to 1"},
)
def return_v(
    learned: ActorCritic, rows: Transitions, *, lam: float = 0.95, update: Part | None = None
) -> Values:
    """V from λ-returns of the data, computed anew at every step of the run; needs replay.n_step = 1."""
    value = learned.networks["v"](rows.observation)
    return 0.5 * (value - rows["return"]).square(), {"v": value.detach()}


# ------------------------------------------------------------------ values of n actions


def _values_of(learned: ActorCritic) -> ActionValues:
    assert isinstance(learned.policy.head, ActionValues)
    return learned.policy.head


def _best_next(learned: ActorCritic, rows: Transitions, double: bool) -> tuple[Tensor, Tensor]:
    """The target's outputs at s′, and the legal action judged best there: by the target, or by the policy itself."""
    target = learned.targets["policy"]
    out = target.model(rows.next_observation)
    judged = learned.policy.model(rows.next_observation) if double else out
    return out, only(_values_of(learned).values(judged), rows.next_legal).argmax(-1)


def only(values: Tensor, legal: Tensor | None) -> Tensor:
    """[rows, n] values of actions, −∞ where one cannot be taken."""
    return values if legal is None else values.masked_fill(~legal, -torch.inf)


def _of(values: Tensor, action: Tensor) -> Tensor:
    """The entries of the actions that were taken."""
    place = action.view(-1, 1, *(1,) * (values.dim() - 2)).expand(-1, 1, *values.shape[2:])
    return values.gather(1, place)[:, 0]


@part(
    "loss",
    equation=lambda held: (
        "huber(Q(s,a) − (r + γ·"
        + ("Q′(s′, argmax_a′ Q(s′,a′))" if held.double else "max_a′ Q′(s′,a′)")
        + "))"
        + (f" + {held.conservative:g}·(log Σ_b exp Q(s,b) − Q(s,a))" if held.conservative else "")
    ),
    unit="transition",
    needs={"target:policy", "policy:values", "world:discrete actions"},
    bounds={"conservative": "at least 0"},
)
def q_learning(
    learned: ActorCritic,
    rows: Transitions,
    *,
    double: bool = False,
    conservative: float = 0.0,
    update: Part | None = None,
) -> Values:
    """Deep Q-learning with a target network and Huber's loss (doi 10.1038/nature14236), over legal actions.

    double: the policy chooses the next action and the target values it (arXiv 1509.06461).
    conservative: weight of pressing down what the data did not do, CQL(H) (arXiv 2006.04779).
    """
    with torch.no_grad():
        out, best = _best_next(learned, rows, double)
        target = rows.target(_of(_values_of(learned).values(out), best))
    every = _values_of(learned).values(learned.policy.model(rows.observation))
    value = _of(every, rows.action)
    loss = F.smooth_l1_loss(value, target, reduction="none")
    stats = {"q": value.detach(), "target": target}
    if conservative:
        gap = only(every, rows.legal).logsumexp(-1) - value
        loss, stats["conservative_gap"] = loss + conservative * gap, gap.detach()
    return loss, stats


@part(
    "loss",
    equation="huber(Q(s,a) − G),  G_t = r + γ·((1 − c)·max_a′ Q′(s′,a′) + c·G_t+1),  c = {lam} while a′ is greedy",
    unit="transition",
    needs={"target:policy", "policy:values", "world:discrete actions", "replay:chunk"},
    bounds={"lam": "from 0 to 1"},
)
def watkins_q(
    learned: ActorCritic, rows: Transitions, *, lam: float = 0.9, update: Part | None = None
) -> Values:
    """Q(λ) (Watkins 1989) over the steps of a chunk: returns of the data as long as it does what is thought best.

    With λ = 0 this is Q-learning. What follows the chunk, or the data's first careless action, is worth max Q′.
    """
    chunk = rows.chunk
    assert chunk is not None
    with torch.no_grad():
        count, steps = chunk.reward.shape
        legal = None if chunk.next_legal is None else chunk.next_legal.flatten(0, 1)
        out = learned.targets["policy"].model(chunk.next_observation.flatten(0, 1))
        worth, best = (x.view(count, steps) for x in only(_values_of(learned).values(out), legal).max(-1))
        target = chunk.reward[:, -1] + chunk.discount[:, -1] * worth[:, -1]
        for t in range(steps - 2, -1, -1):
            goes_on = chunk.inside[:, t + 1] & (best[:, t] == chunk.action[:, t + 1])
            after = torch.where(goes_on, worth[:, t].lerp(target, lam), worth[:, t])
            target = chunk.reward[:, t] + chunk.discount[:, t] * after
    value = _of(_values_of(learned).values(learned.policy.model(rows.observation)), rows.action)
    return F.smooth_l1_loss(value, target, reduction="none"), {"q": value.detach(), "target": target}


@part(
    "loss",
    equation="−Σ_z Φ(r + γ·Z′(s′,a*))_z·log Z(s,a)_z",
    unit="transition",
    needs={"target:policy", "policy:atoms", "world:discrete actions"},
)
def categorical_q(
    learned: ActorCritic, rows: Transitions, *, double: bool = False, update: Part | None = None
) -> Values:
    """C51 (arXiv 1707.06887): the distribution of returns over fixed points, cross-entropy to the projected target."""
    head = _values_of(learned)
    with torch.no_grad():
        out, best = _best_next(learned, rows, double)
        chances = _of(head.log_chances(out), best).exp()
        target = project(chances, rows.reward, rows.discount, head.points)
    logp = _of(head.log_chances(learned.policy.model(rows.observation)), rows.action)
    return -(target * logp).sum(-1), {"q": (logp.detach().exp() * head.points).sum(-1)}


def project(chances: Tensor, reward: Tensor, discount: Tensor, points: Tensor) -> Tensor:
    """The distribution of r + γ·Z on evenly spaced points: each mass is shared by its two neighbours."""
    low, high = points[0], points[-1]
    gap = (high - low) / (len(points) - 1)
    place = ((reward[:, None] + discount[:, None] * points).clamp(low, high) - low) / gap
    share = (1 - (place[:, :, None] - torch.arange(len(points), device=points.device)).abs()).clamp(min=0)
    return (chances[:, :, None] * share).sum(1)
