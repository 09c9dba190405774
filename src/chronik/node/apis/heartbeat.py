"""Heartbeat (key 12), versions 0-4.

Behaviour
- Keeps a member's session alive; REBALANCE_IN_PROGRESS tells it to join again.
- ILLEGAL_GENERATION, UNKNOWN_MEMBER_ID and FENCED_INSTANCE_ID tell it that the group has gone on without it.
- While the group is being loaded the answer is no error: the session starts afresh when that is done.
Versions: 3 static members, 4 flexible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chronik.node.serving.request import Api, Request, Values
from chronik.wire.api import ApiKey

if TYPE_CHECKING:
    from chronik.node.broker import Broker


async def handle(broker: Broker, request: Request) -> Values:
    message = request.message
    instance_id = getattr(message, "group_instance_id", None)
    error = broker.groups.heartbeat(message.group_id, message.member_id, message.generation_id, instance_id)
    return {"error_code": error}


API = Api(ApiKey.HEARTBEAT, (0, 4), handle)
