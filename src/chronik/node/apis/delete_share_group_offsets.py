"""DeleteShareGroupOffsets (key 92), version 0.

Behaviour
- Deletes the state of whole topics of an empty share group (KIP-932), at the share coordinators and in the group. If
  the group subscribes to the topic again, it starts by `share.auto.offset.reset`.
- NON_EMPTY_GROUP with members; GROUP_ID_NOT_FOUND for another type of group, or none. UNKNOWN_TOPIC_OR_PARTITION for a
  topic that does not exist. A topic without state counts as deleted.
Versions: only 0.
"""

from chronik.authorization.acls import Operation, ResourceType
from chronik.node.coordinators.group_service import GroupService
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode


async def handle(groups: GroupService, metadata: MetadataLog, request: Request) -> Values:
    message, access, image = request.message, request.access, metadata.image
    access.require(Operation.DELETE, ResourceType.GROUP, message.group_id)
    names = list(dict.fromkeys(str(topic.topic_name) for topic in message.topics))
    ids = {name: topic.id for name in names if (topic := image.topic(name)) is not None}
    allowed = [name for name in names if access.allows(Operation.READ, ResourceType.TOPIC, name)]
    deleted = [name for name in allowed if name in ids]
    # Without a topic too: the errors of the group come first.
    errors = (await groups.delete_share_offsets(message.group_id, deleted))["errors"]

    def outcome(name: str) -> ErrorCode:
        if name not in allowed:
            return ErrorCode.topic_authorization_failed
        error: ErrorCode = (
            errors.get(ids[name], ErrorCode.none) if name in ids else ErrorCode.unknown_topic_or_partition
        )
        return error

    return {
        "error_code": ErrorCode.none,
        "responses": [{"topic_name": name, "topic_id": ids.get(name), "error_code": outcome(name)} for name in names],
    }


API = Api(ApiKey.DELETE_SHARE_GROUP_OFFSETS, (0, 0))
