"""Logged data: what it refuses, its statistics by hand, behaviours of stated quality, files and Minari's format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from panoply import registry
from panoply.errors import PanoplyError
from panoply.experience import DEMONSTRATION, TERMINATED, TRUNCATED
from panoply.policies.heads import head_for
from panoply.replay import Replay
from panoply.report.pages import shown
from panoply.worlds.control.cartpole import Cartpole
from panoply.worlds.control.pendulum import Pendulum
from panoply.worlds.control.simulated import Draws, Moved, Simulated, State
from panoply.worlds.control.tabular import Tabular
from panoply.worlds.control.world import Array, Discrete
from panoply.worlds.logged import minari
from panoply.worlds.logged.behaviour import behave, half_way
from panoply.worlds.logged.data import NEEDED, LoggedData
from panoply.worlds.logged.logged import Logged
from panoply.worlds.logged.statistics import (
    coverage,
    describe,
    log_coverage,
    trajectory_quality,
    unique_pairs,
)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANOPLY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


def columns(**changed: Any) -> dict[str, Array]:
    """Two episodes of 2 and 3 steps: the first comes to an end, the second to a limit."""
    made: dict[str, Any] = {
        "observation": np.array([0, 1, 0, 1, 1], np.float32)[:, None],
        "action": np.array([0, 1, 0, 0, 0]),
        "reward": np.array([1, 2, 0.5, 0.5, 3], np.float32),
        "terminated": np.array([0, 1, 0, 0, 0], bool),
        "truncated": np.array([0, 0, 0, 0, 1], bool),
        "episode": np.array([4, 4, 7, 7, 7]),
        "turn": np.array([0, 1, 0, 1, 2]),
        "final": np.array([[9], [8]], np.float32),
    }
    return made | changed


def test_returns_and_what_was_seen_next() -> None:
    data = LoggedData(columns())
    assert data.returns.tolist() == [3, 4]
    assert data.next_observation[:, 0].tolist() == [1, 9, 1, 1, 8]
    assert data.complete.tolist() == [True, True]


def test_the_tables_are_a_collectors() -> None:
    experience = LoggedData(columns()).experience()
    decisions, context = experience.decisions, experience.context
    assert decisions["next"].tolist() == [1, 5, 3, 4, 6]  # type: ignore[union-attr]
    assert context["observation"][:, 0].tolist() == [0, 1, 0, 1, 1, 9, 8]  # type: ignore[call-overload]
    assert decisions["end"].tolist() == [0, TERMINATED, 0, 0, TRUNCATED]  # type: ignore[union-attr]
    assert set(decisions["source"].tolist()) == {DEMONSTRATION}  # type: ignore[union-attr]
    assert "logp" not in decisions


@pytest.mark.parametrize("name", NEEDED)
def test_missing_columns_are_named(name: str) -> None:
    with pytest.raises(PanoplyError, match=f"Logged data lacks the column {name}."):
        LoggedData({k: v for k, v in columns().items() if k != name})


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"episode": np.array([4, 7, 4, 7, 7])}, "shuffled: the steps of an episode must stand together"),
        (
            {"turn": np.array([0, 1, 0, 2, 1])},
            "shuffled: the steps of an episode must be in the order of time",
        ),
        ({"truncated": np.array([0, 0, 1, 0, 1], bool)}, "shuffled: an episode goes on after its end"),
        ({"final": np.zeros((1, 1))}, "has 2 episodes and 1 final observations"),
        ({"reward": np.zeros(4)}, "differ in length"),
        ({"reward": np.array([1, 2, np.nan, 0, 0])}, "has numbers in 'reward' that are not finite"),
    ],
)
def test_shuffled_and_broken_data_is_refused(changed: dict[str, Array], sentence: str) -> None:
    with pytest.raises(PanoplyError, match=sentence):
        LoggedData(columns(**changed))


# ------------------------------------------------------------------ statistics


def test_trajectory_quality_by_hand() -> None:
    """Returns 3 and 4, random's 1 and the best 5: (3.5 − 1)/(5 − 1). A broken-off second episode is left out."""
    assert trajectory_quality(LoggedData(columns()), 1, 5) == pytest.approx(0.625)
    open_ended = LoggedData(columns(truncated=np.zeros(5, bool)))
    assert trajectory_quality(open_ended, 1, 5) == pytest.approx(0.5)


def test_coverage_by_hand() -> None:
    """Pairs (0, 0), (1, 1), (1, 0): three different; a data set that repeats one of them covers a third."""
    data = LoggedData(columns())
    assert unique_pairs(data) == 3
    repeats = LoggedData(columns(observation=np.zeros((5, 1), np.float32), action=np.zeros(5, np.int64)))
    assert coverage(repeats, data) == pytest.approx(1 / 3)
    assert log_coverage(repeats, data) == 0


def test_bins_are_those_of_the_reference() -> None:
    """Five points within a bin of a reference from 0 to 100 are one; by their own limits they would be five."""
    still = np.zeros(5, np.int64)
    near, wide = (
        LoggedData(columns(observation=np.array(seen, np.float32)[:, None], action=still))
        for seen in ([0.1, 0.3, 0.5, 0.7, 0.9], [0, 100, 50, 25, 75])
    )
    assert unique_pairs(near, wide) == 1
    assert unique_pairs(near) == 5
    assert coverage(wide, wide) == 1


# ------------------------------------------------------------------ behaviours


def test_behaviours_have_the_quality_their_names_say() -> None:
    world = Cartpole(horizon=100)
    made = {
        mix: behave(world, mix, 2000, 0) for mix in ("random", "medium", "noisy", "expert", "mixed", "replay")
    }  # type: ignore[arg-type]
    random, expert = (float(made[mix].returns.mean()) for mix in ("random", "expert"))
    assert random < 30
    assert expert == 100
    quality = {mix: describe(data, random, expert, made["replay"]) for mix, data in made.items()}
    assert quality["medium"]["tq"] == pytest.approx(0.5, abs=0.2)
    assert 0.5 < quality["noisy"]["tq"] <= 1
    assert quality["replay"]["saco"] == 1
    assert quality["expert"]["saco"] < 0.8
    shares = np.exp(made["mixed"].columns["logp"])
    assert (shares == 0.5).mean() == pytest.approx(0.8, abs=0.05)
    assert set(np.unique(shares)) == {0.5, 1.0}
    assert all(len(data) >= 2000 for data in made.values())


@dataclass(frozen=True)
class Turns(Simulated):
    """Three actions, of which the one that was taken last is not legal; the last pays."""

    horizon: int | None = 6
    sees, takes = Discrete(3), Discrete(3)

    def start(self, draws: Draws) -> State:
        return {"last": np.zeros(len(draws.seeds), np.int64)}

    def move(self, state: State, actions: Array, draws: Draws) -> Moved:
        assert (actions != state["last"]).all()
        return Moved({"last": actions}, (actions == 2).astype(float), np.zeros(len(actions), bool))

    def look(self, state: State) -> Array:
        return state["last"]

    def allowed(self, state: State) -> Array:
        return state["last"][:, None] != np.arange(3)

    def expert(self, state: State) -> Array:
        return np.where(state["last"] == 2, 0, 2)


def test_masks(tmp_path: Path) -> None:
    """Any action means any legal one, masks are kept, and the tables have them for every state."""
    data = behave(Turns(), "noisy", 120, 0)
    seen, action, shares = data.columns["observation"], data.columns["action"], np.exp(data.columns["logp"])
    wanted = action == np.where(seen == 2, 0, 2)
    assert shares[wanted] == pytest.approx(0.9)
    assert shares[~wanted] == pytest.approx(0.1)
    assert 0 < (~wanted).sum() < 40
    data.save(tmp_path / "data")
    experience = LoggedData.load(tmp_path / "data").experience()
    for by in ("context", "next"):
        states = experience.looked_up("observation", by=by).numpy()
        assert (experience.looked_up("legal", by=by).numpy() == (states[:, None] != np.arange(3))).all()
    replay = Replay(Turns().sees, Turns().takes, head_for(Turns().takes), size=len(data), gamma=0.9)
    replay.fill(experience)
    rows = replay.rows(torch.arange(len(data)))
    assert rows.next_legal is not None
    assert torch.equal(rows.next_legal, rows.next_observation[:, None] != torch.arange(3))


def test_masks_come_together() -> None:
    legal = np.ones((5, 2), bool)
    with pytest.raises(PanoplyError, match="needs both: the columns legal and final_legal"):
        LoggedData(columns(legal=legal))
    with pytest.raises(PanoplyError, match="2 episodes and 3 final masks"):
        LoggedData(columns(legal=legal, final_legal=np.ones((3, 2), bool)))


def test_probabilities_are_those_of_the_behaviour() -> None:
    """Slip 0.2 of four actions: 0.85 for the expert's, 0.05 for the others."""
    data = behave(Tabular("windy"), "noisy", 3000, 0)
    chances = np.exp(data.columns["logp"])
    assert set(chances.round(6)) == {0.85, 0.05}
    assert (chances > 0.5).mean() == pytest.approx(0.85, abs=0.02)


def test_medium_is_half_way() -> None:
    assert 0 < half_way(Cartpole(horizon=100), 0, rounds=5, size=32) < 1


# ------------------------------------------------------------------ the world and its files


def test_a_named_data_set_is_made_once_and_kept() -> None:
    entry = registry.find("world", "logged:pendulum-mixed")
    world = entry.build(size=1000)
    assert (world.name, world.of, world.mix) == ("logged:pendulum-mixed", "pendulum", "mixed")
    assert world.observation == Pendulum().observation
    assert "data" in world.access
    data = world.data
    assert "logp" not in data.columns
    assert data.columns["action"].dtype == np.float32
    about = json.loads((world.folder / "about.json").read_text())
    assert about["steps"] == len(data) >= 1000
    assert 0 < about["tq"] < 0.6
    stamp = (world.folder / "data.safetensors").stat().st_mtime_ns
    again = entry.build(size=1000)
    np.testing.assert_array_equal(again.data.columns["reward"], data.columns["reward"])
    assert (world.folder / "data.safetensors").stat().st_mtime_ns == stamp
    assert entry.build(size=1001).folder != world.folder
    assert Logged("pendulum", "mixed", size=1000, options="{gravity: 5.0}").folder != world.folder


def test_a_name_that_is_implied_has_a_page() -> None:
    assert "Data of pendulum: mixed." in shown("logged:pendulum-mixed")
    assert "4 numbers" in shown("CartPole-v1")


def test_files_are_read_back_and_checked(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    data = behave(Cartpole(), "random", 100, 0)
    data.save(folder)
    back = Logged("cartpole", file=str(folder)).data
    assert back.columns.keys() == data.columns.keys()
    np.testing.assert_array_equal(back.columns["observation"], data.columns["observation"])
    with pytest.raises(PanoplyError, match=r"have shape \(4,\), those of pendulum \(3,\)"):
        _ = Logged("pendulum", file=str(folder)).data
    (folder / "data.safetensors").write_bytes(b"no")
    with pytest.raises(PanoplyError, match="is not a whole safetensors file"):
        _ = Logged("cartpole", file=str(folder)).data
    with pytest.raises(PanoplyError, match="There is no logged data"):
        _ = Logged("cartpole", file=str(tmp_path / "nowhere")).data


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("logged:pendulum-mixd", "Unknown mix of logged data 'mixd'. Did you mean 'mixed'?"),
        ("logged:pendulm-mixed", "Unknown world 'pendulm'. Did you mean 'pendulum'?"),
        ("logged:pendulum", "Unknown mix of logged data 'pendulum'"),
    ],
)
def test_unknown_names_get_the_nearest(name: str, sentence: str) -> None:
    with pytest.raises(PanoplyError, match=sentence.replace("?", r"\?")):
        registry.find("world", name)


def test_what_cannot_be_logged_says_so() -> None:
    with pytest.raises(PanoplyError, match="is not a world of control"):
        _ = Logged("chain").world
    with pytest.raises(PanoplyError, match="has no scripted expert to make data with"):
        _ = Logged("CartPole-v1").data
    with pytest.raises(PanoplyError, match="Did you mean 'gravity'"):
        _ = Logged("pendulum", options="{gravty: 5.0}").world


@pytest.mark.parametrize("world", [Cartpole(), Pendulum()])
def test_minaris_format_is_written_and_read(world: Any) -> None:
    data = behave(world, "noisy", 300, 0)
    minari.write(data, f"{world.name}/noisy-v0", world.observation, world.action)
    back = minari.read(f"{world.name}/noisy-v0")
    for name in NEEDED:
        np.testing.assert_array_equal(back.columns[name], data.columns[name])
    assert len(Logged(world.name, minari=f"{world.name}/noisy-v0").data) == len(data)
    with pytest.raises(PanoplyError, match="Minari has no data set 'nobody/nothing-v0'"):
        minari.read("nobody/nothing-v0")


def test_data_that_another_process_was_quicker_to_make_stays(tmp_path: Path) -> None:
    """Runs of one seed start together, and whoever reads the data must not find it gone."""
    data = Logged("cartpole", "random", size=50).make()
    data.save(tmp_path / "data")
    before = (tmp_path / "data").stat().st_ino
    data.save(tmp_path / "data", replace=False)
    assert (tmp_path / "data").stat().st_ino == before
    assert [p.name for p in tmp_path.iterdir()] == ["data"]
