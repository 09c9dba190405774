"""JoinGroup (key 11), versions 0-9.

Behaviour
- Answered when the group's next generation is formed: when all members have joined, or the rebalance timeout ends. The
  first rebalance of an empty group waits `group_initial_rebalance_delay_ms` (100 ms) for members started together.
- From version 4 a dynamic member first gets MEMBER_ID_REQUIRED with its id, and joins with that id. A static member is
  added at once.
- A follower that rejoins unchanged gets the current generation. A leader that rejoins starts a rebalance, as does any
  member with changed metadata.
- A static member that restarts with the same topics keeps its place without a rebalance. Its old process, if it still
  runs, is fenced (FENCED_INSTANCE_ID). If it is the leader, the response sets skip assignment (version 9).
- The coordinator selects an assignor but reads only its topics: eager and cooperative assignors are the same to it.
Versions: 1 rebalance timeout (before: the session timeout), 4 MEMBER_ID_REQUIRED, 5 static members, 6 flexible,
7 protocol type in the response, 8 reason (logged at debug), 9 skip assignment.
"""

from datetime import timedelta

from chronik.authorization.acls import Operation, ResourceType
from chronik.groups.member import JoinRequest
from chronik.groups.rebalance import join_error
from chronik.node.coordinators.group_service import GroupService
from chronik.node.serving.api import Api, Request, Values
from chronik.observe.logging import Logger
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

FIRST_VERSION_WITH_MEMBER_ID_REQUIRED = 4
FIRST_VERSION_WITH_SKIP_ASSIGNMENT = 9

_MILLISECOND = timedelta(milliseconds=1)


async def handle(groups: GroupService, log: Logger, request: Request) -> Values:
    message = request.message
    request.access.require(Operation.READ, ResourceType.GROUP, message.group_id)
    session_timeout_ms = message.session_timeout // _MILLISECOND
    rebalance_timeout_ms = getattr(message, "rebalance_timeout", -_MILLISECOND) // _MILLISECOND
    instance_id = getattr(message, "group_instance_id", None)
    reason = getattr(message, "reason", None)
    if reason:
        log.debug("member_joins", group=message.group_id, member=message.member_id, reason=reason)
    return await groups.join(
        JoinRequest(
            group_id=message.group_id,
            member_id=message.member_id,
            instance_id=instance_id,
            client_id=request.client_id or "",
            client_host=f"/{request.client_host}",
            session_timeout_ms=session_timeout_ms,
            rebalance_timeout_ms=session_timeout_ms if rebalance_timeout_ms < 0 else rebalance_timeout_ms,
            protocol_type=message.protocol_type,
            protocols=tuple((protocol.name, protocol.metadata) for protocol in message.protocols),
            member_id_required=request.api_version >= FIRST_VERSION_WITH_MEMBER_ID_REQUIRED and instance_id is None,
            can_skip_assignment=request.api_version >= FIRST_VERSION_WITH_SKIP_ASSIGNMENT,
        )
    )


def on_error(request: Request, code: ErrorCode) -> Values:
    return join_error(code, request.message.member_id)


API = Api(ApiKey.JOIN_GROUP, (0, 9), on_error=on_error)
