"""ListOffsets (key 2), versions 0-11.

Behaviour
- latest (-1) is the end that consumers see: the high watermark, or the last stable offset for read_committed; it never
  goes backwards.
- replica id -2, Kafka's debugging consumer, is answered by any replica from its own log, leader or not: latest is the
  log end, with the leader epoch of the last record. This needs no lease, because it claims no authority. `chronik topic
  recover` uses it to compare the replicas of an offline partition.
- earliest (-2) and earliest local (-4) are the log start offset; latest tiered (-5) and earliest pending upload (-6)
  are none, answered as -1.
- max timestamp (-3) returns the record's own offset, not the end of its batch.
- any other timestamp returns the first visible record that is not older, or -1 if there is none.
- for read_committed, records from the last stable offset on are not visible, whatever the timestamp.
- a leader whose watermark has not reached its epoch's start does not know the end that clients have seen. It answers
  OFFSET_NOT_AVAILABLE (KIP-207; LEADER_NOT_AVAILABLE before version 5) for latest, and for timestamps that match no
  record below its watermark.
- a leader whose lease ends before the response is sent answers NOT_LEADER_OR_FOLLOWER.
- a special timestamp that the version does not have is UNSUPPORTED_VERSION.
- version 0, which Burrow uses, returns a list of one offset or none. Timestamps are UNSUPPORTED_VERSION there: they
  referred to segments and the modification times of their files.
Versions: 1 one offset with its time, 2 isolation level, 4 leader epoch, 6 flexible, 7 max timestamp, 8 earliest local,
9 latest tiered, 10 a timeout for lookups in remote storage (not used), 11 earliest pending upload.
Not supported: tiered storage.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from chronik.authorization.acls import Operation, ResourceType
from chronik.node.replicas.partition import Partition
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, Handler, Values
from chronik.node.serving.connection import Request
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

LATEST = -1
EARLIEST = -2
MAX_TIMESTAMP = -3
EARLIEST_LOCAL = -4
LATEST_TIERED = -5
EARLIEST_PENDING_UPLOAD = -6
SPECIAL_FROM_VERSION = {
    LATEST: 0,
    EARLIEST: 0,
    MAX_TIMESTAMP: 7,
    EARLIEST_LOCAL: 8,
    LATEST_TIERED: 9,
    EARLIEST_PENDING_UPLOAD: 11,
}
UNKNOWN = -1
DEBUGGING_REPLICA = -2
READ_COMMITTED = 1
NOT_AVAILABLE_FROM_VERSION = 5
TIMES_FROM_VERSION = 1


class Services(NamedTuple):
    """The parts of the node that this API uses."""

    runtime: Runtime
    host: PartitionHost


async def handle(node: Services, request: Request) -> Values:
    topics = []
    answered: list[tuple[Values, Partition, int]] = []
    is_debugging = request.message.replica_id == DEBUGGING_REPLICA
    is_read_committed = not is_debugging and getattr(request.message, "isolation_level", 0) == READ_COMMITTED
    for topic in request.message.topics:
        partitions = []
        is_allowed = request.access.allows(Operation.DESCRIBE, ResourceType.TOPIC, topic.name)
        for requested in topic.partitions:
            values = _unknown(requested.partition_index, ErrorCode.none)
            try:
                if not is_allowed:
                    raise KafkaError(ErrorCode.topic_authorization_failed)
                _check_timestamp(requested.timestamp, request.api_version)
                partition = _hosted(node, topic.name, requested.partition_index, is_debugging)
                partition.check_leader_epoch(getattr(requested, "current_leader_epoch", -1))
                generation = partition.generation
                values.update(await _offset(node, partition, requested.timestamp, is_debugging, is_read_committed))
                answered.append((values, partition, generation))
            except KafkaError as error:
                values["error_code"] = error.code
                if error.code is ErrorCode.offset_not_available and request.api_version < NOT_AVAILABLE_FROM_VERSION:
                    values["error_code"] = ErrorCode.leader_not_available
            if request.api_version < TIMES_FROM_VERSION and values["offset"] != UNKNOWN:
                values["old_style_offsets"] = [values["offset"]][: max(0, requested.max_num_offsets)]
            partitions.append(values)
        topics.append({"name": topic.name, "partitions": partitions})
    for values, partition, generation in answered:
        # Timestamp lookups take time, in which the lease of partitions already looked up may end. A debugging consumer
        # needs no authority.
        if not is_debugging and (partition.generation != generation or not partition.leads):
            values.update(_unknown(partition.index, ErrorCode.not_leader_or_follower))
            values.pop("old_style_offsets", None)
    return {"topics": topics}


def _check_timestamp(timestamp_ms: int, version: int) -> None:
    """Raise UNSUPPORTED_VERSION for a timestamp, or a special value in place of one, that the version does not have."""
    known_from = TIMES_FROM_VERSION if timestamp_ms >= 0 else SPECIAL_FROM_VERSION.get(timestamp_ms)
    if known_from is None or version < known_from:
        raise KafkaError(ErrorCode.unsupported_version, f"version {version} does not support timestamp {timestamp_ms}")


def _hosted(node: Services, topic: str, index: int, is_debugging: bool) -> Partition:
    """Return the partition that answers: led by this node, or for a debugging consumer any open one."""
    partition = node.host.partitions.get((topic, index)) if is_debugging else None
    if partition is None or partition.is_closed:
        return node.host.require_leader(topic, index)
    return partition


def _visible_end(partition: Partition, is_read_committed: bool) -> int:
    return partition.last_stable_offset if is_read_committed else partition.visible_end_offset


async def _offset(
    node: Services, partition: Partition, timestamp_ms: int, is_debugging: bool, is_read_committed: bool
) -> Values:
    log = partition.log
    if timestamp_ms == LATEST and is_debugging:
        return {"offset": log.log_end_offset, "leader_epoch": partition.last_epoch}
    if timestamp_ms == LATEST:
        partition.check_end_is_known()
        return {"offset": _visible_end(partition, is_read_committed), "leader_epoch": partition.leader_epoch}
    if timestamp_ms in (EARLIEST, EARLIEST_LOCAL):
        start = partition.log_start_offset
        return {"offset": start, "leader_epoch": log.epoch_of(start)}
    if timestamp_ms in (LATEST_TIERED, EARLIEST_PENDING_UPLOAD):
        return {}
    generation = partition.generation
    # A truncation waits for this job.
    if not partition.jobs.begin():
        raise KafkaError(ErrorCode.not_leader_or_follower, "the log is being truncated")
    with partition.jobs.running():
        upto = _visible_end(partition, is_read_committed)
        job = log.offset_for_timestamp_job(timestamp_ms, upto) if timestamp_ms >= 0 else log.max_timestamp_job(upto)
        record = await node.runtime.run_blocking(job)
    if partition.generation != generation or not (partition.leads or is_debugging):
        raise KafkaError(ErrorCode.not_leader_or_follower, "the leader changed meanwhile")
    if record is None or record.offset >= _visible_end(partition, is_read_committed):
        partition.check_end_is_known()
        return {}
    return {"offset": record.offset, "timestamp": record.timestamp_ms, "leader_epoch": log.epoch_of(record.offset)}


def _unknown(index: int, code: ErrorCode) -> Values:
    return {
        "partition_index": index,
        "error_code": code,
        "timestamp": UNKNOWN,
        "offset": UNKNOWN,
        "leader_epoch": UNKNOWN,
    }


def on_error(request: Request, code: ErrorCode) -> Values:
    return {
        "topics": [
            {
                "name": topic.name,
                "partitions": [_unknown(partition.partition_index, code) for partition in topic.partitions],
            }
            for topic in request.message.topics
        ]
    }


API = Api(ApiKey.LIST_OFFSETS, (0, 11), on_error=on_error)


def handler(services: Services) -> Handler:
    return Handler(API, partial(handle, services))
