"""Odds ratio preference optimization."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from panoply.batch import Batch, Values
from panoply.methods.base.dpo import TINY as DPO_TINY
from panoply.methods.base.dpo import dpo
from panoply.parts import Part, part
from panoply.regimes import Dataset
from panoply.registry import Published, method
from panoply.slots.data.teacher import teacher_pairs
from panoply.slots.loss.pairs import chosen_nll, episode_scores, pair_stats
from panoply.slots.schedule.schedules import inverse_sqrt
from panoply.slots.update.optimisers import adam

TINY = {"update.schedule": "constant", **DPO_TINY, "data.batch": 64}


def log_odds(score: Tensor) -> Tensor:
    """log P/(1 − P) for P = e^score, without cancellation; P is kept below 1 by what float32 can tell from it."""
    score = score.clamp(max=-1e-7)
    small = score < -0.6931
    rest = torch.where(small, torch.log1p(-score.exp()), torch.log(-torch.expm1(score)))
    return score - rest


@part(
    "loss",
    equation="(−log σ(log odds_chosen − log odds_rejected)),  odds = P/(1 − P),  P = exp(mean log π)",
    unit="pair",
    stream="imitation",
    bounds={"weight": "above 0"},
)
def odds_ratio(batch: Batch, *, weight: float | Part = 0.1) -> Values:
    """The odds of the chosen side against those of the rejected one, P being the geometric mean over tokens."""
    chosen, rejected = batch.pair_rows(episode_scores(batch, None, per_token=True))
    margin = log_odds(chosen) - log_odds(rejected)
    return -F.logsigmoid(margin), pair_stats(margin, chosen, rejected)


PUBLISHED: Published = {
    "xfactlab/orpo, scripts/run_mistral_orpo_beta.sh": {
        "data.batch": 32,
        "losses.odds_ratio.weight": 0.1,
        "update.lr": 5e-6,
        "update.schedule": "inverse_sqrt",
        "update.schedule.warmup": 200,
    },
}


@method("orpo@1", base="dpo", presets={"tiny": TINY}, published=PUBLISHED)
def orpo() -> Dataset:
    """Odds Ratio Preference Optimization (arXiv 2403.07691).

    Imitation and preference in one stage and without a reference: −log π(chosen) + λ·L_OR. Odds discriminate more
    mildly than a probability ratio, so a weak second term is enough to keep what is rejected from rising together with
    what is imitated.
    """
    return dpo().but(
        data=teacher_pairs(batch=32),
        losses=(chosen_nll(weight=1.0), odds_ratio(weight=0.1)),
        update=adam(lr=5e-6, schedule=inverse_sqrt(warmup=200)),
    )
