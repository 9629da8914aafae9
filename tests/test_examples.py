"""Every example does what its page says."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from test_cli import Terminal

import panoply as pp
from panoply import extensions, registry
from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.run import Run
from panoply.worlds.control.world import Box, Discrete

EXAMPLES = tiny.ROOT / "examples"
METHOD, PART, WORLD, UPDATE, TERM, REPLAY = (
    str(EXAMPLES / f"plugin_{kind}.py") for kind in ("method", "part", "world", "update", "term", "replay")
)


@pytest.fixture
def panoply(capsys: pytest.CaptureFixture[str], registries: None) -> Terminal:
    return Terminal(capsys)


def words(folder: Path, **settings: object) -> list[str]:
    chosen = {"world.operations": 2, "run.held_out": 8, "sample.prompts": 4, **settings}
    sets = [w for k, v in chosen.items() for w in ("--set", f"{k}={v}")]
    return [*sets, "--model", "fresh", "--steps", "2", "--run", str(folder), "--quiet"]


class TestMethod:
    def test_it_is_short(self) -> None:
        assert len(Path(METHOD).read_text().splitlines()) <= 25

    def test_it_trains_and_resumes_without_being_named_again(self, tmp_path: Path, panoply: Terminal) -> None:
        panoply(
            "train", "rank-grpo", "--plugin", METHOD, *words(tmp_path / "run", **{"reward.name": "ended"})
        )
        plan = Run.open(tmp_path / "run").plan()
        assert plan.method_id == "rank-grpo@1"
        assert plan.method.slots()["credit"].info.name == "group_rank"  # type: ignore[union-attr]
        moved = [m for m in tiny.metrics(tmp_path / "run") if m["gradient_norm"] > 0]
        assert moved
        (tmp_path / "run/result.json").unlink()
        panoply("train", "--resume", str(tmp_path / "run"), "--quiet")

    def test_ranks(self, registries: None) -> None:
        from kit import hand

        extensions.load_plugin(METHOD)
        credit = registry.find_part("credit", "group_rank")()
        made = hand(
            group=[0, 0, 0, 0, 1, 1, 2],
            episode=[0, 0, 1, 2, 3, 4, 5],
            reward=[1.0, 2.0, 100.0, 0.0, 5.0, 5.0, 7.0],
        )
        expected = torch.tensor([0.0, 0.0, 1.0, -1.0, 0.0, 0.0, 0.0])
        assert torch.equal(credit(made).float(), expected)

    def test_it_is_shown_as_a_diff(self, panoply: Terminal) -> None:
        shown = panoply("show", "rank-grpo", "--plugin", METHOD)
        assert "changes from grpo" in shown
        assert "group_rank" in shown.split("changes from grpo")[1]


class TestPart:
    def test_it_fills_a_slot_by_its_name(self, tmp_path: Path, panoply: Terminal) -> None:
        chosen = words(tmp_path / "run", **{"select.solvable.most": 0.5})
        panoply("train", "grpo", "--select", "solvable", "--plugin", PART, *chosen)
        plan = Run.open(tmp_path / "run").plan()
        assert [p.settings() for p in plan.method.slots()["select"]] == [{"most": 0.5}]  # type: ignore[union-attr]

    def test_what_it_keeps(self, registries: None) -> None:
        from kit import hand

        extensions.load_plugin(PART)
        select = registry.find_part("select", "solvable")()
        made = hand(group=[0, 0, 1, 1], episode=[0, 1, 2, 3], reward=[1.0, 1.0, 1.0, 0.0])
        assert select(made).tolist() == [False, False, True, True]


def resumed(run: Path, panoply: Terminal) -> bool:
    """Whether a run of two steps that ended after the first comes to the same weights and metrics."""
    logged, whole = tiny.metrics(run), tiny.model_bytes(run, 2)
    shutil.rmtree(run / "checkpoints/step-0000002")
    (run / "result.json").unlink()
    panoply("train", "--resume", str(run), "--quiet")
    return tiny.metrics(run) == logged and tiny.model_bytes(run, 2) == whole


class TestTerm:
    def test_it_trains_and_resumes_bit_for_bit(self, tmp_path: Path, panoply: Terminal) -> None:
        """The price is 0 as long as the policy is the reference; then it is what the first step made it."""
        assert len(Path(TERM).read_text().splitlines()) <= 30
        run = tmp_path / "run"
        more = {"reward.name": "ended", "run.checkpoint_every": 1, "update.lr": 0.01, "update.epochs": 3}
        more |= {"regularise.kl_limit.limit": 1e-4, "regularise.kl_limit.rate": 100.0}
        panoply("train", "grpo", "--regularise", "kl_limit", "--plugin", TERM, *words(run, **more))
        prices = [m["kl_price"] for m in tiny.metrics(run)]
        assert 0 < prices[0] != prices[1]
        assert resumed(run, panoply)


class TestReplay:
    def test_it_trains_and_resumes_bit_for_bit(self, tmp_path: Path, panoply: Terminal) -> None:
        sets = {"sample.length": 20, "replay.batch": 8, "replay.warmup": 10, "policy.hidden": "8"}
        sets |= {"run.held_out": 1, "run.checkpoint_every": 1, "replay.newest": 5}
        chosen = [w for k, v in sets.items() for w in ("--set", f"{k}={v}")]
        run = tmp_path / "run"
        panoply("train", "sac", "--world", "pendulum", "--replay", "newest", "--plugin", REPLAY, *chosen,
                "--steps", "2", "--run", str(run), "--quiet")  # fmt: skip
        assert resumed(run, panoply)

    def test_half_of_a_draw_is_new(self, registries: None) -> None:
        """Of 6 steps in room for 4 the newest two lie at places 0 and 1."""
        extensions.load_plugin(REPLAY)
        policy = ControlPolicy.fresh(Box((1,)), Discrete(2), PolicySpec(hidden=()), seed=0)
        memory = registry.find_part("replay", "newest")(newest=2)(policy, 0)
        memory.begin(1, 4)
        memory.held.written = 6
        memory.held._flat["reward"][:] = torch.arange(4.0)
        reward = memory.draw(400, torch.Generator().manual_seed(0)).reward
        assert set(reward[::2].tolist()) == {0, 1}
        assert set(reward[1::2].tolist()) == {0, 1, 2, 3}


class TestUpdate:
    def test_it_trains_and_resumes_bit_for_bit(self, tmp_path: Path, panoply: Terminal) -> None:
        assert len(Path(UPDATE).read_text().splitlines()) <= 30
        run, more = tmp_path / "run", {"reward.name": "ended", "run.checkpoint_every": 1, "update.lr": 0.001}
        panoply("train", "grpo", "--update", "lion", "--plugin", UPDATE, *words(run, **more))
        assert [m["lr"] for m in tiny.metrics(run)] == [0.001, 0.001]
        assert tiny.model_bytes(run, 2) != tiny.model_bytes(run, 1)
        assert resumed(run, panoply)

    def test_by_hand(self, registries: None) -> None:
        """m is 0 at first, then 0.2 of the first gradient; 0.5·m + 0.5·g has the sign of g until m outweighs it."""
        extensions.load_plugin(UPDATE)
        weight = torch.nn.Parameter(torch.tensor([1.0]))
        optimiser = registry.find_part("update", "lion")(lr=0.1, beta1=0.5, beta2=0.8)([weight])
        for slope, expected in ((10.0, 0.9), (-1.0, 0.8), (-5.0, 0.9)):
            weight.grad = torch.tensor([slope])
            optimiser.step()
            assert weight.item() == pytest.approx(expected)


class TestWorld:
    def test_it_is_short_and_sound(self, registries: None) -> None:
        assert len(Path(WORLD).read_text().splitlines()) <= 60
        extensions.load_plugin(WORLD)
        world = registry.find("world", "reverse").build()
        world.self_test()
        assert len(world.held_out(64)) == 64

    @pytest.mark.parametrize("method", ["grpo", "sft", "dpo"])
    def test_it_trains(self, method: str, tmp_path: Path, panoply: Terminal) -> None:
        size = {"sample.prompts": 2} if method == "grpo" else {"data.batch": 16}
        sets = [w for k, v in {"run.held_out": 8, **size}.items() for w in ("--set", f"{k}={v}")]
        run = str(tmp_path / "run")
        out = panoply(
            "train", method, "--world", "reverse", "--plugin", WORLD, *sets,
            "--model", "fresh", "--steps", "2", "--run", run, "--json",
        )  # fmt: skip
        assert {"greedy", "sampled"} <= json.loads(out)["after"].keys()
        assert "pass@8" in panoply("eval", run, "--problems", "4")

    def test_it_is_shown(self, panoply: Terminal) -> None:
        assert "length" in panoply("show", "reverse", "--plugin", WORLD)


class TestEntryPoint:
    def test_an_installed_package_is_found(self, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.mkdir()
        for name in ("pyproject.toml", "panoply_cubed.py"):
            (source / name).write_bytes((EXAMPLES / "entry_point" / name).read_bytes())
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
        ]
        subprocess.run(
            [*pip, "--target", str(tmp_path / "site"), str(source)], check=True, capture_output=True
        )
        path = f"{tmp_path / 'site'}:{tiny.ROOT}"
        listed = tiny.shell("list", "--json", PYTHONPATH=path)
        assert {"cubed-grpo@1": "grpo"}.items() <= {
            e["id"]: e["base"] for e in json.loads(listed.stdout)
        }.items()
        done = tiny.shell("train", "cubed-grpo", *words(tmp_path / "run"), PYTHONPATH=path)
        assert done.returncode == 0, done.stderr
        assert tiny.result(tmp_path / "run")["steps"] == 2


def test_five_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it stands, from the shipped warm start, but for two steps."""
    train = pp.train

    def short(method: str, **choices: object) -> pp.Trained:
        return train(method, **{**choices, "steps": 2, "settings": {"run.held_out": 16, "sample.prompts": 2}})  # type: ignore[arg-type]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pp, "train", short)
    runpy.run_path(str(EXAMPLES / "five_lines.py"))
    assert "held-out success 0." in capsys.readouterr().out


def test_the_page_names_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        if path.name not in ("README.md", "__pycache__"):
            assert f"`{path.name}" in page
