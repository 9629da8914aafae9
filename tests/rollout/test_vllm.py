"""vLLM as an engine. Every test runs with a stand-in, and those of the engine once more where vLLM is installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from panoply import registry
from panoply.errors import PanoplyError
from panoply.experience import TERMINATED, TRUNCATED, Experience
from panoply.lora import Lora
from panoply.policies.lora import add_lora
from panoply.policies.moving import checksum, moving
from panoply.policies.text import TextPolicy
from panoply.rollout import engines, vllm
from panoply.rollout.engine import CONTEXT, LENGTH, STOP, Request, Rollouts, Sampling, Turn
from panoply.rollout.text import Collector
from panoply.rollout.vllm import VllmEngine, counted
from tests import tiny
from tests.vllm_kit import LLM, stand_in

__all__ = ["stand_in"]
PLAIN = Sampling(temperature=0.8, max_tokens=6)
CONTEXT_LENGTH = 320
PROMPTS = [[1, 2, 3, 4] * 60, [5, 6] * 20, [7, 8, 9]]
"""The first is longer than what vLLM keeps as one block on a CPU: 128 tokens."""


def fresh(seed: int = 0) -> TextPolicy:
    """A random model whose answers are not all alike, of a size that vLLM has kernels for."""
    from panoply.policies.build import open_policy
    from panoply.worlds.text.chain import Chain

    known = open_policy("fresh", Chain(), 0, "cpu")
    config = dataclasses.replace(
        known.model.config, heads=2, kv_heads=1, head_dim=32, rotary_dim=32, max_positions=CONTEXT_LENGTH
    )
    made = TextPolicy.fresh(config, known.tokenizer, seed)
    with torch.no_grad():
        for weight in made.model.parameters():
            if weight.ndim == 2:
                weight.mul_(4)
    return made


_REAL: list[tuple[TextPolicy, VllmEngine]] = []


@pytest.fixture(params=["stand-in", "real"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[TextPolicy, VllmEngine]]:
    """A policy, and an engine that has its weights. The real one is started once."""
    if request.param == "stand-in":
        request.getfixturevalue("stand_in")
        policy = fresh()
        engine = VllmEngine.of(policy, slots=8)
    else:
        if importlib.util.find_spec("vllm") is None:
            pytest.skip("vllm is not installed")
        if not _REAL:
            policy = fresh()
            _REAL.append((policy, VllmEngine.of(policy, slots=8)))
        policy, engine = _REAL[0]
        move(policy, fresh())
    published(engine, policy)
    return policy, engine


def published(engine: VllmEngine, policy: TextPolicy) -> None:
    weights = moving(policy)
    assert engine.publish(weights, engine.version + 1) == checksum(weights)


def move(policy: TextPolicy, other: TextPolicy) -> None:
    policy.model.load_state_dict(other.model.state_dict())


def asked(seeds: int = 2) -> list[Request]:
    return [Request(prompt, [10 * i + s for s in range(seeds)], key=i) for i, prompt in enumerate(PROMPTS)]


def gap(policy: TextPolicy, found: Rollouts) -> float:
    """The largest |Δ log-prob| between what was recorded and what the policy says of it."""
    experience = Experience(
        found.decisions.plus({"episode": found.decisions.tensor("context")}), found.context
    )
    with torch.no_grad():
        return float((policy.score(experience)["logp"] - experience["logp"]).abs().max())


# ------------------------------------------------------------------ what is drawn, and from what


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_log_probabilities_are_those_of_what_was_drawn_from(served: Any, temperature: float) -> None:
    policy, engine = served
    found = engine.generate(asked(), Sampling(temperature=temperature, max_tokens=6))
    assert found.decisions.rows == 6 * 6
    assert gap(policy, found) < 5e-5
    assert ("temperature" in found.decisions) == (temperature == 0.5)  # greedy tokens are of temperature 1
    assert "entropy" not in found.decisions
    assert found.context.ragged("tokens").tolist()[2][:40] == PROMPTS[1]
    assert found.context.tensor("prompt").tolist() == [0, 0, 1, 1, 2, 2]
    assert (found.keys, found.request.tolist()) == ((0, 0, 1, 1, 2, 2), [0, 0, 1, 1, 2, 2])
    if temperature == 0:
        rows = found.completions()
        assert rows[0] == rows[1]


def test_the_next_answers_are_of_the_new_weights_and_not_of_what_was_kept_of_the_old(served: Any) -> None:
    policy, engine = served
    old = policy.copy()
    engine.generate(asked(), PLAIN)
    move(policy, fresh(seed=1))
    published(engine, policy)
    found = engine.generate(asked(), PLAIN)
    assert gap(policy, found) < 5e-5
    assert gap(old, found) > 0.1


def test_a_prompt_without_the_version_would_be_answered_from_the_old_weights(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trap itself: where this fails, vLLM has learned to forget, and salts are not needed any more."""
    policy, engine = served
    core = engine.llm.llm_engine
    add = core.add_request
    monkeypatch.setattr(
        core,
        "add_request",
        lambda name, prompt, settings: add(name, {**prompt, "cache_salt": "one"}, settings),
    )
    engine.generate(asked(), PLAIN)
    move(policy, fresh(seed=1))
    published(engine, policy)
    assert gap(policy, engine.generate(asked(), PLAIN)) > 0.1


def test_a_row_depends_on_its_seed_and_turns_have_streams_of_their_own(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine = served
    core, seeds = engine.llm.llm_engine, []
    add = core.add_request
    monkeypatch.setattr(core, "add_request", lambda *args: (seeds.append(args[2].seed), add(*args)))
    warm = Sampling(temperature=1.9, max_tokens=8)
    one, other = (engine.generate([Request(PROMPTS[2], [seed, seed + 1])], warm) for seed in (5, 5))
    rows = one.completions()
    assert rows == other.completions()
    assert rows[0] != rows[1]
    again = engine.generate([Request(PROMPTS[2], [6, 5])], warm).completions()
    assert again == [rows[1], rows[0]]
    assert len(set(seeds)) == 2
    engine.generate(
        [Request(PROMPTS[2], [5])], warm, lambda ended: [[1] if t.turn == 0 else None for t in ended]
    )
    assert seeds[-2] != seeds[-1]


# ------------------------------------------------------------------ turns


def test_turns_go_on_with_what_they_were_answered(served: Any) -> None:
    policy, engine = served
    seen: list[Turn] = []

    def on_stop(ended: Sequence[Turn]) -> list[list[int] | None]:
        seen.extend(ended)
        return [[1, 1, 2] if turn.turn == 0 else None for turn in ended]

    found = engine.generate(asked(1), PLAIN, on_stop)
    assert sorted((t.row, t.turn, t.key, len(t.sampled), t.reason) for t in seen) == [
        (row, turn, row, 6, LENGTH) for row in range(3) for turn in range(2)
    ]
    assert gap(policy, found) < 5e-5
    assert (
        found.decisions.tensor("turn").tolist() == [0] * 6 + [1] * 6 + [0] * 6 + [1] * 6 + [0] * 6 + [1] * 6
    )
    row = found.context.ragged("tokens").tolist()[2]
    assert row[3 + 6 : 3 + 9] == [1, 1, 2]
    assert len(row) == 3 + 6 + 3 + 6
    assert found.reasons.tolist() == [[LENGTH, LENGTH]] * 3
    assert found.end.tolist() == [TRUNCATED] * 3


def test_turns_end_at_stop_tokens_their_length_or_the_context(served: Any) -> None:
    _, engine = served
    likely = engine.generate(
        [Request(PROMPTS[2], [0])], Sampling(temperature=0.0, max_tokens=4)
    ).completions()[0]
    stop = Sampling(temperature=0.0, max_tokens=4, stop_tokens=(likely[1],))
    first = likely.index(likely[1]) + 1
    found = engine.generate([Request(PROMPTS[2], [0])], stop)
    assert found.completions() == [likely[:first]]
    assert (found.reasons.tolist(), found.end.tolist()) == ([[STOP]], [TERMINATED])
    long = [1] * (CONTEXT_LENGTH - 2)
    found = engine.generate([Request(long, [0]), Request(PROMPTS[2], [0], most=1)], PLAIN)
    assert [len(row) for row in found.completions()] == [2, 1]
    assert found.reasons.tolist() == [[CONTEXT], [LENGTH]]
    found = engine.generate([Request([1] * 300, [0])], PLAIN, lambda ended: [[1] * 30 for _ in ended])
    assert found.end.tolist() == [TRUNCATED]
    assert found.decisions.rows == 6


def test_a_turn_that_is_complete_ends_with_that_token(served: Any) -> None:
    policy, engine = served
    found = engine.generate(asked(), PLAIN, complete=lambda said: len(said) == 3)
    assert [len(row) for row in found.completions()] == [3] * 6
    assert found.reasons.tolist() == [[STOP]] * 6
    assert gap(policy, found) < 5e-5
    word = policy.tokenizer.decode(found.completions()[0][:1])
    strings = engine.generate(asked(), dataclasses.replace(PLAIN, stop_strings=(word,)))
    assert len(strings.completions()[0]) == 1


def test_rows_that_are_left_behind_by_an_error_are_dropped(served: Any) -> None:
    policy, engine = served

    def broken(ended: Sequence[Turn]) -> list[list[int] | None]:
        raise RuntimeError("a tool fell over")

    with pytest.raises(RuntimeError, match="a tool fell over"):
        engine.generate([Request(PROMPTS[2], [1], most=2), Request(PROMPTS[1], [2])], PLAIN, broken)
    assert gap(policy, engine.generate(asked(), PLAIN)) < 5e-5


def test_new_weights_in_the_midst_of_answers(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decision says which weights drew it; the next turn reads its whole context with the new ones."""
    policy, engine = served
    first, looks = engine.version, []

    def between() -> int:
        looks.append(engine.version)
        if len(looks) == 4:
            move(policy, fresh(seed=1))
            published(engine, policy)
        return engine.version

    monkeypatch.setattr(engine, "between", between)
    asked_, long = [Request(PROMPTS[2], [1])], Sampling(max_tokens=6)
    found = engine.generate(asked_, long, lambda ended: [[1, 2] if t.turn == 0 else None for t in ended])
    assert found.decisions.tensor("version").tolist() == [first] * 3 + [first + 1] * 9
    scored = {}
    for name, own in (("old", fresh()), ("new", policy)):
        whole = found.decisions.plus({"episode": found.decisions.tensor("context")})
        with torch.no_grad():
            scored[name] = own.score(Experience(whole, found.context))["logp"]
    logp = found.decisions.tensor("logp")
    assert torch.allclose(scored["old"][:3], logp[:3], atol=5e-5)
    assert torch.allclose(scored["new"][6:], logp[6:], atol=5e-5)
    assert not torch.allclose(scored["old"][3:6], logp[3:6], atol=1e-2)


# ------------------------------------------------------------------ weights


def test_adapters_come_merged(stand_in: type[LLM]) -> None:
    policy = add_lora(fresh(), 2, settings=Lora())
    engine = VllmEngine.of(policy)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.add_(0.5)
    weights = {name: weight.clone() for name, weight in moving(policy).items()}
    assert all("lora_" in name for name in weights)
    published(engine, policy)
    found = engine.generate(asked(), PLAIN)
    assert gap(policy, found) < 5e-5
    assert gap(fresh(), found) > 0.1


def test_a_model_that_transformers_runs_is_served(stand_in: type[LLM], tmp_path: Path) -> None:
    """Its weights go to vLLM by the names that they have on disk, which only transformers knows."""
    pytest.importorskip("transformers")
    from panoply.policies.foreign_folder import load_foreign

    fresh(seed=3).save(tmp_path / "model")
    policy = TextPolicy(load_foreign(tmp_path / "model", torch.float32, "cpu"), fresh().tokenizer)
    engine = VllmEngine.of(policy)
    for _ in range(2):
        published(engine, policy)
        assert engine.comparable
        assert gap(policy, engine.generate(asked(), PLAIN)) < 5e-5
        with torch.no_grad():
            for weight in policy.parameters():
                weight.add_(0.02)


def test_weights_that_vllm_did_not_take_are_noticed(stand_in: type[LLM]) -> None:
    policy = fresh()
    engine = VllmEngine.of(policy)
    published(engine, policy)
    assert engine.comparable
    stand_in.lost = "model.layers.1.mlp.down_proj.weight"
    published(engine, policy)  # the same again
    with torch.no_grad():
        dict(policy.named_parameters())[stand_in.lost][0, 0] += 1e-3
    with pytest.raises(PanoplyError, match="vLLM holds other weights than it was given at step 2"):
        published(engine, policy)


def test_a_count_is_of_the_weights_and_not_of_how_they_lie() -> None:
    a, b = torch.randn(3, 4), torch.randn(2, 4)
    joined = torch.cat([b, a, torch.zeros(3, 4)])
    assert counted([a, b]) == counted([joined]) == counted([joined.t()])
    assert counted([a, b]) != counted([a, b + 1e-7])
    assert counted([a, -a]) != counted([a, a])
    half = a.bfloat16()
    assert counted([half]) == counted([half.flip(0)]) != counted([half * 2])


def test_what_is_packed_is_packed_anew_and_not_counted() -> None:
    packed: list[Any] = []

    class Packed(torch.nn.Linear):
        cpu_linear = None
        quant_method = type("Method", (), {"process_weights_after_loading": staticmethod(packed.append)})

    head, emptied = Packed(2, 3, bias=False), Packed(2, 3, bias=False)
    emptied.weight = torch.nn.Parameter(torch.empty(0))
    assert vllm._settled(torch.nn.ModuleList([head, emptied])) is None
    assert packed == [head]
    assert vllm._settled(torch.nn.Linear(2, 3)) is not None


def test_a_stop_string_may_begin_in_what_the_turn_had_said_before(served: Any) -> None:
    policy, engine = served
    prompt, sampling = [7, 8, 9], Sampling(temperature=0, max_tokens=4)
    drawn = engine.generate([Request(prompt, [0])], sampling).completions()[0]
    stops = dataclasses.replace(sampling, stop_strings=(policy.tokenizer.decode([prompt[-1], drawn[0]]),))
    said = [engine.generate([Request(prompt, [0], begun=n)], stops) for n in (0, 1)]
    assert [len(found.completions()[0]) for found in said] == [4, 1]
    assert said[1].reasons.tolist() == [[STOP]]


# ------------------------------------------------------------------ refusals


REFUSED = {
    "mask": ({"mask": lambda view: None}, PLAIN, "which tokens a mask allows"),
    "entropy": ({"entropy": True}, PLAIN, "entropies"),
    "top_p": ({}, Sampling(top_p=0.9), "a cut leaves"),
    "top_k": ({}, Sampling(top_k=3), "a cut leaves"),
    "min_p": ({}, Sampling(min_p=0.1), "a cut leaves"),
    "min_tokens": ({}, Sampling(min_tokens=2, stop_tokens=(1,)), "none may end a turn"),
    "penalties": ({}, Sampling(presence_penalty=0.5), "penalties"),
    "repetition": ({}, Sampling(repetition_penalty=1.1), "penalties"),
    "heat": ({}, Sampling(heat=lambda logits: logits[:, 0]), "change within a turn"),
    "schedule": ({}, Sampling(temperature=lambda at: at + 1.0), "change within a turn"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=list(REFUSED))
def test_what_would_bias_the_ratio_is_refused(stand_in: type[LLM], case: Any) -> None:
    more, sampling, why = case
    policy = fresh()
    engine = VllmEngine.of(policy)
    published(engine, policy)
    with pytest.raises(PanoplyError, match=f"vLLM does not record .*{why}.*: use the native engine"):
        engine.generate(asked(), sampling, **more)
    assert not engine.llm.llm_engine.asked


def test_a_temperature_that_vllm_refuses(served: Any) -> None:
    _, engine = served
    with pytest.raises(PanoplyError, match=r"vLLM cannot sample so: .*temperature.*, got 3.0"):
        engine.generate(asked(), Sampling(temperature=3.0))


def test_a_temperature_that_vllm_would_not_draw_at(stand_in: type[LLM]) -> None:
    policy = fresh()
    engine = VllmEngine.of(policy)
    published(engine, policy)
    with pytest.raises(PanoplyError, match="draws at a temperature of 0.01 .*, and 0.003 would be recorded"):
        engine.generate(asked(), Sampling(temperature=0.003))
    assert engine.generate(asked(), Sampling(temperature=0.01, max_tokens=2)).decisions.rows == 12


def test_other_bad_requests(stand_in: type[LLM]) -> None:
    policy = fresh()
    engine = VllmEngine.of(policy)
    with pytest.raises(PanoplyError, match="not been given weights yet"):
        engine.generate(asked(), PLAIN)
    published(engine, policy)
    with pytest.raises(PanoplyError, match="begins with vectors"):
        engine.generate([Request([1, 2], [0], prefix=torch.zeros(1, 64))], PLAIN)
    for prompt in ([], [1] * CONTEXT_LENGTH):
        with pytest.raises(PanoplyError, match=f"request 0 has {len(prompt)} tokens"):
            engine.generate([Request(prompt, [0])], PLAIN)


def test_plans_are_refused_for_what_it_lacks() -> None:
    for method, world, why in (
        ("ppo-max-alone", "chain", "sample.top_p"),
        ("hapo", "chain", "how sure"),
        ("impala", "chain", "beside"),
    ):
        made = registry.find("method", method).build(), registry.find("world", world).build()
        with pytest.raises(PanoplyError, match=f"run.engine cannot be vllm: .*{why}"):
            engines.check("vllm", *made)
    for world in ("chain", "keydoor"):
        engines.check("vllm", registry.find("method", "grpo").build(), registry.find("world", world).build())


def test_without_vllm_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(PanoplyError, match=r"run.engine=vllm needs vllm: pip install 'panoply-rl\[vllm\]'"):
        VllmEngine.of(fresh())


def test_a_layout_that_vllm_does_not_serve(stand_in: type[LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    policy = fresh()
    monkeypatch.setattr(type(policy.model.config), "to_hf", lambda self: {"model_type": "unknown"})
    with pytest.raises(
        PanoplyError, match=r"cannot serve this model \(unknown\): architectures .* are not supported\."
    ):
        VllmEngine.of(policy)


# ------------------------------------------------------------------ in a collector, and in a run


@pytest.mark.parametrize("where", [{}, {"samplers": 2, "cluster": "threads"}], ids=["here", "there"])
def test_a_run_learns_from_what_it_samples(stand_in: type[LLM], tmp_path: Path, where: Any) -> None:
    done = tiny.train(tmp_path / "run", steps=2, engine="vllm", **where)
    rows = [json.loads(line) for line in (done.run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["step0_gap"] < 1e-5 for row in rows)
    assert all("entropy" not in row for row in rows)
    stored = json.loads((done.run / "run.json").read_text())["plan"]["run"]
    assert stored["engine"] == "vllm"


def test_a_run_takes_weights_in_the_midst_of_answers(stand_in: type[LLM], tmp_path: Path) -> None:
    elsewhere: Any = {"samplers": 1, "cluster": "threads", "staleness": 1, "inflight": True}
    done = tiny.train(tmp_path / "run", steps=3, engine="vllm", **elsewhere)
    rows = [json.loads(line) for line in (done.run / "metrics.jsonl").read_text().splitlines()]
    assert [row["lag_max"] <= 1 for row in rows] == [True] * 3


@pytest.mark.parametrize("world", ["chain", "keydoor"])
def test_a_collector_plays_with_it(stand_in: type[LLM], world: str) -> None:
    from panoply.policies.build import open_policy

    made = registry.find("world", world).build()
    policy = open_policy("start", made, 0, "cpu")
    collect = Collector(made, policy, 0, engine="vllm")
    for version in (0, 1):
        collect.version = version
        found = collect.episodes(collect.tasks(2), 2, temperature=0.9)
        with torch.no_grad():
            told = policy.score(found)["logp"]
        assert float((told - found["logp"]).abs().max()) < 5e-5
        assert set(found["version"].tolist()) == {version}
        assert "entropy" not in found
        with torch.no_grad():
            for weight in policy.parameters():
                weight.add_(0.02)
    assert {held.salt for held in collect.engine.llm.llm_engine.asked} == {"v0", "v1"}
