"""Protection against other web sites: headers on every response, and a check of the Host header.

A web site can reach a node through the user's browser, with a host name of its own that resolves to the node's address
(DNS rebinding). The Host header then contains that name. A node with a log-in accepts IP addresses, loopback names, and
the names in its settings and in the metadata. A node on loopback without a log-in accepts addresses and loopback names.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chronik.client.endpoint import Endpoint, EndpointError
from chronik.web.answers import json_answer
from chronik.web.node_view import NodeView
from chronik.web.schemas import Error

CONTENT_SECURITY_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
UNCHECKED = ("/healthz", "/readyz", "/metrics")
"""Probes and scrapers use any name. These paths show no message."""


class SafeHeaders:
    """ASGI middleware. It changes only the start of a response, so streams pass through."""

    def __init__(self, app: ASGIApp, node: NodeView) -> None:
        self._app = app
        self._node = node

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
            await send(message)

        line = self._refusal(scope) if scope["type"] == "http" and scope["path"] not in UNCHECKED else None
        if line is not None:
            await json_answer(Error(line), 403)(scope, receive, send_safely)
            return
        await self._app(scope, receive, send_safely)

    def _refusal(self, scope: Scope) -> str | None:
        """Return why the Host header is refused, or None if it is accepted."""
        name = host_name(next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), ""))
        if not name or name == "localhost" or name.endswith(".localhost") or _address(name) is not None:
            return None
        if self._node.security.http_login:
            if name in self._node.http_hosts:
                return None
            return f"{name[:260]} is not a name of this node: use its address, or add the name to security.http_hosts"
        server = scope.get("server")
        listener = None if server is None else _address(server[0])
        if listener is None or not listener.is_loopback:
            return None
        return "this node listens on loopback: use 127.0.0.1 or localhost, or set listen.http to serve another name"


def host_name(host: str) -> str:
    """Return the name of a Host header without its port. Handles `[::1]:80`, `127.0.0.1:80` and `localhost`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().rstrip(".")


def host_and_port(text: str, port: int) -> tuple[str, int] | None:
    """Return the host and the port of HOST or HOST:PORT, or None if it is neither."""
    try:
        endpoint = Endpoint.parse(text if _has_port(text) else f"{text}:{port}")
    except EndpointError:
        return None
    return endpoint.host, endpoint.port


def _has_port(text: str) -> bool:
    return ":" in text.rpartition("]")[2]


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None
