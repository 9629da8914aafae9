"""Efficient exact optimization."""

from __future__ import annotations

from panoply.methods.base.dpo import dpo
from panoply.regimes import Dataset
from panoply.registry import Published, method
from panoply.slots.loss.pairs import reverse_kl

PUBLISHED: Published = {
    "arXiv 2402.00856, appendix B": {"data.batch": 64, "losses.reverse_kl.beta": 0.1, "update.lr": 1e-6},
    "arXiv 2402.00856, §3.2; TRL 1.16, dpo_config.py": {"losses.reverse_kl.smoothing": 1e-3},
}


@method("exo@1", base="dpo", published=PUBLISHED)
def exo() -> Dataset:
    """EXO (arXiv 2402.00856), on pairs: KL(p_policy ‖ p_labels).

    DPO descends the KL from the labels to the policy, which spreads a policy that cannot fit both over both; the other
    direction, which is that of reinforcement learning, lets it choose.
    """
    return dpo().but(losses=(reverse_kl(beta=0.1, smoothing=1e-3),))
