"""OffsetForLeaderEpoch (key 23), versions 2-4.

Behaviour
- Returns where an epoch ended in this leader's log, so that a consumer with a position beyond that end learns that its
  records were truncated (KIP-320).
- Returns the largest epoch that is not newer than the requested one; an unknown epoch is (-1, -1).
Versions: 3 replica id, 4 flexible.
"""

from typing import Any

from chronik.authorization.acls import Operation, ResourceType
from chronik.node.admin.responses import each_partition, refuse_partitions
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey


async def handle(host: PartitionHost, request: Request) -> Values:
    access = request.access
    is_replica = access.has(Operation.CLUSTER_ACTION, ResourceType.CLUSTER)

    def epoch_end(topic: Any, requested: Any) -> Values:
        if not is_replica:
            access.require(Operation.DESCRIBE, ResourceType.TOPIC, topic.topic)
        partition = host.require_leader(topic.topic, requested.partition)
        partition.check_leader_epoch(requested.current_leader_epoch)
        epoch, end_offset = partition.log.end_offset_for_epoch(requested.leader_epoch)
        return {"leader_epoch": epoch, "end_offset": end_offset}

    return {"topics": each_partition(request.message.topics, epoch_end)}


API = Api(ApiKey.OFFSET_FOR_LEADER_EPOCH, (2, 4), on_error=refuse_partitions)
