"""What a confined process may use: memory, files, the network, and life beyond its parent's.

Limits keep a mistake in someone's function from taking the machine down. They are no wall against hostile code.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

GIB = 2**30
PR_SET_PDEATHSIG = 1
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000


@dataclass(frozen=True)
class Limits:
    """Applied once, in the process itself, before anything of a user's runs in it."""

    memory: float = 8.0
    """GiB of its own data (RLIMIT_DATA); 0 sets no limit. Address space has none: CUDA reserves more than there is."""
    file: float = 1.0
    """GiB of the largest file it may write."""
    open_files: int = 1024
    network: bool = False
    """Whether it may reach the network."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Limits:
        return cls(**data)

    def apply(self) -> list[str]:
        """Take effect in this process; returns what this system does not allow, a phrase each."""
        import resource

        wanted = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: int(self.file * GIB),
            resource.RLIMIT_NOFILE: self.open_files,
        }
        if self.memory:
            wanted[resource.RLIMIT_DATA] = int(self.memory * GIB)
        for what, most in wanted.items():
            _, hard = resource.getrlimit(what)
            least = most if hard == resource.RLIM_INFINITY else min(most, hard)
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(what, (least, least))
        if self.network:
            return []
        problem = close_network()
        return [f"its network could not be closed ({problem})"] if problem else []


def close_network() -> str:
    """Move into a network namespace of its own, in which there is nothing; the reason where that is not allowed.

    Without root this takes a user namespace too, in which the user stays who they are.
    """
    if not sys.platform.startswith("linux"):
        return "there are no network namespaces here"
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) == 0:
        return ""
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        return os.strerror(ctypes.get_errno())
    with contextlib.suppress(OSError):
        for file, line in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{file}", "w") as opened:
                opened.write(line)
    return ""


def die_with_parent(parent: int) -> None:
    """Tie this process, and all it will start, to the one that holds the other end of its input.

    The kernel kills it when the parent dies, and a guardian process, which waits for nothing but that the input is
    closed, then kills the whole group: also where the function is busy and holds Python's lock, and where it has
    started others. The guardian is nobody's child, so that whoever waits for children does not wait for it.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    if os.fork():
        os._exit(0)
    for number in (1, 2):
        with contextlib.suppress(OSError):
            os.close(number)
    watch = select.poll()
    watch.register(0, 0)  # an input without writers is reported unasked
    watch.poll()
    os.killpg(os.getpgrp(), signal.SIGKILL)
