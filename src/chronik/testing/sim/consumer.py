"""Consumers without a group: one follows the log and sometimes rereads; one reads everything when the run ends."""

from __future__ import annotations

import asyncio

from chronik.client.connection import Connection
from chronik.client.errors import RETRIABLE, ClientError
from chronik.testing.sim.client import REQUEST_TIMEOUT_S, SimClient
from chronik.testing.sim.fetching import fetch
from chronik.testing.sim.history import History, PartitionHistory
from chronik.testing.sim.world import World
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

LATEST = -1
REREAD_SHARE = 0.02


class SimConsumer(SimClient):
    """Follows the end of one partition."""

    def __init__(
        self,
        name: str,
        world: World,
        history: History,
        bootstrap: list[tuple[str, int]],
        topic: str,
        partition: int,
        *,
        max_bytes: int,
        max_wait_ms: int,
    ) -> None:
        super().__init__(name, world, history, bootstrap)
        self.partition: PartitionHistory = history.partition(topic, partition)
        self.position = 0
        self.records_read = 0
        self._max_bytes = max_bytes
        self._max_wait_ms = max_wait_ms

    async def work(self) -> None:
        while not self.is_finishing:
            connection = await self.leader(*self.partition.name)
            try:
                await self._follow(connection)
            except (ClientError, KafkaError) as error:
                self._check(error)
                await self.pause()

    async def _follow(self, connection: Connection) -> None:
        while not self.is_finishing:
            if self.random.random() < REREAD_SHARE:
                self.position = self.random.randint(0, self.position)
            await self.read_on(connection, self._max_wait_ms)
            if self.random.random() < 0.2:
                await asyncio.sleep(self.random.random() * 0.02)

    async def read_on(self, connection: Connection, max_wait_ms: int) -> None:
        before = self.position
        self.position = await fetch(
            connection, self.partition, before, self.name, max_bytes=self._max_bytes, max_wait_ms=max_wait_ms
        )
        self.records_read += self.position - before

    def _check(self, error: ClientError | KafkaError) -> None:
        self.failed(error)
        if isinstance(error, KafkaError):
            if error.code is ErrorCode.offset_out_of_range:
                self.partition.out_of_range(self.position, self.name)
            elif error.code not in RETRIABLE:
                self.world.violated(f"{self.partition.name}: {self.name} got {error.code.name} ({error.message})")


class FinalReader(SimConsumer):
    """Reads the partition from beginning to end, after all writes have stopped."""

    def __init__(
        self, name: str, world: World, history: History, bootstrap: list[tuple[str, int]], topic: str, partition: int
    ) -> None:
        super().__init__(name, world, history, bootstrap, topic, partition, max_bytes=256 * 1024, max_wait_ms=0)

    async def work(self) -> None:
        end_offset = await self.insist(self._end_offset)
        while self.position < end_offset and self.world.violation is None:
            connection = await self.leader(*self.partition.name)
            before = self.position
            try:
                await self.read_on(connection, 0)
            except (ClientError, KafkaError) as error:
                self._check(error)
                await self.pause()
                continue
            if self.position == before:
                self.world.violated(f"{self.partition.name} ends at {end_offset}, and nothing is read at {before}")
        # Unanswered produce requests may have been appended meanwhile.
        self._compare(max(end_offset, self.position))

    async def _end_offset(self) -> int:
        known_end = self.partition.end_seen
        end_offset = await list_offset(await self.leader(*self.partition.name), self.partition, LATEST)
        self.partition.end_shown(end_offset, known_end, self.name)
        return end_offset

    def _compare(self, end_offset: int) -> None:
        lost = [offset for offset in sorted(self.partition.records) if offset >= end_offset]
        if lost:
            names = ", ".join(str(self.partition.records[offset]) for offset in lost[:3])
            self.world.violated(
                f"{self.partition.name} ends at {end_offset}: {len(lost)} records from {lost[0]} on are lost ({names})"
            )


async def list_offset(connection: Connection, partition: PartitionHistory, timestamp: int) -> int:
    """Send ListOffsets for one partition and return the offset. Raises KafkaError and ClientError."""
    wanted = {"partition_index": partition.name.partition, "current_leader_epoch": -1, "timestamp": timestamp}
    response = await connection.call(
        ApiKey.LIST_OFFSETS,
        {
            "replica_id": -1,
            "isolation_level": 0,
            "topics": [{"name": partition.name.topic, "partitions": [wanted]}],
            "timeout": 1000,
        },
        timeout_s=REQUEST_TIMEOUT_S,
    )
    result = response.topics[0].partitions[0]
    if result.error_code != ErrorCode.none:
        raise KafkaError(result.error_code, "ListOffsets")
    return int(result.offset)
