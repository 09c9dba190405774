"""ShareGroupDescribe (key 77), version 1.

Behaviour
- Returns the epochs and the state of each share group (KIP-932), and its members with their assignment. Only what is
  committed is shown.
- A group of another type, or one that does not exist, is GROUP_ID_NOT_FOUND.
- TOPIC_AUTHORIZATION_FAILED, without members, if the client may not describe a topic that a member uses.
Versions: only 1.
"""

from chronik.node.admin.responses import refuse_entries
from chronik.node.apis.consumer_group_describe import describe_groups
from chronik.node.coordinators.group_service import GroupService
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey


async def handle(groups: GroupService, request: Request) -> Values:
    return await describe_groups(groups.describe_share_group, request)


API = Api(
    ApiKey.SHARE_GROUP_DESCRIBE,
    (1, 1),
    on_error=refuse_entries("groups", lambda request: ({"group_id": each} for each in request.message.group_ids)),
)
