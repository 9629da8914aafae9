"""Sampling ahead: exactly k steps late, repeated bit for bit, resumed bit for bit; weights in the midst of answers."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import hand
from tiny import resume

import panoply as pp
from panoply.errors import PanoplyError
from panoply.loops.on_policy import learn
from panoply.loops.snapshots import Snapshots
from panoply.policies.build import open_policy
from panoply.policies.moving import checksum, moving
from panoply.progress import Progress
from panoply.run import Run
from panoply.scale import ahead, cluster, fleet, spread
from panoply.scale.ahead import lags
from panoply.scale.sampler import Player, Sampler
from panoply.scale.weights import Files
from panoply.slots.select.importance import truncated

TINY = {"sample.prompts": 4, "sample.group": 4, "update.lr": 1e-2, "update.schedule.warmup": 0}
RUN: dict[str, Any] = {
    "steps": 4, "samplers": 2, "cluster": "threads", "device": "cpu", "threads": 1, "held_out": 2, "greedy": False,
    "evaluate_every": 0, "episodes_every": 0, "checkpoint_every": 1,
}  # fmt: skip


def planned(method: str = "grpo", world: str = "chain", settings: Any = TINY, **options: Any) -> Any:
    return pp.plan(method, world, settings=settings, **{**RUN, **options})


def test_a_batch_is_drawn_by_the_weights_of_k_steps_before_and_by_no_others(tmp_path: Path) -> None:
    past: list[Any] = []
    with pp.steps(planned(staleness=2), run=tmp_path / "run", progress=Progress()) as steps:
        past.append(open_policy("start", planned().world(), 0, "cpu"))
        for t, step in enumerate(steps):
            rows = step.experience
            assert set(rows["version"].tolist()) == {max(0, t - 2)}
            gaps = [float((p.score(rows)["logp"].detach() - rows["logp"]).abs().mean()) for p in past]
            assert gaps[max(0, t - 2)] < 1e-5
            assert all(gap > 1e-4 for v, gap in enumerate(gaps) if v != max(0, t - 2))
            past.append(step.policy.copy())
    logged = Run.open(tmp_path / "run").metrics()
    assert [row["lag"] for row in logged] == [0, 1, 2, 2]
    assert [row["lag_max"] for row in logged] == [0, 1, 2, 2]
    assert logged[3]["lag_2"] == 1
    assert "step0_gap" in logged[0]
    assert "step0_gap" not in logged[2], "there is nothing to compare"
    assert all(row["seconds_wait"] >= 0 for row in logged)
    assert [row["total_episodes"] for row in logged] == [16, 32, 48, 64], "what was learned from"


def test_the_same_weights_twice_and_with_a_sampler_killed_and_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DAPO takes as many tasks as it needs: what a batch begins with depends on what came of the one before."""
    plan = planned("dapo", staleness=1, settings={**TINY, "sample.rounds": 3})
    whole = pp.train(plan, run=tmp_path / "whole", progress=Progress())
    killed: list[str] = []

    class Mortal(Sampler):
        def play(self, share: Any) -> dict[str, Any]:
            if share["first"] > 0 and not killed:
                name = threading.current_thread().name[:-2]
                killed.append(name)
                next(w for w in CLUSTERS[-1].workers if w.name == name).kill()
            return super().play(share)

    CLUSTERS: list[Any] = []
    plain = fleet.Fleet.__init__

    def noted(self: Any, *args: Any, spread: Any, **more: Any) -> None:
        CLUSTERS.append(spread.cluster)
        plain(self, *args, spread=spread, **more)

    monkeypatch.setattr(fleet, "Sampler", Mortal)
    monkeypatch.setattr(fleet.Fleet, "__init__", noted)
    with pp.steps(plan, run=tmp_path / "stopped", progress=Progress()) as steps:
        for step in steps:
            if step.number == 2:
                break
    assert killed
    assert resume(tmp_path / "stopped").fingerprint == whole.fingerprint


def test_what_a_sample_part_remembers_is_that_of_its_batch(tmp_path: Path) -> None:
    """HAPO's goes by the entropies of the batch before: a resumed run must not know those of batches in flight."""
    plan = planned("hapo", staleness=1, steps=3, settings={**TINY, "sample.rounds": 1, "sample.prompts": 2})
    seen = []
    with pp.steps(plan, run=tmp_path / "stopped", progress=Progress()) as steps:
        for step in steps:
            seen.append(dict(step.job.seat.states["sample"]))
            if step.number == 2:
                break
    assert seen[0] != seen[1]
    assert Run.open(tmp_path / "stopped").latest().step == 2  # type: ignore[union-attr]
    again = pp.steps(resume=tmp_path / "stopped", progress=Progress())
    with again as steps:
        for step in steps:
            assert step.number == 3
            assert step.job.seat.states["sample"] not in seen


def test_what_is_drawn_beside_the_batches_counts_and_stays_counted(tmp_path: Path) -> None:
    """ArCHer's critic hears what the policy would say: that is sampled, too, and no batch's count takes it away."""
    critic = {"updates": 1, "batch": 4, "states": 6, "warmup": 0}
    few = {"sample.prompts": 4} | {f"models.utterance_critic.{name}": n for name, n in critic.items()}
    plan = planned("archer", "guess", few, staleness=1)
    whole = Run.open(pp.train(plan, run=tmp_path / "whole", progress=Progress()).run).metrics()
    with pp.steps(plan, run=tmp_path / "stopped", progress=Progress()) as steps:
        assert next(iter(steps)).job.seat.collect.state["decisions"] == whole[0]["total_decisions"]
    stopped = Run.open(resume(tmp_path / "stopped").run).metrics()
    for name in ("total_decisions", "total_decode_steps"):
        drawn = [row[name] for row in whole]
        assert drawn == [row[name] for row in stopped]
        assert all(b - a >= (14 if name == "total_decisions" else 3) for a, b in pairwise(drawn))


def test_what_cannot_be_sampled_ahead_is_refused() -> None:
    for why, choices in {
        "lets past:1 act": {"settings": {**TINY, "sample.by": "past:1"}},
        "no samplers": {"samplers": 0},
        "samples nothing": {"method": "sft", "settings": {}},
    }.items():
        with pytest.raises(PanoplyError, match=why):
            planned(**{"staleness": 1, **choices})
    with pytest.raises(PanoplyError, match="always new"):
        planned(inflight=True)


def test_weights_change_in_the_midst_of_answers_and_each_decision_says_by_which_it_was_drawn(
    tmp_path: Path,
) -> None:
    world: Any = planned().world()
    policy = open_policy("start", world, 0, "cpu")
    first = policy.copy()
    player, board = Player(world, policy, 0), Files(tmp_path)
    player._engine.publish(moving(policy), 4)  # type: ignore[attr-defined]
    looked = 0
    plain = player._look

    def look(folder: str) -> int:
        nonlocal looked
        looked += 1
        if looked == 6:
            with torch.no_grad():
                moved = {name: weight + 0.02 for name, weight in moving(policy).items()}
            board.parcel(moved, 5)
        player._again = 0.0
        return plain(folder)

    player._look = look  # type: ignore[method-assign]
    share = {
        "who": "learner", "counted": None, "version": 4, "board": str(tmp_path), "how": {"temperature": 1.0},
        "tasks": player.numbered(range(2)), "sizes": [2, 2], "keys": [0, 1], "first": 0,
    }  # fmt: skip
    found = player.played(share)
    version = found["version"]
    assert set(version.tolist()) == {4, 5}
    assert player.has == checksum(moving(policy)), "what it says it has"
    early = version == 4
    assert float((first.score(found)["logp"].detach() - found["logp"])[early].abs().max()) < 1e-5, (
        "drawn by the first"
    )
    assert float((first.score(found)["logp"].detach() - found["logp"])[~early].abs().mean()) > 1e-3, (
        "and then not"
    )
    assert lags(found, 6)["lag_max"] == 2
    assert sum(lags(found, 6)[f"lag_{i}"] for i in (1, 2)) == pytest.approx(1, abs=1e-5)


def test_a_prompt_is_read_again_by_the_weights_that_answer_it(tmp_path: Path) -> None:
    """Of 24 answers to one prompt 8 are drawn at a time: those begun after an update are the new policy's alone."""
    world: Any = planned().world()
    policy = open_policy("start", world, 0, "cpu")
    first = policy.copy()
    player, board, looked, plain = Player(world, policy, 0), Files(tmp_path), 0, Player._look
    player._engine.slots = 8  # type: ignore[attr-defined]

    def look(folder: str) -> int:
        nonlocal looked
        looked += 1
        if looked == 3:
            board.parcel({name: weight.detach() + 0.02 for name, weight in moving(policy).items()}, 5)
        player._again = 0.0
        return plain(player, folder)

    player._look = look  # type: ignore[method-assign]
    share = {
        "who": "learner", "counted": None, "version": 4, "board": str(tmp_path), "how": {"temperature": 1.0},
        "tasks": player.numbered(range(1)), "sizes": [24], "keys": [0], "first": 0,
    }  # fmt: skip
    found = player.played(share)
    episodes, version = found.by("episode"), found["version"]
    begun = episodes.rows(episodes.min(version))
    gap = (policy.score(found)["logp"].detach() - found["logp"]).abs()
    assert len(set(found["episode"][begun == 5].tolist())) >= 8
    assert float(gap[begun == 5].max()) < 1e-5, "all of them, the prompt included, by the new weights"
    old = (first.score(found)["logp"].detach() - found["logp"]).abs()
    assert float(old[version == 4].max()) < 1e-5
    assert float(old[version == 5].mean()) > 1e-3
    assert (version[1:] >= version[:-1])[found["episode"][1:] == found["episode"][:-1]].all()


def test_a_run_with_weights_in_flight_stays_within_its_lag(tmp_path: Path) -> None:
    pp.train(planned(staleness=1, inflight=True, steps=3), run=tmp_path / "run", progress=Progress())
    logged = Run.open(tmp_path / "run").metrics()
    assert len(logged) == 3
    assert all(0 <= row["lag"] <= row["lag_max"] <= 1 for row in logged)


def test_weights_in_flight_reach_other_machines_through_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spread, "platform", SimpleNamespace(node=lambda: "another"))
    plan, look, boards = planned(staleness=1, inflight=True, steps=2), Player._look, set[str]()
    monkeypatch.setattr(Player, "_look", lambda self, board: boards.add(board) or look(self, board))
    pp.train(plan, run=tmp_path / "run", progress=Progress())
    assert boards == {str(tmp_path / "run" / spread.WEIGHTS)}
    assert not Path(*boards).exists()
    with pytest.raises(
        PanoplyError, match=r"^--inflight needs a disk that all machines share: .*/nowhere, where"
    ):
        look(SimpleNamespace(_again=0.0), f"{tmp_path}/nowhere")  # type: ignore[arg-type]

    do = cluster.Held.do
    monkeypatch.setattr(
        cluster.Held, "do", lambda self, m, *a, **k: m != cluster.SEES and do(self, m, *a, **k)
    )
    with pytest.raises(
        PanoplyError, match=r"run is not on .*, where sampler-0 is: name one on a disk that all"
    ):
        pp.train(plan, run=tmp_path / "blind" / "run", progress=Progress())


def test_agreement_is_asked_of_what_the_present_weights_have_said() -> None:
    world: Any = planned().world()
    policy = open_policy("start", world, 0, "cpu")
    player = Player(world, policy, 0)
    rows = player.episodes(player.tasks(2), 2)
    method = planned().method
    snapshots = Snapshots(method, policy, lambda: policy)
    own = rows.by("episode").index
    wrong = rows.with_columns(logp=rows["logp"] + (own == 0), version=(own != 0).long())
    assert snapshots.gap(wrong, 0) == pytest.approx(1.0, abs=1e-4)
    assert snapshots.gap(wrong, 1) == pytest.approx(0.0, abs=1e-5)
    assert snapshots.gap(wrong, 2) is None
    seat: Any = SimpleNamespace(
        collect=SimpleNamespace(version=0), snapshots=snapshots, options=SimpleNamespace(dtype="float32", seed=0),
        learner=SimpleNamespace(minibatches=lambda *_: iter(()), settle=lambda: None),
    )  # fmt: skip
    with pytest.raises(PanoplyError, match="disagree"):
        learn(seat, wrong, 0)
    seat.collect.version = 2
    assert learn(seat, wrong, 2) == {"loss": 0.0}, "rows of earlier weights are not compared"


def test_truncated_importance_weights() -> None:
    rows = hand(
        episode=[0, 0, 1, 1], logp=[-1.0, -2.0, -3.0, float("nan")], **{"logp@old": [-1.0, -1.0, -4.0, -1.0]}
    )
    found = truncated(cap=2.0)(rows)["weight"]
    expected = torch.tensor([1.0, 2.0, torch.exp(torch.tensor(-1.0)), 1.0])
    torch.testing.assert_close(found.float(), expected)
    again = truncated(cap=10.0)(rows.with_columns(weight=torch.full((4,), 0.5)))["weight"]
    assert float(again[1]) == pytest.approx(0.5 * 2.718281828)
    with pytest.raises(PanoplyError, match="against=old"):
        pp.plan("grpo", "chain", settings={"select": truncated()})


def test_names_that_checkpoints_use() -> None:
    assert ahead.PREFIX == "ahead:", "as loops/seat.py knows it"
