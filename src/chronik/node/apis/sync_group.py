"""SyncGroup (key 14), versions 0-5.

Behaviour
- The leader sends the assignment, which is written to `__consumer_offsets` before any member is answered. Followers
  wait for it. In a stable group the current assignment is returned at once.
- REBALANCE_IN_PROGRESS if another rebalance has begun: the member must rejoin.
- A member that has joined but does not sync within the rebalance timeout is removed.
Versions: 3 static members, 4 flexible, 5 protocol type and name, which must match the generation's.
"""

from chronik.authorization.acls import Operation, ResourceType
from chronik.groups.member import SyncRequest
from chronik.node.coordinators.group_service import GroupService
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey


async def handle(groups: GroupService, request: Request) -> Values:
    message = request.message
    request.access.require(Operation.READ, ResourceType.GROUP, message.group_id)
    return await groups.sync(
        SyncRequest(
            group_id=message.group_id,
            generation=message.generation_id,
            member_id=message.member_id,
            instance_id=getattr(message, "group_instance_id", None),
            protocol_type=getattr(message, "protocol_type", None),
            protocol_name=getattr(message, "protocol_name", None),
            assignments={each.member_id: each.assignment for each in message.assignments},
        )
    )


API = Api(ApiKey.SYNC_GROUP, (0, 5))
