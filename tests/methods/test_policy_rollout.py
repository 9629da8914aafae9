"""PolicyRollout: answers with the rules in sight, learned as if there had been none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tiny import bare, metrics, resume

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import OWN, REPLAY, Experience
from panoply.methods.reasoning_data.policy_rollout import documents, half_guided, policy_rollout, worked
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.slots.credit.groups import group
from panoply.worlds.text.rules import Rules

SETTINGS = {"sample.prompts": 2, "sample.group": 4, "run.held_out": 8}


@pytest.fixture(scope="module")
def world() -> Rules:
    return Rules()


def collector(world: Rules) -> Collector:
    return Collector(world, open_policy("start", world, 0, "cpu"), 5)


def prompts_of(world: Rules, found: Experience) -> list[str]:
    tokens, shared = found.context.ragged("tokens").tolist(), found.context.tensor("shared").tolist()
    return [world.text(row[:n]) for row, n in zip(tokens, shared, strict=True)]


def test_the_rules_are_taken_away_and_old_is_scored_without_them(world: Rules) -> None:
    collect = collector(world)
    found = half_guided(prompts=3, group=4)(collect)
    assert all(not prompt.startswith("[") for prompt in prompts_of(world, found))
    guided = found["source"] == REPLAY
    episodes = found.by("episode")
    assert episodes.first(found["source"]).tolist() == [OWN] * 6 + [REPLAY] * 6
    assert found.by("group").keys.tolist() == [0, 1, 2]
    tasks = {task.id: task for task in collect.numbered(range(3))}
    for row, prompt in zip(found["context"].tolist(), found["task"].tolist(), strict=True):
        assert found.context.ragged("tokens")[row].tolist()[:13] == list(tasks[prompt].prompt)
    scored = collect.policy.score(found)["logp"].detach()
    assert found["logp"] == pytest.approx(scored, abs=1e-4)  # type: ignore[comparison-overlap]
    assert bool(torch.isfinite(found["entropy"]).all())
    actions = found.context.ragged("tokens").values[
        found.context.ragged("tokens").offsets[found["context"]] + found["position"]
    ]
    assert torch.equal(actions, found["action"]), "answers moved with their prompts"
    assert collect.notes["guided_logp"] == pytest.approx(float(found["logp"][guided].mean()))


def test_what_was_sampled_with_the_rules_follows_them(world: Rules) -> None:
    """Gate of the claim: the start reads rules that it does not know."""
    collect = collector(world)
    found = half_guided(prompts=32, group=4)(collect)
    episodes = found.by("episode")
    right, guided = episodes.sum(found["signal:success"]), episodes.first(found["source"]) == REPLAY
    assert float(right[guided].mean()) == pytest.approx(collect.notes["guided_success"])
    assert float(right[guided].mean()) > 0.6
    assert float(right[~guided].mean()) < 0.45
    assert collect.notes["guided_gap"] > 0.5, "without rules these answers are surprising"


def test_one_advantage_over_both_halves(world: Rules) -> None:
    """By hand: the halves earn 0, 0 and 1, 1. Each alone would have no advantage."""
    found = half_guided(prompts=1, group=4)(collector(world))
    episodes = found.by("episode")
    earned = torch.where(episodes.first(found["source"]) == REPLAY, 1.0, 0.0)
    reward = torch.where(episodes.is_last(), episodes.rows(earned), 0.0)
    advantage = episodes.first(group(epsilon=0.0)(found.with_columns(reward=reward)))
    assert advantage.abs().tolist() == pytest.approx([advantage.abs()[0].item()] * 4)
    assert advantage.sign().tolist() == [-1, -1, 1, 1]


def test_shares_and_rules_that_stay(world: Rules) -> None:
    collect = collector(world)
    kept = half_guided(prompts=2, group=3, guided=1.0, keep=True)(collect)
    assert all(prompt.startswith("[") for prompt in prompts_of(world, kept))
    assert set(kept["source"].tolist()) == {OWN}
    alone = half_guided(prompts=2, group=4, guided=1.0)(collect)
    assert set(alone["source"].tolist()) == {REPLAY}
    assert alone.by("group").keys.tolist() == [2, 3]
    mostly = half_guided(prompts=2, group=4, guided=0.25)(collect)
    sources = mostly.by("episode").first(mostly["source"]).tolist()
    assert sources == [OWN] * 6 + [REPLAY] * 2


def test_none_guided_is_grpo(world: Rules) -> None:
    from panoply.slots.sample.groups import groups

    mine, plain = half_guided(prompts=2, group=4, guided=0.0), groups(prompts=2, group=4)
    one, other = mine(collector(world)), plain(collector(world))
    assert set(one.decisions) == set(other.decisions)
    assert torch.equal(one["action"], other["action"])
    assert torch.equal(one["logp"], other["logp"])


def test_groups_that_are_all_alike_are_asked_again(world: Rules) -> None:
    collect = collector(world)
    found = half_guided(prompts=4, group=2, rounds=6)(collect)
    episodes, groups = found.by("episode"), found.by("group")
    right = episodes.rows(episodes.sum(found["signal:success"]))
    assert len(groups) == 4
    assert bool((groups.max(right) > -groups.max(-right)).all())
    assert collect.state["tasks"] > 4


def test_documents_learn_every_token_but_the_first_and_worked_answers_only_theirs(world: Rules) -> None:
    collect = collector(world)
    read = documents(batch=3, pool=2)(collect)
    assert read.by("episode").count.tolist() == [57 + 8] * 3
    text = world.text(read.context.ragged("tokens")[0].tolist())
    assert text.startswith("[")
    assert text.endswith("$")
    first = read.by("episode").keys[0]
    assert world.text(read["action"][read["episode"] == first].tolist()) == text[1:]
    assert not [name for name in read.decisions if name.startswith("signal:")], "they are no answers"
    think = worked(batch=4, pool=2)(collect)
    assert think.by("episode").count.tolist() == [8] * 4
    assert think.by("episode").sum(think["signal:route"]).tolist() == [1.0] * 4
    assert len(set(think["task"].tolist())) == 2


def test_resume_is_bit_for_bit(tmp_path: Path) -> None:
    settings = {**SETTINGS, "run.checkpoint_every": 1, "run.keep": 3}
    trained = bare(tmp_path / "run", "policy-rollout", world="rules", steps=2, settings=settings)
    whole = metrics(tmp_path / "run")
    assert {"guided_success", "guided_logp", "guided_gap"} <= whole[-1].keys()
    assert whole[0]["step0_gap"] < 1e-4
    shutil.rmtree(trained.run / "checkpoints/step-0000002")
    (trained.run / "result.json").unlink()
    assert resume(trained.run).fingerprint == trained.fingerprint
    assert metrics(tmp_path / "run") == whole


def test_refusals() -> None:
    with pytest.raises(PanoplyError, match="privileged"):
        pp.plan("policy-rollout", world="chain")
    with pytest.raises(PanoplyError, match="guided"):
        half_guided(guided=1.5)
    with pytest.raises(PanoplyError, match="keep"):
        pp.plan("policy-rollout", world="rules", settings={"sample.guided": 0.0, "sample.keep": True})
    assert policy_rollout().sample.guided == 0.5  # type: ignore[attr-defined]
