"""Consumers without a group: one follows the log and rereads, one queries offsets, one reads all when the run ends."""

from __future__ import annotations

import asyncio

from chronik.client.connection import Connection
from chronik.client.errors import ClientError
from chronik.testing.sim.client import EARLIEST, LATEST, TOPIC, Service, SimClient, fetch, list_offset
from chronik.testing.sim.history import PartitionHistory
from chronik.wire.errors import KafkaError


class SimConsumer(SimClient):
    """Follows the end of one partition."""

    def __init__(
        self,
        name: str,
        service: Service,
        partition: int,
        max_bytes: int = 256 * 1024,
        max_wait_ms: int = 0,
        reread_share: float = 0.0,
    ) -> None:
        super().__init__(name, service)
        self.partition: PartitionHistory = service.history.partition(TOPIC, partition)
        self.position = 0
        self.records_read = 0
        self._max_bytes = max_bytes
        self._max_wait_ms = max_wait_ms
        self._reread_share = reread_share

    async def work(self) -> None:
        while not self.is_finishing:
            connection = await self.leader(*self.partition.name)
            try:
                await self._follow(connection)
            except (ClientError, KafkaError) as error:
                self.failed(error, self.partition.name)
                await self.pause()

    async def _follow(self, connection: Connection) -> None:
        while not self.is_finishing:
            if self.random.random() < self._reread_share:
                self.position = self.random.randint(0, self.position)
            await self._read(connection)
            if self.random.random() < 0.2:
                await asyncio.sleep(self.random.random() * 0.02)

    async def _read(self, connection: Connection) -> None:
        before = self.position
        self.position = await fetch(
            connection, self.partition, before, self.name, max_bytes=self._max_bytes, max_wait_ms=self._max_wait_ms
        )
        self.records_read += self.position - before


class FinalReader(SimConsumer):
    """Reads the partition from beginning to end, after all writes have stopped."""

    async def work(self) -> None:
        end_offset = await self.insist(self._end_offset)
        while self.position < end_offset and self.world.violation is None:
            before = self.position
            await self.insist(self._read_from_leader, self.partition.name)
            if self.position == before:
                self.world.violated(f"{self.partition.name} ends at {end_offset}, and nothing is read at {before}")
        # Unanswered produce requests may have been appended meanwhile.
        self._compare(max(end_offset, self.position))

    async def _read_from_leader(self) -> None:
        await self._read(await self.leader(*self.partition.name))

    async def _end_offset(self) -> int:
        known_end = self.partition.end_seen
        end_offset = await list_offset(await self.leader(*self.partition.name), self.partition, LATEST)
        self.partition.end_received(end_offset, known_end, self.name)
        return end_offset

    def _compare(self, end_offset: int) -> None:
        lost = [offset for offset in sorted(self.partition.records) if offset >= end_offset]
        if lost:
            names = ", ".join(str(self.partition.records[offset]) for offset in lost[:3])
            self.world.violated(
                f"{self.partition.name} ends at {end_offset}: {len(lost)} records from {lost[0]} on are lost ({names})"
            )


class SimObserver(SimClient):
    """Queries only the start and end offsets of every partition: the answers must never go backwards."""

    def __init__(self, name: str, service: Service, partitions: int, pause_s: float) -> None:
        super().__init__(name, service)
        self._partitions = [service.history.partition(TOPIC, partition) for partition in range(partitions)]
        self._pause_s = pause_s

    async def work(self) -> None:
        while not self.is_finishing:
            partition = self.random.choice(self._partitions)
            connection = await self.leader(*partition.name)
            try:
                known_end = partition.end_seen
                partition.end_received(await list_offset(connection, partition, LATEST), known_end, self.name)
                start = await list_offset(connection, partition, EARLIEST)
                if start != 0:
                    self.world.violated(f"{partition.name} begins at {start}, and nothing was deleted")
            except (ClientError, KafkaError) as error:
                self.failed(error, partition.name)
            await self.rest(self._pause_s)
