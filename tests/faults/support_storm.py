"""Many clients that connect at once, are served, and stay connected."""

from __future__ import annotations

import asyncio
import resource
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from types import TracebackType

from chronik.client.endpoint import Endpoint
from chronik.wire import frames, messages
from chronik.wire.api import ApiKey

SERVED_TIMEOUT_S = 30.0
FILES_SPARE = 500


class Storm:
    """Sends requests from all clients on entry, closes them on exit. `served` clients got both answers in time."""

    def __init__(self, nodes: Sequence[Endpoint], clients: int, topic: str) -> None:
        self.served = 0
        self.failures: Counter[str] = Counter()
        self._nodes = nodes
        self._clients = clients
        versions = messages.write_request(ApiKey.API_VERSIONS, 0, {})
        metadata = messages.write_request(
            ApiKey.METADATA, 12, {"topics": [{"name": topic}], "allow_auto_topic_creation": False}
        )
        self._asked = frames.write_request(ApiKey.API_VERSIONS, 0, 1, "storm", versions)
        self._asked += frames.write_request(ApiKey.METADATA, 12, 2, "storm", metadata)
        self._writers: list[asyncio.StreamWriter] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="storm", daemon=True)

    def __enter__(self) -> Storm:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < self._clients + FILES_SPARE:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, self._clients + FILES_SPARE), hard))
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._all(), self._loop).result(2 * SERVED_TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(SERVED_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SERVED_TIMEOUT_S)
        self._loop.close()

    async def _all(self) -> None:
        await asyncio.gather(*(self._one(self._nodes[number % len(self._nodes)]) for number in range(self._clients)))

    async def _one(self, node: Endpoint) -> None:
        try:
            async with asyncio.timeout(SERVED_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(*node)
                self._writers.append(writer)
                writer.write(self._asked)
                for correlation_id in (1, 2):
                    (size,) = struct.unpack(">i", await reader.readexactly(4))
                    answer = await reader.readexactly(size)
                    if int.from_bytes(answer[:4], "big") != correlation_id:
                        raise ValueError(f"answer to another request than {correlation_id}")
            self.served += 1
        except (OSError, EOFError, ValueError) as error:
            self.failures[repr(error)] += 1

    async def _close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)  # lets the transports close
