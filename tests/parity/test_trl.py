"""Losses and gradients against TRL's own code, on frozen batches and the same weights.

TRL's loss functions are called on stand-ins for its trainers, which carry just the settings those functions read; the
model is a tiny random Llama, in `transformers` for TRL and in `Decoder` for Panoply. Where TRL differs from the paper,
the test says so and compares under the setting that makes them equal.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="parity is tested where TRL is installed")
transformers = pytest.importorskip("transformers")

from accelerate import Accelerator  # noqa: E402
from trl import DPOTrainer, GRPOTrainer, KTOTrainer  # noqa: E402
from trl.experimental.cpo import CPOTrainer  # noqa: E402
from trl.experimental.orpo import ORPOTrainer  # noqa: E402
from trl.trainer.utils import add_fused_lm_head  # noqa: E402

from panoply.compose import assign, resolve  # noqa: E402
from panoply.experience import Experience, Ragged, Table  # noqa: E402
from panoply.loops.learner import Learner  # noqa: E402
from panoply.methods.base.orpo import orpo  # noqa: E402
from panoply.policies.folder import load_model  # noqa: E402
from panoply.policies.text import TextPolicy  # noqa: E402
from panoply.policies.tokenizer import Tokenizer  # noqa: E402
from panoply.regimes import Method  # noqa: E402
from panoply.slots.loss.pairs import chosen_nll, hinge  # noqa: E402
from panoply.slots.surrogate.sequences import sequence_clip  # noqa: E402

VOCABULARY = 24
CLOSE = 1e-5
"""Relative: of the loss, and of the largest entry of the gradient."""


# ------------------------------------------------------------------ the two models


@dataclass
class Models:
    theirs: Any
    reference: Any
    ours: TextPolicy


def llama(seed: int, folder: Path | None = None) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    if folder is not None:
        model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """The same weights twice, and other weights as the reference."""
    threads = torch.get_num_threads()
    folder = tmp_path_factory.mktemp("llama")
    theirs, reference = llama(0, folder), llama(1).eval()
    with torch.no_grad():
        for mine, other in zip(reference.parameters(), theirs.parameters(), strict=True):
            mine.copy_(0.6 * mine + 0.4 * other)
    outputs = ("log_probs", "entropy", "mean_logits", "is_top1")
    add_fused_lm_head(theirs, outputs=outputs)
    add_fused_lm_head(reference, outputs=outputs)
    ours = TextPolicy(load_model(folder), Tokenizer.of_characters("0123456789abcdefghij"))
    yield Models(theirs, reference, ours)
    torch.set_num_threads(threads)


# ------------------------------------------------------------------ frozen batches


@dataclass
class Frozen:
    """Sequences of a prompt and an answer; the same ones for both sides."""

    prompts: list[list[int]]
    answers: list[list[int]]
    group: list[int]

    def padded(self, which: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
        """`input_ids`, `attention_mask` and `completion_mask`, padded on the right."""
        rows = [[*p, *a] for p, a in zip(self.prompts[which], self.answers[which], strict=True)]
        longest = max(map(len, rows))
        ids = torch.tensor([r + [0] * (longest - len(r)) for r in rows])
        mask = torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in rows])
        inside = [
            [0] * len(p) + [1] * len(a) + [0] * (longest - len(p) - len(a))
            for p, a in zip(self.prompts[which], self.answers[which], strict=True)
        ]
        return ids, mask, torch.tensor(inside)

    def experience(self, source: int = 0, pairs: list[tuple[int, int]] | None = None) -> Experience:
        """The same as decisions; rows of one prompt share it."""
        flat = [(i, t) for i, answer in enumerate(self.answers) for t in range(len(answer))]
        row = torch.tensor([i for i, _ in flat])
        seen: dict[tuple[int, ...], int] = {}
        prompt = [seen.setdefault(tuple(p), len(seen)) for p in self.prompts]
        decisions = {
            "group": torch.tensor(self.group)[row],
            "episode": row,
            "turn": torch.zeros_like(row),
            "context": row,
            "position": torch.tensor([len(self.prompts[i]) + t for i, t in flat]),
            "action": torch.tensor([self.answers[i][t] for i, t in flat]),
            "source": torch.full_like(row, source),
        }
        context = {
            "tokens": Ragged.from_lists([[*p, *a] for p, a in zip(self.prompts, self.answers, strict=True)]),
            "prompt": torch.tensor(prompt),
            "shared": torch.tensor([len(p) for p in self.prompts]),
        }
        table = None
        if pairs is not None:
            chosen, rejected = zip(*pairs, strict=True)
            table = Table({"chosen": torch.tensor(chosen), "rejected": torch.tensor(rejected)})
        return Experience(Table(decisions), Table(context), table)


def frozen(groups: int, size: int, seed: int = 0, prompt: tuple[int, int] = (3, 6)) -> Frozen:
    dice = random.Random(seed)
    made = Frozen([], [], [])
    for g in range(groups):
        asked = [dice.randrange(VOCABULARY) for _ in range(dice.randint(*prompt))]
        for _ in range(size):
            made.prompts.append(asked)
            made.answers.append([dice.randrange(VOCABULARY) for _ in range(dice.randint(2, 9))])
            made.group.append(g)
    return made


# ------------------------------------------------------------------ comparing


Gradient = dict[str, Tensor]


def their_gradient(models: Models, loss: Tensor) -> tuple[float, Gradient]:
    models.theirs.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    found = {n: p.grad.clone() for n, p in models.theirs.named_parameters() if p.grad is not None}
    return float(loss.detach()), found


def our_gradient(models: Models, method: Method, made: Experience) -> tuple[float, Gradient]:
    """In two micro-batches, so that what is compared does not depend on a split."""
    tokens = int(made.context.ragged("tokens").lengths.sum())
    learner = Learner(models.ours, method, total_steps=1, micro_tokens=tokens * 2 // 3)
    loss = learner._accumulate(made, 0)["loss"]
    return loss, {n: p.grad.clone() for n, p in learner.parameters.items() if p.grad is not None}


def distance(ours: tuple[float, Gradient], theirs: tuple[float, Gradient]) -> tuple[float, float]:
    """Relative distances of losses, and of gradients by the largest entry."""
    assert ours[1].keys() == theirs[1].keys()
    largest = max(float(g.abs().max()) for g in theirs[1].values())
    assert largest > 1e-6, "nothing is compared"
    apart = max(float((ours[1][n] - g).abs().max()) for n, g in theirs[1].items())
    return abs(ours[0] - theirs[0]) / max(abs(theirs[0]), largest), apart / largest


def assert_equal(ours: tuple[float, Gradient], theirs: tuple[float, Gradient]) -> None:
    loss, gradient = distance(ours, theirs)
    assert loss < CLOSE
    assert gradient < CLOSE


def with_settings(name: str, **settings: Any) -> Method:
    """The published method with a few settings changed (`__` for a dot)."""
    method = resolve(name).method
    for path, value in settings.items():
        method = assign(method, path.replace("__", "."), value)
    return method


def trainer(cls: type, models: Models, **settings: Any) -> Any:
    """What a trainer's loss reads, and its own methods."""
    made = SimpleNamespace(
        model=models.theirs,
        ref_model=models.reference,
        accelerator=Accelerator(cpu=True),
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        is_encoder_decoder=False,
        padding_value=0,
        pad_token_id=0,
        concatenated_inputs=cls.__dict__.get("concatenated_inputs"),
        get_batch_logps=cls.__dict__.get("get_batch_logps"),
    )
    made.__dict__.update(settings)
    for name in (
        "_get_per_token_logps_and_entropies", "_compute_kl_logps", "concatenated_forward", "odds_ratio_loss", "cpo_loss"
    ):  # fmt: skip
        if name in cls.__dict__:
            setattr(made, name, MethodType(cls.__dict__[name], made))
    return made


# ------------------------------------------------------------------ on-policy losses


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
    made = trainer(GRPOTrainer, models, **{**plain, **settings})
    return their_gradient(
        models, GRPOTrainer._compute_loss(made, models.theirs, {**inputs, "advantages": advantage})
    )


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


# ------------------------------------------------------------------ losses on pairs


def pair_batch(models: Models, seed: int = 1, prompt: tuple[int, int] = (3, 6)) -> tuple[Experience, Frozen]:
    """Five pairs; TRL wants all chosen sides first, then all rejected ones."""
    drawn = frozen(5, 2, seed, prompt)
    order = [*range(0, 10, 2), *range(1, 10, 2)]
    batch = Frozen(*([column[i] for i in order] for column in (drawn.prompts, drawn.answers, drawn.group)))  # type: ignore[arg-type]
    made = batch.experience(source=2, pairs=[(i, i + 5) for i in range(5)])
    return with_reference(models, made), batch


def with_reference(models: Models, made: Experience) -> Experience:
    """The column `logp@reference` from TRL's reference model."""
    row, position = made["context"], made["position"]
    tokens = made.context.ragged("tokens").tolist()
    with torch.no_grad():
        logp = [models.reference(torch.tensor([t])).logits[0].log_softmax(-1) for t in tokens]
    values = [
        float(logp[r][p - 1, a])
        for r, p, a in zip(row.tolist(), position.tolist(), made["action"].tolist(), strict=True)
    ]
    return made.with_columns(**{"logp@reference": torch.tensor(values)})


def dpo_loss(models: Models, batch: Frozen, loss_type: str, beta: float) -> tuple[float, Gradient]:
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
        label_smoothing=0.0,
        use_weighting=False,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
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


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.5, 0.5)])
def test_kto(weights: tuple[float, float], models: Models) -> None:
    """TRL rotates a batch's answers by one to mismatch them, which pairs laid side by side turn into matches.

    Here the wrong prompts are frozen too, so only the losses are compared.
    """
    batch = frozen(6, 1, seed=3)
    label = torch.tensor([1, -1, 1, 1, -1, -1])
    moved = Frozen(batch.prompts, [batch.answers[-1], *batch.answers[:-1]], batch.group)
    both = Frozen(batch.prompts + moved.prompts, batch.answers + moved.answers, batch.group + batch.group)
    made = with_reference(models, both.experience(source=2))
    made = made.with_columns(label=torch.cat([label, torch.zeros(6, dtype=torch.long)])[made["episode"]])
    method = with_settings(
        "kto", losses__prospect__desirable=weights[0], losses__prospect__undesirable=weights[1]
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
        loss_type="kto",
        beta=0.1,
        desirable_weight=weights[0],
        undesirable_weight=weights[1],
        calculate_KL=True,
        precompute_ref_logps=False,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
    )
    theirs = their_gradient(
        models, KTOTrainer._compute_loss(stand_in, models.theirs, inputs, return_outputs=False)
    )
    assert_equal(our_gradient(models, method, made), theirs)
    assert stand_in._metrics["train"]["kl"][0] > 0, "the reference point is at its bound, and is not compared"


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
