"""Past episodes of a run, drawn again into the batch of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from panoply.parts import Finding, part

if TYPE_CHECKING:
    from panoply.episodes import Episodes
    from panoply.policies.text import TextPolicy


def _needs(held: Any) -> frozenset[str]:
    signal = frozenset() if held.kept == "all" else frozenset({f"signal:{held.name}"})
    return frozenset({"world:text"}) | signal


def _inert(held: Any, method: Any) -> list[Finding]:
    return [("name", "all episodes are kept, whatever they earned")] if held.kept == "all" else []


def _impossible(held: Any, method: Any) -> list[Finding]:
    group = method.sample.settings().get("group", 1)
    if held.into == "own" and group > held.size:
        return [("size", f"a group of {group} episodes would not fit")]
    return []


def _equation(held: Any) -> str:
    what = {"all": "", "varied": f" whose {held.name} varies", "earned": f" that earned {held.name}"}[
        held.kept
    ]
    if held.into == "own":
        return f"beside what is new, {held.batch} groups of the last {held.size} episodes{what}"
    return f"in each group, {held.batch} episodes of its task, of the last {held.size}{what}"


@part(
    "replay",
    unit="episode",
    equation=_equation,
    needs=_needs,
    inert=_inert,
    impossible=_impossible,
    bounds={"size": "at least 1", "batch": "at least 1"},
)
def episodes(
    _policy: TextPolicy,
    seed: int,
    *,
    size: int = 1024,
    batch: int = 4,
    into: Literal["own", "asked"] = "own",
    kept: Literal["all", "varied", "earned"] = "varied",
    name: str = "success",
) -> Episodes:
    """Own episodes of earlier steps, graded and credited with the new ones; `logp` stays that of who acted then.

    size    episodes that are remembered; the oldest leave first, with `into=own` by whole groups
    into    `own`: whole groups come again as they were. `asked`: where a task is asked again, single episodes join its
            new group
    batch   how many groups a step, or how many episodes for each group
    kept    `all` episodes, those of groups whose signal `varied`, or those that `earned` it
    name    the signal that decides
    """
    from panoply import episodes as memory

    worth = {"all": None, "varied": memory.varied(name), "earned": memory.earned(name)}[kept]
    return memory.Episodes(size, batch, into, worth, seed)
