"""What is set and would change nothing is refused: by parts, by how they stand together, by world and policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import own_model
import pytest
import sweep
from toys import TOYS

import panoply as pp
from panoply.effects import inert
from panoply.errors import PanoplyError
from panoply.methods.base.dpo import dpo
from panoply.planning import make_plan
from panoply.slots.loss.pairs import logistic

ALONE = {"sample.temperature": 0, "sample.group": 1, "credit.baseline": "none", "credit.scale": "none"}


@pytest.mark.parametrize(
    ("name", "choices", "words"),
    [
        ("gspo", {"reduce": "token_mean"}, "reduce has no effect: .* averaged over episodes, not over decisions"),
        ("gspo", {"settings": {"reduce": "constant"}}, "reduce has no effect"),
        ("gspo", {"settings": {"reduce": "constant", "reduce.length": 9}}, "has no effect"),
        ("grpo", {"settings": {"surrogate.low": 2}}, "surrogate.low must be from 0 to 1, not 2"),
        ("gspo", {"settings": {"surrogate.low": 2}}, "low must be from 0 to 1, not 2"),
        ("grpo", {"settings": {"surrogate.high": -0.1}}, "high must be at least 0"),
        ("grpo", {"settings": {"sample.max_tokens": 512}}, "sample.max_tokens cannot be 512: an answer in chain@1"),
        ("gigpo", {"world": "chain", "settings": {"credit.gamma": 0.9}}, "gamma has no effect: episodes of chain"),
        ("grpo", {"settings": {"sample.top_p": 0}}, "sample.top_p must be above 0 to 1, not 0"),
        ("grpo", {"settings": {"sample.min_p": 1}}, "sample.min_p must be from 0 up to 1, not 1"),
        ("grpo", {"settings": {"sample.repetition_penalty": 0}}, "repetition_penalty must be above 0, not 0"),
        ("grpo", {"world": "cartpole", "settings": {"sample.top_p": 0.9}}, "top_p has no effect: cartpole"),
        ("grpo", {"settings": {**ALONE, "sample.top_k": 3}}, "sample.top_k has no effect: at temperature 0"),
        ("grpo", {"settings": {"sample.top_k": 50}}, "sample.top_k has no effect: chain has 14 tokens, all of which"),
        ("gigpo", {"settings": {"credit.gamma": 19}}, "gamma must be from 0 to 1"),
        ("dapo", {"settings": {"reward.weight": 0.5}}, "reward.weight has no effect: no episode of chain is longer"),
        ("cgpo-codpo", {"world": "strings", "settings": {"surrogate.loss.weight": 2}}, "own weight is what counts"),
        ("ead", {"settings": {"sample.cap": 3}}, "sample.cap has no effect: only correction=truncated"),
        ("ead", {"settings": {"sample.longest_scale": 300}}, "longest_scale has no effect: the scale does not grow"),
        ("npg", {"world": "cartpole", "settings": {"update.shrink": 0.5}}, "update.shrink has no effect"),
        ("a2pr", {"settings": {"losses.better_behaviour.update.epochs": 2}}, "batches are drawn from a replay"),
        ("a2c", {"world": "cartpole", "settings": {"policy.squash": True}}, "policy.squash has no effect: .* choices"),
        ("a2c", {"world": "cartpole", "settings": {"policy.epsilon": 0.1}}, "policy.epsilon has no effect"),
        ("sac", {"world": "pendulum", "settings": {"policy.log_std": 1.0}}, "policy.log_std has no effect"),
        ("dqn", {"world": "cartpole", "settings": {"policy.span": (0, 1)}}, "policy.span has no effect: .*atoms=1"),
    ],
)  # fmt: skip
def test_refused(name: str, choices: dict[str, Any], words: str) -> None:
    with pytest.raises(PanoplyError, match=words):
        pp.plan(name, **choices)


def test_what_does_have_an_effect_is_not_refused() -> None:
    """The same settings where they count: a term of decisions beside one of episodes, several turns, real actions."""
    pp.plan("gspo", settings={"reduce": "token_mean", "regularise.kl": 0.1})
    pp.plan("gigpo", "keydoor", settings={"credit.gamma": 0.9})
    pp.plan("dapo", settings={"reward.limit": 8, "reward.cache": 4, "reward.weight": 0.5})
    pp.plan("ppo", "pendulum", settings={"policy.squash": True, "policy.log_std": -1.0})
    pp.plan("grpo", settings={"surrogate.low": 1, "sample.max_tokens": 5, "update.epochs": 2})
    pp.plan("grpo", settings={"sample.top_p": 1, "sample.min_p": 0.9, "sample.repetition_penalty": 1.1})


def test_defaults_without_effect_are_listed_and_not_refused() -> None:
    assert dict(inert(pp.plan("gspo")))["reduce"].endswith("not over decisions")
    assert "reduce" not in dict(inert(pp.plan("grpo")))


def test_a_term_twice_only_doubles_it() -> None:
    with pytest.raises(PanoplyError, match="The slot 'losses' has logistic twice, which only doubles it"):
        dpo().but(losses=(logistic(), logistic(beta=0.2)))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lengths")
    own_model.write(folder / "model", template=None)
    (folder / "reward.py").write_text(
        "def size(completions, **_):\n    return [len(c) for c in completions]\n"
    )
    rows = [{"prompt": f"ask {n}", "completion": "word" * n} for n in range(40)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


class TestLengthOfOwnAnswers:
    def plan(self, place: Path, method: str = "grpo", **settings: Any) -> pp.Plan:
        reward = {"reward": f"{place / 'reward.py'}:size"} if method == "grpo" else {}
        data, model = str(place / "data.jsonl"), str(place / "model")
        return pp.plan(method, data=data, model=model, settings=settings, **reward)

    def test_one_setting_is_honoured(self, place: Path) -> None:
        assert self.plan(place).world().max_tokens == 256
        for asked in (512, 16):
            made = self.plan(place, **{"sample.max_tokens": asked})
            assert made.world().max_tokens == asked
        both = self.plan(place, **{"sample.max_tokens": 16, "world.longest": 32})
        assert (both.world().max_tokens, both.method.settings()["sample.max_tokens"]) == (32, 16)

    def test_two_that_disagree_are_refused(self, place: Path) -> None:
        words = "sample.max_tokens cannot be 512: .* at most 64 tokens: raise world.longest"
        with pytest.raises(PanoplyError, match=words):
            self.plan(place, **{"sample.max_tokens": 512, "world.longest": 64})

    def test_given_answers_are_refused_or_cut_and_never_cut_in_silence(self, place: Path) -> None:
        words = r"'completion' on line 17 of .* has 65 tokens, .* at most 64: raise world.longest, or set"
        with pytest.raises(PanoplyError, match=words):
            self.plan(place, "sft", **{"world.longest": 64})
        cut = self.plan(place, "sft", **{"world.longest": 64, "world.too_long": "cut"}).world()
        assert max(len(cut.gold(cut.task("train", i))) for i in range(30)) == 64


# ------------------------------------------------------------------ the sweep

EXCEPTIONS = {
    "sample.explore.random": "any action is likely while actions are still drawn hot (sample.start)",
    "loss.q_learning.double": "the two networks find the same action best for the first few updates",
    "credit.over_others.epsilon": "keeps a division by 0 finite",
    "surrogate.bpo/group_bounded_ratio.epsilon": "keeps a division by 0 finite",
    "update.natural.search": "the first step already improves within the KL",
    "surrogate.bapo/balanced_clip.first": "in so small a batch the target is met at once or never",
    "surrogate.bapo/balanced_clip.step": "in so small a batch the target is met at once or never",
    "sample.props/robust.limit": "a push of a few steps stays within it",
    "credit.adora/utility_weighted.advantageous": "right and wrong answers of one length: no group is advantageous",
    "credit.adora/utility_weighted.cut": "right and wrong answers of one length: no group is advantageous",
    "credit.adora/utility_weighted.edges": "in so few groups of four no side is missing",
    "credit.dcpo/entropy_steered.cold": "a new model's entropy is below the target in the first steps, so hot counts",
    "credit.dcpo/entropy_steered.of": "the first steps stay on one side of the target, and as far from it",
    "select.pipo/and_previous.rise": "the window of past batches is not full in a few steps",
    "select.pipo/and_previous.fall": "the window of past batches is not full in a few steps",
    "select.pipo/and_previous.floor": "the window of past batches is not full in a few steps",
    "regularise.r2vpo/ratio_variance.most": "λ is far below it for the first few updates",
    "regularise.trpa/without_pairs.weight": "only a batch without any pair feels it",
    "sample.v0/allocated.least": "a model that has seen a few answers expects the same of all prompts: equal groups",
    "sample.v0/allocated.most": "a model that has seen a few answers expects the same of all prompts: equal groups",
    "sample.v0/allocated.weigh": "a model that has seen a few answers expects the same of all prompts: equal groups",
    "sample.deepsearch/searched.rare": "in one short round hardly a prompt of four answers has just one that is right",
    "credit.aspo-tir/shaped.delta": "the first call of a look-up is its first token, in every answer",
    "credit.aspo-tir/shaped.k": "the first call of a look-up is its first token, in every answer",
    "surrogate.spear/clip_cov.share": "of so few tokens one is left out, and hardly another could be",
    "surrogate.spear/clip_cov.most": "no covariance of a small model is so high",
    "select.spear/and_wins.fresh": "so small a memory is learned from, and emptied, in the next step",
    "reward.atom-searcher/mixed.malformed": "the start hardly ever writes a turn without grammar",
    "reward.atom-searcher/mixed.otherwise": "the start hardly ever writes a turn without grammar",
    "turn.filled.episodes": "one number for all is the same as that number for each",
    "sample.self/greedy_failed.rounds": "in the first batch already some prompt is answered wrongly",
    "reward.monet-vlpo/answered.length": "the start looks before every answer, and so all have one length",
    "replay.episodes.size": "what a few small steps collect fits into any memory",
}
"""Settings that a few small steps do not feel, with the reason. All others do something, or are refused."""


def unexpected(methods: list[str]) -> list[tuple[str, str, str]]:
    found = [line for task in sweep.tasks(methods) for line in sweep.inert(task)]
    return [line for line in found if line[2].split(" = ")[0] not in EXCEPTIONS]


def test_every_setting_of_grpo_counts() -> None:
    """A part of the sweep for every day; `make test-learn` makes all of it."""
    task = (
        "grpo",
        [("surrogate.high", ""), ("update.beta1", ""), ("credit.scale", "")],
    )
    assert sweep.inert(task) == []


@pytest.mark.learn
def test_every_setting_counts_or_is_refused() -> None:
    from panoply import registry

    assert unexpected([e.name for e in registry.entries("method")]) == []


def test_a_batch_that_a_term_sees_whole_is_not_divided() -> None:
    with pytest.raises(
        PanoplyError, match="update.minibatches has no effect: loss.toy_batch sees the whole batch"
    ):
        make_plan("sft", slots={"losses": [TOYS["batch"]]}, settings={"update.minibatches": 2})
