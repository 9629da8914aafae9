"""What a control world is: batches of environments, NumPy in and NumPy out, that are reset by whoever steps them."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from panoply.errors import PanoplyError
from panoply.parts import check, check_fields, types_of
from panoply.seeds import stable_hash
from panoply.worlds.measures import Measuring

if TYPE_CHECKING:
    import torch

Floats = NDArray[np.float32]
Array = NDArray[Any]

# ------------------------------------------------------------------ spaces


@dataclass(frozen=True)
class Discrete:
    """One of n: an action, or an observation that is a number (a policy makes it one-hot)."""

    n: int

    @property
    def shape(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class MultiDiscrete:
    """Several choices at once, one of nvec[i] each."""

    nvec: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.nvec),)


@dataclass(frozen=True)
class Box:
    """An array of numbers, float32; bounds are flat, or empty where there are none."""

    shape: tuple[int, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    nodes: tuple[int, int] = (0, 0)
    """Of an observation: how many things of one kind it begins with, and by how many numbers each is described."""

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


Space = Discrete | MultiDiscrete | Box
_SPACES: dict[str, type[Any]] = {"discrete": Discrete, "multidiscrete": MultiDiscrete, "box": Box}


def space_to_json(space: Space) -> dict[str, Any]:
    return {"space": type(space).__name__.lower(), **dataclasses.asdict(space)}


def space_from_json(data: Mapping[str, Any], where: str = "a space") -> Space:
    """A space as it was saved; `where` begins the sentence about one that is none."""
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k != "space"}
    kind = _SPACES.get(str(data.get("space")))
    if kind is None or fields.keys() - (known := {f.name for f in dataclasses.fields(kind)}):
        raise PanoplyError(f"{where} cannot be used: it is no space of ours.")
    hints = types_of(kind)
    given = {name: check(f"{where}: {name}", fields[name], hints[name]) for name in known & fields.keys()}
    try:
        made: Space = kind(**given)
    except TypeError:
        raise PanoplyError(f"{where} cannot be used: it does not say how large it is.") from None
    sizes = (
        (made.n,)
        if isinstance(made, Discrete)
        else made.nvec
        if isinstance(made, MultiDiscrete)
        else made.shape
    )
    if not all(1 <= size <= 2**24 for size in sizes) or (isinstance(made, Box) and made.size > 2**31):
        raise PanoplyError(f"{where} cannot be used: no space is as large as {sizes}.")
    return made


def show_space(space: Space) -> str:
    """A space in words."""
    if isinstance(space, Discrete):
        return f"one of {space.n}"
    if isinstance(space, MultiDiscrete):
        return f"{len(space.nvec)} choices, of {', '.join(map(str, space.nvec))}"
    size = " × ".join(map(str, space.shape)) or "1"
    if not space.low:
        return f"{size} numbers"
    return f"{size} numbers from {min(space.low):g} to {max(space.high):g}"


# ------------------------------------------------------------------ environments


class Step(NamedTuple):
    """What one step of a batch of environments gave, an array each."""

    reward: Array
    terminated: NDArray[np.bool_]
    """Ended by what was done: nothing is earned from here on."""
    truncated: NDArray[np.bool_]
    """Ended by a limit: more would have been earned, so the value of what is seen now still counts."""
    signals: Mapping[str, Array] = {}
    """Other numbers than the reward, such as `success` or `cost`."""


class Envs(ABC):
    """A batch of environments in lockstep. Nothing resets itself (mode *manual*).

    After a step, `observations` is what each environment shows now: the *final* observation where the episode ended.
    It stays until `reset` is called there. Arrays may be overwritten by the next call: keep copies.
    """

    size: int
    observations: Array
    """[size, …]: float32, or whole numbers for a `Discrete` observation."""
    masks: NDArray[np.bool_] | None = None
    """[size, n] legal actions, for worlds with discrete actions that have such a thing."""
    acting: NDArray[np.bool_] | None = None
    """[size] whose move it is, in games in which seats take turns; None where all act at once."""

    @abstractmethod
    def reset(self, where: Array, seeds: Array) -> None:
        """Start episodes in the rows `where`. The same seed and actions give the same episode.

        In a world of several seats, `seats` rows after one another are one game: they are reset together, to one seed.
        """

    @abstractmethod
    def step(self, actions: Array) -> Step:
        """Act in every row: whole numbers [size] or [size, k], or float32 [size, d].

        A row whose episode has ended is stepped too; what it gives is not looked at. Nor is what a waiting row does;
        what it is paid counts.
        """

    def fork(self, rows: Array) -> Envs:
        """Another batch: copies of those rows as they stand. Only where the world says so (`access`, `fork`)."""
        raise PanoplyError(f"{type(self).__name__} cannot be copied as it stands.")

    def snapshot(self) -> Mapping[str, Array] | None:
        """Everything needed to go on from here; None where an episode is restored by repeating its actions."""
        return None

    def restore(self, kept: Mapping[str, Array]) -> None:
        raise NotImplementedError

    def render(self, row: int) -> NDArray[np.uint8] | None:
        """An RGB picture [height, width, 3] of one environment, where there is one."""
        return None

    def failures(self) -> dict[str, int]:
        """What went wrong inside environments, and how often. The episode was cut there (truncated)."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Let go of processes and windows."""


# ------------------------------------------------------------------ worlds


@dataclass(frozen=True)
class Start:
    """A task of a control world: the seed an episode starts from."""

    id: int
    """Hash of world and seed: the same in every batch, run and process."""
    seed: int


class ControlWorld(Measuring, ABC):
    """Somewhere to act. A world is a frozen dataclass whose fields are its options, registered with `@world`."""

    medium: ClassVar[str] = "control"
    access: ClassVar[frozenset[str]] = frozenset({"step", "verify"})
    """What a method may ask for: `step` (to stop in the middle of episodes, which a game whose seats take turns cannot
    have, since a decision is paid after the others' moves), `verify` (it says what was earned), `fork` (snapshots),
    `reset_to`, `model` (exact transitions), `params`, `differentiable`."""
    preset: ClassVar[str] = "control"
    settings: ClassVar[Mapping[str, Any]] = {
        "reward.name": "reward",
        "sample.name": "reward",
        "run.held_out": 20,
    }
    """Settings of a method that this world asks for, where the method has them and the user says nothing."""
    defaults: ClassVar[Mapping[str, Any]] = {
        "sample.prompts": 4,
        "sample.group": 8,
        "reward.beta": 0.0,
        "regularise.kl.weight": 0.0,
        "update.lr": 1e-3,
        "update.clip": 0.5,
        "run.steps": 100,
    }
    """The same for methods that have no numbers of their own for control."""
    horizon: int | None = None
    """The time limit; reaching it truncates an episode."""
    seats: int = 1
    """How many play one game. Each has a row of its own, so one policy that plays all of them plays against itself."""
    solved: float | None = None
    """The mean return that counts as solved."""
    judged_by: ClassVar[str] = "return"
    """What held-out starts are judged by, and the best checkpoint chosen."""

    def __post_init__(self) -> None:
        check_fields(self, self.name)

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @property
    @abstractmethod
    def observation(self) -> Space: ...

    @property
    @abstractmethod
    def action(self) -> Space: ...

    @property
    def keys(self) -> frozenset[str]:
        """Keys of its decisions beside those that all have."""
        return frozenset({"game", "agent", "step"}) if self.seats > 1 else frozenset()

    @abstractmethod
    def envs(self, size: int) -> Envs:
        """A batch of environments. They show nothing of worth before their first `reset`.

        size   rows: as many as there are games, times `seats`
        """

    def shown(self) -> Envs:
        """One environment, or game, that can be rendered, where there is one."""
        return self.envs(self.seats)

    def signals(self) -> frozenset[str] | None:
        """The names of the signals a step gives; None where that shows only in play."""
        return frozenset({"reward"})

    def task(self, split: str, index: int) -> Start:
        """Start number `index` of a split: always the same one, and there is no last one."""
        if split not in ("train", "test"):
            raise PanoplyError(f"There is no split '{split}': there are train and test.")
        seed = 2 * (stable_hash("start", split, index) % 2**30) + (split == "test")
        return Start(stable_hash("task", self.name, seed), seed)

    def failures(self) -> dict[str, int]:
        """Why episodes were cut short, and how often."""
        return {}

    def listen(self, say: Callable[[str], None]) -> None:
        """Told by a run where to say what a user must know at once."""


@runtime_checkable
class Differentiable(Protocol):
    """A world whose dynamics run in torch, and in which chance does not depend on what is done."""

    def unrolled(
        self,
        act: Callable[[torch.Tensor], torch.Tensor],
        seeds: Array,
        steps: int,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """[rows, steps] rewards of episodes from these seeds under a policy of observations; gradients flow."""
