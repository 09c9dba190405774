"""Clients that belong to no group and have to do with its offsets: one commits by itself, one asks every node.

Whatever node answers, and whenever: an offset that it calls committed is none that the group has left behind.
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
    """Asks one node or another what a group has committed, or first who coordinates it."""

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
        """What the group has committed, as the node at the other end says it."""
        known = {each: self.history.group(group, self._topic, each).committed for each in self._partitions}
        require_stable = self.random.random() < 0.5
        found = await committed_offsets(connection, group, self._topic, self._partitions, require_stable=require_stable)
        self.answers += 1
        for partition, offset in found.items():
            self.history.group(group, self._topic, partition).fetched(offset, known[partition], self.name)

    async def _node(self) -> Connection:
        """Any node, whatever it is to the group; or whom any node calls the coordinator."""
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
    """Asks each group's coordinator once, when nobody commits any more."""

    async def work(self) -> None:
        for group in self.history.group_names:
            await self.insist(lambda group=group: self._ask(group))  # type: ignore[misc]

    async def _ask(self, group: str) -> None:
        deadline = Deadline(REQUEST_TIMEOUT_S)
        async with Cluster(self._bootstrap, client_id=self.name, timeout_s=REQUEST_TIMEOUT_S) as anew:
            coordinator = await anew.coordinator(group, deadline)
            await self.look_at(group, await anew.connection(coordinator, deadline))


class SimLedger(SimClient):
    """Commits larger and larger offsets to a group without members.

    A commit without an answer may still be under way and undo a later one: nothing fences it. The next commits then go
    to another group.
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
                    continue  # it was surely not written
                return
            for history in histories:
                history.commit_acknowledged(offset)
            self.commits += 1

    async def _coordinator(self, group: str) -> Connection:
        deadline = Deadline(REQUEST_TIMEOUT_S)
        coordinator = await self.cluster.coordinator(group, deadline)
        return await self.cluster.connection(coordinator, deadline)
