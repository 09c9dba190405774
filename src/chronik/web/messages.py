"""/api/topics/NAME/messages: records by offset or time, decoded for display. Every size here is bounded.

If this node leads the partition, it reads its own log; otherwise it queries the leader. If the leader does not answer,
this node shows its own replica up to the high watermark that it knows, and `source` is `replica`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from chronik.metadata.image import TopicImage
from chronik.web.answers import Parameters, Refusal
from chronik.web.batches import headers_in
from chronik.web.contents import Content, content_of
from chronik.web.leader_log import leader_log
from chronik.web.node_view import NodeView, led_here, require_other_leader, require_partition
from chronik.web.other_nodes import ask_leader
from chronik.web.own_log import OwnLog
from chronik.wire.batch import decode_batch
from chronik.wire.errors import KafkaError
from chronik.wire.records import Record

PARAMETERS = ("partition", "offset", "time", "limit", "own")
LIMIT = 50
LIMIT_MAX = 500
CONTENT_BYTES_MAX = 16 * 1024
"""The limit for a key or value in a list. A single message (limit=1) is shown up to `SINGLE_BYTES_MAX`."""
SINGLE_BYTES_MAX = 1024 * 1024
HEADER_BYTES_MAX = 1024
HEADERS_MAX = 100
PAGE_BYTES_MAX = 2 * 1024 * 1024
READS_MAX = 16
"""Reads per page, of up to 1 MiB each. A log full of control batches must not keep a node busy."""
DECOMPRESSED_BYTES_MAX = 64 * 1024 * 1024


class HeaderView(msgspec.Struct, frozen=True):
    name: str
    value: Content | None


class MessageView(msgspec.Struct, frozen=True, omit_defaults=True):
    """One record; or, if `error` is set, a batch that cannot be decoded, with what is known of it."""

    offset: int
    timestamp_ms: int
    timestamp_type: str
    key: Content | None
    value: Content | None
    headers: list[HeaderView]
    headers_left_out: int = 0
    error: str = ""


class MessagesPage(msgspec.Struct, frozen=True):
    """`source` is `leader`, or `replica` if the leader did not answer. `next` is null at the end."""

    topic: str
    partition: int
    node: int
    source: str
    log_start_offset: int
    high_watermark: int
    next: int | None
    messages: list[MessageView]


class ReadLog(Protocol):
    async def bounds(self) -> tuple[int, int]: ...

    async def offset_at(self, time_ms: int) -> int | None: ...

    async def read(self, offset: int) -> memoryview: ...


class Asked(NamedTuple):
    """Start at an offset or at a time. If both are None, return the newest records."""

    offset: int | None
    time_ms: int | None
    limit: int


class Decoded(NamedTuple):
    """`next_offset` is the offset of the first record not taken, or None if the data contains no whole batch."""

    messages: list[MessageView]
    size_bytes: int
    next_offset: int | None


async def messages_page(node: NodeView, topic: TopicImage, parameters: Parameters) -> bytes:
    """Return one page, encoded."""
    partition = require_partition(topic, parameters.number("partition", None, 0, (1 << 31) - 1))
    if parameters.has("offset") and parameters.has("time"):
        raise Refusal(400, "offset and time were both given: pass one of them")
    # Validate `own` even if it is not used, so that all nodes reject the same values.
    own = parameters.flag("own")
    asked = Asked(
        parameters.number("offset", 0) if parameters.has("offset") else None,
        parameters.number("time", 0) if parameters.has("time") else None,
        parameters.number("limit", LIMIT, 1, LIMIT_MAX),
    )
    name, index = topic.name, partition.partition
    hosted = led_here(node, name, index)
    if hosted is not None:
        return await _read_page(node, OwnLog(node, hosted), name, index, asked, node.node_id, "leader")
    try:
        leader = require_other_leader(node, topic, partition, parameters)
        told = await ask_leader(leader, parameters, f"/api/topics/{name}/messages")
        if told is not None:
            return told
        async with leader_log(leader, name, index) as log:
            return await _read_page(node, log, name, index, asked, leader.id, "leader")
    except Refusal as refusal:
        copy = node.partition(name, index)
        if copy is None or refusal.status != 503 or own:
            raise
        return await _read_page(node, OwnLog(node, copy), name, index, asked, node.node_id, "replica")


async def _read_page(
    node: NodeView, log: ReadLog, topic: str, partition: int, asked: Asked, told_by: int, source: str
) -> bytes:
    start, end = await log.bounds()
    offset: int | None = asked.offset if asked.time_ms is None else await log.offset_at(asked.time_ms)
    if offset is None:
        offset = end if asked.time_ms is not None else end - asked.limit
    offset = max(start, offset)
    messages: list[MessageView] = []
    size_bytes = 0
    for _ in range(READS_MAX):
        if offset >= end or len(messages) >= asked.limit or size_bytes >= PAGE_BYTES_MAX:
            break
        data = await log.read(offset)
        room, left = asked.limit - len(messages), PAGE_BYTES_MAX - size_bytes
        content_bytes_max = SINGLE_BYTES_MAX if asked.limit == 1 else CONTENT_BYTES_MAX
        first = offset
        found = await node.run_blocking(lambda: decode(data, first, room, left, content_bytes_max))  # noqa: B023
        if found.next_offset is None:
            break
        messages += found.messages
        size_bytes += found.size_bytes
        offset = found.next_offset
    following = offset if offset < end else None
    page = MessagesPage(topic, partition, told_by, source, start, end, following, messages)
    return await node.run_blocking(lambda: msgspec.json.encode(page))


def decode(data: memoryview, first: int, count_max: int, bytes_max: int, content_bytes_max: int) -> Decoded:
    """Decode records of whole batches from offset `first`, up to a count and an approximate size. Runs in a thread."""
    messages: list[MessageView] = []
    size_bytes = 0
    next_offset: int | None = None
    at = 0
    for header in headers_in(data):
        batch_at, at = at, at + header.size_bytes
        next_offset = max(first, header.next_offset)
        if header.is_control or header.last_offset < first:
            continue
        kind = "LogAppendTime" if header.log_append_time else "CreateTime"
        try:
            for record in decode_batch(data, batch_at, DECOMPRESSED_BYTES_MAX):
                if record.offset < first:
                    continue
                if len(messages) == count_max or size_bytes >= bytes_max:
                    return Decoded(messages, size_bytes, record.offset)
                view = _view(record, kind, content_bytes_max)
                messages.append(view)
                size_bytes += _shown_bytes(record, content_bytes_max)
        except KafkaError as error:
            if len(messages) == count_max:
                return Decoded(messages, size_bytes, max(first, header.base_offset))
            line = f"batch {header.base_offset} to {header.last_offset} cannot be decoded: {error.message}"
            offset = max(first, header.base_offset)
            messages.append(MessageView(offset, header.max_timestamp, kind, None, None, [], error=line))
    return Decoded(messages, size_bytes, next_offset)


def _view(record: Record, timestamp_type: str, bytes_max: int) -> MessageView:
    return MessageView(
        record.offset,
        record.timestamp_ms,
        timestamp_type,
        content_of(record.key, bytes_max),
        content_of(record.value, bytes_max),
        [
            # Replace invalid UTF-8 in a name, because JSON does not allow lone surrogates.
            HeaderView(name.encode("utf-8", "replace").decode()[:HEADER_BYTES_MAX], content_of(value, HEADER_BYTES_MAX))
            for name, value in record.headers[:HEADERS_MAX]
        ],
        max(0, len(record.headers) - HEADERS_MAX),
    )


def _shown_bytes(record: Record, bytes_max: int) -> int:
    headers = sum(min(HEADER_BYTES_MAX, len(value or b"")) + len(name) for name, value in record.headers[:HEADERS_MAX])
    return min(bytes_max, len(record.key or b"")) + min(bytes_max, len(record.value or b"")) + headers
