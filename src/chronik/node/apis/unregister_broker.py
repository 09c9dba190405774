"""UnregisterBroker (key 64), version 0.

Behaviour
- A node leaves the cluster for good: its registration goes, and its vote, which a node that has none gets first.
- INVALID_REQUEST while any partition has a replica there: move them first (AlterPartitionReassignments).
- The node may still run; it serves nothing any more and is to be stopped. To join again it needs an empty data folder.
- Where the node is the controller, another takes over first; NOT_CONTROLLER then has the client ask again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chronik.node.serving.request import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

if TYPE_CHECKING:
    from chronik.node.broker import Broker


async def handle(broker: Broker, request: Request) -> Values:
    await broker.controller.remove_node(request.message.broker_id)
    return {"error_code": ErrorCode.none, "error_message": None}


API = Api(ApiKey.UNREGISTER_BROKER, (0, 0), handle, on_controller=True)
