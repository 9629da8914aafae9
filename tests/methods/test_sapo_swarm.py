"""SAPO, the swarm: what a round is made of, what is dropped and why, and nodes that die."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import forks
import pytest
import tiny
import torch

import panoply as pp
from panoply import rollouts, swarm
from panoply.effects import inert
from panoply.experience import OWN, REPLAY, Experience
from panoply.policies.decoder import DecoderConfig
from panoply.policies.text import TextPolicy
from panoply.policies.tokenizer import Tokenizer
from panoply.progress import Progress
from panoply.rollout.engine import STEADY, TextEngine
from panoply.rollout.text import Collector
from panoply.slots.sample.groups import groups
from panoply.slots.sample.shared import shared

SMALL: dict[str, Any] = {
    "world.operations": 2,
    "sample.prompts": 2,
    "sample.theirs": 2,
    "sample.group": 4,
    "sample.name": "ended",
    "reward.name": "ended",
    "run.device": "cpu",
    "run.held_out": 2,
    "run.greedy": False,
    "run.evaluate_every": 0,
    "run.episodes_every": 0,
}


def round_of(collect: Collector, folder: Path, node: str, **more: Any) -> Experience:
    """A round of a node that remembers nothing."""
    part = shared(
        folder=str(folder), node=node, name="ended", **{"prompts": 2, "theirs": 2, "group": 4, **more}
    )
    collect.notes = {}
    state, found = part.filled({"seen": []}, collect)
    collect.seen = state["seen"]  # type: ignore[attr-defined]
    return found


def other(collect: Collector, seed: int = 9) -> Collector:
    """Another node in the same world, with another model."""
    config = DecoderConfig(**collect.world.default_model())
    policy = TextPolicy.fresh(config, collect.world.tokenizer, seed=seed)
    made = Collector(collect.world, policy, seed=seed)
    made._engine = TextEngine(policy.model, policy.tokenizer, least=STEADY)  # the same in whatever company
    return made


def lines(folder: Path, node: str = "b", round: int = 0) -> list[dict[str, Any]]:
    path = folder / "rollouts" / node / f"{round:07d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(folder: Path, rows: list[Any], node: str = "b", round: int = 0) -> None:
    path = folder / "rollouts" / node / f"{round:07d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


# ------------------------------------------------------------------ a round


def test_a_round_is_own_groups_and_whole_groups_of_others(tiny_collector: Collector, tmp_path: Path) -> None:
    theirs = round_of(other(tiny_collector), tmp_path, "b", theirs=0, prompts=6)
    found = round_of(tiny_collector, tmp_path, "a")
    mine, taken = (found.take(found["source"] == source) for source in (OWN, REPLAY))
    assert len(mine.by("group")) == len(taken.by("group")) == 2
    assert len(taken.by("episode")) == 8, "groups as they were generated, and not cut"
    assert not set(mine["group"].tolist()) & set(taken["group"].tolist())
    said = {tuple(r["tokens"]) for g in lines(tmp_path)[1:] for r in g["answers"]}
    assert {tuple(row) for row in _answers(taken)} <= said
    assert set(taken["task"].tolist()) <= set(theirs["task"].tolist())
    assert tiny_collector.notes["swarm_taken"] == 2


def _answers(rows: Experience) -> list[list[int]]:
    grid = rows.by("episode").grid()
    return [rows["action"][row[row >= 0]].tolist() for row in grid]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_others_answers_are_scored_by_the_node_itself(
    temperature: float, tiny_collector: Collector, tmp_path: Path
) -> None:
    """The ratio starts at 1 on every row, whoever acted: nothing corrects for the peer's policy."""
    round_of(other(tiny_collector), tmp_path, "b", theirs=0, prompts=6)
    found = round_of(tiny_collector, tmp_path, "a", temperature=temperature)
    taken = found["source"] == REPLAY
    assert bool(taken.any())
    scored = tiny_collector.policy.score(found, frozenset({"entropy"}))
    for name in ("logp", "entropy"):
        assert torch.allclose(scored[name], found[name], atol=1e-5), name
    one, step = found.take(taken), int(taken.nonzero()[0])
    by_hand = tiny_collector.policy.score(one.with_columns(temperature=torch.ones(len(one))))["logp"][0]
    assert torch.isclose(found["logp"][step], by_hand, atol=1e-5) == (temperature == 1.0)


def test_what_nobody_offers_is_made_up_by_own_groups(tiny_collector: Collector, tmp_path: Path) -> None:
    """I + J groups in every round: alone in a folder, and without one, it is the same batch as eight own."""
    alone = round_of(other(tiny_collector, 3), tmp_path, "a")
    without = shared(prompts=2, theirs=2, group=4)
    bare = without.filled({"seen": []}, other(tiny_collector, 3))[1]
    plain = groups(prompts=4, group=4)(other(tiny_collector, 3))
    for found in (alone, bare):
        assert len(found.by("group")) == 4
        for name in ("action", "logp", "group", "episode", "task"):
            assert found[name].equal(plain[name]), name


def test_even_groups_are_passed_over_before_the_lot_is_drawn(
    tiny_collector: Collector, tmp_path: Path
) -> None:
    """One group in twenty varies: it is always found, since the others do not take its place."""
    task = tiny_collector.task(5)
    end, digit = tiny_collector.policy.tokenizer.eos_id, 3
    same = [{"tokens": [digit, digit], "text": "22", "ended": False}] * 4
    varied = [*same[:3], {"tokens": [digit, end], "text": "2", "ended": True}]
    row = {"task": 5, "id": task.id, "prompt": "?"}
    head = _head(tiny_collector)
    write(tmp_path, [head, *([{**row, "answers": same}] * 19), {**row, "answers": varied}])
    found = round_of(tiny_collector, tmp_path, "a", theirs=1)
    taken = found.take(found["source"] == REPLAY)
    assert len(taken.by("episode")) == 4
    assert taken["signal:ended"].sum() == 1, "graded here, whatever the other node found"
    assert tiny_collector.notes["swarm_taken"] == 1
    assert 0 < tiny_collector.notes["swarm_even"] <= 19
    assert tiny_collector.notes["swarm_dropped"] == 0, "to be even is no fault"
    assert tiny_collector.state["episodes"] == 8 + 4, "what is passed over was not collected"
    assert sorted(found["episode"].unique().tolist()) == list(range(12))


def _head(collect: Collector, **more: Any) -> dict[str, Any]:
    vocabulary = rollouts.vocabulary_of(collect.policy.tokenizer)
    return {"panoply": "rollouts", "schema": 1, "node": "b", "round": 0, "vocabulary": vocabulary, **more}


def test_every_group_is_taken_once(tiny_collector: Collector, tmp_path: Path) -> None:
    """A node that has died offers the same for ever: nobody learns from it again and again."""
    round_of(other(tiny_collector), tmp_path, "b", theirs=0, prompts=3)
    part = shared(folder=str(tmp_path), node="a", name="ended", prompts=1, theirs=2, group=4)
    state: dict[str, Any] = {"seen": []}
    taken: list[float] = []
    for version in range(3):
        tiny_collector.version = version
        state, _ = part.filled(state, tiny_collector)
        taken.append(tiny_collector.notes["swarm_taken"])
    assert taken == [2, 1, 0]
    assert len(state["seen"]) == 3


def test_a_window_of_rounds_is_kept_and_looked_at(tiny_collector: Collector, tmp_path: Path) -> None:
    writer = other(tiny_collector)
    for writer.version in range(5):
        round_of(writer, tmp_path, "b", theirs=0, prompts=1, window=3)
    assert sorted(p.stem for p in (tmp_path / "rollouts/b").iterdir()) == ["0000002", "0000003", "0000004"]
    writer.version = 3
    round_of(writer, tmp_path, "b", theirs=0, prompts=1, window=3)
    assert sorted(p.stem for p in (tmp_path / "rollouts/b").iterdir()) == ["0000002", "0000003"], (
        "what a former life left of later rounds goes"
    )
    round_of(tiny_collector, tmp_path, "a", theirs=9, window=1)
    assert {key.partition(":")[0] for key in tiny_collector.seen} == {"b/0000003"}  # type: ignore[attr-defined]


def test_text_is_encoded_anew_in_another_vocabulary(tiny_collector: Collector, tmp_path: Path) -> None:
    """The same characters under other ids: the answer is the same text, and ends with the reader's own end."""
    characters = "0123456789+*="
    foreign = Tokenizer.of_characters(characters[::-1], specials=("<x>", "$"))
    words = [[foreign.id(c) for c in "+47"] + [foreign.id("$")], [foreign.id(c) for c in "*2"]] * 2
    answers = [rollouts.answer_of(tokens, foreign) for tokens in words]
    assert answers[0] == {"tokens": words[0], "text": "+47", "ended": True}
    task = tiny_collector.task(5)
    head = _head(tiny_collector, vocabulary=rollouts.vocabulary_of(foreign))
    write(tmp_path, [head, {"task": 5, "id": task.id, "prompt": "?", "answers": answers}])
    found = round_of(tiny_collector, tmp_path, "a")
    taken = found.take(found["source"] == REPLAY)
    texts = [tiny_collector.policy.tokenizer.decode(row) for row in _answers(taken)]
    assert texts == ["+47$", "*2", "+47$", "*2"]


# ------------------------------------------------------------------ what is dropped


BROKEN: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "malformed"),
    "no object": ([1, 2], "malformed"),
    "answers missing": ({"answers": None}, "malformed"),
    "one answer": ({"answers": 1}, "malformed"),
    "a token beyond the vocabulary": ({"tokens": [1, 10**6]}, "malformed"),
    "a negative token": ({"tokens": [1, -1]}, "malformed"),
    "no tokens": ({"tokens": []}, "malformed"),
    "words for tokens": ({"tokens": ["1"]}, "malformed"),
    "longer than the context": ({"tokens": [1] * 10**5}, "malformed"),
    "nested": ("[" * 5000, "malformed"),
    "another problem": ({"id": 7}, "foreign"),
    "a place that no world has": ({"task": -(2**62)}, "foreign"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_row_is_dropped_with_a_reason_and_the_next_is_used(
    name: str, tiny_collector: Collector, tmp_path: Path
) -> None:
    round_of(other(tiny_collector), tmp_path, "b", theirs=0, prompts=2)
    head, broken, good = lines(tmp_path)
    change, reason = BROKEN[name]
    if isinstance(change, dict):
        tokens = change.pop("tokens", None)
        answers = broken["answers"]
        if tokens is not None:
            answers[2]["tokens"] = tokens
        if isinstance(change.get("answers"), int):
            change = {"answers": answers[:1]}
        change = {**broken, **change}
    write(tmp_path, [head, change, good])
    round_of(tiny_collector, tmp_path, "a")
    notes = tiny_collector.notes
    assert (notes["swarm_dropped"], notes[f"swarm_dropped_{reason}"], notes["swarm_taken"]) == (1, 1, 1)
    (said,) = (json.loads(line) for line in (tmp_path / "dropped/a.jsonl").read_text().splitlines())
    assert (said["from"], said["reason"]) == ("b/0000000:2", reason)
    assert said["why"]


def test_files_of_strangers_are_dropped_once_and_cannot_block(
    tiny_collector: Collector, tmp_path: Path
) -> None:
    home = tmp_path / "rollouts/b"
    home.mkdir(parents=True)
    (tmp_path / "rollouts/readme.txt").write_text("hello")
    (tmp_path / "rollouts/no node").mkdir()
    (home / "notes.txt").write_text("hello")
    (home / "0000001.jsonl").write_bytes(b"\x80\x04\x95pickle")
    (home / "0000002.jsonl").write_text("")
    os.mkfifo(home / "0000003.jsonl")
    write(tmp_path, [_head(tiny_collector, schema=2)], round=4)
    write(tmp_path, [{**_head(tiny_collector), "round": "five"}], round=5)
    (home / ".0000006.jsonl.77").write_text("half of a fi")
    for turn, (count, reasons) in enumerate(((8, {"unreadable": 6, "schema": 1, "malformed": 1}), (0, {}))):
        tiny_collector.version = turn
        state = {"seen": tiny_collector.seen if turn else []}  # type: ignore[attr-defined]
        part = shared(folder=str(tmp_path), node="a", name="ended", prompts=1, theirs=1, group=2, window=9)
        after, found = part.filled(state, tiny_collector)
        tiny_collector.seen = after["seen"]  # type: ignore[attr-defined]
        notes = tiny_collector.notes
        assert notes["swarm_dropped"] == count
        assert {r: notes[f"swarm_dropped_{r}"] for r in reasons} == reasons
        assert set(found["source"].tolist()) == {OWN}


def test_what_is_published_is_text_and_of_nobody_elses_making(
    tiny_collector: Collector, tmp_path: Path
) -> None:
    """A header and a group a line; what was taken over is not offered again."""
    round_of(other(tiny_collector), tmp_path, "b", theirs=0, prompts=4)
    found = round_of(tiny_collector, tmp_path, "a")
    head, *rows = lines(tmp_path, "a")
    assert head == {**_head(tiny_collector), "node": "a"}
    assert [row["id"] for row in rows] == found["task"][found["source"] == OWN].unique_consecutive().tolist()
    for row in rows:
        assert tiny_collector.task(row["task"]).id == row["id"]
        assert row["prompt"].endswith("=")
        for answer in row["answers"]:
            end = "$" if answer["ended"] else ""
            assert answer["text"] + end == tiny_collector.policy.tokenizer.decode(answer["tokens"])


def test_a_world_that_cannot_grade_an_answer_costs_that_group_alone(
    tiny_collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    round_of(other(tiny_collector), tmp_path, "b", theirs=0, prompts=1)
    before = dict(tiny_collector.state)

    def fails(*_: Any) -> Any:
        raise ValueError("no such answer")

    real = type(tiny_collector).answers
    monkeypatch.setattr(type(tiny_collector), "answers", fails)
    found = round_of(tiny_collector, tmp_path, "a")
    monkeypatch.setattr(type(tiny_collector), "answers", real)
    assert tiny_collector.notes["swarm_dropped_ungraded"] == 1
    assert len(found.by("group")) == 4
    assert tiny_collector.state["episodes"] - before["episodes"] == 16, "what was dropped was not collected"


# ------------------------------------------------------------------ settings


def test_settings_that_cannot_be() -> None:
    for settings, why in (
        ({"sample.node": "../x"}, "at most 40 letters"),
        ({"sample.theirs": -1}, "at least 0"),
        ({"sample.window": 0}, "at least 1"),
        ({"sample.temperature": 0}, "would be the same"),
    ):
        with pytest.raises(pp.PanoplyError, match=why):
            pp.plan("sapo-swarm", settings=settings)
    for settings, path in (
        ({}, "sample.window"),
        ({"sample.folder": "x", "sample.theirs": 0}, "sample.name"),
    ):
        assert path in dict(inert(pp.plan("sapo-swarm", settings=settings)))
    assert "sample.window" not in dict(inert(pp.plan("sapo-swarm", settings={"sample.folder": "x"})))


# ------------------------------------------------------------------ runs


def node(folder: Path, name: str, seed: int, steps: int = 4) -> Any:
    settings = {**SMALL, "sample.folder": str(folder), "sample.node": name, "run.checkpoint_every": 2}
    return pp.steps("sapo-swarm", settings=settings, seed=seed, model="fresh", steps=steps, threads=1,
                    run=folder / "nodes" / name, progress=Progress())  # fmt: skip


def test_a_killed_node_repeats_its_rounds_bit_for_bit_though_others_went_on(tmp_path: Path) -> None:
    """What was taken is written down before it is learned from: a round that is made again takes it again."""
    with node(tmp_path, "b", 1, steps=3) as theirs:
        rounds = list(theirs)
    assert {"swarm_offered", "swarm_taken", "swarm_even", "swarm_dropped"} <= rounds[0].metrics.keys()
    with node(tmp_path, "a", 0) as whole:
        list(whole)
    noted = tiny.metrics(whole.result.run)
    assert sum(row["swarm_taken"] for row in noted) > 0
    for path in (whole.result.run / "checkpoints").glob("step-0000004"):
        path.rename(tmp_path / "gone")
    (whole.result.run / "result.json").unlink()
    for path in (tmp_path / "rollouts/b").iterdir():
        path.unlink()
    resumed = tiny.resume(whole.result.run)
    assert resumed.fingerprint == whole.result.fingerprint
    assert tiny.metrics(resumed.run) == noted


def test_what_another_run_took_is_not_taken_for_ones_own(tiny_collector: Collector, tmp_path: Path) -> None:
    round_of(tiny_collector, tmp_path, "a")
    exchange = rollouts.Exchange(tmp_path, "a", 4)
    (head,) = (json.loads(line) for line in (tmp_path / "taken/a/0000000.jsonl").read_text().splitlines()[:1])
    assert exchange.noted(0, head["own"]) is not None
    assert exchange.noted(0, hashlib.sha256(b"other").hexdigest()[:32]) is None
    assert exchange.noted(1, head["own"]) is None
    (tmp_path / "taken/a/0000000.jsonl").write_text(json.dumps({**head, "schema": 2}))
    assert exchange.noted(0, head["own"]) is None
    (tmp_path / "taken/a/0000000.jsonl").write_text("{")
    assert exchange.noted(0, head["own"]) is None


class Killer(swarm.Watch):
    """Kills a node once, when it has made a round."""

    def __init__(self, name: str) -> None:
        super().__init__(quiet=True)
        self.name, self.killed, self.said = name, 0, list[str]()

    def say(self, text: str) -> None:
        self.said.append(text)

    def show(self, nodes: Any) -> None:
        (node,) = (n for n in nodes if n.name == self.name)
        if not self.killed and node.last() and node.process.poll() is None:
            self.killed = node.process.pid
            os.kill(node.process.pid, signal.SIGKILL)


def test_a_swarm_survives_a_kill_and_strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of their own; one is killed by force, and somebody else has left rubbish in the folder."""
    monkeypatch.setattr(swarm, "subprocess", forks)
    place = tmp_path / "three"
    steps = 24
    settings = {**SMALL, "run.checkpoint_every": 5}
    swarm.make(place, nodes={n: {} for n in swarm.names(3)}, settings=settings, model="fresh", steps=steps)
    stranger = place / "rollouts/stranger"
    stranger.mkdir(parents=True)
    (stranger / "0000000.jsonl").write_text('{"panoply": "rollouts"')
    watch = Killer("b")
    found = swarm.run(place, watch)
    assert watch.killed
    assert any("b was killed by SIGKILL" in said for said in watch.said)
    assert not found.failed
    assert [(s.node, s.status, s.round) for s in found.nodes] == [(n, "finished", steps) for n in "abc"]
    assert all(s.dropped == {"unreadable": 1} for s in found.nodes)
    assert sum(s.taken for s in found.nodes) > 0
    rounds = [row["step"] for row in tiny.metrics(place / "nodes/b")]
    assert rounds == list(range(1, steps + 1)), "every round once, the killed one again"
    with pytest.raises(pp.PanoplyError, match="all are finished"):
        swarm.run(place, watch)


def test_a_node_that_is_refused_or_dies_again_and_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three deaths in a row without a further round are enough; what would be refused again is not tried again."""
    place = tmp_path / "two"
    swarm.make(place, nodes={"a": {}, "b": {}}, settings=SMALL, model="fresh", steps=2)
    scripts = {
        "a": "import os; os.kill(os.getpid(), 9)",
        "b": "import sys; print('panoply: no.'); sys.exit(2)",
    }
    started: list[str] = []

    def start(self: swarm.Node) -> None:
        started.append(self.name)
        self._log = open(self.run.folder / swarm.LOG, "wb")  # noqa: SIM115
        import subprocess
        import sys

        self.process = subprocess.Popen([sys.executable, "-S", "-c", scripts[self.name]], stdout=self._log)

    monkeypatch.setattr(swarm.Node, "start", start)
    found = swarm.run(place, swarm.Watch(quiet=True))
    assert started.count("a") == 1 + swarm.RESTARTS
    assert started.count("b") == 1
    assert "killed by SIGKILL" in found.failed["a"]
    assert "code 2: no." in found.failed["b"]
    assert "given up" in str(found)


def test_nodes_differ_and_may_join_later(tmp_path: Path) -> None:
    place = tmp_path / "swarm"
    swarm.make(
        place, nodes={"a": {"update.lr": "1e-2"}, "b": {}}, settings=SMALL, model="fresh", steps=2, seed=5
    )
    swarm.join(place, {"late": {"sample.theirs": 1}})
    plans = {name: run.plan() for name, run in swarm.found(place).items()}
    assert [(plans[n].options.seed, plans[n].method.sample.settings()["theirs"]) for n in ("a", "b", "late")] == [
        (5, 2), (6, 2), (7, 1),
    ]  # fmt: skip
    assert [plans[n].method.update.settings()["lr"] for n in ("a", "b")] == [1e-2, 3e-4]
    assert plans["late"].method.sample.settings()["folder"] == str(place.resolve())
    assert [dataclasses.astuple(s)[:4] for s in swarm.Swarm.of(place).nodes] == [
        (n, "stopped", 0, 2) for n in ("a", "b", "late")
    ]
    for nodes, why in (({"a": {}}, "has a node a already"), ({"a/b": {}}, "at most 40 letters")):
        with pytest.raises(pp.PanoplyError, match=why):
            swarm.join(place, nodes)
    with pytest.raises(pp.PanoplyError, match="is a swarm already"):
        swarm.make(place, nodes={"x": {}})


def test_any_method_of_groups_can_be_a_node(tmp_path: Path) -> None:
    settings = {**SMALL, "update.epochs": 1}
    swarm.make(tmp_path / "s", "bapo", nodes={"a": {}}, settings=settings, model="fresh", steps=2)
    plan = swarm.found(tmp_path / "s")["a"].plan()
    assert (plan.method.sample.info.name, plan.method.surrogate.info.name) == ("shared", "balanced_clip")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("x",), "There is no swarm in x: name how many nodes it is to have, such as --nodes 4"),
        (("x", "--nodes", "0"), "--nodes must be at least 1"),
        (("x", "--nodes", "2", "--node", "a"), "leave one of them out"),
        (("x", "--node", "a", "--node", "a"), "names a twice"),
        (("x", "--node", "a:update.lr="), "to nothing"),
        (("x", "--nodes", "2", "--set", "update.lr=x"), "update.lr"),
        (("x", "--nodes", "2", "--world", "cartpole"), "text"),
        (("x", "--nodes", "2", "--node", "a:run.model=nowhere", "--node", "b"), "begin with nowhere"),
        (("there", "--nodes", "3"), "goes on as it was planned: leave --nodes out"),
        (("there", "--set", "update.lr=1e-3"), "leave --set out"),
        (("there", "grpo"), "leave the method out"),
    ],
)
def test_what_the_command_refuses(
    words: tuple[str, ...], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from panoply.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there/swarm.json").write_text(
        '{"schema": 1, "method": "sapo-swarm", "world": null, "choices": {}}'
    )
    with pytest.raises(SystemExit) as ended:
        main(["swarm", *words])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert why in said
    assert not (tmp_path / "x").exists(), "nothing is made before all is checked"


def test_the_command_shows_how_nodes_stand(tmp_path: Path, capsys: Any) -> None:
    from panoply.cli import main

    swarm.make(tmp_path / "s", nodes={"a": {}}, settings=SMALL, model="fresh", steps=2)
    with pytest.raises(SystemExit) as ended:
        main(["swarm", str(tmp_path / "s"), "--status", "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["nodes"]["a"]["status"] == "stopped"
