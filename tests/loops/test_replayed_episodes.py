"""Past episodes of a run in a step's batch: which are kept, which come again, whose log-probabilities they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import panoply as pp
from panoply.episodes import Episodes, as_tensors, earned, from_tensors, varied
from panoply.experience import OWN, REPLAY, Experience
from panoply.methods.base.grpo import grpo
from panoply.methods.base.sac import sac
from panoply.progress import Progress
from panoply.rollout.text import Collector
from panoply.slots.replay.episodes import episodes
from panoply.slots.replay.uniform import uniform
from panoply.slots.sample.groups import groups

SMALL = {"replay.kept": "all", "replay.batch": 1, "run.checkpoint_every": 3}
CHOICES: dict[str, Any] = {"model": "fresh", "steps": 4, "threads": 1, "progress": Progress()}


def steps(folder: Path, **settings: Any) -> list[Experience]:
    given = {**tiny.SETTINGS, **SMALL, **settings}
    with pp.steps("grpo", run=folder, replay="episodes", settings=given, **CHOICES) as made:
        return [step.experience for step in made]


# ------------------------------------------------------------------ in a run


def test_a_group_comes_again_as_it_was(tmp_path: Path) -> None:
    """Its rows are those of an earlier step, credit included, and their `logp` is of who acted then."""
    first, *later = made = steps(tmp_path)
    assert set(first["source"].tolist()) == {OWN}
    for number, batch in enumerate(later, 1):
        old = batch.take(batch["source"] == REPLAY)
        assert len(old.by("group")) == 1
        before = made[int(old["version"][0])]
        same = before.take(torch.isin(before["episode"], old["episode"]) & (before["source"] == OWN))
        assert int(old["version"][0]) < number
        for column in ("action", "logp", "group", "task", "advantage"):
            assert old[column].equal(same[column])
    noted = tiny.metrics(tmp_path)
    assert [m["episodes"] for m in noted] == [8] * 4, "metrics are of what is new"
    assert noted[0]["step0_gap"] < 1e-5 < noted[-1]["step0_gap"], "the ratio of past rows is off 1"


def test_resumed_it_has_the_same_memory(tmp_path: Path) -> None:
    settings = {**tiny.SETTINGS, **SMALL, "replay.batch": 4, "sample.temperature": 0.7, "sample.top_k": 9}
    whole = pp.train("grpo", run=tmp_path / "whole", replay="episodes", settings=settings, **CHOICES)
    with pp.steps("grpo", run=tmp_path / "cut", replay="episodes", settings=settings, **CHOICES) as made:
        for _ in range(2):
            next(made)
    assert tiny.resume(tmp_path / "cut").fingerprint == whole.fingerprint
    assert tiny.metrics(tmp_path / "cut") == tiny.metrics(tmp_path / "whole")
    plain = {path: value for path, value in settings.items() if not path.startswith("replay.")}
    assert tiny.train(tmp_path / "without", settings=plain).fingerprint != whole.fingerprint


def test_a_sampler_that_disagrees_is_found_among_past_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Own rows are compared with the scorer, though those beside them must differ from it."""
    right = Episodes.beside

    def wrong(self: Episodes, rows: Experience) -> Experience:
        return right(self, rows.with_columns(logp=rows["logp"] + 0.1 * bool(len(self))))

    monkeypatch.setattr(Episodes, "beside", wrong)
    with pytest.raises(pp.PanoplyError, match="Sampler and scorer disagree"):
        steps(tmp_path)
    assert len(tiny.metrics(tmp_path)) == 1, "the first step has no past rows, and was sound"


# ------------------------------------------------------------------ what is kept, and drawn


def asked(collect: Collector, success: list[float], tasks: int = 2) -> Experience:
    """Two groups of the same two tasks each time, whose successes are as written."""
    found = collect.episodes(collect.pool(tasks), len(success) // tasks)
    episodes_ = found.by("episode")
    return found.with_columns(
        **{"signal:success": torch.tensor(success)[episodes_.index] * episodes_.is_last()}
    )


def add(memory: Episodes, rows: Experience) -> None:
    memory.beside(rows)
    memory.keep()


def test_where_a_task_is_asked_again_past_successes_join_its_group(tiny_collector: Collector) -> None:
    memory = Episodes(size=8, batch=2, into="asked", worth=earned("success"))
    add(memory, asked(tiny_collector, [1, 1, 1, 0, 0, 0]))
    assert len(memory) == 3
    again = asked(tiny_collector, [0] * 6)
    both = memory.beside(again)
    joined = both.take(both["source"] == REPLAY)
    assert len(joined.by("episode")) == 2, "no more than two, and none for the task without any"
    assert joined["group"].unique().tolist() == again["group"].unique().tolist()[:1]
    assert both["group"].unique().tolist() == again["group"].unique().tolist()
    other = tiny_collector.episodes(tiny_collector.numbered([7]), 2)
    assert len(memory.beside(other)) == len(other), "a task that was never asked"


def test_groups_that_varied_and_the_oldest_leave(tiny_collector: Collector) -> None:
    memory = Episodes(size=7, batch=9, worth=varied("success"))
    add(memory, asked(tiny_collector, [1, 1, 1, 0, 0, 0]))
    assert len(memory) == 0
    add(memory, asked(tiny_collector, [0, 1, 0, 1, 1, 1]))
    add(memory, asked(tiny_collector, [0, 1, 0, 1, 0, 0]))
    assert memory.held is not None
    assert memory.held["episode"].unique().tolist() == [12, 13, 14, 15, 16, 17], (
        "two of three groups are whole"
    )


def test_as_tensors_and_back(tiny_collector: Collector) -> None:
    made = groups(prompts=2, group=2, temperature=0.7, top_k=3)(tiny_collector)
    back = from_tensors({**as_tensors(made), "other:thing": torch.zeros(1)})
    assert set(back.decisions) == set(made.decisions)
    assert back["logp"].equal(made["logp"])
    assert back.decisions.ragged("allowed").tolist() == made.decisions.ragged("allowed").tolist()
    assert back.context.ragged("tokens").tolist() == made.context.ragged("tokens").tolist()


# ------------------------------------------------------------------ what a plan says


def test_what_cannot_be() -> None:
    with pytest.raises(pp.PanoplyError, match="uniform keeps single steps. Take replay=episodes"):
        grpo().but(replay=uniform())
    with pytest.raises(pp.PanoplyError, match="episodes keeps whole episodes. Take replay=uniform"):
        sac().but(replay=episodes())
    with pytest.raises(pp.PanoplyError, match="replay.name has no effect: all episodes are kept"):
        pp.plan("grpo", replay="episodes", settings={"replay.kept": "all", "replay.name": "ended"})
    with pytest.raises(pp.PanoplyError, match="Unknown signal of chain@1 for replay"):
        pp.plan("grpo", replay="episodes", settings={"replay.name": "fun"})
    with pytest.raises(pp.PanoplyError, match="replay.size cannot be 4: a group of 8 episodes would not fit"):
        pp.plan("grpo", replay="episodes", settings={"replay.size": 4})
    with pytest.raises(pp.PanoplyError, match="needs a world with 'text'"):
        pp.plan("grpo", "cartpole", replay="episodes", settings={"replay.kept": "all"})


def test_with_past_rows_one_epoch_has_ratios_to_bound() -> None:
    with pytest.raises(pp.PanoplyError, match="the ratio stays at 1"):
        pp.plan("grpo", settings={"surrogate.low": 0.1})
    made = pp.plan("grpo", replay="episodes", settings={"surrogate.low": 0.1})
    assert "4 groups of the last 1024 episodes whose success varies" in str(made)
