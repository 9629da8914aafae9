"""How often a reward model orders two answers right that it was not trained on, and whether it is as sure as right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from panoply.batch import Batch
from panoply.evaluation.held_out import Evaluation
from panoply.evaluation.reliability import reliability
from panoply.experience import Experience, Segments
from panoply.parts import Part
from panoply.policies.value import ValueModel
from panoply.rollout.text import Collector


@dataclass
class Margins:
    """What is gathered of pairs, batch after batch."""

    margins: list[float] = field(default_factory=list)
    p: list[float] = field(default_factory=list)
    groups: dict[str, list[str]] = field(default_factory=dict)

    def add(self, collect: Collector, experience: Experience, model: ValueModel) -> None:
        margins, p = _margins(experience, model)
        self.margins += margins.tolist()
        self.p += p.tolist()
        batch = Batch(experience, {})
        asked, _ = batch.pair_rows(experience.by("episode").first(experience["task"]))
        tasks = [collect.asked[task] for task in asked.tolist()]
        found = {
            "level": [str(task.level) for task in tasks],
            "domain": [collect.world.part_of(task) for task in tasks],
        }
        if "annotator" in batch.pairs:
            found["annotator"] = [
                collect.world.person(who) if who >= 0 else "unknown"
                for who in batch.pairs.tensor("annotator").tolist()
            ]
        for name, keys in found.items():
            self.groups.setdefault(name, []).extend(keys)


def evaluate_pairs(
    data: Part,
    collect: Collector,
    model: ValueModel,
    pairs: int,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Accuracy on pairs that the method's own data part makes of held-out tasks, and whether margins are calibrated.

    Of answers with labels, any two that follow one another are a pair, label by label; the mean over labels is last.
    """
    right: dict[str, float] = {}
    counted: dict[str, int] = {}
    seen, gathered = 0, Margins()
    state = data.info.state() if data.info.state is not None else None
    while seen < pairs:
        watch(seen, pairs)
        if state is None:
            experience = data(collect)
        else:
            state, experience = data(state, collect)
        with torch.no_grad():
            if experience.pairs is not None:
                gathered.add(collect, experience, model)
                seen += experience.pairs.rows
                continue
            for name, agrees in _labels(experience, model).items():
                right[name] = right.get(name, 0.0) + float(agrees.sum())
                counted[name] = counted.get(name, 0) + len(agrees)
        seen += len(experience.by("episode"))
    if gathered.margins:
        every = zip(gathered.margins, gathered.p, strict=True)
        ordered = sum(0.0 if not margin else p if margin > 0 else 1 - p for margin, p in every)
        found = reliability(gathered.margins, gathered.p, gathered.groups)
        return Evaluation(seen, {"accuracy": ordered / seen}, of="accuracy", reliability=found)
    rates = {name: right[name] / max(1, counted[name]) for name in right}
    each = {f"accuracy_{name}": rate for name, rate in rates.items()} if len(rates) > 1 else {}
    return Evaluation(seen, {**each, "accuracy": sum(rates.values()) / len(rates)}, of="accuracy")


def _margins(experience: Experience, model: ValueModel) -> tuple[Tensor, Tensor]:
    """r_chosen − r_rejected of each pair, and how likely the first is preferred.

    Of a model of several groups, an annotator's pairs are judged for the group that orders most of them as he does.
    """
    batch = Batch(experience, {})
    sides = [batch.pair_rows(said) for said in _said(experience, model)]
    margins = torch.stack([chosen - rejected for chosen, rejected in sides])
    certain = torch.ones_like(margins[0])
    p = batch.pairs.tensor("p").to(certain) if "p" in batch.pairs else certain
    if len(margins) == 1:
        return margins[0], p
    right = torch.where(margins > 0, p, torch.where(margins < 0, 1 - p, 0.0))
    people = Segments(batch.pairs.tensor("annotator").to(margins.device))
    group = torch.stack([people.mean(one) for one in right]).argmax(0)
    return margins.gather(0, people.rows(group)[None])[0], p


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
