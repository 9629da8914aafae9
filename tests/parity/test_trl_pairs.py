"""Losses on pairs and on single judgements, and their gradients, against TRL's own code (see trl_kit.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="parity is tested where TRL is installed")

from trl import DPOTrainer, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl_kit import (
    Frozen,
    Gradient,
    Models,
    assert_equal,
    distance,
    frozen,
    our_gradient,
    their_gradient,
    trainer,
    with_reference,
    with_settings,
)

from panoply.experience import Experience
from panoply.methods.base.orpo import orpo
from panoply.regimes import Method
from panoply.slots.loss.pairs import chosen_nll, hinge


def pair_batch(models: Models, seed: int = 1, prompt: tuple[int, int] = (3, 6)) -> tuple[Experience, Frozen]:
    """Five pairs; TRL wants all chosen sides first, then all rejected ones."""
    drawn = frozen(5, 2, seed, prompt)
    order = [*range(0, 10, 2), *range(1, 10, 2)]
    batch = Frozen(*([column[i] for i in order] for column in (drawn.prompts, drawn.answers, drawn.group)))  # type: ignore[arg-type]
    made = batch.experience(source=2, pairs=[(i, i + 5) for i in range(5)])
    return with_reference(models, made), batch


def dpo_loss(
    models: Models, batch: Frozen, loss_type: str, beta: float, smoothing: float = 0.0
) -> tuple[float, Gradient]:
    ids, mask, inside = batch.padded()
    made = trainer(
        DPOTrainer,
        models,
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=smoothing,
        use_weighting=False,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=0.05),
    )
    inputs = {"input_ids": ids, "attention_mask": mask, "completion_mask": inside}
    return their_gradient(models, DPOTrainer._compute_loss(made, models.theirs, inputs, return_outputs=False))


def test_dpo(models: Models) -> None:
    made, batch = pair_batch(models)
    assert_equal(our_gradient(models, with_settings("dpo"), made), dpo_loss(models, batch, "sigmoid", 0.1))


def test_hinge(models: Models) -> None:
    """TRL's hinge has a reference, SLiC-HF has none; the part has both."""
    made, batch = pair_batch(models)
    method = with_settings("slic").but(losses=(hinge(beta=0.1, margin=1.0, to="reference"),))
    assert_equal(our_gradient(models, method, made), dpo_loss(models, batch, "hinge", 0.1))


def test_ipo(models: Models) -> None:
    """The paper's score is a sum over tokens; TRL takes the mean, which is `per_token` here."""
    made, batch = pair_batch(models)
    theirs = dpo_loss(models, batch, "ipo", 0.1)
    method = with_settings("ipo", losses__squared__per_token=True)
    assert_equal(our_gradient(models, method, made), theirs)
    assert distance(our_gradient(models, with_settings("ipo"), made), theirs)[1] > 0.1


PAIRS: dict[str, tuple[Method, str, float, float]] = {
    "sigmoid_norm": (with_settings("dpo", losses__logistic__per_token=True), "sigmoid_norm", 0.1, 0.0),
    "robust": (with_settings("robust-dpo"), "robust", 0.1, 0.1),
    "exo": (with_settings("exo"), "exo_pair", 0.1, 1e-3),
    "nca": (with_settings("nca"), "nca_pair", 0.01, 0.0),
    "nca, strong": (with_settings("nca", losses__noise_contrast__beta=0.5), "nca_pair", 0.5, 0.0),
    # The paper subtracts the mean reward; TRL's form for pairs does not.
    "bco": (with_settings("bco", losses__binary__shift=False), "bco_pair", 0.01, 0.0),
    "bco, strong": (
        with_settings("bco", losses__binary__shift=False, losses__binary__beta=0.5),
        "bco_pair",
        0.5,
        0.0,
    ),
    "sppo, hard": (with_settings("sppo-hard"), "sppo_hard", 1e-3, 0.0),
    "sppo, near": (with_settings("sppo-hard", losses__squared_sides__beta=0.1), "sppo_hard", 0.1, 0.0),
    "aot": (with_settings("aot", losses__sorted_gaps__beta=0.5), "aot", 0.5, 0.0),
    "aot, smoothed": (
        with_settings("aot", losses__sorted_gaps__beta=0.5, losses__sorted_gaps__smoothing=0.2),
        "aot",
        0.5,
        0.2,
    ),
    "aot, unpaired": (
        with_settings("aot-unpaired", losses__sorted_sides__beta=0.5),
        "aot_unpaired",
        0.5,
        0.0,
    ),
    "apo, zero": (with_settings("apo-zero"), "apo_zero", 0.1, 0.0),
    "apo, down": (with_settings("apo-down"), "apo_down", 0.1, 0.0),
    "discopop": (with_settings("discopop"), "discopop", 0.05, 0.0),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name: str, models: Models) -> None:
    method, loss_type, beta, smoothing = PAIRS[name]
    made, batch = pair_batch(
        models, seed=2
    )  # of which the pairs' order by gap is another one for the reference
    ours, theirs = our_gradient(models, method, made), dpo_loss(models, batch, loss_type, beta, smoothing)
    assert_equal(ours, theirs)
    plain = our_gradient(models, with_settings("dpo", losses__logistic__beta=beta), made)
    assert distance(plain, theirs)[1] > 1e-3, "it is DPO's own gradient, and a wrong loss would not show"


def contrast_inputs(batch: Frozen, pairs: slice = slice(None)) -> dict[str, Tensor]:
    """A batch as ORPO and CPO take it."""
    made: dict[str, Tensor] = {}
    for side, start in (("chosen", 0), ("rejected", 5)):
        ids, mask, inside = batch.padded(slice(*(start + i for i in pairs.indices(5)[:2])))
        made |= {f"{side}_input_ids": ids, f"{side}_attention_mask": mask}
        made[f"{side}_labels"] = ids.masked_fill(inside == 0, -100)
    return made


def orpo_loss(models: Models, batch: Frozen, pairs: slice = slice(None)) -> Tensor:
    made = trainer(ORPOTrainer, models, beta=0.1)
    loss: Tensor = ORPOTrainer.get_batch_loss_metrics(made, models.theirs, contrast_inputs(batch, pairs))[0]
    return loss


def test_orpo(models: Models) -> None:
    """TRL imitates the prompt too, and averages tokens over a whole batch; the paper has a mean an answer, then pairs.

    They are equal for prompts of one token and one pair at a time.
    """
    made, batch = pair_batch(models, prompt=(1, 1))
    alone = torch.stack([orpo_loss(models, batch, slice(i, i + 1)) for i in range(5)])
    assert_equal(our_gradient(models, orpo(), made), their_gradient(models, alone.mean()))
    together = their_gradient(models, orpo_loss(models, batch))
    assert distance(our_gradient(models, orpo(), made), together)[1] > 1e-2
    made, batch = pair_batch(models)
    alone = torch.stack([orpo_loss(models, batch, slice(i, i + 1)) for i in range(5)])
    assert distance(our_gradient(models, orpo(), made), their_gradient(models, alone.mean()))[1] > 1e-2


def simpo_loss(models: Models, batch: Frozen, pairs: slice = slice(None), **settings: Any) -> Tensor:
    plain = {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "label_smoothing": 0.0, "alpha": 0.0}
    made = trainer(CPOTrainer, models, **{**plain, "cpo_alpha": 0.0, **settings})
    loss: Tensor = CPOTrainer.get_batch_loss_metrics(made, models.theirs, contrast_inputs(batch, pairs))[0]
    return loss


def test_simpo(models: Models) -> None:
    """TRL's CPOTrainer adds a term of imitation by default (`cpo_alpha=1`); the paper has none."""
    made, batch = pair_batch(models)
    assert_equal(
        our_gradient(models, with_settings("simpo"), made), their_gradient(models, simpo_loss(models, batch))
    )
    alone = torch.stack([simpo_loss(models, batch, slice(i, i + 1), cpo_alpha=1.0) for i in range(5)])
    both = with_settings("simpo")
    both = both.but(losses=(*both.slots()["losses"], chosen_nll(weight=1.0)))  # type: ignore[misc]
    assert_equal(our_gradient(models, both, made), their_gradient(models, alone.mean()))


# ------------------------------------------------------------------ labels on single episodes


@pytest.mark.parametrize("point", ["mismatched", "zero"])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.5, 0.5)])
def test_kto(weights: tuple[float, float], point: str, models: Models) -> None:
    """TRL rotates a batch's answers by one to mismatch them, which pairs laid side by side turn into matches.

    Here the wrong prompts are frozen too, so only the losses are compared. With a reference point of 0 it is TRL's
    `apo_zero_unpaired`.
    """
    batch = frozen(6, 1, seed=3)
    label = torch.tensor([1, -1, 1, 1, -1, -1])
    moved = Frozen(batch.prompts, [batch.answers[-1], *batch.answers[:-1]], batch.group)
    both = Frozen(batch.prompts + moved.prompts, batch.answers + moved.answers, batch.group + batch.group)
    made = with_reference(models, both.experience(source=2))
    made = made.with_columns(label=torch.cat([label, torch.zeros(6, dtype=torch.long)])[made["episode"]])
    method = with_settings(
        "kto",
        losses__prospect__desirable=weights[0],
        losses__prospect__undesirable=weights[1],
        losses__prospect__point=point,
    )

    ids, mask, inside = batch.padded()
    wrong_ids, wrong_mask, wrong_inside = moved.padded()
    inputs = {
        "input_ids": ids, "attention_mask": mask, "completion_mask": inside, "label": label > 0,
        "KL_input_ids": wrong_ids, "KL_attention_mask": wrong_mask, "KL_completion_mask": wrong_inside,
    }  # fmt: skip
    stand_in = trainer(
        KTOTrainer,
        models,
        loss_type="kto" if point == "mismatched" else "apo_zero_unpaired",
        beta=0.1,
        desirable_weight=weights[0],
        undesirable_weight=weights[1],
        calculate_KL=point == "mismatched",
        precompute_ref_logps=False,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
    )
    theirs = their_gradient(
        models, KTOTrainer._compute_loss(stand_in, models.theirs, inputs, return_outputs=False)
    )
    assert_equal(our_gradient(models, method, made), theirs)
    found = stand_in._metrics["train"]["kl"][0]
    assert (found > 0) == (point == "mismatched"), "the reference point is at its bound, and is not compared"
