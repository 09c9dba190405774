"""AddRaftVoter (key 80), versions 0-1.

Behaviour
- Gives a learner a vote in the Raft group of the metadata. It must have joined before: a node joins by itself when it
  starts with its peers' addresses, and the controller promotes learners up to three or five voters.
- Answered when the new membership is committed; REQUEST_TIMED_OUT if that takes longer than the client allows, or while
  the learner has not caught up.
- DUPLICATE_VOTER for a voter, VOTER_NOT_FOUND for a node that has not joined or has joined with another directory id
  (the id of its store), INCONSISTENT_CLUSTER_ID for another cluster.
- The listeners are ignored: a member's address is known from its handshake.
Versions: 1 `ack_when_committed`; the response always waits for the commit.
Answered by the controller; other nodes forward the request to it.
"""

import asyncio

from chronik.node.admin.responses import error_values, require_cluster
from chronik.node.membership.controller_service import ControllerService
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Request, Values
from chronik.node.serving.deadlines import bounded_wait_s
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError


async def handle(metadata: MetadataLog, controller: ControllerService, request: Request) -> Values:
    message = request.message
    require_cluster(metadata.image, message.cluster_id)
    try:
        async with asyncio.timeout(bounded_wait_s(message.timeout)):
            await controller.add_voter(message.voter_id, message.voter_directory_id)
    except TimeoutError:
        raise KafkaError(
            ErrorCode.request_timed_out, f"node {message.voter_id} has no vote yet: it may lag or not answer"
        ) from None
    return error_values(None)


API = Api(ApiKey.ADD_RAFT_VOTER, (0, 1), on_controller=True)
