"""MaxMin-RLHF: a reward model for each group of people that EM finds, and PPO for the group that is worst off."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from panoply.batch import Batch, Values
from panoply.errors import PanoplyError
from panoply.evidence import races
from panoply.evidence.claims import Ranks, Shows
from panoply.experience import Experience
from panoply.methods.base.reward_model import TINY as JUDGE_TINY
from panoply.parts import Finding, Part, part
from panoply.recipes import Recipe, Stage
from panoply.regimes import Dataset
from panoply.registry import Published, method, recipe
from panoply.slots.data.preferences import preferences
from panoply.slots.reduce.averages import token_mean
from panoply.slots.schedule.schedules import cosine
from panoply.slots.update.optimisers import adam

LETTERS = "abcdefghijkl"
"""What groups are called: nothing is known of them but who is in each."""

# ------------------------------------------------------------------ a reward model of several groups


def e_step(told: Tensor, owner: Tensor, shares: Tensor, soft: bool) -> Tensor:
    """Which group each annotator belongs to, [annotators, groups], by all pairs of theirs.

    u(h) = argmax_u Π_{D_h} σ(r_u(y_w) − r_u(y_l)), or softly w_hu ∝ p(u)·Π_{D_h} σ(…) with p(u) the mean of w so far.

    told     [pairs, groups]: log σ of the pair's margin to each group
    owner    [pairs]: whose pair it is, −1 for one that was not seen yet
    shares   the last step's, which stand for whoever was not heard
    """
    known, (people, groups) = owner >= 0, shares.shape
    sums = told.new_zeros(people, groups).index_add(0, owner[known], told[known])
    count = torch.bincount(owner[known], minlength=people)
    heard = count > 0
    if soft:
        found = (sums + shares[heard].mean(0).log()).softmax(1)
    else:
        found = F.one_hot(sums.argmax(1), groups).to(shares.dtype)
    return refilled(torch.where(heard[:, None], found, shares), sums / count.clamp(min=1)[:, None], heard)


def refilled(shares: Tensor, fit: Tensor, heard: Tensor) -> Tensor:
    """A group of less than half a person begins again: with whom his own group explains least, if it has others.

    So groups begin, too: all are in the first one, until the one who fits it least is given the next.
    """
    shares = shares.clone()
    for group in range(shares.shape[1]):
        size, own = shares.sum(0), shares.argmax(1)
        free = heard & (size[own] >= 1.5)
        if size[group] < 0.5 and bool(free.any()):
            fits = torch.where(free, fit.gather(1, own[:, None])[:, 0], torch.inf)
            shares[fits.argmin()] = F.one_hot(torch.tensor(group), shares.shape[1]).to(shares.dtype)
    return shares


def _margins(batch: Batch, groups: int) -> Tensor:
    """[pairs, groups]: by how much each group's output prefers the chosen answer."""
    sides = (batch.pair_rows(batch.now[f"judged:{name}"]) for name in LETTERS[:groups])
    return torch.stack([chosen - rejected for chosen, rejected in sides], 1)


def _keys(batch: Batch) -> list[int]:
    """Which pair each is: by its number in a set, or else by its task, which each line of a file is."""
    if "pair" in batch.pairs:
        return batch.pairs.tensor("pair").tolist()
    return batch.pair_rows(batch.by("episode").first(batch["task"]))[0].tolist()


def _em(
    state: dict[str, Any],
    batch: Batch,
    *,
    weight: float | Part,
    groups: int,
    soft: bool,
    warmup: int,
    every: int,
) -> tuple[dict[str, Any], Tensor]:
    """Remember what was told of the pairs of this mini-batch; every few steps, ask again who belongs where."""
    who = batch.pairs.tensor("annotator").cpu() if "annotator" in batch.pairs else torch.tensor([-1])
    if bool((who < 0).any()):
        raise PanoplyError(
            "Groups are found by who preferred what, and not all pairs say who: each needs its annotator."
        )
    told, keys = F.logsigmoid(_margins(batch, groups)).double().cpu(), _keys(batch)
    places = {key: at for at, key in enumerate(dict.fromkeys([*state["pairs"].tolist(), *keys]))}
    kept, owner = state["told"].reshape(-1, groups), state["owner"]
    if more := len(places) - len(owner):
        kept = torch.cat([kept, kept.new_zeros(more, groups)])
        owner = torch.cat([owner, owner.new_full((more,), -1)])
    at = torch.tensor([places[key] for key in keys])
    kept[at], owner[at] = told, who
    shares = state["shares"].reshape(-1, groups)
    if (more := int(owner.max()) + 1 - len(shares)) > 0:
        shares = torch.cat([shares, F.one_hot(torch.zeros(more, dtype=torch.long), groups).double()])
    step = state["step"] + 1
    if step > warmup and (step - warmup - 1) % every == 0:
        shares = e_step(kept, owner, shares, soft)
    state = {"step": step, "pairs": torch.tensor(list(places)), "told": kept.flatten(), "owner": owner}
    return {**state, "shares": shares.flatten()}, shares.to(batch.now["judged"].device, torch.float32)


def _no_groups() -> dict[str, Any]:
    none, nobody = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.long)
    return {"step": 0, "pairs": nobody, "told": none, "owner": nobody, "shares": none}


def _mixture_impossible(held: Any, method: Any) -> list[Finding]:
    data = method.slots()["data"].settings()
    if data.get("annotators") == 0:
        return [("", "groups are found by who preferred what: say how many are asked with data.annotators")]
    if data.get("pairs") == 0:
        return [
            (
                "",
                "all pairs of an annotator count, gone through again and again: say how many with data.pairs",
            )
        ]
    if data.get("annotators", held.groups) < held.groups:
        return [("groups", f"of {data['annotators']} annotators (data.annotators) one group would be empty")]
    if data.get("pairs", data.get("annotators", 0)) < data.get("annotators", 0):
        return [
            ("", f"of {data['annotators']} annotators some have no pair among {data['pairs']} (data.pairs)")
        ]
    return []


def _numbers(who: Iterable[int]) -> str:
    """`0–9, 11`."""
    runs: list[list[int]] = []
    for number in who:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def _who(held: Any, state: Mapping[str, Any]) -> Iterator[str]:
    shares = state["shares"].reshape(-1, held.groups)
    for group, name in enumerate(LETTERS[: held.groups]):
        who = _numbers((shares.argmax(1) == group).nonzero()[:, 0].tolist())
        size = float(shares[:, group].sum())
        yield f"group {name}: {size:.3g} of {len(shares)} annotators{f', number {who}' if who else ''}"


@part(
    "loss",
    equation=lambda held: (
        f"−Σ_u w_hu·log σ(r_u,chosen − r_u,rejected), u = {', '.join(LETTERS[: held.groups])}"
    ),
    unit="pair",
    stream="imitation",
    needs=lambda held: frozenset({"judged", *(f"judged:{name}" for name in LETTERS[: held.groups])}),
    scores="none",
    state=_no_groups,
    prepare=_em,
    impossible=_mixture_impossible,
    bounds={"weight": "above 0", "groups": "from 2 to 12", "warmup": "at least 0", "every": "at least 1"},
    tells=_who,
)
def mixture(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    groups: int = 2,
    soft: bool = False,
    warmup: int = 20,
    every: int = 5,
) -> Values:
    """A reward model of several groups of annotators, learned by EM: who belongs where, by all pairs of theirs.

    The outputs of the model are the groups' rewards, called a, b, …; steps of the optimiser between two E-steps are the
    M-step. What a pair was worth to each group is remembered from when it was last seen; where a step sees all pairs,
    the E-step is exact. Pairs of a file that names annotators will do (`--data FILE.jsonl --set data=teacher_pairs`).

    soft     whether annotators belong to several groups, each in part
    warmup   steps in which all are in the first group
    every    steps from one E-step to the next
    """
    margins = _margins(batch, groups)
    shares = batch.prepared["mixture"][batch.pairs.tensor("annotator")].to(margins.dtype)
    own = margins.detach().gather(1, shares.argmax(1, keepdim=True))[:, 0]
    stats = {"margin": own, "accuracy": (own > 0).float()}
    stats |= {f"share_{name}": shares[:, group] for group, name in enumerate(LETTERS[:groups])}
    return -(shares * F.logsigmoid(margins)).sum(1), stats


# ------------------------------------------------------------------ the group that is worst off


def _worth(held: Any, state: Mapping[str, Any]) -> Iterator[str]:
    for name, worth, weight in zip(held.names, state["worth"].tolist(), state["told"].tolist(), strict=False):
        share, group = weight / state["steps"], name.removeprefix("model_")
        yield f"group {group}: answers are worth {worth:+.2f} deviations of the start's; {share:.0%} of steps were its"


def _worst_impossible(held: Any, method: Any) -> list[Finding]:
    return [("names", "the worst is one of at least two")] if len(held.names) < 2 else []


def _worst_inert(held: Any, method: Any) -> list[Finding]:
    found = [("to", "beta is 0")] if held.beta == 0 else []
    if held.by != "weights":
        found.append(("rate", f"by={held.by}"))
    if held.by == "mean":
        found.append(("memory", "by=mean"))
    return found


_WORST = {
    "least": "z_u of the group u with the least F_u",
    "weights": "Σ_u w_u·z_u, w_u ∝ w_u·exp(−η·F_u)",
    "mean": "mean_u z_u",
}


@part(
    "reward",
    equation=lambda held: f"{_WORST[held.by]}" + (f" − {held.beta:g}·log π/π_{held.to}" if held.beta else ""),
    needs=lambda held: (
        frozenset({"world:verify", *(f"signal:{name}" for name in held.names)})
        | (frozenset() if held.beta == 0 or held.to == "behaviour" else frozenset({f"logp@{held.to}"}))
    ),
    state=lambda: (
        dict.fromkeys(("mean", "std", "worth", "weight", "told"), torch.zeros(0, dtype=torch.float64))
        | {"steps": 0}
    ),
    impossible=_worst_impossible,
    inert=_worst_inert,
    bounds={"beta": "at least 0", "memory": "from 0 up to 1", "rate": "above 0"},
    tells=_worth,
)
def worst_group(
    state: dict[str, Any],
    experience: Experience,
    *,
    names: tuple[str, ...] = ("model_a", "model_b"),
    by: Literal["least", "weights", "mean"] = "least",
    memory: float = 0.9,
    rate: float = 0.1,
    beta: float = 0.05,
    to: str = "reference",
) -> tuple[dict[str, Any], Tensor]:
    """The reward of the group that is worst off now: max_π min_u F_u(π), F_u = E[z_u] − β·KL(π‖π_ref).

    z_u is u's reward in deviations of the first batch, which the start has sampled: the offsets of two reward models
    mean nothing, and without this the least is whose offset is lowest.

    names    signals, one a group
    by       `least` learns for one group at a time; `weights` for all, of which the worse off weigh ever more
             (multiplicative weights); `mean` for all alike, which is the average of reward models
    memory   how much of F_u is that of the steps before; at 0 the worst group may change in every step
    """
    episodes = experience.by("episode")
    said = torch.stack([episodes.sum(experience[f"signal:{name}"].double()) for name in names])
    first = state["steps"] == 0
    mean, std = (said.mean(1), said.std(1).clamp(min=1e-6)) if first else (state["mean"], state["std"])
    z = (said - mean[:, None]) / std[:, None]
    away = torch.zeros_like(experience["logp"])
    if beta:
        away = experience["logp"] - experience["logp" if to == "behaviour" else f"logp@{to}"]
    worth = z.mean(1) - beta * episodes.sum(away.double()).mean()
    worth = worth if first else memory * state["worth"] + (1 - memory) * worth
    weight = torch.full_like(worth, 1 / len(names)) if first else state["weight"]
    if by == "least":
        weight = F.one_hot(worth.argmin(), len(names)).double()
    elif by == "weights":
        weight = (weight.log() - rate * worth).softmax(0)
    told = weight if first else state["told"] + weight
    state = {
        "mean": mean,
        "std": std,
        "worth": worth,
        "weight": weight,
        "told": told,
        "steps": state["steps"] + 1,
    }
    earned = torch.where(episodes.is_last(), episodes.rows(weight @ z), 0.0).float()
    return state, earned - beta * away if beta else earned


# ------------------------------------------------------------------ the work

PUBLISHED: Published = {
    "arXiv 2402.08925, §4 and 5": {"losses.mixture.groups": 2, "losses.mixture.soft": False},
}
"""No code was released. How often annotators are asked again who they are, rates and batches are chosen here."""


@method(
    "group-model@1", paper=137, world="strings:conflict", presets={"tiny": JUDGE_TINY}, published=PUBLISHED
)
def group_model() -> Dataset:
    """A reward model of several groups of people (arXiv 2402.08925), who are found by EM. −log σ(r_u,w − r_u,l).

    The policy's own decoder with one number for each group in place of its vocabulary. What is measured held out is how
    often it orders a pair as the annotator does, for the group that agrees with him most.
    """
    return Dataset(
        data=preferences(batch=64, pairs=440, annotators=22),
        losses=(mixture(),),
        reduce=token_mean(),
        update=adam(lr=9e-6, schedule=cosine(end=0.1)),
    )


CLAIM = Ranks(
    "Where ten people in eleven want the opposite of what the others want, PPO on one reward model of all their pairs "
    "serves the ten. PPO on the worse off of the two groups that EM finds leaves the worse off group better off, and "
    "no worse off than the average of the two groups' rewards does.",
    ("", "one reward model=rlhf", "average=maxmin-rlhf:optimise.reward.by=mean"),
    "strings:conflict",
    "optimise.steps=60",
    metric="world:least-group",
    leads=True,
    margins=(0.0, 0.03),
    best=2 / 3,
    settings={
        "imitate.run.steps": 20,
        "judge.run.steps": 100,
        "judge.data.pairs": 440,
        "judge.data.annotators": 22,
        "optimise.sample.prompts": 64,
    },
    tune={},
    fixed="all sides are PPO at the rate of its preset; what differs is whose reward it is paid",
    also=("group0", "group1", "from_reference"),
    shows=(Shows("group0", least=0.6),),
    waives={"problems": races.SIX_PROMPTS},
)
"""Before, answers are worth 0.69 to the ten and 0.47 to the one; who serves both alike gives each 2/3 at the most."""


@recipe("maxmin-rlhf@1", paper=137, world="strings:conflict", claim=CLAIM)
def maxmin_rlhf() -> Recipe:
    """MaxMin-RLHF (arXiv 2402.08925): find groups of people by EM, then please the one that is worst off.

    One reward model of all pairs is that of the majority: the further a small group is from it, the less it gets. Here
    annotators, not pairs, are sorted into groups, u(h) = argmax_u Π_{D_h} σ(r_u(y_w) − r_u(y_l)); each group has an
    output of one reward model; and max_π min_u E[r_u] − β·KL(π‖π_ref) is approached by one step of PPO after another
    on the reward of the group with the least worth at that time.

    What is surprising: two reward models have no common zero, so each is measured in deviations of the start's own
    answers; and the worst group of a single batch changes all the time, so its worth is a moving average, or all groups
    have weights (`optimise.reward.by=weights`). The paper speaks of no compromise; its majority falls from 70 to 57 %.
    The average of the groups' rewards is `optimise.reward.by=mean`. When it ends it names the groups, who is in them,
    and what the answers have become worth to each.

    Built here, and not stated in the paper: the moving average, the weights' rate, and how groups begin and begin again
    when nobody is left in one.
    """
    return Recipe(
        (
            Stage("imitate", "sft", options={"steps": 100}),
            Stage("judge", "group-model", options={"model": "@imitate"}),
            Stage(
                "optimise",
                "ppo",
                {
                    "models.reward_model.folder": "@judge",
                    "models.reward_model.outputs": ("a", "b"),
                    "reward": "worst_group",
                },
                {"model": "@imitate", "reference": "@imitate"},
            ),
        )
    )
