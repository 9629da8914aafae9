"""Running code that a model wrote, behind walls.

    from panoply.sandbox import Limits, Program, Wanted

    box = Wanted().find()                      # the first that is safe here; PanoplyError with reasons where none is
    box.run("print(6 * 7)").said               # '42\\n'
    box.run_many([Program(code) for code in codes])   # results in their order, as many at a time as there are cores

Whoever needs more of Python than monty has says so: `Wanted(needs=frozenset({"python", "stdin", "files"}))`, and
installed packages by name: `Wanted(preload=("numpy",))`. A world that runs programs has a setting
`sandbox: str = "auto"` and gives `Wanted(self.sandbox, …)` as its property `sandboxed`: the plan then names the sandbox
or is refused, and `--sandbox NAME` chooses one. `find` returns the same sandbox to all who ask alike, so ask for it
where it is needed and keep nothing.

A verdict is made outside. What is expected never goes in: let the program print what it gives (`verdicts.py`), and
compare here. `Result.ok` says that a program ran to its end, and nothing of what it is worth.
"""

from __future__ import annotations

from panoply.sandbox.choice import Wanted, register
from panoply.sandbox.contract import Limits, Program, Result, Sandbox, Unavailable

__all__ = ["Limits", "Program", "Result", "Sandbox", "Unavailable", "Wanted", "register"]
