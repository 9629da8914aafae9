"""CHORD: schedules, the focused imitation loss, two streams normalised apart."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from kit import Tabular, assert_same, hand, learner

import panoply as pp
from panoply.batch import Batch
from panoply.compose import resolve
from panoply.experience import OWN, TEACHER, Experience
from panoply.methods.reasoning_data.chord import chord, complement, focused_imitation, peak_and_valley
from panoply.progress import Progress
from panoply.rollout.text import Collector
from panoply.run import Run


def test_mu_rises_falls_and_stays() -> None:
    mu = peak_and_valley(peak=0.5, valley=0.1, warmup=10, decay=20)
    assert [mu(s, 99) for s in (0, 5, 10, 20, 30, 90)] == pytest.approx([0, 0.25, 0.5, 0.3, 0.1, 0.1])
    assert complement(of=mu)(20, 99) == pytest.approx(0.7)
    held = peak_and_valley(peak=0.5, valley=0.1, hold=5, decay=20)
    assert [held(s, 99) for s in (0, 5, 15, 25)] == pytest.approx([0.5, 0.5, 0.3, 0.1])


@pytest.mark.parametrize(("focus", "phi"), [("1", 1.0), ("p", 0.25), ("p(1-p)", 0.1875)])
def test_imitation_weights_each_token_by_phi_without_a_gradient_through_it(focus: str, phi: float) -> None:
    logp = torch.tensor([math.log(0.25)], requires_grad=True)
    value, stats = focused_imitation(focus=focus)(Batch(hand(source=[TEACHER]), {"logp": logp}))
    assert float(value.detach()) == pytest.approx(phi * math.log(4))
    assert stats["expert_p"].tolist() == pytest.approx([0.25])
    assert float(torch.autograd.grad(value.sum(), logp)[0]) == pytest.approx(-phi)


def test_each_stream_is_averaged_over_its_own_decisions() -> None:
    """(1 − μ)·GRPO/3 tokens + μ·SFT/2 tokens, whatever the two counts are."""
    policy = Tabular()
    states, actions = [0, 1, 2, 3, 4], [0, 1, 2, 3, 0]
    with torch.no_grad():
        logp = policy.score(hand(state=states, action=actions))["logp"]
    rows = hand(state=states, action=actions, source=[OWN] * 3 + [TEACHER] * 2, advantage=[1.0, -1.0, 2.0, 9.0, 9.0],
                logp=[*logp[:3].tolist(), math.nan, math.nan])  # fmt: skip
    method = chord()
    found = learner(policy, method).gradient(rows, step=0)
    mu = 0.9
    probabilities = policy.logits.detach().softmax(-1)
    slow = torch.zeros_like(policy.logits)
    for i, (s, a) in enumerate(zip(states, actions, strict=True)):
        score = -probabilities[s].clone()
        score[a] += 1
        p = probabilities[s, a]
        own = i < 3
        slow[s] -= score * ((1 - mu) * [1.0, -1.0, 2.0][i] / 3 if own else mu * p * (1 - p) / 2)
    assert_same(found["logits"], slow)


def test_expert_answers_come_from_a_fixed_pool(tiny_collector: Collector) -> None:
    first = tiny_collector.references(40, pool=5)
    second = tiny_collector.references(40, pool=5)
    assert set(first["task"].tolist()) == set(second["task"].tolist())
    assert len(set(first["task"].tolist())) <= 5
    assert bool((first["source"] == TEACHER).all())
    assert float(first.by("episode").sum(first["signal:success"]).min()) == 1


def test_what_foreign_rows_lack_is_nan_and_prompts_stay_apart(tiny_collector: Collector) -> None:
    own = tiny_collector.episodes(tiny_collector.tasks(2), 2)
    mixed = Experience.mix([own, tiny_collector.references(3, pool=9)])
    assert bool(mixed["logp"][: len(own)].isfinite().all())
    assert bool(mixed["logp"][len(own) :].isnan().all())
    tokens, shared = mixed.context.ragged("tokens"), mixed.context.tensor("shared").tolist()
    prefix: dict[int, list[int]] = {}
    for row, prompt in enumerate(mixed.context.tensor("prompt").tolist()):
        assert (
            prefix.setdefault(prompt, tokens[row][: shared[row]].tolist())
            == tokens[row][: shared[row]].tolist()
        )
    assert math.isclose(float(mixed["context"].max()), mixed.context.rows - 1)


def test_the_paper_and_the_preset() -> None:
    tiny = resolve("chord", preset="tiny").method.settings()
    assert tiny["surrogate.weight.of.decay"] == tiny["regularise.focused_imitation.weight.decay"] == 60
    assert chord().settings()["regularise.focused_imitation.weight.peak"] == 0.9


def test_expert_answers_are_not_groups_that_were_asked(tmp_path: Path) -> None:
    settings = {"sample.prompts": 2, "sample.group": 2, "sample.experts": 3, "run.held_out": 4}
    trained = pp.train(
        "chord",
        run=tmp_path / "run",
        model="fresh",
        steps=1,
        threads=1,
        settings=settings,
        progress=Progress(),
    )
    assert Run.open(trained.run).metrics()[-1]["groups_asked"] == 2
