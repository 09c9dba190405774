"""Heartbeat (key 12), versions 0-4.

Behaviour
- Keeps a member's session alive. REBALANCE_IN_PROGRESS means that the member must rejoin.
- ILLEGAL_GENERATION, UNKNOWN_MEMBER_ID and FENCED_INSTANCE_ID mean that the group has continued without the member.
- While the group is loading, the response has no error: the session restarts when loading ends.
Versions: 3 static members, 4 flexible.
"""

from chronik.authorization.acls import Operation, ResourceType
from chronik.node.coordinators.group_service import GroupService
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey


async def handle(groups: GroupService, request: Request) -> Values:
    message = request.message
    request.access.require(Operation.READ, ResourceType.GROUP, message.group_id)
    instance_id = getattr(message, "group_instance_id", None)
    error = groups.heartbeat(message.group_id, message.member_id, message.generation_id, instance_id)
    return {"error_code": error}


API = Api(ApiKey.HEARTBEAT, (0, 4))
