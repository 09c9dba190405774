"""UnregisterBroker (key 64), version 0.

Behaviour
- Removes a node permanently: its registration, then its vote. If there is a learner, it becomes a voter first.
- INVALID_REQUEST while any partition has a replica there: move the replicas first (AlterPartitionReassignments).
- The node may still run, but serves nothing and should be stopped. To rejoin, it needs an empty data folder.
- If the node is the controller, another node takes over first; NOT_CONTROLLER then makes the client retry.
"""

from chronik.node.membership.controller_service import ControllerService
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode


async def handle(controller: ControllerService, request: Request) -> Values:
    await controller.remove_node(request.message.broker_id)
    return {"error_code": ErrorCode.none, "error_message": None}


API = Api(ApiKey.UNREGISTER_BROKER, (0, 0), on_controller=True)
