"""The state of shared partitions: five APIs between nodes, which differ in one call (KIP-932).

InitializeShareGroupState (83), version 0; ReadShareGroupState (84), version 0; WriteShareGroupState (85), versions 0-1;
DeleteShareGroupState (86), version 0; ReadShareGroupStateSummary (87), versions 0-1.

Behaviour
- The share coordinator of a group, topic id and partition is the leader of one partition of `__share_group_state`,
  selected by Java's hash of `group:topicId:partition`. Each answer follows from what is committed there.
- Read records the leader epoch, and earlier leaders get FENCED_LEADER_EPOCH from then on. Write fences by leader epoch
  and by state epoch (FENCED_STATE_EPOCH).
- INVALID_REQUEST: the state was never initialized, or was deleted. UNKNOWN_TOPIC_OR_PARTITION: the partition does not
  exist. NOT_COORDINATOR, COORDINATOR_LOAD_IN_PROGRESS, COORDINATOR_NOT_AVAILABLE: retry.
- A repeated Initialize or Delete succeeds. A summary of a key without state has start offset -1.
Versions: 85 and 87 version 1 carry the number of offsets whose delivery is complete (KIP-1226).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from chronik.node.admin.responses import error_values
from chronik.node.coordinators.share_coordinator import ShareCoordinatorService
from chronik.node.coordinators.share_state import summary_of
from chronik.node.serving.api import Api, Request, Values
from chronik.shares.state import InitialState, SharePartitionKey, StateBatch, WrittenState
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

Run: TypeAlias = Callable[[SharePartitionKey, Any], Awaitable[Values]]


async def initialize(service: ShareCoordinatorService, request: Request) -> Values:
    async def run(key: SharePartitionKey, values: Any) -> Values:
        return {"error_code": await service.initialize(key, InitialState(values.state_epoch, values.start_offset))}

    return await _each(request, run)


async def read(service: ShareCoordinatorService, request: Request) -> Values:
    async def run(key: SharePartitionKey, values: Any) -> Values:
        error, state = await service.read(key, values.leader_epoch)
        if state is None:
            return {"error_code": error}
        batches = [batch._asdict() for batch in state.batches]
        return {"state_epoch": state.state_epoch, "start_offset": state.start_offset, "state_batches": batches}

    return await _each(request, run)


async def write(service: ShareCoordinatorService, request: Request) -> Values:
    async def run(key: SharePartitionKey, values: Any) -> Values:
        written = WrittenState(
            values.state_epoch,
            values.leader_epoch,
            values.start_offset,
            tuple(
                StateBatch(each.first_offset, each.last_offset, each.delivery_state, each.delivery_count)
                for each in values.state_batches
            ),
            getattr(values, "delivery_complete_count", -1),
        )
        return {"error_code": await service.write(key, written)}

    return await _each(request, run)


async def delete(service: ShareCoordinatorService, request: Request) -> Values:
    async def run(key: SharePartitionKey, values: Any) -> Values:
        return {"error_code": await service.delete(key)}

    return await _each(request, run)


async def read_summary(service: ShareCoordinatorService, request: Request) -> Values:
    async def run(key: SharePartitionKey, values: Any) -> Values:
        summary = summary_of(*await service.summary(key))
        return {
            "error_code": summary.error,
            "state_epoch": summary.state_epoch,
            "leader_epoch": summary.leader_epoch,
            "start_offset": summary.start_offset,
            "delivery_complete_count": summary.delivery_complete_count,
        }

    return await _each(request, run)


async def _each(request: Request, run: Run) -> Values:
    """Run all partitions of a request at once, so that they share a write."""
    message = request.message

    async def one(topic: Any, partition: Any) -> Values:
        entry: Values = {"partition": partition.partition}
        if not message.group_id or topic.topic_id is None:
            return {**entry, "error_code": ErrorCode.invalid_request, "error_message": "no group or topic id"}
        try:
            return {
                **entry,
                **await run(SharePartitionKey(message.group_id, topic.topic_id, partition.partition), partition),
            }
        except KafkaError as error:
            return {**entry, **error_values(error)}

    return {
        "results": [
            {
                "topic_id": topic.topic_id,
                "partitions": await asyncio.gather(*(one(topic, partition) for partition in topic.partitions)),
            }
            for topic in message.topics
        ]
    }


def on_error(request: Request, code: ErrorCode) -> Values:
    return {
        "results": [
            {
                "topic_id": topic.topic_id,
                "partitions": [{"partition": each.partition, "error_code": code} for each in topic.partitions],
            }
            for topic in request.message.topics
        ]
    }


INITIALIZE = Api(ApiKey.INITIALIZE_SHARE_GROUP_STATE, (0, 0), on_error=on_error)
READ = Api(ApiKey.READ_SHARE_GROUP_STATE, (0, 0), on_error=on_error)
WRITE = Api(ApiKey.WRITE_SHARE_GROUP_STATE, (0, 1), on_error=on_error)
DELETE = Api(ApiKey.DELETE_SHARE_GROUP_STATE, (0, 0), on_error=on_error)
READ_SUMMARY = Api(ApiKey.READ_SHARE_GROUP_STATE_SUMMARY, (0, 1), on_error=on_error)
