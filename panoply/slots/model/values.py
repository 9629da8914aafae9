"""Critics and reward models beside a policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from panoply.errors import PanoplyError, unknown
from panoply.experience import OPEN, Column, Experience
from panoply.parts import Finding, Part, part
from panoply.regimes import Fit
from panoply.slots.loss.values import squared_value
from panoply.slots.model.model import Model
from panoply.slots.reduce.averages import token_mean
from panoply.slots.sample.windows import GIVEN_TOKENS, OPEN_ANSWERS
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.loops.seat import Seat
    from panoply.policies.classifier import Classifier
    from panoply.policies.value import ValueModel
    from panoply.worlds.world import Task

_LOSS = squared_value(clip=0.2)
_UPDATE = adam(lr=1e-5)


def impossible(held: Any, method: Any) -> list[Finding]:
    if held.update is None and held.warmup:
        return [("warmup", "a critic that learns with the policy (update=none) cannot learn before it")]
    if held.update is None and getattr(held, "finished", False):
        return [("finished", "a critic that learns with the policy (update=none) sees what the policy does")]
    return []


def _inert(held: Any, method: Any, world: Any) -> list[Finding]:
    goes_on = world.medium != "text" or method.sample.info.gives & {OPEN_ANSWERS, GIVEN_TOKENS}
    return [] if goes_on else [("finished", f"{method.sample.info.id} samples every answer to its end")]


def finished_episodes(experience: Experience) -> Experience:
    """All rows of the episodes that have ended, those that the policy does not learn from included."""
    ended = experience.by("episode").last(experience["end"]) != OPEN
    found = experience.take(experience.by("episode").rows(ended))
    return found.with_columns(train=torch.ones(len(found), dtype=torch.bool))


def _critic_impossible(held: Any, method: Any, world: Any) -> list[Finding]:
    found = impossible(held, method)
    if held.start and world.medium != "text":
        found.append(("start", "reward models are of text"))
    return found


@part(
    "model",
    equation="V(s), a network beside the policy",
    gives={"column:value"},
    impossible=_critic_impossible,
    inert=_inert,
    bounds={"warmup": "at least 0"},
    cost=lambda held: held.update,
)
def critic(
    seat: Seat,
    *,
    loss: Part = _LOSS,
    update: Part | None = _UPDATE,
    warmup: int = 0,
    finished: bool = False,
    start: str = "",
) -> Model:
    """A critic: adds the column `value`, and regresses it on `target` (see credit.gae).

    Beside a language model it is the policy's start with a head of zeros; in control a network like the policy's.

    update     how it learns, or `none`: with the policy, on the same mini-batches, in one backward pass and one
               optimiser step, its loss one more term with its own weight
    warmup     steps in which it learns alone
    finished   whether it learns only from episodes that have ended, and then from all their rows, those included that
               the policy does not learn from; where episodes go on beyond a batch, it learns of each once and knows
               what it came to
    start      a run of reward-model, or a folder, whose weights it begins with
    """
    found = _begun_as(seat, start, (loss,), update, warmup) if start else made(seat, (loss,), update, warmup)
    found.among = finished_episodes if finished else None
    return found


def _begun_as(seat: Seat, start: str, losses: tuple[Part, ...], update: Part | None, warmup: int) -> Model:
    """A critic that begins with the weights of a reward model."""
    model = _loaded(seat, start)
    if not hasattr(model, "named_parameters"):
        raise PanoplyError(f"A critic learns, and the layout of {start} is one that only transformers runs.")
    if len(model.outputs) > 1:
        raise PanoplyError(f"A critic gives one number, and {start} gives {', '.join(model.outputs)}.")
    return _learning(model, lambda held, experience: dict(held.score(experience)), losses, update, warmup)


def _loaded(seat: Seat, folder: str) -> ValueModel | Classifier:
    """A reward model from a run or a folder, where the policy is."""
    from panoply.policies.build import DTYPE, pick_device
    from panoply.policies.classifier import open_judge
    from panoply.which import model_folder

    options, words = seat.options, cast(Any, seat.policy).tokenizer
    device, context = pick_device(options.device), seat.plan.policy_options.get("context", 0)
    return open_judge(model_folder(folder), DTYPE[options.dtype], device, words, context)


@part(
    "model",
    equation="V(s of all seats), a network beside the policy",
    needs={"joint", "world:several seats"},
    gives={"column:value"},
    impossible=impossible,
    bounds={"warmup": "at least 0"},
    cost=lambda held: held.update,
)
def central_critic(
    seat: Seat, *, loss: Part = _LOSS, update: Part | None = _UPDATE, warmup: int = 0
) -> Model:
    """A critic that sees what all seats of a game see (arXiv 1706.02275), while each acts on its own view alone."""
    from panoply.policies.control import CentralNet

    model = CentralNet.over(cast(Any, seat.policy), seat.world.seats, seat.options.seed)
    return _learning(model, CentralNet.columns, (loss,), update, warmup)


def made(
    seat: Seat,
    losses: tuple[Part, ...],
    update: Part | None,
    warmup: int,
    outputs: tuple[str, ...] = ("value",),
) -> Model:
    """A critic of a seat's policy, for the `model` parts."""
    options = seat.options
    model, columns = seat.kind.critic(seat.policy, lambda: seat.open(options.model), options.seed, outputs)
    return _learning(model, columns, losses, update, warmup)


def _learning(model: Any, columns: Any, losses: tuple[Part, ...], update: Part | None, warmup: int) -> Model:
    """A critic that learns on its own, or without an update together with the policy."""
    if update is None:
        return Model(model, columns, losses=losses)
    return Model(model, columns, Fit(losses, token_mean(), update), warmup)


def _judge_impossible(held: Any, method: Any, world: Any) -> list[Finding]:
    if world.medium != "text":
        return [("", "reward models are of text")]
    if held.within is not None and held.within[0] >= held.within[1]:
        return [("within", "it is the lowest and the highest number, in this order")]
    return []


def beside(task: Task, reference: Sequence[int]) -> Task:
    """The same problem after an answer to it: x y_ref x. Whatever is judged then is judged beside that answer."""
    return dataclasses.replace(task, prompt=(*task.prompt, *reference, *task.prompt))


def _beside_references(seat: Seat, experience: Experience) -> Experience:
    """The same answers, each after the reference answer to its task."""
    asked, of = cast(Any, seat.collect).asked, experience["context"].tolist()
    tasks = {row: asked[id] for row, id in zip(of, experience["task"].tolist(), strict=True)}
    return experience.reprompted(
        {row: beside(task, seat.world.gold(task)).prompt for row, task in tasks.items()}
    )


@part(
    "model",
    equation=lambda held: f"r({'y_ref, ' if held.reference else ''}y), a frozen reward model",
    needs=lambda held: frozenset({"asked", "world:reference", "world:one turn"} if held.reference else ()),
    impossible=_judge_impossible,
    bounds={"scale": "any number", "within": "any number"},
)
def reward_model(
    seat: Seat,
    *,
    folder: str = "",
    name: str = "model",
    scale: float = 1.0,
    outputs: tuple[str, ...] = (),
    within: tuple[float, float] | None = None,
    reference: bool = False,
) -> Model:
    """A frozen reward model: adds `signal:NAME` on each episode's last row. `--reward-model DIR` trains on it.

    That is short for `models.reward_model.folder=DIR` and `reward.name=model`. DIR is a run of `reward-model`, or any
    folder that transformers opens as a sequence classifier, whose tokenizer is the policy's.

    outputs   of a model that says several things: those to be used, each a signal `NAME_OUTPUT` of its own
    within    the lowest and the highest number it may say; beyond, it was trained on nothing
    reference whether it reads the task's reference answer first, as one that `polar-model` has trained does; what it
              says is then relative to that, and its mean differs from task to task
    """
    if not folder:
        raise PanoplyError(
            "models.reward_model.folder is empty: name a run of reward-model or its exported folder."
        )
    model = _loaded(seat, folder)
    if missing := [output for output in outputs if output not in model.outputs]:
        raise unknown(f"output of {folder}", missing[0], model.outputs)
    if not outputs and len(model.outputs) > 1:
        raise PanoplyError(
            f"{folder} says {', '.join(model.outputs)}: name those to be used with models.reward_model.outputs."
        )
    signals = {output: f"signal:{name}_{output}" for output in outputs} or {
        model.outputs[0]: f"signal:{name}"
    }

    def columns(judge: Any, experience: Experience) -> dict[str, Column]:
        last = experience.by("episode").is_last()
        found: dict[str, Column] = {}
        read = _beside_references(seat, experience) if reference else experience
        for output, said in judge.judgements(read).items():
            if output in signals:
                column = torch.zeros(len(experience), device=last.device)
                bounded = said if within is None else said.clamp(*within)
                column[last] = scale * _on_rows(bounded, experience, last)
                found[signals[output]] = column
        return found

    return Model(model, columns)


def _on_rows(per_episode: torch.Tensor, experience: Experience, last: torch.Tensor) -> torch.Tensor:
    """Episode values in the order in which their last rows stand."""
    return per_episode[experience.by("episode").index[last]].to(last.device)
