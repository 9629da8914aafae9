"""Control worlds: small networks, environments in lockstep, returns on held-out starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from panoply.costs import Lengths
from panoply.errors import PanoplyError
from panoply.evaluation.returns import evaluate as evaluate
from panoply.experience import Column, Experience
from panoply.loops.samples import Decode, Verdict
from panoply.lora import Lora, Planned
from panoply.planning import Options
from panoply.policies import control
from panoply.policies.control import ControlPolicy, ValueNet
from panoply.policies.folder import read_config
from panoply.policies.unrolled import Unrolled
from panoply.regimes import Method
from panoply.rollout.control import ControlCollector as collector  # noqa: N813
from panoply.which import model_folder
from panoply.worlds.control.world import Box, ControlWorld, Discrete

__all__ = ["collector", "evaluate"]
MEASURED = 100
"""Held-out starts from which something is measured by name."""


def _return(world: ControlWorld, policy: ControlPolicy, seed: int) -> float:
    return evaluate(world, policy, MEASURED, seed=seed, greedy=False).sampled


def _greedy_return(world: ControlWorld, policy: ControlPolicy, seed: int) -> float:
    return evaluate(world, policy, MEASURED, seed=seed).greedy


MEASURES: dict[str, Callable[..., float]] = {"return": _return, "greedy-return": _greedy_return}


def open_policy(
    source: str, world: ControlWorld, options: Options, settings: Mapping[str, Any]
) -> ControlPolicy:
    return control.open_policy(source, world, options.seed, options.device, settings)


def critic(
    policy: ControlPolicy,
    opened: Callable[[], ControlPolicy],
    seed: int,
    outputs: tuple[str, ...] = ("value",),
) -> tuple[ValueNet, Callable[[ValueNet, Experience], dict[str, Column]]]:
    return ValueNet.of(policy, seed, outputs), ValueNet.columns


def scorer(policy: ControlPolicy, world: ControlWorld, needs: frozenset[str]) -> ControlPolicy | Unrolled:
    return Unrolled(policy, world) if "earns" in needs else policy


def policy_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    made = dataclasses.asdict(control.spec_from(settings))
    return {name: made[name] for name in settings}


FORMS: dict[str, dict[str, Any]] = {
    "squashed": {"squash": True, "std": "state"},
    "bounded": {"head": "bounded", "std": "fixed"},
    "noisy": {"head": "bounded"},
    "certain": {"head": "certain"},
    "values": {"head": "values", "atoms": 1},
    "atoms": {"head": "values"},
    "balanced": {"balanced": True},
}


def policy_form(needs: frozenset[str], world: ControlWorld) -> dict[str, Any]:
    known = {**FORMS, "staged": {"stages": world.horizon or 0}}
    forms = [known[need.removeprefix("policy:")] for need in sorted(needs) if need.startswith("policy:")]
    return {name: value for form in forms for name, value in form.items()}


def policy_inert(settings: Mapping[str, Any], world: ControlWorld) -> list[tuple[str, str]]:
    spec = control.spec_from(settings)
    found: dict[str, str] = {}
    if not isinstance(world.action, Box):
        found |= dict.fromkeys(("squash", "std", "log_std"), f"the actions of {world.name} are choices")
    elif spec.head != "distribution":
        found["squash"] = f"the head {spec.head} has bounds of its own"
    if spec.head in ("certain", "values"):
        found |= dict.fromkeys(("std", "log_std"), f"the head {spec.head} has no deviation")
    if spec.std == "state":
        found.setdefault("log_std", "the deviation is an output of the network (policy.std=state)")
    if spec.head != "values":
        found |= dict.fromkeys(
            ("epsilon", "atoms", "span"), "only a policy of values has it (policy.head=values)"
        )
    elif spec.atoms == 1:
        found["span"] = "returns are not spread over points (policy.atoms=1)"
    if not spec.balanced:
        found["betas"] = "there is no coefficient (policy.balanced)"
    return list(found.items())


def run_form(needs: frozenset[str], world: ControlWorld) -> dict[str, Any]:
    """A policy that changes with time learns one turn a step."""
    return {"steps": world.horizon} if "policy:staged" in needs and world.horizon else {}


def affords(world: ControlWorld) -> frozenset[str]:
    found = {"time limit"} if world.horizon else set()
    found |= {"several seats"} if world.seats > 1 else set()
    if isinstance(world.action, Box | Discrete):
        found.add("continuous actions" if isinstance(world.action, Box) else "discrete actions")
    return frozenset(found)


def differs(world: ControlWorld, other: ControlWorld) -> str:
    if world.observation != other.observation:
        return "observation"
    return "" if world.action == other.action else "action"


def check_source(source: str, world: ControlWorld) -> None:
    if source not in ("start", "fresh"):
        read_config(model_folder(source))


def check_policy(source: str, world: ControlWorld, settings: Mapping[str, Any]) -> None:
    return None


def check_model(source: str, world: ControlWorld, method: Method) -> None:
    return None


def reads(source: str, world: ControlWorld, settings: Mapping[str, Any]) -> str:
    return ""


def check_lora(
    source: str, world: ControlWorld, rank: int, settings: Lora, chosen: frozenset[str], dtype: str
) -> None:
    raise PanoplyError(f"--lora is for models of text, and {world.name} is a world of control.")


def adapted(source: str, world: ControlWorld, rank: int, settings: Lora) -> Planned:
    raise PanoplyError(f"--lora is for models of text, and {world.name} is a world of control.")


def remark(source: str, world: ControlWorld, settings: Lora) -> str:
    return ""


def runs_natively(source: str, world: ControlWorld, settings: Lora) -> bool:
    return True


def runs(source: str, world: ControlWorld) -> str:
    return ""


def check_blocks(source: str, world: ControlWorld, needs: frozenset[str]) -> None:
    return None


def check_output(output: str, of: str) -> None:
    if of.startswith("mix:"):
        raise PanoplyError(
            f"There is no {of} here: logits of a vocabulary are mixed, and a control policy has none."
        )
    control.supplied(output)


def width(policy: ControlPolicy) -> int:
    return max(policy.spec.hidden, default=1)


def decode(policy: ControlPolicy) -> Decode | None:
    return None


def verdict(world: ControlWorld) -> Verdict | None:
    return None


def after_step(policy: ControlPolicy, experience: Experience) -> None:
    policy.learn_statistics(experience)


def shapes(source: str, world: ControlWorld, settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    policy = control.open_policy(source, world, 0, "cpu", settings)
    return {name: tuple(weight.shape) for name, weight in policy.named_parameters()}


def experts_at_once(source: str, world: ControlWorld) -> int:
    return 0


def lengths(world: ControlWorld, longest: int | None) -> Lengths:
    steps = min(longest or world.horizon or 1000, world.horizon or 1000)
    return Lengths(0, steps, steps)
