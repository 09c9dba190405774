"""A lane: what one connection sends to one partition while another node leads it, kept in order. See `forwarding`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple
from uuid import UUID

from chronik.metadata.image import NO_LEADER, TopicImage
from chronik.node.replicas.partition_waits import Waiter
from chronik.node.serving.connection import Connection
from chronik.storage.producers import is_after
from chronik.wire.batch import HEADER_BYTES, BatchHeader, read_batch_header
from chronik.wire.produce import ProducePartitionResponse

BROKEN_S = 1.0
"""So long after a failure a batch may come that its sender sent before it knew of the failure."""


class ForwardedRequest(NamedTuple):
    """A produce request of which batches are forwarded. Those for one leader travel together."""

    connection: Connection
    acks: int
    timeout_ms: int


class ForwardedBatch:
    """One batch on its way. Invariant: once `is_over`, its request has its outcome, and nothing more of it is sent."""

    __slots__ = (
        "_on_timeout",
        "append_here",
        "deadline_s",
        "header",
        "is_over",
        "is_sent",
        "lane",
        "leader",
        "number",
        "records",
        "request",
        "response",
        "topic",
        "waiter",
    )

    def __init__(
        self,
        request: ForwardedRequest,
        topic: TopicImage,
        response: ProducePartitionResponse,
        records: memoryview,
        append_here: Callable[[memoryview], None],
        waiter: Waiter,
    ) -> None:
        """`waiter` is called once, with `response` filled or with the error.

        `append_here` appends to this node's log, if this node has come to lead: it calls the waiter then, and what it
        raises is the outcome.
        """
        self.request = request
        self.topic = topic
        self.response = response
        # Of its own: the connection's buffer is used again.
        self.records = memoryview(bytearray(records))
        self.header: BatchHeader | None = read_batch_header(self.records) if len(records) >= HEADER_BYTES else None
        self.append_here = append_here
        self.waiter = waiter
        self.leader = NO_LEADER
        self.is_sent = False
        self.is_over = False

    @property
    def key(self) -> tuple[UUID, int]:
        return self.topic.id, self.response.partition

    def enter(self, lane: Lane, number: int, deadline_s: float, on_timeout: Callable[[ForwardedBatch], None]) -> None:
        """Take its place among the batches of its lane."""
        self.lane = lane
        self.number = number
        self.deadline_s = deadline_s
        self._on_timeout = on_timeout

    def deadline_passed(self) -> None:
        self._on_timeout(self)


class Lane:
    """The batches of one connection for one partition.

    Invariant: those that are not over were routed to `leader` (`open` of them), or wait in `queue`, by their numbers.
    """

    __slots__ = ("broken", "broken_s", "is_scheduled", "key", "leader", "open", "queue", "routed", "taken", "taken_by")

    def __init__(self, key: tuple[UUID, int]) -> None:
        self.key = key
        self.leader = NO_LEADER
        self.taken_by = NO_LEADER
        """Who took the last batch that was answered: it leads, and takes those behind it too."""
        self.taken = 0
        """The largest number of a batch that was taken: one before it that was not comes too late."""
        self.routed = 0
        """The largest number of a batch that was ever on its way to a leader."""
        self.open: dict[ForwardedBatch, None] = {}
        self.queue: deque[ForwardedBatch] = deque()
        self.broken: BatchHeader | None = None
        self.broken_s = 0.0
        self.is_scheduled = False

    @property
    def is_idle(self) -> bool:
        return not self.open and not self.queue

    def has_later_open(self, batch: ForwardedBatch) -> bool:
        """Whether one that came behind it is on its way already, and may be taken: then it would be out of order."""
        # Batches come by their numbers: only one that was refused, and came back, has to look.
        return batch.number < self.routed and any(other.number > batch.number for other in self.open)

    def break_at(self, header: BatchHeader | None, now_s: float) -> None:
        """This batch failed: later ones must not get ahead of it. Only an idempotent producer says which these are."""
        if header is None or header.producer_id < 0:
            return
        if self.broken is None or not _is_after(header, self.broken):
            self.broken = header
            self.broken_s = now_s

    def refuses(self, header: BatchHeader | None, now_s: float) -> bool:
        """Whether a batch comes after one that failed and was not sent again."""
        failed = self.broken
        if failed is None or header is None:
            return False
        if now_s - self.broken_s <= BROKEN_S:
            if header.producer_id != failed.producer_id:
                return False
            if _is_after(header, failed):
                return True
        self.broken = None
        return False


def _is_after(header: BatchHeader, other: BatchHeader) -> bool:
    """Whether a batch of the same producer comes later than another."""
    if (header.producer_id, header.producer_epoch) != (other.producer_id, other.producer_epoch):
        return False
    return is_after(header.base_sequence, other.base_sequence)
