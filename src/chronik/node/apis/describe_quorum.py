"""DescribeQuorum (key 55), versions 0-2.

Behaviour
- Describes the Raft group of the metadata as partition 0 of `__cluster_metadata`: voters, and learners as observers.
  Any other partition is UNKNOWN_TOPIC_OR_PARTITION.
- Offsets are Raft's indexes plus one: the log end is after the last entry, the high watermark after the last committed
  one. A replica that has not answered this leader has -1.
- A directory id is the id of the member's store.
- The listener of a voter is its address for other nodes.
Versions: 1 times of fetches, 2 directory ids, listeners and error messages.
Answered by the controller; other nodes forward the request to it.
"""

from __future__ import annotations

from typing import Any

from chronik.client.endpoint import Endpoint, EndpointError
from chronik.node.membership.raft_service import RaftService
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, Request, Values
from chronik.raft.membership import Member
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

METADATA_TOPIC = "__cluster_metadata"
LISTENER = "INTERNAL"
UNKNOWN = -1


async def handle(runtime: Runtime, raft: RaftService, request: Request) -> Values:
    if not raft.node.is_leader:
        # It has lost the leadership since the request was forwarded.
        raise KafkaError(ErrorCode.not_leader_or_follower, "this node is not the controller any more")
    topics = request.message.topics
    voters = raft.node.membership.voters
    return {
        "topics": [
            {
                "topic_name": topic.topic_name,
                "partitions": [_partition(runtime, raft, topic.topic_name, index) for index in topic.partitions],
            }
            for topic in topics
        ],
        "nodes": [{"node_id": voter.node_id, "listeners": _listeners(voter)} for voter in voters],
    }


def _partition(runtime: Runtime, raft: RaftService, topic: str, requested: Any) -> Values:
    index = requested.partition_index
    if (topic, index) != (METADATA_TOPIC, 0):
        return _failed(index, ErrorCode.unknown_topic_or_partition)
    node = raft.node
    now_ms, wall_ms = raft.now(), runtime.env.wall_ms()

    def wall(at_ms: int | None) -> int:
        return UNKNOWN if at_ms is None else wall_ms - (now_ms - at_ms)

    def state(member: Member) -> Values:
        progress = node.progress.get(member.node_id)
        if member.node_id == node.node_id or progress is None:
            end, fetched, caught_up = node.last_index + 1, UNKNOWN, wall_ms
        else:
            end = UNKNOWN if progress.acked_ms is None else progress.match_index + 1
            fetched, caught_up = wall(progress.acked_ms), wall(progress.caught_up_ms)
        return {
            "replica_id": member.node_id,
            "replica_directory_id": member.store,
            "log_end_offset": end,
            "last_fetch_timestamp": fetched,
            "last_caught_up_timestamp": caught_up,
        }

    members = node.membership.members
    return {
        "partition_index": index,
        "error_code": ErrorCode.none,
        "leader_id": node.node_id,
        "leader_epoch": node.term,
        "high_watermark": node.commit_index + 1,
        "current_voters": [state(member) for member in members if member.is_voter],
        "observers": [state(member) for member in members if not member.is_voter],
    }


def _listeners(member: Member) -> list[Values]:
    try:
        host, port = Endpoint.parse(member.address)
    except EndpointError:
        return []
    return [{"name": LISTENER, "host": host, "port": port}]


def _failed(index: int, code: ErrorCode) -> Values:
    return {
        "partition_index": index,
        "error_code": code,
        "leader_id": UNKNOWN,
        "leader_epoch": UNKNOWN,
        "high_watermark": UNKNOWN,
    }


def on_error(request: Request, code: ErrorCode) -> Values:
    return {"error_code": code, "topics": [], "nodes": []}


API = Api(ApiKey.DESCRIBE_QUORUM, (0, 2), on_error=on_error, on_controller=True)
