"""Which model is meant: that of a folder, or of a run the checkpoint called `best`, `last` or by its step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from panoply import checkpoint
from panoply.checkpoint import Checkpoint
from panoply.errors import PanoplyError, unknown
from panoply.files import is_file
from panoply.policies import hub
from panoply.records import Best
from panoply.run import CONFIG, Run

Which = str | int | None
"""`best` (what none stands for), `last`, or a step."""


@dataclass(frozen=True)
class Taken:
    """A model that was asked for. As text it says which one that is, for commands to print."""

    model: Path
    """Its folder."""
    checkpoint: Checkpoint | None = None
    run: Run | None = None
    role: str = ""
    """What the checkpoint is to its run: `its best by held-out reward`, `its last`."""

    @property
    def step(self) -> int | None:
        return None if self.checkpoint is None else self.checkpoint.step

    def __str__(self) -> str:
        if self.checkpoint is None:
            return str(self.model)
        named = [f"step {self.step} of {self.checkpoint.folder.parent.parent}"]
        named += [self.role] if self.role else []
        named += ["the model before training"] if self.step == 0 else []
        last = checkpoint.listed(self.checkpoint.folder.parent)[-1].step
        other = (
            f" (its last is step {last})" if self.role.startswith("its best") and last != self.step else ""
        )
        return ", ".join(named) + other


def take(source: str | Path, which: Which = None) -> Taken:
    """The model meant by a run (its best checkpoint, unless told otherwise), a checkpoint or a model folder.

    A checkpoint that is damaged is refused and never replaced by another in silence.
    """
    path = Path(source)
    if is_file(path / CONFIG):
        run = Run.open(path)
        found, role = _choose(run, _word(which))
        return Taken(found.model, found, run, role)
    if which is not None:
        raise PanoplyError(f"--which chooses a checkpoint of a run, and {source} is not a run: leave it out.")
    if not is_file(path / checkpoint.MANIFEST):
        return Taken(hub.fetch(str(source)) if hub.is_id(source) else path)
    problem = Checkpoint(path).problem()
    if problem is not None:
        raise PanoplyError(f"The checkpoint {path} is not usable: {problem}.")
    return Taken(path / "model", Checkpoint(path) if path.name.startswith("step-") else None)


def model_folder(source: str | Path, which: Which = None) -> Path:
    return take(source, which).model


def context_of(folder: Path) -> int:
    """The `policy.context` of the run that a model was trained in, as far as its folder lies there; 0: none."""
    for above in folder.resolve().parents[1:6]:
        if above.name == "checkpoints" and is_file(above.parent / CONFIG):
            asked = Run.open(above.parent).config["plan"].get("policy", {}).get("context", 0)
            return asked if isinstance(asked, int) else 0
    return 0


def is_run(source: Any) -> bool:
    return isinstance(source, str | Path) and is_file(Path(source) / CONFIG)


def run_of(source: str | Path) -> Run:
    """The run that a folder is, or whose checkpoint it is."""
    path = Path(source)
    return Run.open(path.parent.parent if is_file(path / checkpoint.MANIFEST) else path)


def best_of(run: Run) -> Best:
    """The step that did best on held-out problems, by what (`of`) and how well; of a tie the later one.

    It is known from the run's result, or while it has none from its newest checkpoint.
    """
    result = run.result()
    if result is not None and "best" in result:
        return result["best"]
    newest = _kept(run)[-1]
    problem = newest.problem()
    if problem is not None:
        raise _refusal(run, newest.step, "its last, which knows its best", problem)
    return newest.state()["best"]


def _word(which: Which) -> str | int:
    word = "best" if which is None else which
    if word in ("best", "last"):
        return str(word)
    if isinstance(word, bool) or not str(word).isdecimal():
        raise unknown("checkpoint", str(word), ("best", "last", "a step"))
    return int(word)


def _choose(run: Run, word: str | int) -> tuple[Checkpoint, str]:
    kept = _kept(run)
    last, role = kept[-1].step, ""
    if word == "best":
        best = best_of(run)
        score = best["score"]
        known = "for which nothing was graded" if score is None else f"{score:.3f}"
        step, role = best["step"], f"its best by held-out {best['of']}, {known}"
    else:
        step = last if word == "last" else int(word)
        role = "its last" if step == last else ""
    found = next((c for c in kept if c.step == step), None)
    problem = "it is not kept" if found is None else found.problem()
    if found is None or problem is not None:
        raise _refusal(run, step, role, str(problem))
    return found, role


def _kept(run: Run) -> list[Checkpoint]:
    kept = checkpoint.listed(run.checkpoints)
    if not kept:
        raise PanoplyError(f"The run {run.folder} has no usable checkpoint yet.")
    return kept


def _refusal(run: Run, step: int, role: str, problem: str) -> PanoplyError:
    """Why a checkpoint cannot be taken, and which can."""
    whole = [str(c.step) for c in checkpoint.listed(run.checkpoints) if c.problem() is None]
    rest = f"Take another with --which: {', '.join(whole)}." if whole else "No other is usable."
    named = f"Step {step} of {run.folder}{f', {role},' if role else ''}"
    return PanoplyError(f"{named} cannot be taken: {problem}. {rest}")
