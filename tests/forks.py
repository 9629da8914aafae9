"""Python in a process of its own that need not import torch: a fork of one that has, once for all tests of a session.

    forks.run([sys.executable, "-c", code], cwd=…)      like subprocess.run
    forks.Popen([sys.executable, "-m", module], …)      like subprocess.Popen: real pipes, a real number, real kills

For tests that need a process but are not about its start: loading torch takes two seconds of a core. What is imported
before the fork is in READY, and GRPO has made a step; everything else, other methods and worlds too, each imports as it
needs it. The workers of comparisons are such forks as well (conftest.py), also those of a comparison in a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import Any, NoReturn

READY = (
    "torch", "numpy", "yaml", "rich.live", "gymnasium", "safetensors.torch", "tokenizers", "numba", "scipy.linalg",
    "panoply.cli", "panoply.api", "panoply.loops.steps", "panoply.loops.recipe", "panoply.evidence.compare",
    "panoply.kernels.compiled",
)  # fmt: skip
PIPE, STDOUT, DEVNULL, TimeoutExpired = (
    subprocess.PIPE,
    subprocess.STDOUT,
    subprocess.DEVNULL,
    subprocess.TimeoutExpired,
)
"""So that this module can stand where `subprocess` does."""
_ENDED = struct.Struct("i")

# ------------------------------------------------------------------ who asks


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` of Python, but for how the process comes into the world."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
        errread: int, errwrite: int, *rest: Any,
    ) -> None:  # fmt: skip
        assert args[0] == sys.executable
        assert not any((preexec_fn, pass_fds, shell)), "that needs a new Python"
        order = {
            "words": args[1:],
            "cwd": str(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
            "session": bool(rest[5]),  # start_new_session
        }
        streams = [
            given if given != -1 else own
            for given, own in zip((p2cread, c2pwrite, errwrite), range(3), strict=True)
        ]
        self._news = socket.socket(socket.AF_UNIX)
        self._news.connect(_address())
        socket.send_fds(self._news, [b"!"], streams)
        with self._news.makefile("rwb") as both:
            both.write(json.dumps(order).encode() + b"\n")
            both.flush()
        (self.pid,) = _ENDED.unpack(self._news.recv(_ENDED.size))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _try_wait(self, flags: int) -> tuple[int, int]:
        """As `os.waitpid`, which only a parent may ask."""
        if flags & os.WNOHANG and not select.select([self._news], [], [], 0)[0]:
            return 0, 0
        said = self._news.recv(_ENDED.size)
        return self.pid, _ENDED.unpack(said)[0] if said else signal.SIGKILL

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode

    def _handle_exitstatus(self, sts: int, *_: Any, **__: Any) -> None:
        self.returncode = os.waitstatus_to_exitcode(sts)
        self._news.close()


def run(
    words: list[str],
    *,
    timeout: float | None = None,
    capture_output: bool = False,
    check: bool = False,
    **how: Any,
) -> subprocess.CompletedProcess[Any]:
    if capture_output:
        how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(words, **how) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(words, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


# ------------------------------------------------------------------ who forks

_AT: dict[str, str] = {}
_ONE = threading.Lock()


def _address() -> str:
    """Where forks are asked for. The process that makes them is started with the first one, and ends with this one."""
    with _ONE:
        if "at" in _AT:
            return _AT["at"]
        _AT["at"] = str(Path(tempfile.mkdtemp(prefix="panoply-forks-")) / "socket")
        root = Path(__file__).parent
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(root.parent), str(root)]),
        }
        code = f"import forks; forks.serve({_AT['at']!r})"
        mother = subprocess.Popen(
            [sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        atexit.register(mother.kill)
        assert mother.stdout is not None
        assert mother.stdout.read(1) == b"!", "the process that forks has not started"
        return _AT["at"]


def serve(at: str) -> None:
    """Fork whenever somebody asks, until the one who started this has gone."""
    for module in READY:
        importlib.import_module(module)
    sys.modules["panoply.evidence.pool"].subprocess = sys.modules[__name__]  # type: ignore[attr-defined]
    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # as in conftest.py
    with tempfile.TemporaryDirectory() as folder:
        run_once(Path(folder))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(at)
    listener.listen()
    os.write(1, b"!")
    while True:
        asked, _, _ = select.select([listener, 0], [], [])
        if listener not in asked:
            return
        line, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _mind(line, at)
        line.close()


def run_once(folder: Path) -> None:
    """Have what a first run loads late, the compiled kernels above all, before the first fork, and no threads."""
    import tiny

    tiny.train(folder / "first", steps=1)
    if os.path.isdir("/proc/self/task"):
        assert len(os.listdir("/proc/self/task")) == 1, "a fork would be without the other threads"


def _mind(line: socket.socket, at: str) -> NoReturn:
    """In a process of its own: fork once more, and tell how that ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(line, 1, 3)
    with line.makefile("rb") as said:
        order = json.loads(said.readline())
    pid = os.fork()
    if pid == 0:
        line.close()
        _AT["at"] = at
        _be(order, streams)
    for stream in (0, 1, 2, *streams):
        os.close(stream)
    with contextlib.suppress(BrokenPipeError):
        line.send(_ENDED.pack(pid))
        line.send(_ENDED.pack(os.waitpid(pid, 0)[1]))
    os._exit(0)


def _be(order: dict[str, Any], streams: list[int]) -> NoReturn:
    """Become what was asked for, as Python would have started it."""
    import numpy as np
    import torch

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if order["session"]:
        os.setsid()
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.stdin, sys.stdout, sys.stderr = (
        io.TextIOWrapper(open(n, mode, closefd=False), "utf-8", line_buffering=os.isatty(n) or n == 2)  # noqa: SIM115
        for n, mode in enumerate(("rb", "wb", "wb"))
    )
    sys.path[0:0] = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]
    random.seed()
    np.random.seed()
    torch.seed()
    code: int | None = 1
    try:
        _start(order["words"])
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int | None) else 1
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for written in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                written.flush()
        os._exit(code or 0)


def _start(words: list[str]) -> None:
    kind, *rest = words
    if kind == "-m":
        sys.argv, sys.path[0:0] = rest, [os.getcwd()]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    code, name = (rest[0], "<string>") if kind == "-c" else (Path(kind).read_text(), kind)
    sys.argv = ["-c", *rest[1:]] if kind == "-c" else words
    sys.path[0:0] = ["" if kind == "-c" else str(Path(kind).resolve().parent)]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind != "-c":
        main.__file__ = name
    main.__dict__["__builtins__"] = __builtins__
    exec(compile(code, name, "exec"), main.__dict__)
