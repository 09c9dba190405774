"""HTTP GET on a node, with a deadline and a size limit, for tools that must not hang when a node does."""

from __future__ import annotations

import asyncio
import json
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

RESPONSE_BYTES_MAX = 64 * 1024 * 1024
TIMEOUT_S = 2.0


class HttpError(Exception):
    """The node did not answer, or gave an unexpected answer. The text is one line."""


class Answer(NamedTuple):
    """The body of a 200 response, and the node's clock in whole seconds from the Date header, or 0 if it is absent."""

    body: bytes
    clock_ms: float


async def get(address: str, path: str, timeout_s: float = TIMEOUT_S, **query: object) -> Answer:
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
    if status != [b"200"]:
        raise HttpError(f"http://{address}{path} answered {b''.join(status).decode('ascii', 'replace') or 'nothing'}")
    return Answer(body, _clock_ms(head))


async def _exchange(host: str, port: int, path: str) -> tuple[bytes, bytes]:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        # HTTP/1.0: no chunked encoding, and the body ends when the connection closes.
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\nAccept: */*\r\n\r\n".encode("ascii"))
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
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"date":
            try:
                return parsedate_to_datetime(value.decode("ascii").strip()).timestamp() * 1000
            except ValueError:
                break
    return 0.0


async def get_json(address: str, path: str, timeout_s: float = TIMEOUT_S, **query: object) -> dict[str, Any]:
    answer = await get(address, path, timeout_s, **query)
    try:
        value = json.loads(answer.body)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise HttpError(f"http://{address}{path} did not answer with an object")
    return value
