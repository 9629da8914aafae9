"""How often a reward model orders two answers right that it was not trained on."""

from __future__ import annotations

import torch
from torch import Tensor

from panoply.batch import Batch
from panoply.evaluation.held_out import Evaluation
from panoply.experience import Experience, Segments
from panoply.parts import Part
from panoply.policies.value import ValueModel
from panoply.rollout.text import Collector


def evaluate_pairs(data: Part, collect: Collector, model: ValueModel, pairs: int) -> Evaluation:
    """Accuracy on pairs that the method's own data part makes of held-out tasks.

    Of answers with labels, any two that follow one another are a pair, label by label; the mean over labels is last.
    """
    right: dict[str, float] = {}
    counted: dict[str, int] = {}
    seen = 0
    state = data.info.state() if data.info.state is not None else None
    while seen < pairs:
        if state is None:
            experience = data(collect)
        else:
            state, experience = data(state, collect)
        with torch.no_grad():
            found = _labels(experience, model) if experience.pairs is None else _pairs(experience, model)
        for name, ordered in found.items():
            right[name] = right.get(name, 0.0) + float(ordered.sum())
            counted[name] = counted.get(name, 0) + len(ordered)
        seen += len(experience.by("episode")) if experience.pairs is None else experience.pairs.rows
    rates = {name: right[name] / max(1, counted[name]) for name in right}
    each = {f"accuracy_{name}": rate for name, rate in rates.items()} if len(rates) > 1 else {}
    return Evaluation(seen, {**each, "accuracy": sum(rates.values()) / len(rates)}, of="accuracy")


def _pairs(experience: Experience, model: ValueModel) -> dict[str, Tensor]:
    """Whether each pair is ordered right; of one whose order is not certain, how likely it is.

    Of a model of several groups, an annotator's pairs are judged for the group that orders most of them as he does.
    """
    batch = Batch(experience, {})
    sides = [batch.pair_rows(said) for said in _said(experience, model)]
    chosen, rejected = (torch.stack(side) for side in zip(*sides, strict=True))
    p = batch.pairs.tensor("p").to(chosen) if "p" in batch.pairs else torch.ones_like(chosen)
    right = torch.where(chosen > rejected, p, torch.where(chosen < rejected, 1 - p, 0.0))
    if len(right) == 1:
        return {"pairs": right[0]}
    people = Segments(batch.pairs.tensor("annotator"))
    group = torch.stack([people.mean(one) for one in right]).argmax(0)
    return {"pairs": right.gather(0, people.rows(group)[None])[0]}


def _said(experience: Experience, model: ValueModel) -> list[Tensor]:
    """What is said of each answer: by every output where annotators are known, else by all of them together."""
    assert experience.pairs is not None
    if len(model.outputs) > 1 and "annotator" in experience.pairs:
        return list(model.judgements(experience).values())
    return [model.judge(experience)]


def _labels(experience: Experience, model: ValueModel) -> dict[str, Tensor]:
    """For each label, whether an answer and the next one are ordered as it orders them, where it does."""
    said, episodes = model.judgements(experience), experience.by("episode")
    found = {}
    for name, column in said.items():
        gap = episodes.first(experience[f"label:{name}"]).diff()
        found[name] = (column.diff().sign() == gap.to(column.device).sign())[gap != 0]
    return found
