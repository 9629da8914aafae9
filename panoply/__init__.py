"""Panoply: policy optimization in which a paper is a diff.

import panoply as pp
result = pp.train("grpo", world="chain")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from panoply.api import (
        Trained,
        evaluate,
        export,
        judge,
        load_policy,
        plan,
        plan_recipe,
        play,
        sample,
        steps,
        train,
        video,
    )
    from panoply.errors import PanoplyError
    from panoply.evidence.claims import Learns, Ranks
    from panoply.evidence.compare import compare
    from panoply.evidence.trials import claim
    from panoply.experience import Experience, Ragged, Segments, Table
    from panoply.handle import Step, Steps
    from panoply.parts import Part, part
    from panoply.policies.taps import Pass, tap
    from panoply.progress import Progress
    from panoply.recipes import Recipe, Stage
    from panoply.regimes import Dataset, Offline, OffPolicy, OnPolicy, Several
    from panoply.registry import algorithm, method, protocol, recipe, survey, system, world
    from panoply.report.runs import runs

_HOME = {
    "api": (
        "Trained",
        "evaluate",
        "export",
        "judge",
        "load_policy",
        "plan",
        "plan_recipe",
        "play",
        "sample",
        "steps",
        "train",
        "video",
    ),
    "errors": ("PanoplyError",),
    "evidence.claims": ("Learns", "Ranks"),
    "evidence.compare": ("compare",),
    "evidence.trials": ("claim",),
    "experience": ("Experience", "Ragged", "Segments", "Table"),
    "handle": ("Step", "Steps"),
    "progress": ("Progress",),
    "regimes": ("Dataset", "OffPolicy", "Offline", "OnPolicy", "Several"),
    "parts": ("Part", "part"),
    "policies.taps": ("Pass", "tap"),
    "recipes": ("Recipe", "Stage"),
    "registry": ("algorithm", "method", "protocol", "recipe", "survey", "system", "world"),
    "report.runs": ("runs",),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    """Import on first use: `import panoply` alone loads next to nothing."""
    if name not in _WHERE:
        raise AttributeError(f"module 'panoply' has no attribute '{name}'")
    import importlib
    import sys

    value = getattr(importlib.import_module(f"panoply.{_WHERE[name]}"), name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
