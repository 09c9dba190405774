"""DescribeGroups (key 15), versions 0-6.

Behaviour
- Returns state, protocol and members of each group; member metadata and assignments only while the group is stable.
- A group that does not exist is described as Dead; from version 6 with GROUP_ID_NOT_FOUND. So is a consumer group
  (KIP-848), as in Kafka: clients describe it with ConsumerGroupDescribe.
Versions: 1 throttling, 3 authorized operations, 4 static members, 5 flexible, 6 error messages.
"""

from chronik.authorization.acls import Operation, ResourceType
from chronik.groups.any_group import GroupState
from chronik.node.admin.responses import refuse_entries
from chronik.node.coordinators.group_service import GroupService
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

FIRST_VERSION_WITH_NOT_FOUND = 6


async def handle(groups: GroupService, request: Request) -> Values:
    answered = []
    for group_id in request.message.groups:
        if not request.access.allows(Operation.DESCRIBE, ResourceType.GROUP, group_id):
            answered.append({"group_id": group_id, "error_code": ErrorCode.group_authorization_failed})
            continue
        described = await groups.describe(group_id)
        is_dead = described["group_state"] == GroupState.DEAD
        if is_dead and request.api_version >= FIRST_VERSION_WITH_NOT_FOUND:
            described["error_code"] = ErrorCode.group_id_not_found
            described.setdefault("error_message", f"Group {group_id} not found.")
        elif getattr(request.message, "include_authorized_operations", False) and not is_dead:
            described["authorized_operations"] = request.access.authorized_operations(ResourceType.GROUP, group_id)
        answered.append(described)
    return {"groups": answered}


API = Api(
    ApiKey.DESCRIBE_GROUPS,
    (0, 6),
    on_error=refuse_entries("groups", lambda request: ({"group_id": group_id} for group_id in request.message.groups)),
)
