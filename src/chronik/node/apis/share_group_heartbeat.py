"""ShareGroupHeartbeat (key 76), version 1.

Behaviour
- A member of a share group (KIP-932) joins with epoch 0 and its own member id, and leaves with -1. Otherwise it reports
  that it is alive. Null means unchanged.
- The response has the assignment if it has changed, or if the request has the subscription. Members share partitions:
  a new assignment takes effect at once. A partition is assigned once its state exists at the share coordinator; the
  answer to a member that joins waits up to 1 s for that.
- Answered when the change is committed to `__consumer_offsets`. Requests during a write share the next one.
- FENCED_MEMBER_EPOCH for another epoch, except the one before: then a response was lost. UNKNOWN_MEMBER_ID after the
  session ended, GROUP_MAX_SIZE_REACHED for a new member of a full group. A group of another type is
  GROUP_ID_NOT_FOUND.
Versions: only 1; 0 was an early version of Kafka 4.0.
"""

from chronik.authorization.acls import Operation, ResourceType
from chronik.groups.share_member import ShareHeartbeat
from chronik.node.coordinators.group_service import GroupService
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode


async def handle(groups: GroupService, request: Request) -> Values:
    message, access = request.message, request.access
    access.require(Operation.READ, ResourceType.GROUP, message.group_id)
    names = message.subscribed_topic_names
    for name in names or ():
        access.require(Operation.DESCRIBE, ResourceType.TOPIC, name)
    return await groups.share_heartbeat(
        ShareHeartbeat(
            group_id=message.group_id,
            member_id=message.member_id,
            epoch=message.member_epoch,
            client_id=request.client_id or "",
            client_host=f"/{request.client_host}",
            rack=message.rack_id,
            topics=None if names is None else tuple(names),
        )
    )


def on_error(request: Request, code: ErrorCode) -> Values:
    return {"error_code": code, "member_id": request.message.member_id}


API = Api(ApiKey.SHARE_GROUP_HEARTBEAT, (1, 1), on_error=on_error)
