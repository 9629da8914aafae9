"""LMRL-Gym: ILQL and MC returns against slow references, what acts in the end, and logs that need stitching."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kit
import pytest
import tiny
import torch
from torch import Tensor, nn

import panoply as pp
from panoply.batch import Batch
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.agents.lmrl_gym import BASELINES, ilql, lmrl_gym, mc_returns
from panoply.policies.decoder import DecoderConfig
from panoply.policies.steering import TokenValues
from panoply.policies.text import TextPolicy
from panoply.rollout.text import Collector
from panoply.slots.data.log import log
from panoply.slots.loss.token_values import following, implicit_q, returned_q
from panoply.worlds.text.maze import Maze

SMALL = {"data.batch": 3, "data.size": 12, "run.held_out": 4}
TARGET = "ema:0.25"

# ------------------------------------------------------------------ by hand

TURNS: dict[str, Any] = {
    "episode": [7, 7, 7, 8],
    "turn": [0, 0, 1, 0],
    "position": [3, 4, 9, 3],
    "source": [2, 2, 2, 2],
    "end": [0, 0, 2, 1],
    "signal:score": [0.0, -1.0, -4.0, 2.0],
    f"q:0@{TARGET}": [0.0, 3.0, -2.0, 1.0],
    f"q:1@{TARGET}": [1.0, 2.0, -5.0, 4.0],
}
"""Two tokens of one turn and one of the next, which a cap ends, and an episode of one token."""
NOW = {"q:0": [1.0, 0.0, -1.0, 0.0], "q:1": [0.0, 2.0, 0.0, 0.0], "v": [2.0, 1.0, -3.0, 5.0]}


def seen(rows: Experience, **now: Tensor) -> Batch:
    return Batch(rows, now)


def now() -> dict[str, Tensor]:
    return {
        name: torch.tensor(values, dtype=torch.float64, requires_grad=True) for name, values in NOW.items()
    }


def test_ilql_by_hand() -> None:
    held = now()
    values, stats = implicit_q(gamma=0.5, expectile=0.75, cql=0, target=TARGET, capped=True)(
        seen(kit.hand(**TURNS), **held)
    )
    # backups: 0 + ½·1 inside the turn, −1 + ½·(−3) into the next turn, −4 and 2 at the ends
    by_q = [0.125 + 0.125, 3.125 + 10.125, 4.5 + 8.0, 2.0 + 2.0]
    # the lesser targets 0, 2, −5, 1 stand below V but for the second
    by_v = [0.25 * 2.0, 0.75 * 0.5, 0.25 * 2.0, 0.25 * 8.0]
    assert values.tolist() == pytest.approx([a + b for a, b in zip(by_q, by_v, strict=True)])
    assert stats["q_error"].tolist() == pytest.approx(by_q)
    assert stats["v_error"].tolist() == pytest.approx(by_v)
    values.sum().backward()  # type: ignore[no-untyped-call]
    slopes = {name: held[name].grad.tolist() for name in NOW}  # type: ignore[union-attr]
    assert slopes["q:0"] == pytest.approx([0.5, 2.5, 3.0, -2.0])
    assert slopes["v"] == pytest.approx(
        [0.25 * 2, -0.75 * 1, 0.25 * 2, 0.25 * 4]
    )  # none of a backup that it is in
    cut, _ = implicit_q(gamma=0.5, expectile=0.75, cql=0, target=TARGET)(seen(kit.hand(**TURNS), **now()))
    assert (values - cut).tolist() == pytest.approx([0, 0, by_q[2], 0])  # what a cap cut off is not known


def test_the_conservative_term_is_the_surprise_of_both_heads() -> None:
    surprise = {
        "q_logp:0": torch.tensor([-1.0, -2.0, 0.0, 0.0]),
        "q_logp:1": torch.tensor([0.0, -3.0, -1.0, 0.0]),
    }
    bare, _ = implicit_q(target=TARGET, cql=0)(seen(kit.hand(**TURNS), **now()))
    more, stats = implicit_q(target=TARGET, cql=0.1)(seen(kit.hand(**TURNS), **now(), **surprise))
    assert (more - bare).tolist() == pytest.approx([0.1, 0.5, 0.1, 0.0])
    assert stats["cql"].tolist() == [1, 5, 1, 0]
    of_one, _ = returned_q(cql=0.1)(seen(kit.hand(**TURNS), **now(), **surprise))
    without, _ = returned_q(cql=0)(seen(kit.hand(**TURNS), **now()))
    assert (of_one - without).tolist() == pytest.approx([0.1, 0.2, 0.0, 0.0])


def test_monte_carlo_returns_by_hand() -> None:
    held = now()
    values, _ = returned_q(gamma=0.5, cql=0)(seen(kit.hand(**TURNS), **held))
    # a token is a step of time, also across a turn: −4, −1 − 2, and half of that
    assert values.tolist() == pytest.approx([(1 + 1.5) ** 2 / 2, 9 / 2, 9 / 2, 4 / 2])
    values.sum().backward()  # type: ignore[no-untyped-call]
    assert held["q:0"].grad.tolist() == pytest.approx([2.5, 3.0, 3.0, -2.0])  # type: ignore[union-attr]


def test_what_follows_is_told_by_time_and_not_by_the_order_of_rows() -> None:
    rows = kit.hand(**TURNS)
    order = torch.tensor([2, 3, 0, 1])
    value = torch.tensor([10.0, 20.0, 30.0, 40.0])
    assert following(seen(rows), value).tolist() == [20, 30, 0, 0]
    assert following(seen(rows.take(order)), value[order]).tolist() == [0, 0, 20, 30]


# ------------------------------------------------------------------ a slow reference, token by token

WORLD = Maze(words=True, cap=4)


def policy_of(heads: int = 2, v: bool = True, seed: int = 0) -> TextPolicy:
    """In float64, with values that differ from 0."""
    sizes = {
        "vocab_size": WORLD.tokenizer.vocab_size,
        "width": 8,
        "layers": 1,
        "heads": 2,
        "inner": 8,
        "tied": True,
    }
    policy = TextPolicy.fresh(DecoderConfig(**sizes), WORLD.tokenizer, seed)
    values = TokenValues.beside(policy.model, heads=heads, v=v, beta=2.0, seed=seed)  # type: ignore[arg-type]
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in values.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=dice)
    policy.steer(values)
    policy.model.double()
    return policy


def logged() -> Experience:
    collect = Collector(WORLD, policy_of(), 0)
    return log(batch=4, size=4)(collect)


def read(values: TokenValues, tokens: list[int]) -> tuple[list[Tensor], Tensor | None]:
    """Q and V after some tokens, from a forward pass over these alone."""
    at = torch.arange(len(tokens))[None]
    state = values.trunk.hidden(torch.tensor([tokens]), at)[0, -1]
    return [head(state) for head in values.q], None if values.v is None else values.v(state)[0]


def tokens_of(rows: Experience) -> list[list[tuple[list[int], int, float, int]]]:
    """Each episode's decisions in time: what was read, what was said, what that earned."""
    contexts, found = rows.context.ragged("tokens").tolist(), dict[int, list[Any]]()
    for row in kit.rows_of(rows):
        prefix = contexts[row["context"]][: row["position"]]
        found.setdefault(row["episode"], []).append((row["turn"], row["position"], prefix, row))
    return [
        [
            (prefix, row["action"], row["signal:score"], row["end"])
            for _, _, prefix, row in sorted(rows, key=lambda r: r[:2])
        ]
        for rows in found.values()
    ]


def reference(values: TokenValues, target: TokenValues, rows: Experience, capped: bool) -> Tensor:
    total, count = torch.zeros((), dtype=torch.float64), 0
    for episode in tokens_of(rows):
        for i, (prefix, said, reward, end) in enumerate(episode):
            q, v = read(values, prefix)
            assert v is not None
            with torch.no_grad():
                then = read(values, episode[i + 1][0])[1] if i + 1 < len(episode) else torch.zeros(())
                assert then is not None
                least = min(head[said] for head in read(target, prefix)[0])
            for head in q:
                if capped or end != 2:
                    total = total + 0.5 * (head[said] - (reward + 0.9 * then)) ** 2
                total = total - 0.05 * (head[said] - torch.logsumexp(head, 0))
            total = total + (0.8 if least >= v else 0.2) * 0.5 * (v - least) ** 2
            count += 1
    return total / count


@pytest.mark.parametrize("cut", [10**9, 60], ids=["whole", "split"])
def test_ilql_and_its_gradient_are_those_of_a_slow_reference(cut: int) -> None:
    policy, target, rows = policy_of(), policy_of(seed=5), logged()
    loss = implicit_q(gamma=0.9, expectile=0.8, cql=0.05, target=TARGET, capped=cut == 60)
    with torch.no_grad():
        theirs = target.score(rows, frozenset({"q:0", "q:1"}))
    rows = rows.with_columns(**{f"{name}@{TARGET}": column for name, column in theirs.items()})
    method = ilql().but(losses=(loss,))
    learner = kit.learner(policy, method, micro_tokens=cut)
    assert (len(list(learner.micro_batches(rows))) > 1) == (cut == 60)
    found = learner.gradient(rows)
    assert policy.values is not None
    assert target.values is not None
    slow = reference(policy.values, target.values, rows, capped=cut == 60)
    names = [n for n, p in policy.values.named_parameters() if p.requires_grad]
    weights = [p for p in policy.values.parameters() if p.requires_grad]
    exact = torch.autograd.grad(slow, weights)
    assert {f"values.{n}" for n in names} == set(found)
    for name, slope in zip(names, exact, strict=True):
        kit.assert_same(found[f"values.{name}"], slope)
    assert max(float(s.abs().max()) for s in exact) > 0.01


def test_returns_and_their_gradient_are_those_of_a_slow_reference() -> None:
    policy, rows = policy_of(heads=1, v=False), logged()
    found = kit.learner(policy, mc_returns().but(losses=(returned_q(gamma=0.9, cql=0.05),))).gradient(rows)
    values, total, count = policy.values, torch.zeros((), dtype=torch.float64), 0
    assert values is not None
    for episode in tokens_of(rows):
        for i, (prefix, said, _, _) in enumerate(episode):
            (head,), _ = read(values, prefix)
            earned = sum(0.9 ** (j - i) * episode[j][2] for j in range(i, len(episode)))
            total = total + 0.5 * (head[said] - earned) ** 2 - 0.05 * (head[said] - torch.logsumexp(head, 0))
            count += 1
    names, weights = zip(*((n, p) for n, p in values.named_parameters() if p.requires_grad), strict=True)
    for name, slope in zip(names, torch.autograd.grad(total / count, weights), strict=True):
        kit.assert_same(found[f"values.{name}"], slope)


# ------------------------------------------------------------------ exact values


class Table:
    """Q and V of few states in a table, with a target that moves by a share."""

    def __init__(self, states: int, actions: int):
        self.q = nn.Parameter(torch.zeros(2, states, actions, dtype=torch.float64))
        self.v = nn.Parameter(torch.zeros(states, dtype=torch.float64))
        self.target = torch.zeros_like(self.q)

    def now(self, rows: Experience) -> dict[str, Tensor]:
        s, a = rows["state"], rows["action"]
        return {"q:0": self.q[0, s, a], "q:1": self.q[1, s, a], "v": self.v[s]}

    def step(self, rows: Experience, loss: Any, rate: float) -> None:
        s, a = rows["state"], rows["action"]
        columns = {f"q:{i}@{TARGET}": self.target[i, s, a] for i in (0, 1)}
        values, _ = loss(seen(rows.with_columns(**columns), **self.now(rows)))
        for weight, slope in zip(
            (self.q, self.v), torch.autograd.grad(values.sum(), (self.q, self.v)), strict=True
        ):
            weight.data -= rate * slope
        self.target.lerp_(self.q.detach(), 0.25)


def test_two_halves_are_stitched_that_nobody_walked_together() -> None:
    """0 → 1 → 2 → the end takes three moves (action 0; 1 stays), −1 each and 0 for the last. Caps cut two episodes."""
    walks = [
        [(0, 0, -1), (1, 1, -1), (1, 1, -1)],
        [(1, 1, -1), (1, 0, -1), (2, 0, 0)],
        [(0, 1, -1), (0, 1, -1)],
    ]
    flat = [(e, i, *move) for e, walk in enumerate(walks) for i, move in enumerate(walk)]
    episode, turn, state, action, earned = (list(column) for column in zip(*flat, strict=True))
    rows = kit.hand(
        episode=episode, turn=turn, position=[2] * 8, state=state, action=action, end=[0, 0, 2, 0, 0, 1, 0, 2],
        **{"signal:score": [float(r) for r in earned]},
    )  # fmt: skip
    known, loss = Table(3, 2), implicit_q(gamma=1.0, expectile=0.9, cql=0, target=TARGET)
    for _ in range(200):
        known.step(rows, loss, 0.5)
    # V(1): 0.9·(−1 − V) = 0.1·3·1 for one who went on and three who stayed; V(0): 0.9·(−1 + V(1) − V) = 0.1·2·1
    one, none = -1 - 1 / 3, -2 - 1 / 3 - 2 / 9
    assert known.v.tolist() == pytest.approx([none, one, 0], abs=1e-6)
    for q in known.q.detach():  # to go on from 0 is better, though nobody who did came to the end
        assert q.flatten().tolist() == pytest.approx([one - 1, none - 1, -1, one - 1, 0, 0], abs=1e-6)
    followed, _ = returned_q(gamma=1.0, cql=0)(seen(rows, **{"q:0": torch.zeros(8)}))
    assert followed[0] > followed[6]  # by what came of it, to stay was better: G is −3 and −2


# ------------------------------------------------------------------ data


def test_a_log_is_the_same_in_every_run_and_its_best_are_its_best() -> None:
    world = WORLD
    collectors = [Collector(world, policy_of(), seed) for seed in (0, 1)]
    first, second = (log(batch=20, size=20)(collect) for collect in collectors)
    assert sorted(kit.values_of(first, "task")) == sorted(kit.values_of(second, "task"))
    assert first["task"].tolist() != second["task"].tolist()
    earned = sorted(first.by("episode").sum(first["signal:score"]).tolist(), reverse=True)
    kept = log(batch=4, size=20, best=0.2)(Collector(world, policy_of(), 0))
    assert sorted(kept.by("episode").sum(kept["signal:score"]).tolist(), reverse=True) == earned[:4]
    assert set(first["source"].tolist()) == {2}


def test_no_logged_episode_goes_a_shortest_way() -> None:
    world = Maze()
    found = [
        (task.level, len(answer), world.grade(task, answer)["success"]) for task, answer in world.log(300)
    ]
    assert all(taken > level for level, taken, there in found if there)
    assert 0.2 < sum(there for *_, there in found) / len(found) < 0.6


# ------------------------------------------------------------------ whole runs


@pytest.mark.parametrize("method", ["ilql", "mc-returns"])
def test_the_model_that_was_trained_is_the_one_that_acts(tmp_path: Path, method: str) -> None:
    done = tiny.bare(tmp_path / "run", method, steps=3, settings={**SMALL, "update.lr": 0.01})
    opened = TextPolicy.load(Path(done.run) / "checkpoints/step-0000003/model")
    assert opened.values is not None
    assert opened.values.beta == 16
    world = Maze()
    rows = Collector(world, opened, 0).episodes(world.held_out(3), 2)
    torch.testing.assert_close(opened.score(rows)["logp"].detach(), rows["logp"], rtol=0, atol=1e-4)


def test_values_in_float32_beside_a_narrow_model_are_saved(tmp_path: Path) -> None:
    done = tiny.bare(tmp_path / "run", "ilql", steps=1, settings=SMALL, dtype="bfloat16")
    opened = TextPolicy.load(Path(done.run) / "checkpoints/step-0000001/model", torch.bfloat16)
    assert opened.values is not None
    assert opened.fingerprint() == done.fingerprint


def test_one_table_of_worlds_and_baselines(tmp_path: Path) -> None:
    table = lmrl_gym(worlds=("maze",), baselines=("percent-bc",), steps=1, seed=0)
    assert list(table) == ["maze"]
    assert 20 < table["maze"]["percent-bc"] < 70  # a step from the start, which imitates the log
    with pytest.raises(PanoplyError, match="Unknown baseline 'bcq'"):
        lmrl_gym(worlds=("maze",), baselines=("bcq",))
    for name, settings in BASELINES.values():
        pp.plan(name, "maze", settings=dict(settings))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PanoplyError, match="no model has them"):
        pp.plan(ilql().but(models=()), "maze")
    with pytest.raises(PanoplyError, match="score"):
        pp.plan("ilql", "keydoor")
    with pytest.raises(PanoplyError, match="lora"):
        tiny.bare(tmp_path / "run", "ilql", steps=1, settings=SMALL, lora=2)
