"""LeaveGroup (key 13), versions 0-5.

Behaviour
- The members leave at once, and the group rebalances. Each member has its own error; before version 3 there is one
  member, and its error is the top-level one.
- A static member that shuts down does not send this. An administrator removes it by its instance id, with an empty
  member id.
Versions: 3 many members, 4 flexible, 5 reason (logged at debug).
"""

from chronik.authorization.acls import Operation, ResourceType
from chronik.node.coordinators.group_service import GroupService
from chronik.node.serving.api import Api, Request, Values
from chronik.observe.logging import Logger
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

FIRST_VERSION_WITH_MANY_MEMBERS = 3


async def handle(groups: GroupService, log: Logger, request: Request) -> Values:
    message = request.message
    request.access.require(Operation.READ, ResourceType.GROUP, message.group_id)
    if request.api_version < FIRST_VERSION_WITH_MANY_MEMBERS:
        left = await groups.leave(message.group_id, [(message.member_id, None)])
        error = left["error_code"]
        return {"error_code": left["members"][0]["error_code"] if error is ErrorCode.none else error}
    for member in message.members:
        reason = getattr(member, "reason", None)
        if reason:
            log.debug("member_leaves", group=message.group_id, member=member.member_id, reason=reason)
    return await groups.leave(
        message.group_id, [(member.member_id, member.group_instance_id) for member in message.members]
    )


API = Api(ApiKey.LEAVE_GROUP, (0, 5))
