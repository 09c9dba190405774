"""DescribeShareGroupOffsets (key 90), versions 0-1.

Behaviour
- Returns the start offset of each requested partition of a share group (KIP-932), from the share coordinators; null
  topics: all that the group has state for. -1 if the group has no start offset yet: nothing was fetched so far.
- The lag is the number of records from the start offset to the high watermark that are not done; -1 if unknown.
- The group's coordinator answers. GROUP_ID_NOT_FOUND for another type of group, or none. UNKNOWN_TOPIC_OR_PARTITION
  for a partition that does not exist. Topics that the client may not describe are refused; omitted if topics is null.
Versions: 1 the lag (KIP-1226).
"""

from collections.abc import Iterable
from typing import Any

from chronik.authorization.acls import Operation, ResourceType
from chronik.node.admin.responses import error_values, refuse_entries
from chronik.node.coordinators.group_service import GroupService
from chronik.node.serving.access import Access
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError


async def handle(groups: GroupService, request: Request) -> Values:
    return {"groups": [await _group(groups, request.access, group) for group in request.message.groups]}


async def _group(groups: GroupService, access: Access, group: Any) -> Values:
    answer: Values = {"group_id": group.group_id, "topics": []}
    if not access.allows(Operation.DESCRIBE, ResourceType.GROUP, group.group_id):
        return {**answer, "error_code": ErrorCode.group_authorization_failed}
    requested: dict[str, list[int]] | None = None
    refused: list[Values] = []
    if group.topics is not None:
        requested = {}
        for topic in group.topics:
            name = str(topic.topic_name)
            if access.allows(Operation.DESCRIBE, ResourceType.TOPIC, name):
                requested[name] = list(dict.fromkeys((*requested.get(name, ()), *topic.partitions)))
            else:
                refused.append(_refused(name, topic.partitions))
    if refused and not requested:
        return {**answer, **error_values(None), "topics": refused}  # as in Kafka, whether there is such a group or not
    try:
        topics = await groups.share_offsets(group.group_id, requested)
    except KafkaError as error:
        return {**answer, **error_values(error)}
    seen = [topic for topic in topics if access.sees(ResourceType.TOPIC, topic["topic_name"])]
    return {**answer, **error_values(None), "topics": [*seen, *refused]}


def _refused(name: str, partitions: Iterable[int]) -> Values:
    error = ErrorCode.topic_authorization_failed
    return {
        "topic_name": name,
        "partitions": [{"partition_index": each, "start_offset": -1, "error_code": error} for each in partitions],
    }


API = Api(
    ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS,
    (0, 1),
    on_error=refuse_entries(
        "groups", lambda request: ({"group_id": group.group_id, "topics": []} for group in request.message.groups)
    ),
)
