"""What a person watching a run sees: a live panel in a terminal, a line now and then elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any, cast

from panoply.errors import plain

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from panoply.evaluation.held_out import Evaluation
    from panoply.experience import Experience
    from panoply.loops.job import Job

BLOCKS = " ▁▂▃▄▅▆▇█"
CURVE = {
    "on_policy": ("success", "return", "reward"),
    "off_policy": ("success", "return", "reward"),
    "dataset": ("accuracy",),
    "offline": (),
}
"""What the curve shows, by regime: the first of these that a step's record has, or the loss.

The success of a data set is its author's, not the policy's.
"""


class Progress:
    """Who is told how a run goes. This one keeps silent; a class of yours changes what it wants to hear of.

    Every call but `say` and `close` hands over the job: `job.step`, `job.seconds`, `job.plan`, `job.policy`,
    `job.run.folder`. What a method raises ends the run like an error of its own. `Lines` prints, `Panel` draws; to look
    at steps alone `on_step` and `panoply.steps` are shorter.
    """

    def start(self, job: Job) -> None:
        """A run begins, or goes on: a recipe's stages follow one another."""

    def step(self, job: Job, record: Mapping[str, Any], experience: Experience) -> None:
        """A step is done; `record` is what was logged of it."""

    def evaluating(self, job: Job, done: int, total: int) -> None:
        """So many of all held-out answers have been written."""

    def evaluated(self, job: Job, found: Evaluation) -> None:
        """Held-out success was measured, before the first step and every so often."""

    def say(self, text: str) -> None:
        """A sentence for the user: a warning, or where the run was left."""

    def close(self) -> None:
        """The run has ended, soundly or not."""


class Onlooker:
    """Standard error, whose reader may go away: a run does not end because nobody looks."""

    def __init__(self) -> None:
        self._stream = sys.stderr

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Lines(Progress):
    """A line every few seconds, for logs and pipes."""

    def __init__(self, every: float = 5.0):
        self.every = every
        self._next = 0.0
        self._patience = 0.0

    def step(self, job: Job, record: Mapping[str, Any], experience: Experience) -> None:
        if self._due() or job.step == job.plan.options.steps:
            print(summary(job, record), file=Onlooker(), flush=True)

    def evaluating(self, job: Job, done: int, total: int) -> None:
        if done == 0:
            self._patience = time.monotonic() + 2.0
        elif time.monotonic() > self._patience and self._due():
            print(f"evaluating  {done}/{total} held-out answers", file=Onlooker(), flush=True)

    def say(self, text: str) -> None:
        print(plain(text, lines=True), file=Onlooker(), flush=True)

    def _due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self.every
        return True


class Panel(Progress):
    """A live panel: progress bar, learning curve, held-out success, and what the policy writes."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._live: Live | None = None

    def start(self, job: Job) -> None:
        from rich.console import Console
        from rich.live import Live

        self.close()
        records = job.run.metrics()
        self._record: Mapping[str, Any] = records[-1] if records else {}
        self._own = job.seat.method.regime in ("on_policy", "off_policy")
        self._shown = self._choose(job)
        self._measures = job.plan.measures()
        self._curve = [float(r.get(self._shown) or 0.0) for r in records]
        self._held_out = [(int(r["step"]), found) for r in records if (found := rates(r, "held_out_"))]
        if job.before:
            shown = {name: job.before[name] for name in job.before if f"{name}_interval" in job.before}
            self._held_out.insert(0, (0, shown))
        self._answers: list[tuple[bool | None, str]] = []
        self._evaluating: tuple[int, int] | None = None
        self._live = Live(
            console=self._console or Console(file=cast(IO[str], Onlooker())), auto_refresh=False
        )
        self._live.start()
        self._next = 0.0

    def evaluating(self, job: Job, done: int, total: int) -> None:
        self._evaluating = (done, total)
        self._refresh(job)

    def evaluated(self, job: Job, found: Evaluation) -> None:
        self._evaluating = None
        self._held_out.append((job.step, found.rates))
        if not self._own:
            self._answers = [(None, plain(" ".join(text.split()))) for text in found.samples]
        self._refresh(job)

    def step(self, job: Job, record: Mapping[str, Any], experience: Experience) -> None:
        self._record = record
        self._shown = self._shown or self._choose(job)
        last = self._curve[-1] if self._curve else 0.0
        self._curve.append(float(record.get(self._shown, last)))
        last = job.step == job.plan.options.steps
        if last or time.monotonic() >= self._next:
            if self._own:
                self._answers = [*answers(job, experience)]
            self._refresh(job)

    def say(self, text: str) -> None:
        text = plain(text, lines=True)
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=Onlooker(), flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _choose(self, job: Job) -> str:
        names = (*CURVE.get(job.seat.method.regime, ()), "loss")
        return next((name for name in names if self._record.get(name) is not None), "")

    def _refresh(self, job: Job) -> None:
        if self._live is not None:
            self._next = time.monotonic() + 0.1
            size = self._live.console.size
            self._live.update(self._render(job, size.width, size.height), refresh=True)

    def _render(self, job: Job, width: int, height: int) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel as Box
        from rich.text import Text

        width = max(20, min(100, width))
        inner = width - 4
        rows = max(2, min(8, height - 16))
        shown = max(0, min(5, height - rows - 11))
        pieces: list[RenderableType] = [self._bar(job, inner)]
        if self._curve:
            title = f"{self._shown} of the training batch"
            pieces += [Text(""), Text(""), Text(title, style="bold", no_wrap=True, overflow="ellipsis")]
            first = job.step - len(self._curve) + 1
            lines = plot(self._curve, inner, rows, first)
            pieces.append(Text("\n".join(lines), style="cyan", no_wrap=True, overflow="crop"))
        pieces += [Text(""), self._held_out_line()]
        if self._answers and shown:
            source = "answers just sampled" if self._own else "greedy answers on held-out problems"
            pieces += [Text(""), Text(source, style="bold", no_wrap=True, overflow="ellipsis")]
            for good, text in self._answers[:shown]:
                mark, style = {None: ("· ", "dim"), True: ("✓ ", "green"), False: ("✗ ", "red")}[good]
                pieces.append(Text(no_wrap=True, overflow="ellipsis").append(mark, style=style).append(text))
        title = f"{job.plan.method_id} on {job.plan.world_id}, seed {job.plan.options.seed}"
        return Box(Group(*pieces), title=title, width=width)

    def _bar(self, job: Job, width: int) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        if self._evaluating is None:
            done, total, label = job.step, job.plan.options.steps, summary(job, self._record)
        else:
            done, total = self._evaluating
            label = f"step {job.step}/{job.plan.options.steps}  evaluating on held-out problems, {done}/{total} answers"
        line = Text(label, no_wrap=True, overflow="ellipsis")
        return Group(line, ProgressBar(total=max(1, total), completed=done, width=width))

    def _held_out_line(self) -> RenderableType:
        from rich.text import Text

        if not self._held_out:
            return Text(f"held-out {self._measures}  not yet measured", style="dim")
        (_, before), (step, now) = self._held_out[0], self._held_out[-1]
        line = Text(no_wrap=True, overflow="ellipsis").append(f"held-out {self._measures}", style="bold")
        for name, rate in now.items():
            start = f"{before[name]:.2f} → " if len(self._held_out) > 1 and name in before else ""
            line.append(f"  {name} {start}{rate:.2f}")
        return line.append(f"  (step {step})", style="dim")


def rates(record: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """The held-out rates in a line of metrics."""
    return {name.removeprefix(prefix): float(v) for name, v in record.items() if name.startswith(prefix)}


def default() -> Progress:
    return Panel() if sys.stderr.isatty() else Lines()


@contextmanager
def bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar in a terminal, nothing elsewhere; tell it how much is done of how much."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def summary(job: Job, record: Mapping[str, Any]) -> str:
    """One line about a step."""
    words = [f"step {job.step}/{job.plan.options.steps}"]
    names: tuple[str, ...] = ("loss", "accuracy")
    if job.seat.method.regime in ("on_policy", "off_policy"):
        same = record.get("success") == record.get("reward")
        names = ("success", "return", *(() if same else ("reward",)), "loss", "entropy")
    words += [f"{name} {record[name]:.3f}" for name in names if record.get(name) is not None]
    held_out = rates(record, "held_out_")
    if held_out:
        words.append(f"held out {list(held_out.values())[-1]:.3f}")
    words += workers(job, record)
    if job.step:
        left = (job.plan.options.steps - job.step) * job.seconds / job.step
        if job.plan.options.minutes is not None:
            left = min(left, max(0.0, job.plan.options.minutes * 60 - job.seconds))
        words.append(f"{job.seconds:.0f} s, {left:.0f} s left")
    return "  ".join(words)


def workers(job: Job, record: Mapping[str, Any]) -> list[str]:
    """Of a run that is spread: who works, how long each side waited in a step, and how old what was learned from is."""
    found = []
    for role, number in (("learner", job.plan.options.learners), ("sampler", job.plan.options.samplers)):
        if (waited := record.get(f"seconds_wait_{role}s")) is not None:
            found.append(f"{number} {role}{'s' * (number > 1)} waiting {waited:.1f} s")
    if record.get("lag"):
        found.append(f"lag {record['lag']:.3g}")
    return found


def answers(job: Job, experience: Experience, most: int = 5) -> list[tuple[bool, str]]:
    """The first answers of a batch, and whether they succeeded."""
    if "signal:success" not in experience or (decode := job.kind.decode(job.policy)) is None:
        return []
    episodes = experience.by("episode")
    good = episodes.sum(experience["signal:success"])[:most].tolist()
    rows = episodes.first(experience["context"])[:most].tolist()
    tokens = experience.context.ragged("tokens")
    texts = [plain(" ".join(decode(tokens[row].tolist()).split())) for row in rows]
    return [(g > 0, t[:200]) for g, t in zip(good, texts, strict=True)]


def plot(values: Sequence[float], width: int, height: int, first: int = 1) -> list[str]:
    """A curve in block characters, with its bounds at the left and its first and last step below.

    Where there are more values than columns, a column is the mean of its values; where there are fewer, a value is
    as many columns wide as fit.
    """
    if not values:
        return []
    last = first + len(values) - 1
    room = max(1, width - 7)
    if len(values) > room:
        edges = [round(i * len(values) / room) for i in range(room + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    else:
        values = [v for v in values for _ in range(min(4, room // len(values)))]
    low, high = min(0.0, *values), max(1e-9, *values)
    if 0.1 < high <= 1.0:
        high = 1.0
    levels = [(v - low) / (high - low) * height * 8 for v in values]
    rows = []
    for row in range(height - 1, -1, -1):
        cells = "".join(BLOCKS[round(min(8, max(0, level - row * 8)))] for level in levels)
        label = f"{high:5.3g}" if row == height - 1 else f"{low:5.3g}" if row == 0 else " " * 5
        rows.append(f"{label[:5]} ┤{cells}")
    ends = f"step {first}"
    right = str(last)
    if len(values) > len(ends) + len(right) + 1:
        ends = ends + right.rjust(len(values) - len(ends))
    rows.append(f"{'':6} {ends}"[:width])
    return rows
