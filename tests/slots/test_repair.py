"""Groups of unequal size, groups that are asked again, and answers that are given inside of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from kit import hand

from panoply.errors import PanoplyError
from panoply.experience import DEMONSTRATION, OWN, TEACHER, TERMINATED, TRUNCATED, Experience
from panoply.parts import part
from panoply.policies.build import open_policy
from panoply.policies.control import open_policy as open_control
from panoply.rollout.control import ControlCollector
from panoply.rollout.text import Collector
from panoply.slots.reduce.averages import prompt_mean
from panoply.slots.sample.repair import episodes_of, failed, replaced, tasks_of
from panoply.worlds.control.cartpole import Cartpole
from panoply.worlds.text.keydoor import Keydoor


@part("sample", equation="groups without {name} are asked again with hints {hints}", needs={"world:hint"})
def toy_guided(
    collect: Collector,
    *,
    prompts: int = 16,
    group: int = 8,
    hints: tuple[float, ...] = (0.5, 0.75),
    name: str = "success",
) -> Experience:
    """Where nobody was right, the whole group is asked again with a part of the solution in the prompt, then more."""
    tasks = collect.tasks(prompts)
    found = collect.episodes(tasks, group)
    for share in hints:
        hard = failed(found, name)
        if len(hard):
            asked = [collect.world.hint(task, share) for task in tasks_of(found, hard, tasks)]
            again = collect.episodes(asked, group, into=hard)
            found = replaced(found, episodes_of(found, hard), again)
    return found


@part(
    "sample",
    equation="in groups without success the reference in place of one answer",
    gives={"stream:imitation"},
)
def toy_shown(collect: Collector, *, prompts: int = 16, group: int = 8) -> Experience:
    """Where nobody was right, the first answer gives way to the reference."""
    tasks = collect.tasks(prompts)
    found = collect.episodes(tasks, group)
    hard = failed(found)
    if not len(hard):
        return found
    asked = tasks_of(found, hard, tasks)
    given = collect.answers(asked, [collect.world.gold(task) for task in asked], into=hard)
    return replaced(found, torch.stack([episodes_of(found, g)[0] for g in hard]), given)


def test_failed_groups_are_those_that_earned_nothing() -> None:
    rows = hand(
        episode=[0, 0, 1, 2, 3, 4],
        group=[5, 5, 5, 3, 3, 9],
        task=[50, 50, 50, 30, 30, 90],
        **{"signal:success": [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]},
    )
    hard = failed(rows)
    assert hard.tolist() == [3, 9]
    assert episodes_of(rows, hard).tolist() == [2, 3, 4]


def test_groups_are_asked_again_with_hints(tiny_collector: Collector) -> None:
    """Answers of new weights are all wrong, so every group is replaced twice and keeps its key."""
    world = tiny_collector.world
    found = toy_guided(prompts=3, group=2)(tiny_collector)
    assert found.by("group").keys.tolist() == [0, 1, 2]
    assert found.by("episode").keys.tolist() == list(range(12, 18))
    again = Collector(world, tiny_collector.policy, 0).tasks(3)
    tokens, shared = found.context.ragged("tokens"), found.context.tensor("shared")
    for row, (key, task) in enumerate(zip([0, 0, 1, 1, 2, 2], [t for t in again for _ in "ab"], strict=True)):
        assert found.by("context").first(found["group"])[row] == key
        assert tuple(tokens[row][: int(shared[row])].tolist()) == world.hint(task, 0.75).prompt
    torch.testing.assert_close(tiny_collector.policy.score(found)["logp"], found["logp"], atol=1e-4, rtol=0)


def test_the_reference_stands_in_the_group(tiny_collector: Collector) -> None:
    found = toy_shown(prompts=3, group=4)(tiny_collector)
    episodes = found.by("episode")
    assert episodes.keys.tolist() == [1, 2, 3, 5, 6, 7, 9, 10, 11, 12, 13, 14]
    assert episodes.first(found["group"]).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 1, 2]
    assert episodes.first(found["source"]).tolist() == [OWN] * 9 + [TEACHER] * 3
    assert episodes.sum(found["signal:success"]).tolist() == [0.0] * 9 + [1.0] * 3
    own = found["source"] == OWN
    assert bool(found["logp"][own].isfinite().all())
    assert bool(found["logp"][~own].isnan().all()), "nobody of ours said it"


def test_a_method_learns_from_mended_groups(tmp_path: Path) -> None:
    sample: Any = toy_guided(prompts=2, group=4, name="ended")
    settings = {k: v for k, v in tiny.SETTINGS.items() if not k.startswith("sample.")}
    done = tiny.bare(tmp_path / "run", "grpo", sample=sample, settings=settings, model="fresh", steps=2)
    assert [m["updates"] for m in tiny.metrics(done.run)] == [1, 1]


def test_given_answers_of_several_turns_are_played() -> None:
    """Signals stand on the turns that earned them; one that stops before the end is cut."""
    world = Keydoor()
    collect = Collector(world, open_policy("fresh", world, 0, "cpu"), seed=0)
    task = collect.tasks(1)[0]
    gold = world.gold(task)
    found = collect.answers([task, task], [gold, gold[:-1]], source=DEMONSTRATION)
    whole, half = (found.take(found["episode"] == e) for e in (0, 1))
    assert whole["signal:success"].tolist() == [0.0] * (len(gold) - 1) + [1.0]
    assert float(whole["signal:progress"].sum()) == pytest.approx(1.0)
    assert (int(whole["end"][-1]), int(half["end"][-1])) == (TERMINATED, TRUNCATED)
    assert len(found["state"].unique()) == len(gold), "both are in the same states"
    assert found["group"].tolist() == [0] * len(found)


def test_groups_of_unequal_size(tiny_collector: Collector) -> None:
    tasks = tiny_collector.tasks(3)
    found = tiny_collector.episodes(tasks, [1, 3, 2])
    episodes = found.by("episode")
    assert episodes.first(found["group"]).tolist() == [0, 1, 1, 1, 2, 2]
    assert episodes.first(found["task"]).tolist() == [tasks[i].id for i in (0, 1, 1, 1, 2, 2)]
    assert tiny_collector.state["groups"] == 3
    weight = prompt_mean()(found, found.stream("own"))
    assert found.by("group").sum(weight).tolist() == pytest.approx([1 / 3] * 3)
    for sizes in ([1, 2], [1, 0, 2]):
        with pytest.raises(PanoplyError, match="Each of 3 tasks needs a group of at least 1 episode"):
            tiny_collector.episodes(tasks, sizes)
    with pytest.raises(PanoplyError, match="3 tasks go into as many groups, not into 2"):
        tiny_collector.episodes(tasks, 2, into=torch.tensor([0, 1]))


def test_the_same_in_control() -> None:
    world = Cartpole()
    collect = ControlCollector(world, open_control("fresh", world, 0, "cpu", {}), seed=0)
    starts = collect.pool(2)
    assert collect.pool(2) == starts == collect.numbered(range(2))
    found = collect.episodes(starts, [2, 1], max_tokens=5)
    assert found.by("episode").first(found["group"]).tolist() == [0, 0, 1]
    more = collect.episodes(starts[1:], 2, into=torch.tensor([1]), max_tokens=5)
    both = replaced(found, episodes_of(found, torch.tensor([0])), more)
    assert both.by("episode").keys.tolist() == [2, 3, 4]
    assert both.by("group").keys.tolist() == [1]
    assert collect.state["groups"] == 2
