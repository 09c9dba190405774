"""Admin calls on brokers and replicas: reassign replicas, elect a leader, unregister a broker.

Plain Kafka protocol (KIP-455, KIP-460 and KIP-631), so all of it works on any Kafka cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chronik.client.cluster import Cluster, Deadline
from chronik.client.errors import UnsupportedByBroker, raise_for
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

Partition = tuple[str, int]

UNCLEAN = 1
UNCLEAN_FROM_VERSION = 1


@dataclass(frozen=True, slots=True)
class Move:
    """A partition that is being reassigned; `replicas` holds the old and the new replicas."""

    replicas: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]


class Brokers:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def move(self, targets: Mapping[Partition, Sequence[int]]) -> None:
        """Start reassignments to new replicas; they complete in the background."""
        topics: dict[str, list[dict[str, Any]]] = {}
        for (topic, partition), replicas in sorted(targets.items()):
            topics.setdefault(topic, []).append({"partition_index": partition, "replicas": list(replicas)})
        values = {"topics": [{"name": name, "partitions": partitions} for name, partitions in topics.items()]}

        def check(response: Any) -> None:
            raise_for(response, "reassigning replicas")
            for topic in response.responses:
                for partition in topic.partitions:
                    raise_for(partition, f"moving {topic.name}-{partition.partition_index}")

        key = ApiKey.ALTER_PARTITION_REASSIGNMENTS
        await self._cluster.call(key, values, check, with_timeout=True, at_most=0)

    async def moves(self) -> dict[Partition, Move]:
        """Return the reassignments in progress."""

        def read(response: Any) -> dict[Partition, Move]:
            raise_for(response, "listing reassignments")
            return {
                (topic.name, partition.partition_index): Move(
                    tuple(partition.replicas), tuple(partition.adding_replicas), tuple(partition.removing_replicas)
                )
                for topic in response.topics
                for partition in topic.partitions
            }

        key = ApiKey.LIST_PARTITION_REASSIGNMENTS
        return await self._cluster.call(key, {"topics": None}, read, with_timeout=True)

    async def elect_unclean(self, topic: str, partition: int) -> None:
        """Elect the first replica that can lead a partition without a leader; no error if it has a leader by now.

        Records that only other replicas have are lost.
        """
        values = {"election_type": UNCLEAN, "topic_partitions": [{"topic": topic, "partitions": [partition]}]}

        async def attempt(deadline: Deadline) -> None:
            connection = await self._cluster.controller(deadline)
            if not connection.supports(ApiKey.ELECT_LEADERS, UNCLEAN_FROM_VERSION):
                # Version 0 would drop the election type and elect the preferred leader.
                raise UnsupportedByBroker(f"{connection.name} does not support unclean elections")
            sent = {**values, "timeout": deadline.for_broker_ms}
            response = await connection.call(ApiKey.ELECT_LEADERS, sent, timeout_s=deadline.left_s)
            raise_for(response, "electing a leader")
            for elected in response.replica_election_results:
                for result in elected.partition_result:
                    if result.error_code != ErrorCode.election_not_needed:
                        raise_for(result, f"electing a leader of {topic}-{partition}")

        await self._cluster.retry(attempt)

    async def unregister(self, broker_id: int) -> None:
        """Remove a broker for good; no error if it is already gone. Refused while the broker has any replica."""

        def check(response: Any) -> None:
            if response.error_code != ErrorCode.broker_id_not_registered:
                raise_for(response, f"unregistering broker {broker_id}")

        await self._cluster.call(ApiKey.UNREGISTER_BROKER, {"broker_id": broker_id}, check)
