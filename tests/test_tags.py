"""The questions of surveys: every method and recipe answers them, from what its parts ask for or in its own words."""

from __future__ import annotations

import json

import pytest

import panoply as pp
from panoply import index, registry, tags
from panoply.cli import main
from panoply.errors import PanoplyError
from panoply.methods.base.grpo import grpo
from panoply.methods.base.iql import iql
from panoply.regimes import Method
from panoply.slots.reward.signals import signal


def answers(name: str) -> dict[str, set[str]]:
    """What follows from a work and what it says itself, by question."""
    entry = registry.find_any(name)
    assert entry is not None
    found: dict[str, set[str]] = {}
    for tag in entry.listed().tags:
        key, _, answer = tag.partition("=")
        found.setdefault(key, set()).update({answer} - {""})
    return found


@pytest.mark.parametrize("kind", ["method", "recipe"])
def test_every_method_and_recipe_answers_every_question(kind: str) -> None:
    """Also those that the index has not: what is said then is what to do."""
    lacking = [tags.unanswered(w.id, w.tags) for w in registry.works() if w.kind == kind]
    assert [sentence for sentence in lacking if sentence] == []


@pytest.mark.usefixtures("registries")
def test_a_method_that_answers_nothing_is_told_what_to_do() -> None:
    @pp.method("toy@1")
    def toy() -> Method:
        """GRPO on a number of which nobody knows where it comes from."""
        return grpo().but(reward=signal(name="weather"))

    line = registry.find("method", "toy").listed()
    sentence = (
        "'toy@1' does not say what it learns from, and it does not follow from its parts: add one of data=demos, "
        "data=prefs, data=scores, data=rules to tags=(…) of its decorator (panoply list --tags says what they mean)."
    )
    assert tags.unanswered("toy@1", line.tags) == sentence

    toy.__module__ = "panoply.methods.toys"
    pp.method("toy@2")(toy)
    with pytest.raises(PanoplyError, match=r"'toy@2' does not say what it learns from"):
        index.made()

    said = ("data=scores", "feedback=annotators", "reward=learned", "on_policy=near")
    pp.method("toy@3", tags=said)(toy)
    line = registry.find("method", "toy@3").listed()
    assert tags.unanswered("toy@3", line.tags) is None
    assert {"feedback=online", *said} < set(line.tags)
    assert "on_policy=yes" not in line.tags, "of a question that it answers itself nothing else holds"


@pytest.mark.usefixtures("registries")
def test_an_answer_that_a_question_has_not_is_refused() -> None:
    with pytest.raises(
        PanoplyError, match=r"'toy@1' has the tag feedback=oflline; feedback is one of online, offl"
    ):
        pp.method("toy@1", tags=("feedback=oflline",))(grpo)


@pytest.mark.parametrize(
    ("name", "data", "dynamics", "feedback", "on_policy", "reward", "optimisation"),
    [
        ("sft", "demos", "unknown", "offline teacher", "no", "none", "imitation"),
        ("bc", "demos", "unknown", "offline teacher", "no", "none", "imitation"),
        ("dpo", "prefs", "unknown", "offline annotators", "no", "implicit", "direct"),
        ("kto", "prefs", "unknown", "offline annotators", "no", "implicit", "direct"),
        ("reward-model", "prefs", "unknown", "offline annotators", "no", "learned", "judge"),
        ("grpo", "rules", "unknown", "online program", "yes", "rule", "critic-free"),
        ("gspo", "rules", "unknown", "online program", "near", "rule", "critic-free"),
        ("ppo", "rules", "unknown", "online program", "near", "rule", "critic"),
        ("a2c", "scores", "unknown", "online environment", "yes", "environment", "critic"),
        ("impala", "scores", "unknown", "online environment", "near", "environment", "critic"),
        ("r2vpo-replay", "rules", "unknown", "online program", "no", "rule", "critic-free"),
        ("dqn", "scores", "unknown", "online environment", "no", "environment", "value"),
        ("sac", "scores", "unknown", "online environment", "no", "environment", "critic"),
        ("iql", "scores", "unknown", "offline environment", "no", "environment", "critic"),
        ("famo2o", "scores", "unknown", "offline online environment", "no", "environment", "critic"),
        ("recoil", "demos", "unknown", "offline teacher", "no", "none", "critic"),
        ("hdpo", "scores", "known", "online environment", "yes", "environment", "differentiated"),
        ("spo-tree", "rules", "known", "online program", "near", "rule", "critic-free"),
        ("sqirl", "scores", "unknown", "online environment", "no", "environment", "value"),
        ("capo", "rules scores", "unknown", "online program judge", "yes",
         "rule judge process several", "critic-free"),
        ("preference-ppo", "prefs", "unknown", "online annotators", "near", "learned", "critic"),
        ("spo-minimax", "prefs", "unknown", "online annotators", "near", "pairwise", "critic"),
        ("dr-po", "demos rules", "known", "online program teacher", "near", "rule", "critic"),
        ("online-dpo", "rules", "unknown", "online program", "yes", "rule", "direct"),
        ("chord", "demos rules", "unknown", "online program teacher", "yes", "rule", "critic-free"),
        ("relift", "demos rules", "unknown", "offline online program teacher", "near no", "rule",
         "critic-free imitation"),
        ("rlhf", "demos prefs scores", "unknown", "offline online teacher annotators", "near no", "learned",
         "imitation judge critic"),
        ("uncurated", "demos", "unknown", "offline teacher", "no", "none", "imitation"),
        ("metis-rise", "demos rules", "unknown", "offline online program teacher", "near no", "rule",
         "critic-free rejection hybrid"),
    ],
)  # fmt: skip
def test_what_follows(
    name: str, data: str, dynamics: str, feedback: str, on_policy: str, reward: str, optimisation: str
) -> None:
    found = answers(name)
    assert found["data"] == set(data.split())
    assert found["dynamics"] == set(dynamics.split())
    assert found["feedback"] == set(feedback.split())
    assert found["on_policy"] == set(on_policy.split())
    assert found["reward"] == set(reward.split())
    assert found["optimisation"] == set(optimisation.split())


def test_stages_that_optimise_in_two_ways_are_hybrid() -> None:
    two = pp.Recipe((pp.Stage("first", "dpo"), pp.Stage("then", "ppo", {}, {"model": "@first"})))
    assert "optimisation=hybrid" in tags.of_recipe(two)
    again = pp.Recipe((pp.Stage("first", "sft"), pp.Stage("then", "ppo", {}, {"model": "@first"})))
    assert "optimisation=hybrid" not in tags.of_recipe(again), "imitation first is what nearly all do"


def test_at_home_in_control_means_that_the_world_pays() -> None:
    assert "data=rules" in tags.of_method(grpo())
    assert "data=scores" in tags.of_method(grpo(), control=True)
    assert "data=scores" in tags.of_method(iql())


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_tags_are_explained_counted_and_filter(capsys: pytest.CaptureFixture[str]) -> None:
    page = said(capsys, "list", "--tags")
    order = ["what it learns from (rl-era-of-llms)", "data=demos", "who gives it (rl4llm-survey)", "\nothers"]
    assert sorted(order, key=page.index) == order
    assert "answers or actions of somebody who can do it" in page
    counted = json.loads(said(capsys, "list", "methods", "--tags", "--json"))
    offline = {
        of["id"] for of in json.loads(said(capsys, "list", "methods", "--tag", "feedback=offline", "--json"))
    }
    assert {"dpo@1", "iql@1", "sft@1"} < offline
    assert not {"grpo@1", "sac@1", "sqirl@1"} & offline
    assert counted["feedback=offline"]["works"] == len(offline)
    assert all(counted[tag]["means"] for tag in counted), "every tag of a built-in method has a meaning"
