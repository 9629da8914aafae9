"""A job: a plan set in motion. The course of a run: steps, evaluation, checkpoints. Who learns in it is a `Seat`."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from panoply import checkpoint, pace
from panoply.errors import PanoplyError
from panoply.evaluation.held_out import Ungraded
from panoply.experience import Experience
from panoply.handle import Step
from panoply.kinds import Policy, kind_of
from panoply.loops import saving
from panoply.loops.health import speaks
from panoply.loops.metrics import peak_memory
from panoply.loops.samples import Watch, choose, sampled_episodes
from panoply.loops.seat import Seat, Stepped, seated
from panoply.planning import COLLECTED, SIGNAL, Plan, named_world
from panoply.progress import Progress
from panoply.records import Best
from panoply.rollout.graphs import setup_seconds
from panoply.run import Run
from panoply.sinks import Careful, Sink
from panoply.threads import pick_threads, without_denormals
from panoply.until import Until

if TYPE_CHECKING:
    from panoply.scale.spread import Spread


class Job:
    def __init__(self, plan: Plan, run: Run, progress: Progress):
        options = plan.options
        self._threads = self.threads = torch.get_num_threads()
        self.stopping = False
        """Whether the run is to end before its next step."""
        if options.threads or options.is_spread():
            torch.set_num_threads(options.threads or 1)
        self.plan, self.run, self.progress, self.method = plan, run, progress, plan.method
        self.most = options.budget()
        """How much the run may collect, by what is counted."""
        self.world = plan.world()
        self.world.listen(progress.say)
        self.kind = kind_of(self.world)
        checkpoint.recover(run.checkpoints)
        self._found = run.latest(progress.say)
        if remark := self.kind.remark(options.model, self.world, plan.adapters()):
            progress.say(remark)
        if said := self.kind.reads(options.model, self.world, plan.policy_options):
            progress.say(f"Context: {said}")
        self.spread = self._spread()
        """Workers elsewhere, where the run has any."""
        try:
            found = self._found.folder if self._found else None
            if self.spread is not None:
                self.spread.check_shared(run.folder)
            self.seats = seated(plan, self.world, found, self.spread)
            """Who learns, by name: most runs have one, without a name."""
        except BaseException:
            if self.spread is not None:
                self.spread.close()
            raise
        self.seat = next(iter(self.seats.values()))
        """The one that the run is judged by; it keeps what parts remember that belong to none."""
        if not options.threads and not options.is_spread() and self._found is None:
            device = next((p.device.type for _, p in self.policy.named_parameters()), "cpu")
            torch.set_num_threads(pick_threads(self.kind.width(self.policy), device=device))
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
        self._told: set[str] = set()
        self._moves = 0
        self._at_start: list[dict[str, Any]] = []
        for optimiser in (o for seat in self.seats.values() for o in seat.optimisers):
            optimiser.register_step_post_hook(self._moved)

    def _spread(self) -> Spread | None:
        if not self.plan.options.is_spread():
            return None
        from panoply.scale.spread import Spread

        return Spread(self.plan, self._found.folder if self._found else None)

    @property
    def policy(self) -> Policy:
        return self.seat.policy

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
        self._get_ready()
        self.threads = torch.get_num_threads()

    def _begin(self) -> None:
        found = self._found
        if found is not None:
            saving.load(self, found)
            checkpoint.set_aside(self.run.checkpoints, after=self.step)
            saving.prune(self)
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
        saving.save(self)

    def _say_pace(self) -> None:
        """What a step will take, measured before the first."""
        if pace.worth_measuring(self.plan, opened=True):
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
            if any(self.spent.get(of, 0) >= amount for of, amount in self.most.items()):
                break
            if self.until is not None and self.until.met(self.after, self.logged):
                self.progress.say(f"Stopped at step {self.step}: {self.plan.options.until} is reached.")
                break
            yield self.step

    @property
    def spent(self) -> dict[str, int]:
        """What has been collected since the run began."""
        states = [seat.collect.state for seat in self.seats.values()]
        units = [of for of in COLLECTED if any(of in state for state in states)]
        units += [of for of in self.most if of.startswith(SIGNAL)]
        found = {of: sum(state.get(of, 0) for state in states) for of in units}
        if "episodes" in found:  # numbers that were given to nobody
            found["episodes"] -= sum(state.get("skipped", 0) for state in states)
        return found

    def watch(self, seat: Seat, experience: Experience) -> None:
        """In a step whose episodes are recorded: choose some, of which the learner is to note all it does to them."""
        every, step = self.plan.options.episodes_every, self.step + 1
        due = every > 0 and len(experience) > 0 and (step % every == 0 or step == self.plan.options.steps)
        due = due and seat is self.seat
        seat.learner.watch = Watch(choose(experience)) if due else None

    def finish_step(self, stepped: Stepped) -> Step:
        """Log, evaluate and checkpoint what has become due."""
        options, (experience, metrics, learned) = self.plan.options, stepped
        self.step += 1
        self.seconds = time.monotonic() - self._started
        for seat in self.seats.values():
            seat.collect.version = self.step
        last = self.step == options.steps
        evaluated = last or bool(options.evaluate_every and self.step % options.evaluate_every == 0)
        record: dict[str, Any] = {"step": self.step, "seconds": round(self.seconds, 3)}
        record |= {f"total_{of}": count for of, count in self.spent.items()}
        record |= dict(metrics) | self._speed(experience) | self._failures() | self._workers()
        if evaluated:
            record |= self._evaluate()
        if self.seat.learner.watch is not None:
            self._record_episodes(
                self.seat.learner.watch, experience, experience if learned is None else learned
            )
        self.run.log(record)
        self.logged = record
        if self.sinks is not None:
            self.sinks.log(self.step, record)
        best = evaluated and self.best["step"] == self.step
        for seat in self.seats.values():
            seat.renew(self.step, best)
        if last or best or self.step % options.checkpoint_every == 0:
            saving.save(self)
        self.progress.step(self, record, experience)
        self._get_ready()
        return Step(record, experience, self)

    def _get_ready(self) -> None:
        """For the step to come: what is remembered before it, in case it goes wrong."""
        self._moves = 0
        self._at_start = [copy.deepcopy(seat.memory) for seat in self.seats.values()]

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
                saving.save(self)

    def finish(self) -> dict[str, Any]:
        """Store the end of the run and close it."""
        if self.after.get("step") != self.step:
            self._evaluate()
            saving.save(self)
        result = {
            "steps": self.step,
            "seconds": round(self.seconds, 2),
            **self.spent,
            "before": self.before,
            "after": self.after,
            "best": self.best,
            "found": [sentence for seat in self.seats.values() for sentence in seat.found()],
            "threads": torch.get_num_threads(),
            "fingerprint": self.seat.learned.fingerprint(),
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
        seats = list(self.seats.values())
        for seat in seats:
            seat.learner.settle()
        if self._moves == 0 and all(speaks(seat.policy, seat.probe()) for seat in seats):
            for seat, memory in zip(seats, self._at_start, strict=True):
                seat.memory = copy.deepcopy(memory)
            saving.save(self)
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
        for seat in self.seats.values():
            seat.collect.close()
        if self.spread is not None:
            self.spread.close()
        self.progress.close()
        self.run.release()
        torch.set_num_threads(self._threads)

    # -------------------------------------------------------------- pieces

    def _record_episodes(self, watch: Watch, experience: Experience, learned: Experience) -> None:
        watch.credited(learned)
        decode = self.kind.decode(self.policy)
        verdict = self.kind.verdict(self.world)
        self.run.log_episodes(sampled_episodes(self.step, decode, experience, watch, verdict))
        self.seat.learner.watch = None

    def _evaluate(self) -> dict[str, float]:
        with self.phase("evaluate"):
            try:
                found = self.seat.evaluate(lambda done, total: self.progress.evaluating(self, done, total))
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
        record |= self._evaluate_elsewhere()
        return record | ({"ungraded": found.ungraded} if found.ungraded else {})

    def _evaluate_elsewhere(self) -> dict[str, float]:
        """In the other world that the run is judged in, where there is one; the best checkpoint is not chosen by it."""
        if self.plan.options.held_out_world is None:
            return {}
        with self.phase("evaluate"):
            try:
                found = self.seat.judged_in(self.other_world, lambda done, total: None)
            except Ungraded as error:
                self.progress.say(f"Step {self.step} could not be evaluated elsewhere. {error}")
                return {}
        self.after["elsewhere"] = {"world": self.plan.options.held_out_world, **found.to_json()}
        return {f"elsewhere_{name}": mean for name, mean in found.rates.items()}

    @cached_property
    def other_world(self) -> Any:
        return named_world(str(self.plan.options.held_out_world))

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

    def _workers(self) -> dict[str, float]:
        """What workers elsewhere did in this step, a line each; how they waited."""
        if self.spread is None:
            return {}
        told = self.spread.told(self.step, list(self.seats.values()))
        for line in told:  # where a learner died all were started again
            line["restarts"] += self.run.restarts
        self.run.log_workers(told)
        return self.spread.metrics(told)

    def _failures(self) -> dict[str, int]:
        """How many answers could not be graded so far; each new reason is told once."""
        reasons: Counter[str] = Counter()
        for seat in self.seats.values():
            reasons.update(seat.collect.failures())
        for why in reasons.keys() - self._told:
            self.progress.say(f"An episode could not be finished and is left out or cut: {why}.")
        self._told |= reasons.keys()
        return {"reward_failures": sum(reasons.values())} if reasons else {}

    def _moved(self, *_: Any) -> None:
        self._moves += 1
