"""/api/topics/NAME/batches: the headers of a range of batches, page by page. No record is decoded.

If this node leads the partition, it reads its own log. Otherwise it forwards the request to the leader. If the leader's
HTTP port is unreachable, it fetches the batches over the Kafka protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from chronik.node.replicas.partition import Partition
from chronik.storage.reading import HeadersResult
from chronik.web import schemas
from chronik.web.answers import INT64_MAX, Number, Parameters
from chronik.web.log_reader import OWN, PARTITION, LeaderLog, LocalLog, forward_to_leader, leader_log
from chronik.web.node_view import NodeView, led_here, require_other_leader, require_partition, require_topic
from chronik.web.rights import require_readable
from chronik.wire.batch import HEADER_BYTES, BatchHeader, read_batch_header
from chronik.wire.compression import CODECS

FROM = Number("from")
TO = Number("to")
LIMIT = Number("limit", 1, 5_000, default=1_000)
PARAMETERS = (PARTITION, FROM, TO, LIMIT, OWN)
PAGE_BYTES_MAX = 16 * 1024 * 1024
"""How many bytes one page may fetch from another node. After that the page ends, and `next` continues."""


async def batches_page(node: NodeView, parameters: Parameters) -> bytes:
    """Return one page, encoded."""
    require_readable(parameters.access, parameters.name, "batches")
    topic = require_topic(node, parameters.name)
    partition = require_partition(topic, parameters.number(PARTITION))
    first = parameters.optional(FROM) or 0
    to = parameters.optional(TO)
    to = INT64_MAX if to is None else to
    limit = parameters.number(LIMIT)
    # Validate `own` even if it is not used, so that all nodes reject the same values.
    is_own = parameters.flag(OWN)
    hosted = led_here(node, topic.name, partition.partition)
    if hosted is not None:
        return await _from_local_log(node, hosted, first, to, limit)
    leader = require_other_leader(node, topic, partition, is_own)
    forwarded = await forward_to_leader(node, leader, parameters, f"/api/topics/{topic.name}/batches")
    if forwarded is not None:
        return forwarded
    async with leader_log(node, leader, topic.name, partition.partition) as log:
        start, end = await log.bounds()
        result = await _headers_from(log, max(first, start), min(to, end), end, limit)
    return await node.run_blocking(partial(_encode, topic.name, partition.partition, leader.id, start, end, result))


async def _from_local_log(node: NodeView, partition: Partition, first: int, to: int, limit: int) -> bytes:
    log = LocalLog(node, partition)
    start, end = await log.bounds()
    page = partial(_encode, partition.topic, partition.index, node.node_id, start, end)
    first, to = max(first, start), min(to, end)
    if first >= to:
        return page(HeadersResult([], None))

    def plan() -> Callable[[], bytes]:
        job = partition.log.headers_job(first, to, end, limit)
        return lambda: page(job())

    return await log.run(plan)


async def _headers_from(log: LeaderLog, first: int, to: int, end: int, limit: int) -> HeadersResult:
    headers: list[BatchHeader] = []
    taken_bytes = 0
    while first < to:
        if len(headers) >= limit or taken_bytes >= PAGE_BYTES_MAX:
            return HeadersResult(headers, first)
        data = await log.read(first)
        fetched = [header for header in headers_in(data) if header.base_offset < to and header.last_offset < end]
        if not fetched:
            break
        taken_bytes += len(data)
        headers += fetched[: limit - len(headers)]
        first = headers[-1].next_offset
    return HeadersResult(headers, None)


def headers_in(data: memoryview) -> Iterator[BatchHeader]:
    """Yield the headers of complete batches, in order."""
    position = 0
    while len(data) - position >= HEADER_BYTES:
        header = read_batch_header(data, position)
        if not HEADER_BYTES <= header.size_bytes <= len(data) - position:
            return
        yield header
        position += header.size_bytes


def timestamp_type(header: BatchHeader) -> schemas.TimestampType:
    return "LogAppendTime" if header.log_append_time else "CreateTime"


def _encode(topic: str, partition: int, leader: int, start: int, end: int, result: HeadersResult) -> bytes:
    batches = [_batch(header) for header in result.headers]
    return msgspec.json.encode(schemas.Batches(topic, partition, leader, start, end, result.next_offset, batches))


def _batch(header: BatchHeader) -> schemas.Batch:
    codec = header.codec
    return schemas.Batch(
        header.base_offset,
        header.last_offset,
        header.record_count,
        header.size_bytes,
        header.base_timestamp,
        header.max_timestamp,
        timestamp_type(header),
        header.producer_id,
        header.producer_epoch,
        header.base_sequence,
        CODECS[codec] if codec < len(CODECS) else f"unknown ({codec})",
        header.is_control,
        header.is_transactional,
        header.partition_leader_epoch,
        header.crc,
    )
