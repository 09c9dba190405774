"""ListPartitionReassignments (key 46), version 0.

Behaviour
- Returns the partitions that are being reassigned, with their current, adding and removing replicas: of all topics, or
  of the requested partitions. Partitions that are not being reassigned, or do not exist, are omitted.
Answered by the controller, which begins and ends reassignments; other nodes forward the request to it.
"""

from __future__ import annotations

from functools import partial

from chronik.metadata.reassignment import reassigning
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Handler, Values
from chronik.node.serving.connection import Request
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode


async def handle(metadata: MetadataLog, request: Request) -> Values:
    asked = request.message.topics
    wanted = None
    if asked is not None:
        wanted = [(topic.name, index) for topic in asked for index in topic.partition_indexes]
    topics: dict[str, list[Values]] = {}
    for name, partition in reassigning(metadata.image, wanted):
        topics.setdefault(name, []).append(
            {
                "partition_index": partition.partition,
                "replicas": list(partition.replicas),
                "adding_replicas": list(partition.adding),
                "removing_replicas": list(partition.removing),
            }
        )
    return {
        "error_code": ErrorCode.none,
        "error_message": None,
        "topics": [{"name": name, "partitions": partitions} for name, partitions in topics.items()],
    }


API = Api(ApiKey.LIST_PARTITION_REASSIGNMENTS, (0, 0), on_controller=True)


def handler(metadata: MetadataLog) -> Handler:
    return Handler(API, partial(handle, metadata))
