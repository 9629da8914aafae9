"""Several learners do what one process does: dealt rows, summed gradients, whole runs, deaths, other numbers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import Tabular, learner, on_policy, ragged, world_for
from methods.test_conformance import small
from spread import apart, logged, spread

import panoply as pp
from panoply.errors import PanoplyError, Resumable
from panoply.experience import Experience, Table
from panoply.planning import Plan
from panoply.progress import Progress
from panoply.run import Run
from panoply.scale.cluster import ThreadWorker
from panoply.scale.group import deal
from panoply.scale.rank import AGAIN, Key, Rank

TINY: dict[str, Any] = {
    "sample.prompts": 4,
    "sample.group": 4,
    "data.batch": 8,
    "update.epochs": 1,
    "update.minibatches": 1,
    "update.lr": 1e-6,
    "models.critic.warmup": 0,
    "policy.hidden": (8,),
    "sample.envs": 2,
    "sample.length": 16,
}


def tiny(method: str, world: str = "chain", *, model: str = "start", **more: Any) -> Plan:
    """Two steps whose second is felt in no more than rounding of the first."""
    settings = {**TINY, **more.pop("settings", {})}
    known = {*pp.plan(method, world).method.settings()}
    known |= {"policy.hidden", "policy.normalise"} if world != "chain" else set()
    kept = {name: value for name, value in settings.items() if name in known}
    run = {"held_out": 4, "steps": 2, "threads": 1, "device": "cpu", "evaluate_every": 0, **more}
    return pp.plan(method, world, settings=kept, model=model, **run)


def fingerprint(folder: Path) -> str:
    return str(Run.open(folder).result()["fingerprint"])


# ------------------------------------------------------------------ dealing


def rows_of(lengths: list[int], group: list[int]) -> Experience:
    """Episodes of so many tokens, in groups."""
    episode = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    of = torch.tensor(group)[episode]
    columns = {"episode": episode, "group": of, "context": episode, "action": torch.zeros_like(episode)}
    return Experience(Table(columns), Table({"observation": torch.zeros(len(lengths), 1)}))


def test_programs_that_are_compared_are_not_dealt_to_two() -> None:
    (q, *_) = [
        t for t in pp.plan("b-coder", world_for("b-coder")).method.terms() if "q_of_logits" in t.info.id
    ]
    rows = rows_of([3, 3, 3, 3], [0, 0, 0, 0])
    assert deal(rows, [q], 2)[1] is None


class Whole:
    """A term that must see a unit whole."""

    def __init__(self, unit: str):
        self.units = (unit,)


def test_the_dearest_unit_goes_first_to_whoever_has_least() -> None:
    rows = rows_of([2, 9, 3, 3, 4, 1], [0, 0, 1, 1, 2, 2])
    dealt = deal(rows, [Whole("episode")], 2)  # type: ignore[list-item]
    held = [hand["episode"].unique_consecutive().tolist() for hand in dealt if hand is not None]
    assert held == [[1, 0], [4, 2, 3, 5]] or [sorted(h) for h in held] == [[0, 1], [2, 3, 4, 5]]
    assert [len(hand) for hand in dealt if hand is not None] == [11, 11]
    assert all(
        hand["episode"].tolist() == sorted(hand["episode"].tolist()) for hand in dealt if hand is not None
    )


def test_a_unit_is_never_cut_and_a_hand_may_stay_empty() -> None:
    rows = rows_of([2, 9, 3, 3], [0, 0, 1, 1])
    first, second, third = deal(rows, [Whole("group")], 3)  # type: ignore[list-item]
    assert first is not None
    assert second is not None
    assert third is None
    assert [set(hand["group"].tolist()) for hand in (first, second)] == [{0}, {1}]
    assert deal(rows, [Whole("batch")], 2)[1] is None  # type: ignore[list-item]
    assert deal(rows, [Whole("episode")], 1)[0] is rows  # type: ignore[list-item]
    nobody = deal(rows.take(torch.zeros(len(rows), dtype=torch.bool)), [Whole("episode")], 2)  # type: ignore[list-item]
    assert nobody == [None, None]


# ------------------------------------------------------------------ runs


def test_one_learner_is_one_process_bit_for_bit(tmp_path: Path) -> None:
    plan = tiny("grpo", settings={"update.epochs": 2, "update.lr": 1e-3})
    one = logged(plan, tmp_path / "one")
    assert one[-1]["gradient_norm"] > 0
    assert logged(spread(plan, learners=1), tmp_path / "elsewhere") == one
    assert fingerprint(tmp_path / "elsewhere") == fingerprint(tmp_path / "one")


def test_rows_travel_once_however_many_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again, passes = [], Rank.passes

    def noted(self: Rank, key: Key, step: int, rows: Any, *args: Any) -> Any:
        again.append(rows == AGAIN)
        return passes(self, key, step, rows, *args)

    monkeypatch.setattr(Rank, "passes", noted)
    logged(spread(tiny("grpo", settings={"update.epochs": 3}), learners=1), tmp_path / "run")
    assert again == [False, True, True] * 2


FAMILIES = {
    "dynamic sampling": tiny("dapo"),
    "a critic, and minibatches": tiny("ppo", settings={"update.minibatches": 2}),
    "statistics of observations": tiny("ppo", "CartPole-v1", settings={"policy.normalise": True}),
    "a prepare, and pairs": tiny("kto"),
    "groups": tiny("gspo"),
    "pairs and a reference": tiny("dpo"),
    "adapters": tiny("grpo", lora=2),
    "whole distributions of another self": tiny("mdpo"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_two_learners_learn_what_one_process_does(name: str, tmp_path: Path) -> None:
    plan = FAMILIES[name]
    one = logged(plan, tmp_path / "one")
    assert all(row["gradient_norm"] > 0 for row in one)
    gap, where = apart(one, logged(spread(plan), tmp_path / "two"))
    assert gap <= 1, where


def test_recorded_episodes_are_watched_by_whoever_learns_of_them(tmp_path: Path) -> None:
    plan = tiny("ppo", episodes_every=1, steps=1)
    logged(plan, tmp_path / "one")
    logged(spread(plan), tmp_path / "two")
    one, two = (Run.open(tmp_path / name).episodes() for name in ("one", "two"))
    assert any("ratio" in episode for episode in one)
    for first, second in zip(one, two, strict=True):
        assert first.keys() == second.keys()
        assert first["gates"] == second["gates"]
        if "ratio" in first:
            assert first["ratio"] == pytest.approx(second["ratio"], abs=2e-6)


# ------------------------------------------------------------------ checkpoints and deaths


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two learners."""
    folder = tmp_path_factory.mktemp("learners") / "whole"
    logged(spread(tiny("grpo", checkpoint_every=1, keep=9, settings={"update.lr": 1e-3})), folder)
    return folder


@pytest.mark.parametrize("number", [0, 3])
def test_a_run_goes_on_with_another_number_of_learners(whole: Path, tmp_path: Path, number: int) -> None:
    stopped = tmp_path / "stopped"
    shutil.copytree(whole, stopped)
    shutil.rmtree(stopped / "checkpoints" / "step-0000002")
    (stopped / "result.json").unlink()
    pp.train(resume=stopped, learners=number, progress=Progress())
    one, two = (Run.open(folder).metrics() for folder in (whole, stopped))
    assert one[-1]["gradient_norm"] > 0
    assert [row["step"] for row in two] == [1, 2]
    assert one[-1]["loss"] == pytest.approx(two[-1]["loss"], abs=1e-6)
    assert one[-1]["gradient_norm"] == pytest.approx(two[-1]["gradient_norm"], rel=1e-6)
    assert two[-1]["lr"] == one[-1]["lr"]


@pytest.mark.parametrize("learners", [1, 2])
def test_a_learner_that_is_killed_changes_nothing(
    learners: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = spread(
        tiny("grpo", checkpoint_every=1, settings={"update.lr": 1e-3}), learners=learners, restarts=1
    )
    undisturbed = logged(plan, tmp_path / "whole")
    assert undisturbed[-1]["gradient_norm"] > 0
    call, killed = ThreadWorker.call, list[str]()

    def fatal(worker: ThreadWorker, method: str, *args: Any, **kwargs: Any) -> Any:
        last = f"learner-{learners - 1}"
        if method == "move" and args[1] == 1 and worker.name == last and not killed:
            killed.append(worker.name)
            worker.kill()
        return call(worker, method, *args, **kwargs)

    monkeypatch.setattr(ThreadWorker, "call", fatal)
    assert logged(plan, tmp_path / "killed") == undisturbed
    assert killed
    assert fingerprint(tmp_path / "killed") == fingerprint(tmp_path / "whole")

    killed.clear()
    never = spread(plan, learners=learners, restarts=0)
    with pytest.raises(Resumable, match=r"The worker learner-\d died.*--resume"):
        logged(never, tmp_path / "never")


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("method", "world", "says"),
    [
        ("trpo", "CartPole-v1", "update.natural of trpo@1 wants more than the sum of gradients"),
        ("n-pg-igt", "CartPole-v1", "wants more than the sum of gradients"),
        ("nash-mp", "chain", "wants more than the sum of gradients"),
        ("monet-imagine", "grids", "data.monet-vlpo/imagined of monet-imagine@1 has the policy read vectors"),
        ("sac", "Pendulum-v1", "learns from transitions"),
        ("iql", "Pendulum-v1", "learns from transitions"),
    ],
)
def test_what_cannot_be_spread_is_refused_by_plan(method: str, world: str, says: str) -> None:
    with pytest.raises(PanoplyError, match=rf"--learners cannot be 2: .*{says}"):
        pp.plan(method, world, learners=2)


@pytest.mark.parametrize(
    ("method", "world", "more", "says"),
    [
        ("grpo", "chain", {"lora": 2}, "adapters follow whole weights"),
        ("ppo", "chain", {}, "a model learns beside the policy"),
        ("ppo", "CartPole-v1", {}, "its policy is no decoder"),
        ("grpo", "chain", {"settings": {"update.bits": 8}}, "moments of 8 bits are of whole weights"),
        ("grpo", "chain", {"cluster": "threads"}, "torch shards over processes"),
        ("grpo", "chain", {"dtype": "float16"}, "float16 looks for a scale"),
    ],
)
def test_what_cannot_be_cut_into_pieces_is_refused_by_plan(
    method: str, world: str, more: dict[str, Any], says: str
) -> None:
    with pytest.raises(PanoplyError, match=rf"--layout sharded is not possible for {method}@1 here: {says}"):
        pp.plan(method, world, learners=2, layout="sharded", **more)


def test_who_only_keeps_step_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """More passes, and the same gradient and metrics bit for bit."""
    policy, rows = Tabular(0), ragged()
    plain = learner(policy, on_policy())
    expected = plain.gradient(rows)
    said = plain.passes(plain.weigh(rows, 0)).means()
    kept = learner(policy, on_policy())
    passed: list[int] = []
    monkeypatch.setattr(kept, "_pass", lambda *args: (passed.append(1), type(kept)._pass(kept, *args)))
    kept.together = lambda own: own + 2
    assert kept.passes(kept.weigh(rows, 0)).means() == said
    assert len(passed) == 3
    assert torch.equal(kept.gradient(rows)["logits"], expected["logits"])


def test_a_policy_that_only_the_driver_changes_is_noticed(tmp_path: Path) -> None:
    """Imitation of looks gives the policy thoughts when data is first asked for, where learners do not see it."""
    plan = small("monet-imagine")
    with pytest.raises(PanoplyError, match="Learners and the driver disagree on 'logp' of unchanged weights"):
        logged(spread(plan), tmp_path / "run")
