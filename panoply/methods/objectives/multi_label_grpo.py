"""Multi-label GRPO: a reward model that judges several aspects apart, and GRPO on their weighted sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from panoply.evidence import races
from panoply.evidence.claims import Learns, Shows
from panoply.experience import Experience, Segments
from panoply.methods.base.reward_model import TINY as JUDGE_TINY
from panoply.parts import Finding, part
from panoply.recipes import Recipe, Stage
from panoply.regimes import Dataset
from panoply.registry import Published, method, recipe
from panoply.slots.data.labelled import TOTAL, labelled
from panoply.slots.loss.values import squared_labels
from panoply.slots.reduce.averages import token_mean
from panoply.slots.schedule.schedules import cosine
from panoply.slots.update.optimisers import adam

ASPECTS = ("length", "alternation", "balance", "avoids")
"""What answers of the world `strings` are worth, one by one."""
SAID = tuple(f"model_{aspect}" for aspect in ASPECTS)
"""The signals that a judge of all aspects gives."""


def _aspects_impossible(held: Any, method: Any) -> list[Finding]:
    if not held.names:
        return [("names", "there is nothing to standardise")]
    if held.weights and len(held.weights) != len(held.names):
        return [("weights", f"there are {len(held.names)} aspects, and one weight each")]
    return []


@part(
    "credit",
    equation="A = Σ_k w_k·(f_k − mean_group(f_k)) / (std_group(f_k) + ε)",
    needs=lambda held: frozenset({"world:verify", *(f"signal:{name}" for name in held.names)}),
    impossible=_aspects_impossible,
    bounds={"weights": "any number", "epsilon": "above 0"},
)
def each_aspect(
    experience: Experience,
    *,
    names: tuple[str, ...] = ("success",),
    weights: tuple[float, ...] = (),
    epsilon: float = 1e-4,
) -> Tensor:
    """Every aspect in deviations of its own, then added up, so that none is louder for varying more.

    So do MO-GRPO (arXiv 2509.22047) and GDPO (arXiv 2601.05242), which besides divides by the batch's deviation.

    names     signals; the reward is not looked at
    weights   one each; without, all count alike
    """
    episodes = experience.by("episode")
    peers = Segments(episodes.first(experience["group"]))
    found = torch.zeros(len(episodes), dtype=torch.float64, device=episodes.index.device)
    for name, weight in zip(names, weights or (1.0,) * len(names), strict=True):
        worth = episodes.sum(experience[f"signal:{name}"].double())
        spread = torch.where(peers.constant(worth), 0.0, peers.std(worth))
        found += weight * (worth - peers.rows(peers.mean(worth))) / (peers.rows(spread) + epsilon)
    return episodes.rows(found).float()


PUBLISHED: Published = {
    "arXiv 2503.21819": {"losses.squared_labels": "squared_labels"},
}
"""The paper trains one regression model with a number for each aspect. Its rates and batches are not known here."""


@method(
    "label-model@1",
    paper=164,
    world="strings",
    presets={"tiny": JUDGE_TINY},
    published=PUBLISHED,
    tags=("data=scores", "feedback=annotators"),
)
def label_model() -> Dataset:
    """A reward model of several outputs (arXiv 2503.21819). mean over answers of Σ_k (f_k − label_k)².

    The policy's own decoder with one number for each label in place of its vocabulary, read after the last token. What
    is measured held out is how often it orders two answers as a label does, label by label. Its outputs bear the
    labels' names, and `models.reward_model.outputs` takes them up.
    """
    return Dataset(
        data=labelled(names=ASPECTS),
        losses=(squared_labels(names=ASPECTS),),
        reduce=token_mean(),
        update=adam(lr=9e-6, schedule=cosine(end=0.1)),
    )


def _stages(judge: dict[str, Any], optimise: dict[str, Any]) -> Recipe:
    group = {"sample.group": 8, "regularise": "kl", "regularise.kl.weight": 0.04}
    return Recipe(
        (
            Stage("imitate", "sft", options={"steps": 100}),
            Stage("judge", "label-model", judge, {"model": "@imitate"}),
            Stage(
                "optimise",
                "grpo",
                {**group, "models.reward_model.folder": "@judge", **optimise},
                {"model": "@imitate", "reference": "@imitate"},
            ),
        )
    )


CLAIM = Learns(
    "From as many noisy labels, a reward model that learns four aspects apart leads GRPO to answers whose least aspect "
    "is worth more than those of one that learns their sum.",
    over="single-label-grpo",
    world="strings",
    budget="optimise.steps=80",
    metric="least",
    best=1.0,
    settings={"judge.data.answers": 500, "judge.data.noise": 0.3, "judge.run.steps": 120},
    tune={"optimise.update.lr": races.RATES["update.lr"]},
    also=("success", "true", *ASPECTS, "from_reference"),
    shows=(Shows("least", most=0.85),),
    waives={"problems": races.SIX_PROMPTS},
)


@recipe("multi-label-grpo@1", paper=164, world="strings", claim=CLAIM)
def multi_label_grpo() -> Recipe:
    """Multi-label GRPO (arXiv 2503.21819). R = Σ_k w_k·f_k(x, y), one model f with an output for each aspect.

    Answers are labelled in several respects, in the paper politeness, meaning, use and safety, and one model learns to
    say all of them; GRPO earns their weighted sum. A model that learns only the sum sees one number where this one sees
    four, and cannot be weighed anew: here `optimise.reward.weights` changes what counts without another judge. What it
    says is kept within the labels' range, 0 to 1, and every aspect is logged, said (`model_length`) and true
    (`length`), since over a sum alone one cannot see what is given up.

    What is surprising: the group's deviation is that of the sum, so an aspect that varies more counts for more,
    whatever its weight. `optimise.credit=each_aspect` standardises each by itself. How an advantage divides into
    aspects is not logged. Groups of 8 and a KL term of 0.04 are reconstructed, since the authors' numbers are not
    known; they train adapters (`--lora`).
    """
    return _stages(
        {},
        {
            "models.reward_model.outputs": ASPECTS,
            "models.reward_model.within": (0.0, 1.0),
            "reward": "blend",
            "reward.names": SAID,
        },
    )


@recipe("single-label-grpo@1", world="strings")
def single_label_grpo() -> Recipe:
    """What multi-label GRPO is compared with: the same labels, added up before one output learns them."""
    return _stages(
        {"data.summed": True, "losses.squared_labels.names": (TOTAL,)},
        {"models.reward_model.within": (0.0, float(len(ASPECTS))), "reward.name": "model"},
    )
