"""Short requests to the cluster's brokers over the Kafka protocol: one attempt each, with a short deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from chronik.client.connection import Connection
from chronik.client.topics import CONSUMER_READER, EARLIEST, LATEST, LOG_END_READER
from chronik.metadata.image import BrokerImage
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

CLIENT_ID = "chronik-page"
ASK_TIMEOUT_S = 2.0

PartitionName = tuple[str, int]
Bounds = tuple[int, int, int]
"""The log start offset, the end offset that consumers see, and the log end offset."""


class AskedBrokers:
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
        return await connection.call(key, values, timeout_s=ASK_TIMEOUT_S, at_most=at_most)

    async def bounds(self, broker: BrokerImage, partitions: Iterable[PartitionName]) -> dict[PartitionName, Bounds]:
        """Return the offsets of partitions that the broker leads. Partitions with an error are omitted."""
        by_topic: dict[str, list[int]] = {}
        for topic, partition in partitions:
            by_topic.setdefault(topic, []).append(partition)
        starts, visible, ends = await asyncio.gather(
            self._offsets(broker, by_topic, EARLIEST, CONSUMER_READER),
            self._offsets(broker, by_topic, LATEST, CONSUMER_READER),
            self._offsets(broker, by_topic, LATEST, LOG_END_READER),
        )
        # Sequential requests: the log end may have grown since the visible end was read, but is never below it.
        return {
            name: (starts[name], visible[name], max(visible[name], ends[name]))
            for name in starts
            if name in visible and name in ends
        }

    async def _offsets(
        self, broker: BrokerImage, by_topic: Mapping[str, list[int]], time_ms: int, reader: int
    ) -> dict[PartitionName, int]:
        topics = [
            {
                "name": topic,
                "partitions": [
                    {"partition_index": partition, "current_leader_epoch": -1, "timestamp": time_ms}
                    for partition in partitions
                ],
            }
            for topic, partitions in by_topic.items()
        ]
        values = {"replica_id": reader, "isolation_level": 0, "topics": topics}
        response = await self.call(broker, ApiKey.LIST_OFFSETS, values, at_most=9)
        return {
            (topic.name, found.partition_index): found.offset
            for topic in response.topics
            for found in topic.partitions
            if found.error_code == ErrorCode.none
        }

    async def _connection(self, broker: BrokerImage) -> Connection:
        address = (broker.host, broker.port)
        task = self._connections.get(address)
        if task is not None and task.done() and (task.cancelled() or task.exception() or task.result().is_closed):
            task = None
        if task is None:
            task = asyncio.get_running_loop().create_task(
                Connection.open(*address, client_id=CLIENT_ID, timeout_s=ASK_TIMEOUT_S)
            )
            self._connections[address] = task
        return await asyncio.shield(task)
