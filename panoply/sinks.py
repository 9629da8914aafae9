"""Where metrics go beside the run folder: TensorBoard and Weights & Biases, when installed and asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from panoply.errors import needs_extra, unknown

if TYPE_CHECKING:
    from panoply.run import Run


class Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, run: Run):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise needs_extra("tensorboard", "tensorboard", "The sink 'tensorboard'") from error
        self._writer = SummaryWriter(str(run.folder / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, run: Run):
        try:
            import wandb
        except ImportError as error:
            raise needs_extra("wandb", "wandb", "The sink 'wandb'") from error
        self._run = wandb.init(
            project="panoply", name=run.folder.name, dir=str(run.folder), config=run.config
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


SINKS: dict[str, Callable[[Run], Sink]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def open_sinks(names: Sequence[str], run: Run) -> list[Sink]:
    for name in names:
        if name not in SINKS:
            raise unknown("sink", name, SINKS)
    return [SINKS[name](run) for name in names]
