"""What `panoply serve --record` wrote is learned from: with the ratio it had, by what it was worth, or not at all."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import own_model
import pytest
import tiny
import torch
from serving_kit import KEY

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import REPLAY
from panoply.policies.text import TextPolicy
from panoply.rollout.text import Collector
from panoply.serving.endpoint import Endpoint
from panoply.serving.record import is_record, read
from panoply.serving.speaker import Speaker
from panoply.slots.sample.recorded import recorded
from panoply.worlds.text.recorded import Recorded

FEW = {"run.held_out": 2, "run.evaluate_every": 0, "world.longest": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_model.write(tmp_path_factory.mktemp("own") / "model")


@pytest.fixture(scope="module")
def record(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve episodes of the example's agent, two turns each, with rewards that differ within a question."""
    file = tmp_path_factory.mktemp("record") / "episodes.jsonl"
    endpoint = Endpoint(Speaker(TextPolicy.load(model), "tiny", file), KEY).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_BASE_URL", endpoint.address)
        patch.setenv("OPENAI_API_KEY", KEY)
        patch.setattr(sys, "argv", ["agent.py", "12"])
        runpy.run_path(str(tiny.ROOT / "examples/agent.py"), run_name="__main__")
    endpoint.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert sum("reward" in line for line in lines) == 12, "the example posts what it earned"
    for i, line in enumerate(line for line in lines if "reward" in line):
        line["reward"] = float(i % 2)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def changed(record: Path, folder: Path, **fields: Any) -> Path:
    """The record with other fields in its turns; one that is None is left out."""
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    turns = [{**line, **fields} if "turn" in line else line for line in lines]
    made = folder / "changed.jsonl"
    kept = [{k: v for k, v in line.items() if v is not None} for line in turns]
    made.write_text("".join(json.dumps(line) + "\n" for line in kept))
    return made


def world(record: Path, model: Path, **settings: Any) -> Recorded:
    return Recorded(data=str(record), model=str(model), **{"held_out_share": 0.0, **settings})


def test_what_is_in_a_row(record: Path, model: Path) -> None:
    """Only what was drawn: the question, the conversation so far and what came from outside are context."""
    told = read(str(record)).episodes
    rows = recorded(prompts=8)(Collector(world(record, model), TextPolicy.load(model), 0))
    assert len(rows.by("episode")) == len(told) == 12, (
        "three questions are fewer than eight, and none comes twice"
    )
    assert len(rows) == sum(len(turn.said) for one in told for turn in one.turns)
    assert set(rows["source"].tolist()) == {REPLAY}
    by_group = {int(g): rows["episode"][rows["group"] == g].unique().numel() for g in rows["group"].unique()}
    assert sorted(by_group.values()) == [4, 4, 4]
    sums = rows.by("episode").sum(rows["signal:score"])
    assert sorted(sums.tolist()) == [0.0] * 6 + [1.0] * 6
    assert bool((rows["signal:score"][~rows.by("episode").is_last()] == 0).all())
    texts = rows.context.ragged("tokens")
    second = rows["context"][rows["turn"] == 1][0]
    first = next(
        one for one in told if list(one.turns[1].prompt + one.turns[1].said) == texts[int(second)].tolist()
    )
    mine = (rows["turn"] == 1) & (rows["context"] == second)
    assert rows["action"][mine].tolist() == list(first.turns[1].said)
    assert rows["position"][mine].tolist()[0] == len(first.turns[1].prompt)
    assert rows["logp"][mine].tolist() == pytest.approx(first.turns[1].logp)


def test_ratio_is_one_for_the_very_weights_and_not_for_others(
    record: Path, model: Path, tmp_path: Path
) -> None:
    run = pp.train(
        "grpo", data=str(record), model=str(model), steps=2, threads=1, run=tmp_path / "run", progress=pp.Progress(),
        settings={**FEW, "sample.prompts": 3, "update.lr": 1e-2, "world.held_out_share": 0.0},
    ).run  # fmt: skip
    first, second = tiny.metrics(run)
    assert first["episodes"] == 12
    assert first["step0_ratio_max"] == pytest.approx(1, abs=1e-4)
    assert first["gradient_norm"] > 0
    assert second["step0_ratio_max"] > 1.01, "the record does not move with the policy"


def test_a_temperature_is_scored_at(record: Path, model: Path, tmp_path: Path) -> None:
    warm = changed(record, tmp_path, temperature=0.5)
    rows = recorded(prompts=8)(Collector(world(warm, model), TextPolicy.load(model), 0))
    assert rows["temperature"].unique().tolist() == [0.5]
    policy = TextPolicy.load(model)
    with torch.no_grad():
        apart = (policy.score(rows)["logp"] - policy.score(rows.without("temperature"))["logp"]).abs().max()
    assert float(apart) > 0.1


def test_settings_of_the_user_hold_and_the_clip_acts(record: Path, model: Path) -> None:
    made = pp.plan("grpo", data=str(record), model=str(model), settings={"sample.prompts": 5})
    assert (made.method.sample.info.name, made.method.sample.prompts) == ("recorded", 5)
    assert made.method.acts_alone is False
    assert made.method.reward.name == "score"
    with pytest.raises(PanoplyError, match="group"):
        pp.plan("grpo", data=str(record), model=str(model), settings={"sample.group": 5})


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("reinforce", "log_likelihood takes no account of that"),
        ("online-dpo", "preference takes no account of that"),
        ("hapo", "entropies of when answers were drawn, which a record has not"),
    ],
)
def test_what_would_not_be_sound_is_refused(record: Path, model: Path, method: str, why: str) -> None:
    with pytest.raises(PanoplyError, match=why):
        pp.plan(method, data=str(record), model=str(model))


def test_a_ratio_against_another_self_is_refused(record: Path, model: Path) -> None:
    with pytest.raises(PanoplyError, match="a ratio against old .* takes no account of who acted"):
        pp.plan("grpo", data=str(record), model=str(model), settings={"surrogate.against": "old"})


def test_imitation_and_pairs(record: Path, model: Path) -> None:
    """What earned 1 is imitated turn by turn; of a question the best is preferred to the worst."""
    of = world(record, model)
    collect = Collector(of, TextPolicy.load(model), 0)
    good = {one.said for one in of.record.episodes if one.reward == 1}
    rows = collect.demonstrations(collect.tasks(6))
    episodes = rows.by("episode")
    said = {tuple(rows["action"][rows["episode"] == key].tolist()) for key in episodes.keys}
    assert said <= good
    assert rows["turn"].unique().tolist() == [0, 1]
    paired = collect.teacher_pairs(collect.tasks(3))
    assert paired.pairs is not None
    chosen = {
        tuple(paired["action"][paired["episode"] == key].tolist()) for key in paired.pairs.tensor("chosen")
    }
    rejected = {
        tuple(paired["action"][paired["episode"] == key].tolist()) for key in paired.pairs.tensor("rejected")
    }
    assert chosen <= good
    assert not rejected & good
    for method in ("sft", "dpo"):
        assert pp.plan(method, data=str(record), model=str(model)).world_id == "recorded@1"


def test_an_episode_is_gone_through_again(record: Path, model: Path) -> None:
    of = world(record, model)
    best = next(one for one in of.record.episodes if one.reward == 1)
    task = next(of.task("train", i) for i in range(3) if of.task("train", i).prompt == best.turns[0].prompt)
    play = of.play(task)
    first, last = play.act(best.turns[0].said), play.act(best.turns[1].said)
    assert (first.done, first.observation) == (False, best.turns[1].prompt)
    assert (last.done, last.signals) == (True, {"success": 1.0, "score": 1.0})
    other = of.play(task).act([*best.turns[0].said, 1])
    assert (other.done, other.truncated, other.signals["success"]) == (True, True, 0.0)
    assert of.grade(task, best.said) == {"success": 1.0, "score": 1.0}
    assert of.gold(task) == list(best.said)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"logprobs": [-1.0]}, r"Line 1 of .* has \d+ tokens and 1 log-probabilities"),
        ({"logprobs": None}, "is no turn of panoply serve --record: it has no 'logprobs'"),
        ({"token_ids": [10**6], "logprobs": [-1.0]}, "tokens that are none of the model's"),
        ({"token_ids": [-1], "logprobs": [-1.0]}, "recorded with another model"),
        ({"prompt_token_ids": []}, "has no tokens"),
        ({"token_ids": [5], "logprobs": [0.5]}, "log-probability 0.5, and none is above 0"),
        ({"logprobs": "none"}, "logprobs"),
        ({"prompt_token_ids": [5]}, "no episode to learn from .*12 with several answers to one question"),
    ],
)
def test_bad_files_are_a_sentence(record: Path, model: Path, tmp_path: Path, fields: Any, why: str) -> None:
    bad = changed(record, tmp_path, **fields)
    with pytest.raises(PanoplyError, match=why):
        world(bad, model).check(frozenset())


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"temperature": 0.0}, "was answered greedily"),
        ({"temperature": -1.0}, "temperature must be at least 0, not -1"),
        ({"top_p": 0.0}, "top_p must be above 0 to 1, not 0"),
        ({"top_p": 0.9}, "drawn with top_p 0.9, and what that cut off is not in the record"),
        ({"prompt_token_ids": None}, "has no 'prompt_token_ids'"),
    ],
)
def test_what_was_not_drawn_from_the_policy_is_not_learned_from(
    record: Path, model: Path, tmp_path: Path, fields: Any, why: str
) -> None:
    bad = changed(record, tmp_path, **fields)
    with pytest.raises(PanoplyError, match=why):
        recorded(prompts=8)(Collector(world(bad, model), TextPolicy.load(model), 0))


def test_rewards_that_are_missing_or_all_alike(record: Path, model: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    turns = [line for line in lines if "turn" in line]
    some, none, alike = (tmp_path / f"{name}.jsonl" for name in ("some", "none", "alike"))
    write = lambda file, of: file.write_text("".join(json.dumps(line) + "\n" for line in of))  # noqa: E731
    write(
        some,
        [
            *turns,
            {"episode": turns[0]["episode"], "reward": 3.0},
            {"episode": turns[0]["episode"], "reward": 1},
        ],
    )
    assert world(some, model).about() == "1 recorded episodes of 2 turns; left out: 11 without a reward"
    assert world(some, model).record.episodes[0].reward == 1.0, "the last word counts"
    write(none, turns)
    with pytest.raises(
        PanoplyError, match="no episode to learn from .*12 without a reward. What one was worth is told"
    ):
        world(none, model).check(frozenset())
    write(alike, [*turns, *({"episode": line["episode"], "reward": 0.5} for line in turns)])
    with pytest.raises(PanoplyError, match="there are no pairs"):
        pp.plan("dpo", data=str(alike), model=str(model))
    with pytest.raises(PanoplyError, match=r"earned 1 \(world.threshold\): there is none to imitate"):
        pp.plan("sft", data=str(alike), model=str(model))


def test_which_files_are_records(record: Path, model: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"prompt": "a", "completion": "b"}\n')
    assert is_record(str(record))
    assert not is_record(str(plain))
    assert not is_record(str(tmp_path / "missing.jsonl"))
    with pytest.raises(PanoplyError, match="is a record of episodes, with their world and their rewards"):
        pp.plan("grpo", "chain", data=str(record), model=str(model))
    with pytest.raises(PanoplyError, match="name its folder with --model"):
        pp.plan("grpo", data=str(record))
    with pytest.raises(PanoplyError, match="There is no file"):
        Recorded(data=str(tmp_path / "missing.jsonl"), model=str(model)).check(frozenset())
    torn = tmp_path / "torn.jsonl"
    torn.write_text(record.read_text() + '{"episode": "half')
    assert len(read(str(torn)).episodes) == 12, "a line that is being written is not there yet"
