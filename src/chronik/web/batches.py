"""/api/topics/NAME/batches: the headers of a range of batches, page by page. No record is decoded.

If this node leads the partition, it reads its own log. Otherwise it forwards the request to the leader, with own=1 so
that the leader does not forward it again. If the leader's HTTP port is unreachable, it fetches the batches over the
Kafka protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from chronik.metadata.image import TopicImage
from chronik.node.replicas.partition import Partition
from chronik.storage.reading import HeadersResult
from chronik.web.answers import INT64_MAX, Parameters
from chronik.web.leader_log import LeaderLog, leader_log
from chronik.web.node_view import NodeView, led_here, require_other_leader, require_partition
from chronik.web.other_nodes import ask_leader
from chronik.web.own_log import OwnLog
from chronik.wire.batch import HEADER_BYTES, BatchHeader, read_batch_header
from chronik.wire.compression import CODECS

PARAMETERS = ("partition", "from", "to", "limit", "own")
LIMIT = 1_000
LIMIT_MAX = 5_000
PAGE_BYTES_MAX = 16 * 1024 * 1024
"""How many bytes one page may fetch from another node. After that the page ends, and `next` continues."""


class BatchView(msgspec.Struct, frozen=True):
    """One batch by its header. Producer id, epoch and sequence are -1 if the producer is not idempotent."""

    base_offset: int
    last_offset: int
    count: int
    size_bytes: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    timestamp_type: str
    producer_id: int
    producer_epoch: int
    base_sequence: int
    codec: str
    is_control: bool
    is_transactional: bool
    leader_epoch: int
    crc: int


class BatchesPage(msgspec.Struct, frozen=True):
    """`next` is the start offset of the next page, or null at the end of the range."""

    topic: str
    partition: int
    leader: int
    log_start_offset: int
    high_watermark: int
    next: int | None
    batches: list[BatchView]


def view_of(header: BatchHeader) -> BatchView:
    codec = header.codec
    return BatchView(
        header.base_offset,
        header.last_offset,
        header.record_count,
        header.size_bytes,
        header.base_timestamp,
        header.max_timestamp,
        "LogAppendTime" if header.log_append_time else "CreateTime",
        header.producer_id,
        header.producer_epoch,
        header.base_sequence,
        CODECS[codec] if codec < len(CODECS) else f"unknown ({codec})",
        header.is_control,
        header.is_transactional,
        header.partition_leader_epoch,
        header.crc,
    )


async def batches_page(node: NodeView, topic: TopicImage, parameters: Parameters) -> bytes:
    """Return one page, encoded."""
    partition = require_partition(topic, parameters.number("partition", None, 0, (1 << 31) - 1))
    first = parameters.number("from", 0)
    to = parameters.number("to", INT64_MAX)
    limit = parameters.number("limit", LIMIT, 1, LIMIT_MAX)
    # Validate `own` even if it is not used, so that all nodes reject the same values.
    parameters.flag("own")
    hosted = led_here(node, topic.name, partition.partition)
    if hosted is not None:
        return await _from_own_log(node, hosted, first, to, limit)
    leader = require_other_leader(node, topic, partition, parameters)
    told = await ask_leader(leader, parameters, f"/api/topics/{topic.name}/batches")
    if told is not None:
        return told
    async with leader_log(leader, topic.name, partition.partition) as log:
        start, end = await log.bounds()
        found = await _headers_from(log, max(first, start), min(to, end), end, limit)
    page = _page(topic.name, partition.partition, leader.id, start, end)
    return await node.run_blocking(lambda: page(found))


async def _from_own_log(node: NodeView, partition: Partition, first: int, to: int, limit: int) -> bytes:
    log = OwnLog(node, partition)
    start, end = await log.bounds()
    page = _page(partition.topic, partition.index, node.node_id, start, end)
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
        found = [header for header in headers_in(data) if header.base_offset < to and header.last_offset < end]
        if not found:
            break
        taken_bytes += len(data)
        headers += found[: limit - len(headers)]
        first = headers[-1].next_offset
    return HeadersResult(headers, None)


def headers_in(data: memoryview) -> Iterator[BatchHeader]:
    """Yield the headers of complete batches, in order."""
    at = 0
    while len(data) - at >= HEADER_BYTES:
        header = read_batch_header(data, at)
        if not HEADER_BYTES <= header.size_bytes <= len(data) - at:
            return
        yield header
        at += header.size_bytes


def _page(topic: str, partition: int, leader: int, start: int, end: int) -> Callable[[HeadersResult], bytes]:
    def encode(found: HeadersResult) -> bytes:
        views = [view_of(header) for header in found.headers]
        return msgspec.json.encode(BatchesPage(topic, partition, leader, start, end, found.next_offset, views))

    return encode
