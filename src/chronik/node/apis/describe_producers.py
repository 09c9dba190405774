"""DescribeProducers (key 61), version 0.

Behaviour
- Returns the producers whose state a partition's log has, with the first offset of an open transaction (-1: none).
- Every replica answers from its own log, leader or not: tools compare replicas, and ask the leader by default.
- last_timestamp is the time of the producer's last write in this log: the last batch or marker.
Not supported: -
"""

from __future__ import annotations

from typing import Any

from chronik.authorization.acls import Operation, ResourceType
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.serving.api import Api, Values
from chronik.node.serving.connection import Request
from chronik.storage.producers import ProducerState
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

NONE = -1


async def handle(host: PartitionHost, request: Request) -> Values:
    def partitions(topic: Any) -> list[Values]:
        if request.access.allows(Operation.READ, ResourceType.TOPIC, topic.name):
            return [_partition(host, topic.name, index) for index in topic.partition_indexes]
        refused = {"error_code": ErrorCode.topic_authorization_failed, "active_producers": []}
        return [{"partition_index": index, **refused} for index in topic.partition_indexes]

    return {"topics": [{"name": topic.name, "partitions": partitions(topic)} for topic in request.message.topics]}


def _partition(host: PartitionHost, topic: str, index: int) -> Values:
    values: Values = {"partition_index": index, "error_code": ErrorCode.none, "active_producers": []}
    partition = host.partitions.get((topic, index))
    if partition is not None and not partition.is_closed:
        values["active_producers"] = [_producer(id_, state) for id_, state in partition.log.producers.items()]
    elif host.image.partition(topic, index) is None:
        values["error_code"] = ErrorCode.unknown_topic_or_partition
        values["error_message"] = f"{topic}-{index} does not exist"
    else:
        values["error_code"] = ErrorCode.not_leader_or_follower
        values["error_message"] = f"this node has no replica of {topic}-{index}"
    return values


def _producer(producer_id: int, state: ProducerState) -> Values:
    return {
        "producer_id": producer_id,
        "producer_epoch": state.epoch,
        "last_sequence": state.batches[-1].last_sequence if state.batches else NONE,
        "last_timestamp": state.last_seen_ms,
        "coordinator_epoch": state.coordinator_epoch,
        "current_txn_start_offset": NONE if state.first_offset is None else state.first_offset,
    }


def on_error(request: Request, code: ErrorCode) -> Values:
    return {
        "topics": [
            {
                "name": topic.name,
                "partitions": [
                    {"partition_index": index, "error_code": code, "active_producers": []}
                    for index in topic.partition_indexes
                ],
            }
            for topic in request.message.topics
        ]
    }


API = Api(ApiKey.DESCRIBE_PRODUCERS, (0, 0), on_error=on_error)
