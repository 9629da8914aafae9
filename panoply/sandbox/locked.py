"""The two sandboxes that are made of what Linux has: with namespaces by bubblewrap, and with Landlock alone.

In both a worker locks itself in (`inside/`) and a filter of system calls takes from every program what it has no use
for. Namespaces also take away the network, other processes and the file system, and give each worker a disk of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from panoply.errors import PanoplyError
from panoply.sandbox.contract import Program, Result, Unavailable
from panoply.sandbox.inside.syscalls import known
from panoply.sandbox.workers import Crew

FOLDERS = ("/tmp", "/sandbox")
"""Where programs have their files: the second where Python itself, or this package, lies in the first."""
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
ENVIRONMENT = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8"}
"""All that a program finds in its environment. Packages are also told that there are no threads."""
BOOT = """
import sys, types, json
order = json.loads(sys.argv[1])
for name in ("panoply", "panoply.sandbox"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
sys.modules["panoply.sandbox"].__path__ = [order["inside"]]
from panoply.sandbox.inside.worker import main
main(order)
"""
"""The files of `inside/` under their names, and nothing else of the package."""


def interpreter() -> str:
    """Python itself, not the link to it that a virtual environment has."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def standard_library() -> list[str]:
    """The files and folders that Python needs to import from the standard library, without installed packages."""
    found: list[str] = []
    for key in ("stdlib", "platstdlib"):
        folder = Path(sysconfig.get_path(key))
        found += [str(p) for p in folder.iterdir() if p.name not in ("site-packages", "dist-packages")]
    own = Path(sys.base_prefix) / "lib"
    found += [str(p) for p in own.glob("lib*.so*")] if own.is_dir() else []
    return sorted({os.path.realpath(path) for path in found})


def folder() -> str:
    """Where a disk of one's own hides nothing that is needed."""
    needed = (interpreter(), sys.prefix, *listed(), os.path.realpath(__file__))
    return FOLDERS[any(path.startswith(f"{FOLDERS[0]}/") for path in needed)]


def listed() -> list[str]:
    """The folders of the standard library, whose names may be read: imports look there."""
    return sorted({os.path.realpath(sysconfig.get_path(key)) for key in ("stdlib", "platstdlib")})


def order(words: int, disk: int, place: str, preload: tuple[str, ...]) -> str:
    """What a worker is told at its start."""
    packages = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}) if preload else []
    stdlib = [*standard_library(), *LIBRARIES]
    return json.dumps(
        {
            "words": words,
            "disk": disk,
            "folder": place,
            "preload": preload,
            "path": packages,
            "readable": [*stdlib, *packages],
            "listed": listed(),
            "inside": str(Path(__file__).resolve().parent),
        }
    )


def python(words: int, disk: int, place: str, preload: tuple[str, ...]) -> list[str]:
    """The command of a worker: no site packages, no user's folders, text in UTF-8."""
    command = [interpreter(), "-s", "-S", "-P", "-B", "-X", "utf8", "-c", BOOT]
    return [*command, order(words, disk, place, preload)]


def environment(preload: tuple[str, ...]) -> dict[str, str]:
    own = ENVIRONMENT | {"HOME": folder()}
    return own | ({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} if preload else {})


class Landlock(Crew):
    """Landlock, a filter of system calls, and limits: needs no privilege and no package. Programs have no files."""

    name = "landlock"

    def __init__(self, workers: int = 0, preload: tuple[str, ...] = ()):
        _check_linux()
        super().__init__(
            lambda words, disk, _: python(words, disk, "", preload), environment(preload), workers
        )
        said = self.try_out()
        if not said["landlock"]:
            raise Unavailable(
                "this kernel has no Landlock (Linux 5.13 or newer, with lsm=landlock,… at boot)"
            )
        rests = "" if said["landlock"] >= 6 else ", signals rest on the filter of system calls alone"
        self.version = f"Landlock {said['landlock']}{rests}, Python {said['python']}"

    def run_many(self, programs: Sequence[Program]) -> list[Result]:
        if any(program.files for program in programs):
            raise PanoplyError(
                "The sandbox landlock has no files, since nothing would bound them: --sandbox namespaces has."
            )
        return super().run_many(programs)


class Namespaces(Crew):
    """Namespaces by bubblewrap, with Landlock, a filter of system calls and limits within."""

    name = "namespaces"

    def __init__(self, workers: int = 0, preload: tuple[str, ...] = ()):
        _check_linux()
        found = shutil.which("bwrap") or shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin")
        if found is None:
            raise Unavailable("bubblewrap is not installed (apt install bubblewrap, dnf install bubblewrap)")
        version = subprocess.run(
            [found, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
        super().__init__(
            lambda words, disk, tied: [
                *_bubblewrap(found, tied, preload),
                *python(words, disk, folder(), preload),
            ],
            environment(preload),
            workers,
        )
        said = self.try_out()
        landlock = f", Landlock {said['landlock']}" if said["landlock"] else ""
        self.version = f"{version.stdout.strip()}{landlock}, Python {said['python']}"


def _bubblewrap(program: str, tied: bool, preload: tuple[str, ...]) -> list[str]:
    """A world with nothing in it but Python: no network, no other processes, no devices, no /proc, nothing writable.

    The one capability is to mount a disk for programs' files, which bubblewrap cannot give a number of names. The
    worker gives it up before it serves.
    """
    told = json.loads(order(0, 0, folder(), preload))
    shown = [interpreter(), *told["readable"], f"{told['inside']}/inside"]
    return [
        program,
        *("--unshare-all", "--unshare-user", "--new-session", *(["--die-with-parent"] if tied else [])),
        *("--hostname", "sandbox", "--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"),
        *(word for path in shown for word in ("--ro-bind-try", path, path)),
        *("--dir", folder(), "--remount-ro", "/", "--chdir", folder(), "--"),
    ]


def _check_linux() -> None:
    if not sys.platform.startswith("linux"):
        raise Unavailable("it is made of parts of Linux, and this is not Linux")
    if problem := known():
        raise Unavailable(problem)
