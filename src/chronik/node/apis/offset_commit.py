"""OffsetCommit (key 8), versions 2-10.

Behaviour
- Answered when the offsets are committed to `__consumer_offsets`; waiting commits are written together.
- A member commits with its generation: an older one is ILLEGAL_GENERATION, and in CompletingRebalance even the current
  one is REBALANCE_IN_PROGRESS. A client without membership (generation -1) may commit only while the group is empty.
- Partitions that do not exist are UNKNOWN_TOPIC_OR_PARTITION, unknown topic ids UNKNOWN_TOPIC_ID, metadata of more than
  4,096 bytes OFFSET_METADATA_TOO_LARGE; the other partitions of the request are still committed.
Versions: 3 throttling, 5 no retention time, 6 leader epoch, 7 static members, 8 flexible, 9 member epochs of KIP-848
(a classic generation here), 10 topic ids.
Not supported: the retention time of versions 2-4, which Kafka ignores as well once a group has members.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from chronik.groups.commits import CommitRequest
from chronik.groups.records import TopicPartition
from chronik.node.coordinators.group_service import GroupService
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Handler, Values
from chronik.node.serving.connection import Request
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

FIRST_VERSION_WITH_TOPIC_IDS = 10


class Services(NamedTuple):
    """The parts of the node that this API uses."""

    groups: GroupService
    metadata: MetadataLog


async def handle(node: Services, request: Request) -> Values:
    message = request.message
    image = node.metadata.image
    names: list[str | None] = []
    offsets: list[tuple[TopicPartition, int, int, str]] = []
    for topic in message.topics:
        if request.api_version >= FIRST_VERSION_WITH_TOPIC_IDS:
            found = None if topic.topic_id is None else image.topic_by_id(topic.topic_id)
        else:
            found = image.topic(topic.name)
        names.append(None if found is None else found.name)
        if found is None:
            continue
        for each in topic.partitions:
            if found.partition(each.partition_index) is not None:
                leader_epoch = getattr(each, "committed_leader_epoch", -1)
                partition = (found.name, each.partition_index)
                offsets.append((partition, each.committed_offset, leader_epoch, each.committed_metadata or ""))
    errors: dict[TopicPartition, ErrorCode] = {}
    if offsets:
        errors = await node.groups.commit(
            CommitRequest(
                group_id=message.group_id,
                generation=message.generation_id_or_member_epoch,
                member_id=message.member_id,
                instance_id=getattr(message, "group_instance_id", None),
                offsets=tuple(offsets),
            )
        )
    unknown = ErrorCode.unknown_topic_or_partition
    return {
        "topics": [
            {
                **_topic_key(topic),
                "partitions": [
                    {
                        "partition_index": each.partition_index,
                        "error_code": ErrorCode.unknown_topic_id
                        if name is None and request.api_version >= FIRST_VERSION_WITH_TOPIC_IDS
                        else errors.get((name or "", each.partition_index), unknown),
                    }
                    for each in topic.partitions
                ],
            }
            for topic, name in zip(message.topics, names, strict=True)
        ]
    }


def _topic_key(topic: object) -> Values:
    """Return the fields that identify the topic, in the response as in the request."""
    return {name: getattr(topic, name) for name in ("name", "topic_id") if hasattr(topic, name)}


def on_error(request: Request, code: ErrorCode) -> Values:
    return {
        "topics": [
            {
                **_topic_key(topic),
                "partitions": [
                    {"partition_index": each.partition_index, "error_code": code} for each in topic.partitions
                ],
            }
            for topic in request.message.topics
        ]
    }


API = Api(ApiKey.OFFSET_COMMIT, (2, 10), on_error=on_error)


def handler(services: Services) -> Handler:
    return Handler(API, partial(handle, services))
