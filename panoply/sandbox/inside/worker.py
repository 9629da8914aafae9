"""A worker: locks itself in, then forks one child a program, and kills it when its time is over.

It never sees a program. The child reads code, files and input itself, so that nothing of one program is left in the
memory that the next is forked from; what it prints goes to the host directly; and the worker's words have a socket of
their own, which no child has. In the pid namespace of bubblewrap, or beside others, it can be asked for nothing else.

    input    descriptor 0: for every program, eight bytes of length and JSON {code, files, stdin}. Only children read
    output   descriptor 1: what programs print
    words    a socket: JSON lines, {memory, disk, seconds, files} for a program to come, "k" to end it, and an answer
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import random
import select
import signal
import socket
import sys
import time
import types
from collections.abc import Sequence
from typing import Any, NoReturn

from panoply.sandbox.inside import walls
from panoply.sandbox.inside.syscalls import Filter

PRELOADED = (
    "abc", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools",
    "heapq", "itertools", "json", "math", "operator", "random", "re", "statistics", "string", "textwrap", "traceback",
    "types", "typing",
)  # fmt: skip
"""What programs commonly import."""


def main(order: dict[str, Any]) -> None:
    """Serve until the host closes the socket. `order` says what may be read, where files may lie, and what to load."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    words = socket.socket(fileno=moved(order["words"]))
    sys.path += order["path"]
    for name in (*PRELOADED, *order["preload"]):
        importlib.import_module(name)
    sys.path_importer_cache.clear()
    filter_ = Filter()
    folder = order["folder"]
    if folder:
        walls.own_disk(folder, order["disk"])
        os.chdir(folder)
    else:
        os.chdir("/")
    version = walls.lock_files(order["readable"], order["listed"], folder)
    walls.drop_privileges()
    gc.collect()
    gc.freeze()
    say(words, {"landlock": version, "python": sys.version.split()[0]})
    while line := asked(words):
        say(words, one_program(words, json.loads(line), folder, filter_))


def moved(number: int) -> int:
    """A descriptor as number 3, above which there is nothing, whatever it was in the host."""
    if number != 3:
        os.dup2(number, 3)
        os.close(number)
    return 3


def say(words: socket.socket, answer: dict[str, Any]) -> None:
    words.sendall(json.dumps(answer).encode() + b"\n")


def asked(words: socket.socket) -> bytes:
    """The next line; nothing when the host is gone."""
    line = b""
    while not line.endswith(b"\n"):
        piece = words.recv(1)
        if not piece:
            return b""
        line += piece if piece != b"k" or line else b""  # a kill that came too late is for nobody
    return line


def one_program(words: socket.socket, order: dict[str, Any], folder: str, filter_: Filter) -> dict[str, Any]:
    """Fork it, wait for its end, its time's end or the host's word, and say what it was."""
    began, parent = time.monotonic(), os.getpid()
    child = os.fork()
    if not child:
        run(order, parent, folder, filter_)
    end = os.pidfd_open(child)
    watch = select.poll()
    watch.register(end, select.POLLIN)
    watch.register(words, select.POLLIN)
    left = order["seconds"]
    ended = ""
    happened = dict(watch.poll(left * 1000))
    if end not in happened:
        ended = "output" if happened else "time"
        os.kill(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    os.close(end)
    exit_ = -9 if ended else os.waitstatus_to_exitcode(status)
    return {
        "exit": exit_,
        "ended": ended or ("lost" if exit_ < 0 else ""),
        "seconds": time.monotonic() - began,
        "peak": used.ru_maxrss * 1024,
        "clean": swept(folder, order["files"]) and not select.select([0], [], [], 0)[0],
    }


def swept(folder: str, given: Sequence[str]) -> bool:
    """Whether nothing is left of a program but the files it was given, which are taken away."""
    if not folder:
        return True
    try:
        for name in given:
            if os.path.lexists(name):
                os.unlink(name)
        return not os.listdir(folder)
    except OSError:
        return False


# ---------------------------------------------------------------- in the child


def run(order: dict[str, Any], parent: int, folder: str, filter_: Filter) -> NoReturn:
    """Everything in a child's life. The walls are up before the program's first line."""
    try:
        walls.die_with(parent)
        program = read()
        given_input(program["stdin"])
        os.dup2(1, 2)
        os.closerange(3, 256)
        for name, text in program["files"].items():
            with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
                file.write(text)
        random.seed(0)
        walls.limit(order["memory"], order["disk"], order["seconds"])
        filter_.put_on()
    except BaseException as problem:
        os.write(1, f"the sandbox failed: {problem}\n".encode())
        os._exit(70)
    os._exit(played(program["code"]))


def read() -> dict[str, Any]:
    """A program from the input; no byte beyond it is touched."""
    size = int.from_bytes(_exactly(8), "big")
    found: dict[str, Any] = json.loads(_exactly(size))
    return found


def _exactly(size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        piece = os.read(0, min(size - len(found), 2**20))
        if not piece:
            os._exit(1)
        found += piece
    return bytes(found)


def given_input(text: str) -> None:
    """What the program may read as its input: a file in memory that cannot be written or grow."""
    import fcntl

    place = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(place, "wb", closefd=False) as file:
        file.write(text.encode("utf-8", "surrogatepass"))
    fcntl.fcntl(place, fcntl.F_ADD_SEALS, 15)
    os.lseek(place, 0, os.SEEK_SET)
    os.dup2(place, 0)


def played(code: str) -> int:
    """The program's exit code. An exception that nobody caught is one line: its type and what it says."""
    out = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(1, "w")), "utf-8", "backslashreplace", line_buffering=True
    )
    sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = out  # type: ignore[misc]
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0)), "utf-8", "surrogateescape")
    main_ = types.ModuleType("__main__")
    sys.modules["__main__"], sys.argv = main_, ["program.py"]
    exit_ = 0
    try:
        try:
            exec(compile(code, "program.py", "exec"), vars(main_))
        except SystemExit as left:
            exit_ = left.code if isinstance(left.code, int) else int(left.code is not None)
            if exit_ and not isinstance(left.code, int):
                print(left.code)
        except BaseException as problem:
            exit_ = 1
            print(f"{type(problem).__name__}: {problem}".removesuffix(": "))
        out.flush()
    except BaseException:
        exit_ = exit_ or 1
    return exit_ & 255
