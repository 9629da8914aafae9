"""A seat: one learner of a run. The course of the run around it is a `Job`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from panoply import checkpoint, episodes
from panoply.contracts import TERMS
from panoply.episodes import Episodes
from panoply.errors import PanoplyError
from panoply.evaluation.held_out import Evaluation
from panoply.evaluation.pairs import evaluate_pairs
from panoply.experience import Experience
from panoply.kinds import Collector, Policy, kind_of
from panoply.loops.actor_critic import ActorCriticLearner
from panoply.loops.health import check_growth, weight_norm
from panoply.loops.learner import Learner
from panoply.loops.metrics import describe
from panoply.loops.models import Models
from panoply.loops.pool import PREFIX, Pool
from panoply.loops.samples import Watch
from panoply.loops.snapshots import Snapshots
from panoply.parts import Part
from panoply.planning import Plan
from panoply.policies.adapter_config import model_under
from panoply.policies.build import DTYPE, check_judge, is_judge, learning, model_source, pick_device
from panoply.policies.lora import begun_with, load_adapter, open_adapted, save_adapter
from panoply.policies.value import ValueModel, outputs_of
from panoply.slots.schedule.schedules import in_step, scheduled
from panoply.states import handed_back

if TYPE_CHECKING:
    from panoply.scale.ahead import Ahead
    from panoply.scale.spread import Spread

COLLECTOR, MEMBERS, WAITING = "collector", "members", "waiting"
"""The states of the collector and of a pool, and rows that wait for a seat's turn, are saved among those of parts."""


class Teaches(Protocol):
    """What moves a policy: `Learner` by terms of a batch, `ActorCriticLearner` by losses on transitions."""

    watch: Watch | None

    @property
    def optimisers(self) -> list[torch.optim.Optimizer]: ...

    def minibatches(self, experience: Experience, generator: torch.Generator) -> Iterator[Experience]: ...

    def step(self, experience: Experience, step: int) -> dict[str, float]: ...

    def settle(self) -> None: ...

    def state(self) -> dict[str, Tensor]: ...

    def load_state(self, named: Mapping[str, Tensor]) -> None: ...


class Stepped(NamedTuple):
    """What a step function made: the experience, its metrics, and what selection left of it, where that is less."""

    experience: Experience
    metrics: Mapping[str, float]
    learned: Experience | None = None


class Seat:
    """One learner: a policy, the method that teaches it, and what the method's parts remember.

    A `model` part is called with it. `found` is a checkpoint from which it will be loaded, `place` where it is in it,
    `role_of` another seat whose model it is a role of: the weights are that one's, and so is who saves them and, unless
    their moments are `apart`, who moves them. `spread` are workers elsewhere, where the run has any.
    """

    def __init__(
        self,
        plan: Plan,
        world: Any,
        found: Path | None = None,
        place: str = "",
        role_of: Seat | None = None,
        apart: bool = False,
        spread: Spread | None = None,
    ):
        options = plan.options
        self.spread = spread
        self.name, self.place, self.plan = plan.seat, place, plan
        self.options, self.method, self.world = options, plan.method, world
        self.kind = kind_of(world)
        self.role_of, self.apart = role_of, apart
        self.found_model = str(found / place / "model") if found is not None else ""
        """Where a checkpoint has the model, in case that which the run began with has gone."""
        needs = self.method.needs()
        judge = self._judge(needs, found) if "judged" in needs else None
        if role_of is not None:
            self.policy: Policy = role_of.policy
        elif judge is not None:
            self.policy = cast(Policy, judge.trunk)
        else:
            self.policy = self._adapted() if options.lora else self._begun_with(found)
        collector = self.kind.collector if spread is None else spread.collector(self)
        self.collect: Collector = collector(world, self.policy, options.seed, needs=needs)
        self.judges = "judged" in needs
        self.learned: Policy | ValueModel = self.policy
        """What the method's terms train: the policy, or a judge made of it."""
        if self.judges:
            self.learned = judge or ValueModel.of(cast(Any, self._begun_with(found)), outputs_of(needs))
        self.models = Models(self)
        self.snapshots = Snapshots(self.method, self.policy, self._reference)
        self.collect.selves = self.snapshots
        self.collect.counted = options.counted()
        self.replay: Episodes | None = None
        """Past episodes that an on-policy method learns from again; that of others is their learner's."""
        if (kept := getattr(self.method, "replay", None)) is not None and kept.info.unit == "episode":
            self.replay = kept(self.policy, options.seed)
        compared = self.snapshots.score if spread is None else partial(spread.compared, self)
        others = ((self.snapshots.compares, compared), (self.models.held, self.models.annotate))
        self.annotators = [annotate for there, annotate in others if there]
        """Those who add to what was collected: columns of other selves and models, and before them past episodes."""
        if self.replay is not None:
            self.annotators.insert(0, self.replay.beside)
        if self.method.phased:
            self.annotators.insert(0, self._in_phase)
        self.collect.models = self.models.asked()
        self.members = Pool(self.policy) if "members" in needs else None
        self.collect.members = self.members
        self.ahead: Ahead | None = None if spread is None else spread.ahead(self)
        """Who samples batches before it is their step's turn, where that is asked for."""
        self.learner: Teaches = LEARNERS[self.method.regime](self)
        self.parts: dict[str, Callable[..., Any]] = {}
        """What a step calls, by path: the method's parts, those that remember with what they remember."""
        self.states: dict[str, dict[str, Any]] = {}
        self.take(self.method.parts())
        self.norm = weight_norm(self.learned)
        """Of the weights the run began with."""

    def teacher(self, model: str = "") -> Callable[..., Learner]:
        """What makes the learner of the policy, or of a model beside it."""
        return Learner if self.spread is None else self.spread.learner(self, model)

    # -------------------------------------------------------------- opening

    def open(self, source: str, host: bool = False) -> Policy:
        """Another policy for this world, which may learn: new weights, or those of a folder; on the host if asked."""
        return cast(Policy, learning(self._opened(source, host)))

    def _opened(self, source: str, host: bool = False) -> Policy:
        options = dataclasses.replace(self.options, device="cpu") if host else self.options
        return self.kind.open_policy(source, self.world, options, self.plan.policy_options)

    def _judge(self, needs: frozenset[str], found: Path | None) -> ValueModel | None:
        """The reward model that the run goes on from, where the model named is one; or the checkpoint's, if that has
        gone."""
        try:
            folder = model_source(self.options.model, self.world)
            if folder is None or not is_judge(folder):
                return None
        except PanoplyError:
            if found is None:
                raise
            folder = found / self.place / "model"
        data = cast(Part, self.method.slots()["data"]).settings()
        check_judge(self.options.model, folder, data, needs)
        context = self.plan.policy_options.get("context", 0)
        return ValueModel.load(folder, DTYPE[self.options.dtype], pick_device(self.options.device), context)

    def _begun_with(self, found: Path | None) -> Policy:
        """The model the run began with; where that has gone and nothing else is made of it, the checkpoint's."""
        try:
            return self.open(self.options.model)
        except PanoplyError:
            if found is None or self.method.slots().get("models"):
                raise
            return self.open(str(found / self.place / "model"))

    def _adapted(self) -> Policy:
        """The model the run began with, and adapters that learn in its place."""
        options, source = self.options, model_source(self.options.model, self.world)
        adapters = (options.lora, options.seed, self.plan.lora, pick_device(options.device))
        return cast(Policy, open_adapted(cast(Any, self.open), options.model, source, *adapters))

    def _reference(self) -> Policy:
        named = self.options.reference
        if named == "start" and self.options.lora and (begun := begun_with(cast(Any, self.policy))):
            found = cast(Policy, begun)
        else:
            found = self._opened(self.options.model if named == "start" else named)
        if (thoughts := self.models.thoughts) is not None:
            cast(Any, found).think(thoughts.of_reference())
        return found

    # -------------------------------------------------------------- a step

    def take(self, parts: Iterable[tuple[str, Any]]) -> None:
        """Have parts ready to be called; what terms remember is their learner's."""
        for path, held in parts:
            called = partial(self._scheduled, held) if scheduled(held) else held.filled
            self.parts[path] = called
            if held.info.state is not None and held.info.slot not in TERMS:
                self.states[path] = held.info.state()
                self.parts[path] = partial(self._remembering, path, held, called)

    def renew(self, step: int, best: bool) -> None:
        """After a step: other selves become what their rules say, wherever they are."""
        self.snapshots.renew(step, best)
        if self.spread is not None and self.snapshots.kept:
            self.spread.renew(self, step, best)

    def _in_phase(self, experience: Experience) -> Experience:
        self.snapshots.begin(self.collect.version)
        return experience

    def _scheduled(self, held: Part, *args: Any) -> Any:
        """Call a part of which some numbers follow schedules, with what they are in this step."""
        return in_step(held, self.collect.version, self.options.steps)(*args)

    def _remembering(self, path: str, held: Part, called: Callable[..., Any], *args: Any) -> Any:
        """Call a part that remembers: it gets its state first, and hands back the next one."""
        self.states[path], result = handed_back(held.info.id, called(self.states[path], *args))
        return result

    def conclude(self, step: int, stepped: Stepped) -> Stepped:
        """After a step: the same with what it was made of among its metrics; the weights must be sound."""
        self.learner.settle()
        described = describe(stepped.experience)
        check_growth(step + 1, described, weight_norm(self.learned), self.norm)
        if self.replay is not None:
            self.replay.keep()
        if not self.method.normalised_once:
            self.kind.after_step(self.policy, stepped.experience)
        return stepped._replace(metrics=described | dict(stepped.metrics))

    def found(self) -> list[str]:
        """What parts that remember have found, in sentences."""
        told: list[str] = []
        for path, held in self.method.parts():
            if held.info.tells is not None:
                of = self.states if path in self.states else getattr(self.learner, "states", {})
                told += held.info.tells(held, of[path if path in of else held.info.name])
        return told

    def probe(self) -> Collector:
        """A collector of held-out tasks."""
        return self.kind.collector(self.world, self.policy, self.options.seed, split="test")

    def evaluate(self, watch: Callable[[int, int], None]) -> Evaluation:
        problems = self.options.held_out
        if self.judges:
            data = cast(Part, self.method.slots()["data"])
            return evaluate_pairs(data, cast(Any, self.probe()), cast(ValueModel, self.learned), problems)
        return self.judged_in(self.world, watch)

    def judged_in(self, world: Any, watch: Callable[[int, int], None]) -> Evaluation:
        """The policy on held-out problems of a world: its own, or another that it can act in."""
        options = self.options
        return self.kind.evaluate(
            world,
            self.policy,
            options.held_out,
            seed=options.seed,
            split=options.split,
            greedy=options.greedy,
            watch=watch,
        )

    # -------------------------------------------------------------- saving

    @property
    def optimisers(self) -> list[torch.optim.Optimizer]:
        """All that move weights here."""
        learners = (self.learner, *self.models.learners.values())
        return [optimiser for learner in learners for optimiser in learner.optimisers]

    @property
    def memory(self) -> dict[str, dict[str, Any]]:
        """What the parts, the collector and a pool remember, by path."""
        members = {MEMBERS: self.members.memory} if self.members is not None else {}
        return {**self.states, COLLECTOR: self.collect.state, **members}

    @memory.setter
    def memory(self, kept: Mapping[str, dict[str, Any]]) -> None:
        self.states = dict(kept)
        self.collect.state = self.states.pop(COLLECTOR)
        if self.members is not None:
            self.members.memory = self.states.pop(MEMBERS)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """All but the models, as JSON and as tensors."""
        plain, tensors = checkpoint.split_tensors(self.memory)
        return {"parts": plain, "norm": self.norm}, {
            **tensors,
            **self.learner.state(),
            **self.models.state(),
            **self.snapshots.state(),
            **(self.members.state() if self.members is not None else {}),
            **(self.replay.state() if self.replay is not None else {}),
            **(self.ahead.state() if self.ahead is not None else {}),
        }

    def save(self, folder: Path) -> None:
        """The models, each in a folder that others can open."""
        folder = folder / self.place
        self.models.save(folder / "models")
        if self.role_of is not None:
            return
        source = model_source(self.options.model, self.world) if self.options.lora else None
        if source is not None:
            save_adapter(cast(Any, self.policy), folder / "model", model_under(source))
        else:
            self.learned.save(folder / "model")
            if self.options.lora:  # on new weights, which no other folder holds
                save_adapter(cast(Any, self.policy), folder / "adapter")

    def load(self, folder: Path, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take up what `save` and `state` left; tensors of other seats are not looked at."""
        folder, mine = folder / self.place, f"{self.place}:" if self.place else ""
        others = () if mine else ("seats/",)
        tensors = {
            name.removeprefix(mine): tensor
            for name, tensor in tensors.items()
            if name.startswith(mine) and not name.startswith(others)
        }
        if self.role_of is not None:
            pass  # loaded by whose weights they are
        elif self.options.lora:
            own = folder / "adapter"
            load_adapter(cast(Any, self.policy), own if own.is_dir() else folder / "model")
        else:
            self.learned.load_weights(folder / "model")
        elsewhere = ("part:", "model:", "snapshot:", "ahead:", PREFIX, episodes.PREFIX)
        self.learner.load_state({k: v for k, v in tensors.items() if not k.startswith(elsewhere)})
        self.snapshots.load_state(tensors)
        if self.ahead is not None:
            self.ahead.load_state(tensors)
        if self.members is not None:
            self.members.load_state(tensors)
        if self.replay is not None:
            self.replay.load_state(tensors)
        self.models.load(folder / "models", tensors)
        kept = checkpoint.join_tensors(state["parts"], tensors)
        checkpoint.check_states(kept, self.memory)
        checkpoint.check_counts(COLLECTOR, kept[COLLECTOR], self.collect.state)
        self.memory, self.norm = kept, state["norm"]


def seated(plan: Plan, world: Any, found: Path | None, spread: Spread | None = None) -> dict[str, Seat]:
    """All seats of a run, by name; the first keeps what parts remember that belong to none."""
    seats: dict[str, Seat] = {}
    method = plan.method
    for name, one in (plan.seats() or {"": plan}).items():
        place, first = (f"seats/{name}", next(iter(seats.values()))) if seats else ("", None)
        shared = first if method.one_model else None
        seats[name] = Seat(one, world, found, place, shared, method.own_moments, spread)
    if len(seats) > 1:
        next(iter(seats.values())).take(method.slots().items())
        for seat in seats.values() if method.turn_waits else ():
            seat.states[WAITING] = {}
    return seats


def _by_terms(seat: Seat) -> Learner:
    options, method = seat.options, seat.method
    theirs = cast(Learner, seat.role_of.learner).mover if seat.role_of is not None else None
    return seat.teacher()(
        seat.models.joined(seat.kind.scorer(seat.learned, seat.world, method.needs())),
        method,
        more=seat.models.joined_losses(),
        total_steps=options.steps,
        micro_tokens=options.micro_tokens,
        recompute=options.recompute,
        offload=options.offload,
        masters=options.masters,
        seed=options.seed,
        mover=theirs.beside(cast(Part, method.slots()["update"])) if theirs and seat.apart else theirs,
    )


def _by_transitions(seat: Seat) -> ActorCriticLearner:
    options, policy, method = seat.options, cast(Any, seat.policy), cast(Any, seat.method)
    return ActorCriticLearner(policy, method, seed=options.seed, total_steps=options.steps)


LEARNERS: dict[str, Callable[[Seat], Teaches]] = {
    "on_policy": _by_terms,
    "dataset": _by_terms,
    "off_policy": _by_transitions,
    "offline": _by_transitions,
}
"""Who teaches, by the method's regime."""
