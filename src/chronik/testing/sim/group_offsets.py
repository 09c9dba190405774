"""Clients that use a group's offsets without being members: one commits offsets, one queries every node.

Whichever node answers, and whenever: it never returns a committed offset older than one that the group knew before.
"""

from __future__ import annotations

from functools import partial

from chronik.client.cluster import Cluster, Deadline
from chronik.client.connection import Connection
from chronik.client.errors import ClientError
from chronik.testing.sim.client import REQUEST_TIMEOUT_S, Service, SimClient
from chronik.testing.sim.requests import commit_offsets, committed_offsets
from chronik.wire.errors import ErrorCode, KafkaError

PAUSE_S = 50e-3


class OffsetReader(SimClient):
    """Fetches the committed offsets of a group from a random node, or from the coordinator that a random node names."""

    def __init__(self, name: str, service: Service, topic: str, partitions: int) -> None:
        super().__init__(name, service)
        self._topic = topic
        self._partitions = range(partitions)
        self._nodes: dict[tuple[str, int], Cluster] = {}

    async def work(self) -> None:
        while not self.is_finishing:
            await self.rest(PAUSE_S)
            groups = self.history.group_names
            if not groups:
                continue
            try:
                await self.check_offsets(self.random.choice(groups), await self._node())
            except (ClientError, KafkaError, TimeoutError) as error:
                self.failed(error)
        for cluster in self._nodes.values():
            await cluster.close()

    async def check_offsets(self, group: str, connection: Connection) -> None:
        """Fetch the group's committed offsets over this connection, and check them."""
        known = {each: self.history.group(group, self._topic, each).committed for each in self._partitions}
        require_stable = self.random.random() < 0.5
        offsets = await committed_offsets(
            connection, group, self._topic, self._partitions, require_stable=require_stable
        )
        for partition, offset in offsets.items():
            self.history.group(group, self._topic, partition).fetched(offset, known[partition], self.name)

    async def _node(self) -> Connection:
        """Connect to any node, whatever its role in the group, or to the coordinator that any node names."""
        deadline = Deadline(REQUEST_TIMEOUT_S)
        address = self.random.choice(self._bootstrap)
        if address not in self._nodes:
            self._nodes[address] = self.new_cluster(address)
        if self.random.random() < 0.5:
            return await self._nodes[address].any_connection(deadline)
        async with self.new_cluster(address) as fresh:
            coordinator = await fresh.coordinator(self.random.choice(self.history.group_names), deadline)
        return await self.cluster.connection(coordinator, deadline)


class FinalOffsetReader(OffsetReader):
    """Queries each group's coordinator once, after all commits have stopped."""

    async def work(self) -> None:
        for group in self.history.group_names:
            await self.insist(partial(self._ask_coordinator, group))

    async def _ask_coordinator(self, group: str) -> None:
        deadline = Deadline(REQUEST_TIMEOUT_S)
        async with self.new_cluster(*self._bootstrap) as fresh:
            coordinator = await fresh.coordinator(group, deadline)
            await self.check_offsets(group, await fresh.connection(coordinator, deadline))


class OffsetCommitter(SimClient):
    """Commits increasing offsets to a group without members.

    An unanswered commit may still be in flight and overwrite a later one: nothing fences it. After one, commits go to a
    new group.
    """

    def __init__(self, name: str, service: Service, topic: str, partitions: int) -> None:
        super().__init__(name, service)
        self._topic = topic
        self._partitions = range(partitions)
        self._groups = 0

    async def work(self) -> None:
        while not self.is_finishing:
            self._groups += 1
            await self._commit_to(f"{self.name}-{self._groups}")

    async def _commit_to(self, group: str) -> None:
        offset = 0
        while not self.is_finishing:
            await self.rest(PAUSE_S)
            connection = await self.insist(partial(self.coordinator, group))
            offset += self.random.randint(1, 10)
            histories = [self.history.group(group, self._topic, partition) for partition in self._partitions]
            for history in histories:
                history.trying(offset)
            try:
                await commit_offsets(connection, group, self._topic, dict.fromkeys(self._partitions, offset))
            except (ClientError, KafkaError, TimeoutError) as error:
                self.failed(error)
                await self.drop_connections()
                await self.pause()
                if isinstance(error, KafkaError) and error.code is ErrorCode.not_coordinator:
                    continue  # the commit was certainly not written
                return
            for history in histories:
                history.commit_acknowledged(offset)
