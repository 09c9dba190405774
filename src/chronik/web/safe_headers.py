"""Protection against other web sites: headers on every response, and a check of the Host header.

A node on loopback serves without authentication, because only this machine reaches it. A web site could still reach it
through the user's browser, with a host name that resolves to 127.0.0.1 (DNS rebinding). The Host header then contains
that name.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chronik.web.answers import json_answer
from chronik.web.schemas import Error

HEADERS = (
    (b"content-security-policy", b"default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class SafeHeaders:
    """ASGI middleware. It changes only the start of a response, so streams pass through."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
            await send(message)

        if scope["type"] == "http" and scope["path"] not in ("/healthz", "/readyz", "/metrics") and _is_rebound(scope):
            line = "this node listens on loopback: use 127.0.0.1 or localhost, or set listen.http to serve another name"
            await json_answer(Error(line), 403)(scope, receive, send_safely)
            return
        await self._app(scope, receive, send_safely)


def _is_rebound(scope: Scope) -> bool:
    """Return whether a loopback listener was addressed by a name other than this machine's own."""
    server = scope.get("server")
    listener = None if server is None else _address(server[0])
    if listener is None or not listener.is_loopback:
        return False
    name = host_name(next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), ""))
    return bool(name) and name != "localhost" and not name.endswith(".localhost") and _address(name) is None


def host_name(host: str) -> str:
    """Return the name of a Host header without its port. Handles `[::1]:80`, `127.0.0.1:80` and `localhost`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().rstrip(".")


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None
