"""OffsetFetch (key 9), versions 1-10.

Behaviour
- Returns the committed offsets of the requested partitions, or -1 without an error if there is none, as for every
  partition of an unknown group. Null topics means all offsets of the group.
- Returns only offsets that are in the log and not part of an open transaction. With `require_stable`, a partition with
  an offset in an open transaction is UNSTABLE_OFFSET_COMMIT, until the transaction ends; the client retries.
- If the coordinator moved or is loading, the error is in the group's entry from version 8, at the top level in versions
  2-7, and in each partition in version 1.
- A member of a consumer group (KIP-848) may send its member id and epoch: another epoch is STALE_MEMBER_EPOCH.
Versions: 2 null topics, 5 leader epoch, 6 flexible, 7 require_stable, 8 many groups, 9 member epochs, 10 topic ids.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

from chronik.authorization.acls import Operation, ResourceType
from chronik.groups.records import CommittedOffset, TopicPartition
from chronik.metadata.image import ClusterImage
from chronik.node.admin.responses import find_topic, topic_key
from chronik.node.coordinators.group_service import GroupService
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

FIRST_VERSION_WITH_TOP_LEVEL_ERROR = 2
FIRST_VERSION_WITH_MANY_GROUPS = 8
FIRST_VERSION_WITH_TOPIC_IDS = 10
NO_OFFSET = -1

RequestedTopic: TypeAlias = tuple[Values, str | None, Iterable[int]]
"""The fields that identify the topic in the response, its name (None if its id is unknown), and partitions."""


async def handle(groups: GroupService, metadata: MetadataLog, request: Request) -> Values:
    message = request.message
    version = request.api_version
    if version >= FIRST_VERSION_WITH_MANY_GROUPS:
        return {"groups": [await _group(groups, metadata, request, group) for group in message.groups]}
    fetched = await _group(groups, metadata, request, message)
    del fetched["group_id"]
    if fetched["error_code"] is not ErrorCode.none and version < FIRST_VERSION_WITH_TOP_LEVEL_ERROR:
        return _failed_topics(message.topics, fetched["error_code"])
    return fetched


async def _group(groups: GroupService, metadata: MetadataLog, request: Request, group: Any) -> Values:
    """Return one group's offsets. `group` is a group of the request, or the request itself before version 8."""
    access = request.access
    if not access.allows(Operation.DESCRIBE, ResourceType.GROUP, group.group_id):
        return {"group_id": group.group_id, "error_code": ErrorCode.group_authorization_failed, "topics": []}
    requires_stable = getattr(request.message, "require_stable", False)
    refused: set[str] = set()
    topics: list[RequestedTopic] = []
    partitions: list[TopicPartition] | None = None
    if group.topics is not None:
        topics = [(topic_key(topic), _name(metadata.image, topic), topic.partition_indexes) for topic in group.topics]
        names = {name for _, name, _ in topics if name is not None}
        refused = {name for name in names if not access.allows(Operation.DESCRIBE, ResourceType.TOPIC, name)}
        partitions = [
            (name, index)
            for _, name, indexes in topics
            if name is not None and name not in refused
            for index in indexes
        ]
    member = getattr(group, "member_id", None), getattr(group, "member_epoch", -1)
    error, committed = await groups.committed(group.group_id, partitions, *member)
    if error is not ErrorCode.none:
        return {"group_id": group.group_id, "error_code": error, "topics": []}
    unstable = groups.unstable_partitions(group.group_id) if requires_stable else set()
    if group.topics is None:
        topics = [
            topic
            for topic in _all_topics(metadata.image, request.api_version, committed)
            if topic[1] is not None and access.sees(ResourceType.TOPIC, topic[1])
        ]
    return {
        "group_id": group.group_id,
        "error_code": ErrorCode.none,
        "topics": [
            {
                **key,
                "partitions": [
                    _failed(index, ErrorCode.unknown_topic_id)
                    if name is None
                    else _failed(index, ErrorCode.topic_authorization_failed)
                    if name in refused
                    else _failed(index, ErrorCode.unstable_offset_commit)
                    if (name, index) in unstable
                    else _partition(index, committed.get((name, index)))
                    for index in indexes
                ],
            }
            for key, name, indexes in topics
        ],
    }


def _all_topics(image: ClusterImage, version: int, committed: Iterable[TopicPartition]) -> list[RequestedTopic]:
    indexes: dict[str, list[int]] = {}
    for name, index in sorted(committed):
        indexes.setdefault(name, []).append(index)
    if version < FIRST_VERSION_WITH_TOPIC_IDS:
        return [({"name": name}, name, indexes[name]) for name in indexes]
    topics = [image.topic(name) for name in indexes]
    return [({"topic_id": topic.id}, topic.name, indexes[topic.name]) for topic in topics if topic is not None]


def _name(image: ClusterImage, entry: Any) -> str | None:
    """Return the topic's name, even if there is no such topic any more, or None for an unknown id."""
    topic = find_topic(image, entry)
    return getattr(entry, "name", None) if topic is None else topic.name


def _partition(index: int, committed: CommittedOffset | None) -> Values:
    if committed is None:
        return _failed(index, ErrorCode.none)
    return {
        "partition_index": index,
        "committed_offset": committed.offset,
        "committed_leader_epoch": committed.leader_epoch,
        "metadata": committed.metadata,
        "error_code": ErrorCode.none,
    }


def _failed(index: int, error: ErrorCode) -> Values:
    return {
        "partition_index": index,
        "committed_offset": NO_OFFSET,
        "committed_leader_epoch": NO_OFFSET,
        "metadata": "",
        "error_code": error,
    }


def _failed_topics(topics: Iterable[Any], error: ErrorCode) -> Values:
    return {
        "error_code": error,
        "topics": [
            {**topic_key(topic), "partitions": [_failed(index, error) for index in topic.partition_indexes]}
            for topic in topics
        ],
    }


def on_error(request: Request, code: ErrorCode) -> Values:
    message = request.message
    if request.api_version < FIRST_VERSION_WITH_TOP_LEVEL_ERROR:
        return _failed_topics(message.topics, code)
    if request.api_version < FIRST_VERSION_WITH_MANY_GROUPS:
        return {"error_code": code, "topics": []}
    return {"groups": [{"group_id": group.group_id, "error_code": code, "topics": []} for group in message.groups]}


API = Api(ApiKey.OFFSET_FETCH, (1, 10), on_error=on_error)
