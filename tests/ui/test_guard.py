"""Only a reader with the token, on this machine, from this page, is answered; and nothing outside the runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from panoply.ui.guard import HEADERS


@pytest.fixture
def client(serving: Any) -> httpx.Client:
    """One that has opened the address that was printed."""
    made = httpx.Client(base_url=f"http://127.0.0.1:{serving.port}", trust_env=False)
    answer = made.get(serving.address)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    return made


def test_the_token_is_needed_and_becomes_a_cookie(serving: Any, client: httpx.Client) -> None:
    bare = f"http://127.0.0.1:{serving.port}"
    for address in (
        f"{bare}/",
        f"{bare}/api/runs",
        f"{bare}/?token=guess",
        f"{bare}/js/app.js",
        f"{bare}/nowhere",
    ):
        assert httpx.get(address, trust_env=False).status_code == 401
    assert client.get("/").status_code == 200
    cookie = httpx.get(serving.address, trust_env=False).headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert (
        httpx.get(f"{bare}/", cookies={f"panoply-{serving.port}": "guess"}, trust_env=False).status_code
        == 401
    )


def test_every_answer_has_the_headers(serving: Any, client: httpx.Client) -> None:
    bare = httpx.get(f"http://127.0.0.1:{serving.port}/", trust_env=False)
    for answer in (client.get("/"), client.get("/api/runs"), client.get("/nowhere"), bare):
        assert {k: answer.headers.get(k) for k in HEADERS} == HEADERS
    assert "unsafe" not in HEADERS["content-security-policy"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8642", "127.0.0.1", "localhost:1", ""])
def test_another_host_is_refused(client: httpx.Client, host: str) -> None:
    assert client.get("/api/runs", headers={"host": host}).status_code == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_another_origin_is_refused(client: httpx.Client, headers: dict[str, str]) -> None:
    answer = client.get("/api/runs", headers=headers)
    assert answer.status_code == 403
    assert "runs" not in answer.text


def test_the_own_origin_is_welcome(serving: Any, client: httpx.Client) -> None:
    own = {"origin": f"http://127.0.0.1:{serving.port}", "sec-fetch-site": "same-origin"}
    assert client.get("/api/runs", headers=own).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(client: httpx.Client, method: str) -> None:
    answer = client.request(method, "/api/runs")
    assert (answer.status_code, answer.text) == (405, "This server only lets you look.\n")


OUTSIDE = [
    "../secret",
    "chain/../../secret",
    "..",
    ".",
    "",
    "/etc",
    "//etc",
    "chain/..",
    "chain/",
    "..\\secret",
    "%2e%2e/secret",
    "..%2fsecret",
    "chain\x00",
    "linked",
    "linking",
    "stranger",
    "a/" * 40,
]


@pytest.mark.parametrize("question", ["run", "episodes", "episode", "curves", "compare"])
def test_nothing_outside_the_runs_is_served(runs: Path, client: httpx.Client, question: str) -> None:
    secret = json.loads((runs.parent / "secret" / "run.json").read_text())["hash"]
    for name in OUTSIDE:
        answer = client.get(
            f"/api/{question}", params={"run": name, "runs": name, "at": "0", "metrics": "reward"}
        )
        assert secret not in answer.text
        assert "pieces" not in answer.text
        found = answer.json()
        if answer.status_code == 200:
            assert "settings" not in found
            assert not found.get("curves", {}).get("reward")
            assert not found.get("rows")


def test_links_are_not_listed(client: httpx.Client) -> None:
    found = {r["id"]: r for r in client.get("/api/runs?cached=1").json()["runs"]}
    assert "linked" not in found
    assert found["linking"]["status"] == "unreadable"


@pytest.mark.parametrize(
    "path", ["/../server.py", "/js/../../server.py", "/%2e%2e/server.py", "/js/", "/static/style.css"]
)
def test_only_files_of_the_page_are_served(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 404


def test_the_server_listens_on_this_machine_only(serving: Any) -> None:
    assert serving.listening.getsockname()[0] == "127.0.0.1"
