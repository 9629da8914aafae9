"""Where metrics go beside the run folder: TensorBoard and Weights & Biases, when installed and asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from panoply.errors import PanoplyError, needs_extra, unknown

if TYPE_CHECKING:
    from panoply.run import Run


class Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run folder. A resumed run takes back the steps it makes again."""

    def __init__(self, run: Run, step: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise needs_extra("tensorboard", "tensorboard", "The sink 'tensorboard'") from error
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=step + 1 if step else None)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run with the folder's name and a fixed id, so that a resumed run goes on in the same one."""

    def __init__(self, run: Run, step: int):
        try:
            import wandb
        except ImportError as error:
            raise needs_extra("wandb", "wandb", "The sink 'wandb'") from error
        self._run = wandb.init(
            project="panoply",
            id=f"{run.folder.name}-{run.config['hash']}",
            name=run.folder.name,
            dir=str(run.folder),
            config=run.config,
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


SINKS: dict[str, Callable[[Run, int], Sink]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def check_sinks(names: Sequence[str]) -> None:
    """Refuse a sink that does not exist or is not installed, before anything is made or computed."""
    for name in names:
        if name not in SINKS:
            raise unknown("sink", name, SINKS)
        if importlib.util.find_spec(name) is None:
            raise needs_extra(name, name, f"The sink '{name}'")


class Careful:
    """Sinks that a run does not depend on: one that fails is named once, gets nothing more, and the run goes on."""

    def __init__(self, names: Sequence[str], run: Run, step: int, say: Callable[[str], None]):
        check_sinks(names)
        self._say = say
        self._open: dict[str, Sink] = {}
        for name in names:
            with self._trying(name):
                self._open[name] = SINKS[name](run, step)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, sink in list(self._open.items()):
            with self._trying(name):
                sink.log(step, metrics)

    def close(self) -> None:
        while self._open:
            name, sink = self._open.popitem()
            with self._trying(name):
                sink.close()

    @contextmanager
    def _trying(self, name: str) -> Iterator[None]:
        try:
            yield
        except PanoplyError:
            raise
        except (Exception, SystemExit) as error:
            self._open.pop(name, None)
            self._say(
                f"The sink '{name}' failed and gets nothing more; the run goes on without it: "
                f"{type(error).__name__}: {error}"
            )
