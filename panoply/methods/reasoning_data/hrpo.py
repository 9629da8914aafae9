"""Hybrid Reasoning Policy Optimization: a thought is a token and, through a gate, all that it could have been."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from panoply.evidence.claims import Learns, Shows
from panoply.experience import Experience
from panoply.methods.base.grpo import TINY as GRPO_TINY
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, part
from panoply.policies.thoughts import Gated
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.seeds import stable_hash
from panoply.slots.model.model import Model
from panoply.slots.regularise.terms import kl
from panoply.slots.sample.groups import groups
from panoply.slots.schedule.schedules import cosine
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.loops.seat import Seat


def _impossible(held: Any, method: Any) -> list[Finding]:
    found = [("least", f"it is above most={held.most:g}")] if held.least > held.most else []
    return [*found, *([("marker", "an empty marker would end no thought")] if not held.marker else [])]


def _inert(held: Any, method: Any, world: Any) -> list[Finding]:
    found: list[Finding] = []
    if world.medium == "text" and held.marker:
        tokens = (world.tokenizer.decode([i]) for i in range(world.tokenizer.vocab_size))
        if not any(held.marker[-1] in text for text in tokens):
            found.append(("marker", f"no token of {world.name} ends it, so that whole answers are thoughts"))
    if held.least == held.most == 1:
        rates = ("gates_lr", "residual_lr", "reference")
        found += [(name, "the gate is closed, and stays so") for name in rates]
    elif not any("reference" in need for need in method.needs()):
        found.append(("reference", "nothing is compared with the reference"))
    return found


@part(
    "model",
    equation=lambda held: (
        f"ê = a⊙e + √(1 − a²)⊙(i⊙h),  h = Σ p·E / ‖p‖,  a = exp(−8·softplus(−Λ)⊙r), {held.least:g} to {held.most:g} "
        f"at first,  until '{held.marker}'"
    ),
    needs={"world:text", "engine:vectors"},
    bounds={
        "least": "above 0 to 1", "most": "above 0 to 1", "gates_lr": "above 0", "residual_lr": "above 0"
    },
    impossible=_impossible,
    inert=_inert,
    cost=lambda held: 0,
)  # fmt: skip
def gated(
    seat: Seat,
    *,
    marker: str = "####",
    least: float = 0.99,
    most: float = 0.999,
    gates_lr: float = 1e-4,
    residual_lr: float = 1e-3,
    reference: Literal["tokens", "thoughts"] = "tokens",
) -> Model:
    """Thoughts that are read through a gate (`policies/thoughts.py`), in training and ever after.

    A model that has such thoughts already keeps them. On a GPU such text is decoded without captured graphs.

    marker        ends the thoughts of a turn, and is none itself; where it is never said, the whole turn is thought
    least, most   how much of a token's embedding is read at first: Λ is drawn so that σ(Λ)⁸ is between them. At 1 the
                  gate is closed
    gates_lr      learning rate of W_r and W_i
    residual_lr   learning rate of Λ
    reference     what the reference of a KL term reads: tokens alone, or thoughts through the gates of the start
    """
    policy: Any = seat.policy
    made = policy.thoughts
    if not isinstance(made, Gated):
        seed = stable_hash("thoughts", seat.options.seed) % 2**31
        width = policy.model.config.width
        made = Gated(width, marker=marker, least=least, most=most, reference=reference, seed=seed)
    gates = [name for name, _ in made.named_parameters() if name.startswith("gate_")]
    made.rates = {**dict.fromkeys(gates, gates_lr), "residual": residual_lr}
    return Model(made, thinks=True, learn=lambda model, collected, _: _let_in(policy, model, collected))


def _let_in(policy: Any, thoughts: Gated, collected: Experience) -> dict[str, float]:
    """`share`: √(1 − a²) on average, how much of a thought is not its token; `thoughts`: how many an answer has."""
    tokens, at = collected.context.ragged("tokens"), collected.context.ragged("vectors_at")
    first = tokens.offsets[:-1].repeat_interleave(at.lengths)
    said = tokens.values[first + at.values].to(policy.device)
    kept = thoughts.kept(policy.model.embed(said[None])[0].float())
    share = (1 - kept.square()).clamp(min=0).sqrt().mean() if len(said) else torch.zeros(())
    return {"share": float(share), "thoughts": len(said) / max(1, len(at))}


TINY = {
    **{name: value for name, value in GRPO_TINY.items() if name != "update.schedule.warmup"},
    "sample.prompts": 16,
    "sample.temperature": 1.0,
    "models.gated.marker": "#",
    "models.gated.gates_lr": 3e-3,
    "models.gated.residual_lr": 3e-2,
    "update.schedule": "constant",
    "update.schedule.warmup": 10,
    "update.clip": 1.0,
    "update.weight_decay": 0.0,
}
"""As for GRPO; gates and Λ learn ten and a hundred times as fast as the rest, where 20 and 200 times are published."""
PUBLISHED: Published = {
    "Yueeeeeeee/HRPO, hrpo_gsm8k.py": {
        "sample.prompts": 8,
        "sample.group": 4,
        "sample.temperature": 0.5,
        "models.gated.marker": "####",
        "models.gated.least": 0.99,
        "models.gated.most": 0.999,
        "models.gated.gates_lr": 1e-4,
        "models.gated.residual_lr": 1e-3,
        "regularise.kl.weight": 0.005,
        "update.lr": 5e-6,
        "update.beta1": 0.9,
        "update.beta2": 0.99,
        "update.weight_decay": 0.1,
        "update.clip": 0.1,
        "update.schedule": "cosine",
        "update.schedule.warmup": 0.1,
        "update.epochs": 1,
        "update.minibatches": 1,
    },
    "Yueeeeeeee/HRPO, unsloth/models/rl_replacements.py": {
        "models.gated.reference": "tokens",
        "regularise.kl.estimator": "k3",
        "reduce": "sequence_mean",
    },
}
"""Batches of 8 and four of them to an update are 32 answers, 8 prompts of 4. It trains LoRA of rank 32 and α 64
(`--lora 32`); other tasks have groups of 8 and a least of 0.95 to 0.98."""
CLAIM = Learns(
    "Where an answer has too few tokens to write every hop of a look-up down, thoughts that carry more than their "
    "token find more right answers than GRPO does after as many episodes.",
    method="hrpo",
    over="grpo",
    world="hops",
    budget="episodes=7680",
    metric="success",
    also=("area", "gated_share", "gated_thoughts", "entropy", "total_decisions"),
    shows=(Shows("thoughts", least=1.0),),
)


@method("hrpo@1", paper=93, base="grpo", presets={"tiny": TINY}, claim=CLAIM, published=PUBLISHED)
def hrpo() -> OnPolicy:
    """Hybrid Reasoning Policy Optimization (arXiv 2505.18454): GRPO whose model thinks in tokens and in between them.

    A drawn token says which of many it was and forgets the rest. While it thinks, this model reads after every token e
    also the mean embedding h of all that it could have drawn, weighed by its probabilities and divided by their norm (a
    mean of many embeddings is short): a⊙e + √(1 − a²)⊙(i⊙h). Tokens are still drawn, so that log-probabilities are what
    they were and GRPO needs no change. h is recorded with the answer and constant when it is learned from: gradients
    reach the gates a and i and the model, and none goes back through time.

    Gates begin almost closed, a between 0.99 and 0.999, since a model that never saw a mixture would be lost; their
    rates are 20 and 200 times the model's, or they would stay there. What is surprising: weight decay acts on Λ as well
    and by itself opens the gate, since Λ = 0 is wide open. The KL term pulls to a reference that reads the tokens
    alone, as released; `models.gated.reference=thoughts` lets it read through the gates of the start. A closed gate
    (least and most 1) is GRPO. One number is not the code's: it adds 1e-8 under the root even where a = 1, and here a
    closed gate lets nothing in.

    One update a batch keeps the ratio at 1. Answers that are given, by a teacher or in data, have no vectors and are
    read as tokens; windows, branches and mixtures of two models, which go on from tokens, are refused.
    """
    return grpo().but(
        sample=groups(prompts=8, group=4, temperature=0.5),
        models=(gated(),),
        regularise=(kl(weight=0.005, estimator="k3"),),
        update=adam(lr=5e-6, beta2=0.99, weight_decay=0.1, clip=0.1, schedule=cosine(warmup=0.1)),
    )
