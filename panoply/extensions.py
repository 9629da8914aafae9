"""What others add: files named with `--plugin FILE.py`, and installed packages with an entry point `panoply.plugins`.

Either is Python whose decorators (`@part`, `@method`, `@world`, …) register something when it is loaded.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

from panoply import trust
from panoply.errors import PanoplyError
from panoply.files import is_file, read_bytes

_loaded: set[str] = set()


def load_installed() -> None:
    """Load what installed packages add, each once."""
    for point in _points(tuple((place, _changed(place)) for place in sys.path)):
        if point.name not in _loaded:
            _loaded.add(point.name)
            try:
                point.load()
            except Exception as error:
                _loaded.discard(point.name)
                raise PanoplyError(
                    f"The installed plug-in '{point.name}' cannot be loaded: {error}."
                ) from error


@functools.lru_cache(maxsize=1)
def _points(places: tuple[tuple[str, float], ...]) -> tuple[importlib.metadata.EntryPoint, ...]:
    """The entry points in these folders as they are now: every package's list is read, so not twice for nothing."""
    return tuple(importlib.metadata.entry_points(group="panoply.plugins"))


def _changed(place: str) -> float:
    """When something was last put into a folder, or taken out."""
    try:
        return os.stat(place or ".").st_mtime
    except OSError:
        return 0.0


def load_plugin(file: str | Path) -> None:
    """Run a Python file whose decorators register parts, methods or worlds. Loading it twice is harmless."""
    path = Path(os.path.realpath(file))
    if not is_file(path):
        raise PanoplyError(f"There is no plug-in file '{file}'.")
    name = _module_name(path)
    if name in sys.modules or _is_loaded(path) or _is_here(path):
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PanoplyError(f"The plug-in '{file}' is not a Python file.")
    source = read_bytes(path)
    trust.remember_key(hashlib.sha256(source).hexdigest(), str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _loading.append(str(file))
    try:
        exec(
            compile(source, str(path), "exec"), vars(module)
        )  # what was hashed, and no cached byte code of others
    except PanoplyError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise PanoplyError(
            f"The plug-in '{file}' cannot be loaded: {type(error).__name__}: {error}."
        ) from error
    finally:
        _loading.pop()


_loading: list[str] = []


def check_not_loading() -> None:
    """Refuse to train while a plug-in is loaded: a script that is its own plug-in would start itself for ever."""
    if _loading:
        raise PanoplyError(
            f"{_loading[-1]} trains while it is loaded as a plug-in: put that below if __name__ == '__main__'."
        )


def _module_name(path: Path) -> str:
    """A file has a module of its own; definitions that runs keep have one for the same text, wherever it lies."""
    from panoply import session

    what = path.read_bytes() if session.is_written(path) else str(path).encode()
    return f"panoply_plugin_{path.stem}_{hashlib.sha256(what).hexdigest()[:8]}"


def _is_loaded(path: Path) -> bool:
    """Whether a file is a module already: one that was imported, or the script that runs."""
    named = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return any(
        isinstance(file, str) and Path(file).name == path.name and Path(file).resolve() == path
        for file in named
    )


def _is_here(path: Path) -> bool:
    from panoply import session

    return session.is_here(path)
