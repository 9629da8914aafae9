"""The server of `panoply ui`: a page, and what it asks for as JSON. It reads the runs folder and writes nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from panoply.errors import PanoplyError
from panoply.files import parse_json
from panoply.report.curves import Experiment, curve, differences, labels, metric_names, ordered, settings_of
from panoply.report.drawings import Drawing
from panoply.report.episodes import Index, is_readable, readable
from panoply.report.judges import judge_drawings, over_optimised, proxy_of
from panoply.report.method import described
from panoply.report.run_index import EPISODES, RESULT, Facts, RunIndex
from panoply.report.workers import Workers
from panoply.ui.catalogue import Catalogue
from panoply.ui.crowd import Connection, Door, Turns
from panoply.ui.guard import Guard

Answer = Callable[[Mapping[str, str]], dict[str, Any] | bytes]
"""From the words of a question to JSON, or to what will be."""
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MOST_RUNS = 200
"""How many runs one request for curves may name."""


class Answers:
    """What the page may ask. Every answer is made from the index of runs, by names that are checked there."""

    def __init__(self, index: RunIndex, results: Path | None = None):
        self.index = index
        self.catalogue = Catalogue(results)
        self._indices: dict[str, Index] = {}
        self._workers: dict[str, Workers] = {}
        self._lock = threading.Lock()

    def runs(self, ask: Mapping[str, str]) -> dict[str, Any]:
        """Every run, newest first; only the stamp where that is the one the page has already."""
        strangers = self.index.strangers()
        found = self.index.all_facts(cached=ask.get("cached") == "1")
        metrics = ordered(name for facts in found for name in facts.get("metrics", ()))
        listed = [{k: v for k, v in facts.items() if k != "metrics"} for facts in found]
        told = {"folder": self.index.root.name, "runs": listed, "metrics": metrics, "strangers": strangers}
        stamp = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
        return {"stamp": stamp} if ask.get("stamp") == stamp else {"stamp": stamp, **told}

    def curves(self, ask: Mapping[str, str]) -> dict[str, Any]:
        """Curves of the runs named `runs` (split by line feeds) for each of `metrics` (by commas)."""
        runs = [r for r in ask.get("runs", "").split("\n") if r][:MOST_RUNS]
        experiments = self.experiments(runs, together=ask.get("together", "1") == "1")
        asked = [m for m in ask.get("metrics", "").split(",") if m][:24]
        x = ask.get("x", "step")
        if x not in ("step", "seconds", "decisions"):
            raise PanoplyError(f"Curves can be drawn over step, seconds or decisions, not over '{x}'.")
        smooth = _fraction(ask.get("smooth", "0"))
        found = {m: [curve(e, m, x, smooth).to_json() for e in experiments] for m in asked}
        return {"curves": found, "metrics": metric_names(r for e in experiments for r in e.rows)}

    def experiments(self, runs: list[str], together: bool) -> list[Experiment]:
        """Runs as experiments, with a label each: seeds of one configuration together, or every run alone."""
        kept: list[tuple[str, Facts, Mapping[str, Any]]] = []
        for run in runs:
            facts = self.index.facts(run)
            if "problem" not in facts:
                kept.append((run, facts, self.index.config(run)["plan"]))
        groups: dict[str, list[str]] = {}
        plans: dict[str, Mapping[str, Any]] = {}
        for run, facts, plan in kept:
            key = facts["group"] if together else run
            groups.setdefault(key, []).append(run)
            plans[key] = plan
        named = labels(plans)
        if not together:
            seeds = {run: facts["seed"] for run, facts, _ in kept}
            named = {run: f"{label}, seed {seeds[run]}" for run, label in named.items()}
        return [
            Experiment(named[key], tuple(members), tuple(self.index.metrics(run) for run in members))
            for key, members in groups.items()
        ]

    def run(self, ask: Mapping[str, str]) -> dict[str, Any]:
        run = ask.get("run", "")
        facts = self.index.facts(run)
        if "problem" in facts:
            return {"facts": facts}
        config = self.index.config(run)
        return {
            "facts": facts,
            "settings": list(settings_of(config["plan"]).items()),
            "chosen": config["plan"].get("chosen", []),
            "command": config.get("command", ""),
            "versions": config.get("versions", {}),
            "result": (result := self.index.json(run, RESULT)),
            "drawings": [d.to_json() for d in self._drawn(run, config["plan"], result)],
            **described(config["plan"]),
        }

    def _drawn(self, run: str, plan: Mapping[str, Any], result: Mapping[str, Any] | None) -> list[Drawing]:
        """Pictures of its reward model, or of how far it has gone after one."""
        found = judge_drawings(result)
        if proxy_of(plan) is not None:
            optimised = over_optimised(plan, Experiment(run, (run,), (self.index.metrics(run),)))
            found += [] if optimised is None else [optimised]
        return found

    def compare(self, ask: Mapping[str, str]) -> dict[str, Any]:
        """In which settings the named runs differ."""
        runs = [r for r in ask.get("runs", "").split("\n") if r][:MOST_RUNS]
        plans: dict[str, Mapping[str, Any]] = {}
        for run in runs:
            facts = self.index.facts(run)
            if "problem" not in facts:
                plans.setdefault(facts["group"], self.index.config(run)["plan"])
        named = labels(plans)
        return {"labels": [named[key] for key in plans], "rows": differences(plans)}

    def episodes(self, ask: Mapping[str, str]) -> dict[str, Any]:
        index = self._recorded(ask.get("run", ""))
        return {"episodes": index.rows(), "unreadable": index.unreadable}

    def episode(self, ask: Mapping[str, str]) -> bytes | dict[str, Any]:
        line = self._recorded(ask.get("run", "")).line(_whole(ask.get("at", "")))
        if line is None:
            raise HTTPException(404, "There is no such episode.")
        return (
            line if is_readable(line) else readable(parse_json(line, EPISODES, dict[str, Any], finite=False))
        )

    def workers(self, ask: Mapping[str, str]) -> dict[str, Any]:
        """The lanes of a spread run; none where one process made it."""
        run = ask.get("run", "")
        self.index.config(run)
        with self._lock:
            found = self._workers.setdefault(run, Workers(self.index, run))
        return found.to_json()

    def works(self, ask: Mapping[str, str]) -> dict[str, Any]:
        return self.catalogue.works()

    def work(self, ask: Mapping[str, str]) -> dict[str, Any]:
        found = self.catalogue.work(ask.get("id", ""))
        if found is None:
            raise HTTPException(404, "There is no such work.")
        return found

    def _recorded(self, run: str) -> Index:
        self.index.config(run)
        with self._lock:
            return self._indices.setdefault(run, Index(self.index, run))


def make_app(answers: Answers, token: str, port: int) -> Guard:
    """The ASGI application, behind its guard."""
    named: list[Answer] = [
        answers.runs,
        answers.curves,
        answers.run,
        answers.compare,
        answers.episodes,
        answers.episode,
        answers.workers,
        answers.works,
        answers.work,
    ]
    turns = Turns()
    routes = [Route(f"/api/{answer.__name__}", _endpoint(answer, turns)) for answer in named]
    routes += [Route(path, _static(content, kind)) for path, (content, kind) in _pages().items()]
    return Guard(Starlette(routes=routes, exception_handlers={HTTPException: _sorry}), token, port)


def _endpoint(answer: Answer, turns: Turns) -> Callable[[Request], Awaitable[Response]]:
    def made(question: Mapping[str, str]) -> Response:
        try:
            return _json(answer(question))
        except PanoplyError as error:
            return _json({"error": str(error)}, 404)

    async def endpoint(request: Request) -> Response:
        async with turns:
            return await run_in_threadpool(made, request.query_params)

    return endpoint


def _static(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def page(request: Request) -> Response:
        return Response(content, media_type=kind)

    return page


def _pages() -> dict[str, tuple[bytes, str]]:
    """Every file of the page, read once: a request can only name one of these."""
    root = resources.files("panoply.ui") / "static"
    found: dict[str, tuple[bytes, str]] = {}

    def walk(folder: Any, path: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                walk(entry, f"{path}/{entry.name}")
            elif (kind := KINDS.get(Path(entry.name).suffix)) is not None:
                found[f"{path}/{entry.name}"] = (entry.read_bytes(), kind)

    walk(root, "")
    found["/"] = found.pop("/index.html")
    return found


def _sorry(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json({"error": error.detail}, error.status_code)


def _json(content: Mapping[str, Any] | bytes, status: int = 200) -> Response:
    text: str | bytes = content if isinstance(content, bytes) else _dumped(content)
    return Response(text, status, media_type="application/json")


def _dumped(content: Mapping[str, Any]) -> str:
    """As JSON; a number that a run's file has made up and JSON has no word for, such as Infinity, is null."""
    plain: Any = {"ensure_ascii": False, "separators": (",", ":")}
    try:
        return json.dumps(content, allow_nan=False, **plain)
    except ValueError:
        return json.dumps(json.loads(json.dumps(content), parse_constant=lambda _: None), **plain)


def _whole(word: str) -> int:
    """A number in plain digits that is no longer than any file; −1, which nothing is at, for all else."""
    return int(word) if re.fullmatch("[0-9]{1,18}", word) else -1


def _fraction(word: str) -> float:
    with contextlib.suppress(ValueError):
        return min(0.99, max(0.0, float(word[:20])))  # what is not a number is compared to nothing, and is 0
    return 0.0


# ------------------------------------------------------------------ serving


def free_port(wanted: int) -> socket.socket:
    """A socket on this machine's own address: at the wanted port, or at any where that is taken."""
    for port in (wanted, 0):
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind(("127.0.0.1", port))
        except OSError:
            made.close()
            continue
        return made
    raise PanoplyError("No port of this machine is free.")


class Serving(uvicorn.Server):
    """A server on its socket; it ends with Ctrl-C, or when `should_exit` is set."""

    def __init__(self, runs: str | Path, *, results: Path | None = None, port: int = 8642):
        self.answers, token = Answers(RunIndex(runs), results), secrets.token_urlsafe(24)
        self.listening = free_port(port)
        self.port: int = self.listening.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}/?token={token}"
        self.ready: Callable[[str], None] = lambda address: None
        self.door = Door()
        app = make_app(self.answers, token, self.port)
        quiet: dict[str, Any] = {"log_level": "error", "server_header": False, "access_log": False}
        super().__init__(uvicorn.Config(app, http=Connection, lifespan="off", **quiet))

    def serve_until_stopped(self, ready: Callable[[str], None] = lambda address: None) -> None:
        """`ready` gets the address, token included, once it can be opened."""
        self.ready = ready
        self.run([self.listening])

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        self.door.look(self.server_state.connections)
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        threading.Thread(
            target=self.answers.runs, args=({},), daemon=True
        ).start()  # read before they are asked for
        self.ready(self.address)
