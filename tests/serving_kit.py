"""A client of a few lines, as any agent has one."""

from __future__ import annotations

import http.client
import json
from typing import Any

from panoply.serving.endpoint import Endpoint

KEY = "a key"


def request(
    endpoint: Endpoint, path: str, body: Any = None, method: str = "", **headers: str
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=30)
    sent = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Authorization": f"Bearer {KEY}", **{k.replace("_", "-"): v for k, v in headers.items()}}
    connection.request(method or ("POST" if sent is not None else "GET"), path, sent, given)
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read().decode()


def ask(endpoint: Endpoint, body: Any, episode: str = "") -> dict[str, Any]:
    where = f"/v1/episodes/{episode}" if episode else "/v1"
    status, _, text = request(endpoint, f"{where}/chat/completions", body)
    assert status == 200, text
    found: dict[str, Any] = json.loads(text)
    return found
