"""OffsetDelete (key 47), version 0.

Behaviour
- Removes offsets of a group without members, or of topics that its members do not subscribe to; subscribed topics are
  GROUP_SUBSCRIBED_TO_TOPIC. A group with members of a protocol other than "consumer" is NON_EMPTY_GROUP.
- GROUP_ID_NOT_FOUND for a group that does not exist, UNKNOWN_TOPIC_OR_PARTITION for partitions that do not exist.
Versions: only 0.
"""

from typing import Any

from chronik.authorization.acls import Operation, ResourceType
from chronik.node.admin.responses import each_partition
from chronik.node.coordinators.group_service import GroupService
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode


async def handle(groups: GroupService, metadata: MetadataLog, request: Request) -> Values:
    message = request.message
    image = metadata.image
    access = request.access
    access.require(Operation.DELETE, ResourceType.GROUP, message.group_id)
    names = {str(topic.name) for topic in message.topics}
    refused = {name for name in names if not access.allows(Operation.READ, ResourceType.TOPIC, name)}
    known = [
        (str(topic.name), int(partition.partition_index))
        for topic in message.topics
        for partition in topic.partitions
        if topic.name not in refused and image.partition(topic.name, partition.partition_index) is not None
    ]
    error, errors = await groups.delete_offsets(message.group_id, list(dict.fromkeys(known)))
    if error is not ErrorCode.none:
        return {"error_code": error, "topics": []}

    def outcome(topic: Any, entry: Any) -> Values:
        unknown = ErrorCode.unknown_topic_or_partition
        if topic.name in refused:
            unknown = ErrorCode.topic_authorization_failed
        return {"error_code": errors.get((topic.name, entry.partition_index), unknown)}

    return {"error_code": ErrorCode.none, "topics": each_partition(message.topics, outcome)}


API = Api(ApiKey.OFFSET_DELETE, (0, 0))
