"""What an adapter was trained over: which weights, and in how many bits.

That lies in a file of our own beside PEFT's, which PEFT does not look at. An adapter without it is opened over the
model that it names, as that model is.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch

from panoply.errors import PanoplyError, plain
from panoply.files import is_file, open_file, parse_json, read_json
from panoply.policies.weights import weight_files

FILE = "adapter_base.json"
PLACES, BYTES = 4096, 16
"""About so many places of a model's weights are looked at, at least one of each tensor, and so many bytes at each."""
LONGEST = 100_000_000
"""Bytes of the head of a safetensors file."""
Kind = Literal["whole", "int8", "nf4"]


class Base(TypedDict):
    """What the file says."""

    base: Kind
    dtype: Literal["float64", "float32", "bfloat16", "float16"]
    """In which it was opened, before it was brought to few bits."""
    fingerprint: str


@dataclass(frozen=True)
class Under:
    """A model that an adapter is put over."""

    folder: Path
    fingerprint: str

    @classmethod
    def of(cls, folder: Path) -> Under:
        return cls(folder, fingerprint(folder))


def read_base(folder: Path) -> Base | None:
    """What the adapter in a folder was trained over; None where nobody wrote it down."""
    return read_json(folder / FILE, Base) if is_file(folder / FILE) else None


def write_base(folder: Path, base: Kind, dtype: torch.dtype, under: Under | None) -> None:
    """Write it down; new weights are `under` an adapter without a folder of their own."""
    name = str(dtype).removeprefix("torch.")
    said = {"base": base, "dtype": name, "fingerprint": under.fingerprint if under else ""}
    (folder / FILE).write_text(json.dumps(said, indent=2) + "\n")


def check_base(folder: Path, under: Under) -> None:
    """Refuse a model under an adapter that is another one than it was trained over, whatever its shapes."""
    trained = read_base(folder)
    if trained is None or trained["fingerprint"] in ("", under.fingerprint):
        return
    anyway = f"; if they are the same numbers saved anew, empty the fingerprint in {plain(folder / FILE)}"
    raise PanoplyError(
        f"The adapter in {plain(folder)} was trained over other weights than those in {plain(under.folder)}: its base "
        f"has the fingerprint {plain(trained['fingerprint'])[:16]}, and these have {under.fingerprint}. Put that base "
        f"back there, since over another one the adapter is another model{'' if in_checkpoint(folder) else anyway}."
    )


def in_checkpoint(folder: Path) -> bool:
    """Whether a model's folder is a checkpoint's, where nothing may be changed."""
    return is_file(folder.parent / "manifest.json")


def fingerprint(folder: Path) -> str:
    """Sixteen hex digits of a model's weights on disk: of their names, types and shapes, and of bytes here and there.

    So little is read that it takes no time to speak of, and other weights of the same shapes differ nearly everywhere.
    """
    heads = {file: _head(file) for file in weight_files(folder)}
    each = max(1, PLACES // max(1, sum(len(tensors) for _, tensors in heads.values())))
    seen: dict[str, bytes] = {}
    for file, (begin, tensors) in heads.items():
        with open_file(file) as opened:
            for name, (said, low, high) in tensors.items():
                read = _here_and_there(opened.fileno(), begin + low, high - low, each)
                seen[name] = f"{name} {said}".encode("utf-8", "replace") + read
    digest = hashlib.sha256()
    for name in sorted(seen):
        digest.update(seen[name])
    return digest.hexdigest()[:16]


def _head(file: Path) -> tuple[int, dict[str, tuple[str, int, int]]]:
    """Where the numbers of a safetensors file begin; of each tensor its type and shape, and its ends from there."""
    with open_file(file) as opened:
        size = int.from_bytes(opened.read(8), "little")
        head: dict[str, Any] = parse_json(opened.read(min(size, LONGEST)), f"The head of {plain(file)}", dict)
        room = os.fstat(opened.fileno()).st_size - 8 - size
    found = {}
    for name, one in head.items():
        match one:
            case {"dtype": dtype, "shape": shape, "data_offsets": [int(low), int(high)]} if (
                0 <= low <= high <= room
            ):
                found[name] = (f"{dtype} {shape}", low, high)
            case _ if name != "__metadata__":
                raise PanoplyError(
                    f"{plain(file)} is corrupt or cut short: {plain(name)} has no place in it."
                )
    return 8 + size, found


def _here_and_there(handle: int, begin: int, size: int, places: int) -> bytes:
    """Bytes of a tensor, at so many places between its ends."""
    steps = (size * (2 * place + 1) // (2 * places) for place in range(places))
    return b"".join(os.pread(handle, min(BYTES, size - at), begin + at) for at in steps)
