"""Models that are no networks: all that they are is some tensors that they remember."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from panoply.files import read_tensors

FILE = "remembered.safetensors"


class Remembered:
    """A `Model`'s model that is saved as the tensors it names, and goes on from them."""

    def state(self) -> dict[str, Tensor]:
        """All it knows, by name."""
        raise NotImplementedError

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: tensor.detach().cpu().clone() for name, tensor in self.state().items()}, folder / FILE
        )

    def load_weights(self, folder: Path) -> None:
        self.load_state(read_tensors(folder / FILE))
