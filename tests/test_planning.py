"""Plans: what determines a run, and what is refused before any compute is spent."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from kit import world_for
from test_compose import METHODS, sentence

import panoply as pp
from panoply.costs import Activations, Cost, activations, cost
from panoply.effects import inert
from panoply.errors import PanoplyError
from panoply.parts import part
from panoply.planning import Options, Plan, make_plan
from panoply.policies.build import model_shapes
from panoply.registry import entries, find, method
from panoply.report.text import planned
from panoply.worlds.text.chain import Chain


@pytest.mark.parametrize("name", METHODS)
def test_round_trip(name: str) -> None:
    plan = pp.plan(name, world_for(name), settings={"run.held_out": "7"}, seed=4, model="fresh")
    for data in (json.loads(json.dumps(plan.to_json())), yaml.safe_load(plan.to_yaml())):
        again = Plan.from_json(data)
        assert again == plan
        assert again.hash() == plan.hash()


def test_round_trip_of_lists() -> None:
    settings = {"world.levels": "1,2", "world.operations": "3", "run.sinks": "tensorboard"}
    plan = make_plan("grpo", settings=settings)
    assert plan.world_options == {"levels": (1, 2), "operations": 3}
    assert plan.options.sinks == ("tensorboard",)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert Plan.from_json(yaml.safe_load(plan.to_yaml())) == plan
    assert (
        make_plan("grpo", settings={"world.slip": 1}).hash()
        == make_plan("grpo", settings={"world.slip": "1.0"}).hash()
    )


def test_hash() -> None:
    plan = make_plan("grpo")
    assert plan.hash() == make_plan("grpo").hash()
    assert plan.hash() == make_plan("grpo", settings={"update.lr": 3e-4}).hash(), (
        "who chose a value does not matter"
    )
    others = [
        make_plan("grpo", seed=1),
        make_plan("grpo", settings={"update.lr": 1e-4}),
        make_plan("reinforce"),
    ]
    others += [make_plan("grpo", settings={"world.operations": 3}), make_plan("grpo", steps=7)]
    assert len({plan.hash(), *(p.hash() for p in others)}) == 6


def test_settings_go_where_they_belong() -> None:
    plan = make_plan(
        "grpo", settings={"world.operations": "3", "run.steps": "9", "credit.scale": "none"}, seed=5
    )
    assert plan.world().operations == 3  # type: ignore[attr-defined]
    assert (plan.options.steps, plan.options.seed) == (9, 5)
    assert plan.method.settings()["credit.scale"] == "none"
    assert plan.chosen == {"run.steps", "run.seed", "credit.scale"}


def test_presets() -> None:
    tiny, published = make_plan("grpo"), make_plan("grpo", preset="published")
    preset = find("method", "grpo").presets["tiny"]
    assert tiny.method.settings()["update.lr"] == preset["update.lr"] == 3e-4
    assert tiny.options.steps == preset["run.steps"]
    assert published.method.settings()["update.lr"] == 1e-6
    assert published.options.steps == Options().steps
    assert make_plan("grpo", preset="tiny").hash() == tiny.hash()
    assert make_plan("grpo", settings={"update.lr": 1.0}).method.settings()["update.lr"] == 1.0
    assert (
        sentence(make_plan, "grpo", preset="tinny") == "Unknown preset of grpo 'tinny'. Did you mean 'tiny'?"
    )


def test_a_preset_asked_for_must_exist(registries: None) -> None:
    method("toy-plain@1")(find("method", "grpo").build)
    assert make_plan("toy-plain").method.settings()["update.lr"] == 1e-6, "the world's preset is only a wish"
    assert (
        sentence(make_plan, "toy-plain", preset="tiny")
        == "Unknown preset of toy-plain 'tiny'. There is: published."
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"world.operation": 3}, "Unknown setting of world chain 'operation'. Did you mean 'operations'?"),
        ({"world.operations": "many"}, "world.operations takes a whole number, not 'many'."),
        ({"run.step": 3}, "Unknown run setting 'step'. Did you mean 'steps'?"),
        ({"run.steps": "few"}, "run.steps takes a whole number, not 'few'."),
        ({"run.steps": 0}, "run.steps must be at least 1, not 0."),
        ({"run.minutes": 0.0}, "run.minutes must be above 0, not 0."),
        ({"run.dtype": "float8"}, "run.dtype takes float32, bfloat16 or float16, not 'float8'."),
    ],
)
def test_wrong_settings_are_one_sentence(settings: dict[str, Any], expected: str) -> None:
    assert sentence(make_plan, "grpo", settings=settings) == expected


def test_unknown_names() -> None:
    assert sentence(make_plan, "reinforse") == "Unknown method 'reinforse'. Did you mean 'reinforce'?"
    assert sentence(make_plan, "grpo", "chan") == "Unknown world 'chan'. Did you mean 'chain'?"
    assert sentence(make_plan, "grpo", slots={"kredit": "grpo"}).endswith("Did you mean 'credit'?")


# ------------------------------------------------------------------ inert and impossible


def test_inert_defaults_are_noted_only() -> None:
    noted = dict(inert(make_plan("grpo")))
    assert "surrogate.high" in noted
    assert "one mini-batch" in noted["surrogate.high"]


@pytest.mark.parametrize("setting", ["surrogate.high", "surrogate.low", "surrogate.kind"])
def test_inert_choices_are_refused(setting: str) -> None:
    value = "mask" if setting.endswith("kind") else "0.3"
    found = sentence(make_plan, "grpo", settings={setting: value})
    assert found.startswith(
        f"{setting} has no effect: with one epoch and one mini-batch the ratio stays at 1"
    )
    make_plan("grpo", settings={setting: value, "update.epochs": 2})
    make_plan("grpo", settings={setting: value, "update.minibatches": 2})
    make_plan("grpo", settings={setting: value, "surrogate.against": "reference"})
    assert "no effect" in sentence(make_plan, "grpo", settings={setting: value, "surrogate.against": "old"})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"regularise.kl": 0.0, "regularise.kl.estimator": "k1"}, "regularise.kl.estimator has no effect"),
        (
            {"surrogate.dual": 2.0, "surrogate.kind": "truncate", "update.epochs": 2},
            "surrogate.dual has no effect",
        ),
        ({"surrogate.dual": 0.5, "update.epochs": 2}, "surrogate.dual must be above 1, not 0.5"),
        ({"sample.group": 1}, "credit.baseline cannot be mean: a group of one episode"),
        ({"sample.group": 1, "credit.baseline": "leave_one_out"}, "credit.baseline cannot be leave_one_out"),
        ({"sample.group": 1, "credit.baseline": "none"}, "credit.scale cannot be std"),
        (
            {"regularise.kl": 0.1, "regularise.kl.to": "refrence"},
            "Unknown snapshot 'refrence'. Did you mean 'reference'?",
        ),
        ({"run.reference": "somewhere"}, "--reference has no effect"),
        (
            {"regularise.kl": 0.1, "run.reference": "none"},
            "regularise.kl compares the policy with a reference model",
        ),
    ],
)
def test_refused(settings: dict[str, Any], expected: str) -> None:
    assert sentence(make_plan, "grpo", settings=settings).startswith(expected)


def test_allowed() -> None:
    make_plan("grpo", settings={"sample.group": 1, "credit.baseline": "none", "credit.scale": "none"})
    make_plan(
        "grpo", settings={"regularise.kl": 0.1, "regularise.kl.to": "behaviour", "update.minibatches": 2}
    )
    make_plan("grpo", reference="none")
    make_plan("grpo", settings={"regularise.kl": 0.1})


def test_a_preference_loss_needs_its_reference() -> None:
    assert sentence(make_plan, "dpo", reference="none").startswith(
        "losses.logistic compares the policy with a reference"
    )


def test_a_world_must_give_what_a_part_needs(registries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chain, "access", frozenset({"verify"}))
    assert (
        sentence(make_plan, "sft")
        == "data (demonstrations) needs a world with 'teacher', and chain@1 has none."
    )
    make_plan("grpo")


def test_borrowed_credit_keeps_its_state_path() -> None:
    plan = pp.plan("grpo", credit="reinforce")
    stateful = [path for path, held in plan.method.parts() if held.info.state is not None]
    assert stateful == ["credit"]


# ------------------------------------------------------------------ cost


SMALL = {"sample.prompts": 4, "sample.group": 3, "world.operations": 2}
"""A prompt has 6 tokens, an answer at most 7."""


def costs(name: str, *, settings: dict[str, Any] | None = None, **choices: Any) -> Cost:
    return cost(make_plan(name, settings=SMALL | (settings or {}), model="fresh", **choices))


def test_activations() -> None:
    """A block of the tiny model puts out 5 · 64 (attention), 2 · 192 + 64 (MLP) and 2 · 64 (norms); there are two."""
    kept = costs("grpo").activations
    assert kept == Activations(
        tokens=108, bytes=108 * 2 * 896 * 4, longest=13 * 2 * 896 * 4, recomputed=False
    )
    assert costs("grpo", settings={"run.micro_tokens": 50}).activations.tokens == 50
    assert costs("grpo", dtype="bfloat16").activations.bytes == kept.bytes // 2
    always = costs("grpo", settings={"run.recompute": "always"}).activations
    assert always == Activations(108, 108 * 2 * 64 * 4, 13 * 2 * 64 * 4, True)

    plan = make_plan("grpo", settings=SMALL, model="fresh")
    shapes = model_shapes("fresh", plan.world())
    assert not activations(plan, shapes, 108, held=1000, total=1000 + kept.longest).recomputed
    assert activations(plan, shapes, 108, held=1000, total=999 + kept.longest).recomputed
    never = make_plan("grpo", settings={**SMALL, "run.recompute": "never"}, model="fresh")
    assert not activations(never, shapes, 108, held=1000, total=1).recomputed


def test_cost() -> None:
    plain = costs("grpo", steps=10)
    size = plain.parameters
    assert (plain.sampled_tokens, plain.trained_tokens) == (4 * 3 * 7, 4 * 6 + 4 * 3 * 7)
    assert plain.memory_bytes == {"weights": 4 * size, "gradients": 4 * size, "optimiser": 8 * size}
    assert plain.extra_forwards == []
    assert plain.operations == 2 * size * 84 + 6 * size * 108
    pulled = costs("grpo", settings={"regularise.kl": 0.1})
    assert pulled.extra_forwards == ["one forward pass for logp@reference"]
    assert pulled.memory_bytes["reference copy"] == 4 * size
    assert pulled.operations == plain.operations + 2 * size * 108


@pytest.mark.parametrize(
    ("name", "settings", "sampled", "trained"),
    [
        ("chord", {"sample.experts": 5}, 84, 108 + 5 * (6 + 7)),
        ("dapo", {"sample.rounds": 3}, 3 * 84, 108),
        ("spo-segment", {"sample.every": 2, "sample.samples": 4}, 84 + 12 * 3 * 4 * 7, 108),
        ("grpo", {"sample.max_tokens": 5}, 60, 84),
    ],
)
def test_what_a_step_samples_and_trains_on(
    name: str, settings: dict[str, Any], sampled: int, trained: int
) -> None:
    found = costs(name, settings=settings)
    assert (found.sampled_tokens, found.trained_tokens) == (sampled, trained)


def test_tokens_of_given_data() -> None:
    found = [
        cost(make_plan(name, settings={"world.operations": 2, path: 3}, model="fresh")).trained_tokens
        for name, path in (("sft", "data.batch"), ("dpo", "data.batch"), ("kto", "data.data.batch"))
    ]
    assert found == [3 * (6 + 7), 3 * (6 + 2 * 7), 2 * 3 * (6 + 2 * 7)]


def test_tokens_of_several_turns() -> None:
    """A turn of keydoor is one token after a whole new prompt."""
    plan = make_plan("grpo", "keydoor", settings={"sample.prompts": 2, "sample.group": 3, "world.cap": 10})
    prompt = len(plan.world().task("train", 0).prompt)
    found = cost(plan)
    assert found.sampled_tokens == 2 * 3 * 10
    assert found.trained_tokens == 2 * prompt + 6 * (10 + 9 * prompt)


def test_memory_of_what_else_learns() -> None:
    size = costs("grpo").parameters
    assert "optimiser" not in costs("grpo", settings={"update": "sgd"}).memory_bytes
    assert (
        costs("grpo", settings={"update": "sgd", "update.momentum": 0.9}).memory_bytes["optimiser"]
        == 4 * size
    )
    beside = costs("ppo").memory_bytes
    assert (beside["critic"], beside["critic's gradients"], beside["critic's optimiser"]) == (
        4 * size,
        4 * size,
        8 * size,
    )
    narrow = costs("grpo", dtype="bfloat16").memory_bytes
    assert narrow["gradients"] == narrow["float32 masters"] == 4 * size


def test_memory_of_adapters_is_that_of_peft() -> None:
    pytest.importorskip("peft")
    from panoply.policies.build import open_policy
    from panoply.policies.lora import add_lora

    plan = make_plan("grpo", model="fresh", lora=4, dtype="bfloat16")
    policy = add_lora(open_policy("fresh", plan.world(), 0, dtype="bfloat16"), 4)
    learning = [p for p in policy.model.parameters() if p.requires_grad]
    found = cost(plan)
    assert found.trainable == sum(p.numel() for p in learning)
    assert found.memory_bytes["adapters"] == sum(p.numel() * p.element_size() for p in learning)
    assert found.memory_bytes["gradients"] == 4 * found.trainable
    assert found.memory_bytes["optimiser"] == 8 * found.trainable


def test_a_prepare_step_is_shown(registries: None) -> None:
    @part("regularise", prepare=lambda batch, weight: {})
    def toy_prepared(batch: Any, *, weight: float = 1.0) -> Any: ...

    plan = make_plan("grpo", settings={"regularise.toy_prepared": 1.0}, model="fresh")
    found = cost(plan).extra_forwards
    assert found == ["one forward pass a mini-batch for regularise.toy_prepared's prepare step"]


def test_options_have_types() -> None:
    assert Options(minutes=2).minutes == 2.0
    assert Options(sinks=["tensorboard"]).sinks == ("tensorboard",)  # type: ignore[arg-type]
    assert "a whole number" in sentence(Options, seed="one")


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        ({"settings": {"update.lr": -1}}, "update.lr must be above 0, not -1"),
        ({"settings": {"update.lr": "nan"}}, "update.lr must be above 0, not nan"),
        ({"settings": {"update.beta1": 1}}, "update.beta1 must be from 0 up to 1, not 1"),
        ({"settings": {"update.epochs": 0}}, "update.epochs must be at least 1, not 0"),
        ({"settings": {"sample.group": 0}}, "sample.group must be at least 1, not 0"),
        ({"settings": {"sample.max_tokens": 0}}, "sample.max_tokens must be at least 1, not 0"),
        ({"settings": {"regularise.kl": -1}}, "regularise.kl.weight must be at least 0, not -1"),
        ({"settings": {"sample.temperature": 0}}, "all 8 episodes of a group would be the same"),
        (
            {"settings": {"sample.top_k": 1}},
            "sample.top_k cannot be 1: all episodes of a group would be the same",
        ),
        ({"settings": {"sample.top_k": 1, "sample.group": 1}}, "so that nothing is learned"),
        ({"settings": {"sample.temperature": 1e-9}}, "the likeliest token, or at least 1e-06, not 1e-09"),
        (
            {"settings": {"sample.repetition_penalty": 1e-9}},
            "sample.repetition_penalty must be at least 1e-06, not 1e-09",
        ),
        ({"settings": {"run.minutes": "nan"}}, "run.minutes must be above 0, not nan"),
        (
            {"credit": "ppo"},
            "needs the column 'value', which model.b-coder/pretrained_value or model.bpo/median_critic or ",
        ),
        (
            {"credit": "spo-segment"},
            "needs the column 'segment_start', which sample.spo-segment/cut_and_valued gives",
        ),
        (
            {"surrogate": "online-dpo"},
            "needs pairs, which sample.compared or select.best_worst or",
        ),
        ({"sample": "chord"}, "brings the stream 'imitation', and no term learns from it"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(choices: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PanoplyError, match=sentence):
        pp.plan("grpo", "chain", **choices)


def test_what_is_given_may_be_borrowed() -> None:
    plan = pp.plan("grpo", "chain", credit="ppo", models="ppo")
    assert plan.method.settings()["credit"] == "gae"
    assert pp.plan("grpo", "chain", surrogate="online-dpo", select="online-dpo", regularise="dapo")


def test_a_plan_says_how_hard_exploration_is() -> None:
    """A lock of two turns and two actions: H̄ = 2 with one backup; where values are not exact, nothing is said."""
    settings = {
        "world.variant": "lock",
        "world.size": 2,
        "world.actions": 2,
        "world.lure": 0.0,
        "world.horizon": 2,
    }
    shown = planned(make_plan("ppo", "tabular", settings=settings))
    assert "effective horizon 2.0: greedy by random play's values is best after no backup" in " ".join(
        shown.split()
    )
    assert "exploration" not in planned(make_plan("ppo", "cartpole"))
    large = {"world.variant": "tree", "world.size": 5, "world.horizon": 200}
    assert "exploration" not in planned(make_plan("ppo", "tabular", settings=large))


@pytest.mark.parametrize("world", [entry.name for entry in entries("world")])
def test_a_plan_on_every_world_can_be_printed(world: str) -> None:
    printed = 0
    for name in ("grpo", "ppo", "bc", "bgpo"):
        try:
            made = pp.plan(name, world)
        except pp.PanoplyError:  # not every method fits every world
            continue
        printed += world in planned(made)
    told = ("jsonl", "own-tools", "spoken", "gymnasium", "logged", "recorded")
    assert printed or world in told, "these want to be told of what"


def test_the_bytes_a_weight_that_the_readme_counts_with() -> None:
    plain = cost(pp.plan("grpo", model="fresh", dtype="bfloat16"))
    assert sum(plain.memory_bytes.values()) == 18 * plain.parameters
    pulled = cost(pp.plan("grpo", model="fresh", dtype="bfloat16", settings={"regularise.kl": 0.1}))
    assert sum(pulled.memory_bytes.values()) == 20 * pulled.parameters
    adapted = cost(pp.plan("grpo", model="fresh", dtype="bfloat16", lora=4))
    assert adapted.memory_bytes["weights"] == 2 * adapted.parameters
    settings = {"update.bits": 8, "run.masters": False}
    least = cost(pp.plan("grpo", model="fresh", dtype="bfloat16", settings=settings))
    assert round(sum(least.memory_bytes.values()) / least.parameters) == 8
