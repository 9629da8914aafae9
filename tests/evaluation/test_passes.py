"""Which problems a run is measured on, and in how many ways: no pass changes what another one finds."""

import pytest

import panoply
from panoply.errors import PanoplyError
from panoply.evaluation import held_out, returns
from panoply.kinds import kind_of


def opened(method, world):
    plan = panoply.plan(method, world)
    made = plan.world()
    return made, kind_of(made).open_policy(plan.options.model, made, plan.options, plan.policy_options)


@pytest.mark.parametrize(("method", "name"), [("grpo", "chain"), ("reinforce", "cartpole")])
def test_sampled_answers_do_not_depend_on_greedy_ones(method, name):
    world, policy = opened(method, name)
    module = held_out if world.medium == "text" else returns
    both = module.evaluate(world, policy, 16, seed=3)
    one = module.evaluate(world, policy, 16, seed=3, greedy=False)
    assert list(both.rates) == ["greedy", "sampled"]
    assert one.rates == {"sampled": both.rates["sampled"]}
    assert one.intervals["sampled"] == both.intervals["sampled"]


@pytest.mark.parametrize("name", ["chain", "keydoor", "tools"])
def test_validation_problems_are_neither_trained_on_nor_held_out(name):
    world = panoply.plan("grpo", name).world()
    chosen = {task.id for task in world.validation(100)}
    assert len(chosen) == 100
    assert not chosen & {task.id for task in world.held_out(100)}
    assert not chosen & {world.task("train", i).id for i in range(500)}


def test_validation_starts_of_control_are_others():
    world, policy = opened("reinforce", "cartpole")
    test, other = (
        returns.evaluate(world, policy, 16, seed=3, split=split) for split in ("test", "validation")
    )
    assert test.rates != other.rates


def test_a_judge_has_neither_pass():
    with pytest.raises(
        PanoplyError, match="run.greedy has no effect: a judge is measured by the pairs it orders"
    ):
        panoply.plan("reward-model", "strings", settings={"run.greedy": False})
