"""Asking another node's HTTP API: one GET, a short deadline, a bounded answer."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlencode

import msgspec

from chronik.metadata.image import BrokerImage
from chronik.web.answers import Parameters

ASK_TIMEOUT_S = 2.0
ANSWER_BYTES_MAX = 8 * 1024 * 1024


class NoAnswer(Exception):
    """The other node did not answer, or not as asked."""


async def ask_leader(leader: BrokerImage, parameters: Parameters, path: str) -> bytes | None:
    """The leader's own answer, encoded; None where it has no HTTP that can be reached from here."""
    if not leader.http:
        return None
    try:
        answer = await get(leader.http, f"{path}?{urlencode({**parameters.given(), 'own': 1})}")
        # Another node may listen at an address that is the leader's only on its own machine.
        told = msgspec.json.decode(answer, type=_ToldBy)
    except (NoAnswer, msgspec.DecodeError):
        return None
    return answer if leader.id in (told.leader, told.node) else None


class _ToldBy(msgspec.Struct):
    leader: int | None = None
    node: int | None = None


async def get_json(address: str, path: str) -> Any:
    """The JSON of a GET at HOST:PORT that was answered with 200."""
    try:
        return msgspec.json.decode(await get(address, path))
    except msgspec.DecodeError as error:
        raise NoAnswer(f"{address}{path}: {error}") from None


async def get(address: str, path: str) -> bytes:
    """The body of a GET at HOST:PORT that was answered with 200."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
                answer = await _read(reader)
            finally:
                writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        if head.split(b" ", 2)[1:2] != [b"200"]:
            raise NoAnswer(f"{address}{path} answered {head[:40]!r}")
        return body
    except (OSError, TimeoutError, ValueError) as error:
        raise NoAnswer(f"{address}{path}: {error or 'no answer in time'}") from None


async def _read(reader: asyncio.StreamReader) -> bytes:
    """All of the answer: nodes give its length and close."""
    parts: list[bytes] = []
    size_bytes = 0
    while part := await reader.read(64 * 1024):
        parts.append(part)
        size_bytes += len(part)
        if size_bytes > ANSWER_BYTES_MAX:
            raise ValueError(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
    return b"".join(parts)
