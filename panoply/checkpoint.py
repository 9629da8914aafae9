"""Checkpoints: folders that are whole or absent, of plain tensors and JSON. Nothing is ever unpickled."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from panoply.errors import Resumable, plain
from panoply.files import BadFile, NoFile, brief, is_folder, open_file, read_json, read_tensors
from panoply.records import Manifest, State

MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "state.safetensors"
MOST_COUNTED = 2**62
"""What numbers things stays below it."""


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file in one step: readers see the old text or the new, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with clear_errors(f"write {path}"):
            with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_unfinished(folder: Path, *names: str) -> None:
    """Remove what `write_atomically` had begun of these files when it was killed."""
    for left in (p for name in names for p in folder.glob(f".{name}.*")):
        left.unlink(missing_ok=True)


class DiskError(Resumable):
    """The disk is full, or the folder may not be written. What was finished before is untouched."""


class clear_errors:
    """Turns a full disk or a forbidden folder into one sentence."""

    def __init__(self, doing: str):
        self.doing = doing

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError):
            full = error.errno in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
        elif type(error).__name__ == "SafetensorError":
            full = "No space" in str(error) or "os error 28" in str(error)
        else:
            return
        reason = "the disk is full" if full else str(getattr(error, "strerror", None) or error)
        raise DiskError(f"Cannot {self.doing}: {reason}. Finished checkpoints are untouched.") from error


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint folder: `model/` is a Hugging Face folder, beside it the state a resumed run needs."""

    folder: Path

    @property
    def step(self) -> int:
        return int(self.folder.name.removeprefix("step-"))

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def state(self) -> State:
        return read_json(self.folder / STATE, State, finite=False)

    def tensors(self) -> dict[str, Tensor]:
        return read_tensors(self.folder / TENSORS)

    def problem(self) -> str | None:
        """Why the checkpoint cannot be used, or None."""
        try:
            listing = read_json(self.folder / MANIFEST, Manifest)["files"]
        except BadFile:
            return "it has no readable manifest"
        for name in (STATE, TENSORS, "model/"):
            if not any(listed.startswith(name) for listed in listing):
                return f"{name} is not in its manifest"
        for name, facts in listing.items():
            try:
                with open_file(self.folder / name) as file:
                    size = os.fstat(file.fileno()).st_size
                    if size < facts["bytes"]:
                        return f"{plain(name)} is cut short ({size} of {facts['bytes']} bytes)"
                    if size > facts["bytes"]:
                        return (
                            f"{plain(name)} was changed ({size} bytes, where {facts['bytes']} were written)"
                        )
                    if hashlib.file_digest(file, "sha256").hexdigest() != facts["sha256"]:
                        return f"{plain(name)} is corrupt"
            except NoFile:
                return f"{plain(name)} is missing"
            except (BadFile, OSError):
                return f"{plain(name)} cannot be read"
        try:
            self.state()
        except BadFile as error:
            return str(error).rstrip(".")
        return None


def save(
    folder: Path,
    step: int,
    save_models: Callable[[Path], None],
    state: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> Checkpoint:
    """Write `folder/step-…`: first under a hidden name, flushed to disk, then renamed in one step."""
    from safetensors.torch import save_file

    final = folder / f"step-{step:07d}"
    hidden = folder / f".writing-{step:07d}-{os.getpid()}"
    try:
        with clear_errors(f"save the checkpoint of step {step}"):
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.mkdir(parents=True)
            save_models(hidden)
            save_file({k: v.contiguous() for k, v in tensors.items()}, hidden / TENSORS)
            (hidden / STATE).write_text(json.dumps(state))
            files = sorted(p for p in hidden.rglob("*") if p.is_file())
            listing = {
                str(p.relative_to(hidden)): {"bytes": p.stat().st_size, "sha256": _digest(p)} for p in files
            }
            (hidden / MANIFEST).write_text(json.dumps({"step": step, "files": listing}, indent=1))
            for file in (*files, hidden / MANIFEST):
                _flush(file)
            _flush(hidden)
            if final.exists():
                _retire(final)
            os.replace(hidden, final)
            _flush(folder)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return Checkpoint(final)


def listed(folder: Path) -> list[Checkpoint]:
    """Finished checkpoints, oldest first."""
    found = (p for p in folder.glob("step-*") if re.fullmatch(r"step-[0-9]+", p.name) and is_folder(p))
    return sorted((Checkpoint(p) for p in found), key=lambda c: c.step)


def latest_usable(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole; says which newer ones are not."""
    for checkpoint in reversed(listed(folder)):
        problem = checkpoint.problem()
        if problem is None:
            return checkpoint
        warn(f"Checkpoint {checkpoint.folder.name} is not usable: {problem}. Trying the one before.")
    return None


def set_aside(folder: Path, after: int) -> None:
    """Rename checkpoints of later steps to `broken-…`: they could not be used, and are not to be counted or pruned."""
    for checkpoint in listed(folder):
        if checkpoint.step > after:
            target = folder / f"broken-{checkpoint.step:07d}"
            with clear_errors(f"set the broken checkpoint {checkpoint.folder.name} aside"):
                shutil.rmtree(target, ignore_errors=True)
                os.replace(checkpoint.folder, target)


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Remove all but the last `keep` checkpoints and the best one, and what a killed writer left behind."""
    for checkpoint in listed(folder)[: -keep or None]:
        if checkpoint.step != best:
            _retire(checkpoint.folder)
    for left in (*folder.glob(".writing-*"), *folder.glob(".retired-*")):
        shutil.rmtree(left, ignore_errors=True)


def recover(folder: Path) -> None:
    """Put back a checkpoint whose writer was killed after it had retired the old one and before it placed the new."""
    for left in folder.glob(".retired-step-*"):
        final = folder / left.name.removeprefix(".retired-").rpartition("-")[0]
        if not final.exists() and Checkpoint(left).problem() is None:
            with clear_errors(f"restore {final}"):
                os.replace(left, final)


def _retire(folder: Path) -> None:
    """Take a checkpoint out of the list in one step; `prune` removes it, so a kill never leaves half of one listed."""
    os.replace(folder, folder.with_name(f".retired-{folder.name}-{os.getpid()}"))


def _digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def split_tensors(states: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Part states as JSON, with their tensors apart."""
    plain: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for path, state in states.items():
        plain[path] = {k: v for k, v in state.items() if not isinstance(v, Tensor)}
        tensors |= {f"part:{path}:{k}": v for k, v in state.items() if isinstance(v, Tensor)}
    return plain, tensors


def join_tensors(
    plain: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, Tensor]
) -> dict[str, dict[str, Any]]:
    """The reverse of `split_tensors`."""
    states = {path: dict(state) for path, state in plain.items()}
    for name, tensor in tensors.items():
        if name.startswith("part:"):
            _, path, key = name.split(":", 2)
            states[path][key] = tensor
    return states


def check_states(found: Mapping[str, Mapping[str, Any]], first: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse states of other parts than these, or in which a number or list of the first state is something else."""
    for path in {*found, *first}:
        if path not in first or path not in found:
            raise BadFile(f"it {'lacks' if path in first else 'has'} a state of {path}")
        for key, value in first[path].items():
            kept = found[path].get(key)
            kind = (int, float) if isinstance(value, int | float) else type(value)
            if value is not None and (
                not isinstance(kept, kind) or isinstance(kept, bool) > isinstance(value, bool)
            ):
                raise BadFile(f"{key} of {path} is {brief(value)} at first, and cannot be {brief(kept)}")


def check_counts(path: str, found: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    """Refuse a state in which what is counted is no number of things."""
    for key in (key for key, value in first.items() if type(value) is int):
        if type(found[key]) is not int or not 0 <= found[key] < MOST_COUNTED:
            raise BadFile(f"{key} of {path} is a count, and cannot be {brief(found[key])}")
