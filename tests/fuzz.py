"""Thousands of bad inputs: `python tests/fuzz.py --inputs 10000 --jobs 16`. Exit code 1 on any traceback or hang.

An input is made from its seed (tests/fuzz_inputs.py), so `--seed N --inputs 1` repeats one. Each has a time limit; a
process that dies or does not come back is named with the seed it was at.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
SECONDS = 60
"""What one input may take, on a machine that does other things too."""
PIECE = 100
"""Inputs of one process."""


class Hang(BaseException):
    """An input took too long. Not an `Exception`, so that nobody takes it for one of theirs."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def problem(seed: int, seconds: float = SECONDS) -> str | None:
    """What is wrong with how the input of a seed is met, or nothing."""
    import fuzz_inputs

    kind = fuzz_inputs.KINDS[seed % len(fuzz_inputs.KINDS)].__name__
    try:
        with limited(seconds):
            fuzz_inputs.one(seed)
    except Hang:
        return f"seed {seed} ({kind}): no answer in {seconds:g} s"
    except BaseException:
        return f"seed {seed} ({kind}):\n{traceback.format_exc()}"
    return None


def run_here(first: int, inputs: int) -> list[str]:
    """The problems of some seeds; each is printed as it is found."""
    import fuzz_inputs

    fuzz_inputs.originals()
    found = []
    for seed in range(first, first + inputs):
        print(f"at {seed}", flush=True)
        if (wrong := problem(seed)) is not None:
            print(f"FOUND {wrong}\nEND", flush=True)
            found.append(wrong)
    return found


def run_apart(first: int, inputs: int) -> list[str]:
    """The same in a process of its own, whose death is a problem of the seed it was at."""
    words = [sys.executable, __file__, "--piece", "--seed", str(first), "--inputs", str(inputs)]
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        died = ""
        try:
            ended = subprocess.run(words, stdout=out, stderr=subprocess.DEVNULL, timeout=SECONDS * inputs)
            died = f"its process ended with {ended.returncode}" if ended.returncode not in (0, 1) else ""
        except subprocess.TimeoutExpired:
            died = "its process did not come back"
        out.seek(0)
        text = out.read()
    found = [piece.split("\nEND")[0] for piece in text.split("FOUND ")[1:]]
    if died:
        at = [line for line in text.splitlines() if line.startswith("at ")]
        found.append(f"seed {at[-1].removeprefix('at ') if at else first}: {died}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--piece", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="panoply-state-")
    if chosen.piece:
        return 1 if run_here(chosen.seed, chosen.inputs) else 0
    last = chosen.seed + chosen.inputs
    pieces = [(at, min(PIECE, last - at)) for at in range(chosen.seed, last, PIECE)]
    found: list[str] = []
    with concurrent.futures.ThreadPoolExecutor(chosen.jobs) as pool:
        for done, wrongs in enumerate(pool.map(lambda piece: run_apart(*piece), pieces), 1):
            found += wrongs
            for wrong in wrongs:
                print(wrong, end="\n\n", flush=True)
            print(f"{done} of {len(pieces)} pieces, {len(found)} problems", file=sys.stderr, flush=True)
    last_lines = collections.Counter(wrong.strip().splitlines()[-1] for wrong in found)
    for line, times in last_lines.most_common():
        print(f"{times:5d} × {line}")
    print(f"{chosen.inputs} inputs, {len(found)} tracebacks, deaths and hangs")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
