"""Worlds of text: a transformer, the engine, success on held-out problems."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from panoply.costs import Lengths
from panoply.errors import PanoplyError, needs_extra, plain
from panoply.evaluation.coverage import coverage
from panoply.evaluation.held_out import evaluate as evaluate
from panoply.experience import Column, Experience
from panoply.loops.samples import Decode, Verdict
from panoply.lora import Lora, Planned
from panoply.parts import Part
from panoply.planning import Options
from panoply.policies import build, taps
from panoply.policies.text import TextPolicy
from panoply.policies.value import NATIVE, ValueModel
from panoply.ranges import check_range
from panoply.regimes import Method
from panoply.rollout.text import Collector
from panoply.rollout.text import Collector as collector  # noqa: N813
from panoply.values import parse
from panoply.worlds.world import TextWorld

VALUED = ("critic", "token_values")
"""Models that are made of the policy's own layers."""
MEASURED = 64
"""Held-out problems on which something is measured by name."""


def _success(world: TextWorld, policy: TextPolicy, seed: int) -> float:
    return evaluate(world, policy, MEASURED, seed=seed, greedy=False).sampled


def _pass_at(world: TextWorld, policy: TextPolicy, seed: int, k: int) -> float:
    return coverage(world, policy, MEASURED, attempts=k, ks=(k,), seed=seed).pass_at[k]


def _distinct(world: TextWorld, policy: TextPolicy, seed: int, k: int) -> float:
    return coverage(world, policy, MEASURED, attempts=k, ks=(k,), seed=seed).distinct


@torch.no_grad()
def _entropy(world: TextWorld, policy: TextPolicy, seed: int, k: int) -> float:
    """H of what block K alone would predict, over the policy's own answers: the flow of entropy through its depth."""
    collect = Collector(world, policy, seed, split="test")
    answers = collect.episodes(world.held_out(MEASURED))
    need = f"entropy:{k}"
    return float(policy.score(answers, frozenset({need}))[need].double().mean())


def _thoughtless(world: TextWorld, policy: TextPolicy, seed: int) -> float:
    """Success where vectors that a model feeds back to itself are read as zeros: what is lost is what they carried."""
    if policy.thoughts is None:
        return _success(world, policy, seed)
    policy.thoughts.empty = True
    try:
        return _success(world, policy, seed)
    finally:
        policy.thoughts.empty = False


@torch.no_grad()
def _kl(world: TextWorld, policy: TextPolicy, seed: int) -> float:
    """KL(π‖start) of whole answers, in nats: the mean of Σ log π/π_start over own answers, four a problem."""
    answers = Collector(world, policy, seed, split="test").episodes(world.held_out(MEASURED), 4)
    start = build.open_policy("start", world, seed, "cpu")
    apart = [one.score(answers)["logp"].double().cpu() for one in (policy, start)]
    return float((apart[0] - apart[1]).sum() / len(answers.by("episode")))


def _regularised(world: TextWorld, policy: TextPolicy, seed: int, k: int) -> float:
    """What sampled answers are worth, less a K-th of that KL: what methods with β = 1/K are to make large."""
    return _success(world, policy, seed) - _kl(world, policy, seed) / k


MEASURES: dict[str, Callable[..., float]] = {
    "success": _success,
    "pass@K": _pass_at,
    "distinct@K": _distinct,
    "entropy@K": _entropy,
    "thoughtless": _thoughtless,
    "kl": _kl,
    "regularised@K": _regularised,
}

__all__ = ["Collector", "collector", "evaluate"]


def open_policy(source: str, world: TextWorld, options: Options, settings: Mapping[str, Any]) -> TextPolicy:
    context = settings.get("context", 0)
    return build.open_policy(source, world, options.seed, options.device, options.dtype, context)


def critic(
    policy: TextPolicy, opened: Callable[[], TextPolicy], seed: int, outputs: tuple[str, ...] = ("value",)
) -> tuple[ValueModel, Callable[[ValueModel, Experience], dict[str, Column]]]:
    """A copy of the start with a head of zeros; a text that was cut is worth nothing more."""
    return ValueModel.of(opened(), outputs), lambda model, experience: dict(model.score(experience))


def scorer(policy: TextPolicy, world: TextWorld, needs: frozenset[str]) -> TextPolicy:
    _check_masks(getattr(policy, "masked", False), needs)  # a judge made of a model is not one that goes on
    return policy


def _check_masks(masked: bool, needs: frozenset[str]) -> None:
    """A masked-diffusion model has no probability of a next token, and others none of a masked one."""
    if masked and "world:masks" not in needs:
        raise PanoplyError(
            "The model is a masked-diffusion one, which has no probability of a next token: train it with bgpo or "
            "masked-sft."
        )
    if not masked and "world:masks" in needs:
        raise PanoplyError(
            "The method trains masked-diffusion models, and this model is none: is_causal in its config.json is not "
            "false."
        )


def policy_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`context` alone: the longest sequence, in tokens, that a model is opened for."""
    for name in settings:
        if name != "context":
            raise PanoplyError(
                f"policy.{name} has no effect: a text policy is the model named by --model, of which policy.context "
                "alone, its longest sequence, can be chosen."
            )
    found = {name: parse(f"policy.{name}", str(value), int) for name, value in settings.items()}
    for name, value in found.items():
        check_range(f"policy.{name}", value, "at least 2")
    return found


def policy_form(needs: frozenset[str], world: TextWorld) -> dict[str, Any]:
    return {}


def policy_inert(settings: Mapping[str, Any], world: TextWorld) -> list[tuple[str, str]]:
    return []


def run_form(needs: frozenset[str], world: TextWorld) -> dict[str, Any]:
    return {}


def affords(world: TextWorld) -> frozenset[str]:
    """An answer of one turn can be forked anywhere: nothing of its world is under way."""
    return frozenset({"fork"} if type(world).play is TextWorld.play else ())


def differs(world: TextWorld, other: TextWorld) -> str:
    alike = world.tokenizer.files["tokenizer.json"] == other.tokenizer.files["tokenizer.json"]
    return "" if alike else "alphabet"


def check_source(source: str, world: TextWorld) -> None:
    build.model_source(source, world)


def check_policy(source: str, world: TextWorld, settings: Mapping[str, Any]) -> None:
    build.config_of(source, world, settings.get("context", 0))


def check_model(source: str, world: TextWorld, method: Method) -> None:
    needs = method.needs()
    try:
        folder = build.model_source(source, world)
        judge, masked = folder is not None and build.is_judge(folder), build.is_masked(source, world)
    except PanoplyError:
        return  # said by whoever opens the model, which need not be there yet
    if "judged" in needs and folder is not None and judge:
        build.check_judge(source, folder, cast(Part, method.slots()["data"]).settings(), needs)
        return
    build.check_folder(source, world)
    valued = any(model.info.name in VALUED for model in getattr(method, "models", ()))
    if ("judged" in needs or valued) and build.slower(source, world):
        raise PanoplyError(NATIVE)
    if method.regime in ("on_policy", "dataset") and "judged" not in needs:
        _check_masks(masked, needs)


def check_lora(
    source: str, world: TextWorld, rank: int, settings: Lora, chosen: frozenset[str], dtype: str
) -> None:
    try:
        build.model_shapes(source, world)
    except PanoplyError:
        return  # said by whoever opens the model, which need not be there yet
    if build.taken_out(source, world):
        raise PanoplyError(
            f"Adapters of a model that reads more than text would fit none of other libraries: save its language model "
            f"first, panoply.load_policy('{source}').save('NEW'), and train that with --lora."
        )
    own = build.adapted(source, world, rank, settings, chosen).settings
    if not runs_natively(source, world, own) and importlib.util.find_spec("peft") is None:
        raise needs_extra("peft", "peft", "DoRA, or --lora of a model that transformers runs,")
    before = build.trained_in(source, world)
    if own.base != "whole" and before not in ("", dtype):
        raise PanoplyError(
            f"The adapter in {plain(source)} was trained over {own.base} of {before}, and over that of {dtype} it is "
            f"another model: go on with --dtype {before}."
        )


def adapted(source: str, world: TextWorld, rank: int, settings: Lora) -> Planned:
    return build.adapted(source, world, rank, settings)


def remark(source: str, world: TextWorld, settings: Lora) -> str:
    """What to know before the model is opened."""
    if settings.dora:
        return (
            "DoRA goes through PEFT, which is several times slower than LoRA of this library's own decoder."
        )
    if settings.base != "whole" and build.experts_at_once(source, world):
        return f"The model's experts are kept whole: lora.base={settings.base} is of layers under adapters."
    return build.slower(source, world) or build.taken_out(source, world)


def runs_natively(source: str, world: TextWorld, settings: Lora) -> bool:
    return not settings.dora and build.runs_natively(source, world)


def runs(source: str, world: TextWorld) -> str:
    kind = build.layout_of(source, world)
    return f"'{kind}' runs natively, on a GPU in captured graphs and fused blocks." if kind else ""


def reads(source: str, world: TextWorld, settings: Mapping[str, Any]) -> str:
    return build.reads(source, world, settings.get("context", 0))


def check_blocks(source: str, world: TextWorld, needs: frozenset[str]) -> None:
    asked = [(taps.block_of(need), need) for need in sorted(needs)]
    if not any(block for block, _ in asked):
        return
    try:
        shapes = build.model_shapes(source, world)
    except PanoplyError:
        return  # said by whoever opens the model, which need not be there yet
    blocks = len({name.split(".layers.")[1].split(".")[0] for name in shapes if ".layers." in name})
    for block, need in asked:
        if block and blocks and block > blocks:
            raise PanoplyError(
                f"There is no block {block} to read '{need}' off: this model has the blocks 1 to {blocks}."
            )


def check_output(output: str, of: str) -> None:
    taps.parse(output)


def width(policy: TextPolicy) -> int:
    return int(policy.model.config.width)


def decode(policy: TextPolicy) -> Decode | None:
    return policy.tokenizer.decode


def verdict(world: TextWorld) -> Verdict | None:
    return world.verdict


def after_step(policy: TextPolicy, experience: Experience) -> None:
    return None


def shapes(source: str, world: TextWorld, settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return build.model_shapes(source, world)


def experts_at_once(source: str, world: TextWorld) -> int:
    return build.experts_at_once(source, world)


def lengths(world: TextWorld, longest: int | None) -> Lengths:
    prompt, turns = len(world.task("train", 0).prompt), world.turn_cap
    answer = turns * min(longest or world.max_tokens, world.max_tokens)
    return Lengths(prompt, answer, answer + (turns - 1) * prompt if world.markov else answer)
