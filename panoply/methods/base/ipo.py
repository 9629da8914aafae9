"""Identity Preference Optimization."""

from __future__ import annotations

from panoply.methods.base.dpo import dpo
from panoply.regimes import Dataset
from panoply.registry import method
from panoply.slots.loss.pairs import squared


@method(
    "ipo@1",
    base="dpo",
    published={"arXiv 2310.12036, eq. 17": {"losses.squared.per_token": False}},
)
def ipo() -> Dataset:
    """Identity Preference Optimization (arXiv 2310.12036, eq. 17).

    (ℓ_chosen − ℓ_rejected − 1/2β)² in place of DPO's likelihood: on preferences that are never contradicted DPO
    pushes without end, whatever β, and IPO stops at a gap. The paper's ℓ is a sum over tokens; TRL takes the mean,
    which its maintainers say the authors' experiments did too (`losses.squared.per_token=true`). Its
    experiments are on a bandit of three actions, so that all but the loss is DPO's.
    """
    return dpo().but(losses=(squared(beta=0.1),))
