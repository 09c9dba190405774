"""HTTP GET on a node, with a deadline and a size limit, for tools that must not hang when a node does."""

from __future__ import annotations

import asyncio
import json
from email import message_from_bytes
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

RESPONSE_BYTES_MAX = 64 * 1024 * 1024
TIMEOUT_S = 2.0
OK = 200


class HttpError(Exception):
    """The node did not answer, or gave an unexpected answer. The text is one line."""


class Answer(NamedTuple):
    """A response. `clock_ms` is the node's clock from the Date header, exact to the second; 0 if that is absent."""

    status: int
    body: bytes
    clock_ms: float


async def request(address: str, path: str, timeout_s: float = TIMEOUT_S, **query: object) -> Answer:
    """Return the response, whatever its status. Raises HttpError if there is none."""
    host, _, port = address.rpartition(":")
    target = quote(path)
    given = {name: value for name, value in query.items() if value is not None}
    if given:
        target += f"?{urlencode(given)}"
    try:
        async with asyncio.timeout(timeout_s):
            head, body = await _exchange(host.strip("[]"), int(port), target)
    except TimeoutError:
        raise HttpError(f"http://{address} did not answer within {timeout_s:g} s") from None
    except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise HttpError(f"http://{address}: {error}") from None
    status = head.split(b" ", 2)[1:2]
    if not status or not status[0].isdigit():
        raise HttpError(f"http://{address}{path} did not answer with HTTP")
    return Answer(int(status[0]), body, _clock_ms(head))


async def get(address: str, path: str, timeout_s: float = TIMEOUT_S, **query: object) -> Answer:
    """Return a response with status 200. Raises HttpError with the node's reason for any other."""
    answer = await request(address, path, timeout_s, **query)
    if answer.status != OK:
        reason = (_object(answer.body) or {}).get("error")
        raise HttpError(f"http://{address}{path} answered {answer.status}{f': {reason}' if reason else ''}")
    return answer


async def get_json(address: str, path: str, timeout_s: float = TIMEOUT_S, **query: object) -> dict[str, Any]:
    view = _object((await get(address, path, timeout_s, **query)).body)
    if view is None:
        raise HttpError(f"http://{address}{path} did not answer with an object")
    return view


def get_blocking(address: str, path: str, timeout_s: float = TIMEOUT_S, **query: object) -> bytes:
    """Return the body that `get` returns, for code without an event loop."""
    return asyncio.run(get(address, path, timeout_s, **query)).body


async def _exchange(host: str, port: int, target: str) -> tuple[bytes, bytes]:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        # HTTP/1.0: no chunked encoding, and the body ends when the connection closes.
        writer.write(f"GET {target} HTTP/1.0\r\nHost: {host}:{port}\r\nAccept: */*\r\n\r\n".encode("ascii"))
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
