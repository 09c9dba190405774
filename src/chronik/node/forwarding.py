"""Produce at a node that does not lead: the batch goes on to the leader, and its answer comes back.

A *lane* is what one connection sends to one partition. Its batches reach the log in the order in which they came: they
go to one leader over one connection, and where the leader changes, the next ones wait until the outcome of the earlier
ones is known. NOT_LEADER_OR_FOLLOWER is answered only where the batch was surely not appended. Where the outcome is
unknown, the answer is REQUEST_TIMED_OUT. After either, later batches of the lane fail too, until the one that failed is
sent again: otherwise an idempotent producer's later batch could come before its earlier one.

A batch with acks=0 has nobody to tell: it is sent on as acks=1, and again while it was surely not appended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING
from uuid import UUID

from chronik.client.connection import Connection as PeerConnection
from chronik.client.errors import ClientError
from chronik.node.connection import Connection
from chronik.wire.api import ApiKey
from chronik.wire.batch import HEADER_BYTES, BatchHeader, read_batch_header
from chronik.wire.errors import ErrorCode, KafkaError, MalformedRequest
from chronik.wire.produce import (
    ProducePartitionResponse,
    ProduceRequest,
    ProduceTopic,
    produce_request_buffers,
    read_produce_response,
)

if TYPE_CHECKING:
    import asyncio

    from chronik.node.broker import Broker
    from chronik.node.partition import Waiter

PURPOSE = "produce"
VERSION = 13
CONNECT_TIMEOUT_S = 2.0
RETRY_S = 0.05
BROKEN_S = 1.0
"""So long after a failure a batch may come that its sender sent before it knew of the failure."""

NOT_APPENDED = frozenset(
    {
        ErrorCode.not_leader_or_follower,
        ErrorCode.unknown_topic_id,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.leader_not_available,
        ErrorCode.fenced_leader_epoch,
        ErrorCode.unknown_leader_epoch,
    }
)
"""With these a node says that it does not lead, and has appended nothing."""


class ForwardedBatch:
    """One batch on its way. `respond` fills the response and wakes its request; it is called once."""

    __slots__ = (
        "_deadline_s",
        "_forwarding",
        "acks",
        "append_here",
        "connection",
        "header",
        "index",
        "is_over",
        "is_sent",
        "lane",
        "number",
        "records",
        "response",
        "timeout_ms",
        "topic",
        "topic_id",
        "waiter",
    )

    def __init__(
        self,
        forwarding: Forwarding,
        connection: Connection,
        topic: str,
        topic_id: UUID,
        response: ProducePartitionResponse,
        records: memoryview,
        acks: int,
        timeout_ms: int,
        append_here: Callable[[ForwardedBatch], None],
        waiter: Waiter,
    ) -> None:
        self._forwarding = forwarding
        self.connection = connection
        self.topic = topic
        self.topic_id = topic_id
        self.index = response.partition
        self.response = response
        # Of its own: the connection's buffer is used again.
        self.records = memoryview(bytearray(records))
        self.acks = acks
        self.timeout_ms = timeout_ms
        self.append_here = append_here
        self.waiter = waiter
        self.header: BatchHeader | None = read_batch_header(self.records) if len(records) >= HEADER_BYTES else None
        self.number = 0
        self.is_sent = False
        self.is_over = False
        self.lane: Lane

    def deadline_passed(self) -> None:
        self._forwarding.timed_out(self)


class Lane:
    """The batches of one connection for one partition, oldest first.

    Invariant: `open` counts those that were sent to `leader` and are not answered; `queue` holds those after them.
    """

    __slots__ = ("broken", "broken_s", "is_scheduled", "leader", "open", "queue")

    def __init__(self) -> None:
        self.leader = -1
        self.open = 0
        self.queue: deque[ForwardedBatch] = deque()
        self.broken: BatchHeader | None = None
        self.broken_s = 0.0
        self.is_scheduled = False

    @property
    def is_idle(self) -> bool:
        return not self.open and not self.queue

    def is_healed_by(self, header: BatchHeader | None, now_s: float) -> bool:
        """Whether a batch may go after the failure: it is the failed one again, or one that has nothing to do with it."""
        failed = self.broken
        if failed is None or now_s - self.broken_s > BROKEN_S:
            return True
        if failed.producer_id < 0 or header is None:
            return self.is_idle
        if (header.producer_id, header.producer_epoch) != (failed.producer_id, failed.producer_epoch):
            return True
        # Sequences wrap at 2^31: the later one of two lies less than half of that ahead.
        return (header.base_sequence - failed.base_sequence) % (1 << 31) in (0, *range(1 << 30, 1 << 30))


class Forwarding:
    """Owned by the loop. Invariant: `in_flight_bytes` is what all lanes hold of batches that are not answered."""

    def __init__(self, broker: Broker, bytes_max: int) -> None:
        self.in_flight_bytes = 0
        self._broker = broker
        self._loop = broker.loop
        self._bytes_max = bytes_max
        self._number = 0
        self._lanes: dict[Connection, dict[tuple[UUID, int], Lane]] = {}
        self._held: dict[Connection, None] = {}
        self._pipes: dict[int, Pipe] = {}
