"""What the files of a run folder hold: the schemas they are read with (see `files.py`).

Only what readers rely on is named. A file of another version may hold more; one that lacks something named here, or
has something else in its place, is refused in one sentence.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class Named(TypedDict):
    """A method or a world with its settings."""

    id: str


class PlanRecord(TypedDict):
    """A plan, as `Plan.to_json` writes it."""

    method: Named
    world: Named
    run: dict[str, Any]
    policy: NotRequired[dict[str, Any]]
    chosen: NotRequired[list[str]]
    plugins: NotRequired[list[str]]


class Config(TypedDict):
    """`run.json`."""

    plan: PlanRecord
    panoply: NotRequired[str]
    created: NotRequired[str]
    command: NotRequired[str]
    versions: NotRequired[dict[str, str]]
    hash: NotRequired[str]
    measures: NotRequired[str]
    given: NotRequired[dict[str, str]]


class AnyConfig(TypedDict):
    """`run.json` of whatever version, for those who only look."""

    plan: dict[str, Any]
    panoply: NotRequired[str]
    created: NotRequired[str]
    command: NotRequired[str]
    measures: NotRequired[str]


class Best(TypedDict):
    """The step that did best on held-out problems, the later one of a tie; no score where nothing was graded."""

    step: int
    of: str
    score: float | None


class Result(TypedDict):
    """`result.json`."""

    steps: int
    before: dict[str, Any]
    after: dict[str, Any]
    seconds: NotRequired[float]
    fingerprint: NotRequired[str]
    best: NotRequired[Best]
    found: NotRequired[list[str]]
    diverged: NotRequired[str]


class Metrics(TypedDict):
    """A line of `metrics.jsonl`."""

    step: int


class Episode(TypedDict):
    """A line of `episodes.jsonl`."""

    step: int


class Worker(TypedDict):
    """A line of `workers.jsonl`: what one worker of a run that is spread did in a step."""

    step: int
    worker: str
    role: str
    """`learner` or `sampler`."""
    node: str
    busy: float
    """Seconds in which it worked; `wait`: in which it waited."""
    wait: float
    tokens: int
    memory_mb: float
    version: int
    """The step whose weights it has."""
    restarts: int


class RecipeRecord(TypedDict):
    """`recipe.json`, in the folder above a recipe's runs."""

    recipe: str
    choices: dict[str, Any]


class FileFacts(TypedDict):
    bytes: int
    sha256: str


class Manifest(TypedDict):
    """`manifest.json` of a checkpoint: all its other files."""

    files: dict[str, FileFacts]


class State(TypedDict):
    """`state.json` of a checkpoint: what a resumed run needs beside tensors."""

    step: int
    seconds: float
    parts: dict[str, dict[str, Any]]
    best: Best
    before: dict[str, Any]
    after: dict[str, Any]
    threads: int
    norm: float
    seats: NotRequired[dict[str, dict[str, Any]]]
