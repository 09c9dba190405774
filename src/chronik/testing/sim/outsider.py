"""Clients that use a group's offsets without being members: one commits offsets, one queries every node.

Whichever node answers, and whenever: it never returns a committed offset older than one that the group knew before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from chronik.client.cluster import Cluster, Deadline
from chronik.client.connection import Connection
from chronik.client.errors import RETRIABLE, ClientError
from chronik.testing.sim.client import REQUEST_TIMEOUT_S, SimClient
from chronik.testing.sim.group_calls import commit_offsets, committed_offsets
from chronik.testing.sim.history import History
from chronik.testing.sim.world import World
from chronik.wire.errors import ErrorCode, KafkaError

PAUSE_S = 50e-3


class SimOutsider(SimClient):
    """Fetches the committed offsets of a group from a random node, or from the coordinator that a random node names."""

    def __init__(
        self, name: str, world: World, history: History, bootstrap: list[tuple[str, int]], topic: str, partitions: int
    ) -> None:
        super().__init__(name, world, history, bootstrap)
        self.answers = 0
        self._topic = topic
        self._partitions = range(partitions)
        self._nodes: dict[tuple[str, int], Cluster] = {}

    async def work(self) -> None:
        while not self.is_finishing:
            await asyncio.sleep(self.random.expovariate(1.0) * PAUSE_S)
            groups = self.history.group_names
            if not groups:
                continue
            try:
                await self.look_at(self.random.choice(groups), await self._node())
            except (ClientError, KafkaError, TimeoutError) as error:
                self.failed(error)
                if isinstance(error, KafkaError) and error.code not in RETRIABLE:
                    self.world.violated(f"{self.name} got {error.code.name} ({error.message})")
        for cluster in self._nodes.values():
            await cluster.close()

    async def look_at(self, group: str, connection: Connection) -> None:
        """Fetch the group's committed offsets over this connection, and check them."""
        known = {each: self.history.group(group, self._topic, each).committed for each in self._partitions}
        require_stable = self.random.random() < 0.5
        found = await committed_offsets(connection, group, self._topic, self._partitions, require_stable=require_stable)
        self.answers += 1
        for partition, offset in found.items():
            self.history.group(group, self._topic, partition).fetched(offset, known[partition], self.name)

    async def _node(self) -> Connection:
        """Connect to any node, whatever its role in the group, or to the coordinator that any node names."""
        deadline = Deadline(REQUEST_TIMEOUT_S)
        address = self.random.choice(self._bootstrap)
        if address not in self._nodes:
            self._nodes[address] = Cluster([address], client_id=self.name, timeout_s=REQUEST_TIMEOUT_S)
        if self.random.random() < 0.5:
            return await self._nodes[address].any_connection(deadline)
        async with Cluster([address], client_id=self.name, timeout_s=REQUEST_TIMEOUT_S) as anew:
            coordinator = await anew.coordinator(self.random.choice(self.history.group_names), deadline)
        return await self.cluster.connection(coordinator, deadline)


class FinalOutsider(SimOutsider):
    """Queries each group's coordinator once, after all commits have stopped."""

    async def work(self) -> None:
        for group in self.history.group_names:
            await self.insist(lambda group=group: self._ask(group))  # type: ignore[misc]

    async def _ask(self, group: str) -> None:
        deadline = Deadline(REQUEST_TIMEOUT_S)
        async with Cluster(self._bootstrap, client_id=self.name, timeout_s=REQUEST_TIMEOUT_S) as anew:
            coordinator = await anew.coordinator(group, deadline)
            await self.look_at(group, await anew.connection(coordinator, deadline))


class SimLedger(SimClient):
    """Commits increasing offsets to a group without members.

    An unanswered commit may still be in flight and overwrite a later one: nothing fences it. After one, commits go to a
    new group.
    """

    def __init__(
        self, name: str, world: World, history: History, bootstrap: list[tuple[str, int]], topic: str, partitions: int
    ) -> None:
        super().__init__(name, world, history, bootstrap)
        self.commits = 0
        self._topic = topic
        self._partitions: Sequence[int] = range(partitions)
        self._groups = 0

    async def work(self) -> None:
        while not self.is_finishing:
            self._groups += 1
            await self._commit_to(f"{self.name}-{self._groups}")

    async def _commit_to(self, group: str) -> None:
        offset = 0
        while not self.is_finishing:
            await asyncio.sleep(self.random.expovariate(1.0) * PAUSE_S)
            connection = await self.insist(lambda: self._coordinator(group))
            offset += self.random.randint(1, 10)
            histories = [self.history.group(group, self._topic, partition) for partition in self._partitions]
            for history in histories:
                history.trying(offset)
            try:
                await commit_offsets(connection, group, self._topic, dict.fromkeys(self._partitions, offset))
            except (ClientError, KafkaError, TimeoutError) as error:
                self.failed(error)
                if isinstance(error, KafkaError) and error.code not in RETRIABLE:
                    self.world.violated(f"{self.name} got {error.code.name} ({error.message})")
                await self.drop_connections()
                await self.pause()
                if isinstance(error, KafkaError) and error.code is ErrorCode.not_coordinator:
                    continue  # the commit was certainly not written
                return
            for history in histories:
                history.commit_acknowledged(offset)
            self.commits += 1

    async def _coordinator(self, group: str) -> Connection:
        deadline = Deadline(REQUEST_TIMEOUT_S)
        coordinator = await self.cluster.coordinator(group, deadline)
        return await self.cluster.connection(coordinator, deadline)
