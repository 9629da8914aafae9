"""What a person watching a run sees: a live panel in a terminal, a line now and then elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

    from panoply.evaluation.held_out import Evaluation
    from panoply.experience import Experience
    from panoply.loops.job import Job

BLOCKS = " ▁▂▃▄▅▆▇█"


class Progress:
    """Watches in silence; the base of the others."""

    def start(self, job: Job) -> None: ...

    def step(self, job: Job, record: Mapping[str, Any], experience: Experience) -> None: ...

    def evaluated(self, job: Job, found: Evaluation) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


class Lines(Progress):
    """A line every few seconds, for logs and pipes."""

    def __init__(self, every: float = 5.0):
        self.every = every
        self._next = 0.0

    def step(self, job: Job, record: Mapping[str, Any], experience: Experience) -> None:
        due = time.monotonic() >= self._next or job.step == job.plan.options.steps
        if due:
            self._next = time.monotonic() + self.every
            print(summary(job, record), file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Panel(Progress):
    """A live panel: progress bar, learning curve, held-out success, and what the policy writes."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._curve: list[float] = []
        self._answers: list[tuple[bool, str]] = []
        self._held_out = ""
        self._record: Mapping[str, Any] = {}

    def start(self, job: Job) -> None:
        from rich.console import Console
        from rich.live import Live

        self._curve = [float(r.get("success", r.get("loss", 0.0))) for r in job.run.metrics()]
        self._live = Live(console=Console(stderr=True), refresh_per_second=8, transient=True)
        self._live.start()

    def evaluated(self, job: Job, found: Evaluation) -> None:
        self._held_out = f"step {job.step}: greedy {found.greedy:.2f}, sampled {found.sampled:.2f}"

    def step(self, job: Job, record: Mapping[str, Any], experience: Experience) -> None:
        self._record = record
        self._curve.append(float(record.get("success", record.get("loss", 0.0))))
        if self._live is not None:
            self._answers = answers(job, experience)
            self._live.update(self._render(job))

    def say(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self, job: Job) -> Group:
        from rich.console import Group
        from rich.panel import Panel as Box
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        chart = Text("\n".join(plot(self._curve, width=64, height=6)), style="cyan")
        shown = Text()
        for good, text in self._answers:
            shown.append("✓ " if good else "✗ ", style="green" if good else "red").append(text + "\n")
        bar = ProgressBar(total=job.plan.options.steps, completed=job.step, width=64)
        inside = Group(
            Text(summary(job, self._record)),
            bar,
            Text(""),
            chart,
            Text(f"held out  {self._held_out}", style="bold"),
            Text(""),
            shown,
        )
        title = f"{job.plan.method_id} on {job.plan.world_id}, seed {job.plan.options.seed}"
        return Group(Box(inside, title=title, width=76))


def default() -> Progress:
    return Panel() if sys.stderr.isatty() else Lines()


def summary(job: Job, record: Mapping[str, Any]) -> str:
    """One line about a step."""
    shown = {
        "success": "success",
        "reward": "reward",
        "loss": "loss",
        "entropy": "entropy",
        "accuracy": "accuracy",
    }
    words = [f"{label} {record[name]:.3f}" for name, label in shown.items() if name in record]
    if "held_out_sampled" in record:
        words.append(f"held out {record['held_out_sampled']:.3f}")
    left = (job.plan.options.steps - job.step) * job.seconds / max(1, job.step)
    return f"step {job.step}/{job.plan.options.steps}  {'  '.join(words)}  {job.seconds:.0f} s, {left:.0f} s left"


def answers(job: Job, experience: Experience, most: int = 5) -> list[tuple[bool, str]]:
    """The first answers of a batch, and whether they succeeded."""
    if "signal:success" not in experience:
        return []
    episodes = experience.by("episode")
    good = episodes.sum(experience["signal:success"])[:most].tolist()
    rows = episodes.first(experience["context"])[:most].tolist()
    tokens = experience.context.ragged("tokens")
    texts = [job.policy.tokenizer.decode(tokens[row].tolist()) for row in rows]
    return [(g > 0, t[:60]) for g, t in zip(good, texts, strict=True)]


def plot(values: Sequence[float], width: int, height: int) -> list[str]:
    """A curve in block characters, newest at the right, with its lowest and highest value at the left."""
    if not values:
        return []
    width -= 8
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(0.0, *values), max(1e-9, *values)
    if 0.5 < high <= 1.0:
        high = 1.0
    levels = [(v - low) / (high - low) * height * 8 for v in values]
    rows = []
    for row in range(height - 1, -1, -1):
        cells = "".join(BLOCKS[round(min(8, max(0, level - row * 8)))] for level in levels)
        label = f"{high:7.2f}" if row == height - 1 else f"{low:7.2f}" if row == 0 else " " * 7
        rows.append(f"{label} {cells}")
    return rows
