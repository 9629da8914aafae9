"""What a plan says of a run that is spread, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import panoply
from panoply import progress
from panoply.costs import Activations, Cost
from panoply.errors import PanoplyError
from panoply.planning import Options, Plan
from panoply.scale import placement, timing
from panoply.scale.cluster import Threads
from panoply.scale.spread import Spread, gpus_each
from panoply.scale.travel import packed, unpacked

SEVEN = 7_000_000_000


def needed(parameters: int = SEVEN, trainable: int = SEVEN) -> Cost:
    return Cost(parameters, trainable, 0, 0, [], {}, 0, Activations(0, 0, 0, False))


@pytest.mark.parametrize(
    ("method", "world", "chosen", "says"),
    [
        ("grpo", "chain", {"staleness": 1}, "--staleness has no effect: there are no samplers, --samplers N."),
        ("grpo", "chain", {"samplers": 2, "inflight": True}, "--inflight has no effect: weights that are always"),
        ("grpo", "chain", {"samplers": 2, "layout": "whole"}, "--layout has no effect: there are no learners"),
        ("grpo", "chain", {"learners": 2, "patience": 3.0}, "--patience has no effect: there are no samplers"),
        ("grpo", "chain", {"cluster": "auto"}, "--cluster has no effect: all of the run is in this process"),
        ("dpo", "chain", {"samplers": 2}, "--samplers has no effect: dpo@1 samples nothing"),
        ("sac", "Pendulum-v1", {"learners": 2}, "--learners cannot be 2: sac@1 learns from transitions"),
        ("ppo", "CartPole-v1", {"engine": "vllm"}, "--engine has no effect: ppo@1 on CartPole-v1@1 samples no text."),
        ("hapo", "chain", {"engine": "vllm"}, "run.engine cannot be vllm: it does not say how sure"),
        ("ppo", "CartPole-v1", {"samplers": 1, "staleness": 1}, "--staleness cannot be 1: only answers"),
        ("grpo", "chain", {"learners": -1}, "run.learners must be from 0 to 4096, not -1."),
        ("grpo", "chain", {"cluster": "there", "learners": 1}, "run.cluster is local, auto, threads or an address"),
    ],
)  # fmt: skip
def test_what_cannot_be_spread_is_refused(
    method: str, world: str, chosen: dict[str, object], says: str
) -> None:
    with pytest.raises(PanoplyError) as said:
        panoply.plan(method, world, **chosen)
    assert says in str(said.value)


def test_where_a_run_is_does_not_change_its_hash_and_what_it_samples_does() -> None:
    plain = panoply.plan("grpo")
    assert "learners" not in plain.to_json()["run"]
    placed = panoply.plan("grpo", learners=3, samplers=2, cluster="threads", layout="whole", restarts=1)
    assert placed.hash() == plain.hash()
    assert type(placed).from_json(json.loads(json.dumps(placed.to_json()))).options == placed.options
    changed = [{"staleness": 1}, {"staleness": 2}, {"staleness": 2, "inflight": True}, {"engine": "vllm"}]
    hashes = {panoply.plan("grpo", samplers=2, **more).hash() for more in changed}
    assert len(hashes | {plain.hash()}) == 5


def test_a_ratio_moves_where_batches_are_sampled_ahead() -> None:
    settings = {"surrogate.high": 0.3}
    with pytest.raises(PanoplyError, match="the ratio stays at 1"):
        panoply.plan("grpo", settings=settings)
    panoply.plan("grpo", settings=settings, samplers=1, staleness=1)
    with pytest.raises(PanoplyError, match="the ratio stays at 1"):
        panoply.plan("grpo", settings={**settings, "surrogate.against": "old"}, samplers=1, staleness=1)


def test_bytes_of_a_learner() -> None:
    """6 + 12/N a parameter where weights are whole; 16/N and a block where nothing is; adapters alone have the rest."""
    half = Options(learners=8, dtype="bfloat16")
    assert placement.rank_bytes(needed(), half, "whole") == SEVEN * 7.5
    assert placement.rank_bytes(needed(), half, "sharded") == pytest.approx(SEVEN * (2 + 0.05))
    assert placement.rank_bytes(needed(), Options(learners=1), "whole") == SEVEN * 16
    assert placement.rank_bytes(needed(SEVEN, 10), half, "whole") == pytest.approx(SEVEN * 2, rel=1e-6)
    assert placement.layout_of(half, needed()) == "whole"
    assert placement.layout_of(half, needed(10 * SEVEN, 10 * SEVEN)) == "sharded"
    assert placement.layout_of(Options(learners=8, layout="sharded"), needed()) == "sharded"


def test_the_plan_says_where_all_lies() -> None:
    said = str(panoply.plan("grpo", learners=2, samplers=3, staleness=1, cluster="auto"))
    assert "2 learners and 3 samplers in the Ray cluster that this machine is in, sampling 1" in said
    assert "all weights (whole): 1.3 MB" in said
    assert "0.9 MB to and from each learner, 0.4 MB of weights to each sampler" in " ".join(said.split())


def test_a_worker_has_a_gpu_or_there_are_too_few() -> None:
    eight = Options(learners=4, samplers=4)
    assert [gpus_each(eight, 8), gpus_each(eight, 0), gpus_each(Options(learners=9, device="cpu"), 8)] == [
        1,
        0,
        0,
    ]
    with pytest.raises(
        PanoplyError, match="4 learners and 4 samplers must have a GPU each, and the cluster has 7: ask"
    ):
        gpus_each(eight, 7)
    with pytest.raises(PanoplyError, match="1 learner must have a GPU each, and the cluster has none"):
        gpus_each(Options(learners=1, device="cuda"), 0)


def test_a_run_folder_that_a_learner_does_not_see_is_refused(tmp_path: Path) -> None:
    cluster = Threads()
    handles = cluster.place("learner", 2, dict)
    spread = object.__new__(Spread)  # of which only these are asked
    spread.ranks = cast(Any, SimpleNamespace(handles=handles))
    spread.check_shared(tmp_path / "not here")  # on this machine it is what it is
    handles[1].node = "far"
    spread.check_shared(tmp_path)
    with pytest.raises(
        PanoplyError, match="The run folder .* is not on far, where learner-1 is: name one on a disk"
    ):
        spread.check_shared(tmp_path / "not here")
    cluster.close()


def test_a_line_of_progress_names_workers_waiting_and_lag() -> None:
    options = Options(learners=2, samplers=1, staleness=1)
    job: Any = SimpleNamespace(plan=SimpleNamespace(options=options))
    record = {"seconds_wait_learners": 0.26, "seconds_wait_samplers": 3.0, "lag": 1.0}
    assert progress.workers(job, record) == ["2 learners waiting 0.3 s", "1 sampler waiting 3.0 s", "lag 1"]
    assert progress.workers(job, {"loss": 1.0}) == []


def test_the_simulation_by_hand() -> None:
    """Two answers of 10 tokens on one engine whose weights take a second to read, and a learner."""
    card = timing.Card(1.0, 1.0, 1e9, 1.0, 1.0, network=1.0, token=0.0, driver=0.5)
    load = timing.Load(0.5, kv=0.0, mixing=0.0, answers=2, mean=10, most=10, prompt=0, spread=0.0)
    sampling, learning = 10 * (0.5 * 2 + 2 * 0.5 * 2), 6 * 0.5 * 20
    alone = timing.expected(load, card, 1, 0)
    assert (alone.sampling, alone.learning, alone.publishing) == (sampling, learning, 1.0)
    assert alone.seconds == sampling + learning + 1 + 0.5
    apart = timing.expected(load, card, 1, 1, staleness=1)
    assert apart.seconds == max(sampling + 1, learning + 0.5)
    keys = timing.expected(
        dataclasses.replace(load, kv=1.0), card, 1, 0
    )  # contexts grow by 2 a token: 2·(0+…) ≈ 10²
    assert keys.sampling == pytest.approx(sampling + 100)
    exchanged = timing.expected(load, card, 2, 0)
    assert exchanged.learning == learning / 2 + 6 * 0.5


def test_an_engine_whose_rows_have_ended_holds_no_context() -> None:
    load = timing.Load(0.5, kv=1.0, mixing=0.0, answers=2, mean=10, most=10, prompt=5, spread=0.0)
    engine = timing._Engine(load, timing.Card(1.0, 1.0, 1e9, 1.0, 1.0, network=1.0, token=0.0, driver=0.5))
    engine.take(0, [3, 7])
    assert engine.context == 10
    engine.until(0)
    assert engine.context == 0


def test_in_flight_no_longest_answer_is_waited_for() -> None:
    load = timing.Load(7.62e9, 57344, 28 * 3584, 2048, 4000, 16384)
    found = {
        (k, inflight): timing.expected(load, timing.Card(), 64, 64, k, inflight).seconds
        for k, inflight in ((0, False), (1, False), (1, True), (4, True))
    }
    assert found[0, False] > found[1, False] > found[1, True] > found[4, True]
    assert found[4, True] > timing.expected(load, timing.Card(), 64, 64).learning


def test_a_plan_travels_with_the_files_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin, reward, data = (tmp_path / name for name in ("mine.py", "r.py", "d.jsonl"))
    plugin.write_text(
        "from panoply import part\n@part('credit')\ndef travelled(experience):\n"
        "    'Nothing.'\n    return experience.with_columns(advantage=experience['reward'])\n"
    )
    reward.write_text("def good(completion):\n    return 1.0\n")
    data.write_text('{"prompt": "1+1="}\n' * 4)
    made = panoply.plan(
        "grpo",
        data=str(data),
        reward=f"{reward}:good",
        credit="travelled",
        plugins=[str(plugin)],
        model=str(Path(panoply.__file__).parent / "assets/chain-start"),
    )
    parcel = packed(made)
    assert unpacked(parcel) == made  # where the files are, they are used
    texts = [file.read_bytes() for file in (plugin, reward, data)]
    for file in (plugin, reward, data):
        file.unlink()
    monkeypatch.setattr(Plan, "from_json", lambda found: seen.append(found) or made)
    seen: list[dict[str, Any]] = []
    unpacked(parcel)
    world, (there,) = seen[0]["world"], seen[0]["plugins"]
    place, _, name = world["rewards"][0].partition(":")
    assert name == "good"
    assert [Path(path).read_bytes() for path in (there, place, world["data"])] == texts
