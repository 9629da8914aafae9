"""Episodes that the policy was asked for elsewhere and that were written down, in place of new ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from panoply.costs import Lengths, Tokens
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.parts import Finding, Part, part

if TYPE_CHECKING:
    from panoply.rollout.text import Collector
    from panoply.serving.record import Told, Turn

RATIO = ("against", "low")
"""Settings of surrogates that weigh decisions by how likely they are now and were when they were taken."""


def _impossible(held: Any, method: Any) -> list[Finding]:
    surrogate = getattr(method, "surrogate", None)
    of = _inside(surrogate) if isinstance(surrogate, Part) else {}
    if not any(name in of for name in RATIO):
        name = surrogate.info.name if isinstance(surrogate, Part) else "nothing"
        return [
            (
                "",
                f"the record is of another policy as soon as this one has moved, and {name} takes no account of that",
            )
        ]
    if "engine:entropy" in method.needs():
        return [("", "the method looks at entropies of when answers were drawn, which a record has not")]
    if of.get("against", "behaviour") != "behaviour":
        return [("", f"a ratio against {of['against']} (surrogate.against) takes no account of who acted")]
    return []


def _inside(held: Part) -> dict[str, Any]:
    """Settings of a part, and of parts inside it."""
    found = held.settings()
    for inner in [value for value in found.values() if isinstance(value, Part)]:
        found = {**_inside(inner), **found}
    return found


def _cost(held: Any, of: Lengths) -> Tokens:
    return 0, held.prompts * (of.prompt + of.context)


@part(
    "sample",
    equation="all recorded episodes of {prompts} tasks, with the log-probabilities they were drawn with",
    needs={"world:text", "world:record"},
    gives={"recorded"},
    impossible=_impossible,
    bounds={"prompts": "at least 1"},
    cost=_cost,
)
def recorded(collect: Collector, *, prompts: int = 16) -> Experience:
    """Episodes of a record, as the stale ones that they are: `logp` is of who acted then, and a ratio makes up for it.

    In the first step after they were recorded it is 1, if the weights are the very ones. Only what was drawn learns;
    questions and what tools gave are context. All tasks come once, then all in another order; of fewer than `prompts`
    every step has all.
    """
    tasks = collect.tasks(min(prompts, collect.world.tasks))  # type: ignore[attr-defined]
    episodes: list[Told] = []
    asked, into = [], []
    for task in tasks:
        held = collect.world.groups[task.id]  # type: ignore[attr-defined]
        episodes += held
        asked += [task] * len(held)
        into += [collect.state["groups"]] * len(held)
        collect.state["groups"] += 1
    for turn in _turns(episodes):
        _check(turn, collect)
    rows = collect.told(
        asked, [[(t.prompt, list(t.said)) for t in e.turns] for e in episodes], torch.tensor(into)
    )
    logp = torch.tensor([p for turn in _turns(episodes) for p in turn.logp])
    heat = torch.tensor([t for turn in _turns(episodes) for t in [turn.temperature] * len(turn.said)])
    last = rows.by("episode").is_last()
    worth = [collect.world.worth(one.reward) for one in episodes]  # type: ignore[attr-defined]
    signals = {}
    for name in worth[0]:
        column = torch.zeros(len(rows))
        column[last] = torch.tensor([signal[name] for signal in worth])
        signals[f"signal:{name}"] = column
    rows = rows.with_columns(logp=logp, **signals)
    return rows if bool((heat == 1).all()) else rows.with_columns(temperature=heat)


def _turns(episodes: list[Told]) -> Iterator[Turn]:
    return (turn for one in episodes for turn in one.turns)


def _check(turn: Turn, collect: Collector) -> None:
    """Refuse what was not drawn from the policy itself: whose probability is not known, or was made by a cut."""
    where = f"Line {turn.line} of {collect.world.data}"  # type: ignore[attr-defined]
    if turn.temperature == 0:
        raise PanoplyError(
            f"{where} was answered greedily, so that nothing else could have been said: sft can imitate it."
        )
    if turn.top_p < 1:
        raise PanoplyError(
            f"{where} was drawn with top_p {turn.top_p:g}, and what that cut off is not in the record: sft can imitate "
            "it."
        )
    length, most = len(turn.prompt) + len(turn.said), collect.policy.context_length
    if length > most:
        raise PanoplyError(f"{where} has {length} tokens, and the model's context {most}.")
