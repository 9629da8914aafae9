"""ASearcher: what is begun ahead, what is delivered when, and decoupled PPO against the paper's equations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kit import Slow, Tabular, assert_same, batch, gradient, hand, on_policy, ragged, shuffled

from panoply import states
from panoply.effects import inert
from panoply.experience import OWN, REPLAY, Experience
from panoply.methods.agents.asearcher import asearcher, async_rollouts, centred, decoupled_clip, gap_to_ppo
from panoply.planning import make_plan
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.slots.sample.delayed import Queue, delayed
from panoply.slots.sample.groups import groups
from panoply.slots.surrogate.ratios import clip
from panoply.worlds.text.tools import Tools

# ------------------------------------------------------------------ the queue


def taken(queue: Queue, lasts: list[float], version: int, ahead: int, most: int | None = None) -> list[int]:
    """The next batch of two; number i lasts `lasts[i]`."""

    def begin(n: int) -> list[tuple[int, float]]:
        return [(i, lasts[i]) for i in range(queue.begun, queue.begun + n)]

    return queue.take(2, ahead, version, most, begin)


LASTS = [1.0, 9.0, 2.0, 3.0, 1.0, 1.0, 1.0, 1.0]


def test_a_batch_is_what_is_finished_first() -> None:
    queue = Queue()
    assert taken(queue, LASTS, 0, ahead=1) == [0, 2]  # four begun, those of 1 and 2 are done at 2
    assert (queue.clock, queue.begun) == (2.0, 4)
    assert taken(queue, LASTS, 1, ahead=1) == [3, 4]  # two more begin at 2; 3, 4 and 5 are all done at 3
    assert (queue.clock, queue.begun) == (3.0, 6)
    assert [w[0] for w in queue.waiting] == [1, 5], "nobody waited for the longest"


def test_without_versions_every_episode_is_waited_for() -> None:
    queue = Queue()
    assert [taken(queue, LASTS, v, ahead=0) for v in range(2)] == [[0, 1], [2, 3]]
    assert queue.clock == 9.0 + 3.0


def test_slots_bound_what_is_running() -> None:
    queue = Queue()  # 0 and 1 run; 2 takes 0's slot at 1 and is done at 3, when 3 begins
    assert taken(queue, LASTS, 0, ahead=3, most=2) == [0, 2]
    assert (queue.clock, queue.begun) == (3.0, 4)
    assert taken(queue, LASTS, 1, ahead=3, most=2) == [3, 4]  # 3 from 3 to 6, 4 from 6 to 7
    assert queue.clock == 7.0


def test_throughput() -> None:
    same = async_rollouts(batch=8, versions=0, updates=5)
    assert same.asynchronous == pytest.approx(same.synchronous)
    assert same.staleness == 0
    even = async_rollouts(batch=8, tail=0.0, learning=0.25, updates=4)
    assert even.synchronous == pytest.approx(4 * 1.25)
    assert even.asynchronous == pytest.approx(4 + 0.25), (
        "learning is hidden behind sampling, but for the last"
    )
    assert (
        async_rollouts(batch=32, updates=20, tail=1.0).speed
        > 2 * async_rollouts(batch=32, updates=20, tail=0.2).speed
    )


# ------------------------------------------------------------------ the sampler


def collector() -> Collector:
    world = Tools(easy=0.0)
    return Collector(world, open_policy("start", world, 0, "cpu"), 5)


def stepped(part: Any, collect: Collector, steps: int, through: Any = lambda s: s) -> list[Experience]:
    state, found = part.info.state(), []
    for version in range(steps):
        collect.version = version
        state, rows = part(state, collect)
        state = through(state)
        found.append(rows)
    return found


def same(a: Experience, b: Experience) -> bool:
    columns = [n for n in a.decisions if isinstance(a.decisions[n], torch.Tensor)]
    return all(torch.equal(a[n], b[n]) for n in columns) and torch.equal(
        a.context.ragged("tokens").values, b.context.ragged("tokens").values
    )


def saved(state: dict[str, Any]) -> dict[str, Any]:
    return states.from_tensors(states.as_tensors({"sample": state}))["sample"]


def test_without_versions_it_is_groups() -> None:
    one, two = collector(), collector()
    (found,) = stepped(delayed(prompts=2, group=2, versions=0), one, 1)
    assert same(found, groups(prompts=2, group=2)(two))


def test_rows_keep_who_drew_them_and_what_waits_is_saved() -> None:
    part = delayed(prompts=2, group=2, versions=2, tail=1.0)
    collect = collector()
    found = stepped(part, collect, 4)
    for version, rows in enumerate(found):
        assert len(rows.by("group")) == 2
        old = rows["version"] < version
        assert rows["source"].tolist() == torch.where(old, REPLAY, OWN).tolist()
    assert collect.notes["staleness"] > 0
    assert len({int(g) for rows in found for g in rows.by("group").keys}) == 8, "nothing comes twice"
    assert collect.state["episodes"] == (2 + 4) * 2 * 2, "(η + version + 1) batches were begun"
    again = stepped(part, collector(), 4, through=saved)
    assert all(same(a, b) for a, b in zip(found, again, strict=True))


# ------------------------------------------------------------------ the objective


def test_a_bound_around_old_and_a_weight_for_who_acted() -> None:
    # w = 2 and u = 1; w = 2 and u = 2, bounded by 1.4 where A > 0 alone; w = 8 is left out.
    two, eight = math.log(2), math.log(8)
    rows = hand(
        advantage=[1.0, 1.0, -1.0, 1.0],
        logp=[-3.0, -3.0, -3.0, -3.0],
        **{"logp@old": [-3 + two, -3 + two, -3 + two, -3 + eight]},
    )
    given = batch(rows, logp=[-3 + two, -3 + 2 * two, -3 + 2 * two, -3 + eight])
    value, columns = decoupled_clip()(given)
    assert value.tolist() == pytest.approx([2.0, 2.8, -4.0, 0.0])
    assert columns["dropped"].tolist() == [False, False, False, True]
    (slope,) = torch.autograd.grad(value.sum(), given.now["logp"])
    assert slope.tolist() == pytest.approx([2.0, 0.0, -4.0, 0.0])


def delayed_rows(seed: int) -> Experience:
    made = ragged(seed, drift=0.6)
    noise = torch.randn(len(made), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.with_columns(**{"logp@old": made["logp"] + 0.5 * noise})


def test_the_gradient_is_the_papers_and_dropped_tokens_count() -> None:
    made, slow = delayed_rows(4), Slow(4)
    loss = torch.zeros((), dtype=torch.float64)
    for i in range(len(made)):
        old, mu, a = made["logp@old"][i], made["logp"][i], made["advantage"][i]
        w = (old - mu).exp()
        u = (slow.logp(int(made["state"][i]), int(made["action"][i])) - old).exp()
        if w <= 1.2:
            loss = loss - w * torch.min(u * a, u.clamp(0.6, 1.4) * a) / len(made)
    method = on_policy(surrogate=decoupled_clip(cap=1.2))
    assert (made["logp@old"] - made["logp"]).exp().gt(1.2).any()
    expected = slow.gradient(loss)
    assert_same(gradient(method, made, seed=4), expected)
    assert_same(gradient(method, made, seed=4, micro_tokens=1), expected)
    assert_same(gradient(method, shuffled(made), seed=4), expected)


def test_without_delay_it_is_ppo() -> None:
    made = ragged(5, drift=0.6)
    made = made.with_columns(**{"logp@old": made["logp"]})
    plain = gradient(on_policy(surrogate=clip(low=0.4, high=0.4)), made, seed=5)
    assert torch.equal(gradient(on_policy(surrogate=decoupled_clip()), made, seed=5), plain)
    assert gap_to_ppo(3)["largest relative difference"] == 0


def test_on_policy_its_gradient_is_reinforces() -> None:
    made = ragged(6)
    with torch.no_grad():
        logp = Tabular(6).score(made)["logp"]
    made = made.with_columns(**{"logp": logp, "logp@old": logp})
    assert_same(
        gradient(on_policy(surrogate=decoupled_clip()), made, seed=6), gradient(on_policy(), made, seed=6)
    )


def test_credit_is_centred_by_group_and_whitened_by_token() -> None:
    # Two groups: returns 1 and 0 (one token, three tokens), 3 and 3. Centred: ½, −½ three times, 0 and 0.
    columns: dict[str, Any] = {"group": [1, 1, 1, 1, 2, 2], "episode": [1, 2, 2, 2, 3, 4]}
    made = hand(**columns, reward=[1.0, 0.0, 0.0, 0.0, 3.0, 3.0])
    plain = torch.tensor([0.5, -0.5, -0.5, -0.5, 0, 0], dtype=torch.float64)
    expected = (plain - plain.mean()) / plain.std()
    assert centred()(made).tolist() == pytest.approx(expected.tolist())
    shifted = hand(**columns, reward=[2.0, 0.0, 0.0, 1.0, 4.0, 4.0])
    assert centred()(shifted).tolist() == pytest.approx(expected.tolist()), "a constant cancels"
    masked = made.with_columns(train=torch.tensor([True] * 4 + [False] * 2))
    four = plain[:4]
    assert centred()(masked).tolist()[:4] == pytest.approx(((four - four.mean()) / four.std()).tolist())


def test_a_success_counts_where_every_turn_was_well_formed() -> None:
    made = hand(episode=[1, 1, 2, 2], **{"signal:success": [0.0, 1, 0, 1], "signal:invalid": [0.0, 0, 1, 0]})
    assert asearcher().reward(made).tolist() == [0, 1, 0, 0]


def test_the_plan_says_what_has_no_effect() -> None:
    still = dict(inert(make_plan("asearcher", "tools", settings={"sample.versions": 0})))
    assert {"surrogate.cap", "sample.tail", "sample.running"} <= still.keys()
    assert "surrogate.cap" not in dict(inert(make_plan("asearcher", "tools")))
