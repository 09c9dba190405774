"""OffsetDelete (key 47), version 0.

Behaviour
- Removes offsets of a group without members, or of topics that its members do not subscribe to; subscribed topics are
  GROUP_SUBSCRIBED_TO_TOPIC. A group with members of a protocol other than "consumer" is NON_EMPTY_GROUP.
- GROUP_ID_NOT_FOUND for a group that does not exist, UNKNOWN_TOPIC_OR_PARTITION for partitions that do not exist.
Versions: only 0.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from chronik.node.coordinators.group_service import GroupService
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Handler, Values
from chronik.node.serving.connection import Request
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode


class Services(NamedTuple):
    """The parts of the node that this API uses."""

    groups: GroupService
    metadata: MetadataLog


async def handle(node: Services, request: Request) -> Values:
    message = request.message
    image = node.metadata.image
    known = [
        (str(topic.name), int(partition.partition_index))
        for topic in message.topics
        for partition in topic.partitions
        if image.partition(topic.name, partition.partition_index) is not None
    ]
    error, errors = await node.groups.delete_offsets(message.group_id, list(dict.fromkeys(known)))
    if error is not ErrorCode.none:
        return {"error_code": error, "topics": []}
    unknown = ErrorCode.unknown_topic_or_partition
    return {
        "error_code": ErrorCode.none,
        "topics": [
            {
                "name": topic.name,
                "partitions": [
                    {
                        "partition_index": partition.partition_index,
                        "error_code": errors.get((topic.name, partition.partition_index), unknown),
                    }
                    for partition in topic.partitions
                ],
            }
            for topic in message.topics
        ],
    }


API = Api(ApiKey.OFFSET_DELETE, (0, 0))


def handler(services: Services) -> Handler:
    return Handler(API, partial(handle, services))
