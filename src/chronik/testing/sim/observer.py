"""A client that only queries the start and end offsets of logs: the answers must never go backwards."""

from __future__ import annotations

import asyncio

from chronik.client.errors import RETRIABLE, ClientError
from chronik.testing.sim.client import SimClient
from chronik.testing.sim.consumer import LATEST, list_offset
from chronik.testing.sim.history import History
from chronik.testing.sim.world import World
from chronik.wire.errors import KafkaError

EARLIEST = -2


class SimObserver(SimClient):
    """Watches every partition of one topic."""

    def __init__(
        self,
        name: str,
        world: World,
        history: History,
        bootstrap: list[tuple[str, int]],
        topic: str,
        partitions: int,
        pause_s: float,
    ) -> None:
        super().__init__(name, world, history, bootstrap)
        self._partitions = [history.partition(topic, partition) for partition in range(partitions)]
        self._pause_s = pause_s

    async def work(self) -> None:
        while not self.is_finishing:
            partition = self.random.choice(self._partitions)
            connection = await self.leader(*partition.name)
            try:
                known_end = partition.end_seen
                partition.end_shown(await list_offset(connection, partition, LATEST), known_end, self.name)
                start = await list_offset(connection, partition, EARLIEST)
                if start != 0:
                    self.world.violated(f"{partition.name} begins at {start}, and nothing was deleted")
            except (ClientError, KafkaError) as error:
                self.failed(error)
                if isinstance(error, KafkaError) and error.code not in RETRIABLE:
                    self.world.violated(f"{partition.name}: {self.name} got {error.code.name} ({error.message})")
            await asyncio.sleep(self.random.expovariate(1.0) * self._pause_s)
