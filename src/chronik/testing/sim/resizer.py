"""An operator who removes nodes from the cluster and adds them again, and changes min.insync.replicas.

Removal does what `chronik cluster remove` does: reassign the node's replicas, unregister the node, then stop it and
wipe its disk. Later the node joins with an empty folder. This must not lose records, whatever else happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from chronik.cli.replica_moves import Partition, Replicas, moves_from
from chronik.client.brokers import Brokers
from chronik.client.topics import Topics
from chronik.testing.sim.client import SimClient
from chronik.testing.sim.files import NodeFiles
from chronik.testing.sim.history import History
from chronik.testing.sim.node import SimNode
from chronik.testing.sim.world import World
from chronik.wire.errors import ErrorCode, KafkaError

PAUSE_S = 0.7
LOOK_S = 0.1
AWAY_S_MAX = 1.0
NOT_NOW = (ErrorCode.invalid_replica_assignment, ErrorCode.invalid_request, ErrorCode.no_reassignment_in_progress)
"""Errors that the current state of the cluster may cause: another administrator moves replicas as well."""


class SimResizer(SimClient):
    """Resizes one cluster. At its end every node is a member again, and the topic's configuration is restored."""

    def __init__(
        self,
        name: str,
        world: World,
        history: History,
        bootstrap: list[tuple[str, int]],
        topic: str,
        nodes: Sequence[SimNode],
        min_insync: Sequence[int],
    ) -> None:
        """`min_insync` lists the values for the topic's min.insync.replicas; the first one is set at the end."""
        super().__init__(name, world, history, bootstrap)
        self.removals = 0
        self._topic = topic
        self._nodes = nodes
        self._min_insync = min_insync

    async def work(self) -> None:
        while not self.is_finishing:
            await asyncio.sleep(self.random.expovariate(1.0) * PAUSE_S)
            if self.random.random() < 0.5:
                await self._require_in_sync(self.random.choice(self._min_insync))
            else:
                await self._remove(self.random.choice(self._nodes))
        await self._require_in_sync(self._min_insync[0])

    async def _require_in_sync(self, replicas: int) -> None:
        self.world.note(f"{self._topic} asks for {replicas} replicas in sync")
        await self.insist(
            lambda: Topics(self.cluster).alter_configs(self._topic, {"min.insync.replicas": str(replicas)})
        )

    async def _remove(self, node: SimNode) -> None:
        node_id = node.config.node_id
        if not node.is_ready:
            return
        self.world.note(f"{node.host.name} is to leave the cluster")
        if not await self._empty(node_id) or not await self._unregister(node_id):
            return
        self.removals += 1
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
            except KafkaError as error:
                if error.code not in NOT_NOW:
                    self.failed(error)
            except Exception as error:
                self.failed(error)
            await asyncio.sleep(LOOK_S * (1 + self.random.random()))
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
        unregistered = False

        async def attempt() -> None:
            nonlocal unregistered
            try:
                await Brokers(self.cluster).unregister(node_id)
                unregistered = True
            except KafkaError as error:
                if error.code not in NOT_NOW:
                    raise

        await self.insist(attempt)
        return unregistered
