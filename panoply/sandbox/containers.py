"""Containers: docker or podman, one container a program, for images of one's own (`--sandbox containers`).

`PANOPLY_SANDBOX_IMAGE` names the image, which must be here and have `python3`; nothing is ever pulled. Where docker has
gVisor (`runsc`), that is taken: a kernel of its own between program and machine.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from panoply.sandbox.contract import Backend, Limits, Program, Result, Unavailable, cores, decoded

ENGINES = ("docker", "podman")
IMAGE = "python:3.12-slim"
GRACE = 10.0
"""Seconds that a container has beyond its program's, to start and to end."""
PROCESSES = 64
KILLED = (125, 126, 127, 137, 139)
"""What an engine exits with when it could not start a program, and when that was killed."""
RUNNER = """
import io, json, os, random, sys, types
order = json.loads(sys.stdin.buffer.readline())
for name, text in order["files"].items():
    with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)
sys.stdin = io.TextIOWrapper(io.BytesIO(order["stdin"].encode("utf-8", "surrogatepass")), "utf-8", "surrogateescape")
sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
sys.stderr = sys.stdout
random.seed(0)
main = sys.modules["__main__"] = types.ModuleType("__main__")
try:
    exec(compile(order["code"], "program.py", "exec"), vars(main))
except SystemExit:
    raise
except BaseException as problem:
    print(f"{type(problem).__name__}: {problem}".removesuffix(": "))
    sys.exit(1)
"""


def command(engine: str, image: str, name: str, limits: Limits, runtime: str = "") -> list[str]:
    """A container without network, privileges or anything writable but a disk in memory, and with limits."""
    return [
        *(engine, "run", "--rm", "--interactive", "--pull", "never", "--name", name),
        *(("--runtime", runtime) if runtime else ()),
        *("--network", "none", "--ipc", "private", "--hostname", "sandbox"),
        *("--read-only", "--tmpfs", f"/tmp:rw,noexec,nosuid,nodev,size={limits.disk},nr_inodes=256"),
        *("--workdir", "/tmp", "--user", "65534:65534"),
        *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--pids-limit", str(PROCESSES), "--cpus", "1"),
        *("--memory", str(limits.memory), "--memory-swap", str(limits.memory)),
        *("--ulimit", "core=0", "--ulimit", "nofile=64:64", "--ulimit", f"fsize={limits.disk}"),
        *("--ulimit", f"cpu={int(limits.seconds) + 1}"),
        *("--log-driver", "none", "--env", "PYTHONHASHSEED=0", "--env", "HOME=/tmp"),
        *("--entrypoint", "python3", image, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", RUNNER),
    ]


Asking = Callable[[list[str]], str]


def ask(words: list[str]) -> str:
    """What an engine says, or why it does not."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{words[0]} does not answer") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise Unavailable(f"{os.path.basename(words[0])}: {lines[0][:200] if lines else 'it failed'}")
    return done.stdout


def engine_here(image: str, asking: Asking = ask, engines: Sequence[str] = ENGINES) -> tuple[str, str, str]:
    """An engine that runs and has the image, its version, and `runsc` where it knows that."""
    reasons = []
    for engine in engines:
        found = shutil.which(engine)
        if found is None:
            reasons.append(f"{engine} is not installed")
            continue
        try:
            side = "Server" if engine == "docker" else "Client"  # podman has no server
            version = asking([found, "version", "--format", f"{{{{.{side}.Version}}}}"]).strip()
            runtimes = asking([found, "info", "--format", "{{json .}}"])
        except Unavailable as reason:
            reasons.append(str(reason))
            continue
        try:
            asking([found, "image", "inspect", image])
        except Unavailable:
            reasons.append(f"{engine} has no image {image} ({engine} pull {image})")
            continue
        return found, f"{engine} {version}", "runsc" if '"runsc"' in runtimes else ""
    raise Unavailable(", ".join(reasons))


class Containers(Backend):
    """A container for every program."""

    name = "containers"

    def __init__(self, workers: int = 0, preload: tuple[str, ...] = ()):
        self.image = os.environ.get("PANOPLY_SANDBOX_IMAGE") or IMAGE
        self.engine, version, self.runtime = engine_here(self.image)
        self.version = f"{version}, {self.image}{', gVisor' if self.runtime else ''}"
        self.workers = workers or cores()
        result = self.run("print(6 * 7)", limits=Limits(seconds=30))
        if result.said != "42\n":
            raise Unavailable(f"a program that prints 42 said '{result.said[:200].strip()}'")

    def run_many(self, programs: Sequence[Program]) -> list[Result]:
        with ThreadPoolExecutor(self.workers) as threads:
            return list(threads.map(self._one, programs))

    def _one(self, program: Program) -> Result:
        name, limits = f"panoply-{secrets.token_hex(8)}", program.limits
        order = {"code": program.code, "files": dict(program.files), "stdin": program.stdin}
        began = time.monotonic()
        with tempfile.TemporaryFile() as given:
            given.write(json.dumps(order).encode() + b"\n")
            given.seek(0)
            process = subprocess.Popen(
                command(self.engine, self.image, name, limits, self.runtime),
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        said, ended = _read(process, limits.output, began + limits.seconds + GRACE)
        if ended:
            subprocess.run([self.engine, "kill", name], capture_output=True, timeout=60, check=False)
            process.kill()
        exit_ = process.wait()
        seconds = time.monotonic() - began
        if not ended and exit_ in KILLED:
            ended = "time" if seconds >= limits.seconds else "lost"
        return Result(-9 if ended else exit_, ended, decoded(said, limits.output), seconds, 0)  # type: ignore[arg-type]


def _read(process: subprocess.Popen[bytes], most: int, deadline: float) -> tuple[bytes, str]:
    """What is printed until the end, the limit or the deadline, and which of the last two it was."""
    assert process.stdout is not None
    found = bytearray()
    with process.stdout as out:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([out], [], [], left)[0]:
                return bytes(found), "time"
            piece = os.read(out.fileno(), 2**16)
            if not piece:
                return bytes(found), ""
            found += piece
            if len(found) > most:
                return bytes(found), "output"
