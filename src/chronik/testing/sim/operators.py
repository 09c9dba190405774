"""Operators who change a cluster under load: one reassigns replicas and elects preferred leaders, one resizes it.

This must not lose records, whatever else happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from chronik.cli.replica_moves import Partition, Replicas, moves_from
from chronik.client.brokers import Brokers
from chronik.client.cluster import Deadline
from chronik.client.topics import Topics
from chronik.testing.sim.client import REQUEST_TIMEOUT_S, TOPIC, Service, SimClient
from chronik.testing.sim.node import SimNode
from chronik.testing.sim.node_files import NodeFiles
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

PREFERRED = 0
REASSIGN_PAUSE_S, RESIZE_PAUSE_S, MOVE_PAUSE_S = 0.5, 0.7, 0.4
AWAY_S_MAX = 1.0
# Errors that the current state of the cluster may cause: another operator moves replicas as well.
_REFUSED_NOW = (
    ErrorCode.election_not_needed,
    ErrorCode.preferred_leader_not_available,
    ErrorCode.eligible_leaders_not_available,
    ErrorCode.invalid_replica_assignment,
)
_REMOVAL_REFUSED_NOW = (
    ErrorCode.invalid_replica_assignment,
    ErrorCode.invalid_request,
    ErrorCode.no_reassignment_in_progress,
)


class ReassignmentOperator(SimClient):
    """Changes the nodes, order and number of replicas, and elects preferred leaders. Restores the number at its end."""

    def __init__(self, name: str, service: Service, partitions: int, replicas: int) -> None:
        super().__init__(name, service)
        self._partitions = partitions
        self._nodes = list(range(1, len(service.bootstrap) + 1))
        self._replicas = replicas

    async def work(self) -> None:
        while not self.is_finishing:
            await self.rest(REASSIGN_PAUSE_S)
            replicas = self.random.sample(self._nodes, self._replicas)
            if self.random.random() < 0.2:
                replicas.pop()
            if self.random.random() < 0.6:
                partition = self.random.randrange(self._partitions)
                await self.insist(partial(self._assign, partition, replicas))
            else:
                await self.insist(self._elect)
        for partition in range(self._partitions):
            await self.insist(partial(self._assign, partition, self._nodes[: self._replicas]))

    async def _assign(self, partition: int, replicas: list[int]) -> None:
        connection = await self.cluster.any_connection(Deadline(REQUEST_TIMEOUT_S))
        reassignment = {"partition_index": partition, "replicas": replicas}
        values = {
            "topics": [{"name": TOPIC, "partitions": [reassignment]}],
            "timeout": 1000,
            "allow_replication_factor_change": True,
        }
        response = await connection.call(ApiKey.ALTER_PARTITION_REASSIGNMENTS, values, timeout_s=REQUEST_TIMEOUT_S)
        self._check(response.error_code, "assign")
        for topic in response.responses:
            for result in topic.partitions:
                self._check(result.error_code, f"assign {replicas}")

    async def _elect(self) -> None:
        connection = await self.cluster.any_connection(Deadline(REQUEST_TIMEOUT_S))
        values = {"election_type": PREFERRED, "topic_partitions": None, "timeout": 1000}
        response = await connection.call(ApiKey.ELECT_LEADERS, values, timeout_s=REQUEST_TIMEOUT_S)
        self._check(getattr(response, "error_code", ErrorCode.none), "elect")

    def _check(self, error_code: ErrorCode, what: str) -> None:
        code = ErrorCode(error_code)
        if code is ErrorCode.none or (code in _REFUSED_NOW and not self.is_finishing):
            return
        if code in _REFUSED_NOW:
            raise KafkaError(ErrorCode.leader_not_available, f"{what}: {code.name}")
        raise KafkaError(code, what)


class LeaderOperator(ReassignmentOperator):
    """Moves the leadership of partitions between nodes that keep running, again and again."""

    async def work(self) -> None:
        while not self.is_finishing:
            await self.rest(MOVE_PAUSE_S)
            partition = self.random.randrange(self._partitions)
            replicas = self.random.sample(self._nodes, self._replicas)
            await self.insist(partial(self._assign, partition, replicas))
            await self.insist(self._elect)


class ResizeOperator(SimClient):
    """Removes nodes from the cluster, adds them again, and changes min.insync.replicas.

    Removal does what `chronik cluster remove` does: reassign the node's replicas, unregister the node, then stop it and
    wipe its disk. Later the node joins with an empty folder. At the end every node is a member again, and the topic's
    configuration is restored.
    """

    def __init__(self, name: str, service: Service, nodes: Sequence[SimNode], min_insync: Sequence[int]) -> None:
        """`min_insync` lists the values for the topic's min.insync.replicas; the first one is set at the end."""
        super().__init__(name, service)
        self._nodes = nodes
        self._min_insync = min_insync

    async def work(self) -> None:
        while not self.is_finishing:
            await self.rest(RESIZE_PAUSE_S)
            if self.random.random() < 0.5:
                await self._require_in_sync(self.random.choice(self._min_insync))
            else:
                await self._remove(self.random.choice(self._nodes))
        await self._require_in_sync(self._min_insync[0])

    async def _require_in_sync(self, replicas: int) -> None:
        self.world.note(f"min.insync.replicas of {TOPIC} is set to {replicas}")
        configs = {"min.insync.replicas": str(replicas)}
        await self.insist(lambda: Topics(self.cluster).alter_configs(TOPIC, configs))

    async def _remove(self, node: SimNode) -> None:
        node_id = node.config.node_id
        if not node.is_ready:
            return
        self.world.note(f"{node.host.name} is to leave the cluster")
        if not await self._empty(node_id) or not await self._unregister(node_id):
            return
        self.world.note(f"{node.host.name} has left the cluster")
        node.kill()
        files = NodeFiles(node.host, node.config.data_folder, node_id)
        files.wipe()
        node.copies.clear()
        await asyncio.sleep(self.random.random() * AWAY_S_MAX)
        node.kill()  # the nemesis may have started it, and it may know that it was removed
        files.wipe()
        node.host.resume()
        node.start_when_down()

    async def _empty(self, node_id: int) -> bool:
        """Move all replicas off the node; return whether none is left. Give up when the run ends: the node stays."""
        staying = [other.config.node_id for other in self._nodes if other.config.node_id != node_id]
        while not self.is_finishing:
            targets = moves_from(node_id, await self.insist(self._replicas), staying)
            if not targets:
                return True
            try:
                await Brokers(self.cluster).move(targets)
            except Exception as error:
                self.count(error)
            await asyncio.sleep(0.1 * (1 + self.random.random()))
        return False

    async def _replicas(self) -> dict[Partition, Replicas]:
        layout = await self.cluster.layout()
        return {
            (topic.name, partition.partition): partition.replicas
            for topic in layout.topics.values()
            for partition in topic.partitions
        }

    async def _unregister(self, node_id: int) -> bool:
        """Unregister the node; return whether that succeeded. It fails if the node got a replica again meanwhile."""

        async def attempt() -> bool:
            try:
                await Brokers(self.cluster).unregister(node_id)
            except KafkaError as error:
                if error.code not in _REMOVAL_REFUSED_NOW:
                    raise
                return False
            return True

        return await self.insist(attempt)
