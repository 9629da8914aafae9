"""The checksum of weights: its formula, written out slowly."""

from __future__ import annotations

import hashlib

import torch

from panoply.policies import moving


def test_a_checksum_is_the_sum_of_words_times_odd_numbers_of_their_places() -> None:
    torch.manual_seed(0)
    weights = {"b": torch.randn(3, 5), "a": torch.randn(7).bfloat16()}
    digest = hashlib.sha256()
    for name, words in (("a", torch.int16), ("b", torch.int32)):
        held = weights[name]
        total = sum(
            (word + 1) * (2 * place * 0x5851F42D4C957F2D + 1)
            for place, word in enumerate(held.flatten().view(words).tolist())
        )
        signed = (total + 2**63) % 2**64 - 2**63
        digest.update(f"{name}{tuple(held.shape)}{held.dtype}{signed}".encode())
    assert moving.checksum(weights) == digest.hexdigest()[:16]


def test_places_that_are_kept_and_those_that_are_not_have_the_same_odd_numbers() -> None:
    cpu, some = torch.device("cpu"), moving.KEPT
    beyond = moving._odd(some - 3, some + 3, cpu)
    assert beyond[:3].equal(moving._odd(some - 3, some, cpu))
    assert beyond.diff().unique().tolist() == [2 * 0x5851F42D4C957F2D - 2**64]
