"""Who may ask: a browser on this machine that holds the token, from this very page, and only to read."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}

ELSEWHERE = "Another page may not ask this server for anything: paste the address into the address bar."


class Guard:
    """An ASGI layer before everything else.

    The Host must be this machine's own name, or another site could point its name here (DNS rebinding); a stated
    Origin must be this page. The token comes in the address once and is a cookie afterwards, so that it does not stay
    in the address bar.
    """

    def __init__(self, app: ASGIApp, token: str, port: int):
        self.app, self.token = app, token
        self.cookie = f"panoply-{port}"
        self.hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self.app)(scope, receive, answer)

    def _refusal(self, scope: Scope) -> Response | None:
        """Why this request is not answered, or nothing where it is; the first visit is sent on with its cookie."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if host not in self.hosts:
            return _no("This server answers only to 127.0.0.1 and localhost.", 421)
        if headers.get("origin", f"http://{host}") != f"http://{host}":
            return _no(ELSEWHERE, 403)
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return _no(ELSEWHERE, 403)
        if scope["method"] not in ("GET", "HEAD"):
            return _no("This server only lets you look.", 405)
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if self._known(query.pop("token", [])):
            if scope["path"] != "/":
                return None
            onward = RedirectResponse("/" + (f"?{urlencode(query, doseq=True)}" if query else ""), 303)
            onward.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", path="/")
            return onward
        if self._known(_cookies(headers, self.cookie)):
            return None
        return _no("Open the address that panoply ui printed: the token in it is missing here.", 401)

    def _known(self, offered: Iterable[str]) -> bool:
        return any(hmac.compare_digest(word.encode(), self.token.encode()) for word in offered)


def _cookies(headers: Headers, name: str) -> list[str]:
    found = []
    for line in headers.getlist("cookie"):
        try:
            jar = SimpleCookie(line)
        except CookieError:
            continue
        if name in jar:
            found.append(jar[name].value)
    return found


def _no(why: str, status: int) -> Response:
    return PlainTextResponse(why + "\n", status)
