"""UnregisterBroker (key 64), version 0.

Behaviour
- A node leaves the cluster for good: its registration goes, and its vote, which a node that has none gets first.
- INVALID_REQUEST while any partition has a replica there: move them first (AlterPartitionReassignments).
- The node may still run; it serves nothing any more and is to be stopped. To join again it needs an empty data folder.
- Where the node is the controller, another takes over first; NOT_CONTROLLER then has the client ask again.
"""

from __future__ import annotations

from functools import partial

from chronik.node.membership.controller_service import ControllerService
from chronik.node.serving.api import Api, Handler, Values
from chronik.node.serving.connection import Request
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode


async def handle(controller: ControllerService, request: Request) -> Values:
    await controller.remove_node(request.message.broker_id)
    return {"error_code": ErrorCode.none, "error_message": None}


API = Api(ApiKey.UNREGISTER_BROKER, (0, 0), on_controller=True)


def handler(controller: ControllerService) -> Handler:
    return Handler(API, partial(handle, controller))
