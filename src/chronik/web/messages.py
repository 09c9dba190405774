"""/api/topics/NAME/messages: records by offset or time, decoded for display. Every size here is bounded.

If this node leads the partition, it reads its own log; otherwise it queries the leader. If the leader does not answer,
this node shows its own replica up to the high watermark that it knows, and `source` is `replica`.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import msgspec

from chronik.web import schemas
from chronik.web.answers import Number, Parameters, Refusal
from chronik.web.log_reader import OWN, PARTITION, LocalLog, LogReader, forward_to_leader, leader_log
from chronik.web.node_view import NodeView, led_here, require_other_leader, require_partition, require_topic
from chronik.web.payload import decode
from chronik.web.rights import require_readable

OFFSET = Number("offset", description="Not together with time.")
TIME = Number("time", description="Milliseconds; not together with offset.")
LIMIT = Number("limit", 1, 500, default=50)
PARAMETERS = (PARTITION, OFFSET, TIME, LIMIT, OWN)
CONTENT_BYTES_MAX = 16 * 1024
"""The limit for a key or value in a list. A single message (limit=1) is shown up to `SINGLE_BYTES_MAX`."""
SINGLE_BYTES_MAX = 1024 * 1024
PAGE_BYTES_MAX = 2 * 1024 * 1024
READS_MAX = 16
"""Reads per page, of up to 1 MiB each. A log full of control batches must not keep a node busy."""


class PageRequest(NamedTuple):
    """Start at an offset or at a time. If both are None, return the newest records."""

    topic: str
    partition: int
    offset: int | None
    time_ms: int | None
    limit: int


async def messages_page(node: NodeView, parameters: Parameters) -> bytes:
    """Return one page, encoded."""
    require_readable(parameters.access, parameters.name)
    topic = require_topic(node, parameters.name)
    partition = require_partition(topic, parameters.number(PARTITION))
    parameters.reject_both(OFFSET, TIME)
    # Validate `own` even if it is not used, so that all nodes reject the same values.
    is_own = parameters.flag(OWN)
    name, index = topic.name, partition.partition
    request = PageRequest(name, index, parameters.optional(OFFSET), parameters.optional(TIME), parameters.number(LIMIT))
    hosted = led_here(node, name, index)
    if hosted is not None:
        return await _read_page(node, LocalLog(node, hosted), request, node.node_id, "leader")
    try:
        leader = require_other_leader(node, topic, partition, is_own)
        forwarded = await forward_to_leader(node, leader, parameters, f"/api/topics/{name}/messages")
        if forwarded is not None:
            return forwarded
        async with leader_log(node, leader, name, index) as log:
            return await _read_page(node, log, request, leader.id, "leader")
    except Refusal as refusal:
        replica = node.partition(name, index)
        if replica is None or refusal.status != 503 or is_own:
            raise
        return await _read_page(node, LocalLog(node, replica), request, node.node_id, "replica")


async def _read_page(
    node: NodeView, log: LogReader, request: PageRequest, node_id: int, source: Literal["leader", "replica"]
) -> bytes:
    start, end = await log.bounds()
    offset: int | None = request.offset if request.time_ms is None else await log.offset_at(request.time_ms)
    if offset is None:
        offset = end if request.time_ms is not None else end - request.limit
    offset = max(start, offset)
    messages: list[schemas.Message] = []
    size_bytes = 0
    for _ in range(READS_MAX):
        if offset >= end or len(messages) >= request.limit or size_bytes >= PAGE_BYTES_MAX:
            break
        data = await log.read(offset)
        count_max, bytes_max = request.limit - len(messages), PAGE_BYTES_MAX - size_bytes
        content_bytes_max = SINGLE_BYTES_MAX if request.limit == 1 else CONTENT_BYTES_MAX
        decoded = await node.run_blocking(partial(decode, data, offset, count_max, bytes_max, content_bytes_max))
        if decoded.next_offset is None:
            break
        messages += decoded.messages
        size_bytes += decoded.size_bytes
        offset = decoded.next_offset
    following = offset if offset < end else None
    page = schemas.Messages(request.topic, request.partition, node_id, source, start, end, following, messages)
    return await node.run_blocking(lambda: msgspec.json.encode(page))
