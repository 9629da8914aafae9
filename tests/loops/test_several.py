"""Several learners in one run: what each sees, whose turn it is, and that one learns as if it were alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny

import panoply as pp
from panoply import compose, extensions, registry
from panoply.methods.base.grpo import grpo
from panoply.regimes import Several
from panoply.rollout.text import Collector
from panoply.slots.sample.dealt import dealt
from panoply.slots.turn.turns import all_, alternate, when

EXAMPLE = str(tiny.ROOT / "examples/proposer_and_solver.py")
SMALL = {
    "run.device": "cpu",
    "run.held_out": 4,
    "world.operations": 2,
    "run.checkpoint_every": 1,
    "run.keep": 9,
}
NAMES = ("solver", "proposer")


@pytest.fixture(autouse=True)
def _own(registries: None) -> None:
    extensions.load_plugin(EXAMPLE)


def models(run: Path, step: int, seat: str = "") -> bytes:
    place = f"seats/{seat}/model" if seat else "model"
    return (run / f"checkpoints/step-{step:07d}" / place / "model.safetensors").read_bytes()


class Lucky:
    """A collector whose answers are right by their number, one in three."""

    def __init__(self, inner: Collector):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def episodes(self, *given: Any) -> pp.Experience:
        found = self.inner.episodes(*given)
        episodes = found.by("episode")
        right = (episodes.index % 3 == 0) & episodes.is_last()
        return found.with_columns(**{"signal:success": right.float()})


class TestTracer:
    def test_both_learn_and_the_run_is_the_solvers(self, tmp_path: Path) -> None:
        settings = {**SMALL, "world.operations": 6, "game.tasks": 8, "game.group": 4}
        done = tiny.bare(tmp_path / "run", "propose-solve", settings=settings, steps=2, plugins=[EXAMPLE])
        first, last = tiny.metrics(tmp_path / "run")[0], tiny.metrics(tmp_path / "run")[-1]
        assert (first["episodes"], first["proposer_episodes"], first["total_episodes"]) == (32, 8, 40)
        assert 0 < first["proposer_paid"] == first["proposer_reward"] <= 1
        for seat in ("", "proposer"):
            assert models(done.run, 0, seat) != models(done.run, 2, seat)
        assert pp.load_policy(done.run).fingerprint() == done.fingerprint
        assert last["held_out_sampled"] == done.after["sampled"]

    def test_what_is_paid(self, tiny_collector: Collector) -> None:
        """By hand: problems have as many products as the proposer's token says, and pay is 1 − |2·success − 1|."""
        play: Any = registry.find_part("game", "propose")(tasks=6, group=4)
        found = play({"solver": Lucky(tiny_collector), "proposer": tiny_collector})
        solved, said = found["solver"], found["proposer"]
        world, rows = tiny_collector.world, list(dict.fromkeys(solved["group"].tolist()))
        for row, group in enumerate(rows):
            mine = solved.take(solved["group"] == group)
            prompt = mine.context.ragged("tokens")[0].tolist()[: int(mine.context.tensor("shared")[0])]
            products = prompt.count(world.tokenizer.id("*"))
            assert products == int(said["action"][row]) % (world.operations + 1)  # type: ignore[attr-defined]
            success = float(mine["signal:success"].sum()) / 4
            assert float(said["signal:paid"][row]) == pytest.approx(1 - abs(2 * success - 1))

    def test_settings_are_of_one_seat(self) -> None:
        made = pp.plan("propose-solve", settings={"solver.credit.scale": "none"}, plugins=[EXAMPLE])
        settings = made.method.settings()
        assert (settings["solver.credit.scale"], settings["proposer.credit.scale"]) == ("none", "std")
        assert type(made).from_json(made.to_json()).hash() == made.hash()
        assert "proposer.reward" in str(made)


class TestSeats:
    def test_the_first_learns_as_if_it_were_alone(self, tmp_path: Path) -> None:
        """Bit for bit; the second has random numbers of its own, and weights that do not move while it waits."""

        @pp.method("pair@1")
        def pair() -> Several:
            """Two of them."""
            return Several((("one", grpo()), ("two", grpo())), turn=alternate(steps=(3, 1)))

        own = {p: v for p, v in tiny.SETTINGS.items() if p.startswith(("sample.", "reward."))}
        shared = {**SMALL, **{p: v for p, v in tiny.SETTINGS.items() if p not in own}, "run.held_out": 4}
        both = {f"{seat}.{p}": v for seat in ("one", "two") for p, v in own.items()}
        alone = tiny.bare(
            tmp_path / "alone", "grpo", settings={**shared, **own}, preset="published", steps=4, model="fresh"
        )
        pair_ = tiny.bare(tmp_path / "pair", "pair", settings={**shared, **both}, steps=4, model="fresh")
        assert models(alone.run, 3) == models(pair_.run, 3) == models(pair_.run, 4)
        assert models(pair_.run, 0, "two") == models(pair_.run, 3, "two") != models(pair_.run, 4, "two")
        assert "two_loss" in tiny.metrics(pair_.run)[3]
        assert "loss" not in tiny.metrics(pair_.run)[3]

    @pytest.mark.parametrize(
        ("seats", "says"),
        [
            ((("one", grpo()),), "two seats at least"),
            ((("run", grpo()), ("b", grpo())), "cannot be called 'run'"),
            ((("a", dealt()), ("b", grpo())), "takes a method of one learner"),
            ((("a", grpo().but(sample=dealt())), ("b", grpo())), "there is no game"),
        ],
    )
    def test_seats_that_cannot_be(self, seats: Any, says: str) -> None:
        with pytest.raises(pp.PanoplyError, match=says):
            Several(seats, all_())

    @pytest.mark.parametrize(
        ("settings", "says"),
        [
            ({"turn": "alternate", "turn.steps": [1, 2, 3]}, "there are 2 seats"),
            ({"solver.credit.scle": 1}, "scale"),
            ({"solver.reward.name": "fun"}, "The seat 'solver': Unknown signal"),
            (
                {"solver.surrogate.kind": "mask", "solver.surrogate.dual": 3.0},
                "The seat 'solver': surrogate.dual has no effect",
            ),
        ],
    )
    def test_settings_that_cannot_be(self, settings: dict[str, Any], says: str) -> None:
        with pytest.raises(pp.PanoplyError, match=says):
            pp.plan("propose-solve", settings=settings)

    def test_one_learner_has_no_game(self) -> None:
        with pytest.raises(
            pp.PanoplyError, match="what a game of several seats deals out, and grpo@1 has one"
        ):
            pp.plan("grpo", sample="dealt")

    def test_a_game_that_forgets_a_seat(self, tmp_path: Path) -> None:
        @pp.part("game", gives={"signal:paid"})
        def nobody(collectors: Mapping[str, Any]) -> dict[str, pp.Experience]:
            """Deals nothing."""
            return {}

        with pytest.raises(pp.PanoplyError, match="deals to nobody: the seats are solver, proposer"):
            tiny.bare(tmp_path / "run", "propose-solve", settings=SMALL, game="nobody", steps=1)

    def test_json(self) -> None:
        method = compose.resolve("propose-solve").method
        assert compose.method_from_json(method.to_json()) == method


class TestTurns:
    def test_alternate(self) -> None:
        turns = [alternate(steps=(2, 1))(NAMES, step, {}) for step in range(6)]
        assert turns == [("solver",), ("solver",), ("proposer",)] * 2
        assert [alternate()(NAMES, step, {})[0] for step in range(3)] == ["solver", "proposer", "solver"]

    def test_when_a_metric_says_so(self) -> None:
        part, state, found = when(metric="m", above=0.7, below=0.3), {"at": 0}, []
        for value in (None, 0.5, 0.8, 0.5, 0.9, 0.2, 0.1):
            state, names = part(state, NAMES, 0, {} if value is None else {"m": value})
            found.append(names[0][0])
        assert found == ["s", "s", "p", "p", "p", "s", "s"]
