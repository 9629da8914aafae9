"""OPA-DPO: what an expert corrects, which pairs come of it, and the loss by hand in both of its forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import Tabular, assert_same, batch, hand, learner

from panoply import data_folder
from panoply.errors import PanoplyError
from panoply.experience import Experience, Table
from panoply.methods.preferences.opa_dpo import (
    EXPERT,
    EXPERT_SEEN,
    TRUTH,
    TRUTH_SEEN,
    corrected_dpo,
    corrected_pairs,
    corrected_preference,
    opa_dpo,
    truth_and_corrected,
)
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.slots.sample.answers import answers_of
from panoply.worlds.text.grids import Grids
from panoply.worlds.world import Task

WORLD = Grids(dialect="marks")
CELLS = "0110100111000101"


def task_of() -> Task:
    return Task(1, tuple(WORLD.tokens(CELLS + "r1=")), 0, {"cells": CELLS, "line": "r", "number": 1})


# ------------------------------------------------------------------ the expert, and pictures


@pytest.mark.parametrize(
    ("own", "expert", "severity", "replaced", "misread"),
    [
        ("<1001>2$", "<1001>2$", "44444444", "44444444", 0),  # right: nothing is rewritten
        ("<1001>3$", "<1001>2$", "44444411", "44444411", 0),  # only the number, which is no misreading
        ("<1000>2$", "<9889>2$", "33333344", "33333344", 6),  # one cell, and the expert's own way to write
        ("<1100>2$", "<9889>2$", "22222244", "22222244", 6),
        ("<0110>1$", "<9889>2$", "11111111", "11111111", 6),
        ("<9889>2$", "<9889>2$", "44444444", "44444444", 0),
        ("3$", "2$", "11", "11", 0),  # nothing was said of the picture
        ("2", "2$", "1", "11", 0),
    ],
)
def test_only_wrong_sentences_are_rewritten(
    own: str, expert: str, severity: str, replaced: str, misread: int
) -> None:
    found = WORLD.corrected(task_of(), WORLD.tokens(own))
    assert WORLD.text(found.answer) == expert
    assert found.severity == [int(c) for c in severity]
    assert found.replaced == [int(c) for c in replaced]
    assert found.misread == [i < misread for i in range(len(expert))]
    assert WORLD.grade(task_of(), found.answer)["success"] == 1


def test_pictures_are_blotted_out_and_the_question_stays() -> None:
    blank = WORLD.text(WORLD.blotted(task_of(), 0.3, np.random.default_rng(0)).prompt)
    assert blank.count("_") == 4  # of sixteen cells
    assert blank.endswith("r1=")
    assert all(a in (b, "_") for a, b in zip(blank, CELLS + "r1=", strict=True))
    WORLD.self_test(8)
    assert WORLD.text(WORLD.gold(task_of())) == "<9889>2$"


@pytest.fixture(scope="module")
def policy() -> Any:
    return open_policy("start", WORLD, 0, "cpu")


def test_the_start_never_says_what_the_expert_would(policy: Any) -> None:
    assert WORLD.measure("reference", policy) < 1e-4 < Grids().measure("reference", policy)


def test_pairs_are_of_four_kinds_and_none_is_of_an_answer_with_itself(policy: Any, tmp_path: Path) -> None:
    collect = Collector(WORLD, policy, seed=0)
    tasks = [collect.task(i) for i in range(3)]
    own = [WORLD.gold(tasks[0]), WORLD.tokens("2$"), WORLD.tokens("<0000>4$")]
    rows = [
        {"task": i, "id": t.id, "prompt": "", "answer": a}
        for i, (t, a) in enumerate(zip(tasks, own, strict=True))
    ]
    (tmp_path / data_folder.FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = corrected_pairs(folder=str(tmp_path), batch=3)(collect)
    assert found.pairs is not None
    said, keys = answers_of(found), found.by("episode").keys.tolist()
    prompt = found.by("episode").first(found["context"])
    tokens = found.context.ragged("tokens")
    for won, lost, kind in zip(
        *(found.pairs.tensor(n).tolist() for n in ("chosen", "rejected", "kind")), strict=True
    ):
        a, b = keys.index(won), keys.index(lost)
        starts = [tokens[int(prompt[i])].tolist()[:19] for i in (a, b)]
        if kind in (TRUTH, EXPERT):
            assert said[a] != said[b]
            assert starts[0] == starts[1]
        else:
            assert said[a] == said[b]
            assert WORLD.text(starts[1]).count("_") == 4
    kinds = found.pairs.tensor("kind").bincount(minlength=4).tolist()
    assert kinds[TRUTH_SEEN] == kinds[EXPERT_SEEN] == 3
    assert kinds[TRUTH] == 2, "the own answer that is the truth is below nothing"
    whole = corrected_pairs(folder=str(tmp_path), batch=3, blotted=0.0)(collect).pairs
    assert whole is not None
    assert set(whole.tensor("kind").tolist()) == {TRUTH, EXPERT}, "a whole picture against itself is no pair"
    imitated = answers_of(truth_and_corrected(folder=str(tmp_path), batch=3)(collect))
    assert len(imitated) == 6
    assert all(said in imitated for said in [WORLD.gold(t) for t in tasks])
    with pytest.raises(PanoplyError, match="Stored data is a folder"):
        corrected_pairs(folder="nowhere")(collect)


# ------------------------------------------------------------------ the loss

EPISODE = [0, 0, 1, 1, 1]
NOW, REFERENCE = [-1.0, -0.5, -2.0, -1.0, -0.7], [-1.5, -0.6, -1.0, -1.2, -1.0]
SEVERE, MISREAD = [2.5, 1.0, 1.5, 1.0, 2.0], [3.0, 1.0, 1.0, 1.0, 1.0]
"""Log-ratios are .5, .1 of the chosen side and −1, .2, .3 of the rejected one."""


def rows_of(kind: int) -> Experience:
    made = hand([(0, 1)], episode=EPISODE, severity=SEVERE, misread=MISREAD, **{"logp@reference": REFERENCE})
    assert made.pairs is not None
    return made.with_pairs(Table({**made.pairs, "kind": torch.tensor([kind])}))


def softplus(x: float) -> float:
    return float(np.log1p(np.exp(x)))


@pytest.mark.parametrize(
    ("kind", "chosen", "rejected", "times", "anchored"),
    [
        (TRUTH, 0.6, -0.5, 1.0, 1.0),
        (EXPERT, 2.5 * 0.5 + 0.1, -1.5 + 0.2 + 0.6, 1.0, 1.0),
        (TRUTH_SEEN, 0.6, -0.5, 0.2, 0.0),
        (EXPERT_SEEN, 3 * 0.5 + 0.1, -0.5, 0.2, 0.0),
    ],
)
def test_sums_by_hand(kind: int, chosen: float, rejected: float, times: float, anchored: float) -> None:
    value, _ = corrected_preference(beta=0.5, anchor=0.7, margin=0.1)(batch(rows_of(kind), logp=NOW))
    expected = times * softplus(-0.5 * (chosen - rejected)) + anchored * 0.7 * softplus(-(0.5 * 0.6 - 0.1))
    assert value.tolist() == pytest.approx([expected], rel=1e-5)


@pytest.mark.parametrize(("kind", "side"), [(TRUTH, 1), (EXPERT, -1), (TRUTH_SEEN, 1), (EXPERT_SEEN, -1)])
def test_positions_by_hand_as_released(kind: int, side: int) -> None:
    """Chosen token t against rejected token t; the chosen side has no third, and the expert's anchors are reversed."""
    weights = {EXPERT: SEVERE, EXPERT_SEEN: MISREAD}.get(kind, [1.0] * 5)
    lead = [0.5 * weights[0], 0.1 * weights[1], 0.0]
    other = [-1.0 * weights[2], 0.2 * weights[3], 0.3 * weights[4]]
    times = 0.2 if kind in (TRUTH_SEEN, EXPERT_SEEN) else 1.0
    each = [
        times * softplus(-0.5 * (a - b)) + softplus(-side * 0.5 * a) for a, b in zip(lead, other, strict=True)
    ]
    value, _ = corrected_preference(beta=0.5, form="token")(batch(rows_of(kind), logp=NOW))
    assert value.tolist() == pytest.approx([sum(each) / 3], rel=1e-5)


@pytest.mark.parametrize("micro", [1, 3, 100])
def test_the_gradient_does_not_depend_on_how_it_is_split(micro: int) -> None:
    policy = Tabular()
    columns: dict[str, Any] = {
        "state": [0, 1, 2, 3, 4, 0],
        "action": [0, 1, 2, 3, 0, 2],
        "episode": [0, 0, 1, 2, 2, 2],
        "severity": [2.5, 1, 1, 1.5, 2, 1],
        "misread": [3.0, 1, 1, 1, 1, 1],
        "logp@reference": [-1.0, -1.2, -0.7, -2.0, -1.5, -0.4],
    }
    rows = hand([(0, 1), (0, 2)], **columns)
    assert rows.pairs is not None
    rows = rows.with_pairs(Table({**rows.pairs, "kind": torch.tensor([EXPERT, TRUTH_SEEN])}))
    found = learner(policy, corrected_dpo(), micro_tokens=micro).gradient(rows)["logits"]
    slow = policy.logits.detach().clone().requires_grad_()
    ratio = slow.log_softmax(-1)[columns["state"], columns["action"]] - torch.tensor(
        columns["logp@reference"]
    )
    w = torch.tensor(columns["severity"])
    log = torch.nn.functional.logsigmoid
    one = -log(0.1 * ((w * ratio)[:2].sum() - (w * ratio)[2])) - log(0.1 * ratio[:2].sum())
    two = -0.2 * log(0.1 * (ratio[:2].sum() - ratio[3:].sum()))
    ((one + two) / 2).backward()
    assert slow.grad is not None
    assert_same(found, slow.grad)


def test_the_reference_is_the_imitator() -> None:
    stages = {stage.name: stage for stage in opa_dpo().stages}
    assert stages["prefer"].options["reference"] == stages["prefer"].options["model"] == "@align"
