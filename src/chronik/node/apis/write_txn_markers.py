"""WriteTxnMarkers (key 27), version 1.

Behaviour
- The leader of each partition appends a commit or abort marker, and answers when it is committed. Coordinators send it
  to other nodes, and administrators to end a transaction that has lost its coordinator's state.
- A client may only abort a transaction that is open in the partition (INVALID_TXN_STATE), with the coordinator epoch of
  DescribeProducers: a higher one would fence the coordinator (TRANSACTION_COORDINATOR_FENCED).
- INVALID_PRODUCER_EPOCH if the partition knows a later epoch of the producer; TRANSACTION_COORDINATOR_FENCED if it
  knows a marker of a later coordinator.
- A marker in `__consumer_offsets` also ends the transaction's offsets. NOT_LEADER_OR_FOLLOWER while that partition
  loads.
Versions: 1 flexible.
Not supported: 0, as in Kafka 4; 2 (transaction version of the marker).
"""

import asyncio

from chronik.authorization.acls import Operation, ResourceType
from chronik.node.coordinators.markers import MarkerWriter
from chronik.node.replicas.partition import TransactionMarker
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode


async def handle(writer: MarkerWriter, request: Request) -> Values:
    if not request.access.has(Operation.ALTER, ResourceType.CLUSTER):
        request.access.require(Operation.CLUSTER_ACTION, ResourceType.CLUSTER)
    entries = [
        (
            TransactionMarker(
                marker.producer_id, marker.producer_epoch, marker.transaction_result, marker.coordinator_epoch
            ),
            topic.name,
            index,
        )
        for marker in request.message.markers
        for topic in marker.topics
        for index in topic.partition_indexes
    ]
    by_client = request.connection.peer_id is None
    errors = await asyncio.gather(*(writer.write(*entry, by_client=by_client) for entry in entries))
    by_producer: dict[int, dict[str, dict[int, ErrorCode]]] = {}
    for (marker, topic, index), error in zip(entries, errors, strict=True):
        by_producer.setdefault(marker.producer_id, {}).setdefault(topic, {})[index] = error
    return {"markers": [_result(producer_id, topics) for producer_id, topics in by_producer.items()]}


def _result(producer_id: int, topics: dict[str, dict[int, ErrorCode]]) -> Values:
    return {
        "producer_id": producer_id,
        "topics": [
            {
                "name": topic,
                "partitions": [{"partition_index": index, "error_code": error} for index, error in errors.items()],
            }
            for topic, errors in topics.items()
        ],
    }


def on_error(request: Request, code: ErrorCode) -> Values:
    return {
        "markers": [
            _result(
                marker.producer_id,
                {topic.name: dict.fromkeys(topic.partition_indexes, code) for topic in marker.topics},
            )
            for marker in request.message.markers
        ]
    }


API = Api(ApiKey.WRITE_TXN_MARKERS, (1, 1), on_error=on_error)
