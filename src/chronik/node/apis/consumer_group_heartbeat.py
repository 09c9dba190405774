"""ConsumerGroupHeartbeat (key 68), versions 0-1.

Behaviour
- A member joins with epoch 0, leaves with -1, or with -2 if it is static and will come back. Otherwise it reports that
  it is alive, and which partitions it owns. Null, or -1 for the rebalance timeout, means unchanged.
- The coordinator computes the target assignment and moves each member towards it. A member first revokes what it must
  give up, within its rebalance timeout; only then does another member get it. The response has the assignment if it has
  changed, or if the request has all fields.
- Answered when the change is committed to `__consumer_offsets`. Requests during a write share the next one.
- FENCED_MEMBER_EPOCH for another epoch, except the one before with no other partitions than assigned: then a response
  was lost. UNKNOWN_MEMBER_ID after the session ended. After both the member gives up its partitions and joins again.
- A static member may join if the last process with its instance id has left with -2, or its session has ended; else
  UNRELEASED_INSTANCE_ID. A process that was replaced gets FENCED_INSTANCE_ID.
- An RE2 expression selects topics, as far as the member may describe them. It is resolved again when topics change.
- A classic group becomes a consumer group when the first such member joins, unless `group_consumer_migration_policy`
  forbids it (GROUP_ID_NOT_FOUND). The members of the classic protocol stay.
Versions: 1 expressions, and member ids that the client makes (KIP-1082).
"""

from datetime import timedelta

from chronik.authorization.acls import Operation, ResourceType
from chronik.groups.consumer_member import ConsumerHeartbeat
from chronik.node.coordinators.group_service import GroupService
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

FIRST_VERSION_WITH_CLIENT_IDS = 1

_MILLISECOND = timedelta(milliseconds=1)


async def handle(groups: GroupService, request: Request) -> Values:
    message, access = request.message, request.access
    access.require(Operation.READ, ResourceType.GROUP, message.group_id)
    names = message.subscribed_topic_names
    for name in names or ():
        access.require(Operation.DESCRIBE, ResourceType.TOPIC, name)
    rebalance_timeout_ms = message.rebalance_timeout // _MILLISECOND
    owned = message.topic_partitions
    return await groups.consumer_heartbeat(
        ConsumerHeartbeat(
            group_id=message.group_id,
            member_id=message.member_id,
            epoch=message.member_epoch,
            client_id=request.client_id or "",
            client_host=f"/{request.client_host}",
            instance_id=message.instance_id,
            rack=message.rack_id,
            rebalance_timeout_ms=None if rebalance_timeout_ms < 0 else rebalance_timeout_ms,
            topics=None if names is None else tuple(names),
            expression=getattr(message, "subscribed_topic_regex", None),
            assignor=message.server_assignor,
            owned=None
            if owned is None
            else frozenset((topic.topic_id, index) for topic in owned for index in topic.partitions),
            may_describe=lambda name: access.sees(ResourceType.TOPIC, name),
            member_id_required=request.api_version >= FIRST_VERSION_WITH_CLIENT_IDS,
        )
    )


def on_error(request: Request, code: ErrorCode) -> Values:
    return {"error_code": code, "member_id": request.message.member_id}


API = Api(ApiKey.CONSUMER_GROUP_HEARTBEAT, (0, 1), on_error=on_error)
