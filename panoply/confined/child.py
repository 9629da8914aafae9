"""Inside a confined process: JSON lines in, JSON lines out, nothing pickled.

Run as `python -m panoply.confined.child MODULE:FUNCTION PARENT`. The first line has the limits and the function's
arguments; what it returns is called with every further line and its answer written.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from panoply.confined.limits import Limits, die_with_parent

Answer = dict[str, Any]
Handler = Callable[[Any], Answer]


def main() -> None:
    target, parent = sys.argv[1:]
    die_with_parent(int(parent))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed must not end up in the protocol

    def say(answer: Answer) -> None:
        print(json.dumps(answer), file=out, flush=True)

    order = json.loads(sys.stdin.readline())
    allowed = Limits.from_json(order["limits"]).apply()
    module, _, name = target.partition(":")
    try:
        handler: Handler = getattr(importlib.import_module(module), name)(*order["arguments"])
    except BaseException as error:
        say({"error": reason(error)})
        return
    say({"ready": True, "not_limited": allowed})
    for line in sys.stdin:
        try:
            answer = handler(json.loads(line))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                return
            answer = {"error": reason(error)}
        say(answer)


def reason(error: BaseException) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}".removesuffix(": ")


if __name__ == "__main__":
    main()
