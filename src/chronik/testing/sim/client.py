"""The base of all simulated clients: finding the leader, own connections, and retries as in real clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from chronik.client.cluster import Cluster, Deadline
from chronik.client.connection import Connection
from chronik.client.errors import RETRIABLE, ClientError
from chronik.testing.sim.history import History
from chronik.testing.sim.world import World
from chronik.wire.errors import KafkaError

T = TypeVar("T")

TOPIC = "records"
"""The topic that most clients share."""
REQUEST_TIMEOUT_S = 1.0
RETRY_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Service:
    """What all clients of a run share: the world, the oracle, and the addresses of the nodes."""

    world: World
    history: History
    bootstrap: list[tuple[str, int]]


class SimClient:
    """One application. After `finish` it completes its remaining work; then `is_done` is true."""

    def __init__(self, name: str, service: Service) -> None:
        self.name = name
        self.world = service.world
        self.history = service.history
        self.random: Random = service.world.random(f"client:{name}")
        self.is_finishing = False
        self.is_done = False
        self.errors: dict[str, int] = {}
        # Shuffled, so that clients do not all learn of leaders from the same node.
        nodes = service.bootstrap
        self._bootstrap = nodes if len(nodes) == 1 else self.random.sample(nodes, len(nodes))
        self.cluster = self.new_cluster(*self._bootstrap)
        self._single_nodes: dict[tuple[str, int], Cluster] = {}

    async def run(self) -> None:
        await self.work()
        await self.drop_connections()
        self.is_done = True

    async def work(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        self.is_finishing = True

    def new_cluster(self, *nodes: tuple[str, int]) -> Cluster:
        return Cluster(list(nodes), client_id=self.name, timeout_s=REQUEST_TIMEOUT_S)

    async def leader(self, topic: str, partition: int) -> Connection:
        """Return a connection to the partition's leader; retry until there is one."""

        async def find() -> Connection:
            deadline = Deadline(REQUEST_TIMEOUT_S)
            leaders = await self._any_node().leaders(topic, frozenset({partition}), deadline=deadline)
            return await self.cluster.connection(leaders[partition], deadline)

        return await self.insist(find)

    async def coordinator(self, group: str) -> Connection:
        """Return a connection to the group's coordinator. Raises KafkaError and ClientError."""
        deadline = Deadline(REQUEST_TIMEOUT_S)
        return await self.cluster.connection(await self.cluster.coordinator(group, deadline), deadline)

    def _any_node(self) -> Cluster:
        """Return a random node to query for leaders: a node that lags may still name itself."""
        if len(self._bootstrap) == 1:
            return self.cluster
        return self.single_node(self.random.choice(self._bootstrap))

    def single_node(self, address: tuple[str, int]) -> Cluster:
        if address not in self._single_nodes:
            self._single_nodes[address] = self.new_cluster(address)
        return self._single_nodes[address]

    async def insist(self, attempt: Callable[[], Awaitable[T]], where: object = "") -> T:
        """Retry until the attempt succeeds. The scenario's deadline detects a cluster that never recovers."""
        while True:
            try:
                return await attempt()
            except (ClientError, KafkaError, TimeoutError) as error:
                self.failed(error, where)
                await self.pause()

    async def drop_connections(self) -> None:
        """Close all connections, as an impatient application does before it starts over."""
        clusters = (*self._single_nodes.values(), self.cluster)
        self._single_nodes, self.cluster = {}, self.new_cluster(*self._bootstrap)
        for cluster in clusters:
            await cluster.close()

    async def pause(self) -> None:
        await asyncio.sleep(RETRY_PAUSE_S * (0.2 + self.random.random()))

    async def rest(self, mean_s: float) -> None:
        await asyncio.sleep(self.random.expovariate(1.0) * mean_s)

    def failed(self, error: BaseException, where: object = "") -> None:
        """Count an error. Report a violation if no client may get it."""
        self.count(error)
        if isinstance(error, KafkaError) and error.code not in RETRIABLE:
            prefix = f"{where}: " if where else ""
            self.world.violated(f"{prefix}{self.name} got {error.code.name} ({error.message})")

    def count(self, error: BaseException) -> None:
        kind = error.code.name if isinstance(error, KafkaError) else type(error).__name__
        self.errors[kind] = self.errors.get(kind, 0) + 1
