"""What a set of examples to imitate is chosen by: teachers by a trial, answers by how far they are from one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from panoply.errors import PanoplyError
from panoply.experience import Experience


def select_teacher(trials: Mapping[str, float]) -> str:
    """The teacher whose pupil did best, the first of those that did; not the one who is best itself."""
    if not trials:
        raise PanoplyError("A teacher is chosen among those who were tried, and none was.")
    return max(trials, key=lambda name: trials[name])


def levenshtein(a: Sequence[int], b: Sequence[int]) -> float:
    """The least number of tokens to put in, leave out or change that make one of the other, by the longer length."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, right in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (left != right))
    return row[-1] / max(1, len(a), len(b))


def farthest_point(answers: Sequence[Sequence[int]], keep: int, prefix: int = 256) -> list[int]:
    """So many of the answers, by number: the first, then always the one whose nearest among those is the farthest.

    The distance is Levenshtein's on the first `prefix` tokens, whose time is the product of two lengths.
    """
    if not answers:
        return []
    short = [tuple(answer[:prefix]) for answer in answers]
    taken, nearest = [0], [levenshtein(answer, short[0]) for answer in short]
    while len(taken) < min(keep, len(answers)):
        at = max((i for i in range(len(short)) if i not in taken), key=lambda i: nearest[i])
        taken.append(at)
        nearest = [min(d, levenshtein(answer, short[at])) for d, answer in zip(nearest, short, strict=True)]
    return taken


@torch.no_grad()
def corpus_entropy(policy: Any, corpus: Experience) -> torch.Tensor:
    """Of each answer the mean entropy of a policy at its tokens: what it finds foreign is higher.

    Ask the pupil before it learns; afterwards all is familiar.
    """
    found = policy.score(corpus, frozenset({"entropy"}))["entropy"]
    return corpus.by("episode").mean(found.cpu().float())


@torch.no_grad()
def latent_shift(before: Any, after: Any, corpus: Experience, block: int = 1) -> float:
    """How far learning has moved what a policy thinks of some answers: less is better.

    Hidden states after a block, a mean for each answer, of both policies are projected on their first two principal
    components; the distance of the two centres counts, in deviations of the earlier ones.
    """
    need = f"hidden:{block}"
    means = []
    for policy in (before, after):
        hidden = policy.score(corpus, frozenset({need}))[need].cpu().double()
        episodes = corpus.by("episode")
        sums = hidden.new_zeros(len(episodes), hidden.shape[1]).index_add(0, episodes.index, hidden)
        means.append(sums / episodes.count[:, None])
    both = torch.cat(means)
    _, _, components = torch.linalg.svd(both - both.mean(0), full_matrices=False)
    first, second = ((m - both.mean(0)) @ components[:2].T for m in means)
    spread = (first - first.mean(0)).square().sum(1).mean().sqrt()
    return float((second.mean(0) - first.mean(0)).norm() / spread.clamp(min=1e-12))
