"""LeaveGroup (key 13), versions 0-5.

Behaviour
- The members leave at once, and the group rebalances. Each member has its own error; before version 3 there is one
  member, and its error is the top-level one.
- A static member that shuts down does not send this. An administrator removes it by its instance id, with an empty
  member id.
Versions: 3 many members, 4 flexible, 5 reason (logged at debug).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from chronik.node.coordinators.group_service import GroupService
from chronik.node.serving.api import Api, Handler, Values
from chronik.node.serving.connection import Request
from chronik.observe.logging import Logger
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

FIRST_VERSION_WITH_MANY_MEMBERS = 3


class Services(NamedTuple):
    """The parts of the node that this API uses."""

    groups: GroupService
    log: Logger


async def handle(node: Services, request: Request) -> Values:
    message = request.message
    if request.api_version < FIRST_VERSION_WITH_MANY_MEMBERS:
        left = await node.groups.leave(message.group_id, [(message.member_id, None)])
        error = left["error_code"]
        return {"error_code": left["members"][0]["error_code"] if error is ErrorCode.none else error}
    for member in message.members:
        reason = getattr(member, "reason", None)
        if reason:
            node.log.bind(component="groups").debug(
                "member_leaves", group=message.group_id, member=member.member_id, reason=reason
            )
    return await node.groups.leave(
        message.group_id, [(member.member_id, member.group_instance_id) for member in message.members]
    )


API = Api(ApiKey.LEAVE_GROUP, (0, 5))


def handler(services: Services) -> Handler:
    return Handler(API, partial(handle, services))
