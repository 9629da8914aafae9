"""A small server on this machine that speaks OpenAI's protocol, for whoever holds its key."""

from __future__ import annotations

import hmac
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from panoply.errors import PanoplyError
from panoply.serving.protocol import Asked, Refused

MOST_BYTES = 16 * 2**20
"""Of a request."""
PATIENCE = 30.0
"""Seconds in which a client must have sent what it announced."""


class Answers(Protocol):
    """Who answers behind the endpoint."""

    model: str

    def answer(self, asked: Asked) -> dict[str, Any]:
        """The whole answer to a request."""

    def stream(self, asked: Asked) -> Iterator[dict[str, Any]]:
        """The same in pieces."""

    def reward(self, episode: str, reward: float) -> dict[str, Any]:
        """Note what an episode was worth."""


class Endpoint:
    """Listens on loopback. The Host must be this machine's own name, or another site could point its name here (DNS
    rebinding); a request of a web page, which states its Origin, is refused; and the key must be the one that was
    given."""

    def __init__(self, answers: Answers, key: str, port: int = 0):
        handler = type("Handler", (_Handler,), {"answers": answers, "key": key})
        try:
            self.server = _Server(("127.0.0.1", port), handler)
        except OSError as error:
            raise PanoplyError(f"Port {port} cannot be listened on: {error.strerror}.") from error
        self.port: int = self.server.server_address[1]
        handler.hosts = {f"{name}:{self.port}" for name in ("127.0.0.1", "localhost")}  # type: ignore[attr-defined]

    @property
    def address(self) -> str:
        """What clients call their base URL."""
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> Endpoint:
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()
        return self

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no event."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = PATIENCE
    answers: Answers
    key: str
    hosts: set[str]

    def do_GET(self) -> None:
        self._answered(self._get)

    def do_POST(self) -> None:
        self._answered(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads them."""

    def _answered(self, do: Callable[[str, str], None]) -> None:
        try:
            self._guard()
            found = re.fullmatch(r"/v1(?:/episodes/([\w.:-]{1,200}))?(/[a-z/]+)", self.path.partition("?")[0])
            if found is None:
                raise Refused(f"There is no {self.path[:100]!r} here.", 404)
            do(found[1] or "", found[2])
        except Refused as error:
            self._send(error.to_json(), error.status)
        except PanoplyError as error:
            self._send(Refused(str(error)).to_json(), 400)

    def _guard(self) -> None:
        """Why a request is not answered; the sentences are those of the page's guard."""
        self.close_connection = True
        if self.headers.get("host", "") not in self.hosts:
            raise Refused("This server answers only to 127.0.0.1 and localhost.", 421)
        if self.headers.get("origin") or self.headers.get("sec-fetch-site", "none") != "none":
            raise Refused("A web page may not ask this server for anything.", 403)
        offered = self.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(offered.encode(), self.key.encode()):
            raise Refused("The key is missing or wrong: panoply serve printed it.", 401)

    def _get(self, episode: str, path: str) -> None:
        if path != "/models":
            raise Refused(f"There is no {path!r} to read here.", 404)
        listed = {"id": self.answers.model, "object": "model", "created": 0, "owned_by": "panoply"}
        self._send({"object": "list", "data": [listed]})

    def _post(self, episode: str, path: str) -> None:
        body = self._body()
        if path == "/rewards":
            self._reward(episode, body)
        elif path == "/chat/completions":
            asked = Asked.of(body, episode)
            self._stream(asked) if asked.stream else self._send(self.answers.answer(asked))
        else:
            raise Refused(
                f"There is no {path!r} to ask here; there is /chat/completions, /models and /rewards.", 404
            )

    def _reward(self, episode: str, body: Any) -> None:
        reward = body.get("reward") if isinstance(body, dict) else None
        name = episode or (str(body.get("episode", "")) if isinstance(body, dict) else "")
        if (
            isinstance(reward, bool)
            or not isinstance(reward, int | float)
            or not abs(reward) < 1e30
            or not name
        ):
            raise Refused('A reward is {"episode": NAME, "reward": NUMBER}.')
        self._send(self.answers.reward(name, float(reward)))

    def _body(self) -> Any:
        length = self.headers.get("content-length", "")
        if not length.isdigit() or int(length) > MOST_BYTES:
            raise Refused(f"A request has a length of at most {MOST_BYTES >> 20} MiB.", 413)
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise Refused("The request is no JSON.") from None

    def _stream(self, asked: Asked) -> None:
        pieces = self.answers.stream(asked)
        first = next(pieces)  # what is refused is refused before anything is sent
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("cache-control", "no-store")
        self.send_header("connection", "close")
        self.end_headers()
        self._event(first)
        for piece in pieces:
            self._event(piece)
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, piece: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
        self.wfile.flush()

    def _send(self, answer: dict[str, Any], status: int = 200) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.send_header("x-content-type-options", "nosniff")
        self.send_header("cache-control", "no-store")
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(text)
