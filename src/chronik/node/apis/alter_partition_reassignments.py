"""AlterPartitionReassignments (key 45), versions 0-1.

Behaviour
- Each partition has its own outcome. The response is sent when the reassignment has begun. ListPartitionReassignments
  lists it until all new replicas are in sync and the old ones are removed.
- null replicas cancel a reassignment: NO_REASSIGNMENT_IN_PROGRESS if there is none. A new list replaces a running one.
- INVALID_REPLICA_ASSIGNMENT for a list that is empty, names a broker twice or one that is not registered, or would
  leave the partition without a leader.
Versions: 1 says whether the number of replicas may change (INVALID_REPLICATION_FACTOR).
Answered by the controller; other nodes forward the request to it.
"""

from chronik.metadata.elections import BrokerStates
from chronik.metadata.reassignment import Move, plan_moves
from chronik.node.admin.responses import by_topic, error_values, propose_within
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError


async def handle(metadata: MetadataLog, request: Request) -> Values:
    message = request.message
    may_change_factor = getattr(message, "allow_replication_factor_change", True)
    moves = [
        Move(topic.name, entry.partition_index, None if entry.replicas is None else tuple(entry.replicas))
        for topic in message.topics
        for entry in topic.partitions
    ]
    plan = await propose_within(
        metadata,
        message.timeout,
        lambda image: plan_moves(image, BrokerStates.of(image), moves, may_change_factor=may_change_factor),
    )
    responses: dict[str, list[Values]] = {topic.name: [] for topic in message.topics}
    responses |= by_topic(
        (move.topic, {"partition_index": move.partition, **error_values(error)})
        for move, error in zip(moves, plan.outcomes, strict=True)
    )
    return {
        **error_values(None),
        "allow_replication_factor_change": may_change_factor,
        "responses": [{"name": name, "partitions": partitions} for name, partitions in responses.items()],
    }


def on_error(request: Request, code: ErrorCode) -> Values:
    refused = error_values(KafkaError(code))
    return {
        **refused,
        "responses": [
            {
                "name": topic.name,
                "partitions": [{"partition_index": entry.partition_index, **refused} for entry in topic.partitions],
            }
            for topic in request.message.topics
        ],
    }


API = Api(ApiKey.ALTER_PARTITION_REASSIGNMENTS, (0, 1), on_error=on_error, on_controller=True)
