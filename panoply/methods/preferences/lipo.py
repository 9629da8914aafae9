"""Listwise preference optimisation: answers ranked in lists, and each pair by what its order costs."""

from __future__ import annotations

from typing import Any

from panoply.evidence.claims import Ranks
from panoply.evidence.races import SIX_PROMPTS
from panoply.methods.base.dpo import TINY as DPO_TINY
from panoply.methods.base.dpo import dpo
from panoply.regimes import Dataset
from panoply.registry import Published, method
from panoply.slots.data.lists import lists
from panoply.slots.loss.lists import lambda_rank

TINY: dict[str, Any] = {
    **DPO_TINY,
    "data.batch": 16,
    "data.prompts": 256,
    "data.temperature": 1.0,
    "data.top_k": 0,
    "losses.lambda_rank.normalise": True,
    "update.lr": 1e-4,
}

CLAIM = Ranks(
    "On lists of eight answers, ranked by one annotator's word on every two, LiPO-λ learns more than DPO on the best "
    "over the worst of each list, and than the likelihood of the whole order.",
    (
        "",
        "best over worst=lipo:losses=list_pairs,losses.list_pairs.pairs=best_worst",
        "order=lipo:losses=list_mle",
    ),
    world="strings",
    budget="steps=100",
    metric="area",
    settings={"world.sharpness": 4.0, "data.labels": "answers"},
    leads=True,
    also=("success", "world:kl", "mean:rank_accuracy"),
    waives={"problems": SIX_PROMPTS},
)


PUBLISHED: Published = {
    "arXiv 2402.01878, by notes on it": {
        "data.answers": 8,
        "data.whose": "policy",
        "data.refresh": 0,
        "data.temperature": 0.7,
        "data.top_k": 40,
        "losses.lambda_rank.beta": 0.05,
        "losses.lambda_rank.normalise": False,
        "losses.lambda_rank.to": "reference",
    },
}
"""Rates and batches could not be read, and are DPO's."""


@method(
    "lipo@1",
    paper=117,
    base="dpo",
    world="strings",
    presets={"tiny": TINY},
    claim=CLAIM,
    published=PUBLISHED,
    tags=("data=prefs", "feedback=offline", "feedback=annotators", "reward=implicit", "optimisation=direct"),
)
def lipo() -> Dataset:
    """LiPO-λ (arXiv 2402.01878). −Σ_ψi>ψj Δ_ij·log σ(s_i − s_j), s = β·Σ log π/π_ref over K answers to a prompt.

    Preferences come as ranked lists, and learning to rank knows what to do with them: the policy's log-ratio is an
    answer's score, and each pair's DPO loss is weighed by what swapping the two would change in DCG,
    Δ = |2^ψi − 2^ψj|·|1/log(1 + τ_i) − 1/log(1 + τ_j)|. So it matters how much better an answer is, and where it stands
    now: τ are ranks by the policy's own scores, looked at anew in every step and without a gradient, and not by the
    labels. The start's K answers are labelled once, ψ_i = mean_j P(y_i ≻ y_j); a list of two is DPO but for a constant.

    The other losses of the paper are settings of the same method: `losses=list_pairs` (DPO on all pairs, SLiC with
    `kind=hinge`), `list_mle` (Plackett–Luce), `list_softmax` (`target=shares`) and `list_pointwise`. Labels between 0
    and 1 make Δ small; `normalise` divides a list's weights by their sum, which the paper does not and the tiny preset
    does, so that a rate means the same for all these losses.
    """
    return dpo().but(
        data=lists(
            batch=64, answers=8, prompts=1024, whose="policy", temperature=0.7, top_k=40, labels="chances"
        ),
        losses=(lambda_rank(beta=0.05),),
    )
