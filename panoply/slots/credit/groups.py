"""Credit against what other episodes of the same group earned."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from panoply.experience import Experience, Segments
from panoply.parts import Finding, Part, part

Baseline = Literal["mean", "leave_one_out", "median", "batch_mean", "none"]
Scale = Literal["std", "batch_std", "none"]


def episode_returns(experience: Experience) -> tuple[Tensor, Segments]:
    """R of each episode, and the groups its episodes form: every episode has one vote, whatever its length."""
    episodes = experience.by("episode")
    return episodes.sum(experience["reward"].float()), Segments(episodes.first(experience["group"]))


def _impossible(held: Any, method: Any) -> list[Finding]:
    sample = method.sample.settings() if hasattr(method, "sample") else {}
    if sample.get("group") != 1:
        return []
    if held.baseline == "leave_one_out":
        return [("baseline", "leave_one_out needs another episode in the group, and sample.group is 1")]
    if held.baseline == "batch_mean" and sample.get("prompts") == 1:
        return [("baseline", "a batch of one episode is its own baseline, so its advantage is 0")]
    if held.baseline not in ("batch_mean", "none"):
        return [
            (
                "baseline",
                "a group of one episode is its own baseline, so every advantage is 0 (sample.group is 1)",
            )
        ]
    if held.scale == "std":
        return [("scale", "a group of one episode has no standard deviation (sample.group is 1)")]
    return []


def _equation(held: Part) -> str:
    baseline = {
        "mean": "R − mean_group(R)",
        "leave_one_out": "R − mean_others(R)",
        "median": "R − median_group(R)",
        "batch_mean": "R − mean_batch(R)",
        "none": "R",
    }[held.settings()["baseline"]]
    scale = {"std": " / (std_group(R) + ε)", "batch_std": " / (std_batch(R) + ε)", "none": ""}[
        held.settings()["scale"]
    ]
    return f"A = ({baseline}){scale}" if scale else f"A = {baseline}"


def nothing_divides(held: Any, method: Any) -> list[Finding]:
    """ε is added to what divides."""
    return [("epsilon", "nothing divides (credit.scale=none)")] if held.scale == "none" else []


@part(
    "credit",
    equation=_equation,
    impossible=_impossible,
    inert=nothing_divides,
    bounds={"epsilon": "from 0 to 1"},
)
def group(
    experience: Experience, *, baseline: Baseline = "mean", scale: Scale = "std", epsilon: float = 1e-4
) -> Tensor:
    """One advantage per episode, spread over its decisions: its return against its group's.

    A group whose returns are all exactly equal gets 0, never a rounding error divided by a tiny deviation; against
    `batch_mean`, or against nothing, only where its own deviation divides.

    baseline: what is subtracted; `batch_mean` is the mean of all returns of the batch, whichever group they are of
    scale: what divides; `batch_std` is the deviation of all returns of the batch as they are, before anything is
           subtracted, and not that of the differences
    """
    returns, groups = episode_returns(experience)
    advantage = centre(returns, groups, baseline)
    if scale != "none":
        peers = groups if scale == "std" else Segments(torch.zeros_like(groups.index))
        advantage = advantage / (peers.rows(peers.std(returns)) + epsilon)
        advantage = advantage.masked_fill(peers.rows(peers.constant(returns)), 0.0)
    if baseline not in ("batch_mean", "none"):
        advantage = advantage.masked_fill(groups.rows(groups.constant(returns)), 0.0)
    return experience.by("episode").rows(advantage)


def _token_equation(held: Any) -> str:
    return "A_t = r_t − mean over the group's tokens" + (" / (their std + ε)" if held.scale == "std" else "")


@part("credit", equation=_token_equation, inert=nothing_divides, bounds={"epsilon": "from 0 to 1"})
def token_group(
    experience: Experience, *, scale: Literal["std", "none"] = "std", epsilon: float = 1e-4
) -> Tensor:
    """Each decision's own reward against the rewards of all decisions of its group.

    For rewards that differ inside of an episode. Every decision has one vote, so a long episode has more than a short
    one; a reward for the whole episode must stand on all its decisions.
    """
    reward, groups = experience["reward"].float(), experience.by("group")
    advantage = reward - groups.rows(groups.mean(reward))
    if scale == "std":
        advantage = advantage / (groups.rows(groups.std(reward)) + epsilon)
    return advantage.masked_fill(groups.rows(groups.constant(reward)), 0.0)


def centre(returns: Tensor, groups: Segments, baseline: Baseline) -> Tensor:
    """Returns minus their group's baseline."""
    if baseline == "mean":
        return returns - groups.rows(groups.mean(returns))
    if baseline == "median":
        return returns - groups.rows(groups.median(returns))
    if baseline == "leave_one_out":
        others = groups.rows(groups.count - 1).to(returns.dtype)
        return returns - (groups.rows(groups.sum(returns)) - returns) / others.clamp(min=1)
    if baseline == "batch_mean":
        batch = Segments(torch.zeros_like(groups.index))
        return (returns - batch.rows(batch.mean(returns))).masked_fill(
            batch.rows(batch.constant(returns)), 0.0
        )
    return returns
