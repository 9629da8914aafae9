"""What settings mean: from the docstrings beside them, or from the list of names that mean the same everywhere."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
from typing import Any

from panoply.parts import Part

SHARED = {
    "sample.prompts": "tasks asked in a step",
    "sample.group": "episodes of each task, compared with one another",
    "sample.temperature": "what logits are divided by; above 1 more varied, 0 always the likeliest token",
    "sample.top_p": "draw from the fewest tokens whose probability reaches this; 1 from all",
    "sample.top_k": "draw from so many of the likeliest tokens; 0 from all",
    "sample.min_p": "draw from tokens that have at least this share of the likeliest one's probability; 0 from all",
    "sample.repetition_penalty": "logits of tokens said before are divided by it, negative ones multiplied; 1 none",
    "sample.presence_penalty": "what is taken from logits of tokens that the turn has said",
    "sample.frequency_penalty": "the same, once for each time that the turn has said it",
    "sample.max_tokens": "longest answer; none means as long as the world allows",
    "sample.rounds": "how often to ask for more tasks at most",
    "sample.name": "the signal that must vary inside a group",
    "data.batch": "tasks in a step, one demonstration or pair each",
    "data.data": "the data part whose episodes are taken",
    "data.name": "the signal that tells good from bad where there are no pairs",
    "reward.name": "the world's signal that is rewarded",
    "reward.scale": "what the signal is multiplied by",
    "reward.reward": "the reward it starts from",
    "credit.gamma": "discount of what comes a decision (or turn) later",
    "credit.lam": "how far later surprises count: 0 the next only, 1 all",
    "credit.normalise": "whether advantages get mean 0 and deviation 1 over the batch",
    "credit.epsilon": "added to deviations that are divided by",
    "credit.baseline": "what a return is compared with",
    "credit.scale": "whether a difference is divided by the group's deviation",
    "credit.decay": "how much of the old baseline is kept at each step",
    "weight": "of this term among the others; a number or a schedule",
    "against": "whose log-probabilities the ratio is divided by: behaviour, or old",
    "low": "the ratio is clipped this far below 1",
    "high": "the ratio is clipped this far above 1",
    "to": "what the policy is compared with: reference, old, or none",
    "beta": "strength of the pull to the reference; of a pair's loss, what scores are multiplied by",
    "per_token": "whether a score is the mean over an answer's tokens and not their sum",
    "reduce.length": "what an answer's sum is divided by, whatever its own length",
    "update.lr": "learning rate",
    "update.beta1": "decay of the gradient's moving average",
    "update.beta2": "decay of the squared gradient's moving average",
    "update.epsilon": "added to the root of the squared gradient's average",
    "update.weight_decay": "how fast weights shrink, times the learning rate",
    "update.decay": "of the moving average of squared gradients",
    "update.momentum": "how much of the last step is added to the next",
    "update.clip": "longest gradient; 0 means any",
    "update.skip": "a step along a gradient longer than this is not taken; 0 takes all",
    "update.bits": "bits of each of Adam's averages: 32, or 8 in a quarter of the memory",
    "update.schedule": "what the learning rate is multiplied by over time",
    "update.epochs": "how often each batch is gone through",
    "update.minibatches": "optimiser steps a batch is cut into",
    "schedule.warmup": "steps in which the factor rises to 1; below 1, that share of the budget",
    "schedule.start": "the share of the budget after which it falls",
    "schedule.end": "the factor at the last step",
    "model.loss": "what the model descends",
    "model.update": "how the model's parameters move",
    "model.folder": "a run of reward-model, or its exported folder",
    "model.name": "of the signal it gives",
    "model.scale": "what its word is multiplied by",
    "estimator": "k1, k2 or k3 (Schulman): how the divergence is estimated from samples",
    "descends": "which divergence's gradient is followed; none means the estimator's own",
    "desirable": "weight of answers that are to become likelier",
    "undesirable": "weight of answers that are to become less likely",
    "margin": "the lead after which a pair has no gradient",
    "judges": "signals that must be above 0",
    "limit": "where punishment is complete",
    "cache": "the last tokens before the limit, over which punishment grows",
    "right": "what a success earns",
    "wrong": "what a failure earns",
}
"""By `slot.setting`, or by setting alone."""


def of_part(cls: type[Part]) -> dict[str, str]:
    """The settings of a part that have a meaning written down."""
    _, own = split_doc(cls)
    slot = cls.info.slot
    shared = {name: SHARED.get(f"{slot}.{name}", SHARED.get(name, "")) for name in cls.annotations()}
    return {
        name: own.get(name) or shared[name] for name in cls.annotations() if own.get(name) or shared[name]
    }


def split_doc(cls: type[Part]) -> tuple[str, dict[str, str]]:
    """A part's docstring without, and then only, its lines `name: meaning` or `name   meaning` on settings."""
    prose: list[str] = []
    found: dict[str, str] = {}
    names: list[str] = []
    for line in (inspect.getdoc(cls.info.function) or "").split("\n"):
        start = re.match(r"(\w+(?:, \w+)*)(?:: |  +)(\S.*)$", line)
        if start and set(start[1].split(", ")) <= cls.annotations().keys():
            names = start[1].split(", ")
            found |= dict.fromkeys(names, start[2])
        elif names and line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        else:
            names = []
            prose.append(line)
    return "\n".join(prose).strip(), found


def of_fields(cls: Any) -> dict[str, str]:
    """The strings written below the fields of a dataclass, those it inherits included."""
    found: dict[str, str] = {}
    base: type
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):  # a class made without a file
            continue
        body = tree.body[0].body  # type: ignore[attr-defined]
        for field, doc in itertools.pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(doc, ast.Expr)
                and isinstance(doc.value, ast.Constant)
            ):
                found[field.target.id] = " ".join(str(doc.value.value).split())
    return found
