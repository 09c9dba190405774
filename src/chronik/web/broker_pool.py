"""Short requests to the cluster's brokers over the Kafka protocol: one attempt each, with a short deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from chronik.client.connection import Connection
from chronik.doctor.brokers import log_bounds
from chronik.metadata.image import BrokerImage
from chronik.wire.api import ApiKey

CLIENT_ID = "chronik-page"
TIMEOUT_S = 2.0

PartitionName = tuple[str, int]
Bounds = tuple[int, int, int]
"""The log start offset, the end offset that consumers see, and the log end offset."""


class BrokerPool:
    """One connection to each queried broker, kept until `close`. Owned by the event loop.

    Raises ClientError or KafkaError. The caller shows what it has, and retries next time.
    """

    def __init__(self) -> None:
        self._connections: dict[tuple[str, int], asyncio.Task[Connection]] = {}

    async def close(self) -> None:
        opened, self._connections = list(self._connections.values()), {}
        for task in opened:
            task.cancel()
        for result in await asyncio.gather(*opened, return_exceptions=True):
            if isinstance(result, Connection):
                result.close()

    async def call(
        self, broker: BrokerImage, key: ApiKey, values: Mapping[str, Any], at_most: int | None = None
    ) -> Any:
        connection = await self._connection(broker)
        return await connection.call(key, values, timeout_s=TIMEOUT_S, at_most=at_most)

    async def bounds(self, broker: BrokerImage, partitions: Iterable[PartitionName]) -> dict[PartitionName, Bounds]:
        """Return the offsets of partitions that the broker leads. Partitions with an error are omitted."""
        by_topic: dict[str, list[int]] = {}
        for topic, partition in partitions:
            by_topic.setdefault(topic, []).append(partition)
        starts, visible, ends = (
            {name: offset for name, (offset, _) in answer.items() if offset is not None}
            for answer in await log_bounds(await self._connection(broker), by_topic, TIMEOUT_S)
        )
        # Sequential requests: the log end may have grown since the visible end was read, but is never below it.
        return {
            name: (start, visible[name], max(visible[name], ends[name]))
            for name, start in starts.items()
            if name in visible and name in ends
        }

    async def _connection(self, broker: BrokerImage) -> Connection:
        address = (broker.host, broker.port)
        task = self._connections.get(address)
        if task is not None and task.done() and (task.cancelled() or task.exception() or task.result().is_closed):
            task = None
        if task is None:
            task = asyncio.create_task(Connection.open(*address, client_id=CLIENT_ID, timeout_s=TIMEOUT_S))
            self._connections[address] = task
        return await asyncio.shield(task)
