"""Inputs that are vectors: recorded with the context, replayed by whoever scores, refused where tokens alone are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import Experience, Table
from panoply.loops.mover import Masters, Mover
from panoply.lora import Lora
from panoply.policies.attention import maps
from panoply.policies.decoder import Decoder, DecoderConfig
from panoply.policies.foreign import Foreign
from panoply.policies.lora import add_lora, load_adapter, save_adapter
from panoply.policies.text import TextPolicy
from panoply.policies.thoughts import Drawn, Gated, Thoughts
from panoply.rollout.engine import Request, Rollouts, Sampling, TextEngine
from panoply.rollout.mixture import mixed
from panoply.rollout.sampling import normals, stream
from panoply.rollout.text import Collector
from panoply.rollout.windows import next_window
from panoply.slots.update.momentum import momentum
from panoply.slots.update.optimisers import adam
from panoply.worlds.text.chain import Chain

WIDTH = 16
WORLD = Chain(operations=2)


def fresh(seed: int = 3) -> TextPolicy:
    sizes: dict[str, Any] = {"width": WIDTH, "layers": 2, "heads": 2, "inner": 32, "tied": True}
    policy = TextPolicy.fresh(
        DecoderConfig(vocab_size=WORLD.tokenizer.vocab_size, **sizes), WORLD.tokenizer, seed
    )
    with torch.no_grad():
        policy.model.head_weight.mul_(20)  # or everything would be as likely as everything else
    return policy


def thinking(**settings: Any) -> TextPolicy:
    policy = fresh()
    policy.think(Gated(WIDTH, **{"marker": "+", "least": 0.2, "most": 0.9, **settings}))
    return policy


class Noisy(Thoughts):
    """Every token that is not `+` is a vector around the last state, and that is a choice of its own."""

    kind = "noisy"

    def think(self, drawn: Drawn) -> tuple[Tensor, Tensor]:
        return drawn.action != WORLD.tokenizer.id("+"), drawn.state + 0.5 * drawn.noise()

    def density(self, vectors: Tensor, state: Tensor) -> Tensor:
        return -(vectors - state).square().sum(-1) / (2 * 0.5**2)


def asked(policy: TextPolicy, **settings: Any) -> Experience:
    collect = Collector(WORLD, policy, 0)
    return collect.episodes(collect.tasks(3), 4, **settings)


def gap(policy: TextPolicy, experience: Experience) -> float:
    with torch.no_grad():
        return float((policy.score(experience)["logp"] - experience["logp"]).abs().max())


def engine(
    policy: TextPolicy, prompts: list[list[int]], slots: int = 512, patience: int = 1, **more: Any
) -> Rollouts:
    requests = [Request(p, [10 * i + k for k in range(3)]) for i, p in enumerate(prompts)]
    sampling = Sampling(max_tokens=9, stop_tokens=WORLD.stop_tokens)
    made = TextEngine(policy.model, slots=slots, compact=0.1, patience=patience)
    return made.generate(requests, sampling, **more)


PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [2, 2]]


# ------------------------------------------------------------------ recorded and replayed


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"top_k": 3, "repetition_penalty": 1.3}])
def test_what_was_sampled_is_what_is_scored(settings: dict[str, Any]) -> None:
    policy = thinking()
    found = asked(policy, **settings)
    at = found.context.ragged("vectors_at")
    assert gap(policy, found) < 1e-4
    assert len(at.values) > 12, "something was thought"
    zeros = found.context.plus({"vectors": type(at)(0 * found.context.ragged("vectors").values, at.offsets)})
    assert gap(policy, Experience(found.decisions, zeros)) > 1e-2, "the recorded vectors are read"


@pytest.mark.parametrize("prepare", ["plain", "padded", "written out"])
def test_every_layout_reads_them(prepare: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = thinking()
    found = asked(policy)
    policy.shared = prepare != "plain"
    monkeypatch.setattr(Decoder, "fusing", prepare == "plain")
    if prepare == "padded":
        monkeypatch.setattr(Decoder, "packs", False)
    assert gap(policy, found) < 1e-4
    assert gap(policy, found.take(torch.randperm(len(found))[:20])) < 1e-4


def test_rows_that_come_go_and_go_on_keep_theirs() -> None:
    """Three slots for nine rows: vectors move with their rows, and a new row begins without one."""
    policy = thinking()
    whole, narrow = engine(policy, PROMPTS), engine(policy, PROMPTS, slots=2)
    assert whole.completions() == narrow.completions()
    for name in ("vectors", "vectors_at"):
        one, two = whole.context.ragged(name), narrow.context.ragged(name)
        assert torch.equal(one.offsets, two.offsets)
        assert torch.allclose(one.values, two.values, atol=1e-4)


def test_an_observation_comes_after_the_vector_of_the_token_before_it() -> None:
    policy = thinking(marker="never said")
    replies: Callable[[Any], Any] = lambda turns: [[5, 6, 7] if t.turn == 0 else None for t in turns]  # noqa: E731
    found = engine(policy, PROMPTS, on_stop=replies)
    late = engine(policy, PROMPTS, patience=4, on_stop=replies)
    assert late.completions() == found.completions(), (
        "whoever looks for ended turns seldom finds their vectors"
    )
    played = Experience(found.decisions, found.context)
    assert int(played["turn"].max()) == 1
    assert gap(policy, played) < 1e-4
    told = found.context.ragged("vectors_at")
    for row in range(len(found)):
        said = played["position"][played["context"] == row]
        assert told[row].tolist() == said.tolist(), "of sampled tokens alone, in both turns"


def test_a_density_takes_the_place_of_the_tokens_probability() -> None:
    policy = fresh()
    policy.think(Noisy(WIDTH))
    found = asked(policy)
    scored = policy.score(found, frozenset({"entropy"}))
    vectors, at = found.context.ragged("vectors"), found.context.ragged("vectors_at")
    states = policy.states(found)
    checked = 0
    for i, (row, position) in enumerate(
        zip(found["context"].tolist(), found["position"].tolist(), strict=True)
    ):
        here = (at[row] == position).nonzero().flatten()
        assert float(scored["logp"][i]) == pytest.approx(float(found["logp"][i]), abs=1e-3)
        assert float(scored["entropy"][i]) == pytest.approx(float(found["entropy"][i]), abs=1e-4)
        if not len(here):
            continue
        checked += 1
        expected = -2 * (vectors[row][here[0]] - states[i]).square().sum()
        assert float(scored["logp"][i]) == pytest.approx(float(expected), abs=1e-3)
        assert float(scored["entropy"][i]) == 0
    assert 0 < checked < len(found)
    state = policy.states(found.take(torch.tensor([0])))
    assert float((vectors[0][0] - state).abs().max()) > 0.1, "it was drawn"


def test_noise_is_of_a_rows_seed_and_place_alone() -> None:
    streams = stream(torch.arange(400))
    found = normals(streams, torch.full((400,), 7), 32)
    assert torch.equal(found[3:4], normals(streams[3:4], torch.tensor([7]), 32))
    assert not torch.equal(found, normals(streams, torch.full((400,), 8), 32))
    assert float(found.mean()) == pytest.approx(0, abs=0.03)
    assert float(found.std()) == pytest.approx(1, abs=0.03)
    assert float(torch.corrcoef(found.T).fill_diagonal_(0).abs().max()) < 0.25


# ------------------------------------------------------------------ prefixes


def test_every_row_may_begin_with_vectors_of_its_own() -> None:
    """Two blank tokens, read as vectors: rows of one prompt differ, and are not laid out as if they shared it."""
    policy, dice = fresh(), torch.Generator().manual_seed(0)
    prefixes = [torch.randn(2, WIDTH, generator=dice) for _ in range(3)]
    tokens = [0, 0, *WORLD.task("train", 0).prompt]
    requests = [*(Request(tokens, [1], prefix=p) for p in prefixes), Request(tokens, [1, 2])]
    found = TextEngine(policy.model).generate(requests, Sampling(max_tokens=5))
    played = Experience(found.decisions, found.context)
    assert gap(policy, played) < 1e-4
    assert found.context.tensor("prompt").tolist() == [0, 1, 2, 3, 3]
    assert found.context.ragged("vectors_at").tolist() == [[0, 1]] * 3 + [[], []]
    assert torch.equal(found.context.ragged("vectors").values, torch.cat(prefixes))
    bare = Experience(found.decisions, Table({n: c for n, c in found.context.items() if "vectors" not in n}))
    with torch.no_grad():
        off = (policy.score(bare)["logp"] - played["logp"]).abs()
    assert float(off[played["context"] < 3].max()) > 1e-2 > 1e-4 > float(off[played["context"] >= 3].max())


def test_a_prefix_that_does_not_fit_is_refused() -> None:
    policy = fresh()
    for prefix, length in (
        (torch.zeros(2, WIDTH), 2),
        (torch.zeros(1, WIDTH + 1), 4),
        (torch.zeros(WIDTH), 4),
    ):
        with pytest.raises(PanoplyError, match="fewer vectors than the prompt has tokens"):
            TextEngine(policy.model).generate([Request([1] * length, [0], prefix=prefix)], Sampling())


# ------------------------------------------------------------------ a part of the model


def test_they_are_saved_copied_and_loaded_with_the_model(tmp_path: Path) -> None:
    policy = thinking()
    found = asked(policy)
    policy.save(tmp_path / "model")
    again = TextPolicy.load(tmp_path / "model")
    assert again.fingerprint() == policy.fingerprint() == policy.copy().fingerprint()
    assert gap(again, found) < 1e-4
    assert asked(again)["action"].tolist() == found["action"].tolist()
    other = thinking(seed=5)
    other.load_weights(tmp_path / "model")
    assert other.fingerprint() == policy.fingerprint()
    fresh().save(tmp_path / "model")
    assert TextPolicy.load(tmp_path / "model").thoughts is None, "a model without them leaves none behind"


def test_adapters_leave_them_whole_and_are_saved_beside_them(tmp_path: Path) -> None:
    fresh().save(tmp_path / "base")
    policy = add_lora(TextPolicy.load(tmp_path / "base"), 2, 0, Lora())
    policy.think(Gated(WIDTH, marker="+", least=0.2, most=0.9))
    learning = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert "thoughts.residual" in learning
    assert not any("embed" in name for name in learning)
    save_adapter(policy, tmp_path / "adapter", tmp_path / "base")
    assert gap(TextPolicy.load(tmp_path / "adapter"), asked(policy)) < 1e-4
    with torch.no_grad():
        policy.thoughts.residual.add_(1)  # type: ignore[union-attr, operator]
    load_adapter(policy, tmp_path / "adapter")
    assert gap(TextPolicy.load(tmp_path / "adapter"), asked(policy)) < 1e-4


@pytest.mark.parametrize(
    ("text", "reason"),
    [('{"kind": "dreams", "settings": {}}', "Unknown kind of thoughts 'dreams'"),
     ('{"kind": "gated", "settings": {"marker": 3, "depth": 1}}', "does not say what thoughts of this kind are"),
     ('{"kind": "gated"}', "settings")],
)  # fmt: skip
def test_files_that_are_no_thoughts_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    thinking().save(tmp_path / "model")
    (tmp_path / "model/thoughts.json").write_text(text)
    with pytest.raises(PanoplyError, match=reason):
        TextPolicy.load(tmp_path / "model")


def test_their_weights_may_have_a_rate_of_their_own() -> None:
    """Adam's first step is as long as the rate, whatever the gradient."""
    policy = thinking()
    weights = dict(policy.named_parameters())
    rates = {"thoughts.residual": 0.01, "thoughts.gate_i.bias": 0.1}
    before = {n: w.detach().clone() for n, w in weights.items()}
    for bits in (32, 8):
        mover = Mover(Masters(weights), adam(lr=0.001, bits=bits), 10, rates=rates)
        mover.set_rate(0)
        for weight in weights.values():
            weight.grad = torch.ones_like(weight)
        mover.move()
        for name, weight in weights.items():
            step = float((weight.detach() - before[name]).abs().mean())
            assert step == pytest.approx(rates.get(name, 0.001), rel=2e-3), name
        assert mover.rate == 0.001
        before = {n: w.detach().clone() for n, w in weights.items()}
    with pytest.raises(PanoplyError, match="moves all weights together"):
        Mover(Masters(weights), momentum(), 10, rates=rates)


# ------------------------------------------------------------------ where tokens are all that is read


def test_paths_that_cannot_feed_vectors_say_so() -> None:
    policy = thinking()
    collect, found = Collector(WORLD, policy, 0), asked(policy)
    tasks = collect.tasks(1)
    refused: dict[str, Callable[[], Any]] = {
        "A continuation goes on from tokens alone": lambda: collect.prefix_values(tasks, [[1]], 1),
        "A branch goes on from tokens alone": lambda: collect.tree(tasks),
        "An answer in windows goes on from tokens alone": lambda: next_window(collect, {}, 1, 1, 1.0),
        "Attention maps are of tokens alone": lambda: maps(policy, found, 1),
        "cannot be put after other prompts": lambda: found.reprompted({0: [1]}),
        "A mixture of two models has no thoughts": lambda: mixed(policy, fresh(), 0.5),
    }
    for reason, ask in refused.items():
        with pytest.raises(PanoplyError, match=reason):
            ask()
    foreign = object.__new__(Foreign)
    other = fresh()
    other.model = foreign
    with pytest.raises(PanoplyError, match="need a model that runs natively"):
        other.think(Gated(WIDTH, marker="+"))


def test_given_answers_have_none_and_stand_beside_own_ones() -> None:
    policy = thinking()
    collect = Collector(WORLD, policy, 0)
    own, tasks = asked(policy), collect.tasks(2)
    given = collect.answers(tasks, [WORLD.gold(task) for task in tasks])
    both = Experience.mix([own, given])
    with torch.no_grad():
        together, alone = policy.score(both)["logp"], policy.score(given)["logp"]
    assert float((together[: len(own)] - own["logp"]).abs().max()) < 1e-4
    assert float((together[len(own) :] - alone).abs().max()) < 1e-4
