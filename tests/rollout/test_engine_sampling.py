"""Drawing one token: the random streams, the edges of the inverse distribution, truncation, bad settings."""

from __future__ import annotations

import pytest
import torch

from panoply.errors import PanoplyError
from panoply.policies.attention import Cache
from panoply.policies.penalties import penalise_
from panoply.rollout.cuts import truncated
from panoply.rollout.sampling import Sampling, draw, invert, stream, uniforms
from panoply.rollout.stops import StopStrings


def test_streams_are_splitmix64() -> None:
    # The generator's first outputs for seed 0.
    assert int(stream(torch.tensor([0]))[0]) % 2**64 == 0xE220A8397B1DCDAF


def test_uniforms_are_uniform_over_seeds_and_positions() -> None:
    table = uniforms(stream(torch.arange(-500, 500))[:, None], torch.arange(1000)[None])
    assert table.min() > 0
    assert table.max() < 1
    counts = (table.flatten() * 1000).long().bincount(minlength=1000)
    assert (((counts - 1000) ** 2) / 1000).sum() < 1200  # 999 degrees of freedom, deviation 45
    for other in (table[1:], table[:, 1:]):
        pair = torch.stack([table[: len(other), : other.shape[1]].flatten(), other.flatten()])
        assert pair.corrcoef()[0, 1].abs() < 5e-3


def test_inversion_never_gives_an_impossible_token() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, -torch.inf, 1.0, -torch.inf])
    edges = torch.tensor([0.0, 2**-41, 0.2689, 0.269, 0.5, 1 - 2**-41], dtype=torch.float64)
    assert invert(logits.log_softmax(-1).expand(6, 6), edges).tolist() == [1, 1, 1, 4, 4, 4]
    lone = torch.full((1, 3), -torch.inf).index_fill(1, torch.tensor([2]), 0.0)
    assert invert(lone, torch.tensor([0.5], dtype=torch.float64)).tolist() == [2]


def test_truncation() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.3, 0.06, 0.04]]).log()
    assert truncated(logits, 2, 1.0).int().tolist() == [[0, 1, 1, 0, 0]]
    assert truncated(logits, None, 0.5).int().tolist() == [[0, 1, 0, 0, 0]]
    assert truncated(logits, None, 0.51).int().tolist() == [[0, 1, 1, 0, 0]]
    assert truncated(logits, 3, 0.85).int().tolist() == [[0, 1, 1, 0, 0]]  # 0.8 of 0.9 is enough
    assert truncated(logits, 99, 1e-9).int().tolist() == [[0, 1, 0, 0, 0]]


def test_the_mask_acts_before_truncation() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    mask = torch.tensor([[False, True, False, True]])
    drawn = draw(logits, torch.tensor([0.99], dtype=torch.float64), Sampling(top_k=2), None, mask)
    assert drawn.allowed is not None
    assert drawn.allowed.tolist() == [[1, 3]]
    assert drawn.action.tolist() == [3]
    assert torch.allclose(drawn.logp, torch.tensor([1.0, 3.0]).log_softmax(0)[:1])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"temperature": -1.0}, "temperature must be zero or more"),
        ({"temperature": float("nan")}, "temperature must be zero or more"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"temperature": 1e-30}, "temperature must be 0, for the likeliest token, or at least 1e-06"),
        ({"top_k": 0}, "top_k must be a whole number from 1 on"),
        ({"top_k": 2.5}, "top_k must be a whole number from 1 on"),
        ({"top_k": float("nan")}, "top_k must be a whole number from 1 on"),
        ({"top_k": float("inf")}, "top_k must be a whole number from 1 on"),
        ({"min_p": 1.0}, "min_p must be from 0 up to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be at least 1e-06"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty must be at least 1e-06"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be at least 1e-06, and finite"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be from -100 to 100"),
        ({"frequency_penalty": -101}, "frequency_penalty must be from -100 to 100"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens must be from 0 to max_tokens"),
        ({"stop_strings": ("",)}, "stop_strings"),
        ({"stop_strings": "end"}, "stop_strings"),
        ({"stop_strings": ("end", 1)}, "stop_strings"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(PanoplyError, match=sentence):
        Sampling(**settings)  # type: ignore[arg-type]


def test_the_least_repetition_penalty_leaves_a_distribution() -> None:
    logits = torch.tensor([[100.0, -100.0, 50.0]])
    said = penalise_(logits, torch.tensor([[0]]), torch.tensor([1]), 1e-6)
    drawn = draw(said, torch.tensor([0.5], dtype=torch.float64), Sampling())
    assert (drawn.action.tolist(), drawn.logp.tolist()) == ([0], [0.0])


def test_a_schedule_must_stay_above_zero() -> None:
    with pytest.raises(PanoplyError, match="schedule"):
        Sampling(temperature=lambda t: 1.0 - t, max_tokens=4).temperatures()
    assert Sampling(temperature=lambda t: torch.ones_like(t)).temperatures() is None


class Bytes:
    """A tokenizer whose tokens are bytes, so that a character may take several."""

    def decode(self, ids: object) -> str:
        return bytes(ids).decode(errors="replace")  # type: ignore[call-overload, no-any-return]


def test_stop_strings_of_several_bytes_a_character() -> None:
    strings = StopStrings(("€", "ab"), Bytes(), 256, torch.device("cpu"))
    text = list("xa€".encode())
    assert [strings.completed(text[:n]) for n in range(1, 6)] == [False, False, False, False, True]
    assert strings.may[[text[-1], ord("b"), ord("a")]].tolist() == [True, True, False]
    assert strings.completed(list(b"ab"))
    assert not strings.completed(list(b"abx"))


def test_cache_rows_are_copied_grown_and_taken() -> None:
    def entry(rows: int, length: int, value: float) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((rows, 1, length, 2), value), torch.full((rows, 1, length, 2), -value)

    cache = Cache(1, 3, 1, 4, 2, torch.float32, "cpu")
    cache.begin(torch.tensor([[0, 1], [2, 3]]))
    keys, values = cache.append(0, *entry(2, 2, 1.0))
    assert keys[..., 0].tolist() == [[[1, 1, 0, 0]], [[0, 0, 1, 1]]]
    assert torch.equal(values, -keys)
    cache.put(torch.tensor([2, 0]), cache, torch.tensor([1, 1]), 3)
    cache.begin(torch.tensor([[5]] * 3))
    keys, _ = cache.append(0, *entry(3, 1, 2.0))
    assert cache.capacity == 8
    assert keys[:, 0, :, 0].tolist() == [[0, 0, 1, 0, 0, 2], [0, 0, 1, 1, 0, 2], [0, 0, 1, 0, 0, 2]]
    copy = cache.take(torch.tensor([1]), 3, 5)
    copy.begin(torch.tensor([[4]]), 5)
    assert copy.append(0, *entry(1, 1, 3.0))[0][0, 0, :, 0].tolist() == [0, 0, 1, 0, 3]
