"""ListGroups (key 16), versions 0-5.

Behaviour
- Returns the groups that this node coordinates, none while it has no lease; clients query every node. Filters are case
  insensitive.
- COORDINATOR_LOAD_IN_PROGRESS while the node loads groups, because the list would be incomplete.
Versions: 3 flexible, 4 states, 5 types: "classic", "consumer" (KIP-848) or "share" (KIP-932).
"""

from chronik.authorization.acls import Operation, ResourceType
from chronik.node.coordinators.group_service import GroupService
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode


async def handle(groups: GroupService, request: Request) -> Values:
    message, access = request.message, request.access
    sees_all = access.has(Operation.DESCRIBE, ResourceType.CLUSTER)
    states = [state.lower() for state in getattr(message, "states_filter", ())]
    types = [kind.lower() for kind in getattr(message, "types_filter", ())]
    listed = [
        group
        for group in groups.groups()
        if (not states or group["group_state"].lower() in states)
        and (not types or group["group_type"] in types)
        and (sees_all or access.sees(ResourceType.GROUP, group["group_id"]))
    ]
    return {"error_code": ErrorCode.none, "groups": listed}


API = Api(ApiKey.LIST_GROUPS, (0, 5))
