"""Gates: whether a claim is able to tell, asked on tuning seeds before those that decide are spent.

| gate | asks |
|---|---|
| problems | are there at least a hundred different held-out problems? |
| room | does the best baseline end between 15 % and 85 % of the way from the start to the best that is known? |
| property | is there what the method exploits (`shows`), such as groups without a difference? |

A claim that does not pass has no verdict: it is not able to tell, and asks for another world. Where a gate is not to be
passed by the nature of the claim, the claim says why (`waives`), and its page does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from panoply.errors import PanoplyError
from panoply.evidence import scores
from panoply.evidence.tuning import SEEDS

if TYPE_CHECKING:
    from panoply.evidence.claims import Shows
    from panoply.evidence.contest import Contest, Heat

LEAST, MOST = 0.15, 0.85
"""Of the room: what a baseline has to reach, and what it has to leave."""
PROBLEMS = 100


def closed(gates: Sequence[Mapping[str, Any]]) -> str | None:
    """Why a claim cannot tell: the first gate that it does not pass, and what was measured there."""
    for gate in gates:
        if not gate["passed"] and "waived" not in gate:
            return f"the gate of {gate['gate']}: {gate['measured']}."
    return None


def gate_of_problems(contest: Contest) -> dict[str, Any]:
    """Needs no run; and what the other gates could not be asked without is refused here."""
    _check_what_is_said(contest)
    wanted = contest.plan(contest.arms[1], 0).options.held_out
    if contest.world.medium == "text":
        wanted = len({task.id for task in contest.world.held_out(wanted)})
    return _gate(contest, "problems", wanted >= PROBLEMS, f"{wanted} different held-out problems")


def _check_what_is_said(contest: Contest) -> None:
    """Whether a claim says how its baseline leaves room: the best that is known, or a property of other metrics."""
    claim, metric = contest.claim, contest.claim.metric
    if not scores.is_held_out(metric):
        if not claim.shows and "property" not in claim.waives:
            raise PanoplyError(
                f"The claim on {contest.labels[0]} is about {metric}, which has no start: say with shows=(Shows(…),) "
                "what of the baseline leaves room."
            )
    elif contest.best() is None and "room" not in claim.waives:
        raise PanoplyError(
            f"The claim on {contest.labels[0]} does not say how much room there is: give the best {metric} that is "
            "known, best=…"
        )


def gates_of_baseline(contest: Contest, tuning: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the tuned baselines come to on tuning seeds."""
    arms = [arm.but(tuning["chosen"][arm.label]) for arm in contest.arms[1:]]
    shown = [shown.metric for shown in contest.claim.shows]
    heats = contest.orders(arms, SEEDS if tuning["runs"] else SEEDS[:2], split="validation", shown=shown)
    contest.make(heats)
    whole = [(seed, side) for seed, side in heats if all(o.problem is None for o in side.values())]
    if not whole:
        raise PanoplyError(f"No run of the baselines of {contest.labels[0]} has finished.")
    return [*_room(contest, whole), *(_property(contest, shown, whole) for shown in contest.claim.shows)]


def _room(contest: Contest, heats: Sequence[Heat]) -> Iterator[dict[str, Any]]:
    """Where the metric is one that evaluations measure; of others the property is asked for."""
    metric, best = contest.claim.metric, contest.best()
    if not scores.is_held_out(metric):
        return
    if best is None:
        yield _gate(contest, "room", False, f"no best {metric} is known")
        return
    ends = {label: _ends(contest, heats, label) for label in contest.labels[1:]}
    label, (start, end) = max(ends.items(), key=lambda found: contest.sign * found[1][1])
    share = (end - start) / (best - start) if contest.sign * (best - start) > 0 else 1.0
    measured = (
        f"{label} goes from {start:.4g} to {end:.4g} where {best:.4g} is the best known, {share:.0%} of the room; "
        f"{LEAST:.0%} to {MOST:.0%} can tell"
    )
    yield _gate(contest, "room", LEAST <= share <= MOST, measured)


def _ends(contest: Contest, heats: Sequence[Heat], label: str) -> tuple[float, float]:
    """The mean start and end of an arm's held-out curve."""
    curves = [contest.read(side[label], contest.claim.metric).curve for _, side in heats]
    return fmean(curve[0][1] for curve in curves), fmean(curve[-1][1] for curve in curves)


def _property(contest: Contest, shown: Shows, heats: Sequence[Heat]) -> dict[str, Any]:
    baseline = contest.labels[1]
    found = fmean(contest.read(side[baseline], shown.metric).value for _, side in heats)
    passed = shown.least <= found <= shown.most
    return _gate(
        contest, "property", passed, f"{shown.metric} of {baseline} is {found:.4g}; {shown.words()} can tell"
    )


def _gate(contest: Contest, name: str, passed: bool, measured: str) -> dict[str, Any]:
    waived = contest.claim.waives.get(name)
    return {"gate": name, "passed": passed, "measured": measured, **({"waived": waived} if waived else {})}
