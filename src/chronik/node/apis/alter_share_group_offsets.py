"""AlterShareGroupOffsets (key 91), version 0.

Behaviour
- Sets the start offsets of an empty share group (KIP-932). Records before it count as done, records from it on are
  delivered as if for the first time. A group that does not exist is created.
- The state epoch rises, so that the partition's leader drops what it knows. Answered when the share coordinators have
  the new state and the group's coordinator has noted it.
- NON_EMPTY_GROUP with members; GROUP_ID_NOT_FOUND for another type of group. UNKNOWN_TOPIC_OR_PARTITION for a partition
  that does not exist, INVALID_REQUEST for a negative offset.
Versions: only 0.
"""

from typing import Any

from chronik.authorization.acls import Operation, ResourceType
from chronik.node.coordinators.group_service import GroupService
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode


async def handle(groups: GroupService, metadata: MetadataLog, request: Request) -> Values:
    message, access, image = request.message, request.access, metadata.image
    access.require(Operation.READ, ResourceType.GROUP, message.group_id)
    names = dict.fromkeys(str(topic.topic_name) for topic in message.topics)
    allowed = {name for name in names if access.allows(Operation.READ, ResourceType.TOPIC, name)}

    def refusal(name: str, partition: Any) -> ErrorCode:
        if name not in allowed:
            return ErrorCode.topic_authorization_failed
        if image.partition(name, partition.partition_index) is None:
            return ErrorCode.unknown_topic_or_partition
        return ErrorCode.invalid_request if partition.start_offset < 0 else ErrorCode.none

    offsets = {
        (image.require_topic(topic.topic_name).id, int(partition.partition_index)): int(partition.start_offset)
        for topic in message.topics
        for partition in topic.partitions
        if refusal(topic.topic_name, partition) is ErrorCode.none
    }
    errors = (await groups.alter_share_offsets(message.group_id, offsets))["errors"] if offsets else {}

    def outcome(name: str, partition: Any) -> ErrorCode:
        error = refusal(name, partition)
        if error is not ErrorCode.none:
            return error
        found: ErrorCode = errors.get(
            (image.require_topic(name).id, partition.partition_index), ErrorCode.unknown_server_error
        )
        return found

    return {
        "error_code": ErrorCode.none,
        "responses": [
            {
                "topic_name": topic.topic_name,
                "topic_id": found.id if (found := image.topic(topic.topic_name)) is not None else None,
                "partitions": [
                    {"partition_index": each.partition_index, "error_code": outcome(topic.topic_name, each)}
                    for each in topic.partitions
                ],
            }
            for topic in message.topics
        ],
    }


API = Api(ApiKey.ALTER_SHARE_GROUP_OFFSETS, (0, 0))
