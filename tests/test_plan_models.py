"""What a plan can tell of a model by its small files, and of an update before it is made: a run's refusals, earlier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import own_model
import pytest

import panoply as pp
from panoply.costs import Cost, cost
from panoply.policies.build import open_policy
from panoply.policies.value import ValueModel


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A masked-diffusion model of `digits`, reward models of `chain`, and models of one's own."""
    at = tmp_path_factory.mktemp("models")
    chain: Any = pp.plan("grpo", "chain").world()
    digits: Any = pp.plan("bgpo", "digits").world()
    open_policy("fresh", digits, 0, "cpu").save(at / "masked")
    for name, outputs in {"judge": ("value",), "labels": ("a", "b")}.items():
        ValueModel.of(open_policy("fresh", chain, 0, "cpu"), outputs).save(at / name)
    own_model.write(at / "own")
    own_model.write(at / "foreign")
    config = json.loads((at / "foreign" / "config.json").read_text())
    (at / "foreign" / "config.json").write_text(json.dumps({**config, "model_type": "gpt_neox"}))
    return {path.name: str(path) for path in at.iterdir()}


@pytest.mark.parametrize(
    ("method", "world", "model", "sentence"),
    [
        ("grpo", "digits", "masked", "The model is a masked-diffusion one"),
        ("grpo", "digits", "fresh", "The model is a masked-diffusion one"),
        (
            "grpo",
            "chain",
            "judge",
            "is a reward model, which judges answers and writes none: earn what it says",
        ),
        (
            "sft",
            "chain",
            "judge",
            "is a reward model, which judges answers and writes none: earn what it says",
        ),
        ("grpo", "chain", "own", "does not speak the tokens of the world chain"),
        ("reward-model", "chain", "own", "does not speak the tokens of the world chain"),
        ("reward-model", "chain", "labels", "is a reward model of a, b, and this method trains value"),
    ],
)
def test_a_model_that_cannot_be_trained_so_is_refused_by_the_plan(
    folders: dict[str, str], method: str, world: str, model: str, sentence: str
) -> None:
    with pytest.raises(pp.PanoplyError, match=sentence):
        pp.plan(method, world, model=folders.get(model, model))


def test_what_can_be_trained_is_planned(folders: dict[str, str], tmp_path: Path) -> None:
    pp.plan("bgpo", "digits", model=folders["masked"])
    pp.plan("bgpo", "digits", model="fresh")
    pp.plan("reward-model", "chain", model=folders["judge"])
    pp.plan("grpo", "chain", model=str(tmp_path / "not-there-yet"))


def test_layers_of_a_model_that_transformers_runs_are_not_ours(
    folders: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    (tmp_path / "reward.py").write_text("def good(completions):\n    return [1.0 for _ in completions]\n")
    own = {"data": str(tmp_path / "data.jsonl"), "model": folders["foreign"]}
    reward = f"{tmp_path / 'reward.py'}:good"
    for method, more in (("ppo", {"reward": reward}), ("reward-model", {})):
        with pytest.raises(pp.PanoplyError, match="need a layout that runs natively"):
            pp.plan(method, **own, **more)
    with pytest.raises(pp.PanoplyError, match="lora.base=nf4 is for layouts that run natively"):
        pp.plan("grpo", **own, reward=reward, lora=4, settings={"lora.base": "nf4"})
    pp.plan("grpo", **own, reward=reward, lora=4)


def test_blocks_of_transformers_are_not_computed_again(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when asked, and no plan counts on it where memory is short; a decoder of ours that PEFT has wrapped can."""
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    data = {"data": str(tmp_path / "data.jsonl"), "dtype": "bfloat16"}
    always = {"run.recompute": "always"}
    with pytest.raises(pp.PanoplyError, match=r"run\.recompute has no effect: transformers runs this model"):
        pp.plan("sft", model=folders["foreign"], settings=always, **data)
    pp.plan("sft", model=folders["own"], lora=2, settings={**always, "lora.dora": True}, **data)
    monkeypatch.setattr("panoply.costs.device_memory", lambda _: 10**5)
    recomputed = [
        cost(pp.plan("sft", model=folders[name], **data)).activations.recomputed
        for name in ("own", "foreign")
    ]
    assert recomputed == [True, False]


@pytest.mark.parametrize(
    ("method", "choices"),
    [("nash-mp", {}), ("grpo", {"update": "momentum"}), ("online-dpo", {"update": "momentum"})],
)
def test_an_update_that_places_weights_needs_masters(method: str, choices: dict[str, Any]) -> None:
    with pytest.raises(
        pp.PanoplyError, match="places weights itself, so that run.masters=false is not possible"
    ):
        pp.plan(method, dtype="bfloat16", settings={"run.masters": False}, **choices)
    pp.plan("grpo", dtype="bfloat16", settings={"run.masters": False})


def test_seats_cannot_share_weights_under_an_update_that_wants_more_than_gradients() -> None:
    settings = {"solver.update": "momentum"}
    with pytest.raises(pp.PanoplyError, match="wants more than gradients, which learners cannot share"):
        pp.plan("relift", settings=settings)


def _costs(method: str, **choices: Any) -> Cost:
    return cost(pp.plan(method, "chain", model="fresh", **choices))


def test_a_critic_that_learns_with_the_policy_is_moved_by_its_optimiser() -> None:
    """In float32 sums, averages and copies, as if it were more of the policy."""
    apart = _costs("ppo", dtype="bfloat16")
    together = _costs("ppo", dtype="bfloat16", settings={"models.critic.update": "none"})
    assert together.memory_bytes == apart.memory_bytes
    fewer = _costs(
        "ppo",
        dtype="bfloat16",
        settings={"models.critic.update": "none", "run.masters": False, "update.bits": 8},
    ).memory_bytes
    assert "critic's float32 masters" not in fewer
    assert fewer["critic's optimiser"] == fewer["optimiser"] < apart.memory_bytes["optimiser"] / 3


def test_another_model_as_reference_is_as_large_as_it_is(tmp_path: Path) -> None:
    other = pp.load_policy(own_model.write(tmp_path / "other"))
    pulled = {"regularise.kl": 0.1}
    found = _costs("grpo", settings={**pulled, "run.reference": str(tmp_path / "other")})
    weights = sum(p.numel() for p in other.parameters())
    assert weights != found.parameters
    assert found.memory_bytes["reference copy"] == 4 * weights
    own = _costs("grpo", settings=pulled)
    assert found.operations - own.operations == 2 * (weights - found.parameters) * found.trained_tokens
    gone = _costs("grpo", settings={**pulled, "run.reference": str(tmp_path / "not-there-yet")})
    assert gone.memory_bytes == own.memory_bytes


def test_thoughts_are_no_model_beside_the_policy() -> None:
    """Gates of a policy's own width, read in its own passes: of no size that a plan would name."""
    found = cost(pp.plan("hrpo", model="fresh", dtype="bfloat16"))
    assert sum(found.memory_bytes.values()) == 18 * found.parameters
    assert not [said for said in found.extra_forwards if "gated" in said]
