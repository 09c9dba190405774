"""Follower fetches on the leader: the fetch session of each follower, and the responses it gets.

A follower keeps one fetch session (KIP-227) with each leader, over one connection. It includes a partition in a fetch
when its position there changed. The leader then responds once for that partition: with records, an error, or the
diverging epoch. Until the follower includes it again, the leader sends only its watermark and log start. So the cost of
a fetch depends on the changed partitions, not on all partitions: partitions notify their sessions of appends, and a
session always knows which of its partitions changed.

A follower may request records beyond its durable end while it syncs earlier ones. It reports its new durable end with
the next request for records, or without one (`ReceivedPosition.wants_records`): then the last request still applies.

The leader answers a fetch as soon as there are records, and within WATERMARK_DELAY_S if only a watermark rose: usually
the next records arrive in that time. A follower with a new position need not wait for its long poll to end: its next
fetch ends the previous one with an empty response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.replicas.partition import ColdOutcomes, ColdRead, Partition, is_damage, run_cold_reads
from chronik.node.replicas.replication import Replication
from chronik.node.runtime import Runtime
from chronik.node.serving.connection import Reply, Request
from chronik.node.serving.fetch_sessions import EPOCH_MAX, FINAL_EPOCH, INITIAL_EPOCH, NO_SESSION
from chronik.node.topic_settings import is_throttled
from chronik.replication.follower import EpochEnd
from chronik.replication.throttle import ReplicationThrottle
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.fetch import (
    HIGH_WATERMARK_NOT_SENT,
    FetchPartition,
    FetchPartitionResponse,
    FetchRequest,
    write_fetch_response,
)

WATERMARK_DELAY_S = 0.002
WAIT_MS_MAX = 10_000
THROTTLED_RETRY_S = 0.1
"""How often a session checks whether a throttled replica may have records, or has joined the ISR."""
RESPONSE_BYTES_MAX = 8 * 1024 * 1024

EntryKey = tuple[UUID | None, int]
Topics = dict[UUID | None, list[FetchPartitionResponse]]


@dataclass(slots=True, eq=False)
class Entry:
    """One partition in one follower's session."""

    key: EntryKey
    requested: FetchPartition
    partition: Partition | None = None
    is_open: bool = False
    """Whether records may be sent: a fetch included the partition, and it has had no response since."""
    error: ErrorCode = ErrorCode.none
    diverging: EpochEnd | None = None
    start: int = -1
    """The leader's log start, for a follower that fetches from below it."""
    reported: tuple[int, int] = (-1, -1)
    """The high watermark and log start that the follower knows."""
    rose_s: float | None = None


class WaitingReplicaFetch(NamedTuple):
    request: Request
    reply: Reply
    max_bytes: int


class ReplicaSession:
    """The fetch session of one follower.

    Invariant: each partition in `_entries` notifies this session of appends while this node leads it. `_ready` holds
    the entries that need a response at once; `_news` holds entries with only a new watermark or log start; `_throttled`
    holds entries with records that must wait for the leader's replication rate. Owned by the loop.
    """

    def __init__(self, sessions: ReplicaSessions, session_id: int, replica_id: int) -> None:
        self.id = session_id
        self.replica_id = replica_id
        self.broker_epoch = -1
        self.epoch = INITIAL_EPOCH + 1
        self._sessions = sessions
        self._loop = sessions.runtime.loop
        self._entries: dict[EntryKey, Entry] = {}
        self._by_partition: dict[Partition, Entry] = {}
        self._ready: dict[Entry, None] = {}
        self._news: dict[Entry, None] = {}
        self._throttled: dict[Entry, None] = {}
        self._throttle = sessions.throttle
        self._retry: asyncio.TimerHandle | None = None
        self._waiting: WaitingReplicaFetch | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._later: asyncio.TimerHandle | None = None
        self._is_scheduled = False
        self._is_new = True
        """Whether no response was sent yet. The first one tells the follower that it may send received positions."""

    # -- requests from the follower ------------------------------------------------------------------------------------

    def fetch(self, request: Request, reply: Reply, fetch: FetchRequest) -> None:
        self._interrupt()
        for _, topic_id, indexes in fetch.forgotten:
            for index in indexes:
                self._forget((topic_id, index))
        for topic in fetch.topics:
            for requested in topic.partitions:
                self._take_position((topic.topic_id, requested.partition), requested)
        waiting = WaitingReplicaFetch(request, reply, min(fetch.max_bytes, RESPONSE_BYTES_MAX))
        self._hold_throttled()
        if self._ready or fetch.max_wait_ms <= 0 or self.id == NO_SESSION:
            self._answer(waiting)
            return
        self._waiting = waiting
        self._timer = self._loop.call_later(min(fetch.max_wait_ms, WAIT_MS_MAX) / 1000, self._answer_waiting)
        if self._news:
            self._wake_later()

    def _take_position(self, key: EntryKey, requested: FetchPartition) -> None:
        """Take the follower's position in one partition, and allow the next response for it if it wants records."""
        entry = self._entries.get(key)
        if requested.received is not None and not requested.received.wants_records:
            self._take_report(key, entry, requested)
            return
        if entry is None:
            entry = self._entries[key] = Entry(key, requested)
        entry.requested = requested
        self._close_entry(entry)
        try:
            partition = self._find(key)
            entry.start = partition.log_start_offset
            entry.diverging = partition.replica_fetched(self.replica_id, self.broker_epoch, requested)
        except KafkaError as error:
            entry.error = error.code
            self._ready[entry] = None
            return
        if entry.partition is not partition:
            self._detach(entry)
            entry.partition = partition
            self._by_partition[partition] = entry
        partition.listen(self)
        entry.is_open = entry.diverging is None
        # Trust what the request states, not what was sent: the follower may have discarded an earlier response.
        is_stated = requested.high_watermark != HIGH_WATERMARK_NOT_SENT
        entry.reported = (requested.high_watermark if is_stated else -1, requested.log_start_offset)
        if entry.diverging is not None or partition.log_end_offset > requested.read_offset:
            self._ready[entry] = None
        elif entry.reported != (partition.high_watermark, partition.log_start_offset):
            self._news[entry] = None

    def _take_report(self, key: EntryKey, entry: Entry | None, requested: FetchPartition) -> None:
        """Take the follower's position only. The response to its last request may still be due, or on its way."""
        error, diverging = ErrorCode.none, None
        try:
            diverging = self._find(key).replica_fetched(self.replica_id, self.broker_epoch, requested)
        except KafkaError as refusal:
            error = refusal.code
        if entry is not None and (error or diverging is not None):
            self._close_entry(entry)
            entry.error, entry.diverging = error, diverging
            self._ready[entry] = None

    def _close_entry(self, entry: Entry) -> None:
        entry.is_open = False
        entry.error = ErrorCode.none
        entry.diverging = None
        self._ready.pop(entry, None)
        self._throttled.pop(entry, None)

    def _find(self, key: EntryKey) -> Partition:
        topic_id, index = key
        if topic_id is None or not self._sessions.knows(topic_id):
            raise KafkaError(ErrorCode.unknown_topic_id)
        partition = self._sessions.partition_by_id(topic_id, index)
        if partition is None:
            raise KafkaError(ErrorCode.not_leader_or_follower)
        return partition

    def _forget(self, key: EntryKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._detach(entry)
            self._ready.pop(entry, None)
            self._throttled.pop(entry, None)
            self._news.pop(entry, None)

    def _detach(self, entry: Entry) -> None:
        if entry.partition is not None:
            entry.partition.stop_listening(self)
            self._by_partition.pop(entry.partition, None)
            entry.partition = None

    def close(self) -> None:
        """End the session: no further fetch will come."""
        self._stop_waiting()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        for entry in self._entries.values():
            self._detach(entry)
        self._entries = {}
        self._ready = {}
        self._news = {}
        self._throttled = {}

    # -- notifications from partitions ---------------------------------------------------------------------------------

    def data_appended(self, partition: Partition) -> None:
        entry = self._by_partition.get(partition)
        if entry is not None and entry.is_open and entry not in self._throttled:
            self._ready[entry] = None
            self._wake()

    def watermark_rose(self, partition: Partition) -> None:
        entry = self._by_partition.get(partition)
        if entry is not None:
            if entry.rose_s is None:
                entry.rose_s = self._loop.time()
            self._news[entry] = None
            self._wake_later()

    def leader_gone(self, partition: Partition) -> None:
        entry = self._by_partition.pop(partition, None)
        if entry is not None:
            entry.partition = None
            entry.is_open = False
            entry.error = ErrorCode.not_leader_or_follower
            self._throttled.pop(entry, None)
            self._ready[entry] = None
            self._wake()

    def _wake(self) -> None:
        """Answer in the next loop turn, so that the response includes everything appended in this one."""
        if self._waiting is not None and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._answer_waiting)

    def _wake_later(self) -> None:
        if self._waiting is not None and self._later is None and not self._is_scheduled:
            self._later = self._loop.call_later(WATERMARK_DELAY_S, self._answer_waiting)

    # -- throttled replicas --------------------------------------------------------------------------------------------

    def _is_throttled(self, entry: Entry) -> bool:
        """Whether the leader's rate limits the records for this replica: it is listed, and not in sync."""
        partition = entry.partition
        if partition is None or partition.leader is None or not self._throttle.is_limited or not entry.is_open:
            return False
        # A replica that is being added to the ISR already holds back the high watermark.
        return (
            is_throttled(partition.settings.leader_throttled, partition.index, partition.node_id)
            and self.replica_id not in partition.leader.isr.maximal
        )

    def _hold_throttled(self) -> None:
        """Keep the records of throttled replicas back while the rate is exceeded."""
        if not self._throttle.is_exceeded(self._loop.time()):
            return
        for entry in [entry for entry in self._ready if self._is_throttled(entry)]:
            del self._ready[entry]
            self._throttled[entry] = None
        if self._throttled and self._retry is None:
            self._retry = self._loop.call_later(THROTTLED_RETRY_S, self._retry_throttled)

    def _retry_throttled(self) -> None:
        self._retry = None
        self._ready |= self._throttled
        self._throttled = {}
        self._hold_throttled()
        if self._ready:
            self._wake()

    # -- responses -----------------------------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        """Answer the waiting fetch with an empty response, because a newer fetch has arrived."""
        waiting = self._stop_waiting()
        if waiting is not None:
            self._send(waiting, {})

    def _stop_waiting(self) -> WaitingReplicaFetch | None:
        waiting, self._waiting = self._waiting, None
        self._is_scheduled = False
        for timer in (self._timer, self._later):
            if timer is not None:
                timer.cancel()
        self._timer = self._later = None
        return waiting

    def _answer_waiting(self) -> None:
        self._is_scheduled = False
        waiting = self._stop_waiting()
        if waiting is not None:
            self._answer(waiting)

    def _answer(self, waiting: WaitingReplicaFetch) -> None:
        """Answer with all ready partitions, up to the size limit, and every changed watermark."""
        left_bytes = waiting.max_bytes
        topics: Topics = {}
        cold: list[ColdRead] = []
        has_records = False
        self._hold_throttled()
        for entry in list(self._ready):
            if has_records and left_bytes <= 0:
                break
            response = self._describe(entry)
            is_limited = self._is_throttled(entry)
            allowed_bytes = min(left_bytes, self._throttle.bytes_max) if is_limited else left_bytes
            size_bytes = self._read(entry, response, cold, allowed_bytes, is_first=not has_records)
            if size_bytes is None:
                continue
            has_records = has_records or size_bytes > 0
            if is_limited:
                self._throttle.record(size_bytes, self._loop.time())
            left_bytes -= size_bytes
            del self._ready[entry]
            topics.setdefault(entry.key[0], []).append(response)
        news, self._news = self._news, {}
        for entry in news:
            if entry.partition is not None and entry not in self._ready:
                topics.setdefault(entry.key[0], []).append(self._describe(entry))
        if cold:
            run_cold_reads(self._sessions.runtime, cold, lambda outcomes: self._answer_cold(waiting, topics, outcomes))
        else:
            self._send(waiting, topics)
        if self.id == NO_SESSION:
            self.close()

    def _describe(self, entry: Entry) -> FetchPartitionResponse:
        partition = entry.partition
        response = FetchPartitionResponse(entry.requested.partition)
        response.log_start_offset = entry.start
        self._news.pop(entry, None)
        if partition is None:
            return response
        response.high_watermark = response.last_stable_offset = partition.high_watermark
        response.log_start_offset = partition.log_start_offset
        entry.reported = (partition.high_watermark, partition.log_start_offset)
        if entry.rose_s is not None:
            self._sessions.runtime.metrics.watermark_propagation.observe(self._loop.time() - entry.rose_s)
            entry.rose_s = None
        return response

    def _read(
        self, entry: Entry, response: FetchPartitionResponse, cold: list[ColdRead], left_bytes: int, *, is_first: bool
    ) -> int | None:
        """Fill the response; return its size in bytes, or None if the partition must wait for the next response."""
        if entry.error:
            response.error_code = entry.error
            return 0
        partition = entry.partition
        if entry.diverging is not None or partition is None:
            response.diverging_epoch = entry.diverging
            return 0
        log = partition.log
        offset, end = entry.requested.read_offset, log.log_end_offset
        max_bytes = max(0, min(entry.requested.max_bytes, left_bytes))
        try:
            read = log.read(offset, max_bytes, end, min_one_batch=is_first)
            if read is None:
                # At least one batch: an empty read cannot be told from records that are missing.
                cold.append(partition.cold_read(response, offset, max_bytes, end, min_one_batch=True))
                size_bytes = max_bytes
            else:
                response.records = read.data
                size_bytes = len(read.data)
                if not size_bytes:
                    return None
        except KafkaError as error:
            response.error_code = error.code
            size_bytes = 0
        except Exception as error:
            if is_damage(error):
                partition.found_damaged(offset, "read", str(error))
            else:
                self._sessions.log.error("read_failed", **partition.log_fields, error=repr(error))
            response.error_code = ErrorCode.kafka_storage_error
            size_bytes = 0
        entry.is_open = False
        return size_bytes

    def _answer_cold(self, waiting: WaitingReplicaFetch, topics: Topics, outcomes: ColdOutcomes | None) -> None:
        if outcomes is None:
            return
        for read, outcome in outcomes:
            partition = read.partition
            if partition.generation != read.generation:
                # The log was truncated or the role changed meanwhile: the read may mix bytes of two logs.
                read.response.error_code = ErrorCode.not_leader_or_follower
            elif not isinstance(outcome, Exception) and len(outcome):
                if read.job.damaged_at is not None:
                    # The follower will reject the batch. It can fetch the intact one from another leader.
                    partition.found_damaged(read.job.damaged_at)
                read.response.records = outcome
            else:
                if isinstance(outcome, Exception) and is_damage(outcome):
                    partition.found_damaged(read.job.offset, "read", str(outcome))
                else:
                    self._sessions.log.error("read_failed", **partition.log_fields, error=repr(outcome))
                # Without an error the follower would wait forever for these records.
                read.response.error_code = ErrorCode.kafka_storage_error
        self._send(waiting, topics)

    def _send(self, waiting: WaitingReplicaFetch, topics: Topics) -> None:
        request, reply, _ = waiting
        if reply.done:
            return
        named = [(None, topic_id, responses) for topic_id, responses in topics.items()]
        body = write_fetch_response(request.api_version, 0, self.id, named, takes_received=self._is_new)
        self._is_new = False
        self._sessions.runtime.metrics.bytes_out += sum(len(part) for part in body)
        reply.send(body)


@dataclass(eq=False)
class ReplicaSessions:
    """The sessions of all followers of this node, one each. Owned by the loop."""

    runtime: Runtime
    _metadata: MetadataLog
    _replication: Replication
    partition_by_id: Callable[[UUID, int], Partition | None]
    _sessions: dict[int, ReplicaSession] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.log = self.runtime.log.bind(component="replication")

    @property
    def throttle(self) -> ReplicationThrottle:
        return self._replication.leader_throttle

    def knows(self, topic_id: UUID) -> bool:
        return topic_id in self._metadata.image.names_by_id

    def handle(self, request: Request, reply: Reply, fetch: FetchRequest) -> None:
        try:
            session = self._session(request, fetch)
        except KafkaError as error:
            reply.failed = True
            reply.send(write_fetch_response(request.api_version, error.code, NO_SESSION, []))
            return
        self._replication.replica_heard(fetch.replica_id)
        session.broker_epoch = fetch.replica_epoch
        session.fetch(request, reply, fetch)

    def _session(self, request: Request, fetch: FetchRequest) -> ReplicaSession:
        replica_id = fetch.replica_id
        peer_id = request.connection.peer_id
        if peer_id != replica_id:
            if peer_id is not None:
                self.log.error("fetch_refused", peer=peer_id, claimed=replica_id)
            # A replica's position commits records, so only the replica itself may report it.
            raise KafkaError(
                ErrorCode.cluster_authorization_failed, f"this connection is not that of node {replica_id}"
            )
        broker = self._metadata.image.brokers.get(replica_id)
        if broker is None:
            raise KafkaError(ErrorCode.broker_id_not_registered, f"node {replica_id} is not known here yet")
        if fetch.replica_epoch < broker.epoch:
            raise KafkaError(ErrorCode.stale_broker_epoch, f"node {replica_id} has registered as epoch {broker.epoch}")
        if fetch.session_epoch == FINAL_EPOCH:
            return ReplicaSession(self, NO_SESSION, replica_id)
        known = self._sessions.get(replica_id)
        if fetch.session_epoch == INITIAL_EPOCH:
            if known is not None:
                self.forget(known)
            session_id = self.runtime.env.random.getrandbits(31) or 1
            session = self._sessions[replica_id] = ReplicaSession(self, session_id, replica_id)
            request.connection.when_closed(session, lambda: self.forget(session))
            return session
        if known is None or known.id != fetch.session_id:
            raise KafkaError(ErrorCode.fetch_session_id_not_found, f"session {fetch.session_id} is not known")
        if known.epoch != fetch.session_epoch:
            raise KafkaError(
                ErrorCode.invalid_fetch_session_epoch, f"epoch {fetch.session_epoch}, expected {known.epoch}"
            )
        known.epoch = 1 if known.epoch == EPOCH_MAX else known.epoch + 1
        return known

    def forget(self, session: ReplicaSession) -> None:
        if self._sessions.get(session.replica_id) is session:
            del self._sessions[session.replica_id]
        session.close()

    def close(self) -> None:
        for session in list(self._sessions.values()):
            self.forget(session)
