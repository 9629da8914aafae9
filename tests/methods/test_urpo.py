"""URPO: scores of a policy that is its own referee, mapped back, scaled, and earned without a gradient."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import bare, metrics, resume

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.objectives.urpo import scaled, self_judged, urpo
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.worlds.text.referee import Referee

nan = torch.nan
GROUPS = torch.tensor([7, 7, 9, 7, 9])


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("plain", [0.2, 0.8, 0.5, 0.8, 0.5]),
        ("range", [0.0, 1.0, 0.0, 1.0, 0.0]),
        ("rank", [0.0, 0.75, 0.5, 0.75, 0.5]),  # of two that are level each has half a place
    ],
)
def test_scores_beside_the_others_of_a_group(scale: Any, expected: list[float]) -> None:
    scores = torch.tensor([0.2, 0.8, 0.5, 0.8, 0.5])
    assert scaled(scores, GROUPS, scale).tolist() == pytest.approx(expected)


def test_a_missing_score_is_the_mean_of_the_others_and_no_scores_are_all_alike() -> None:
    found = scaled(torch.tensor([0.2, nan, nan, 0.8, nan]), GROUPS, "plain")
    assert found.tolist() == pytest.approx([0.2, 0.5, 0.0, 0.8, 0.0])
    for scale in ("range", "rank"):
        alike = scaled(torch.full((5,), nan), GROUPS, scale)  # type: ignore[arg-type]
        assert len(set(alike[GROUPS == 7].tolist())) == 1


class Scripted(Collector):
    """Referees by rule: what was asked is kept, and each answer gets its number of letters; `say` may change that."""

    say: Any = None

    def generate(self, requests: Any, sampling: Any, on_stop: Any = None, **more: Any) -> Any:
        found = super().generate(requests, sampling, on_stop, **more)
        prompts = [self.world.text(r.prompt) for r in requests]  # type: ignore[attr-defined]
        if not all(prompt.startswith("R") for prompt in prompts) or more.get("entropy"):
            return found
        self.questions = prompts
        self.by = self.policy
        said = [self.world.tokens(_scores(prompt, self.say)) for prompt in prompts]  # type: ignore[attr-defined]
        return _Said(found, said)


class _Said:
    def __init__(self, found: Any, said: list[list[int]]):
        self.decisions, self._said = found.decisions, said

    def completions(self) -> list[list[int]]:
        return self._said


def _scores(prompt: str, say: Any) -> str:
    texts = prompt.partition(":")[2][:-1].split(",")
    return say(texts) if say else "".join(str(len(text)) for text in texts) + "$"


def collector(world: Referee | None = None, say: Any = None) -> Scripted:
    world = world or Referee()
    made = Scripted(world, open_policy("start", world, 0, "cpu"), 5)
    made.say = say
    return made


def answers(world: Referee, experience: Experience, where: torch.Tensor) -> list[str]:
    rows = experience.take(where)
    return [
        world.text(rows["action"][rows["episode"] == e].tolist()) for e in rows.by("episode").keys.tolist()
    ]


@pytest.mark.parametrize("passes", [1, 3])
def test_scores_go_back_to_the_answers_they_are_of(passes: int) -> None:
    """A rule that scores by length, whatever the order: every answer gets its own length."""
    collect = collector()
    world = collect.world
    found = self_judged(prompts=6, group=8, together=3, passes=passes, scale="plain")(collect)
    kinds = {t.id: world.part_of(t) for t in collect.numbered(range(6))}
    open = torch.tensor([kinds[t] == "open" for t in found["task"].tolist()])
    assert len(collect.questions) == passes * 2 * 3, "two groups of eight, by three, three and two"
    last = found.by("episode").is_last()
    assert found["signal:self"][~open].abs().sum() == 0
    assert found["signal:self"][~last].abs().sum() == 0
    said = answers(world, found, open)  # type: ignore[arg-type]
    expected = [len(world._shown(world.tokens(text))) / 9 for text in said]  # type: ignore[attr-defined]
    assert found["signal:self"][open & last].tolist() == pytest.approx(expected)
    assert len({tuple(p.split(":")[1]) for p in collect.questions}) > 1


def test_a_referee_that_prefers_the_first_place_says_nothing_on_average() -> None:
    """With orders drawn anew, eight answers in eighty passes have about the same mean."""
    collect = collector(say=lambda texts: "9" + "0" * (len(texts) - 1) + "$")
    found = self_judged(prompts=3, group=8, together=8, passes=80, scale="plain")(collect)
    scores = found["signal:self"][found["signal:self"] > 0]
    assert len(scores) == 8
    assert float(scores.max()) < 0.3
    assert float(scores.sum()) == pytest.approx(1.0, abs=1e-5)


def test_what_cannot_be_read_is_said_and_is_no_score() -> None:
    collect = collector(say=lambda texts: "9$")
    found = self_judged(prompts=3, group=4, scale="rank")(collect)
    last = found.by("episode").is_last()
    assert int(found["signal:unscored"].sum()) == 4
    values = found["signal:self"][last & (found["signal:unscored"] > 0)]
    assert values.unique().tolist() == [0.5], "all alike: no advantage"


def test_calls_of_the_referee_are_no_episodes_and_count_as_decisions() -> None:
    collect = collector()
    found = self_judged(prompts=3, group=4)(collect)
    assert collect.state["episodes"] == len(found.by("episode")) == 12
    assert collect.state["decisions"] > len(found)
    assert set(found["source"].tolist()) == {0}


def test_the_warm_up_leaves_open_questions_out() -> None:
    collect = collector()
    part = self_judged(prompts=4, group=2, together=2, warmup=2)
    found = part(collect)
    assert len(found.by("group")) == 4
    assert not hasattr(collect, "questions")
    domains = found.by("domain")
    assert len(domains) == 2
    collect.version = 2
    assert len(part(collect).by("domain")) == 3


def test_without_anything_to_check_it_is_refused() -> None:
    with pytest.raises(PanoplyError, match="not one can be checked"):
        self_judged(prompts=4, group=2, together=2)(collector(Referee(kinds=("open",))))


SMALL = {
    "sample.prompts": 3,
    "sample.group": 4,
    "sample.warmup": 0,
    "run.held_out": 3,
    "run.evaluate_every": 0,
    "run.checkpoint_every": 1,
    "run.keep": 9,
}


def test_a_run_earns_by_all_three_and_resumes(tmp_path: Path) -> None:
    trained = bare(tmp_path / "run", "urpo", world="referee", steps=2, settings=SMALL)
    row = metrics(trained.run)[0]
    assert row["reward"] == pytest.approx(row["earned"] + row["self"])
    shutil.rmtree(trained.run / "checkpoints/step-0000002")
    (trained.run / "result.json").unlink()
    assert resume(trained.run).fingerprint == trained.fingerprint


def test_a_frozen_referee_scores_by_other_weights(tmp_path: Path) -> None:
    """After a step of a large rate, what the start says of the same answers differs from what the policy says."""
    settings = {**SMALL, "update.lr": 3e-2, "update.schedule.warmup": 0, "sample.scale": "plain"}
    ends = {}
    for who in ("learner", "reference"):
        bare(tmp_path / who, "urpo", world="referee", steps=2, settings={**settings, "sample.referee": who})
        ends[who] = [row["self"] for row in metrics(tmp_path / who)]
    assert ends["learner"][0] == ends["reference"][0], "at first they are the same"
    assert ends["learner"][1] != ends["reference"][1]


@pytest.mark.parametrize(
    ("world", "settings", "why"),
    [
        ("chain", {}, "needs a world with 'referee'"),
        ("referee", {"sample.together": 9}, "a group has 8 answers"),
        ("referee", {"sample.group": 1, "sample.together": 2}, "a group has 1 answers"),
        ("referee", {"sample.together": 1}, "must be at least 2"),
        ("referee", {"sample.passes": 0}, "must be at least 1"),
        ("referee", {"sample.temperature": 0}, "would be the same"),
    ],
)
def test_what_cannot_be_is_refused(world: str, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(PanoplyError, match=why):
        pp.plan("urpo", world, settings=settings)


def test_it_is_grpo_on_another_reward() -> None:
    """One loss for players and referees: nothing of GRPO's objective is changed."""
    own, base = urpo().slots(), pp.plan("grpo", "chain").method.slots()
    assert {name for name in own if own[name] != base[name]} >= {"sample", "reward"}
    assert own["surrogate"].info.id == base["surrogate"].info.id  # type: ignore[union-attr]
