"""ReTool: what a tool says is no decision, the answer alone is paid, and traces are right before they are imitated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from kit import hand

import panoply as pp
from panoply.errors import PanoplyError
from panoply.methods.agents.retool import retool, retool_alone
from panoply.methods.base.ppo import ppo
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.slots.reward.shaping import verdict
from panoply.worlds.text.tools import Tools

WORLD = Tools(kind="python", easy=0.0)


def test_the_answer_alone_is_paid() -> None:
    """±1 on the last decision, whatever calls did: one that failed costs nothing, one that worked earns nothing."""
    made = hand(
        episode=[1, 1, 1, 2, 2],
        turn=[0, 0, 1, 0, 1],
        **{
            "signal:success": [0.0, 0.0, 1.0, 0.0, 0.0],
            "signal:calls": [0.0, 1.0, 0.0, 1.0, 0.0],
            "signal:invalid": [0.0, 0.0, 0.0, 1.0, 1.0],
        },
    )
    assert retool_alone().reward(made).tolist() == [0, 0, 1, 0, -1]


def test_gae_goes_from_a_token_of_the_policys_to_its_next_one() -> None:
    """A result stands between the second and the third token (positions 5 and 9), and has neither value nor reward.

    δ_t = r_t + V_{t+1} − V_t over these four rows; A_t = δ_t + 0.95·A_{t+1}, worked out by hand from the last one.
    """
    values, rewards = [0.1, 0.2, -0.3, 0.4], [0.0, 0.0, 0.0, -1.0]
    made = hand(
        episode=[1] * 4,
        turn=[0, 0, 1, 1],
        position=[4, 5, 9, 10],
        reward=rewards,
        value=values,
        end=[0, 0, 0, 1],
    )
    found = retool_alone().credit.but(normalise=False)(made)
    found = found["advantage"] if isinstance(found, dict) else found
    deltas = [0.2 - 0.1, -0.3 - 0.2, 0.4 + 0.3, -1.0 - 0.4]
    expected = [0.0] * 5
    for t in reversed(range(4)):
        expected[t] = deltas[t] + 0.95 * expected[t + 1]
    assert found.tolist() == pytest.approx(expected[:4])


def test_results_are_context_and_no_decisions() -> None:
    """Rows are exactly the tokens that turns wrote, with log-probabilities of who wrote them; prompts show results."""
    collect = Collector(WORLD, open_policy("start", WORLD, 0, "cpu"), 0)
    made = collect.episodes(collect.tasks(8), 1)
    turns = made.by("turn")
    written = turns.count.tolist()
    said = [WORLD.text(made["action"][turns.index == i].tolist()) for i in range(len(written))]
    assert all(
        text[0] not in "CA" or text[0] == "A" or text.endswith(";") or len(text) == 20 for text in said
    )
    shown = [WORLD.text(t) for t in {tuple(r.tolist()[:14]) for r in made.context.ragged("tokens")}]
    assert any(prompt[8:12] != "____" for prompt in shown), "what programs printed is in later prompts"
    assert len(written) > 8, "some called"
    assert sum(written) == len(made)
    assert torch.isfinite(made["logp"]).all()


def test_it_is_ppo_but_for_reward_and_batch() -> None:
    changed = {name for name, value in retool_alone().slots().items() if value != ppo().slots()[name]}
    assert changed == {"sample", "reward", "update"}
    assert retool_alone().reward == verdict(right=1.0, wrong=-1.0)
    assert not retool_alone().regularise, "the coefficient of KL is 0"


def test_who_has_three_tokens_can_only_answer() -> None:
    """The side of text alone: a call is over the budget and ends the episode; an answer is not."""
    text = Tools(kind="python", easy=0.0, budget=3)
    task = text.task("train", 0)
    call = text.play(task).act(text.tokens(text.tool.first_call(task.data["question"])))
    assert (call.done, call.truncated, call.signals["success"]) == (True, True, 0)
    answer = text.tool.answer(task.data["question"])
    right = text.play(task).act(text.tokens("A" + answer))
    assert (right.done, right.truncated, right.signals["success"]) == (True, False, 1)


def test_a_program_that_fails_is_answered_and_can_be_mended() -> None:
    """An error is what the interpreter says, and costs a turn; a turn that is no call at all is counted besides."""
    task = WORLD.task("train", 0)
    play, code = WORLD.play(task), WORLD.tool.chain(task.data["question"])[0]
    wrong = play.act(WORLD.tokens("C" + code.replace("((", "(")))
    assert (wrong.done, wrong.signals["calls"], wrong.signals["invalid"]) == (False, 1, 0)
    assert WORLD.text(wrong.observation)[8:13] == "__!S1"
    mended = play.act(WORLD.tokens("C" + code))
    assert int(WORLD.text(mended.observation)[8:12].strip("_")) == int(
        WORLD.tool.answer(task.data["question"])
    )
    assert play.act(WORLD.tokens("A" + WORLD.tool.answer(task.data["question"]))).signals["success"] == 1
    nothing = WORLD.play(task).act(WORLD.tokens("+"))
    assert (nothing.done, nothing.signals["invalid"]) == (False, 1)


def test_the_recipe_imitates_right_traces_and_goes_on_from_there(tmp_path: Path) -> None:
    made = retool()
    assert [stage.name for stage in made.stages] == ["traces", "cold", "try"]
    settings = {
        "world.easy": 0.0,
        "traces.prompts": 4,
        "cold.data.batch": 4,
        "cold.run.steps": 1,
        "try.run.steps": 1,
        "try.sample.prompts": 4,
        "run.held_out": 4,
    }
    tiny.bare(tmp_path, "retool", world="tools:code", settings=settings)
    rows = [json.loads(line) for path in tmp_path.rglob("data.jsonl") for line in path.open()]
    answers = [row for row in rows if "answer" in row]
    assert len(answers) == 4
    assert all("C" in WORLD.text(row["answer"]) for row in answers), "Python does the reckoning"
    last = tiny.metrics(next(path.parent for path in tmp_path.rglob("metrics.jsonl") if "try" in str(path)))
    assert -1 <= last[0]["reward"] <= 1


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PanoplyError, match="reward.right"):
        pp.plan("retool-alone", "tools", settings={"reward.right": float("nan")})
