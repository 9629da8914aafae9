"""Credit among turns taken in the same state of the world."""

from __future__ import annotations

from collections import defaultdict
from difflib import SequenceMatcher
from typing import Any, Literal

import torch
from torch import Tensor

from panoply.experience import Experience, Segments
from panoply.parts import Finding, Part, part


def turns_to_go(experience: Experience, earned: Tensor, gamma: float) -> Tensor:
    """R_t = Σ_{k≥t} γ^{k−t} r_k inside each episode, for every turn; `earned` has one value a turn."""
    turns, episodes = experience.by("turn"), experience.by("episode")
    episode, number = turns.first(episodes.index), turns.first(experience["turn"])
    table = earned.new_zeros(len(episodes), int(number.max()) + 2)
    table[episode, number] = earned
    for t in range(table.shape[1] - 2, -1, -1):
        table[:, t] += gamma * table[:, t + 1]
    return table[episode, number]


def standing(
    values: Tensor, peers: Segments, scale: Literal["std", "none"], epsilon: float, correction: int = 1
) -> Tensor:
    """Values against the mean of their peers, in standard deviations; exactly 0 where all peers are equal."""
    relative = values - peers.rows(peers.mean(values))
    if scale == "std":
        relative = relative / (peers.rows(peers.std(values, correction)) + epsilon)
    return relative.masked_fill(peers.rows(peers.constant(values)), 0.0)


def alike(experience: Experience, threshold: float) -> Tensor:
    """For every turn the first of its group, in the order of turns, whose prompt resembles its own.

    Two prompts are alike whose similarity, twice the tokens they share in order over the tokens of both (difflib's
    ratio), is at least the threshold. A turn joins the first such turn that began a state, and else begins one.
    """
    turns = experience.by("turn")
    row, start = turns.first(experience["context"]).tolist(), turns.min(experience["position"]).tolist()
    tokens = experience.context.ragged("tokens")
    prompts = [tuple(tokens[r].tolist()[:at]) for r, at in zip(row, start, strict=True)]
    begun: dict[int, list[int]] = defaultdict(list)
    found = []
    for turn, group in enumerate(turns.first(experience["group"]).tolist()):
        matcher: SequenceMatcher[int] = SequenceMatcher(None, (), prompts[turn], autojunk=False)
        same = (first for first in begun[group] if _ratio(matcher, prompts[first]) >= threshold)
        found.append(next(same, turn))
        begun[group] += [turn] if found[-1] == turn else []
    return torch.tensor(found, device=experience["action"].device)


def _ratio(matcher: SequenceMatcher[int], other: tuple[int, ...]) -> float:
    matcher.set_seq1(other)
    return matcher.ratio()


def of_group(
    experience: Experience,
    scale: Literal["std", "none"],
    votes: Literal["episode", "turn"],
    alone: Literal["zero", "return"],
    epsilon: float,
) -> Tensor:
    """A^E of every turn: its episode's return against those of the group (see `episode_and_anchor`)."""
    turns, episodes = experience.by("turn"), experience.by("episode")
    returns, of_turn = episodes.sum(experience["reward"]), turns.first(episodes.index)
    group_of_turn, group_of_episode = (s.first(experience["group"]) for s in (turns, episodes))
    if votes == "turn":
        whole = standing(returns[of_turn], Segments(group_of_turn), scale, epsilon)
    else:
        whole = standing(returns, Segments(group_of_episode), scale, epsilon)[of_turn]
    if alone == "return":
        peers = Segments(group_of_episode)
        whole = torch.where((peers.rows(peers.count) == 1)[of_turn], returns[of_turn], whole)
    return whole


def anchors_of(experience: Experience, similarity: float = 1.0) -> Segments:
    """The turns of a group that were taken in the same state, or below 1 in states that look so much alike."""
    turns = experience.by("turn")
    states = Segments(turns.first(experience["state"]) if similarity == 1 else alike(experience, similarity))
    return Segments(Segments(turns.first(experience["group"])).index * len(states) + states.index)


def _equation(held: Part) -> str:
    s = held.settings()
    over = " / std" if s["scale"] == "std" else ""
    return (
        f"A = (R − mean_group R){over} + {s['omega']:g}·(R_t − mean_state R_t){over},  "
        f"R_t = Σ_k≥t {s['gamma']:g}^(k−t)·r_k"
    )


def _inert(held: Any, method: Any, world: Any) -> list[Finding]:
    unused = ("gamma", "similarity") if held.omega == 0 else ()
    found = [(name, "omega is 0, so that returns of turns do not count") for name in unused]
    found += [("epsilon", "nothing is divided when scale is none")] if held.scale == "none" else []
    if getattr(world, "turn_cap", 0) == 1:
        found += [(name, f"episodes of {world.name} have one turn") for name in ("gamma", "votes")]
    if method.sample.settings().get("group", 1) > 1:
        found.append(("alone", "no episode is its whole group (sample.group=1)"))
    if held.similarity < 1 and not getattr(world, "markov", False):
        found.append(
            ("similarity", f"prompts of {world.name} have the whole episode in them, and never recur")
        )
    return found


@part(
    "credit",
    equation=_equation,
    inert=_inert,
    bounds={
        "omega": "at least 0",
        "gamma": "from 0 to 1",
        "similarity": "above 0 to 1",
        "epsilon": "from 0 to 1",
    },
)
def episode_and_anchor(
    experience: Experience,
    *,
    omega: float = 1.0,
    gamma: float = 0.95,
    scale: Literal["std", "none"] = "std",
    votes: Literal["episode", "turn"] = "episode",
    alone: Literal["zero", "return"] = "zero",
    similarity: float = 1.0,
    epsilon: float = 1e-6,
) -> Tensor:
    """A^E, an episode's return against its group's, plus ω·A^S, a turn's return against those from the same state.

    A state is the world's own (`state`), of one group only; a turn in a state that nobody else was in, nor the episode
    itself before, has A^S = 0. All decisions of a turn share its advantage. With γ = 1 and a reward at the end, turns
    of successful episodes tie in every state: only γ < 1 tells the shorter way from the longer.

    votes   whose returns make a group's mean and deviation: each episode's once, or, as in the released code, once for
            each of its turns, so that long episodes weigh more
    alone   the A^E of an episode that is its whole group: 0, or its return as it is (released code)
    similarity   below 1, a state is what looks so much alike: prompts with this share of their tokens in common, in
            order, join the first that they resemble (released code, 0.95); 1 goes by the world's own word
    """
    turns = experience.by("turn")
    whole = of_group(experience, scale, votes, alone, epsilon)
    returns = turns_to_go(experience, turns.sum(experience["reward"]), gamma)
    anchors = anchors_of(experience, similarity)
    return turns.rows(whole + omega * standing(returns, anchors, scale, epsilon))
