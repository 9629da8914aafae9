"""On-policy losses, gradients and advantages against TRL's own code (see trl_kit.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="parity is tested where TRL is installed")

from trl import GRPOTrainer
from trl_kit import (
    Gradient,
    Models,
    assert_equal,
    distance,
    frozen,
    our_gradient,
    their_gradient,
    trainer,
    with_settings,
)

from panoply.experience import Experience
from panoply.regimes import Method
from panoply.slots.surrogate.sequences import sequence_clip

LONGEST = 9


def grpo_batch(models: Models, seed: int = 0) -> tuple[Experience, dict[str, Tensor]]:
    """Three groups of four, rewards, and log-probabilities of an older policy: for us, and for TRL."""
    batch = frozen(3, 4, seed)
    made = batch.experience()
    generator = torch.Generator().manual_seed(seed)
    reward = torch.randint(0, 3, (12,), generator=generator).float()
    last = made.by("episode").is_last()
    with torch.no_grad():
        now = models.ours.score(made)["logp"]
    old = now + 0.6 * torch.randn(len(now), generator=generator)
    reference = now + 0.3 * torch.randn(len(now), generator=generator)
    column = torch.zeros(len(now)).masked_scatter(last, reward)
    made = made.with_columns(**{"logp": old, "logp@reference": reference, "reward": column})

    longest = max(map(len, batch.prompts))
    prompts = torch.tensor([[0] * (longest - len(p)) + p for p in batch.prompts])
    asked = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch.prompts])
    mask = torch.tensor([[1] * len(a) + [0] * (LONGEST - len(a)) for a in batch.answers])

    def wide(values: Tensor) -> Tensor:
        return torch.zeros(mask.shape).masked_scatter(mask.bool(), values)

    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": asked,
        "completion_ids": torch.tensor([a + [0] * (LONGEST - len(a)) for a in batch.answers]),
        "completion_mask": mask,
        "old_per_token_logps": wide(old),
        "ref_per_token_logps": wide(reference),
        "num_items_in_batch": mask.sum(),
    }
    return made, inputs


def grpo_loss(
    models: Models, inputs: dict[str, Tensor], advantage: Tensor, **settings: Any
) -> tuple[float, Gradient]:
    plain: dict[str, Any] = {
        "loss_type": "grpo",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "importance_sampling_level": "token",
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "max_completion_length": LONGEST,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
        "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
    }
    made = trainer(
        GRPOTrainer, models, get_gamma_weights=GRPOTrainer.get_gamma_weights, **{**plain, **settings}
    )
    return their_gradient(
        models, GRPOTrainer._compute_loss(made, models.theirs, {**inputs, "advantages": advantage})
    )


PLAIN: dict[str, Any] = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
SAPO = SimpleNamespace(**PLAIN, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05)
VESPO = SimpleNamespace(**PLAIN, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0)
SEQUENCES: dict[str, Any] = {"loss_type": "luspo", "importance_sampling_level": "sequence"}

ON_POLICY: dict[str, tuple[Method, dict[str, Any]]] = {
    "grpo": (with_settings("grpo"), {"beta": 0.04}),
    "grpo, dual": (
        with_settings("grpo", surrogate__dual=1.5, regularise="none"),
        {"args": SimpleNamespace(delta=1.5, use_bias_correction_kl=False, steps_per_generation=1)},
    ),
    "dr-grpo": (with_settings("dr-grpo", reduce__length=LONGEST), {"loss_type": "dr_grpo"}),
    "dapo": (with_settings("dapo"), {"loss_type": "dapo", "epsilon_high": 0.28}),
    # TRL keeps GRPO's wide bounds by default; these are the paper's.
    "gspo": (
        with_settings("gspo"),
        {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    "gspo, wide": (
        with_settings("gspo", surrogate__low=0.2, surrogate__high=0.2),
        {"importance_sampling_level": "sequence"},
    ),
    # TRL's `epsilon_high` is the bound itself for CISPO, not its distance from 1, and there is no lower bound.
    "cispo": (with_settings("cispo"), {"loss_type": "cispo", "epsilon_high": 5.0}),
    "cispo, tight": (
        with_settings("cispo", surrogate__high=0.2),
        {"loss_type": "cispo", "epsilon_high": 1.2},
    ),
    # TRL's `bnpo` is a mean over the tokens of a batch, which is `token_mean`.
    "bnpo": (with_settings("grpo", reduce="token_mean", regularise="none"), {"loss_type": "bnpo"}),
    "sapo": (with_settings("sapo"), {"loss_type": "sapo", "args": SAPO}),
    "vespo": (with_settings("vespo"), {"loss_type": "vespo", "args": VESPO}),
    "luspo": (with_settings("luspo"), {**SEQUENCES, "epsilon_low": 2e-3, "epsilon_high": 2.5e-3}),
    "luspo, wide": (with_settings("luspo", surrogate__low=0.2, surrogate__high=0.2), SEQUENCES),
}


@pytest.mark.parametrize("name", ON_POLICY)
def test_on_policy(name: str, models: Models) -> None:
    """Our advantages are given to TRL, whose own are computed among its sampling; `test_advantages` compares those."""
    method, settings = ON_POLICY[name]
    made, inputs = grpo_batch(models)
    advantage = method.slots()["credit"](made)  # type: ignore[operator]
    per_episode = made.by("episode").first(advantage)
    ours = our_gradient(models, method, made.with_columns(advantage=advantage))
    assert_equal(ours, grpo_loss(models, inputs, per_episode, **settings))


def test_gspo_token_has_the_same_gradient(models: Models) -> None:
    made, inputs = grpo_batch(models)
    method = with_settings("gspo").but(surrogate=sequence_clip(low=0.1, high=0.1, advantage="decision"))
    advantage = method.slots()["credit"](made)  # type: ignore[operator]
    theirs = grpo_loss(
        models,
        inputs,
        made.by("episode").first(advantage),
        importance_sampling_level="sequence",
        epsilon_low=0.1,
        epsilon_high=0.1,
    )
    assert_equal(our_gradient(models, method, made.with_columns(advantage=advantage)), theirs)


def test_a_wrong_bound_is_noticed(models: Models) -> None:
    """The frozen ratios do leave the bounds, so that a bound which is off shows."""
    made, inputs = grpo_batch(models)
    method = with_settings("dapo", surrogate__high=1.0)
    advantage = method.slots()["credit"](made)  # type: ignore[operator]
    theirs = grpo_loss(
        models, inputs, made.by("episode").first(advantage), loss_type="dapo", epsilon_high=0.28
    )
    assert distance(our_gradient(models, method, made.with_columns(advantage=advantage)), theirs)[1] > 1e-3


# ------------------------------------------------------------------ advantages


def test_advantages(models: Models) -> None:
    """(r − mean)/(std + 1e-4) a group, as TRL writes it among its sampling; `scale_rewards="none"` for Dr. GRPO."""
    made, _ = grpo_batch(models)
    rewards = made.by("episode").sum(made["reward"]).view(-1, 4)
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    scaled = centred / (rewards.std(dim=1, keepdim=True) + 1e-4)
    for name, expected in (("grpo", scaled), ("dapo", scaled), ("dr-grpo", centred)):
        found = made.by("episode").first(with_settings(name).slots()["credit"](made))  # type: ignore[operator]
        torch.testing.assert_close(found, expected.flatten())
