"""ConsumerGroupDescribe (key 69), versions 0-1.

Behaviour
- Returns the epochs, the state and the assignor of each consumer group (KIP-848), and its members with their current
  and their target assignment. Only what is committed is shown.
- A classic group, or one that does not exist, is GROUP_ID_NOT_FOUND.
- TOPIC_AUTHORIZATION_FAILED, without members, if the client may not describe a topic that a member uses.
Versions: 1 the type of each member (0 classic, 1 consumer).
"""

from collections.abc import Awaitable, Callable
from typing import Any

from chronik.authorization.acls import Operation, ResourceType
from chronik.node.admin.responses import refuse_entries
from chronik.node.coordinators.group_service import GroupService
from chronik.node.serving.access import Access
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode


async def handle(groups: GroupService, request: Request) -> Values:
    return await describe_groups(groups.describe_consumer_group, request)


async def describe_groups(describe: Callable[[str], Awaitable[Values]], request: Request) -> Values:
    """Describe the groups of a request, as far as the client may."""
    access = request.access
    answered: list[Values] = []
    for group_id in request.message.group_ids:
        if not access.allows(Operation.DESCRIBE, ResourceType.GROUP, group_id):
            answered.append({"group_id": group_id, "error_code": ErrorCode.group_authorization_failed})
            continue
        described = await describe(group_id)
        if not all(_sees_topics(access, member) for member in described.get("members", ())):
            described = {
                "group_id": group_id,
                "error_code": ErrorCode.topic_authorization_failed,
                "error_message": "The group has described topic(s) that the client is not authorized to describe.",
            }
        if described["error_code"] is ErrorCode.none and request.message.include_authorized_operations:
            described["authorized_operations"] = access.authorized_operations(ResourceType.GROUP, group_id)
        answered.append(described)
    return {"groups": answered}


def _sees_topics(access: Access, member: dict[str, Any]) -> bool:
    names = set(member["subscribed_topic_names"])
    for assignment in (member["assignment"], member.get("target_assignment", member["assignment"])):
        names.update(topic["topic_name"] for topic in assignment["topic_partitions"])
    return all(access.sees(ResourceType.TOPIC, name) for name in sorted(names))


API = Api(
    ApiKey.CONSUMER_GROUP_DESCRIBE,
    (0, 1),
    on_error=refuse_entries("groups", lambda request: ({"group_id": each} for each in request.message.group_ids)),
)
