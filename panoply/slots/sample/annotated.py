"""Whole episodes of control that annotators compare."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from panoply.experience import TERMINATED, TRUNCATED, Experience, Table
from panoply.parts import Finding, Part, part
from panoply.seeds import numpy_rng
from panoply.slots.reward.signals import signal

if TYPE_CHECKING:
    from panoply.rollout.control import ControlCollector

_RETURN = signal(name="reward")
Raters = tuple[Part | None, ...]


# ------------------------------------------------------------------ what annotators say


def worth(experience: Experience, raters: Raters) -> Tensor:
    """[episodes, raters]: what each episode is worth to each rater, the sum of a reward."""
    episodes = experience.by("episode")
    return torch.stack([episodes.sum(r(experience).double()) for r in raters if r is not None], -1)


def preference(first: Tensor, second: Tensor, sharpness: float | None = None, flip: float = 0.0) -> Tensor:
    """P(first ≻ second) of episodes that are worth so much to raters, [..., raters] each.

    A rater prefers what is worth more to it: always, with ½ for what is worth the same, or by σ(sharpness·difference).
    Whoever is asked is any of them, and says the opposite of what was meant with probability `flip`.
    """
    ahead = first - second
    each = (ahead.sign() + 1) / 2 if sharpness is None else torch.sigmoid(sharpness * ahead)
    return flip + (1 - 2 * flip) * each.mean(-1)


def _answers(p: Tensor, soft: bool, *names: Any) -> Tensor:
    """What annotators say when asked: 1 for the first, 0 for the second; with `soft` the probability itself."""
    if soft:
        return p
    return (torch.from_numpy(numpy_rng("annotator", *names).random(tuple(p.shape))) < p).double()


# ------------------------------------------------------------------ the part


def _impossible(held: Any, method: Any, world: Any) -> list[Finding]:
    if getattr(world, "seats", 1) > 1:
        return [("", f"an episode of {world.name} is one seat's, and nobody judges a game by one of them")]
    if held.against == "batch" and held.prompts * held.group == 1:
        return [("prompts", "an episode needs another one to be compared with")]
    if held.temperature == 0 and held.group > 1:
        return [("temperature", f"all {held.group} episodes of a group would be the same")]
    return []


def _equation(held: Any) -> str:
    whom = f"the {held.opponents} before" if held.against == "past" else f"{held.opponents} of the batch"
    raters = [r.equation() for r in (held.rater, held.second, held.third) if r is not None]
    wrong = f", {held.flip:g} of the answers wrong" if held.flip else ""
    return f"{held.prompts} starts × {held.group} episodes, each compared with {whom} by {' | '.join(raters)}{wrong}"


@part(
    "sample",
    equation=_equation,
    state=lambda: {"queue": torch.zeros(0, 0, dtype=torch.double)},
    needs={"world:control", "world:verify"},
    gives={"pairs", "signal:wins", "signal:worth"},
    impossible=_impossible,
    bounds={
        "prompts": "at least 1",
        "group": "at least 1",
        "temperature": "from 0 to 100",
        "opponents": "at least 1",
        "sharpness": "above 0",
        "flip": "from 0 to 1",
    },
)
def annotated(
    state: dict[str, Tensor],
    collect: ControlCollector,
    *,
    prompts: int = 16,
    group: int = 1,
    temperature: float = 1.0,
    opponents: int = 10,
    against: Literal["past", "batch"] = "past",
    rater: Part = _RETURN,
    second: Part | None = None,
    third: Part | None = None,
    sharpness: float | None = None,
    flip: float = 0.0,
    soft: bool = False,
) -> tuple[dict[str, Tensor], Experience]:
    """Whole episodes, of which annotators are asked which of two is better; nothing else is known of what they earned.

    The signal `wins`, on an episode's last decision, is the share of comparisons that it won; `worth` is what it was
    worth to the first rater, to be looked at, and `comparisons` in a step's metrics how many answers were asked for. A
    time limit is the end: what is judged is the episode as it is.

    opponents   how many others each is compared with, none of them itself
    against     `past`: the latest episodes of earlier steps (in the first step, others of the batch); `batch`: pairs of
                this step's episodes by lot, no two of them twice, which then are the experience's pairs
    rater       whose total decides what is better: any reward. With a `second` and a `third` any of these is asked, by
                lot: three of them may prefer in a circle, which no score of single episodes can say
    sharpness   how sure a rater is, σ(sharpness·difference); left out, it never errs
    flip        how often the opposite is said
    soft        instead of answers, probabilities
    """
    found = collect.episodes(collect.tasks(prompts), group, temperature=temperature)
    episodes, raters = found.by("episode"), (rater, second, third)
    valued = worth(found, raters)
    names = (collect.seed, int(episodes.keys[0]))
    known = state["queue"] if against == "past" else valued.new_zeros(0, 0)
    pairs: dict[str, Tensor] = {}
    if len(known):
        p = preference(valued[:, None], known[None], sharpness, flip)
        said = _answers(p, soft, *names)
        wins, asked = said.mean(-1), said.numel()
    else:
        first, other = _lots(len(valued), opponents, *names)
        said = _answers(preference(valued[first], valued[other], sharpness, flip), soft, *names)
        wins, asked = _share(len(valued), first, other, said), len(said)
        turned = said < 0.5
        pairs = {
            "chosen": episodes.keys[torch.where(turned, other, first)],
            "rejected": episodes.keys[torch.where(turned, first, other)],
            "p": torch.where(turned, 1 - said, said).float(),
        }
    collect.notes = {**collect.notes, "comparisons": float(asked)}
    last = episodes.is_last()
    found = found.with_columns(
        **{
            "signal:wins": episodes.rows(wins.float()) * last,
            "signal:worth": episodes.rows(valued[:, 0].float()) * last,
            "end": torch.where(found["end"] == TRUNCATED, TERMINATED, found["end"]),
        }
    )
    queue = torch.cat([known, valued])[-opponents:] if len(known) else valued[-opponents:]
    found = found.with_pairs(Table(pairs)) if against == "batch" else found
    return {"queue": queue if against == "past" else known}, found


def _lots(episodes: int, opponents: int, *names: Any) -> tuple[Tensor, Tensor]:
    """Pairs of different episodes by lot, as many as there are questions, each at most once."""
    every = list(itertools.combinations(range(episodes), 2))
    if not every:
        return torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    rng = numpy_rng("opponents", *names)
    chosen = np.array(every)[rng.permutation(len(every))[: episodes * opponents]]
    return torch.from_numpy(chosen[:, 0].copy()), torch.from_numpy(chosen[:, 1].copy())


def _share(episodes: int, first: Tensor, other: Tensor, said: Tensor) -> Tensor:
    """Of each episode, the share of its comparisons that it won; ½ where there were none."""
    won = said.new_zeros(episodes).index_add(0, first, said).index_add(0, other, 1 - said)
    times = torch.cat([first, other]).bincount(minlength=episodes)
    return torch.where(times > 0, won / times.clamp(min=1), 0.5)
