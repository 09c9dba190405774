"""The high watermarks of partitions, as their leaders report them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from chronik.client.errors import ClientError
from chronik.groups.records import TopicPartition
from chronik.metadata.image import NO_LEADER
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.peers import Peers
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

PURPOSE = "log-ends"
LIST_OFFSETS_VERSION = 7
LATEST = -1
REQUEST_TIMEOUT_S = 5.0
CONSUMER = -1


class LogEnds:
    """Requests the high watermarks from the leaders. Owned by the loop."""

    def __init__(self, runtime: Runtime, metadata: MetadataLog, host: PartitionHost, peers: Peers) -> None:
        self._node_id = runtime.node_id
        self._log = runtime.log.bind(component="groups")
        self._metadata = metadata
        self._host = host
        self._peers = peers

    async def of(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the high watermark of each partition whose leader answers in time."""
        ends: dict[TopicPartition, int] = {}
        remote: dict[int, dict[str, list[int]]] = {}
        image = self._metadata.image
        for topic, index in partitions:
            partition = image.partition(topic, index)
            leader = NO_LEADER if partition is None else partition.leader
            if leader == self._node_id:
                hosted = self._host.partitions.get((topic, index))
                if hosted is not None and hosted.leads:
                    ends[(topic, index)] = hosted.high_watermark
            elif leader != NO_LEADER:
                remote.setdefault(leader, {}).setdefault(topic, []).append(index)
        for answer in await asyncio.gather(*(self._ask(node_id, topics) for node_id, topics in remote.items())):
            ends.update(answer)
        return ends

    async def _ask(self, node_id: int, topics: dict[str, list[int]]) -> dict[TopicPartition, int]:
        values: Values = {
            "replica_id": CONSUMER,
            "isolation_level": 0,
            "topics": [
                {"name": topic, "partitions": [{"partition_index": each, "timestamp": LATEST} for each in indexes]}
                for topic, indexes in topics.items()
            ],
        }
        try:
            connection = await self._peers.connection(node_id, PURPOSE)
            response = await connection.call(
                ApiKey.LIST_OFFSETS, values, timeout_s=REQUEST_TIMEOUT_S, at_most=LIST_OFFSETS_VERSION
            )
        except ClientError as error:
            self._log.info("leader_not_reached", peer=node_id, reason=str(error))
            return {}
        return {
            (topic.name, each.partition_index): each.offset
            for topic in response.topics
            for each in topic.partitions
            if each.error_code is ErrorCode.none
        }
