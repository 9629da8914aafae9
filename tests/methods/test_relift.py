"""ReLIFT: what waits for a lesson, the lesson's loss, and two optimisers on the same weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import Slow, assert_same, batch, dataset, gradient, hand, ragged, rows_of, slopes
from safetensors.torch import load_file
from tiny import metrics, resume
from torch import Tensor

import panoply as pp
from panoply.compose import method_from_json
from panoply.errors import PanoplyError
from panoply.experience import DEMONSTRATION, Experience
from panoply.methods.reasoning_data.relift import hard_ones, lesson, relift
from panoply.progress import Progress
from panoply.regimes import Several
from panoply.rollout.text import Collector

# ------------------------------------------------------------------ what waits


def deal(
    tiny_collector: Collector, state: dict[str, Any], **settings: Any
) -> tuple[dict[str, Any], Any, Collector]:
    other = Collector(tiny_collector.world, tiny_collector.policy, seed=1)
    other.state = state.pop("counts", other.state)
    state, dealt = hard_ones(**settings)(state, {"solver": tiny_collector, "lessons": other})
    return state | {"counts": other.state}, dealt, tiny_collector


def test_failed_prompts_wait_until_a_lesson_is_full(tiny_collector: Collector) -> None:
    """New weights never succeed: three wait, then six are enough for a lesson of four, the latest; two wait on."""
    settings = {"prompts": 3, "group": 2, "lesson": 4}
    state, dealt, solver = deal(tiny_collector, {"given": 0}, **settings)
    assert len(dealt["lessons"]) == 0
    assert len(dealt["solver"].by("episode")) == 6
    assert solver.notes == {"unsolved": 1.0, "waiting": 3.0, "demonstrations": 0.0}
    first = set(state["decisions:task"].tolist())
    state, dealt, solver = deal(tiny_collector, state, **settings)
    assert solver.notes == {"unsolved": 1.0, "waiting": 2.0, "demonstrations": 4.0}
    taught = dealt["lessons"]
    episodes = taught.by("episode")
    assert len(episodes) == 4
    assert set(taught["source"].tolist()) == {DEMONSTRATION}
    assert episodes.sum(taught["signal:success"]).tolist() == [1.0] * 4
    assert len(set(taught["task"].tolist()) - first) == 3, "the new ones come first"
    left = set(state["decisions:task"].tolist())
    assert left < first
    assert not left & set(taught["task"].tolist())


def test_a_prompt_waits_once(tiny_collector: Collector) -> None:
    state, _, _ = deal(tiny_collector, {"given": 0}, prompts=2, group=2, lesson=9)
    tiny_collector.state["tasks"] = 0
    state, _, solver = deal(tiny_collector, state, prompts=2, group=2, lesson=9)
    assert solver.notes["waiting"] == 2.0
    assert len(state["decisions:task"].unique()) == 2


def test_what_succeeds_does_not_wait(tiny_collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """One right answer in the group is enough; and an answer that the world finds wrong is not taught."""
    acted, given = tiny_collector.episodes, type(tiny_collector.world).solutions

    def lucky(tasks: Any, group: int, **more: Any) -> Experience:
        found = acted(tasks, group, **more)
        first = found["episode"] == int(found["episode"].min())
        right = (first & found.by("episode").is_last()).float()
        return found.with_columns(**{"signal:success": right})

    monkeypatch.setattr(tiny_collector, "episodes", lucky)
    _, _, solver = deal(tiny_collector, {"given": 0}, prompts=3, group=2, lesson=9)
    assert (solver.notes["unsolved"], solver.notes["waiting"]) == (pytest.approx(2 / 3), 2.0)
    monkeypatch.setattr(type(tiny_collector.world), "solutions", lambda w, t: [given(w, t)[0][:-1]])
    _, _, solver = deal(tiny_collector, {"given": 0}, prompts=3, group=2, lesson=9)
    assert solver.notes["waiting"] == 0.0


# ------------------------------------------------------------------ what is learned


def test_a_lesson_by_hand() -> None:
    made = hand(source=[DEMONSTRATION] * 2)
    seen = batch(made, logp=[-1.0, -2.0], entropy=[0.5, 3.0])
    value, stats = lesson(entropy=0.1)(seen)
    assert value.tolist() == pytest.approx([0.95, 1.7])
    assert slopes(value, seen.now["logp"]) == [-1.0, -1.0]
    assert stats["nll"].tolist() == [1.0, 2.0]


def test_the_lesson_s_gradient_is_the_equation_s() -> None:
    made = ragged().with_columns(source=torch.full((len(ragged()),), DEMONSTRATION))
    slow, loss = Slow(), torch.zeros((), dtype=torch.float64)
    for row in rows_of(made):
        logits = slow.logits[row["state"]]
        h = -(logits.softmax(-1) * logits.log_softmax(-1)).sum()
        loss = loss - (slow.logp(row["state"], row["action"]) + 0.2 * h) / len(made)
    expected: Tensor = slow.gradient(loss)
    for micro in (1, 10**9):
        assert_same(gradient(dataset(lesson(entropy=0.2)), made, micro_tokens=micro), expected)


def test_a_group_that_fails_teaches_nothing_and_ratios_are_free() -> None:
    method = dict(relift().seats)["solver"]
    made = hand(episode=[0, 1, 2, 3], group=[0, 0, 1, 1], reward=[0.0, 0.0, 1.0, 0.0], logp=[-1.0] * 4)
    advantage = method.credit(made)
    assert advantage.tolist() == [0.0, 0.0, 0.5, -0.5], "no deviation divides"
    seen = batch(made.with_columns(advantage=advantage.double()), logp=[-1.0, -1.0, -0.5, -3.0])
    value, _ = method.surrogate(seen)
    assert value.tolist() == pytest.approx([0, 0, 0.5 * math.exp(0.5), -0.5 * math.exp(-2.0)])


# ------------------------------------------------------------------ two optimisers

CHOICES: dict[str, Any] = {
    "model": "fresh",
    "steps": 3,
    "threads": 1,
    "progress": Progress(),
    "settings": {
        "run.device": "cpu",
        "run.held_out": 2,
        "run.checkpoint_every": 1,
        "run.keep": 9,
        "world.operations": 2,
        "game.prompts": 3,
        "game.group": 2,
        "game.lesson": 4,
        "solver.reward.name": "ended",
        "lessons.update.lr": 1e-3,
    },
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_keeps_its_own_moments_and_all_of_it_resumes(tmp_path: Path, dtype: str) -> None:
    choices = {**CHOICES, "settings": {**CHOICES["settings"], "run.dtype": dtype}}
    whole = pp.train("relift", run=tmp_path / "whole", **choices)
    noted = metrics(tmp_path / "whole")
    assert [(m["waiting"], m["demonstrations"]) for m in noted] == [(3, 0), (2, 4), (1, 8)]
    assert ["lessons_loss" in m for m in noted] == [False, True, True]
    assert [m.get("lessons_lr", 0.0) for m in noted][1] > noted[1]["lr"], "and a rate of its own"
    kept = load_file(tmp_path / "whole/checkpoints/step-0000003/state.safetensors")
    of = {seat: {n: v for n, v in kept.items() if n.startswith("seats/lessons:") == (seat == "lessons")}
          for seat in ("solver", "lessons")}  # fmt: skip
    moved = {seat: {int(v) for n, v in of[seat].items() if n.endswith(":step")} for seat in of}
    assert moved == {"solver": {3}, "lessons": {2}}
    means = {s: [v for n, v in of[s].items() if n.endswith(":exp_avg")] for s in of}
    assert len(means["solver"]) == len(means["lessons"]) > 0
    assert all(not a.equal(b) for a, b in zip(means["solver"], means["lessons"], strict=True))
    masters = [n for n in kept if n.endswith(":master")]
    assert not any(n.startswith("seats/") for n in masters), "one set of float32 copies"
    assert bool(masters) == (dtype == "bfloat16")
    with pp.steps("relift", run=tmp_path / "cut", **choices) as steps:
        next(steps)
    assert resume(tmp_path / "cut").fingerprint == whole.fingerprint
    assert metrics(tmp_path / "cut") == noted


def test_after_one_lesson_its_moments_are_that_lesson_s(tmp_path: Path) -> None:
    """exp_avg = 0.1·g with ‖g‖ at most 0.7, as it was clipped: nothing of trial and error is in it."""
    pp.train("relift", run=tmp_path, **{**CHOICES, "steps": 2})
    kept = load_file(tmp_path / "checkpoints/step-0000002/state.safetensors")
    mean = [v.flatten() for n, v in kept.items() if n.startswith("seats/lessons:") and n.endswith(":exp_avg")]
    square = [
        v.flatten() for n, v in kept.items() if n.startswith("seats/lessons:") and n.endswith("_avg_sq")
    ]
    length = torch.cat(mean).norm()
    asked = min(0.7, metrics(tmp_path)[1]["lessons_gradient_norm"])
    assert float(length) == pytest.approx(0.1 * asked, rel=1e-4)
    assert torch.cat(square).sum() == pytest.approx(0.05 * asked**2, rel=1e-3)


# ------------------------------------------------------------------ what cannot be


def test_it_is_a_value_and_refuses_what_cannot_be() -> None:
    made = pp.plan("relift", "chain:kinds")
    assert method_from_json(made.method.to_json()) == made.method
    assert "one model for all, an optimiser each" in str(made)
    with pytest.raises(PanoplyError, match="needs a world with 'reference'"):
        pp.plan("relift", "cartpole")
    whole = relift()
    with pytest.raises(PanoplyError, match="share no weights have an optimiser each anyway"):
        Several(whole.seats, whole.turn, whole.game, apart=True)
