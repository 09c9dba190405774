"""ListGroups (key 16), versions 0-5.

Behaviour
- The groups that this node coordinates, none while it has no lease; a client asks every node. Filters are compared
  without regard to case.
- COORDINATOR_LOAD_IN_PROGRESS while the node loads groups, since the list would not be whole.
Versions: 3 flexible, 4 states, 5 types: every group here is of type "classic".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chronik.node.serving.request import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

if TYPE_CHECKING:
    from chronik.node.broker import Broker


async def handle(broker: Broker, request: Request) -> Values:
    message = request.message
    states = [state.lower() for state in getattr(message, "states_filter", ())]
    types = [kind.lower() for kind in getattr(message, "types_filter", ())]
    groups = [
        group
        for group in broker.groups.groups()
        if (not states or group["group_state"].lower() in states) and (not types or group["group_type"] in types)
    ]
    return {"error_code": ErrorCode.none, "groups": groups}


API = Api(ApiKey.LIST_GROUPS, (0, 5), handle)
