"""Learners that share a model, rows that wait for a seat's turn, and peers that learn from each other's episodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file

import panoply as pp
from panoply import compose, extensions, registry
from panoply.costs import cost
from panoply.experience import DEMONSTRATION, OWN, REPLAY, Experience
from panoply.methods.base.grpo import grpo
from panoply.methods.base.ppo import ppo
from panoply.progress import Progress
from panoply.regimes import Dataset, Several
from panoply.rollout.text import Collector
from panoply.slots.data.dealt import dealt as dealt_data
from panoply.slots.game.peers import FAR, peers
from panoply.slots.loss.imitation import nll
from panoply.slots.model.values import critic
from panoply.slots.sample.dealt import dealt
from panoply.slots.sample.groups import groups
from panoply.slots.sample.repair import failed, tasks_of
from panoply.slots.turn.turns import all_, filled

EXAMPLE = str(tiny.ROOT / "examples/proposer_and_solver.py")
QUIET: dict[str, Any] = {"threads": 1, "progress": Progress()}
SMALL = {"run.device": "cpu", "run.held_out": 2, "run.checkpoint_every": 1, "run.keep": 9}


# ------------------------------------------------------------------ one model, a method a role


@pytest.fixture
def roles(registries: None) -> dict[str, Any]:
    """The proposer and the solver of the example as one model."""
    extensions.load_plugin(EXAMPLE)

    @pp.method("roles@1", presets={"tiny": registry.find("method", "propose-solve").presets["tiny"]})
    def roles() -> Several:
        """GRPO for both, on the same weights."""
        apart: Any = compose.resolve("propose-solve").method
        return Several(apart.seats, apart.turn, apart.game, share=True)

    return {"steps": 2, "settings": {**SMALL, "game.tasks": 6, "game.group": 4}, **QUIET}


def test_roles_of_one_model_resume_bit_for_bit(roles: dict[str, Any], tmp_path: Path) -> None:
    whole = pp.train("roles", run=tmp_path / "whole", **roles)
    with pp.steps("roles", run=tmp_path / "cut", **roles) as steps:
        next(steps)
    assert tiny.resume(tmp_path / "cut").fingerprint == whole.fingerprint
    assert tiny.metrics(tmp_path / "cut") == tiny.metrics(tmp_path / "whole")
    apart = pp.train("propose-solve", run=tmp_path / "apart", **roles)
    assert apart.fingerprint != whole.fingerprint, "what the proposer learns moves the solver"
    last = tmp_path / "whole/checkpoints/step-0000002"
    assert not (last / "seats/proposer/model").exists()
    kept = load_file(last / "state.safetensors")
    assert any(name.endswith(":exp_avg") for name in kept)
    assert not any(name.startswith("seats/proposer:") and "exp_avg" in name for name in kept), "one optimiser"
    assert all(int(step) == 4 for name, step in kept.items() if name.endswith(":step")), (
        "moved by both, twice"
    )


def test_what_was_dealt_before_the_first_moved_is_still_checked(
    roles: dict[str, Any], tmp_path: Path
) -> None:
    play: Any = registry.find_part("game", "propose")

    @pp.part("game", gives={"signal:paid"})
    def misremembers(collectors: Mapping[str, Any]) -> dict[str, Experience]:
        """The game, with wrong log-probabilities of the second seat."""
        found: dict[str, Experience] = play(tasks=4, group=2)(collectors)
        said = found["proposer"]
        return {**found, "proposer": said.with_columns(logp=said["logp"] - 0.5)}

    settings = {p: v for p, v in roles["settings"].items() if not p.startswith("game.")}
    with pytest.raises(pp.PanoplyError, match="Sampler and scorer disagree"):
        pp.train("roles", run=tmp_path, game="misremembers", **{**roles, "settings": settings})


def test_what_cannot_share_a_model(roles: dict[str, Any]) -> None:
    made = pp.plan("roles")
    assert compose.method_from_json(made.method.to_json()) == made.method
    assert cost(made).parameters * 2 == cost(pp.plan("propose-solve")).parameters
    assert "one model for all" in str(made)
    with pytest.raises(
        pp.PanoplyError, match="'proposer' shares the weights of others, and so their optimiser"
    ):
        pp.plan("roles", settings={"proposer.update.lr": 0.5})
    pp.plan("roles", settings={"proposer.update.epochs": 2})

    @pp.method("critics@1")
    def critics() -> Several:
        """A critic that learns with the policy."""
        one = ppo().but(models=critic(update=None))
        return Several((("one", one), ("two", one)), all_(), share=True)

    with pytest.raises(
        pp.PanoplyError, match="The seat 'one' cannot share the weights of others: critic learns"
    ):
        pp.plan("critics", "cartpole")


# ------------------------------------------------------------------ rows that wait


@pp.part("game", equation="own answers, and the right ones where all were wrong")
def toy_hard_ones(collectors: Mapping[str, Collector], *, prompts: int = 3) -> dict[str, Experience]:
    """The solver's answers; the right ones to what it never got right are for lessons."""
    solver, lessons = collectors["solver"], collectors["lessons"]
    tasks = solver.tasks(prompts)
    found = solver.episodes(tasks, 2)
    hard = tasks_of(found, failed(found), tasks)
    golds = [solver.world.gold(task) for task in hard]
    return {"solver": found, "lessons": lessons.answers(hard, golds, source=DEMONSTRATION)}


def test_lessons_are_taken_once_enough_of_them_wait(registries: None, tmp_path: Path) -> None:
    """ReLIFT's course: by trial and error, and now and then a lesson on what is too hard, to the same weights."""

    @pp.method("lifted@1")
    def lifted() -> Several:
        """Two methods, one model."""
        learns = grpo().but(sample=dealt())
        lessons = Dataset(dealt_data(), (nll(),), learns.reduce, learns.update)
        both = (("solver", learns), ("lessons", lessons))
        return Several(both, filled(episodes=(1, 8)), toy_hard_ones(), share=True)

    choices: dict[str, Any] = {
        "settings": {**SMALL, "world.operations": 2},
        "model": "fresh",
        "steps": 4,
        **QUIET,
    }
    whole = pp.train("lifted", run=tmp_path / "whole", **choices)
    noted = tiny.metrics(tmp_path / "whole")
    assert [m["waiting_lessons"] for m in noted] == [3, 6, 9, 3], (
        "they wait, and are gone when they are learned"
    )
    assert ["lessons_loss" in m for m in noted] == [False, False, True, False]
    with pp.steps("lifted", run=tmp_path / "cut", **choices) as steps:
        next(steps)
        next(steps)
    assert tiny.resume(tmp_path / "cut").fingerprint == whole.fingerprint
    assert tiny.metrics(tmp_path / "cut") == noted
    for numbers, says in (((2, 2), "nobody learns"), ((1, 2, 3), "there are 2 seats")):
        with pytest.raises(pp.PanoplyError, match=says):
            pp.plan("lifted", settings={"turn.episodes": list(numbers)})


def test_a_game_may_deal_nothing(tiny_collector: Collector) -> None:
    none, some = tiny_collector.answers([], []), tiny_collector.episodes(tiny_collector.tasks(1), 2)
    both = Experience.mix([none, some])
    assert len(both) == len(some)
    assert all(both[key].dtype == torch.long for key in ("task", "group", "episode", "end"))


# ------------------------------------------------------------------ peers


def toy_even(collect: Any) -> Experience:
    """Episodes whose success is by their number."""
    found = groups(prompts=2, group=2)(collect)
    episodes = found.by("episode")
    right = (episodes.keys % 2 == 0)[episodes.index] & episodes.is_last()
    return found.with_columns(**{"signal:success": right.float()})


@pp.part("sample")
def toy_lucky(collect: Any) -> Experience:
    """Every group has a success and a failure."""
    return toy_even(collect)


def test_peers_take_over_groups_of_others(tiny_collector: Collector) -> None:
    other = Collector(tiny_collector.world, tiny_collector.policy, seed=9)
    found = peers(sample=toy_lucky(), theirs=1)({"a": tiny_collector, "b": other})
    for name, place in (("a", 2), ("b", 1)):
        mine, theirs = (found[name].take(found[name]["source"] == source) for source in (OWN, REPLAY))
        assert len(mine.by("group")) == 2
        assert len(theirs.by("group")) == 1, "a whole group"
        assert len(theirs.by("episode")) == 2
        assert int(theirs["group"].min()) >= place * FAR > int(mine["group"].max())
        whose = found["b" if name == "a" else "a"]
        same = whose.take(
            torch.isin(whose["episode"], theirs["episode"] - place * FAR) & (whose["source"] == OWN)
        )
        assert theirs["logp"].equal(same["logp"]), "of who acted"
        assert theirs["task"].equal(same["task"])


def test_groups_that_teach_nothing_are_not_passed_on(tiny_collector: Collector) -> None:
    found = peers(sample=groups(prompts=2, group=2), theirs=1)({"a": tiny_collector, "b": tiny_collector})
    assert set(found["a"]["source"].tolist()) == {OWN}, "new weights never succeed"


def test_a_swarm_learns_and_resumes(registries: None, tmp_path: Path) -> None:
    @pp.method("swarm@1")
    def swarm() -> Several:
        """Three peers."""
        one = grpo().but(sample=dealt())
        seats = tuple((name, one.but()) for name in ("a", "b", "c"))
        return Several(seats, all_(), peers(sample=groups(prompts=2, group=4), theirs=2, name="ended"))

    rewards = {f"{seat}.reward.name": "ended" for seat in "abc"}
    settings = {**SMALL, "world.operations": 2, "a.surrogate.low": 0.1, **rewards}
    choices: dict[str, Any] = {"settings": settings, "model": "fresh", "steps": 2, **QUIET}
    whole = pp.train("swarm", run=tmp_path / "whole", **choices)
    with pp.steps("swarm", run=tmp_path / "cut", **choices) as steps:
        first = next(steps).experience
    assert set(first["source"].tolist()) == {OWN, REPLAY}
    assert tiny.resume(tmp_path / "cut").fingerprint == whole.fingerprint
    assert tiny.metrics(tmp_path / "cut") == tiny.metrics(tmp_path / "whole")
    with pytest.raises(pp.PanoplyError, match="game.sample cannot be .*own policy as it is"):
        pp.plan("swarm", settings={"game.sample.by": "behind:2", "run.steps": 9})
