"""RemoveRaftVoter (key 81), version 0.

Behaviour
- Removes a voter whose node is no longer a broker of the cluster, such as one that was unregistered while it was down.
- INVALID_REQUEST for a broker: every node of a cluster takes part in its Raft group, and the controller gives up to
  three or five of them a vote. UnregisterBroker removes both, after the replicas have moved (`chronik cluster remove`).
- VOTER_NOT_FOUND for a node without a vote or with another directory id (the id of its store), INCONSISTENT_CLUSTER_ID
  for another cluster.
Answered by the controller; other nodes forward the request to it.
"""

from chronik.node.admin.responses import error_values, require_cluster
from chronik.node.membership.controller_service import ControllerService
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey


async def handle(metadata: MetadataLog, controller: ControllerService, request: Request) -> Values:
    message = request.message
    require_cluster(metadata.image, message.cluster_id)
    await controller.remove_voter(message.voter_id, message.voter_directory_id)
    return error_values(None)


API = Api(ApiKey.REMOVE_RAFT_VOTER, (0, 0), on_controller=True)
