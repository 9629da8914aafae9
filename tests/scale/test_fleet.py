"""Episodes that others play are those of one process, bit for bit, whoever plays them and whoever dies."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from sweep import small

import panoply as pp
from panoply.errors import PanoplyError, Resumable
from panoply.experience import Experience, Ragged
from panoply.loops.seat import Seat
from panoply.planning import Plan
from panoply.policies.build import open_policy
from panoply.policies.moving import moving
from panoply.rollout.engine import STEADY, TextEngine
from panoply.rollout.text import Collector
from panoply.rollout.tree import Branch
from panoply.scale import fleet as fleets
from panoply.scale import wire
from panoply.scale.cluster import Threads
from panoply.scale.fleet import Fleet, blocks, halves
from panoply.scale.sampler import Sampler
from panoply.scale.spread import Spread
from panoply.scale.travel import packed
from panoply.scale.weights import Files, Stored, opened
from panoply.worlds.world import Signals


def same(one: Experience, other: Experience, but: str = "") -> None:
    for table in ("decisions", "context"):
        mine, theirs = getattr(one, table), getattr(other, table)
        assert set(mine) == set(theirs)
        for name in set(mine) - {but}:
            a, b = mine[name], theirs[name]
            pairs = [(a.values, b.values), (a.offsets, b.offsets)] if isinstance(a, Ragged) else [(a, b)]
            assert all(np.array_equal(wire._bits(x), wire._bits(y)) for x, y in pairs), f"{table}.{name}"


class Watched(Sampler):
    """A sampler to which something happens when it is asked to play."""

    happens: ClassVar[Callable[[Any], None] | None] = None

    def play(self, share: Any) -> dict[str, Any]:
        if Watched.happens is not None:
            Watched.happens(share)
        return super().play(share)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    monkeypatch.setattr(fleets, "Sampler", Watched)
    monkeypatch.setattr(Watched, "happens", None)
    made = Threads()
    yield made
    made.close()


def planned(world: str, samplers: int, **settings: Any) -> Plan:
    patience = settings.pop("patience", 600.0)
    return pp.plan(
        "grpo",
        world,
        samplers=samplers,
        cluster="threads",
        device="cpu",
        patience=patience,
        settings=settings,
    )


def both(cluster: Threads, plan: Plan, seed: int = 0) -> tuple[Fleet, Collector]:
    world: Any = plan.world()
    policy = open_policy("start", world, 0, "cpu")
    fleet = Fleet(world, policy, seed, plan=plan, spread=SimpleNamespace(cluster=cluster, gpus=0))  # type: ignore[arg-type]
    alone = Collector(world, policy, seed)
    alone._engine = TextEngine(policy.model, policy.tokenizer, least=STEADY)
    return fleet, alone


@pytest.mark.parametrize(
    ("world", "samplers"), [("chain", 1), ("chain", 3), ("modes", 2), ("keydoor", 2), ("tools", 3)]
)
def test_samplers_play_what_one_process_plays(cluster: Threads, world: str, samplers: int) -> None:
    fleet, alone = both(cluster, planned(world, samplers))
    for collect in (fleet, alone):
        collect.counted = "success"
    for step, how in enumerate([{}, {"temperature": 0.7, "top_k": 4, "turns": 3}]):
        fleet.version = alone.version = step
        tasks = alone.tasks(3)
        assert fleet.tasks(3) == tasks
        same(
            fleet.episodes([*tasks, tasks[0]], [2, 3, 1, 2], **how),
            alone.episodes([*tasks, tasks[0]], [2, 3, 1, 2], **how),
        )
        assert fleet.state == alone.state, "all that is counted, too"
        with torch.no_grad():
            for weight in fleet.policy.parameters():
                weight.add_(0.01)
    into = torch.tensor([5, 7])
    same(fleet.episodes(tasks[:2], 2, into=into), alone.episodes(tasks[:2], 2, into=into))
    lines = fleet.workers(2)
    assert [line["worker"] for line in lines] == [f"sampler-{i}" for i in range(samplers)]
    assert sum(line["tokens"] for line in lines) == fleet.state["decisions"]
    assert all(line["version"] == 1 for line in lines if line["tokens"])


def test_temperatures_by_place_and_tokens_alone(cluster: Threads) -> None:
    fleet, alone = both(cluster, planned("chain", 2))
    tasks = alone.tasks(3)
    assert fleet.tasks(3) == tasks

    def schedule(place: torch.Tensor) -> torch.Tensor:
        return 1 + 0.1 * place

    same(fleet.episodes(tasks, 2, temperature=schedule), alone.episodes(tasks, 2, temperature=schedule))
    begun = [[3], [], [4, 5]]
    (drawn, success), (own, theirs) = (c.continued(tasks, begun, 3) for c in (fleet, alone))
    same(Experience(drawn.decisions, drawn.context), Experience(own.decisions, own.context))
    assert torch.equal(success, theirs)
    assert drawn.reasons.tolist() == own.reasons.tolist()
    for name in ("request", "end"):
        assert torch.equal(getattr(drawn, name), getattr(own, name))
    trees = [collect.tree(tasks[:2]) for collect in (fleet, alone)]
    for tree in trees:
        tree.extend([Branch(0, 2, 4), Branch(1, 3, 4)])
        tree.extend([Branch(node, 2) for node in tree.open()])
    same(*(tree.experience() for tree in trees))
    assert fleet.state == alone.state


def test_other_selves_that_act(cluster: Threads) -> None:
    fleet, alone = both(cluster, planned("chain", 2))
    other = alone.policy.copy()
    with torch.no_grad():
        for weight in alone.policy.parameters():
            weight.mul_(0.5)
    tasks = alone.tasks(2)
    found = []
    for collect in (fleet, alone):
        collect.selves = SimpleNamespace(
            actors=["past:1"], policy_of=lambda name: other, step_of=lambda name: 7
        )
        with collect.acted_by("past:1"):
            if collect is alone:
                collect._engine = TextEngine(other.model, other.tokenizer, least=STEADY)
            theirs = collect.episodes(tasks, 2)
        if collect is alone:
            collect._engine = TextEngine(alone.policy.model, alone.policy.tokenizer, least=STEADY)
        found.append((theirs, collect.episodes(tasks, 2)))
    for one, process in zip(*found, strict=True):
        same(one, process)
    assert set(found[0][0]["actor"].tolist()) == {1}
    assert set(found[0][0]["version"].tolist()) == {7}
    assert set(found[0][1]["actor"].tolist()) == {0}


def test_a_sampler_that_dies_and_one_that_hangs(cluster: Threads) -> None:
    fleet, alone = both(cluster, planned("keydoor", 2, patience=0.2))
    tasks, expected = alone.tasks(4), alone.episodes(alone.numbered(range(4)), 2)
    killed, free = [], threading.Event()

    def kill(share: Any) -> None:
        if not killed:
            killed.append(share["first"])
            next(w for w in cluster.workers if w.name == threading.current_thread().name[:-2]).kill()

    Watched.happens = kill
    same(fleet.episodes(tasks, 2), expected)
    assert killed
    assert sum(line["restarts"] for line in fleet.workers(1)) == 1

    def hang(share: Any) -> None:
        if share["first"] == 8 and not free.is_set():
            free.set()
            threading.Event().wait(1.0)

    Watched.happens = hang
    again = alone.episodes(tasks, 2)
    same(fleet.episodes(tasks, 2), again)
    assert free.is_set()


def test_a_task_that_kills_whoever_plays_it_is_left_out_and_counted(cluster: Threads) -> None:
    fleet, alone = both(cluster, planned("chain", 2))
    tasks = alone.tasks(4)
    expected = alone.episodes(tasks, 2)
    deaths: list[int] = []

    def kill(share: Any) -> None:
        if any(task.id == tasks[2].id for task in share["tasks"]):
            deaths.append(len(share["tasks"]))
            next(
                w for w in cluster.workers if w.name == threading.current_thread().name[:-2] and not w.dead
            ).kill()

    Watched.happens = kill
    same(fleet.episodes(tasks, 2), expected.take(expected["task"] != tasks[2].id), but="prompt")
    assert deaths[-1] == 1
    assert len(deaths) >= 3
    assert fleet.failures() == {fleets.KILLED: 2}
    with pytest.raises(Resumable, match="Not one of 2"):
        fleet.episodes([tasks[2]], 2)


def test_answers_that_cannot_be_graded(cluster: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, alone = both(cluster, planned("chain", 2))
    tasks = alone.tasks(4)
    world = type(alone.world)
    plain, why = world.grade_all, {"no time": 0}

    def some(self: Any, asked: Any, answers: Any) -> list[Signals | None]:
        bad = [task.id in (tasks[0].id, tasks[3].id) for task in asked]
        why["no time"] += sum(bad)
        return [None if b else g for b, g in zip(bad, plain(self, asked, answers), strict=True)]

    monkeypatch.setattr(world, "grade_all", some)
    same(fleet.episodes(tasks, 2), alone.episodes(tasks, 2))
    with pytest.raises(Resumable, match="Not one of 2"):
        fleet.episodes([tasks[0]], 2)


def test_weights_that_did_not_arrive_stop_the_run(cluster: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, alone = both(cluster, planned("chain", 1))
    monkeypatch.setattr(TextEngine, "publish", lambda self, weights, version: "0" * 16)
    with pytest.raises(PanoplyError, match="sampler-0 has other weights"):
        fleet.episodes(alone.tasks(1), 1)


def test_ways_of_weights(tmp_path: Any) -> None:
    weights = {"a": torch.arange(4.0), "b": torch.ones(2, dtype=torch.bfloat16)}
    files = Files(tmp_path / "shared", keep=2)
    for version in range(4):
        sent = files.parcel({**weights, "a": weights["a"] + version}, version)
    assert torch.equal(opened(sent)["a"], weights["a"] + 3)
    assert [p.name for p in sorted((tmp_path / "shared").iterdir())] == [
        "000000002.safetensors",
        "000000003.safetensors",
    ]
    assert Files.newest(tmp_path / "shared") == (3, tmp_path / "shared" / "000000003.safetensors")
    near = Files()
    assert near.folder.is_dir()
    near.close()
    assert not near.folder.exists()
    stored = Stored(lambda value: value).parcel(weights, 0)
    back = opened(stored, stored["content"])
    assert torch.equal(back["b"], weights["b"])
    with pytest.raises(PanoplyError, match="pigeons"):
        opened({"by": "pigeons"})


def test_shares_are_neighbours_of_about_as_many_episodes() -> None:
    assert blocks([2, 2, 2, 2], 2) == [(0, 2), (2, 4)]
    assert blocks([8, 1, 1], 2) == [(0, 1), (1, 3)]
    assert blocks([1], 3) == [(0, 1)]
    assert [high - low for low, high in blocks([1] * 10, 3)] == [3, 4, 3]
    share = {"tasks": "abc", "sizes": [1, 2, 3], "keys": [4, 5, 6], "first": 10}
    assert [(h["tasks"], h["first"]) for h in halves(share)] == [("a", 10), ("bc", 11)]
    assert halves({**share, "sizes": [1], "tasks": "a", "keys": [4]}) == [
        {**share, "sizes": [1], "tasks": "a", "keys": [4]}
    ]


def test_adapters_alone_travel(cluster: Threads) -> None:
    plan = pp.plan("grpo", "chain", samplers=1, cluster="threads", device="cpu", lora=2)
    sampler = Sampler(packed(plan))
    assert all("lora_" in name for name in moving(sampler.players["learner"].policy))


SAMPLED = (
    "a2fm-apo", "adacot-masked", "ampo", "arpo-entropy", "asearcher", "aspo-tir", "bgpo", "dr-po", "ead", "hapo",
    "inpo", "inspo", "seele", "spo-segment", "spo-tree", "t-ppo", "urpo",
)  # fmt: skip
"""One for each way in which sample parts ask a collector; whole runs of all methods: `python tests/sampled.py`."""


@pytest.mark.parametrize("method", SAMPLED)
def test_every_sample_part_gives_the_same_with_samplers(
    cluster: Threads, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes after sampling is the driver's, and does not know who sampled."""
    plan = small(method)
    monkeypatch.setitem(TextEngine.__init__.__kwdefaults__, "least", STEADY)
    spread = dataclasses.replace(plan, options=dataclasses.replace(plan.options, samplers=2))
    there: Any = Spread.__new__(Spread)
    there.options, there.cluster, there.gpus, there.ranks = spread.options, cluster, 0, None
    seats = Seat(plan, plan.world()), Seat(spread, spread.world(), spread=there)
    try:
        same(*(seat.parts["sample"](seat.collect) for seat in seats))
        assert seats[0].collect.state == seats[1].collect.state
        assert seats[0].collect.notes == seats[1].collect.notes
        assert seats[0].collect.failures() == seats[1].collect.failures()
    finally:
        for seat in seats:
            seat.collect.close()
