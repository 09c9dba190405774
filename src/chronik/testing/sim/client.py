"""The base of all simulated clients: finding the leader, own connections, and retries as in real clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import TypeVar

from chronik.client.cluster import Cluster, Deadline
from chronik.client.connection import Connection
from chronik.client.errors import RETRIABLE, ClientError
from chronik.testing.sim.history import History
from chronik.testing.sim.world import World
from chronik.wire.errors import KafkaError

T = TypeVar("T")

REQUEST_TIMEOUT_S = 1.0
RETRY_PAUSE_S = 0.1


class SimClient:
    """One application. After `finish` it completes its remaining work; then `is_done` is true."""

    def __init__(self, name: str, world: World, history: History, bootstrap: list[tuple[str, int]]) -> None:
        self.name = name
        self.world = world
        self.history = history
        self.random: Random = world.random(f"client:{name}")
        self.is_finishing = False
        self.is_done = False
        self.errors: dict[str, int] = {}
        # Shuffled, so that clients do not all learn of leaders from the same node.
        self._bootstrap = bootstrap if len(bootstrap) == 1 else self.random.sample(bootstrap, len(bootstrap))
        self._cluster: Cluster | None = None
        self._asked: dict[tuple[str, int], Cluster] = {}

    async def run(self) -> None:
        await self.work()
        await self.drop_connections()
        self.is_done = True

    async def work(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        self.is_finishing = True

    # -- connections ---------------------------------------------------------------------------------------------------

    @property
    def cluster(self) -> Cluster:
        if self._cluster is None:
            self._cluster = Cluster(self._bootstrap, client_id=self.name, timeout_s=REQUEST_TIMEOUT_S)
        return self._cluster

    async def leader(self, topic: str, partition: int) -> Connection:
        """Return a connection to the partition's leader; retry until there is one."""

        async def find() -> Connection:
            deadline = Deadline(REQUEST_TIMEOUT_S)
            leaders = await self._any_node().leaders(topic, frozenset({partition}), deadline=deadline)
            return await self.cluster.connection(leaders[partition], deadline)

        return await self.insist(find)

    def _any_node(self) -> Cluster:
        """Return a random node to query for leaders: a node that lags may still name itself."""
        if len(self._bootstrap) == 1:
            return self.cluster
        address = self.random.choice(self._bootstrap)
        if address not in self._asked:
            self._asked[address] = Cluster([address], client_id=self.name, timeout_s=REQUEST_TIMEOUT_S)
        return self._asked[address]

    async def insist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Retry until the attempt succeeds. The scenario's deadline detects a cluster that never recovers."""
        while True:
            try:
                return await attempt()
            except (ClientError, KafkaError, TimeoutError) as error:
                self.failed(error)
                if isinstance(error, KafkaError) and error.code not in RETRIABLE:
                    self.world.violated(f"{self.name} got {error.code.name} ({error.message})")
                await self.pause()

    async def drop_connections(self) -> None:
        """Close all connections, as an impatient application does before it starts over."""
        asked, self._asked = self._asked, {}
        for cluster in asked.values():
            await cluster.close()
        if self._cluster is not None:
            cluster, self._cluster = self._cluster, None
            await cluster.close()

    async def pause(self) -> None:
        await asyncio.sleep(RETRY_PAUSE_S * (0.2 + self.random.random()))

    def failed(self, error: BaseException) -> None:
        kind = error.code.name if isinstance(error, KafkaError) else type(error).__name__
        self.errors[kind] = self.errors.get(kind, 0) + 1
