"""OffsetForLeaderEpoch (key 23), versions 2-4.

Behaviour
- Returns where an epoch ended in this leader's log, so that a consumer with a position beyond that end learns that its
  records were truncated (KIP-320).
- Returns the largest epoch that is not newer than the requested one; an unknown epoch is (-1, -1).
Versions: 3 replica id, 4 flexible.
"""

from __future__ import annotations

from functools import partial

from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.serving.api import Api, Handler, Values
from chronik.node.serving.connection import Request
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError


async def handle(host: PartitionHost, request: Request) -> Values:
    topics = []
    for topic in request.message.topics:
        partitions = []
        for wanted in topic.partitions:
            values: Values = {"partition": wanted.partition, "error_code": ErrorCode.none}
            try:
                partition = host.require_leader(topic.topic, wanted.partition)
                partition.check_leader_epoch(wanted.current_leader_epoch)
                epoch, end_offset = partition.log.end_offset_for_epoch(wanted.leader_epoch)
                values.update(leader_epoch=epoch, end_offset=end_offset)
            except KafkaError as error:
                values["error_code"] = error.code
            partitions.append(values)
        topics.append({"topic": topic.topic, "partitions": partitions})
    return {"topics": topics}


def on_error(request: Request, code: ErrorCode) -> Values:
    return {
        "topics": [
            {
                "topic": topic.topic,
                "partitions": [{"partition": wanted.partition, "error_code": code} for wanted in topic.partitions],
            }
            for topic in request.message.topics
        ]
    }


API = Api(ApiKey.OFFSET_FOR_LEADER_EPOCH, (2, 4), on_error=on_error)


def handler(host: PartitionHost) -> Handler:
    return Handler(API, partial(handle, host))
