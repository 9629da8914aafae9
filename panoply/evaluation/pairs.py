"""How often a reward model orders pairs right that it was not trained on."""

from __future__ import annotations

import torch

from panoply.batch import Batch
from panoply.evaluation.held_out import Evaluation
from panoply.parts import Part
from panoply.policies.value import ValueModel
from panoply.rollout.text import Collector


def evaluate_pairs(data: Part, collect: Collector, model: ValueModel, pairs: int) -> Evaluation:
    """Accuracy on pairs that the method's own data part makes of held-out tasks."""
    right, seen = 0.0, 0
    state = data.info.state() if data.info.state is not None else None
    while seen < pairs:
        if state is None:
            experience = data(collect)
        else:
            state, experience = data(state, collect)
        with torch.no_grad():
            chosen, rejected = Batch(experience, {}).pair_rows(model.judge(experience))
        right += float((chosen > rejected).sum())
        seen += len(chosen)
    return Evaluation(seen, {"accuracy": right / seen}, of="accuracy")
