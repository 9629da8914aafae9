"""A job: a plan set in motion. What every loop shares: parts with memory, snapshots, evaluation, checkpoints."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from panoply import checkpoint, pace
from panoply.errors import PanoplyError
from panoply.evaluation.held_out import Evaluation, Ungraded
from panoply.evaluation.pairs import evaluate_pairs
from panoply.experience import Experience
from panoply.handle import Step
from panoply.kinds import Collector, Policy, kind_of
from panoply.loops.actor_critic import ActorCriticLearner
from panoply.loops.health import check_growth, speaks, weight_norm
from panoply.loops.learner import Learner
from panoply.loops.metrics import describe, peak_memory
from panoply.loops.models import Models
from panoply.loops.samples import Watch, choose, sampled_episodes
from panoply.loops.snapshots import Snapshots
from panoply.parts import Part
from panoply.planning import Plan
from panoply.policies.build import model_source
from panoply.policies.control import ControlPolicy
from panoply.policies.lora import add_lora, load_adapter, save_adapter
from panoply.policies.text import TextPolicy
from panoply.policies.value import ValueModel
from panoply.progress import Progress
from panoply.ranges import MOST_THREADS
from panoply.records import Best
from panoply.regimes import Offline, OffPolicy
from panoply.rollout.graphs import setup_seconds
from panoply.run import Run
from panoply.sinks import Careful, Sink
from panoply.threads import pick_threads, without_denormals
from panoply.until import Until
from panoply.worlds.world import TextWorld

COLLECTOR = "collector"
"""The collector's state is saved among those of the parts."""


class Job:
    def __init__(self, plan: Plan, run: Run, progress: Progress):
        options = plan.options
        self._threads = self.threads = torch.get_num_threads()
        self.stopping = False
        """Whether the run is to end before its next step."""
        if options.threads:
            torch.set_num_threads(options.threads)
        self.plan, self.run, self.progress, self.method = plan, run, progress, plan.method
        self.world = plan.world()
        if isinstance(self.world, TextWorld):
            self.world.listen(progress.say)
        self.kind = kind_of(self.world)
        checkpoint.recover(run.checkpoints)
        self._found = run.latest(progress.say)
        if remark := self.kind.remark(options.model, self.world):
            progress.say(remark)
        self.policy = self._open_policy()
        if not options.threads and self._found is None:
            torch.set_num_threads(pick_threads(self.kind.width(self.policy)))
        if options.lora:
            assert isinstance(self.policy, TextPolicy)
            self.policy = add_lora(self.policy, options.lora, options.seed)
        self.collect = self.kind.collector(self.world, self.policy, options.seed, needs=self.method.needs())
        self.learned: Policy | ValueModel = self.policy
        """What the method's terms train: the policy, or a judge made of it."""
        if "judged" in self.method.needs():
            opened = self._open_policy()
            assert isinstance(opened, TextPolicy)
            self.learned = ValueModel.of(opened)
        self.snapshots = Snapshots(self)
        self.models = Models(self)
        self.learner: Learner | ActorCriticLearner = self._make_learner()
        self.states: dict[str, dict[str, Any]] = {
            path: held.info.state() for path, held in self.method.parts() if held.info.state is not None
        }
        self.step = 0
        self.seconds = 0.0
        self.best: Best = {"step": 0, "of": plan.measures(), "score": None}
        """The step that did best on held-out problems, the later one of a tie."""
        self.before: dict[str, Any] = {}
        self.after: dict[str, Any] = {}
        self.until = Until.parse(options.until) if options.until else None
        self.logged: dict[str, Any] = {}
        """What the last step has logged."""
        self.sinks: Sink | None = None
        self._phases: dict[str, float] = {}
        self._inside = 0.0
        self._setup = 0.0
        self._started = time.monotonic()
        self._norm = weight_norm(self.learned)
        self._told: set[str] = set()
        self._moves = 0
        self._at_start: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for learner in (self.learner, *self.models.learners.values()):
            for optimiser in learner.optimisers:
                optimiser.register_step_post_hook(self._moved)

    def _make_learner(self) -> Learner | ActorCriticLearner:
        options, method = self.plan.options, self.method
        if isinstance(method, OffPolicy | Offline):
            assert isinstance(self.policy, ControlPolicy)
            return ActorCriticLearner(self.policy, method, seed=options.seed, total_steps=options.steps)
        return Learner(
            self.models.joined(self.kind.scorer(self.learned, self.world, method.needs())),
            method,
            more=self.models.joined_losses(),
            total_steps=options.steps,
            micro_tokens=options.micro_tokens,
            recompute=options.recompute,
            seed=options.seed,
        )

    # -------------------------------------------------------------- parts

    def call(self, path: str, *args: Any, part: Part | None = None) -> Any:
        """Call a slot's part; one that remembers gets its state first and hands back the next one."""
        held = part or getattr(self.method, path)
        if path not in self.states:
            return held(*args)
        self.states[path], result = held(self.states[path], *args)
        return result

    def sample(self) -> Experience:
        """What the sample part collects, with the weights the update wants to see."""
        assert isinstance(self.learner, Learner)
        return self.learner.sampled(self.step, lambda: self.call("sample", self.collect))

    def settle(self) -> None:
        """Be back at the weights that are learned."""
        if isinstance(self.learner, Learner):
            self.learner.settle()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is done inside, without phases inside of it."""
        start, before, self._inside = time.perf_counter(), self._inside, 0.0
        yield
        took = time.perf_counter() - start
        self._phases[name] = self._phases.get(name, 0.0) + took - self._inside
        self._inside = before + took

    # -------------------------------------------------------------- the course of a run

    def begin(self) -> None:
        """Go on from the newest usable checkpoint, or evaluate and store the starting point."""
        self._begin()
        self.threads = torch.get_num_threads()

    def _begin(self) -> None:
        found = self._found
        if found is not None:
            self._load(found)
            checkpoint.set_aside(self.run.checkpoints, after=self.step)
            self._prune()
        elif checkpoint.listed(self.run.checkpoints):
            raise PanoplyError(
                f"No checkpoint of {self.run.folder} is usable, so there is nothing to resume from. They were left "
                "as they are: restore one, or start a new run."
            )
        self.run.rewind(self.step if found else -1, self.progress.say)
        self.logged = next(iter(self.run.metrics()[-1:]), {})
        self.sinks = Careful(self.plan.options.sinks, self.run, self.step, self.progress.say)
        self.progress.start(self)
        if found is not None:
            self.progress.say(f"Resuming {self.run.folder} at step {self.step} of {self.plan.options.steps}.")
            return
        self._say_pace()
        self._evaluate()
        self.before = self.after
        self._save()

    def _say_pace(self) -> None:
        """What a step will take, measured before the first."""
        if isinstance(self.policy, TextPolicy) and pace.worth_measuring(self.plan, opened=True):
            for line in pace.estimate(self.plan, self.policy).lines():
                self.progress.say(line)

    def steps(self) -> Iterator[int]:
        """The steps left in the budget."""
        limit = self.plan.options.minutes
        self._started = time.monotonic() - self.seconds
        while self.step < self.plan.options.steps:
            if self.stopping:
                self.progress.say(
                    f"Stopped at step {self.step} of {self.plan.options.steps}: the run is finished."
                )
                break
            if limit is not None and time.monotonic() - self._started > limit * 60:
                self.progress.say(f"Stopped after {limit:g} minutes.")
                break
            if any((most := getattr(self.plan.options, of)) and self.spent[of] >= most for of in self.spent):
                break
            if self.until is not None and self.until.met(self.after, self.logged):
                self.progress.say(f"Stopped at step {self.step}: {self.plan.options.until} is reached.")
                break
            self._moves = 0
            self._at_start = copy.deepcopy((self.collect.state, self.states))
            yield self.step

    @property
    def spent(self) -> dict[str, int]:
        """What has been collected since the run began."""
        return {of: self.collect.state.get(of, 0) for of in ("episodes", "decisions")}

    def watch(self, experience: Experience) -> None:
        """In a step whose episodes are recorded: choose some, of which the learner is to note all it does to them."""
        every, step = self.plan.options.episodes_every, self.step + 1
        due = every > 0 and len(experience) > 0 and (step % every == 0 or step == self.plan.options.steps)
        self.learner.watch = Watch(choose(experience)) if due else None

    def finish_step(
        self, experience: Experience, metrics: Mapping[str, float], learned: Experience | None = None
    ) -> Step:
        """Log, evaluate and checkpoint what has become due.

        `learned` is what selection left of the experience, where that is less.
        """
        options = self.plan.options
        self.settle()
        described = describe(experience)
        check_growth(self.step + 1, described, weight_norm(self.learned), self._norm)
        self.step += 1
        self.seconds = time.monotonic() - self._started
        self.collect.version = self.step
        if not (isinstance(self.method, OffPolicy | Offline) and self.method.data):
            self.kind.after_step(self.policy, experience)
        last = self.step == options.steps
        evaluated = last or bool(options.evaluate_every and self.step % options.evaluate_every == 0)
        record: dict[str, Any] = {"step": self.step, "seconds": round(self.seconds, 3)}
        record |= {f"total_{of}": count for of, count in self.spent.items()}
        record |= described | dict(metrics) | self._speed(experience) | self._failures()
        if evaluated:
            record |= self._evaluate()
        if self.learner.watch is not None:
            self._record_episodes(self.learner.watch, experience, experience if learned is None else learned)
        self.run.log(record)
        self.logged = record
        if self.sinks is not None:
            self.sinks.log(self.step, record)
        best = evaluated and self.best["step"] == self.step
        if last or best or self.step % options.checkpoint_every == 0:
            self._save()
        self.progress.step(self, record, experience)
        return Step(record, experience, self)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """How torch computes while this run does; whoever looks at it between two steps has their own way back."""
        torch.set_num_threads(self.threads)
        try:
            with without_denormals():
                yield
        finally:
            torch.set_num_threads(self._threads)

    def paused_between(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps of a loop, to be looked at one after another. Time spent looking is not the run's."""
        while True:
            with self.at_work():
                step = next(steps, None)
            if step is None:
                return
            away = time.monotonic()
            try:
                yield step
            except KeyboardInterrupt:
                self._store()
                raise
            del step  # what it was made of is not kept while the next is made
            self._started += time.monotonic() - away

    def pause(self) -> None:
        """Leave the run so that it can be resumed from its last step."""
        self._store()
        self.progress.say(
            f"Left at step {self.step} of {self.plan.options.steps}; go on with panoply train --resume "
            f"{self.run.folder}"
        )

    def _store(self) -> None:
        """Between two steps: save where the run is, unless that was done."""
        with self.at_work():
            if all(c.step != self.step for c in checkpoint.listed(self.run.checkpoints)):
                self._save()

    def finish(self) -> dict[str, Any]:
        """Store the end of the run and close it."""
        if self.after.get("step") != self.step:
            self._evaluate()
            self._save()
        result = {
            "steps": self.step,
            "seconds": round(self.seconds, 2),
            **self.spent,
            "before": self.before,
            "after": self.after,
            "best": self.best,
            "threads": torch.get_num_threads(),
            "fingerprint": self.learned.fingerprint(),
        }
        self.run.finish(result)
        self.close()
        return result

    def save_last_good(self, why: str) -> int:
        """After a divergence: keep the newest state that still makes sense, note it in the result, return its step.

        That is the state before the bad step, where no weight has moved in it and the policy still speaks; a number
        that is not finite then came from elsewhere, such as a reward. Otherwise it is the newest checkpoint from
        which the next step was sound: one of the very step that failed is set aside.
        """
        self.settle()
        if self._moves == 0 and speaks(self.policy, self._probe()):
            self.collect.state, self.states = copy.deepcopy(self._at_start)
            self._save()
            kept = self.step
        else:
            if self._moves == 0 and any(c.step < self.step for c in checkpoint.listed(self.run.checkpoints)):
                checkpoint.set_aside(self.run.checkpoints, after=self.step - 1)
            newest = self.run.latest()
            kept = newest.step if newest else 0
        self.run.finish({"diverged": why, "steps": kept, "before": self.before, "after": self.after})
        return kept

    def close(self) -> None:
        if self.sinks is not None:
            self.sinks.close()
            self.sinks = None
        self.collect.close()
        self.progress.close()
        self.run.release()
        torch.set_num_threads(self._threads)

    # -------------------------------------------------------------- pieces

    def open(self, source: str) -> Policy:
        """A policy for this world: new weights, or those of a folder."""
        return self.kind.open_policy(source, self.world, self.plan.options, self.plan.policy_options)

    def _open_policy(self) -> Policy:
        """The model the run began with; where that has gone and nothing else is made of it, the checkpoint's."""
        options, found = self.plan.options, self._found
        try:
            return self.open(options.model)
        except PanoplyError:
            if found is None or options.lora or self.method.slots().get("models"):
                raise
            return self.open(str(found.model))

    def _probe(self) -> Collector:
        """A collector of held-out tasks."""
        return self.kind.collector(self.world, self.policy, self.plan.options.seed, split="test")

    def _record_episodes(self, watch: Watch, experience: Experience, learned: Experience) -> None:
        watch.credited(learned)
        decode = self.kind.decode(self.policy)
        self.run.log_episodes(sampled_episodes(self.step, decode, experience, watch))
        self.learner.watch = None

    def _evaluate(self) -> dict[str, float]:
        with self.phase("evaluate"):
            try:
                found = self._measure()
            except Ungraded as error:
                self.progress.say(f"Step {self.step} could not be evaluated. {error}")
                self.after = self.after or {"step": self.step, "of": self.best["of"]}
                return {}
        if self.best["score"] is None or found.score >= self.best["score"]:
            self.best = {"step": self.step, "of": found.of, "score": found.score}
        self.after = {"step": self.step, **found.to_json()}
        self.progress.evaluated(self, found)
        if found.ungraded:
            self.progress.say(
                f"{found.ungraded} held-out answers could not be graded and are left out of the mean."
            )
        extras = {f"sampled_{part}": mean for part, mean in found.parts.items()}
        extras |= {f"success_{how}": rate for how, rate in found.success.items()}
        record = {f"held_out_{name}": mean for name, mean in {**extras, **found.rates}.items()}
        return record | ({"ungraded": found.ungraded} if found.ungraded else {})

    def _measure(self) -> Evaluation:
        options = self.plan.options
        if isinstance(self.learned, ValueModel):
            data = self.method.slots()["data"]
            assert isinstance(data, Part)
            return evaluate_pairs(data, cast(Any, self._probe()), self.learned, options.held_out)
        return self.kind.evaluate(
            self.world,
            self.policy,
            options.held_out,
            seed=options.seed,
            split=options.split,
            greedy=options.greedy,
            watch=lambda done, total: self.progress.evaluating(self, done, total),
        )

    def _speed(self, experience: Experience) -> dict[str, float]:
        times = {f"seconds_{name}": round(t, 4) for name, t in self._phases.items()}
        setup, self._setup = self._setup, setup_seconds(getattr(self.policy, "model", None))
        if self._setup > setup:  # a part of seconds_sample or seconds_evaluate, once in a process
            times["seconds_setup"] = round(self._setup - setup, 4)
        spent = sum(t for name, t in self._phases.items() if name != "evaluate")
        self._phases = {}
        return {
            **times,
            "tokens_per_second": round(len(experience) / max(spent, 1e-9)),
            "peak_memory_mb": peak_memory(),
        }

    def _failures(self) -> dict[str, int]:
        """How many answers could not be graded so far; each new reason is told once."""
        reasons = self.collect.failures()
        for why in reasons.keys() - self._told:
            self.progress.say(f"An episode could not be finished and is left out or cut: {why}.")
        self._told |= reasons.keys()
        return {"reward_failures": sum(reasons.values())} if reasons else {}

    def _moved(self, *_: Any) -> None:
        self._moves += 1

    def _save(self) -> None:
        plain, tensors = checkpoint.split_tensors({**self.states, COLLECTOR: self.collect.state})
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "parts": plain,
            "best": self.best,
            "before": self.before,
            "after": self.after,
            "threads": torch.get_num_threads(),
            "norm": self._norm,
        }
        self.run.sync()
        tensors |= {**self.learner.state(), **self.models.state()}
        checkpoint.save(self.run.checkpoints, self.step, self._save_models, state, tensors)
        self._prune()

    def _prune(self) -> None:
        checkpoint.prune(self.run.checkpoints, self.plan.options.keep, self.best["step"])

    def _save_models(self, folder: Path) -> None:
        self.learned.save(folder / "model")
        self.models.save(folder / "models")
        if self.plan.options.lora:
            base = model_source(self.plan.options.model, cast(TextWorld, self.world))
            save_adapter(cast(TextPolicy, self.policy), folder / "adapter", base)

    def _load(self, found: checkpoint.Checkpoint) -> None:
        """Take up what a checkpoint holds: whole, as its manifest says, but perhaps of another method or version."""
        try:
            self._take_up(found)
        except (
            PanoplyError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            RuntimeError,
            AssertionError,
        ) as error:
            said = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            raise PanoplyError(
                f"The checkpoint {found.folder} does not fit this run, so there is nothing to resume from: {said}."
            ) from error

    def _take_up(self, found: checkpoint.Checkpoint) -> None:
        state, tensors = found.state(), found.tensors()
        if not 1 <= state["threads"] <= MOST_THREADS:
            raise PanoplyError(f"threads are from 1 to {MOST_THREADS}, not {state['threads']}")
        if state["threads"] != torch.get_num_threads():
            torch.set_num_threads(state["threads"])
        if self.plan.options.lora:
            load_adapter(cast(TextPolicy, self.policy), found.folder / "adapter")
        else:
            self.learned.load_weights(found.model)
        self.learner.load_state({k: v for k, v in tensors.items() if not k.startswith(("part:", "model:"))})
        self.models.load(found.folder / "models", tensors)
        first = {**self.states, COLLECTOR: self.collect.state}
        self.states = checkpoint.join_tensors(state["parts"], tensors)
        checkpoint.check_states(self.states, first)
        self.collect.state = self.states.pop(COLLECTOR)
        self.step = self.collect.version = state["step"]
        self.seconds, self.best, self._norm = state["seconds"], state["best"], state["norm"]
        self.before, self.after = state["before"], state["after"]
