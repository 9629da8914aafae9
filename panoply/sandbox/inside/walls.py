"""The walls that a worker puts around itself: Landlock, limits, no privileges. None can be taken down again.

Landlock is asked for by number (`landlock_create_ruleset` and two more): C libraries have no names for it yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
from collections.abc import Iterable

libc = ctypes.CDLL(None, use_errno=True)
CREATE, ADD, RESTRICT = 444, 445, 446
"""The same numbers on all architectures."""
WRITE_FILE, READ_FILE, READ_DIR = 1 << 1, 1 << 2, 1 << 3
REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_FILE = 1 << 4, 1 << 5, 1 << 7, 1 << 8
REFER, TRUNCATE = 1 << 13, 1 << 14
EVERYTHING = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All that Landlock can forbid about files, by its version."""
TCP, SCOPES = 0b11, 0b11
"""Binding and connecting (from version 4); signals and abstract sockets to the outside (from 6)."""
PATHS = os.O_PATH | os.O_CLOEXEC
INODES = 256
"""Files and folders that a program may have at once. Empty ones take no room on its disk, and the kernel's memory."""


def landlock_version() -> int:
    """Of Landlock in this kernel; 0 where there is none."""
    return max(0, int(libc.syscall(CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))))


def lock_files(readable: Iterable[str], listed: Iterable[str], writable: str = "") -> int:
    """Leave this process, and all it will fork, these files and no other, no TCP, and no signals to others.

    The version of Landlock that did it; what that cannot do yet rests on the filter of system calls alone.
    """
    version = landlock_version()
    if not version:
        return 0
    handled = EVERYTHING[max(v for v in EVERYTHING if v <= version)]
    fields = [handled, *([TCP] if version >= 4 else []), *([SCOPES] if version >= 6 else [])]
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    rules = _asked(CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    for path in readable:
        _allow(rules, path, READ_FILE | READ_DIR)
    for path in listed:  # names alone
        _allow(rules, path, READ_DIR)
    if writable:
        own = READ_FILE | READ_DIR | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_FILE
        _allow(rules, writable, (own | REFER | TRUNCATE) & handled)
    no_new_privileges()
    _asked(RESTRICT, ctypes.c_int(rules), ctypes.c_uint32(0))
    os.close(rules)
    return version


def _allow(rules: int, path: str, rights: int) -> None:
    """A file or a folder with all below it. What does not exist needs no rule."""
    try:
        place = os.open(path, PATHS)
    except OSError:
        return
    if not os.path.isdir(path):
        rights &= WRITE_FILE | READ_FILE | TRUNCATE
    _asked(ADD, ctypes.c_int(rules), ctypes.c_int(1), struct.pack("=Qi", rights, place), ctypes.c_uint32(0))
    os.close(place)


def _asked(number: int, *arguments: object) -> int:
    found = int(libc.syscall(number, *arguments))
    if found < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return found


def no_new_privileges() -> None:
    """Nothing that is run later can have more rights than this process."""
    if libc.prctl(38, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "privileges cannot be given up")


def drop_privileges() -> None:
    """Give up every capability, also root's; nobody may look into this process."""
    for capability in range(64):
        libc.prctl(24, capability, 0, 0, 0)
    libc.prctl(47, 4, 0, 0, 0)
    header, nothing = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    if libc.capset(header, nothing) != 0:
        raise OSError(ctypes.get_errno(), "capabilities cannot be given up")
    libc.prctl(4, 0, 0, 0, 0)
    no_new_privileges()


def own_disk(folder: str, size: int) -> None:
    """A disk in memory, of so many bytes and `INODES` names, which is gone with the process."""
    options = f"size={size},nr_inodes={INODES},mode=700".encode()
    if libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 2 | 4 | 8, options) != 0:  # no suid, devices, programs
        raise OSError(ctypes.get_errno(), f"a disk of its own: {os.strerror(ctypes.get_errno())}")


def limit(memory: int, disk: int, seconds: float) -> None:
    """Of a program alone: its memory, the size of a file, time on a core, open files, and no core dumps."""
    wanted = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: disk,
        resource.RLIMIT_CPU: int(seconds) + 2,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for what, most in wanted.items():
        _, hard = resource.getrlimit(what)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (least, least))
    with contextlib.suppress(
        OSError, ValueError
    ):  # counts all of a user's processes: below that, none can be added
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def die_with(parent: int) -> None:
    """Be killed when the process that forked this one ends."""
    libc.prctl(1, 9, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
