"""Mixed Preference Optimization: DPO on pairs that are easy to tell apart, then PPO on the prompts of the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.evidence import races
from panoply.evidence.claims import Learns, Shows
from panoply.experience import Column, Experience, Ragged
from panoply.parts import Finding, part
from panoply.recipes import Recipe, Stage
from panoply.registry import recipe
from panoply.slots.data.preferences import pair_set
from panoply.slots.model.model import Model

if TYPE_CHECKING:
    from panoply.data_folder import Row
    from panoply.loops.making import Maker
    from panoply.loops.seat import Seat

PAIRS = 512


def threshold(margins: Tensor, quantile: float, gamma: float | None) -> float:
    """γ as it is given, or that below which the given share of all |m| lies: a reward model's scale means nothing."""
    return float(margins.abs().quantile(quantile)) if gamma is None else gamma


def easy_and_hard(margins: Tensor, gamma: float) -> tuple[list[int], list[int]]:
    """Of pairs by their margins: those above γ, the widest first, and those within ±γ. Below −γ they are neither.

    There the reward model contradicts the label, and is taken to be right.
    """
    order = margins.argsort(descending=True, stable=True).tolist()
    easy = [at for at in order if margins[at] > gamma]
    return easy, [at for at in range(len(margins)) if abs(margins[at]) <= gamma]


def _margins(maker: Maker, rows: Sequence[Row], judge: str, second: str) -> Tensor:
    """m = R(chosen) − R(rejected); of pairs of odd number by the second reward model, where there are two."""
    found = torch.zeros(len(rows), dtype=torch.float64)
    shares = ((judge, slice(0, None, 2)), (second, slice(1, None, 2))) if second else ((judge, slice(None)),)
    for model, share in shares:
        for side, sign in (("chosen", 1), ("rejected", -1)):
            said: list[Any] = [{**row, "answer": row[side]} for row in rows[share]]  # type: ignore[literal-required]
            found[share] += sign * torch.tensor(maker.judged(model, said), dtype=torch.float64)
    return found


def _split_equation(held: Any) -> str:
    kept = "those with m > γ" if held.keep == "easy" else "the prompts of those with |m| ≤ γ"
    gamma = f"quantile {held.quantile:g} of |m|" if held.gamma is None else f"{held.gamma:g}"
    return f"of {held.pairs} pairs {kept}, m = R(chosen) − R(rejected), γ = {gamma}"


def _split_inert(held: Any, method: Any) -> list[Finding]:
    return [] if held.gamma is None else [("quantile", "gamma is given")]


@part(
    "make",
    equation=_split_equation,
    needs={"world:text", "world:prefer", "world:teacher"},
    bounds={"pairs": "at least 2", "quantile": "from 0 to 1", "gamma": "at least 0"},
    inert=_split_inert,
)
def by_margin(
    maker: Maker,
    *,
    judge: str = "",
    second: str = "",
    pairs: int = PAIRS,
    keep: Literal["easy", "hard"] = "easy",
    quantile: float = 0.4,
    gamma: float | None = None,
) -> Iterator[Row]:
    """The pairs of `data.preferences` in a run of this seed, of which a reward model's margin says how easy each is.

    judge      the reward model
    second     another one: it judges the pairs of odd number, and `judge` those of even number, which neither was
               trained on (`data.without`); a model gives wide margins to the pairs it knows
    pairs      how many there are: as many as the reward model learned from
    keep       `easy`, whole pairs, the widest margin first; or `hard`, their prompts, for sample.among
    quantile   the share of all pairs that are within ±γ
    gamma      γ itself, in place of a share
    """
    collect = maker.collect("start")
    told = pair_set(collect, pairs, "teacher", 0)
    answers, decode = Ragged(told["tokens"], told["offsets"]), collect.policy.tokenizer.decode
    rows: list[Row] = []
    for number in range(pairs):
        place = collect.place(int(told["places"][number]))
        chosen, rejected = (answers[2 * number + side].tolist() for side in (0, 1))
        rows.append({**maker.row(place, collect.task(place), decode), "chosen": chosen, "rejected": rejected})
    margins = _margins(maker, rows, judge, second)
    easy, hard = easy_and_hard(margins, threshold(margins, quantile, gamma))
    for at in easy if keep == "easy" else hard:
        row: Row = {"task": rows[at]["task"], "id": rows[at]["id"], "prompt": rows[at]["prompt"]}
        row = {**rows[at]} if keep == "easy" else row
        yield {**row, "numbers": {"margin": float(margins[at])}}


@part("model", equation="log π/π of {folder}")
def distance(seat: Seat, *, folder: str = "", name: str = "from_imitator") -> Model:
    """A policy that is neither start nor reference, and how far one is from it: Σ log π/π_it, the signal NAME.

    It is there to be looked at: PPO is held to the policy that DPO has left, and may be far from the one before.
    """
    if not folder:
        raise PanoplyError("models.distance.folder is empty: name the run or folder of a policy.")

    def columns(policy: Any, experience: Experience) -> Mapping[str, Column]:
        theirs = policy.score(experience, frozenset())["logp"].to(experience["logp"].device)
        return {f"signal:{name}": experience["logp"] - theirs}

    return Model(seat.open(folder), columns)


CLAIM = Learns(
    "Where small differences are often judged wrong, PPO that begins with, and is held to, what DPO has learned from "
    "the pairs that are easy to tell apart reaches answers of more worth than PPO from the imitator, at equal samples.",
    over="PPO from the imitator=rlhf",
    world="strings",
    budget="optimise.steps=40",
    metric="true",
    best=1.0,
    settings={
        "world.sharpness": 4.0,
        "imitate.run.steps": 20,
        "judge.data.pairs": PAIRS,
        "judge.run.steps": 100,
        "optimise.sample.prompts": 64,
    },
    tune={"optimise.update.lr": races.RATES["update.lr"]},
    also=("success", "from_reference", "model"),
    shows=(Shows("true", most=0.9),),
    waives={"problems": races.SIX_PROMPTS},
)


def _stages(judges: Sequence[Stage], by: Mapping[str, str], reference: str) -> Recipe:
    reward = {"reward": "minus_kl", "reward.reward.name": "model", "reward.beta": 0.02}
    return Recipe(
        (
            Stage("imitate", "sft", options={"steps": 100}),
            Stage(
                "judge", "reward-model", {"data": "preferences", "data.pairs": PAIRS}, {"model": "@imitate"}
            ),
            *judges,
            Stage("easy", make=by_margin(keep="easy", **by)),
            Stage(
                "prefer",
                "dpo",
                {"data": "stored_pairs", "data.folder": "@easy"},
                {"model": "@imitate", "reference": "@imitate"},
            ),
            Stage("hard", make=by_margin(keep="hard", **by)),
            Stage(
                "optimise",
                "ppo",
                {
                    "sample": "among",
                    "sample.folder": "@hard",
                    "sample.group": 1,
                    "models.reward_model.folder": "@judge",
                    "models.distance.folder": "@imitate",
                    **reward,
                },
                {"model": "@prefer", "reference": reference},
            ),
        )
    )


@recipe("mpo-mixed@1", paper=95, world="strings", claim=CLAIM)
def mpo_mixed() -> Recipe:
    """MPO, mixed preference optimization (arXiv 2403.19443): easy pairs for DPO, hard prompts for PPO after it.

    A reward model gives every pair a margin m = R(y_w) − R(y_l). DPO learns from those with m > γ; pairs with m < −γ,
    whose label the model contradicts, are dropped. Then PPO, on the prompts of pairs with |m| ≤ γ alone, begins with
    the policy that DPO has left and is held to it: max E[R] − β·KL(π‖π_DPO), with a new critic.

    What is surprising: it is the reference that matters. Held to the imitator (`mpo-mixed-sft-reference`), PPO is
    drawn back from what DPO has learned. Both distances are in the record: `from_reference` is per token and to the DPO
    policy, `from_imitator` per answer and to the one before it.

    γ is a share of all pairs (`easy.quantile` and `hard.quantile`), since a reward model's scale means nothing, or a
    number (`easy.gamma`). DPO in the order of falling margins is `prefer.data.shuffled=false`. A reward model gives
    wide margins to the pairs it was trained on; `mpo-mixed-folds` has each pair judged by one that was not.

    No code was released; the threshold, the rule of what is dropped and β are not stated exactly, and chosen here.
    """
    return _stages((), {"judge": "@judge"}, "@prefer")


@recipe("mpo-mixed-sft-reference@1", paper=95, world="strings")
def mpo_mixed_sft_reference() -> Recipe:
    """MPO (arXiv 2403.19443) whose PPO is held to the imitator, not to what DPO has left: the authors' ablation."""
    return _stages((), {"judge": "@judge"}, "@imitate")


@recipe("mpo-mixed-folds@1", paper=95, world="strings")
def mpo_mixed_folds() -> Recipe:
    """MPO (arXiv 2403.19443) whose margins are of pairs that a reward model has not seen, by two folds.

    Two more reward models learn from half of the pairs each and judge the other half; PPO's reward is the one of all.
    """
    half = {"data": "preferences", "data.pairs": PAIRS}
    judges = (
        Stage("odd", "reward-model", {**half, "data.without": (0, 2)}, {"model": "@imitate"}),
        Stage("even", "reward-model", {**half, "data.without": (1, 2)}, {"model": "@imitate"}),
    )
    return _stages(judges, {"judge": "@odd", "second": "@even"}, "@prefer")
