"""Text that ends a turn (`sample.stop`): the same in training, evaluations, samplers and `panoply sample`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import own_model
import pytest
import tiny
from test_cli import Terminal
from test_cli import panoply as panoply  # the fixture

import panoply as pp
from panoply.experience import TERMINATED, TRUNCATED, Experience
from panoply.planning import Plan
from panoply.policies.build import open_policy
from panoply.report.text import _word
from panoply.rollout.text import Collector
from panoply.rollout.tree import Branch
from panoply.rollout.windows import next_window, nothing_open
from panoply.run import Run
from panoply.worlds.text.chain import Chain

STOP = ("x", "qz")
"""Of random bytes, the one often and the other hardly ever."""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("own")
    own_model.write(folder / "model", template=None)
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"prompt": f"say {i}"}) for i in range(40)))
    (folder / "reward.py").write_text(
        "def stopped(completions):\n    return [float(c.endswith('x')) + len(c) / 99 for c in completions]\n"
    )
    return {
        "data": str(folder / "data.jsonl"),
        "reward": f"{folder / 'reward.py'}:stopped",
        "model": str(folder / "model"),
        "threads": 1,
        "device": "cpu",
    }


def settings(**more: Any) -> dict[str, Any]:
    usual = {
        "sample.prompts": 2,
        "sample.group": 6,
        "world.longest": 64,
        "run.held_out": 4,
        "update.lr": 1e-3,
    }
    return {**usual, "run.checkpoint_every": 1, "sample.stop": STOP, **more}


def planned(own: dict[str, Any], **more: Any) -> Plan:
    return pp.plan("grpo", **own, settings=settings(**more))


def weights(run: Path) -> str:
    return pp.load_policy(run, which="last").fingerprint()  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def run(own: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.bare(tmp_path_factory.mktemp("runs") / "one", "grpo", **own, steps=3, settings=settings())
    return made.run


def assert_stopped(texts: list[str], stops: tuple[str, ...] = STOP) -> None:
    """Nothing follows the text that ended an answer, and some answers were ended so."""
    assert any(text.endswith(stops) for text in texts)
    for text in texts:
        assert not any(stop in text[:-1] for stop in stops)


def test_answers_end_with_it_and_hold_it(own: dict[str, Any]) -> None:
    world: Any = planned(own).world()
    policy = open_policy(own["model"], world, 0, "cpu")
    collect = Collector(world, policy, seed=0)
    found = collect.episodes(collect.tasks(4), 8)
    episodes = found.by("episode")
    texts = [world.tokenizer.decode(found["action"][episodes.index == i].tolist()) for i in range(32)]
    assert_stopped(texts)
    for text, end in zip(texts, episodes.last(found["end"]).tolist(), strict=True):
        assert end == (TERMINATED if text.endswith((*STOP, "<|end|>")) else TRUNCATED)
    assert float((policy.score(found)["logp"].detach() - found["logp"]).abs().max()) < 1e-4
    earned = episodes.sum(found["signal:reward"]).tolist()
    assert [value >= 1 for value in earned] == [text.endswith("x") for text in texts]


PAIRS = tuple(a + b for a in "0123456789" for b in "0123456789")
"""Texts of two tokens: between them a window or a branch may end."""


def pieces_of(world: Chain, step: Callable[[Collector], Iterator[Experience]]) -> dict[int, str]:
    """Episodes as text, as they stand at last."""
    collect, found = Collector(world, open_policy("fresh", world, 0, "cpu"), seed=1), {}
    for rows in step(collect):
        episode, action = rows["episode"].tolist(), rows["action"].tolist()
        for one in set(episode):
            said = [a for e, a in zip(episode, action, strict=True) if e == one]
            found[one] = world.tokenizer.decode(said)
    return found


def test_it_may_begin_in_one_window_and_end_in_the_next() -> None:
    world = Chain(stop=PAIRS)

    def windows(collect: Collector) -> Iterator[Experience]:
        held = nothing_open()
        for _ in range(world.max_tokens):
            held, rows = next_window(collect, held, 16, 1)
            yield rows.take(rows["episode"] < 16)

    whole = pieces_of(world, lambda collect: iter([collect.episodes(collect.tasks(16))]))
    assert pieces_of(world, windows) == whole
    assert_stopped(list(whole.values()), PAIRS)


def test_it_may_begin_before_a_branch() -> None:
    world = Chain(stop=PAIRS)
    collect = Collector(world, open_policy("fresh", world, 0, "cpu"), seed=1)
    tree = collect.tree(collect.tasks(16))
    nodes = list(range(16))
    while nodes:
        tree.extend([Branch(node, 1, tokens=1) for node in nodes])
        nodes = tree.open()
    over = [stand.said for stand, node in zip(tree._stands, tree.nodes, strict=True) if node.ended]
    assert_stopped([world.tokenizer.decode(said) for said in over], PAIRS)


def test_it_may_begin_in_what_is_continued() -> None:
    world = Chain(stop=PAIRS)
    collect = Collector(world, open_policy("fresh", world, 0, "cpu"), seed=1)
    rollouts, _ = collect.continued(collect.tasks(1), [world.tokenizer.encode("5+1")], 64)
    assert_stopped(["1" + world.tokenizer.decode(said) for said in rollouts.completions()], PAIRS)


def test_a_run_keeps_it_and_so_do_evaluations_and_samples(run: Path, panoply: Terminal) -> None:
    assert Run.open(run).plan().world().stop == STOP  # type: ignore[union-attr]
    assert json.loads((run / "run.json").read_text())["plan"]["world"]["stop"] == list(STOP)
    assert_stopped(pp.sample(run, "say 1", n=16, max_tokens=64))
    assert_stopped([e.turns[0].said for e in pp.play(run, n=16)])
    others = pp.sample(run, "say 1", n=16, max_tokens=64, stop="y")
    assert_stopped(others, ("y",))
    assert any("x" in text for text in others)
    _, out, _ = panoply.run("sample", str(run), "say 1", "-n", "8", "--stop", "y", "--stop", "k")
    said = out.split("say 1")[1:]
    assert any(text.endswith(("y\n", "k\n")) for text in said)
    apart = [
        pp.evaluate(run, problems=4, attempts=8, settings=more).sampled
        for more in ({}, {"world.stop": ("y",)})
    ]
    code, out, _ = panoply.run(
        "eval", str(run), "--problems", "4", "--attempts", "8", "--stop", "y", "--json"
    )
    assert code == 0
    assert json.loads(out)["sampled"] == apart[1] != apart[0]


def test_a_stopped_run_goes_on_with_it(own: dict[str, Any], run: Path, tmp_path: Path) -> None:
    for step in pp.steps("grpo", run=tmp_path / "run", **own, steps=3, settings=settings()):
        if step.number == 1:
            break
    tiny.resume(tmp_path / "run")
    assert weights(tmp_path / "run") == weights(run)


def test_samplers_end_turns_with_it(own: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for samplers in (1, 2):
        folder = tmp_path / f"{samplers}"
        made = {**own, "steps": 2, "settings": settings(), "samplers": samplers, "cluster": "threads"}
        tiny.bare(folder, "grpo", **made)
        found.append(weights(folder))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert any(line.get("reward", 0) > 0 for line in lines)
    assert found[0] == found[1]


def test_tokens_that_samplers_draw_alone_end_with_it(tmp_path: Path) -> None:
    """Trees on the driver, of whose branches samplers draw the tokens."""
    settings: dict[str, Any] = {
        "world.operations": 4,
        "world.stop": PAIRS,
        "run.held_out": 4,
        "run.episodes_every": 1,
    }
    settings |= {"sample.grow.segment": 1, "sample.grow.branching": (2,) * 6, "sample.prompts": 2}
    more = {"steps": 1, "samplers": 1, "cluster": "threads", "model": "fresh", "settings": settings}
    tiny.bare(tmp_path / "run", "spo-tree", world="chain", **more)
    lines = [json.loads(line) for line in (tmp_path / "run" / "episodes.jsonl").read_text().splitlines()]
    answers = [line["text"].partition("=")[2] for line in lines]
    assert_stopped(answers, PAIRS)


@pytest.mark.parametrize(
    ("method", "world", "settings", "sentence"),
    [
        ("ppo", "cartpole", {"sample.stop": "x"}, "sample.stop has no effect: cartpole has no text"),
        (
            "sft",
            "chain",
            {"sample.stop": "x"},
            "sample.stop has no effect: sft samples nothing. Evaluations do",
        ),
        ("bgpo", "digits", {"sample.stop": "1"}, "world.stop has no effect: a masked-diffusion model"),
        ("grpo", "chain", {"sample.stop": ""}, "chain.stop holds an empty text"),
        ("grpo", "chain", {"sample.stop": "a", "world.stop": "b"}, "say the same: leave one of them out"),
    ],
)
def test_what_it_cannot_end_is_refused(
    method: str, world: str, settings: dict[str, str], sentence: str
) -> None:
    with pytest.raises(pp.PanoplyError, match=sentence):
        pp.plan(method, world, settings=settings)


def test_words_are_text_whatever_else_they_could_be() -> None:
    for word, expected in {
        '["</answer>"]': ("</answer>",),
        "</answer>,b": ("</answer>", "b"),
        "###": ("###",),
        "7": ("7",),
        "User:": ("User:",),
        '["\\n\\n"]': ("\n\n",),
    }.items():
        plan = pp.plan("grpo", settings={"sample.stop": word})
        assert plan.world_options == {"stop": expected}
        assert pp.plan("grpo", settings={"world.stop": _word(expected)}).world_options == {"stop": expected}


def test_left_out_it_is_nowhere() -> None:
    plan = pp.plan("grpo")
    assert plan.to_json()["world"] == {"id": "chain@1"}
    assert plan.world().stop == ()  # type: ignore[union-attr]
    assert pp.plan("relift", settings={"sample.stop": "a"}).world().stop == ("a",)  # type: ignore[union-attr]


def test_vllm_ends_turns_with_it() -> None:
    plan = pp.plan("grpo", settings={"sample.stop": "a"}, engine="vllm", samplers=1)
    assert plan.world().stop == ("a",)  # type: ignore[union-attr]
