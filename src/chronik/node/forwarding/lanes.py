"""A produce lane: one connection's batches, in order, for one partition that another node leads. See `forwarding`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from chronik.metadata.image import NO_LEADER, TopicImage
from chronik.node.replicas.partition import Waiter
from chronik.node.serving.connection import Connection
from chronik.storage.producers import is_after
from chronik.wire.batch import HEADER_BYTES, BatchHeader, read_batch_header
from chronik.wire.produce import ProducePartitionResponse

BROKEN_S = 1.0
"""For this long after a failure, batches may arrive that the producer sent before it knew of the failure."""


class ForwardedRequest(NamedTuple):
    """A produce request with forwarded batches. Batches for the same leader are sent together."""

    connection: Connection
    acks: int
    timeout_ms: int


@dataclass(slots=True, eq=False)
class ForwardedBatch:
    """A forwarded batch. Invariant: once `is_over`, its request has the outcome and the batch is not sent again."""

    request: ForwardedRequest
    topic: TopicImage
    response: ProducePartitionResponse
    records: memoryview
    append_here: Callable[[memoryview], None]
    """Appends to this node's log if this node has become the leader. Calls the waiter, or raises the error that is the
    outcome."""
    waiter: Waiter
    """Called once, with `response` filled or with the error."""
    header: BatchHeader | None = None
    leader: int = NO_LEADER
    is_sent: bool = False
    is_over: bool = False
    lane: Lane = field(init=False)
    number: int = field(init=False)
    deadline_s: float = field(init=False)
    _on_timeout: Callable[[ForwardedBatch], None] = field(init=False)

    def __post_init__(self) -> None:
        # A copy: the connection reuses its buffer.
        self.records = memoryview(bytearray(self.records))
        if len(self.records) >= HEADER_BYTES:
            self.header = read_batch_header(self.records)

    @property
    def key(self) -> tuple[UUID, int]:
        return self.topic.id, self.response.partition

    def enter(self, lane: Lane, number: int, deadline_s: float, on_timeout: Callable[[ForwardedBatch], None]) -> None:
        """Put the batch into its lane, under its number."""
        self.lane = lane
        self.number = number
        self.deadline_s = deadline_s
        self._on_timeout = on_timeout

    def deadline_passed(self) -> None:
        self._on_timeout(self)


@dataclass(slots=True, eq=False)
class Lane:
    """The batches of one connection for one partition.

    Invariant: a batch that is not over is either in `open`, routed to `leader`, or in `queue`, sorted by number.
    """

    key: tuple[UUID, int]
    leader: int = NO_LEADER
    accepted_by: int = NO_LEADER
    """The node that accepted the last answered batch: it leads, and will accept the following ones too."""
    accepted: int = 0
    """The highest number of an accepted batch. An earlier batch that was not accepted is too late."""
    routed: int = 0
    """The highest number of a batch that was ever routed to a leader."""
    open: dict[ForwardedBatch, None] = field(default_factory=dict)
    queue: deque[ForwardedBatch] = field(default_factory=deque)
    broken: BatchHeader | None = None
    broken_s: float = 0.0
    is_scheduled: bool = False

    @property
    def is_idle(self) -> bool:
        return not self.open and not self.queue

    def has_later_open(self, batch: ForwardedBatch) -> bool:
        """Whether a later batch is already in flight and may be accepted: this batch would then be out of order."""
        # Batches are routed in number order: only a batch that was refused and requeued needs the search.
        return batch.number < self.routed and any(other.number > batch.number for other in self.open)

    def break_at(self, header: BatchHeader | None, now_s: float) -> None:
        """Remember a failed batch, so that later ones do not overtake it. Only idempotent producers send sequences."""
        if header is None or header.producer_id < 0:
            return
        if self.broken is None or not _is_after(header, self.broken):
            self.broken = header
            self.broken_s = now_s

    def refuses(self, header: BatchHeader | None, now_s: float) -> bool:
        """Whether the batch comes after a failed one that the producer has not retried."""
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
    """Whether the batch comes after `other` of the same producer and producer epoch."""
    if (header.producer_id, header.producer_epoch) != (other.producer_id, other.producer_epoch):
        return False
    return is_after(header.base_sequence, other.base_sequence)
