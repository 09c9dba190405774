"""A broker whose answers the test chooses, for behaviour that a real broker cannot be made to show."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Callable, Mapping
from typing import Any, Self

from chronik.wire.api import ApiKey, response_header_is_flexible
from chronik.wire.frames import read_request_header, response_prefix
from chronik.wire.messages import read_request, write_response

Values = Mapping[str, Any]
Handler = Callable[[Any], Values | None]

FRAME_BYTES_MAX = 100 * 1024 * 1024
VERSIONS: Mapping[ApiKey, tuple[int, int]] = {
    ApiKey.API_VERSIONS: (0, 3),
    ApiKey.METADATA: (0, 12),
    ApiKey.FIND_COORDINATOR: (0, 4),
    ApiKey.LIST_OFFSETS: (1, 7),
    ApiKey.CREATE_TOPICS: (2, 7),
    ApiKey.LIST_GROUPS: (0, 4),
}


class FakeBroker:
    """Answers each API with its handler's values, or never if the handler returns None. Records all requests."""

    def __init__(
        self,
        handlers: Mapping[ApiKey, Handler] | None = None,
        node_id: int = 1,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._context = context
        self.node_id = node_id
        self.handlers: dict[ApiKey, Handler] = dict(handlers or {})
        self.asked: list[tuple[ApiKey, Any]] = []
        self.raw_answer: bytes | None = None
        self.versions = dict(VERSIONS)
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.hang_up()

    @property
    def address(self) -> tuple[str, int]:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    def hang_up(self) -> None:
        """Close all connections."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    def times_asked(self, key: ApiKey) -> int:
        return sum(asked == key for asked, _ in self.asked)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            while True:
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                if size > FRAME_BYTES_MAX:
                    writer.close()
                    return
                await self._answer(memoryview(await reader.readexactly(size)), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    async def _answer(self, frame: memoryview, writer: asyncio.StreamWriter) -> None:
        header = read_request_header(frame)
        key, version = ApiKey(header.api_key), header.api_version
        low, high = self.versions.get(key, (0, -1))
        if key == ApiKey.API_VERSIONS and not low <= version <= high:
            version, values = 0, {"error_code": 35, "api_keys": self._api_keys()}
        elif key == ApiKey.API_VERSIONS:
            values = {"error_code": 0, "api_keys": self._api_keys()}
        else:
            request = read_request(key, version, bytes(frame[header.body_at :]))
            self.asked.append((key, request))
            answer = self.handlers[key](request)
            if answer is None:
                return
            values = dict(answer)
        body = write_response(key, version, values) if self.raw_answer is None else self.raw_answer
        flexible = response_header_is_flexible(key, version)
        writer.write(response_prefix(header.correlation_id, flexible, len(body)) + body)
        await writer.drain()

    def _api_keys(self) -> list[dict[str, int]]:
        return [{"api_key": key, "min_version": low, "max_version": high} for key, (low, high) in self.versions.items()]


def metadata(*brokers: FakeBroker, topics: Mapping[str, list[int]] | None = None, controller: int = 1) -> Values:
    """Build a Metadata response: topics by name, with the leader of each partition."""
    return {
        "brokers": [
            {"node_id": broker.node_id, "host": broker.address[0], "port": broker.address[1]} for broker in brokers
        ],
        "cluster_id": "fake",
        "controller_id": controller,
        "topics": [
            {
                "error_code": 0,
                "name": name,
                "partitions": [
                    {
                        "error_code": 0 if leader >= 0 else 5,
                        "partition_index": index,
                        "leader_id": leader,
                        "leader_epoch": 1,
                        "replica_nodes": [1],
                        "isr_nodes": [1],
                    }
                    for index, leader in enumerate(leaders)
                ],
            }
            for name, leaders in (topics or {}).items()
        ],
    }
