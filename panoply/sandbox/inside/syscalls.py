"""Which system calls a program may make, by architecture, as a filter of the kernel's (seccomp, classic BPF).

An allow-list: computing, memory of its own, files (where Landlock and mounts say which), its own clock. All else fails
with EPERM: processes and threads, programs, sockets, pipes, signals to others, and whatever the kernel learns next.
A few calls are looked at more closely, by `CLOSER`. A call by the numbers of another architecture kills the program.
"""

from __future__ import annotations

import ctypes
import platform
import struct

EPERM, ENOSYS = 1, 38
KILL, ERRNO, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Where they lie in what the kernel shows a filter; an argument has eight bytes, the low four first."""

X86_64 = {
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8,
    "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14,
    "rt_sigreturn": 15, "ioctl": 16, "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "select": 23,
    "sched_yield": 24, "mremap": 25, "madvise": 28, "dup": 32, "dup2": 33, "nanosleep": 35, "getitimer": 36,
    "alarm": 37, "setitimer": 38, "getpid": 39, "exit": 60, "fcntl": 72, "fsync": 74, "fdatasync": 75,
    "truncate": 76, "ftruncate": 77, "getcwd": 79, "chdir": 80, "rename": 82, "mkdir": 83, "rmdir": 84,
    "creat": 85, "unlink": 87, "umask": 95, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "times": 100,
    "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "sigaltstack": 131,
    "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204, "getdents64": 217,
    "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
    "exit_group": 231, "openat": 257, "mkdirat": 258, "newfstatat": 262, "unlinkat": 263, "renameat": 264,
    "pselect6": 270, "ppoll": 271, "dup3": 292, "prlimit64": 302, "getcpu": 309, "renameat2": 316,
    "getrandom": 318, "statx": 332, "clone3": 435,
}  # fmt: skip
AARCH64 = {
    "getcwd": 17, "dup": 23, "dup3": 24, "fcntl": 25, "ioctl": 29, "mkdirat": 34, "unlinkat": 35,
    "renameat": 38, "truncate": 45, "ftruncate": 46, "chdir": 49, "openat": 56, "close": 57, "getdents64": 61,
    "lseek": 62, "read": 63, "write": 64, "readv": 65, "writev": 66, "pread64": 67, "pwrite64": 68,
    "pselect6": 72, "ppoll": 73, "newfstatat": 79, "fstat": 80, "fsync": 82, "fdatasync": 83, "exit": 93,
    "exit_group": 94, "futex": 98, "nanosleep": 101, "getitimer": 102, "setitimer": 103, "clock_gettime": 113,
    "clock_getres": 114, "clock_nanosleep": 115, "sched_getaffinity": 123, "sched_yield": 124,
    "restart_syscall": 128, "sigaltstack": 132, "rt_sigaction": 134, "rt_sigprocmask": 135,
    "rt_sigreturn": 139, "times": 153, "getrlimit": 163, "getrusage": 165, "umask": 166, "getcpu": 168,
    "gettimeofday": 169, "getpid": 172, "getppid": 173, "getuid": 174, "geteuid": 175, "getgid": 176,
    "getegid": 177, "gettid": 178, "brk": 214, "munmap": 215, "mremap": 216, "mmap": 222, "mprotect": 226,
    "madvise": 233, "prlimit64": 261, "renameat2": 276, "getrandom": 278, "statx": 291, "clone3": 435,
}  # fmt: skip
TABLES = {"x86_64": (0xC000003E, X86_64), "aarch64": (0xC00000B7, AARCH64)}
"""What the kernel calls the architecture, and its numbers. Those of aarch64 have not been run yet."""
X32 = 0x40000000
"""Numbers from here on are x86-64's second set, by which a list of the first could be passed."""

DUPLICATE, GET_FLAGS, SET_CLOSE, GET_STATUS, DUPLICATE_CLOSED = 0, 1, 2, 3, 1030
IS_TERMINAL, NO_CLOSE, CLOSE, WINDOW = 0x5401, 0x5450, 0x5451, 0x5413
CLOSER = {
    "fcntl": (1, (DUPLICATE, GET_FLAGS, SET_CLOSE, GET_STATUS, DUPLICATE_CLOSED)),
    "ioctl": (1, (IS_TERMINAL, NO_CLOSE, CLOSE, WINDOW)),
}
"""Calls of which only these are allowed, by the value of an argument. Of fcntl that leaves out to whom a signal goes
when a file is ready, which kills others, and a pipe's flags and size, which the next program would inherit."""


def known() -> str:
    """Why there is no filter for this machine; empty where there is one."""
    machine = platform.machine()
    return "" if machine in TABLES else f"there is no list of system calls for {machine}"


def program(machine: str) -> bytes:
    """The filter, as the kernel takes it: instructions of eight bytes."""
    architecture, numbers = TABLES[machine]
    lines = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
    ]
    if machine == "x86_64":
        lines += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    for name, number in numbers.items():
        body = _body(name)
        lines += [(EQUAL, 0, len(body), number), *body]
    lines.append((RETURN, 0, 0, ERRNO | EPERM))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _body(name: str) -> list[tuple[int, int, int, int]]:
    """What is done about one call."""
    no, yes = (RETURN, 0, 0, ERRNO | EPERM), (RETURN, 0, 0, ALLOW)
    if (
        name == "clone3"
    ):  # its flags cannot be read; a C library that hears this takes `clone`, which is refused
        return [(RETURN, 0, 0, ERRNO | ENOSYS)]
    if (
        name == "prlimit64"
    ):  # of oneself, and only to look: process 0, no new limit in both halves of an address
        found = [(LOAD, 0, 0, ARGUMENTS + at) for at in (0, 16, 20)]
        return [line for load in found for line in (load, (EQUAL, 1, 0, 0), no)] + [yes]
    if name not in CLOSER:
        return [yes]
    argument, values = CLOSER[name]
    lines = [(LOAD, 0, 0, ARGUMENTS + 8 * argument)]
    for value in values:
        lines += [(EQUAL, 0, 1, value), yes]
    return [*lines, no]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))


class Filter:
    """A filter that is made once and can be put on many times, by every child for itself."""

    def __init__(self) -> None:
        self.code = program(platform.machine())
        self.program = _Program(len(self.code) // 8, self.code)
        self.prctl = ctypes.CDLL(None, use_errno=True).prctl
        self.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]

    def put_on(self) -> None:
        """From here on, for good; needs `no_new_privs`."""
        if self.prctl(22, 2, ctypes.addressof(self.program), 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "the filter of system calls was not taken")
