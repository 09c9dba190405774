"""HTTP GET on a node, with a deadline and a size limit, for tools that must not hang when a node does."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from email import message_from_bytes
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from chronik.client.errors import SecurityError
from chronik.client.security import ClientSecurity, SecuritySettingError

RESPONSE_BYTES_MAX = 64 * 1024 * 1024
TIMEOUT_S = 2.0
OK = 200
HTTP, HTTPS = "http://", "https://"


class HttpError(Exception):
    """The node did not answer, or gave an unexpected answer. The text is one line."""


class Caller(NamedTuple):
    """How a request identifies its sender, and verifies a node that uses TLS (None: by the system's authorities)."""

    authorization: str = ""
    tls: ssl.SSLContext | None = None

    def __repr__(self) -> str:
        return "Caller()"


ANONYMOUS = Caller()


def caller_of(security: ClientSecurity) -> Caller:
    """Return how a client with these settings calls the HTTP API of its cluster. Reads the files of certificates.

    Without TLS, it calls as nobody: a password is not sent in clear.
    """
    if not security.uses_tls:
        return ANONYMOUS
    try:
        context = security.ssl_context()
    except SecuritySettingError as error:
        raise SecurityError(str(error)) from None
    if not security.username:
        return Caller(tls=context)
    credentials = f"{security.username}:{security.password}".encode()
    return Caller(f"Basic {base64.b64encode(credentials).decode()}", context)


class Answer(NamedTuple):
    """A response. `clock_ms` is the node's clock from the Date header, exact to the second; 0 if that is absent."""

    status: int
    body: bytes
    clock_ms: float


async def request(
    address: str, path: str, timeout_s: float = TIMEOUT_S, caller: Caller = ANONYMOUS, **query: object
) -> Answer:
    """Return the response, whatever its status. Raises HttpError if there is none.

    `address` is HOST:PORT or https://HOST:PORT.
    """
    is_encrypted = address.startswith(HTTPS)
    address = _shown(address)
    if is_encrypted and caller.tls is None:
        caller = caller._replace(tls=ssl.create_default_context())
    elif not is_encrypted and caller.tls is not None:
        # It expects TLS, so what it would send to prove its identity must not be sent in clear.
        caller = ANONYMOUS
    host, _, port = address.partition("://")[2].rpartition(":")
    target = quote(path)
    given = {name: value for name, value in query.items() if value is not None}
    if given:
        target += f"?{urlencode(given)}"
    try:
        async with asyncio.timeout(timeout_s):
            head, body = await _exchange(host.strip("[]"), int(port), target, caller)
    except TimeoutError:
        raise HttpError(f"{address} did not answer within {timeout_s:g} s") from None
    except ssl.SSLCertVerificationError as error:
        raise HttpError(f"{address}: its certificate was refused: {error.verify_message}") from None
    except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise HttpError(f"{address}: {error}") from None
    status = head.split(b" ", 2)[1:2]
    if not status or not status[0].isdigit():
        raise HttpError(f"{address}{path} did not answer with HTTP")
    return Answer(int(status[0]), body, _clock_ms(head))


async def get(
    address: str, path: str, timeout_s: float = TIMEOUT_S, caller: Caller = ANONYMOUS, **query: object
) -> Answer:
    """Return a response with status 200. Raises HttpError with the node's reason for any other."""
    answer = await request(address, path, timeout_s, caller, **query)
    if answer.status != OK:
        reason = (_object(answer.body) or {}).get("error")
        raise HttpError(f"{_shown(address)}{path} answered {answer.status}{f': {reason}' if reason else ''}")
    return answer


async def get_json(
    address: str, path: str, timeout_s: float = TIMEOUT_S, caller: Caller = ANONYMOUS, **query: object
) -> dict[str, Any]:
    view = _object((await get(address, path, timeout_s, caller, **query)).body)
    if view is None:
        raise HttpError(f"{_shown(address)}{path} did not answer with an object")
    return view


def get_blocking(
    address: str, path: str, timeout_s: float = TIMEOUT_S, caller: Caller = ANONYMOUS, **query: object
) -> bytes:
    """Return the body that `get` returns, for code without an event loop."""
    return asyncio.run(get(address, path, timeout_s, caller, **query)).body


def _shown(address: str) -> str:
    return address if address.startswith(HTTPS) else f"{HTTP}{address.removeprefix(HTTP)}"


async def _exchange(host: str, port: int, target: str, caller: Caller) -> tuple[bytes, bytes]:
    reader, writer = await asyncio.open_connection(host, port, ssl=caller.tls)
    try:
        # HTTP/1.0: no chunked encoding, and the body ends when the connection closes.
        name = f"[{host}]" if ":" in host else host
        lines = [f"GET {target} HTTP/1.0", f"Host: {name}:{port}", "Accept: */*"]
        if caller.authorization:
            lines.append(f"Authorization: {caller.authorization}")
        if any(not line.isprintable() for line in lines):
            raise ValueError("the request contains a line break or another control character")
        writer.write("\r\n".join([*lines, "", ""]).encode("ascii"))
        head = await reader.readuntil(b"\r\n\r\n")
        parts: list[bytes] = []
        size_bytes = 0
        while part := await reader.read(1 << 18):
            size_bytes += len(part)
            if size_bytes > RESPONSE_BYTES_MAX:
                raise ValueError("the answer is too large")
            parts.append(part)
        return head, b"".join(parts)
    finally:
        writer.transport.abort()


def _clock_ms(head: bytes) -> float:
    headers = message_from_bytes(head.partition(b"\r\n")[2])
    try:
        return parsedate_to_datetime(str(headers["Date"])).timestamp() * 1000
    except ValueError:
        return 0.0


def _object(body: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a body; None if it holds anything else."""
    try:
        value = json.loads(body)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
