"""Group requests that several clients share: OffsetFetch and OffsetCommit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chronik.client.connection import Connection
from chronik.testing.sim.client import REQUEST_TIMEOUT_S
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

BY_NAME_AT_MOST = 9
NO_GENERATION = -1


async def committed_offsets(
    connection: Connection, group: str, topic: str, partitions: Sequence[int], *, require_stable: bool
) -> dict[int, int]:
    """Send OffsetFetch and return the committed offsets, -1 if there is none. Raises KafkaError and ClientError."""
    topics = [{"name": topic, "partition_indexes": list(partitions)}]
    values = {
        "group_id": group,
        "topics": topics,
        "groups": [{"group_id": group, "member_id": None, "member_epoch": -1, "topics": topics}],
        "require_stable": require_stable,
    }
    response = await connection.call(ApiKey.OFFSET_FETCH, values, timeout_s=REQUEST_TIMEOUT_S, at_most=BY_NAME_AT_MOST)
    answer = response.groups[0] if hasattr(response, "groups") else response
    raise_for(answer, "offset fetch")
    for result in answer.topics[0].partitions:
        raise_for(result, "offset fetch")
    return {int(result.partition_index): int(result.committed_offset) for result in answer.topics[0].partitions}


async def commit_offsets(
    connection: Connection,
    group: str,
    topic: str,
    offsets: Mapping[int, int],
    *,
    generation: int = NO_GENERATION,
    member_id: str = "",
) -> None:
    """Send OffsetCommit. Raises KafkaError and ClientError."""
    partitions = [
        {
            "partition_index": partition,
            "committed_offset": offset,
            "committed_leader_epoch": -1,
            "committed_metadata": "",
        }
        for partition, offset in offsets.items()
    ]
    values = {
        "group_id": group,
        "generation_id_or_member_epoch": generation,
        "member_id": member_id,
        "group_instance_id": None,
        "topics": [{"name": topic, "partitions": partitions}],
    }
    response = await connection.call(ApiKey.OFFSET_COMMIT, values, timeout_s=REQUEST_TIMEOUT_S, at_most=BY_NAME_AT_MOST)
    for result in response.topics[0].partitions:
        raise_for(result, "commit")


def raise_for(response: Any, what: str) -> None:
    code = ErrorCode(getattr(response, "error_code", 0))
    if code is not ErrorCode.none:
        raise KafkaError(code, what)
