"""How weights get from who learns to those who sample: what of a policy moves, once for all of them.

A publisher makes a *parcel*, which is plain and handed to every sampler; the sampler opens it where it is. Whichever
way it went, the sampler answers with the checksum of what it then has, and a publication that did not arrive stops the
run (`policies/moving.py`). Of a model with adapters the adapters alone are sent.

`Stored` is the default: the cluster's object store is shared memory on one machine, and is copied once to each other
machine. `Files` needs a disk that all machines see, and is how samplers in the midst of answers find new weights.
`Broadcast` and `Shared` are for GPUs; no run of this library's tests has used them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from panoply.errors import PanoplyError
from panoply.policies.moving import Weights, checksum
from panoply.scale import wire

Parcel = dict[str, Any]
"""`by` says which publisher opens it; all else is plain, or what `Cluster.put` gave."""


class Publisher(Protocol):
    def parcel(self, weights: Weights, version: int) -> Parcel:
        """What every sampler is handed."""

    def flow(self, weights: Weights) -> None:
        """Called when all have been handed it, where something is still to be sent."""

    def close(self) -> None: ...


class Stored:
    """Through the cluster's object store: shared memory, copied once to every other machine."""

    def __init__(self, put: Callable[[Any], Any]):
        self.put = put

    def parcel(self, weights: Weights, version: int) -> Parcel:
        return {"by": "stored", "content": self.put(wire.packed_weights(weights))}

    def flow(self, weights: Weights) -> None:
        """All of it is there."""

    def close(self) -> None:
        """The store lets go of what nobody refers to."""


class Files:
    """Through a folder: in memory on one machine, on a disk that all machines see, otherwise.

    A file is written beside its place and renamed, so that who looks finds a whole one; the last `keep` stay. `own`:
    the folder goes when it is closed, as one without a name does.
    """

    def __init__(self, folder: Path | None = None, keep: int = 2, own: bool = False):
        shared = Path("/dev/shm")
        near = shared if folder is None and shared.is_dir() and os.access(shared, os.W_OK) else None
        self.own = own or folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="panoply-weights-", dir=near))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.keep = keep

    def parcel(self, weights: Weights, version: int) -> Parcel:
        place = self.folder / f"{version:09d}.safetensors"
        hidden = place.with_suffix(".part")
        kept = {name: weight.detach().cpu().contiguous().clone() for name, weight in weights.items()}
        save_file(kept, hidden, metadata={"checksum": checksum(kept)})
        hidden.replace(place)
        for old in sorted(self.folder.glob("*.safetensors"))[: -self.keep]:
            old.unlink(missing_ok=True)
        return {"by": "files", "path": str(place)}

    def flow(self, weights: Weights) -> None:
        """All of it is there."""

    def close(self) -> None:
        if self.own:
            shutil.rmtree(self.folder, ignore_errors=True)

    @staticmethod
    def read(path: Path) -> tuple[Weights, str]:
        """Weights, and the checksum that they had when they were written."""
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()["checksum"]  # noqa: SIM118

    @staticmethod
    def newest(folder: str | Path) -> tuple[int, Path] | None:
        """The newest weights of a folder and their version."""
        found = sorted(Path(folder).glob("*.safetensors"))
        return (int(found[-1].stem), found[-1]) if found else None


class Broadcast:
    """Between GPUs: every rank of a process group has joined before (`torch.distributed`, NCCL); rank 0 sends."""

    def __init__(self, group: Any = None, device: torch.device | str = "cuda"):
        self.group, self.device = group, device

    def parcel(self, weights: Weights, version: int) -> Parcel:
        shapes = {name: (tuple(w.shape), str(w.dtype).removeprefix("torch.")) for name, w in weights.items()}
        return {"by": "broadcast", "shapes": shapes}

    def flow(self, weights: Weights) -> None:
        for name in sorted(weights):
            torch.distributed.broadcast(weights[name].detach().to(self.device).contiguous(), 0, self.group)

    def close(self) -> None:
        """The group is its maker's."""


class Shared:
    """Between two processes of one GPU: handles of memory (CUDA IPC), which are read where they are."""

    def parcel(self, weights: Weights, version: int) -> Parcel:
        from torch.multiprocessing.reductions import reduce_tensor

        handles: Any = {name: reduce_tensor(weight.detach().contiguous()) for name, weight in weights.items()}  # type: ignore[no-untyped-call]
        return {"by": "shared", "handles": handles}

    def flow(self, weights: Weights) -> None:
        """All of it is there."""

    def close(self) -> None:
        """Handles end with the tensors."""


def opened(parcel: Parcel, content: Any = None, device: torch.device | str = "cpu") -> Weights:
    """The weights of a parcel, where a sampler is. `content` is what the object store had of it."""
    by = parcel["by"]
    if by not in OPENED:
        raise PanoplyError(f"Nobody here opens weights that were sent by '{by}'.")
    return OPENED[by](parcel, content, device)


def _stored(parcel: Parcel, content: Any, device: Any) -> Weights:
    return wire.unpacked_weights(content)


def _file(parcel: Parcel, content: Any, device: Any) -> Weights:
    return Files.read(parcel["path"])[0]


def _received(parcel: Parcel, content: Any, device: Any) -> Weights:
    found = {}
    for name in sorted(parcel["shapes"]):
        shape, kind = parcel["shapes"][name]
        found[name] = torch.empty(shape, dtype=getattr(torch, kind), device=device)
        torch.distributed.broadcast(found[name], 0)
    return found


def _handles(parcel: Parcel, content: Any, device: Any) -> Weights:
    return {name: rebuild(*args) for name, (rebuild, args) in parcel["handles"].items()}


OPENED: Mapping[str, Callable[[Parcel, Any, Any], Weights]] = {
    "stored": _stored,
    "files": _file,
    "broadcast": _received,
    "shared": _handles,
}
