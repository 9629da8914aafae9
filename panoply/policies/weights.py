"""Weights that others saved: never unpickled, and refused unless they are the model's own, all there and finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from panoply.errors import PanoplyError, plain
from panoply.files import is_file, open_file, read_json

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What weights may be saved in. Fewer bits mean something only together with scales, which are another format."""

Naming = Callable[[str], str | None]
"""What a weight on disk is called here; None: it is left where it is."""


class Index(TypedDict):
    """Which shard holds which weight."""

    weight_map: dict[str, str]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a model folder: one, or the shards that its index names."""
    if is_file(folder / INDEX):
        names = sorted(set(read_json(folder / INDEX, Index)["weight_map"].values()))
        if away := [n for n in names if Path(n).name != n]:
            raise PanoplyError(
                f"{plain(folder / INDEX)} names '{plain(away[0])}', which is not in its folder."
            )
        if absent := [n for n in names if not is_file(folder / n)]:
            raise PanoplyError(f"{plain(folder)} lacks the shard {listed(absent)}.")
        return [folder / n for n in names]
    if is_file(folder / WHOLE):
        return [folder / WHOLE]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise PanoplyError(
            f"{plain(folder)} holds only pickled weights, which are never opened; convert them first."
        )
    raise PanoplyError(f"{plain(folder)} holds no weights: there is no {WHOLE}.")


def read_weights(
    files: Iterable[Path],
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    named: Naming = str,
) -> dict[str, Tensor]:
    """All tensors by name, each of them finite; `dtype` None leaves them as they were saved."""
    weights: dict[str, Tensor] = {}
    for path in files:
        with _opened(path) as opened:
            for given in opened.keys():  # noqa: SIM118 (not a mapping)
                if (name := named(given)) is None:
                    continue
                weight = opened.get_tensor(given)
                if weight.dtype not in DTYPES and (dtype is not None or weight.is_floating_point()):
                    raise PanoplyError(
                        f"{plain(name)} in {plain(path)} is of {weight.dtype}: give the full-precision weights."
                    )
                weights[name] = weight.to(device=device, dtype=dtype or weight.dtype, copy=True)
                check_finite([(name, weights[name])], plain(path))
    return weights


def read_shapes(files: Iterable[Path], named: Naming = str) -> dict[str, tuple[int, ...]]:
    """The shape of every weight by name, without reading any."""
    found: dict[str, tuple[int, ...]] = {}
    for path in files:
        with _opened(path) as opened:
            for given in opened.keys():  # noqa: SIM118 (not a mapping)
                if (name := named(given)) is not None:
                    found[name] = tuple(opened.get_slice(given).get_shape())
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    open_file(path).close()
    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError, ValueError, OverflowError) as problem:
        said = plain(problem).rstrip(".")
        raise PanoplyError(f"{plain(path)} is corrupt or cut short: {said}.") from None


def check_finite(weights: Iterable[tuple[str, Tensor]], where: str) -> None:
    """Refuse weights with which every answer would be nonsense; `where` they come from is in the sentence."""
    for name, weight in weights:
        if weight.is_floating_point() and weight.numel():
            bounds = [float(bound) for bound in torch.aminmax(weight.detach())]  # NaN if one number is
            if not all(map(math.isfinite, bounds)):
                bad = weight.detach().flatten()
                first = float(bad[~bad.isfinite()][0])
                raise PanoplyError(f"The weights in {where} are not finite: {plain(name)} holds {first:g}.")


def check_fit(
    expected: Mapping[str, tuple[int, ...]],
    weights: Mapping[str, Tensor],
    where: str,
    config: str = "config.json",
) -> None:
    """Refuse weights that are not a model's own, naming what is missing, unknown or of another shape."""
    if missing := expected.keys() - weights.keys():
        raise PanoplyError(f"The weights in {where} lack {listed(missing)}.")
    if surplus := weights.keys() - expected.keys():
        raise PanoplyError(f"The weights in {where} hold {listed(surplus)}, unknown to its {config}.")
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    if wrong := [f"{n} is {shapes[n]}, not {expected[n]}" for n in expected if shapes[n] != expected[n]]:
        raise PanoplyError(f"The weights in {where} do not fit its {config}: {listed(wrong)}.")


def listed(names: Iterable[str]) -> str:
    """The first three names, and how many more."""
    found = sorted(map(plain, names))
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
