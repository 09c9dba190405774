"""Produce forwarding: a node that does not lead forwards the batch to the leader and returns the leader's response.

A produce *lane* holds the batches that one connection sends to one partition. They reach the log in the order in which
they arrived: they go to one leader over one connection, and after a leader change the next batches wait until the
outcome of the earlier ones is known. The node answers NOT_LEADER_OR_FOLLOWER only if the batch was certainly not
appended, and REQUEST_TIMED_OUT if the outcome is unknown. After either error, later batches of the lane fail too until
the producer retries the failed batch. Otherwise an idempotent producer's later batch could overtake an earlier one.

A batch with acks=0 has no response. It is forwarded with acks=1, and retried while it was certainly not appended. Later
batches wait until a leader accepts the first: a node that does not lead yet could refuse the first and accept the later
ones. If a leader does so to batches in flight, because its lease expired for a moment, the refused batches are lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from chronik.client.connection import Connection as PeerConnection
from chronik.client.errors import ClientError
from chronik.metadata.image import NO_LEADER, TopicImage
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.peers import Peers
from chronik.node.replicas.partition import Waiter
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.connection import Connection
from chronik.node.serving.deadlines import Deadlines
from chronik.node.serving.held_bytes import HeldBytes
from chronik.storage.producers import is_after
from chronik.storage.refusals import TEMPORARY_ERRORS
from chronik.wire.api import ApiKey
from chronik.wire.batch import HEADER_BYTES, BatchHeader, read_batch_header
from chronik.wire.compression import View
from chronik.wire.errors import ErrorCode, KafkaError, MalformedRequest
from chronik.wire.produce import (
    TOPIC_IDS_FROM,
    ProducePartitionResponse,
    ProduceRequest,
    ProduceTopic,
    produce_request_buffers,
    read_produce_response,
)

RETRY_S = 0.02
PURPOSE = "produce"
FORWARDED_VERSION = 13
CONNECT_TIMEOUT_S = 2.0
ACKS_FOR_NONE = 1
"""Used for acks=0: without a response, the leader could not report that it does not lead."""
UNANSWERED_TIMEOUT_MS = 5_000
"""The minimum time for retries of an acks=0 batch, whatever timeout its request has."""

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
"""Errors which mean that the node does not lead and has appended nothing."""

BROKEN_S = 1.0
"""For this long after a failure, batches may arrive that the producer sent before it knew of the failure."""


class ForwardedRequest(NamedTuple):
    """A produce request with forwarded batches. Batches for the same leader are sent together."""

    connection: Connection
    acks: int
    timeout_ms: int
    transactional_id: str | None = None
    version: int = FORWARDED_VERSION


@dataclass(slots=True, eq=False)
class ForwardedBatch:
    """A forwarded batch. Invariant: once `is_over`, its request has the outcome and the batch is not sent again."""

    request: ForwardedRequest
    topic: TopicImage
    response: ProducePartitionResponse
    records: View
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
        self.lane = lane
        self.number = number
        self.deadline_s = deadline_s
        self._on_timeout = on_timeout

    def deadline_passed(self) -> None:
        self._on_timeout(self)


@dataclass(slots=True, eq=False)
class Lane:
    """The batches of one connection for one partition that another node leads.

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


class Forwarding:
    """Owned by the loop. Invariant: `in_flight` has the size of all batches without an outcome."""

    def __init__(
        self, runtime: Runtime, metadata: MetadataLog, peers: Peers, host: PartitionHost, deadlines: Deadlines
    ) -> None:
        self.in_flight = HeldBytes(runtime.loop, runtime.config.forward_bytes_max)
        self.is_leaving = False
        """Set when the node is about to stop: it then redirects producers instead of forwarding."""
        self._loop = runtime.loop
        self._node_id = runtime.node_id
        self._metrics = runtime.metrics
        self._is_enabled = runtime.config.forwarding
        self._metadata = metadata
        self._peers = peers
        self._host = host
        self._deadlines = deadlines
        self._number = 0
        self._lanes: dict[Connection, dict[tuple[UUID, int], Lane]] = {}
        self._pipelines: dict[int, LeaderPipeline] = {}
        self._due: list[ForwardedBatch] = []

    # -- requests ------------------------------------------------------------------------------------------------------

    def has_lanes(self, connection: Connection) -> bool:
        return connection in self._lanes

    def is_busy(self, connection: Connection, topic_id: UUID, index: int) -> bool:
        """Whether the lane exists. Its next batch must then join it, since earlier batches decide the outcome."""
        lanes = self._lanes.get(connection)
        return lanes is not None and (topic_id, index) in lanes

    def can_forward(self, connection: Connection, topic: TopicImage, index: int, acks: int) -> bool:
        """Whether a batch that this node cannot append has a leader elsewhere, or will have one in a moment."""
        partition = topic.partition(index)
        if partition is None or connection.peer_id is not None or not self._is_enabled:
            return False
        if acks == 0:
            return True
        if partition.leader == self._node_id:
            return self._is_handing_over(topic.name, index)
        return not self.is_leaving and partition.leader != NO_LEADER

    def _is_handing_over(self, topic: str, index: int) -> bool:
        hosted = self._host.partitions.get((topic, index))
        return hosted is not None and hosted.hands_over_to != NO_LEADER

    def forward(self, batch: ForwardedBatch) -> None:
        acks, timeout_ms = batch.request.acks, batch.request.timeout_ms
        lane = self._lane(batch.request.connection, batch.key)
        timeout_ms = max(timeout_ms, UNANSWERED_TIMEOUT_MS) if acks == 0 else max(timeout_ms, 0)
        self._number += 1
        batch.enter(lane, self._number, self._loop.time() + timeout_ms / 1000, self._timed_out)
        self.in_flight.add(batch.request.connection, len(batch.records))
        self._deadlines.add(timeout_ms, batch)
        if lane.refuses(batch.header, self._loop.time()):
            self._refuse(batch, "an earlier batch failed")
            return
        lane.queue.append(batch)
        self._drain(lane)

    # -- lanes ---------------------------------------------------------------------------------------------------------

    def _lane(self, connection: Connection, key: tuple[UUID, int]) -> Lane:
        lanes = self._lanes.get(connection)
        if lanes is None:
            lanes = self._lanes[connection] = {}
            connection.when_closed(self, lambda: self._connection_closed(connection))
        lane = lanes.get(key)
        if lane is None:
            lane = lanes[key] = Lane(key)
        return lane

    def _connection_closed(self, connection: Connection) -> None:
        """Drop the connection's lanes. Its batches are still forwarded, without a response."""
        self._lanes.pop(connection, None)
        self.in_flight.forget(connection)

    def _drain(self, lane: Lane) -> None:
        """Route the queued batches in order, until one has to wait."""
        while lane.queue:
            leader = self._leader(lane.key)
            if lane.open and leader != lane.leader:
                # Batches in flight to another leader need an outcome first.
                return
            batch = lane.queue[0]
            if leader == self._node_id:
                lane.queue.popleft()
                self._append_here(batch)
                if lane.queue and lane.queue[0] is batch:
                    return
            elif leader != NO_LEADER:
                if batch.request.acks == 0 and lane.open and (lane.accepted_by != leader or lane.has_later_open(batch)):
                    return
                lane.queue.popleft()
                lane.leader = batch.leader = leader
                lane.routed = max(lane.routed, batch.number)
                lane.open[batch] = None
                self._send_soon(batch)
            elif batch.request.acks == 0:
                self._drain_later(lane)
                return
            else:
                lane.queue.popleft()
                self._refuse(batch, "the partition has no leader")

    def _leader(self, key: tuple[UUID, int]) -> int:
        topic = self._metadata.image.topic_by_id(key[0])
        partition = None if topic is None else topic.partition(key[1])
        return NO_LEADER if partition is None else partition.leader

    def _append_here(self, batch: ForwardedBatch) -> None:
        try:
            batch.append_here(batch.records)
        except KafkaError as error:
            if error.code not in NOT_APPENDED:
                self._failed(batch, error)
            elif batch.request.acks == 0 or self._is_handing_over(batch.topic.name, batch.response.partition):
                self._requeue(batch)
            else:
                self._refuse(batch, error.message)
            return
        self._release_batch(batch)

    def _drain_later(self, lane: Lane) -> None:
        if not lane.is_scheduled:
            lane.is_scheduled = True
            self._loop.call_later(RETRY_S, self._drain_scheduled, lane)

    def _drain_scheduled(self, lane: Lane) -> None:
        lane.is_scheduled = False
        self._drain(lane)

    def _requeue(self, batch: ForwardedBatch) -> None:
        """Put a batch that was certainly not appended back into the queue, at its place, for a retry."""
        lane = batch.lane
        if batch.number < lane.accepted:
            self._overtaken(batch)
            return
        lane.open.pop(batch, None)
        lane.accepted_by = NO_LEADER
        batch.is_sent = False
        at = next((at for at, other in enumerate(lane.queue) if other.number > batch.number), len(lane.queue))
        lane.queue.insert(at, batch)
        self._drain_later(lane)

    def _accepted(self, batch: ForwardedBatch) -> None:
        """A leader has appended or rejected the batch: no earlier batch of the lane may be appended any more."""
        lane = batch.lane
        lane.accepted_by = batch.leader
        lane.accepted = max(lane.accepted, batch.number)
        while lane.queue and lane.queue[0].number < batch.number:
            self._overtaken(lane.queue[0])

    def _overtaken(self, batch: ForwardedBatch) -> None:
        """Fail a batch after a later one was appended. With acks=0 it is lost, and the error closes the connection."""
        self._metrics.rejected(batch.topic.name, batch.response.partition)
        self._finish(batch, KafkaError(ErrorCode.not_leader_or_follower, "the leader accepted a later batch"))

    # -- sends and responses -------------------------------------------------------------------------------------------

    def _send_soon(self, batch: ForwardedBatch) -> None:
        if not self._due:
            self._loop.call_soon(self._send_due)
        self._due.append(batch)

    def _send_due(self) -> None:
        due, self._due = self._due, []
        groups: dict[tuple[int, int], list[ForwardedBatch]] = {}
        for batch in due:
            groups.setdefault((batch.leader, id(batch.request)), []).append(batch)
        for (leader, _), batches in groups.items():
            self._metrics.produce_forwarded += 1
            pipeline = self._pipelines.get(leader)
            if pipeline is None:
                pipeline = self._pipelines[leader] = LeaderPipeline(self._loop, self._peers, self, leader)
            pipeline.send(batches)

    def answered(self, batch: ForwardedBatch, answer: ProducePartitionResponse) -> None:
        if batch.is_over:
            return
        if answer.error_code in NOT_APPENDED:
            if batch.request.acks == 0:
                self._requeue(batch)
            else:
                self._refuse(batch, f"node {batch.leader} no longer leads the partition")
            return
        response = batch.response
        self._accepted(batch)
        if answer.error_code:
            errors = [(number, reason or "") for number, reason in answer.record_errors]
            self._failed(batch, KafkaError(ErrorCode(answer.error_code), answer.error_message or "", errors))
            return
        response.base_offset = answer.base_offset
        response.log_append_time_ms = answer.log_append_time_ms
        response.log_start_offset = answer.log_start_offset
        self._finish(batch, None)

    def not_sent(self, batch: ForwardedBatch, reason: str) -> None:
        """The batch was not sent: the leader could not be reached."""
        if batch.is_over:
            return
        if batch.request.acks == 0:
            self._requeue(batch)
        else:
            self._refuse(batch, reason)

    def in_doubt(self, batch: ForwardedBatch, reason: str) -> None:
        """The batch was sent but not answered: it may or may not be appended."""
        if not batch.is_over:
            self._break(batch)
            self._finish(batch, KafkaError(ErrorCode.request_timed_out, f"the outcome is unknown: {reason}"))

    def _timed_out(self, batch: ForwardedBatch) -> None:
        if batch.is_sent:
            self.in_doubt(batch, "the leader did not answer within the request's timeout")
        else:
            self._refuse(batch, "the leader was not reached within the request's timeout")

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def _refuse(self, batch: ForwardedBatch, reason: str) -> None:
        """Fail a batch that was certainly not appended: the producer may send it elsewhere."""
        self._break(batch)
        self._metrics.rejected(batch.topic.name, batch.response.partition)
        self._finish(batch, KafkaError(ErrorCode.not_leader_or_follower, reason))

    def _failed(self, batch: ForwardedBatch, error: KafkaError) -> None:
        if error.code in TEMPORARY_ERRORS:
            self._break(batch)
        self._finish(batch, error)

    def _break(self, batch: ForwardedBatch) -> None:
        """Fail the unsent batches after a failed one, so that they do not overtake it."""
        if batch.request.acks == 0:
            return
        lane = batch.lane
        lane.break_at(batch.header, self._loop.time())
        for other in [*lane.open, *lane.queue]:
            if other.number > batch.number and not other.is_sent and not other.is_over:
                self._metrics.rejected(other.topic.name, other.response.partition)
                self._finish(other, KafkaError(ErrorCode.not_leader_or_follower, "an earlier batch failed"))

    def _finish(self, batch: ForwardedBatch, error: KafkaError | None) -> None:
        self._release_batch(batch)
        batch.waiter(error)

    def _release_batch(self, batch: ForwardedBatch) -> None:
        if batch.is_over:
            return
        batch.is_over = True
        lane = batch.lane
        lane.open.pop(batch, None)
        if batch in lane.queue:
            lane.queue.remove(batch)
        self.in_flight.remove(len(batch.records))
        batch.records = memoryview(b"")
        if lane.queue:
            self._schedule_drain(lane)
        elif lane.is_idle and lane.broken is None:
            lanes = self._lanes.get(batch.request.connection)
            if lanes is not None:
                lanes.pop(lane.key, None)

    def _schedule_drain(self, lane: Lane) -> None:
        """Drain the lane in the next loop turn: the current one may be in the middle of a drain."""
        if not lane.is_scheduled:
            lane.is_scheduled = True
            self._loop.call_soon(self._drain_scheduled, lane)


@dataclass(eq=False)
class LeaderPipeline:
    """The connection that forwards batches to one leader, with one response per request.

    Invariant: batches are sent in the order in which they were passed to `send`. Owned by the loop.
    """

    _loop: asyncio.AbstractEventLoop
    _peers: Peers
    _forwarding: Forwarding
    _leader: int
    _unsent: deque[list[ForwardedBatch]] = field(default_factory=deque)
    _connecting: asyncio.Task[None] | None = None

    def send(self, batches: list[ForwardedBatch]) -> None:
        connection = self._peers.open_connection(self._leader, PURPOSE)
        if connection is not None and self._connecting is None:
            self._write(connection, batches)
            return
        self._unsent.append(batches)
        if self._connecting is None:
            self._connecting = self._loop.create_task(self._connect(), name=f"forward-{self._leader}")

    async def _connect(self) -> None:
        reason = ""
        connection: PeerConnection | None = None
        try:
            connection = await self._peers.connection(self._leader, PURPOSE, CONNECT_TIMEOUT_S)
        except ClientError as error:
            reason = str(error)
        self._connecting = None
        unsent, self._unsent = self._unsent, deque()
        for batches in unsent:
            if connection is not None:
                self._write(connection, batches)
                continue
            for batch in batches:
                self._forwarding.not_sent(batch, reason)

    def _write(self, connection: PeerConnection, batches: list[ForwardedBatch]) -> None:
        sent = [batch for batch in batches if not batch.is_over]
        if not sent:
            return
        first = sent[0]
        left_ms = max(1, int((first.deadline_s - self._loop.time()) * 1000))
        _, acks, _, transactional_id, version = first.request
        topics: dict[UUID, ProduceTopic] = {}
        for batch in sent:
            batch.is_sent = True
            topic = topics.get(batch.topic.id)
            if topic is None:
                topic = topics[batch.topic.id] = ProduceTopic(*_named(version, batch.topic), [])
            topic.partitions.append((batch.response.partition, batch.records))
        request = ProduceRequest(transactional_id, acks or ACKS_FOR_NONE, left_ms, list(topics.values()))
        body = b"".join(produce_request_buffers(version, request))
        answer = connection.send(ApiKey.PRODUCE, version, body)
        answer.add_done_callback(lambda done: self._answered(version, sent, done))

    def _answered(self, version: int, sent: list[ForwardedBatch], answer: asyncio.Future[memoryview]) -> None:
        closed = asyncio.CancelledError("the connection to the leader was closed")
        failure: BaseException | None = closed if answer.cancelled() else answer.exception()
        if failure is None:
            try:
                response = read_produce_response(version, answer.result())
            except MalformedRequest as error:
                failure = error
        if failure is not None:
            for batch in sent:
                self._forwarding.in_doubt(batch, str(failure))
            return
        outcomes = {
            (name, topic_id, each.partition): each for name, topic_id, answers in response.topics for each in answers
        }
        for batch in sent:
            outcome = outcomes.get((*_named(version, batch.topic), batch.response.partition))
            if outcome is None:
                self._forwarding.in_doubt(batch, "the leader's response does not include the batch")
            else:
                self._forwarding.answered(batch, outcome)


def _named(version: int, topic: TopicImage) -> tuple[str | None, UUID | None]:
    """Return how a request of this version names the topic: the name, or the id from TOPIC_IDS_FROM on."""
    return (None, topic.id) if version >= TOPIC_IDS_FROM else (topic.name, None)
