"""What is measured of a step: its experience, and the memory it took."""

from __future__ import annotations

import resource
import sys

import torch

from panoply.experience import OPEN, OWN, Experience, Segments


def describe(experience: Experience) -> dict[str, float]:
    """Metrics of a batch of experience itself; where others' rows or past ones are in it, of the policy's new ones.

    Where it is compared with the reference: `from_reference`, the mean of log π/π_ref over decisions, and `perplexity`.
    """
    whole = experience
    if "source" in experience:
        own = experience["source"] == OWN
        if bool(own.any()) and not bool(own.all()):
            experience = experience.take(own)
    episodes = experience.by("episode")
    ends = episodes.last(experience["end"]) if "end" in experience else None
    if ends is not None and "earned" not in experience and bool((ends == OPEN).any()):
        return _under_way(whole, experience)
    found: dict[str, float] = {"decisions": len(experience), "episodes": len(episodes)}
    found["episode_length"] = float(episodes.count.float().mean())
    for name in experience.decisions:
        if name.startswith("signal:"):
            found[name.removeprefix("signal:")] = float(episodes.sum(experience[name]).mean())
    if "reward" in experience:
        returns = episodes.sum(experience["reward"].float())
        groups = Segments(episodes.first(experience["group"]))
        found["reward"] = float(returns.mean())
        found["reward_std"] = float(returns.std()) if len(returns) > 1 else 0.0
        found["degenerate_groups"] = float(groups.constant(returns).float().mean())
    if "earned" in experience:
        found |= _finished(experience)
    if ends is not None:
        found["truncated"] = float((ends == 2).float().mean())
    if "entropy" in experience:
        found["entropy"] = float(experience["entropy"].mean())
    if "logp@reference" in experience and "logp" in experience:
        found["from_reference"] = float((experience["logp"] - experience["logp@reference"]).mean())
        found["perplexity"] = float((-experience["logp"].mean()).exp())
    return found


def _under_way(experience: Experience, new: Experience) -> dict[str, float]:
    """Where answers go on in another step: what was sampled now, and of those that are over the rest.

    `open` is the share of those that go on.
    """
    episodes = experience.by("episode")
    over = episodes.last(experience["end"]) != OPEN
    ended = experience.take(episodes.rows(over)).without("source")
    sampled = {"decisions": len(new), "episodes": len(episodes), "open": float((~over).float().mean())}
    if "entropy" in new:
        sampled["entropy"] = float(new["entropy"].mean())
    return (describe(ended) if len(ended) else {}) | sampled


def _finished(experience: Experience) -> dict[str, float]:
    """Of episodes that may have begun in an earlier batch: `return` and length of those that ended in this one."""
    found = {"reward": float(experience["reward"].mean())} if "reward" in experience else {}
    ended = experience["end"] != OPEN
    if bool(ended.any()):
        found["return"] = float(experience["earned"][ended].mean())
        found["episode_length"] = float(experience["turn"][ended].float().mean()) + 1
    return found


def peak_memory() -> int:
    """The most memory the process has held, in MB (device memory where there is a GPU)."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated() // 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit
