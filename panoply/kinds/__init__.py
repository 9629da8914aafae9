"""Kinds of world. What a run needs of one, beside its methods: a policy, a collector, an evaluation, a critic.

`panoply/kinds/<kind>.py` has the functions below; everything else of a run is the same for all kinds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, cast

if TYPE_CHECKING:
    from torch import Tensor, nn

    from panoply.costs import Lengths
    from panoply.evaluation.held_out import Evaluation
    from panoply.experience import Column, Experience
    from panoply.loops.samples import Decode, Verdict
    from panoply.lora import Lora, Planned
    from panoply.planning import Options
    from panoply.policies.text import TextPolicy
    from panoply.regimes import Method
    from panoply.worlds.control.world import ControlWorld
    from panoply.worlds.world import TextWorld


class Policy(Protocol):
    """What acts, and scores what was done."""

    def score(self, experience: Experience, needs: frozenset[str] = ...) -> dict[str, Tensor]: ...

    def remember(self, name: str, snapshot: Any, experience: Experience) -> Tensor:
        """The column `distribution@NAME`, by which `score` compares whole distributions with those of a snapshot."""

    def copy(self) -> Any:
        """A frozen snapshot that later training does not touch."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def save(self, folder: Path) -> None: ...

    def load_weights(self, folder: Path) -> None: ...

    def fingerprint(self) -> str: ...


class Collector(Protocol):
    """World and policy together: what a `sample` or `data` part is called with."""

    state: dict[str, Any]
    version: int
    models: Mapping[str, Callable[[Sequence[Any]], Tensor]]
    dealt: Any
    selves: Any
    """The run's snapshots, of which some may act."""
    members: Any
    counted: str | None
    notes: Mapping[str, float]

    def tasks(self, n: int) -> list[Any]: ...

    def episodes(self, tasks: Any, group: int | Sequence[int] = ...) -> Experience: ...

    def failures(self) -> dict[str, int]: ...

    def close(self) -> None: ...


class Kind(Protocol):
    MEASURES: Mapping[str, Callable[..., float]]
    """What is measured of a policy in every such world, by name: `(world, policy, seed)`, and K of a `NAME@K`."""

    def open_policy(
        self, source: str, world: Any, options: Options, settings: Mapping[str, Any]
    ) -> Policy: ...

    def collector(
        self, world: Any, policy: Any, seed: int, split: str = "train", needs: frozenset[str] = ...
    ) -> Collector: ...

    def evaluate(
        self,
        world: Any,
        policy: Any,
        problems: int,
        *,
        seed: int,
        watch: Callable[[int, int], None],
        split: str = ...,
        greedy: bool = ...,
        **more: Any,
    ) -> Evaluation: ...

    def critic(
        self, policy: Any, opened: Callable[[], Any], seed: int, outputs: tuple[str, ...] = ...
    ) -> tuple[Any, Callable[[Any, Experience], dict[str, Column]]]:
        """A critic beside `policy` and the columns it gives; `opened` makes another policy like the start.

        `outputs` names what it says of a state: `value` first.
        """

    def scorer(self, policy: Any, world: Any, needs: frozenset[str]) -> Any:
        """What the learner asks about decisions: the policy, or something around it that can answer more."""

    def policy_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings `policy.NAME`, checked."""

    def policy_form(self, needs: frozenset[str], world: Any) -> dict[str, Any]:
        """What the policy must be where a method needs `policy:FORM`, as settings `policy.NAME`."""

    def policy_inert(self, settings: Mapping[str, Any], world: Any) -> list[tuple[str, str]]:
        """Settings `policy.NAME` without effect in such a policy, with the reason."""

    def run_form(self, needs: frozenset[str], world: Any) -> dict[str, Any]:
        """What a run is unless it is told otherwise, where that follows from the policy's form: settings `run.NAME`."""

    def affords(self, world: Any) -> frozenset[str]:
        """What a world has that methods may need, beside what it says itself: kinds of actions."""

    def differs(self, world: Any, other: Any) -> str:
        """What keeps a policy of one world from acting in another of the kind, in a word; empty where it can."""

    def check_source(self, source: str, world: Any) -> None:
        """Refuse a starting point that is not there, before a run is made."""

    def check_policy(self, source: str, world: Any, settings: Mapping[str, Any]) -> None:
        """Refuse settings `policy.NAME` that a starting point cannot have, and one that cannot be opened."""

    def check_model(self, source: str, world: Any, method: Method) -> None:
        """Refuse a starting point that is there and cannot be what a method trains, as far as small files tell."""

    def reads(self, source: str, world: Any, settings: Mapping[str, Any]) -> str:
        """What a plan says of how long a sequence may be; mostly nothing."""

    def check_lora(
        self, source: str, world: Any, rank: int, settings: Lora, chosen: frozenset[str], dtype: str
    ) -> None:
        """Refuse adapters that a starting point cannot have; `chosen` are the settings that a user named."""

    def adapted(self, source: str, world: Any, rank: int, settings: Lora) -> Planned:
        """Which of a starting point's weights would get adapters."""

    def remark(self, source: str, world: Any, settings: Lora) -> str:
        """What a user should know before a starting point is opened, or gets adapters; most have none."""

    def runs_natively(self, source: str, world: Any, settings: Lora) -> bool:
        """Whether all of a starting point, with adapters of its own, is run by this library itself."""

    def runs(self, source: str, world: Any) -> str:
        """What a plan says of a starting point that needs no remark; mostly nothing."""

    def check_blocks(self, source: str, world: Any, needs: frozenset[str]) -> None:
        """Refuse outputs of a block that a starting point has not."""

    def check_output(self, output: str, of: str) -> None:
        """Refuse an output that the policy, or its snapshot `of`, does not have."""

    def width(self, policy: Any) -> int:
        """The size of a typical layer, by which the number of threads is chosen."""

    def decode(self, policy: Any) -> Decode | None:
        """What turns actions into text, where they are text."""

    def verdict(self, world: Any) -> Verdict | None:
        """What says in words what came of a turn that is a program, where turns are text."""

    def after_step(self, policy: Any, experience: Experience) -> None:
        """What a policy takes in between steps, beside what is learned."""

    def shapes(self, source: str, world: Any, settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """The weights a policy would have, by name."""

    def experts_at_once(self, source: str, world: Any) -> int:
        """How many experts of a layer a token goes through; 0 where there are none."""

    def lengths(self, world: Any, longest: int | None) -> Lengths:
        """How long an episode can be."""


def kind_of(world: Any) -> Kind:
    return cast(Kind, importlib.import_module(f"panoply.kinds.{world.medium}"))


def is_text(world: Any) -> TypeGuard[TextWorld]:
    """Whether episodes of a world are written."""
    return getattr(world, "medium", None) == "text"


def is_control(world: Any) -> TypeGuard[ControlWorld]:
    """Whether episodes of a world are acted in its environments."""
    return getattr(world, "medium", None) == "control"


def writes(policy: Any) -> TypeGuard[TextPolicy]:
    """Whether a policy is one of text, and no judge of it."""
    return getattr(policy, "medium", None) == "text"


def is_method(value: Any) -> TypeGuard[Method]:
    from panoply.regimes import Method

    return isinstance(value, Method)
