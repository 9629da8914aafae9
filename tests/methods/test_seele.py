"""SEELE: the curve and its inverse, rounds that come nearer to the target, what is remembered, and imitated hints."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hinting import Scripted, given_steps
from kit import batch, hand, slopes
from tiny import bare, metrics, resume

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import OWN, TEACHER, Experience
from panoply.methods.reasoning_data.seele import (
    fitted,
    hint_imitation,
    next_steps,
    response,
    seele,
    share_for,
    steered,
)

CURVES = torch.tensor([[12.0, 0.45, 0.1], [5.0, 0.8, 0.0], [20.0, 0.3, 0.25]], dtype=torch.float64)


def read_off(shares: torch.Tensor, curves: torch.Tensor) -> torch.Tensor:
    return response(shares.double(), *(curves[:, i, None] for i in range(3)))


# ------------------------------------------------------------------ the curve


def test_the_curve_by_hand() -> None:
    """f(½) = .1 + .9/(1 + e^{−10·(.5 − .3)}) = .1 + .9/(1 + e⁻²); at the middle it is halfway from b to 1."""
    curve = torch.tensor([[10.0, 0.3, 0.1]], dtype=torch.float64)
    found = read_off(torch.tensor([[0.5, 0.3]]), curve)
    assert found[0].tolist() == pytest.approx([0.1 + 0.9 / (1 + math.exp(-2)), 0.55])
    wanted = 0.3 - math.log(0.9 / 0.4 - 1) / 10
    assert share_for(0.5, curve).item() == pytest.approx(wanted)
    assert read_off(torch.tensor([[wanted]]), curve).item() == pytest.approx(0.5)
    by_luck = torch.tensor([[10.0, 0.3, 0.5], [10.0, 0.3, 0.7]], dtype=torch.float64)
    assert share_for(0.5, by_luck).tolist() == [0.0, 0.0]


def test_the_fit_recovers_a_curve_from_four_points_and_inverts_it() -> None:
    shares = torch.tensor([[0.875, 0.5, 0.25, 0.4], [0.875, 0.4, 0.7, 1.0], [0.0, 0.2, 0.3, 0.45]])
    found = fitted(shares, read_off(shares, CURVES))
    assert found[:, 0].tolist() == pytest.approx(CURVES[:, 0].tolist(), rel=0.02)
    assert (found[:, 1:] - CURVES[:, 1:]).abs().max() < 3e-3
    assert (share_for(0.5, found) - share_for(0.5, CURVES)).abs().max() < 1e-3


def test_rounds_with_one_share_count_with_their_mean_and_rows_are_their_own() -> None:
    shares = torch.tensor([[0.5, 0.5, 0.25, 0.75]])
    rates = torch.tensor([[0.2, 0.6, 0.1, 0.9]])
    assert fitted(shares, rates).allclose(fitted(shares, torch.tensor([[0.4, 0.4, 0.1, 0.9]])))
    both = fitted(torch.cat([shares, shares / 2]), torch.cat([rates, rates]))
    assert both[:1].allclose(fitted(shares, rates))
    assert both[1:].allclose(fitted(shares / 2, rates))


@pytest.mark.parametrize(
    ("tried", "rates", "steps", "wanted"),
    [
        ([7], [1.0], 8, 3),  # all right: half as many
        ([7, 3], [1.0, 1.0], 8, 1),
        ([7, 3, 1], [1.0, 1.0, 1.0], 8, 0),
        ([3], [0.0], 8, 5),  # all wrong: half of the way to all but the last
        ([3, 5, 6], [0.0, 0.0, 0.0], 8, 7),
        ([7], [0.0], 8, 7),
        ([0], [0.0], 1, 0),  # a single step leaves nothing to give
        ([6, 2], [1.0, 0.0], 8, 4),  # between them, by a curve
        ([4], [0.5], 8, 4),
        ([7], [0.1], 8, 7),  # more would be needed than there is to give
    ],
)
def test_the_next_hint(tried: list[int], rates: list[float], steps: int, wanted: int) -> None:
    found = next_steps(torch.tensor([tried]), torch.tensor([rates]), torch.tensor([steps]), 0.5)
    assert found.tolist() == [wanted]


def test_rounds_come_nearer_to_the_target() -> None:
    """Students whose curves are known exactly: the fourth round is nearer to a half than the first, for each."""
    steps = torch.full((3,), 40)
    tried, rates = [steps - 1], [read_off((steps - 1)[:, None] / 40, CURVES)[:, 0]]
    for _ in range(3):
        tried.append(next_steps(torch.stack(tried, 1), torch.stack(rates, 1), steps, 0.5))
        rates.append(read_off(tried[-1][:, None] / 40, CURVES)[:, 0])
    off = [(rate - 0.5).abs() for rate in rates]
    assert bool((off[3] < 0.5 * off[0]).all())


# ------------------------------------------------------------------ rounds of a prompt


def collected(
    state: dict[str, Any] | None = None, **settings: Any
) -> tuple[Scripted, dict[str, Any], Experience]:
    """Half of the answers of the first two prompts are right from 4 and from 2 steps on, those of the third never."""
    collect = Scripted(lambda number, steps, at: number < 2 and steps >= 4 - 2 * number and at % 2 == 1)
    chosen = {"prompts": 3, "group": 4, "rounds": 3, "pool": 3, **settings}
    state, found = steered(**chosen)(state or {}, collect)
    return collect, state, found


def test_rounds_are_one_group_and_begin_with_all_but_the_last_step() -> None:
    """All wrong with most of the answer given stays there; with half right at 7 of 8 steps it stays, too."""
    collect, _, found = collected()
    own = found.take(found["source"] == OWN)
    assert [len(call) for call in collect.asked] == [12] * 3
    assert given_steps(own, collect.world) == {0: [7] * 12, 1: [7] * 12, 2: [7] * 12}
    assert collect.notes == pytest.approx(
        {"hint_share": 7 / 8, "off_target_1": 1 / 6, "off_target_2": 1 / 6, "off_target_3": 1 / 6}
    )


def test_hints_are_imitated_after_the_bare_prompt_and_only_there() -> None:
    """Rows of the imitation stream are the hints; no own row is one of a hint's tokens."""
    collect, _, found = collected()
    own, given = (found.take(found["source"] == source) for source in (OWN, TEACHER))
    assert bool((own["position"] >= own.context["shared"][own["context"]]).all())
    tasks = {task.id: task for task in collect.numbered(range(3))}
    assert len(given.by("episode")) == 9
    assert not set(given["group"].tolist()) & set(own["group"].tolist()), "they are compared with nothing"
    for at, row in enumerate(given.context["tokens"].tolist()):
        mine = given["context"] == at
        task = tasks[int(given["task"][mine][0])]
        assert row == [*task.prompt, *collect.world.gold(task)[:21]]
        assert given["action"][mine].tolist() == collect.world.gold(task)[:21]
    assert bool(given["logp"].isnan().all())


def test_no_hint_no_imitation() -> None:
    collect = Scripted(lambda number, steps, at: True)
    state, found = steered(prompts=1, group=2, rounds=4, pool=1)({}, collect)
    assert [call[0][1] for call in collect.asked] == [7, 3, 1, 0]
    assert len(found.take(found["source"] == TEACHER).by("episode")) == 3
    _, found = steered(prompts=1, group=2, rounds=1, pool=1)(state, collect)
    assert collect.asked[-1] == [(0, 0)] * 2, (
        "the last hint of a prompt is where it begins when it comes back"
    )
    assert bool((found["source"] == OWN).all())
    assert collect.state["episodes"] == 4 * 2 + 3 + 2, "a hint of nothing is no episode"


def test_what_is_remembered_is_of_each_prompt() -> None:
    """Two of three prompts are asked in a step; the third then begins with all but its last step."""
    collect = Scripted(lambda number, steps, at: number == 0)
    part = steered(prompts=2, group=2, rounds=2, pool=3)
    state, _ = part({}, collect)
    kept = dict(zip(state["given@task"].tolist(), state["given"].tolist(), strict=True))
    assert sorted(kept.values()) == [3, 7]
    state, _ = part(state, collect)
    assert {n for n, _ in collect.asked[2]} - {n for n, _ in collect.asked[0]}, "another prompt is among them"
    assert len(state["given"]) == 3
    first = dict(collect.asked[2])
    assert all(steps == (3 if n == 0 else 7) for n, steps in first.items())


# ------------------------------------------------------------------ imitation


@pytest.mark.parametrize("of", ["logarithm", "probability"])
def test_imitation_by_hand(of: str) -> None:
    """Two hints of likelihoods ½·¼ and ½: −log and −p of each, and of −p the gradient −p on each of its tokens."""
    made = hand(episode=[0, 0, 1], source=[TEACHER] * 3)
    held = batch(made, logp=[math.log(0.5), math.log(0.25), math.log(0.5)])
    value, stats = hint_imitation(of=of)(held)
    log = of == "logarithm"
    assert value.tolist() == pytest.approx([math.log(8), math.log(2)] if log else [-0.125, -0.5])
    assert slopes(value, held.now["logp"]) == pytest.approx([-1, -1, -1] if log else [-0.125, -0.125, -0.5])
    assert stats["hint_p"].tolist() == pytest.approx([0.125, 0.5])
    assert hint_imitation().info.stream == "imitation"


def test_the_pooled_advantage_is_without_a_deviation() -> None:
    credit = seele().credit
    made = hand(episode=[0, 1, 2, 3], group=[0] * 4, reward=[1.0, 0.0, 0.0, 0.0])
    assert credit(made).tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25])


TINY = {
    "run.device": "cpu",
    "world.operations": 3,
    "run.held_out": 4,
    "sample.prompts": 2,
    "sample.group": 3,
    "sample.rounds": 2,
    "sample.pool": 2,
    "sample.name": "ended",
    "reward.name": "ended",
}


def test_a_run_that_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = bare(
        tmp_path / "run", "seele", model="fresh", steps=2, settings={**TINY, "run.checkpoint_every": 1}
    )
    logged = metrics(whole.run)
    assert all(row["step0_gap"] < 1e-4 for row in logged if "step0_gap" in row)
    assert logged[0]["hint_imitation"] > 0
    shutil.rmtree(whole.run / "checkpoints/step-0000002")
    (whole.run / "result.json").unlink()
    assert resume(whole.run).fingerprint == whole.fingerprint
    assert metrics(whole.run) == logged


@pytest.mark.parametrize(
    ("world", "settings", "said"),
    [
        ("manyanswers", {}, "'hint'"),
        ("chain", {"sample.target": 1.5}, "from 0 up to 1"),
        ("chain", {"sample.target": -0.1}, "from 0 up to 1"),
        ("chain", {"sample.pool": 4}, "a step asks for 8 prompts"),
        ("chain", {"sample.rounds": 1, "sample.target": 0.4}, "one round chooses nothing"),
        ("chain", {"regularise.hint_imitation": "none"}, "no term learns from it"),
    ],
)
def test_refusals(world: str, settings: dict[str, object], said: str) -> None:
    with pytest.raises(PanoplyError, match=said):
        pp.plan("seele", world, settings=settings)
