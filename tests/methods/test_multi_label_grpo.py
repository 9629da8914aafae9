"""Multi-label GRPO: labels, a judge of several outputs, their sum, and each aspect by itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from kit import hand, shuffled

import panoply as pp
from panoply.batch import Batch
from panoply.errors import PanoplyError
from panoply.evaluation.pairs import _labels
from panoply.experience import Experience
from panoply.kinds import kind_of
from panoply.methods.objectives.multi_label_grpo import ASPECTS, each_aspect
from panoply.policies.build import open_policy
from panoply.policies.value import ValueModel, outputs_of
from panoply.slots.credit.groups import group
from panoply.slots.data.labelled import labelled
from panoply.slots.loss.values import squared_labels
from panoply.slots.reward.signals import blend
from panoply.states import as_tensors, from_tensors
from panoply.worlds.text.strings import Strings


def judged() -> Experience:
    """Two groups of two answers, and what is said of them in two respects."""
    return hand(
        **{
            "group": [0, 0, 1, 1],
            "reward": [0.0] * 4,
            "signal:model_a": [0.0, 1.0, 0.5, 0.5],
            "signal:model_b": [10.0, 4.0, 0.0, 2.0],
        }
    )


NAMES = ("model_a", "model_b")


# ------------------------------------------------------------------ labels and the judge


def test_the_loss_is_a_sum_over_labels_and_a_mean_over_answers() -> None:
    """By hand: (0.5 − 1)² + (0 − 0.25)² and (1 − 1)² + (2 − 0)², whatever the answers' lengths."""
    made = hand(**{"episode": [7, 7, 9], "label:a": [1.0, 1.0, 1.0], "label:b": [0.25, 0.25, 0.0]})
    said = {
        "judged:a": torch.tensor([0.5, 1.0], dtype=torch.float64, requires_grad=True),
        "judged:b": torch.tensor([0.0, 2.0], dtype=torch.float64, requires_grad=True),
    }
    value, stats = squared_labels(names=("a", "b"))(Batch(made, said))
    assert value.tolist() == pytest.approx([0.3125, 4.0])
    assert stats["error_b"].tolist() == pytest.approx([0.25, 2.0])
    slope = torch.autograd.grad(value.sum(), list(said.values()))
    assert [x.tolist() for x in slope] == [pytest.approx([-1.0, 0.0]), pytest.approx([-0.5, 4.0])]
    assert squared_labels(names=("b", "a")).info.unit == "episode"


def collector(noise: float, seed: int = 0, **more: Any) -> tuple[Any, Any, Strings]:
    world = Strings()
    policy = open_policy("fresh", world, 0, "cpu", "float32")
    held = labelled(names=ASPECTS, batch=8, noise=noise, **more)
    return held, kind_of(world).collector(world, policy, seed), world


def test_labels_are_the_worlds_aspects_with_noise_kept_between_0_and_1() -> None:
    held, collect, _ = collector(noise=0.0)
    _, exact = held({}, collect)
    episodes = exact.by("episode")
    for name in ASPECTS:
        assert torch.equal(
            episodes.first(exact[f"label:{name}"]), episodes.sum(exact[f"signal:{name}"]).float()
        )
    held, collect, _ = collector(noise=0.5)
    _, found = held({}, collect)
    labels = torch.stack([found[f"label:{name}"] for name in ASPECTS])
    worth = torch.stack(
        [found.by("episode").rows(found.by("episode").sum(found[f"signal:{n}"])) for n in ASPECTS]
    )
    assert float(labels.min()) >= 0
    assert float(labels.max()) <= 1
    assert 0.1 < float((labels - worth).abs().mean()) < 0.6


def test_a_set_of_labels_stays_as_it_is_and_its_sum_is_of_the_same_labels() -> None:
    """Eight answers, gone through in new orders: the noise of an answer is drawn once, and saved with a run."""

    def passes(**more: Any) -> list[dict[tuple[int, ...], Any]]:
        held, collect, _ = collector(noise=0.3, answers=8, **more)
        state: dict[str, Any] = {}
        found = []
        for _ in range(2):
            state, made = held(from_tensors(as_tensors({"data": state}))["data"] if state else {}, collect)
            names = [n for n in made.decisions if n.startswith("label:")]
            episodes = made.by("episode")
            labels = torch.stack([episodes.first(made[n]) for n in names], 1)
            tokens = made.context.ragged("tokens")
            found.append({tuple(tokens[i].tolist()): row.tolist() for i, row in enumerate(labels)})
        return found

    first, second = passes()
    assert list(first) != list(second)
    assert first == second
    total, _ = passes(summed=True)
    assert {k: v[0] for k, v in total.items()} == pytest.approx({k: sum(v) for k, v in first.items()})


def test_a_judge_says_several_things_and_is_saved_with_their_names(tmp_path: Path) -> None:
    held, collect, _ = collector(noise=0.0)
    _, made = held({}, collect)
    outputs = outputs_of(frozenset({"judged", *(f"judged:{name}" for name in ASPECTS)}))
    model = ValueModel.of(collect.policy, outputs)
    with torch.no_grad():
        model.head.weight.copy_(
            torch.randn(model.head.weight.shape, generator=torch.Generator().manual_seed(0))
        )
        said = model.judgements(made)
        assert set(said) == set(ASPECTS)
        torch.testing.assert_close(model.judge(made), sum(said.values()))
        model.save(tmp_path / "judge")
        again = ValueModel.load(tmp_path / "judge").judgements(made)
    for name in ASPECTS:
        torch.testing.assert_close(again[name], said[name])


def test_a_label_is_right_where_it_orders_two_answers_as_they_are() -> None:
    """Of three neighbours one is equal by its label and is not asked; of the rest one is ordered right."""

    class Said:
        def judgements(self, experience: Experience) -> dict[str, torch.Tensor]:
            return {"a": torch.tensor([0.0, 1.0, 3.0, 4.0])}

    found = _labels(hand(**{"label:a": [0.0, 0.5, 0.5, 0.1]}), Said())  # type: ignore[arg-type]
    assert found["a"].tolist() == [True, False]


# ------------------------------------------------------------------ what is made of it


def test_the_sums_advantage_divides_into_aspects() -> None:
    """A = Σ_k w_k·(f_k − mean_g f_k)/(std_g R + ε), the card's decomposition, and another weight moves it."""
    made = judged()
    for weights in ((1.0, 1.0), (3.0, 0.1)):
        paid = made.with_columns(reward=blend(names=NAMES, weights=weights)(made))
        a = group(baseline="mean", scale="std")(paid)
        peers = made.by("group")
        spread = peers.rows(peers.std(paid["reward"])) + 1e-4
        shares = sum(
            w * (made[f"signal:{n}"] - peers.rows(peers.mean(made[f"signal:{n}"]))) / spread
            for n, w in zip(NAMES, weights, strict=True)
        )
        assert a.tolist() == pytest.approx(shares.tolist(), rel=1e-4, abs=1e-5)


def test_each_aspect_counts_alike_where_the_sum_hears_the_loudest() -> None:
    """In the first group b is six apart and a only one: the sum follows b, standardised they cancel."""
    made = judged()
    paid = made.with_columns(reward=blend(names=NAMES)(made))
    assert group()(paid)[0] > 0.7
    half = 1 / math.sqrt(2)
    assert each_aspect(names=NAMES)(made).tolist() == pytest.approx([0, 0, -half, half], abs=1e-3)
    found = each_aspect(names=NAMES, weights=(1.0, 0.5))(made).tolist()
    assert found == pytest.approx([-half / 2, half / 2, -half / 2, half / 2], abs=1e-3)
    mixed = shuffled(made.with_columns(a=each_aspect(names=NAMES)(made)))
    assert each_aspect(names=NAMES)(mixed).tolist() == pytest.approx(mixed["a"].tolist())


SMALL: dict[str, Any] = {
    "run.held_out": 8,
    "imitate.data.batch": 4,
    "judge.data.batch": 4,
    "judge.data.answers": 8,
    "judge.data.noise": 0.1,
    "optimise.sample.prompts": 2,
    **{f"{stage}.run.steps": n for stage, n in (("imitate", 1), ("judge", 3), ("optimise", 2))},
}


@pytest.mark.parametrize("name", ["multi-label-grpo", "single-label-grpo"])
def test_the_recipe_runs_and_logs_what_is_said_and_what_is_so(name: str, tmp_path: Path) -> None:
    tiny.bare(tmp_path / "run", name, model="fresh", settings=SMALL)
    judge, last = tiny.metrics(tmp_path / "run/02-judge"), tiny.metrics(tmp_path / "run/03-optimise")[-1]
    after = tiny.result(tmp_path / "run/02-judge")["after"]
    if name == "multi-label-grpo":
        assert {f"error_{aspect}" for aspect in ASPECTS} <= judge[0].keys()
        assert {f"accuracy_{aspect}" for aspect in ASPECTS} < after.keys()
        said = sum(last[f"model_{aspect}"] for aspect in ASPECTS)
        assert last["reward"] == pytest.approx(said, abs=1e-5)
        assert all(0 <= last[f"model_{aspect}"] <= 1 for aspect in ASPECTS)
    else:
        assert judge[0].keys() & {"error_total", "error_length"} == {"error_total"}
        assert last["reward"] == pytest.approx(last["model"], abs=1e-6)
    assert {*ASPECTS, "least", "kl_reference"} <= last.keys()


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("label-model", {"losses.squared_labels.names": ("politeness",)}, "the data's labels are length"),
        ("label-model", {"data.summed": True}, "the data's labels are total"),
        ("label-model", {"data.names": ()}, "at least one respect"),
        ("label-model", {"data.names": ("politeness",)}, "politeness"),
        ("label-model", {"data.whose": "start"}, "data.answers"),
        ("label-model", {"data.noise": -1.0}, "noise"),
        ("grpo", {"models.reward_model.within": (1.0, 0.0)}, "in this order"),
        ("grpo", {"reward": "blend", "reward.names": ("model_length",)}, "model_length"),
        (
            "grpo",
            {"credit": "each_aspect", "credit.names": ("length",), "credit.weights": (1.0, 2.0)},
            "one weight",
        ),
    ],
)
def test_settings_that_cannot_be(name: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(PanoplyError, match=said):
        pp.plan(name, "strings", settings=settings)


def test_a_judge_with_other_outputs_is_refused(tmp_path: Path) -> None:
    _, collect, _ = collector(noise=0.0)
    ValueModel.of(collect.policy, ("a", "b")).save(tmp_path / "judge")
    settings: dict[str, Any]
    for settings, said in (
        ({"reward.name": "model"}, "name those to be used"),
        ({"models.reward_model.outputs": ("c",), "reward.name": "model_c"}, "Unknown output"),
    ):
        settings = {"models.reward_model.folder": str(tmp_path / "judge"), **settings}
        with pytest.raises(PanoplyError, match=said):
            tiny.bare(tmp_path / "run", "grpo", world="strings", model="fresh", steps=1, settings=settings)
    loud = ValueModel.load(tmp_path / "judge")
    with torch.no_grad():
        loud.head.weight.fill_(100.0)
    loud.save(tmp_path / "loud")
    settings = {
        "models.reward_model.folder": str(tmp_path / "loud"),
        "models.reward_model.outputs": ("a",),
        "models.reward_model.within": (0.25, 0.5),
        "reward.name": "model_a",
        "sample.prompts": 1,
        "run.held_out": 4,
    }
    tiny.bare(tmp_path / "bounded", "grpo", world="strings", model="fresh", steps=1, settings=settings)
    assert 0.25 <= tiny.metrics(tmp_path / "bounded")[0]["model_a"] <= 0.5
    settings = {"models.critic.start": str(tmp_path / "judge")}
    with pytest.raises(PanoplyError, match="A critic gives one number"):
        tiny.bare(tmp_path / "run", "ppo", world="strings", model="fresh", steps=1, settings=settings)
