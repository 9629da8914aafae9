"""The weights every method ends with after a tiny run, as one line each: what a refactoring must leave as it was.

python tests/fingerprints.py > before.txt            # on one tree
python tests/fingerprints.py --against before.txt    # on another: names the methods that came out different
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]


def fingerprint(name: str) -> str:
    """Of the weights after three small steps, or the sentence with which the run was refused."""
    import torch
    from sweep import outcome, small

    torch.set_num_threads(1)
    told = outcome(small(name))
    return str(json.loads(told)[0]) if told.startswith("[") else told


def main() -> int:
    from panoply import registry

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="*", help="all, if none is named")
    parser.add_argument("--against", type=Path, help="what another tree printed")
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    names = chosen.methods or sorted(e.name for e in registry.entries("method"))
    with multiprocessing.get_context("spawn").Pool(chosen.workers) as pool:
        found = dict(zip(names, pool.map(fingerprint, names, chunksize=1), strict=True))
    if chosen.against is None:
        print("\n".join(f"{name} {mark}" for name, mark in found.items()))
        return 0
    before = dict(line.split(" ", 1) for line in chosen.against.read_text().splitlines())
    changed = [name for name, mark in found.items() if name in before and before[name] != mark]
    for name in changed:
        print(f"{name}: {before[name]} → {found[name]}")
    print(f"{len(found)} methods, {len(changed)} changed, {len(found.keys() - before.keys())} new")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
