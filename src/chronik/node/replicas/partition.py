"""A partition hosted by this node: its appends, its waiting requests, and its role of leader or follower."""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from chronik.metadata.elections import Loss
from chronik.metadata.image import PartitionImage, TopicImage, is_internal, is_traceable
from chronik.node.replicas.storage_jobs import StorageJobs
from chronik.node.replicas.syncer import Syncer
from chronik.node.replicas.verification import ProducedTransaction, Verification, Verifications
from chronik.node.runtime import Runtime
from chronik.node.topic_settings import TopicSettings
from chronik.observe.traces import PartitionTrace, Why
from chronik.replication.follower import NO_EPOCH, NO_LEADER, EpochEnd, PartitionFollower, diverging_epoch
from chronik.replication.leader import PartitionLeader
from chronik.storage.aborted import AbortedIndexDamaged, AbortedJob
from chronik.storage.disk import Buffer, StorageError
from chronik.storage.log import Log
from chronik.storage.producers import AppendResult
from chronik.storage.reading import ReadJob
from chronik.storage.refusals import NO_PRODUCERS, TEMPORARY_ERRORS, RefusedBatches
from chronik.storage.syncing import FlushJob, SyncJob
from chronik.wire.batch import (
    HEADER_BYTES,
    TRANSACTIONAL,
    BatchHeader,
    check_batches,
    decode_batch,
    encode_batch,
    encode_marker,
    read_batch_header,
)
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.fetch import FetchPartition, FetchPartitionResponse
from chronik.wire.records import Record

LATEST_EPOCH = -1
DELETE_ALL = -1
BAD_BATCH = "a batch has a wrong CRC or offset"
KEY_NEEDED = "a compacted topic does not accept a record without a key"
ID_NEEDED = "a transactional batch needs a transactional id in its request"
EARLY_BATCHES_S = 60.0
"""How long after a change of leaders an earlier batch may still arrive: clients give up a request after 30 to 60 s."""
DECODED_RECORDS_MAX = 100_000
DECODED_BYTES_PER_BYTE_MAX = 16

Appended: TypeAlias = AppendResult
"""The result of a produce: the offsets of the new records, or for a duplicate batch the offsets of the first copy."""
HowFound: TypeAlias = Literal["scrub", "recovery", "read"]
Waiter: TypeAlias = Callable[[KafkaError | None], None]
Waiters: TypeAlias = "deque[tuple[int, Waiter]]"


class TransactionMarker(NamedTuple):
    """The end of a producer's transaction in one partition, as its coordinator decided it."""

    producer_id: int
    producer_epoch: int
    is_commit: bool
    coordinator_epoch: int


class FetchPosition(NamedTuple):
    """The end of a follower's log and that of its durable part, each with the epoch of the record before it."""

    end: int
    last_epoch: int
    durable_end: int
    durable_epoch: int

    @property
    def is_durable(self) -> bool:
        return self.durable_end == self.end


class ReplicationContext(Protocol):
    """What a partition needs from replication: the live brokers, the lease, and callbacks for its own changes."""

    live: Mapping[int, int]
    """The epoch of each broker that may be in an ISR."""

    def now_ms(self) -> int: ...

    def lease_is_valid(self) -> bool: ...

    def check_isr(self, partition: Partition) -> None:
        """A replica may join the ISR, or has all records it needs to take over leadership."""

    def role_changed(self, partition: Partition) -> None: ...

    def log_failed(self, partition: Partition) -> None:
        """The log is read-only: for now (a full disk), or until the node restarts."""

    def sync_failed(self, partition: Partition) -> None:
        """The log is read-only, and its unsynced data in the page cache cannot be trusted either."""

    def leader_lacks(self, partition: Partition, reason: str) -> None:
        """The leader lacks committed records that this replica has."""

    def cannot_lead(self, partition: Partition) -> None:
        """The metadata makes this node the leader, but its log has already failed."""

    def damaged(self, partition: Partition, offset: int, how: HowFound, reason: str) -> None:
        """Records at or after `offset` are corrupt or missing: the replica must be healed."""

    def index_damaged(self, partition: Partition, base_offset: int) -> None:
        """Readers need the index of aborted transactions of this segment: it must be rebuilt."""


class WaitingFetch(Protocol):
    """A fetch that waits for data."""

    def data_arrived(self, partition: Partition, size_bytes: int) -> None: ...

    def partition_gone(self) -> None: ...


class ReplicaListener(Protocol):
    """A follower's fetch session: it is notified of everything that the follower lacks."""

    def data_appended(self, partition: Partition) -> None: ...

    def watermark_rose(self, partition: Partition) -> None:
        """The high watermark or the log start rose."""

    def leader_gone(self, partition: Partition) -> None:
        """The leader epoch in which the listener registered has ended."""


@dataclass(slots=True, eq=False)
class PartitionWaits:
    """Invariant: waiters are sorted by the offset they wait for. Owned by the loop; each is called once."""

    written: Waiters = field(default_factory=deque)
    """Called when this node's log is durable up to their offset."""
    committed: Waiters = field(default_factory=deque)
    """Called when the high watermark reaches their offset."""
    deleted: Waiters = field(default_factory=deque)
    """Called when the low watermark reaches their offset."""
    fetches: dict[WaitingFetch, None] = field(default_factory=dict)
    listeners: dict[ReplicaListener, None] = field(default_factory=dict)

    def wake_fetches(self, partition: Partition, size_bytes: int) -> None:
        for fetch in list(self.fetches):
            fetch.data_arrived(partition, size_bytes)

    def notify_appended(self, partition: Partition) -> None:
        for listener in list(self.listeners):
            listener.data_appended(partition)

    def notify_watermark(self, partition: Partition) -> None:
        for listener in list(self.listeners):
            listener.watermark_rose(partition)

    def wait_for_commit(self) -> None:
        """The log may be truncated from now on: acks=1 waiters wait for the watermark instead."""
        while self.written:
            add(self.committed, *self.written.popleft())

    def fail(self, error: KafkaError, from_offset: int = 0) -> None:
        """Fail all produce waiters for an offset beyond `from_offset`."""
        for waiters in (self.written, self.committed):
            failed = []
            while waiters and waiters[-1][0] > from_offset:
                failed.append(waiters.pop()[1])
            for waiter in reversed(failed):
                waiter(error)

    def forget_deletion(self, waiter: Waiter) -> None:
        """Remove the waiter of a request that was answered or timed out."""
        self.deleted = deque(waiting for waiting in self.deleted if waiting[1] is not waiter)

    def fail_deletions(self, error: KafkaError) -> None:
        while self.deleted:
            self.deleted.popleft()[1](error)

    def release_fetches(self) -> None:
        """Wake all waiting fetches, so that each checks again whether this node may serve it."""
        fetches, self.fetches = list(self.fetches), {}
        for fetch in fetches:
            fetch.partition_gone()

    def release_listeners(self, partition: Partition) -> None:
        listeners, self.listeners = list(self.listeners), {}
        for listener in listeners:
            listener.leader_gone(partition)


class Partition:
    """Invariant: log_start_offset <= high_watermark <= log_end_offset. While this node leads, the last two never fall.

    `role` is this node's role according to the metadata. `leader` is the same object while this node leads, else None.
    Everything that changes a partition runs on the node's loop, so there is a single writer and offsets cannot race.
    """

    def __init__(
        self,
        topic: TopicImage,
        index: int,
        log: Log,
        settings: TopicSettings,
        high_watermark: int,
        runtime: Runtime,
        syncer: Syncer,
        replication: ReplicationContext,
    ) -> None:
        self.topic = topic.name
        self.topic_id = topic.id
        self.index = index
        self.log = log
        self.settings = settings
        self.node_id = runtime.node_id
        self.is_internal = is_internal(topic.name)
        self.is_closed = False
        self.image: PartitionImage | None = None
        self.loss: Loss | None = None
        """What the log lost before it was opened. The replica takes no role until the controller knows of the loss."""
        watermark = max(log.log_start_offset, min(high_watermark, log.log_end_offset))
        self.role: PartitionLeader | PartitionFollower = PartitionFollower(NO_LEADER, NO_EPOCH, watermark)
        self.leader: PartitionLeader | None = None
        self.refusal = ""
        """Why this replica refuses to follow its leader; empty while it follows."""
        self.hands_over_to = NO_LEADER
        """The next leader. Until the handover is decided, this node accepts no records and serves no readers."""
        self.durable_log_start = log.log_start_offset
        """Records below this offset stay deleted even after a crash of this node. At most the log start offset."""
        self.generation = 0
        """Rises when earlier reads may be stale: with each role change and each truncation."""
        self.jobs = StorageJobs()
        self.is_damaged = False
        """True while the replica is being healed: it does not lead, and does not report a fetch position."""
        self.on_durable: Callable[[Partition], None] | None = None
        """Called when more of this follower's log is durable, or a sync failed; set by the fetcher that follows its
        leader. Not under `replicated`: there, everything received is durable enough."""
        self.acknowledges_unsynced = runtime.config.durability == "replicated"
        """Whether records in the page cache are durable enough to be acknowledged."""
        self.log_fields: Mapping[str, Any] = {"topic": topic.name, "partition": index}
        """The fields that name this partition in log lines."""
        self._appender: PartitionLeader | None = None
        self._has_resigned = False
        """A report about this leader's own log may have begun another leader epoch, which this node may never learn."""
        self._next_image: PartitionImage | None = None
        self._replication = replication
        self._runtime = runtime
        self._syncer = syncer
        self._metrics = runtime.metrics
        self._log = runtime.log.bind(component="storage", **self.log_fields)
        self.trace: PartitionTrace | None = None
        """Set only while the topic is traced, so that an untraced request pays for one check and nothing else."""
        self._set_trace()
        self._waits = PartitionWaits()
        self._refused = RefusedBatches()
        self.verifications = Verifications()
        """The transactions whose first batch here waits for their coordinator."""
        self._is_refusing = False
        """Whether the last append as leader failed at the disk: the next one that succeeds is worth a line, too."""
        self._is_in_doubt = False
        """Whether the log may end with records that this node appended as leader and that the new leader lacks."""
        self._early_until_s = 0.0
        """Until then, `_may_be_early` is True; 0: it is not, and not called."""
        self._deleting = asyncio.Lock()

    def _set_trace(self) -> None:
        is_traced = self.settings.is_traced and is_traceable(self.topic)
        if is_traced != (self.trace is not None):
            self.trace = PartitionTrace(self._runtime.traces, self.topic, self.index) if is_traced else None

    # -- queries -------------------------------------------------------------------------------------------------------

    @property
    def log_start_offset(self) -> int:
        return self.log.log_start_offset

    @property
    def log_end_offset(self) -> int:
        return self.log.log_end_offset

    @property
    def last_epoch(self) -> int:
        """The leader epoch of the last record, or NO_EPOCH if the log is empty."""
        return self._epoch_before(self.log.log_end_offset)

    def _epoch_before(self, offset: int) -> int:
        log = self.log
        return log.epoch_of(offset - 1) if offset > log.log_start_offset else NO_EPOCH

    @property
    def durable_end_offset(self) -> int:
        """The end of the durable part of this node's log: the log end if it acknowledges unsynced records."""
        return self.log.log_end_offset if self.acknowledges_unsynced else self.log.synced_end_offset

    def fetch_position(self) -> FetchPosition | None:
        """Return where this follower's log ends, or None while it must neither fetch nor report that.

        After a failed sync it is unknown what the log contains: nothing is reported again.
        """
        log = self.log
        if self.is_closed or self.is_damaged or self.jobs.is_exclusive or log.read_only_forever:
            return None
        end, last_epoch = log.log_end_offset, self.last_epoch
        durable_end = self.durable_end_offset
        if durable_end >= end:
            # Bypass NamedTuple's constructor, which is Python code: each fetch of each partition takes this path.
            return tuple.__new__(FetchPosition, (end, last_epoch, end, last_epoch))
        return FetchPosition(end, last_epoch, durable_end, self._epoch_before(durable_end))

    def cold_read(
        self,
        response: FetchPartitionResponse,
        offset: int,
        max_bytes: int,
        upto_offset: int,
        *,
        min_one_batch: bool,
    ) -> ColdRead:
        """Return a read for `run_cold_reads`. It begins a job of the log, which ends after the read."""
        if not self.jobs.begin():
            raise self._not_leader()
        try:
            job = self.log.read_job(offset, max_bytes, upto_offset, min_one_batch=min_one_batch)
        except BaseException:
            self.jobs.end()
            raise
        return ColdRead(response, self, self.generation, max_bytes, job)

    @property
    def high_watermark(self) -> int:
        return self.role.high_watermark

    @property
    def leader_epoch(self) -> int:
        return self.role.leader_epoch

    @property
    def replicas(self) -> tuple[int, ...]:
        return () if self.image is None else self.image.replicas

    @property
    def in_sync_replicas(self) -> tuple[int, ...]:
        return () if self.image is None else self.image.isr

    @property
    def is_dispensable(self) -> bool:
        """Whether the metadata counts this replica neither in sync nor eligible: no record depends on it."""
        image = self.image
        return image is not None and self.node_id not in image.isr and self.node_id not in image.eligible

    def is_fit_to_lead(self, image: PartitionImage) -> bool:
        """Whether this node's log may become the reference for the other replicas.

        A replica outside the ISR may lack committed records: the controller elects none, and this check accepts none.
        A replica with a damaged log may lack them too. A sole replica leads anyway: there is no other copy.
        """
        is_whole = not self.log.read_only_forever and not self.is_damaged
        return self.node_id in image.isr and (is_whole or len(image.replicas) == 1)

    @property
    def leads(self) -> bool:
        """Whether this node may serve as leader now: the metadata names it leader, and its lease is valid."""
        return self._appender is not None and self._replication.lease_is_valid()

    @property
    def accepts_requests(self) -> bool:
        """Whether this node serves as leader while its lease is valid: `leads` without the lease."""
        return self._appender is not None

    @property
    def follows(self) -> bool:
        """Whether this node may serve reads as a follower: it does not lead, and its lease is valid."""
        if self.leader is not None or self.is_closed or self.jobs.is_exclusive or self.loss is not None:
            return False
        return self._replication.lease_is_valid()

    @property
    def visible_end_offset(self) -> int:
        """The first offset that is not visible to consumers."""
        if self.settings.visible_when_appended and self.leader is not None:
            return self.log.log_end_offset
        return self.role.high_watermark

    @property
    def last_stable_offset(self) -> int:
        """The first offset that is not visible to read_committed consumers: no transaction below it is undecided."""
        return self.log.last_stable_offset(self.role.high_watermark, self.visible_end_offset)

    @property
    def is_settling(self) -> bool:
        """Whether this new leader's watermark may still be below what clients have seen.

        There is no time limit: with too few in-sync replicas the watermark cannot rise, and the end must not go back.
        """
        leader = self.leader
        return leader is not None and not leader.has_reached_its_epoch and not self.settings.visible_when_appended

    def check_end_is_known(self) -> None:
        """Raise OFFSET_NOT_AVAILABLE if the visible end could go back after a failover (KIP-207)."""
        leader = self.leader
        if leader is not None and self.is_settling:
            raise KafkaError(
                ErrorCode.offset_not_available,
                f"epoch {leader.leader_epoch} began at {leader.epoch_start_offset}, "
                f"the watermark is {leader.high_watermark}",
            )

    # -- waiting for records -------------------------------------------------------------------------------------------

    def wait_for_data(self, fetch: WaitingFetch) -> None:
        self._waits.fetches[fetch] = None

    def stop_waiting(self, fetch: WaitingFetch) -> None:
        self._waits.fetches.pop(fetch, None)

    def listen(self, listener: ReplicaListener) -> None:
        self._waits.listeners[listener] = None

    def stop_listening(self, listener: ReplicaListener) -> None:
        self._waits.listeners.pop(listener, None)

    # -- request checks ------------------------------------------------------------------------------------------------

    def check_leader_epoch(self, epoch: int) -> None:
        """Raise if the client's leader epoch differs: either the client or this node has old metadata."""
        current = self.role.leader_epoch
        if epoch in (LATEST_EPOCH, current):
            return
        if epoch < current:
            raise KafkaError(ErrorCode.fenced_leader_epoch, f"leader epoch {epoch} is older than the current {current}")
        raise KafkaError(ErrorCode.unknown_leader_epoch, f"epoch {epoch} is not known here yet")

    def check_enough_replicas(self) -> None:
        leader = self.leader
        if leader is not None and not leader.has_enough_replicas:
            raise KafkaError(ErrorCode.not_enough_replicas, too_few(leader))

    def refused(self, records: memoryview, error: KafkaError, now_ms: int) -> None:
        """Remember a batch that failed with `error`, so that its producer's later batches do not overtake it."""
        if error.code in TEMPORARY_ERRORS and len(records) >= HEADER_BYTES:
            self._refused.note(read_batch_header(records), error.code, self.log.producers, now_ms)

    def take_refused(self, refused: RefusedBatches | None) -> None:
        """Take the batches that were refused before the log was open."""
        if refused is not None:
            self._refused = refused

    def check_forwardable(self, records: memoryview, now_ms: int) -> None:
        """Raise if the leader may lack earlier batches that this batch's producer sent here while this node led."""
        if len(records) < HEADER_BYTES or not (self._refused or self._is_in_doubt):
            return
        header = read_batch_header(records)
        if header.producer_id < 0:
            return
        if self._is_in_doubt and (
            self.jobs.is_exclusive or self.log.producers.follows_batch_from(self.role.high_watermark, header)
        ):
            raise self._not_leader()
        self._refused.check(header, self.log.producers, now_ms)

    def unresolved_batches(self) -> RefusedBatches:
        """Return the batches that the leader may lack, to be remembered when this replica moves away."""
        now_ms = self._runtime.env.wall_ms()
        self._refused.forget_received(self.log.producers, now_ms)
        if self._is_in_doubt or self.leader is not None:
            possibly_lost = self.log.producers.first_from(self.role.high_watermark)
            self._refused.note_lost(possibly_lost, NO_PRODUCERS, now_ms)
        return self._refused

    def _not_leader(self) -> KafkaError:
        return KafkaError(
            ErrorCode.not_leader_or_follower, f"{self.topic}-{self.index} is not led by node {self.node_id}"
        )

    # -- appends -------------------------------------------------------------------------------------------------------

    def append(
        self,
        records: memoryview,
        now_ms: int,
        transaction: ProducedTransaction | None = None,
        verified: Verification | None = None,
    ) -> Appended:
        """Append a producer's batch. Only another codec in `compression.type` changes its records.

        A transactional batch needs the `transaction` of its request. UnverifiedBatch means that the coordinator has to
        confirm it first; then append it with the `verified` that `Verifier.verify` passes.
        """
        leader = self._appender
        if leader is None:
            raise self._not_leader()
        settings = self.settings
        batches = check_batches(records, settings.max_message_bytes)
        if len(batches) != 1:
            raise KafkaError(ErrorCode.invalid_record, f"{len(batches)} batches for one partition; one is allowed")
        start, header = batches[0]
        check_producer_batch(settings, records, start, header, now_ms)
        is_transactional = header.attributes & TRANSACTIONAL
        if header.producer_id >= 0:
            if self._refused:
                self._refused.check(header, self.log.producers, now_ms)
            if is_transactional:
                if transaction is None:
                    raise KafkaError(ErrorCode.transactional_id_authorization_failed, ID_NEEDED)
                self.verifications.check_order(header, verified)
            repeated = self.log.producers.check(header, self._early_until_s > 0 and self._may_be_early())
            if repeated is not None:
                return repeated
            if transaction is not None and is_transactional:
                self.verifications.check(header, transaction, verified, self.log.producers)
        topic_codec = settings.broker_codec
        if topic_codec is not None and topic_codec != header.codec:
            records = recompressed(settings, records, start, header, topic_codec)
            batches = check_batches(records, settings.max_message_bytes)
        result = self._write(records, batches, leader.leader_epoch, now_ms)
        self._metrics.records_in += header.record_count
        if is_transactional:
            self.verifications.appended(header)
        self._appended(len(records))
        return result

    def _may_be_early(self) -> bool:
        """Whether a producer's earlier batches may still be at the former leader, or on their way from it.

        librdkafka sends later batches to a new leader although earlier ones have no outcome yet. If this log knows the
        producer only from those, it takes the earlier ones for repeated ones when they are resent.
        """
        if self._runtime.loop.time() >= self._early_until_s:
            self._early_until_s = 0.0
        return self._early_until_s > 0

    def append_internal(self, batch: bytes, now_ms: int) -> Appended:
        """Append one or more batches that this node built itself (a coordinator's state)."""
        leader = self._appender
        if leader is None:
            raise self._not_leader()
        records = memoryview(bytearray(batch))
        # Not those of a producer: offsets in a transaction have no sequence.
        batches = check_batches(records, len(records), from_producer=False)
        result = self._write(records, batches, leader.leader_epoch, now_ms)
        self._appended(len(records))
        return result

    def append_marker(self, marker: TransactionMarker, now_ms: int) -> Appended:
        """Append the control batch that ends a transaction here. The coordinator that decided it is fenced by epoch.

        A marker that is repeated is appended again: it ends nothing.
        """
        leader = self._appender
        if leader is None:
            raise self._not_leader()
        batch = encode_marker(*marker, now_ms)
        try:
            result = self.log.append_marker(batch, leader.leader_epoch, now_ms)
        except StorageError as error:
            self._append_failed(error)
            raise
        self._appended(len(batch))
        self.verifications.ended(marker.producer_id, marker.producer_epoch)
        return result

    def _write(
        self, records: memoryview, batches: list[tuple[int, BatchHeader]], leader_epoch: int, now_ms: int
    ) -> AppendResult:
        try:
            result = self.log.append(records, batches, leader_epoch, now_ms)
        except StorageError as error:
            self._append_failed(error)
            raise
        if self._is_refusing:
            self._is_refusing = False
            self._log.info("log_writable")
        return result

    def _append_failed(self, error: StorageError) -> None:
        """Usually the disk is full: another replica may have space. Else only this line says why."""
        if not self._is_refusing:
            self._is_refusing = True
            then = "it takes no records until the disk does; producers get KAFKA_STORAGE_ERROR"
            self._log.error("log_read_only", reason=error.message, then=then)
        self._replication.log_failed(self)

    def append_fetched(self, records: memoryview, batches: list[tuple[int, BatchHeader]], now_ms: int) -> None:
        """Append batches fetched from the leader, unchanged."""
        self.log.append_as_follower(records, batches, now_ms)
        if self.acknowledges_unsynced:
            self._on_durable_as_follower()
        else:
            self._syncer.request(self)

    def _appended(self, size_bytes: int) -> None:
        if self.acknowledges_unsynced:
            self._on_durable(self.log.log_end_offset, size_bytes, "append")
        else:
            self._syncer.request(self)
            if self.settings.visible_when_appended:
                self._waits.wake_fetches(self, size_bytes)
        if self._waits.listeners:
            self._waits.notify_appended(self)

    def _on_durable(self, end_offset: int, size_bytes: int, why: Why) -> None:
        """This node's log is durable up to `end_offset`."""
        leader = self.leader
        if leader is None:
            self._on_durable_as_follower()
            return
        before = leader.high_watermark
        rose = leader.acknowledge_durable(end_offset)
        waits = self._waits
        if waits.written:
            wake(waits.written, end_offset)
        if rose:
            self._watermark_rose(before, size_bytes, why)
        elif self.settings.visible_when_appended:
            waits.wake_fetches(self, size_bytes)

    def _on_durable_as_follower(self) -> None:
        role = self.role
        if isinstance(role, PartitionFollower):
            before = role.high_watermark
            if role.acknowledge_durable(self.durable_end_offset):
                self._watermark_rose(before, self._bytes_since(before), "leader")
            if self.on_durable is not None:
                self.on_durable(self)

    def _watermark_rose(self, before: int, size_bytes: int, why: Why) -> None:
        self._metrics.watermark_updates += 1
        if self.trace is not None:
            self.trace.watermark_updated(before, self.role.high_watermark, why)
        waits = self._waits
        if waits.committed:
            wake(waits.committed, self.role.high_watermark)
        if waits.fetches:
            waits.wake_fetches(self, size_bytes)
        if waits.listeners:
            waits.notify_watermark(self)

    def _bytes_since(self, watermark: int) -> int:
        return self.log.bytes_between(watermark, self.role.high_watermark) if self._waits.fetches else 0

    # -- syncs and disk failures ---------------------------------------------------------------------------------------

    def sync_job(self) -> SyncJob | None:
        """Return the next sync, or None during a truncation, which leaves the log synced."""
        if self.jobs.is_exclusive:
            return None
        job = self.log.sync_job()
        if job is not None:
            self.jobs.begin()
        return job

    def synced(self, job: SyncJob) -> None:
        self.log.synced(job)
        self.jobs.end()
        if self.is_closed or self.acknowledges_unsynced:
            return
        before = self.role.high_watermark
        end = self.log.synced_end_offset
        self._on_durable(end, self.log.bytes_between(before, end) if self._waits.fetches else 0, "sync")

    def sync_failed(self, job: SyncJob, error: Exception) -> None:
        self.log.sync_failed(job)
        self.jobs.end()
        self._sync_has_failed(error)

    def _sync_has_failed(self, error: Exception) -> None:
        self._log.error("sync_failed", error=repr(error))
        self._waits.fail(KafkaError(ErrorCode.kafka_storage_error, f"the log could not be synced: {error}"))
        self._replication.sync_failed(self)
        if self.on_durable is not None:
            self.on_durable(self)

    @property
    def can_flush(self) -> bool:
        """Whether a flush may begin: its mark of the durable end, or its checkpoint, may follow a truncation."""
        return not self.jobs.is_exclusive

    def flush_job(self) -> FlushJob | None:
        return self.log.flush_job()

    def flushed(self, job: FlushJob) -> bool:
        return self.log.flushed(job)

    def flush_failed(self, job: FlushJob, error: Exception) -> None:
        self.log.flush_failed(job)
        self._sync_has_failed(error)

    def stalled(self) -> None:
        """A sync hangs: fail the waiting requests with an unknown outcome, and hand leadership to another replica."""
        if self.is_closed or self.acknowledges_unsynced:
            return
        self.log.stall()
        self.fail_with_unknown_outcome()
        self._replication.log_failed(self)

    def log_failed(self) -> None:
        """The log is read-only until the node restarts: fail the waiting requests, and hand leadership over."""
        self.fail_with_unknown_outcome()
        self._replication.log_failed(self)

    def fail_with_unknown_outcome(self) -> None:
        """Fail produce waiters with REQUEST_TIMED_OUT: the outcome is unknown here, but the next leader may know it."""
        self._waits.fail(
            KafkaError(ErrorCode.request_timed_out, "the disk does not respond; the records may have been written")
        )

    def resumed(self) -> None:
        self.log.resume()

    def found_damaged(self, offset: int, how: HowFound = "read", reason: str = BAD_BATCH) -> bool:
        """Report corrupt or missing records at or after `offset`; return whether another replica can serve readers."""
        self._replication.damaged(self, offset, how, reason)
        others = () if self.leader is None else self.leader.in_sync_replicas
        return self.leader is None or any(x != self.node_id and x in self._replication.live for x in others)

    def aborted_job(self, offset: int, upto_offset: int) -> AbortedJob | None:
        """Return the log's job that finds aborted transactions. Call `lookup_failed` if the job fails."""
        try:
            return self.log.aborted_job(offset, upto_offset)
        except AbortedIndexDamaged as error:
            self.lookup_failed(error)
            raise

    def lookup_failed(self, error: Exception) -> None:
        """Have a damaged index of aborted transactions rebuilt: until then, readers get an error."""
        if isinstance(error, AbortedIndexDamaged) and not self.is_closed:
            self._replication.index_damaged(self, error.base_offset)

    # -- produce waiters -----------------------------------------------------------------------------------------------

    def is_written(self, end_offset: int) -> bool:
        return self.acknowledges_unsynced or self.log.synced_end_offset >= end_offset

    def when_written(self, end_offset: int, waiter: Waiter) -> None:
        """Call `waiter` when this node's log is durable up to `end_offset` (acks=1), at once if it already is."""
        if self.is_written(end_offset):
            waiter(None)
        elif self.log.read_only_forever:
            waiter(KafkaError(ErrorCode.kafka_storage_error, "the log could not be synced"))
        else:
            add(self._waits.written, end_offset, waiter)

    def is_committed(self, end_offset: int) -> bool:
        return self.role.high_watermark >= end_offset

    def when_committed(self, end_offset: int, waiter: Waiter) -> None:
        """Call `waiter` when the watermark reaches `end_offset` (acks=all), at once if it already has."""
        if self.is_committed(end_offset):
            waiter(None)
        elif self.log.read_only_forever:
            waiter(KafkaError(ErrorCode.kafka_storage_error, "the log could not be synced"))
        else:
            add(self._waits.committed, end_offset, waiter)

    # -- deleted records -----------------------------------------------------------------------------------------------

    async def delete_records(self, offset: int, wait_s: float) -> int:
        """Delete all records below `offset` (-1: below the watermark), here and on every in-sync replica.

        Return the low watermark, the smallest log start of these replicas. TimeoutError after `wait_s`.
        """
        leader = self.leader
        if leader is None:
            raise self._not_leader()
        watermark = leader.high_watermark
        if offset == DELETE_ALL:
            offset = watermark
        if offset > watermark:
            # The previous leader may have shown the offsets in between to this client.
            self.check_end_is_known()
        if offset < 0 or offset > watermark:
            raise KafkaError(ErrorCode.offset_out_of_range, f"offset {offset} is not below the watermark {watermark}")
        await self.raise_log_start(offset)
        if self.leader is not leader:
            raise self._not_leader()
        deleted: asyncio.Future[None] = self._runtime.loop.create_future()
        waiter = partial(resolve, deleted)
        add(self._waits.deleted, offset, waiter)
        self._check_deleted()
        try:
            async with asyncio.timeout(wait_s):
                await deleted
            return leader.low_watermark
        finally:
            self._waits.forget_deletion(waiter)

    async def raise_log_start(self, offset: int) -> None:
        """Hide records below `offset` from readers at once; they are deleted durably when this returns."""
        if self.is_closed or not self.jobs.begin():
            raise self._not_leader()
        with self.jobs.running():
            job = self.log.increment_log_start(offset)
            self.log_start_rose()
            async with self._deleting:
                start = self.log.log_start_offset
                try:
                    await self._runtime.run_blocking(job.run)
                except OSError as error:
                    raise KafkaError(ErrorCode.kafka_storage_error, f"the log start is not durable: {error}") from error
            self.durable_log_start = max(self.durable_log_start, start)

    def log_start_rose(self) -> None:
        """Notify the followers, which then raise their own log start."""
        if self._waits.listeners:
            self._waits.notify_watermark(self)

    def _check_deleted(self) -> None:
        waits, leader = self._waits.deleted, self.leader
        if waits and leader is not None:
            leader.update_low_watermark(self.durable_log_start)
            wake(waits, leader.low_watermark)

    # -- replicas ------------------------------------------------------------------------------------------------------

    def replica_fetched(self, replica_id: int, broker_epoch: int, fetch: FetchPartition) -> EpochEnd | None:
        """Record a follower's fetch, which proves that its log is durable up to the fetch offset.

        What it has received beyond that only decides which records it gets. If its log diverges from this one, return
        the diverging epoch. Raise if the follower must not fetch here.
        """
        leader = self.leader
        if leader is None or self.is_closed:
            raise self._not_leader()
        if fetch.current_leader_epoch != leader.leader_epoch:
            # A replica must name the epoch.
            is_named = fetch.current_leader_epoch >= 0
            self.check_leader_epoch(fetch.current_leader_epoch if is_named else leader.leader_epoch + 1)
        if replica_id not in leader.replicas:
            raise KafkaError(ErrorCode.not_leader_or_follower, f"node {replica_id} has no replica of {self.topic}")
        if leader.is_stale(replica_id, broker_epoch):
            raise KafkaError(ErrorCode.stale_broker_epoch, f"node {replica_id} has a newer process")
        log, offset, last_epoch = self.log, fetch.fetch_offset, fetch.last_fetched_epoch
        if fetch.received is not None:
            # The durable part is a prefix of what was received.
            offset, last_epoch = fetch.received.offset, fetch.received.last_epoch
            if offset < fetch.fetch_offset:
                raise KafkaError(ErrorCode.invalid_request, f"received up to {offset}, durable to {fetch.fetch_offset}")
        end_offset = log.log_end_offset
        if offset < log.log_start_offset or (offset > end_offset and last_epoch < 0):
            raise KafkaError(
                ErrorCode.offset_out_of_range, f"offset {offset} of {log.log_start_offset} to {end_offset}"
            )
        if last_epoch >= 0:
            left = tuple.__new__(EpochEnd, log.end_offset_for_epoch(last_epoch))
            if left.epoch < 0:
                raise KafkaError(ErrorCode.unknown_leader_epoch, f"epoch {last_epoch} is not in this log")
            diverging = diverging_epoch(left, last_epoch, offset)
            if diverging is not None:
                return diverging
        replication = self._replication
        before = leader.high_watermark
        if leader.replica_fetched(
            replica_id,
            broker_epoch,
            fetch.fetch_offset,
            end_offset,
            replication.now_ms(),
            replication.live,
            fetch.log_start_offset,
        ):
            self._watermark_rose(before, self._bytes_since(before), "replica-fetch")
        self._check_deleted()
        if replica_id == self.hands_over_to or leader.may_join(replica_id, replication.live):
            replication.check_isr(self)
        return None

    def leader_watermark_received(self, leaders_watermark: int) -> None:
        """Take the leader's watermark from a response that continues this node's log."""
        self._is_in_doubt = False
        role = self.role
        if isinstance(role, PartitionFollower):
            before = role.high_watermark
            if role.leader_watermark_received(leaders_watermark, self.durable_end_offset):
                self._watermark_rose(before, self._bytes_since(before), "leader")

    def refuse_to_follow(self, offset: int) -> None:
        """Stop following a leader that lacks committed records: keep them here, and report the leader.

        If this replica is in sync or eligible, the controller elects another leader; else an administrator decides.
        """
        role = self.role
        if not isinstance(role, PartitionFollower):
            return
        lack = f"node {role.leader_id} lacks records from {offset} on that were committed, up to {role.high_watermark}"
        self._replication.leader_lacks(self, lack)
        if self.refusal:
            return
        self.refusal = (
            f"{lack}; if it keeps leading, stop it and run `chronik topic recover {self.topic} --partition "
            f"{self.index} --from {self.node_id} --accept-loss` to keep them"
        )
        self._log.error("follower_refuses_truncation", reason=self.refusal)

    def watermark_checked(self, before: int) -> None:
        """Notify waiters if a call to the leader state machine has raised the watermark above `before`."""
        if self.role.high_watermark > before:
            self._watermark_rose(before, self._bytes_since(before), "isr-change")

    # -- roles ---------------------------------------------------------------------------------------------------------

    def apply(self, image: PartitionImage) -> None:
        """Take the role that the metadata assigns. Ignore an older image; defer a newer one during a truncation."""
        known = self.image if self._next_image is None else self._next_image
        if (
            self.is_closed
            or self.loss is not None
            or (known is not None and image.partition_epoch <= known.partition_epoch)
        ):
            return
        if self.jobs.is_exclusive:
            self._next_image = image
            return
        known, self.image = self.image, image
        if self.trace is not None and known is not None and known.isr != image.isr:
            self._trace_isr(known, image)
        is_same_role = known is not None and (image.leader, image.leader_epoch) == (known.leader, known.leader_epoch)
        if not is_same_role and image.leader == self.node_id and self.is_fit_to_lead(image):
            self._lead(image)
        elif not is_same_role:
            self._follow(image)
            if image.leader == self.node_id:
                self._replication.cannot_lead(self)
        elif self.leader is not None:
            if known is not None and not set(known.replicas) <= set(image.replicas):
                # A removed replica's position is void. If the replica is added again, it must fetch again.
                self._waits.release_listeners(self)
            self.cancel_handover()
            before = self.leader.high_watermark
            self.leader.partition_changed(image.replicas, image.isr, image.partition_epoch, self._replication.now_ms())
            self.watermark_checked(before)
            self._check_enough_after()
            self._check_deleted()
        self._replication.role_changed(self)
        if known is None and (damage := found_at_recovery(self.log)) is not None:
            offset, reason = damage
            self.found_damaged(offset, "recovery", reason)

    def _trace_isr(self, known: PartitionImage, image: PartitionImage) -> None:
        """Trace an ISR change on the leader, or on every replica if there is no leader."""
        if self.trace is not None and image.leader in (self.node_id, NO_LEADER):
            self.trace.isr_changed(known.isr, image.isr, image.leader, image.leader_epoch)

    def _lead(self, image: PartitionImage) -> None:
        """Become the leader: the new leader epoch starts at the log end."""
        before = self.role.high_watermark
        followed = isinstance(self.role, PartitionFollower) and self.role.leader_id not in (NO_LEADER, self.node_id)
        had_other_leader = image.leader_epoch > 0 and (followed or len(image.replicas) > 1)
        self._early_until_s = self._runtime.loop.time() + EARLY_BATCHES_S if had_other_leader else 0.0
        self._role_ends()
        self._is_in_doubt = False
        self.refusal = ""
        self.log.start_epoch(image.leader_epoch)
        self.leader = self.role = self._appender = PartitionLeader(
            self.node_id,
            image.leader_epoch,
            replicas=image.replicas,
            isr=image.isr,
            partition_epoch=image.partition_epoch,
            min_insync_replicas=self.settings.min_insync_replicas,
            log_end_offset=self.log.log_end_offset,
            durable_end=self.durable_end_offset,
            high_watermark=before,
            log_start_offset=self.durable_log_start,
            now_ms=self._replication.now_ms(),
            lag_ms_max=self._runtime.config.replica_lag_ms_max,
        )
        self.watermark_checked(before)
        self._check_enough_after()

    def _follow(self, image: PartitionImage) -> None:
        """Become a follower, possibly without a leader. Records that the new leader lacks will be truncated."""
        was_leader = self.leader is not None
        if was_leader and not (image.leader == self.hands_over_to != NO_LEADER):
            self._is_in_doubt = self.log.log_end_offset > self.role.high_watermark
        self._role_ends()
        self.leader = self._appender = None
        self.refusal = ""
        self.role = PartitionFollower(image.leader, image.leader_epoch, self.role.high_watermark, image.unclean_epoch)
        # Drop an epoch without records: the leader may send records of an older epoch.
        self.log.epochs.truncate_to(self.log.log_end_offset)
        if was_leader:
            # A pending batch survives if the new leader's watermark passes it; otherwise it is truncated.
            self._waits.wait_for_commit()
            self._waits.release_fetches()
        if self.log.synced_end_offset < self.log.log_end_offset:
            self._syncer.request(self)

    def _role_ends(self) -> None:
        self.generation += 1
        self.hands_over_to = NO_LEADER
        self._has_resigned = False
        self._waits.fail_deletions(self._not_leader())
        self._waits.release_listeners(self)
        # Another leader may write a marker that this node does not see in time.
        self.verifications.end_all(self._not_leader())

    def hand_over(self, to: int) -> None:
        """Stop accepting records so that `to` can fetch all of them. Ends with the partition's next image."""
        self.hands_over_to = to
        self._appender = None

    def cancel_handover(self) -> None:
        """Cancel a handover that was not proposed: accept records again, unless this leader has resigned."""
        self.hands_over_to = NO_LEADER
        self._appender = None if self._has_resigned else self.leader

    def resign(self) -> None:
        """Serve nothing more as leader. Call this before a report of a loss in this node's own log is sent.

        The controller elects another leader at once. If this node's disk has failed, it cannot store that, so its image
        would still name it leader, under a valid lease.
        """
        if self.leader is not None:
            self._has_resigned = True
            self._appender = None

    def report_refused(self) -> None:
        """The controller has refused the report, as no other replica could lead: serve what is left."""
        if self._has_resigned:
            self._has_resigned = False
            if self.hands_over_to == NO_LEADER:
                self._appender = self.leader

    def configure(self, settings: TopicSettings) -> None:
        self.settings = settings
        self._set_trace()
        self.log.configure(settings.log_config)
        if self.leader is not None:
            before = self.leader.high_watermark
            self.leader.configured(settings.min_insync_replicas)
            self.watermark_checked(before)
            self._check_deleted()

    def require_in_sync(self, replicas: int) -> None:
        """Apply the effective min.insync.replicas after a change of the replicas."""
        if replicas != self.settings.min_insync_replicas:
            self.configure(replace(self.settings, min_insync_replicas=replicas))

    def _check_enough_after(self) -> None:
        """Fail acks=all waiters if the ISR is too small: nothing commits until it grows, and producers may retry."""
        leader = self.leader
        if leader is not None and not leader.has_enough_replicas and self._waits.committed:
            error = KafkaError(ErrorCode.not_enough_replicas_after_append, too_few(leader))
            self._waits.fail(error, leader.high_watermark)

    def truncation_ended(
        self, upto_offset: int, lost: Iterable[tuple[int, int, int]] = (), error: KafkaError | None = None
    ) -> None:
        """Finish a truncation, and fail the waiters beyond `upto_offset`: the leader's log differs from there on.

        `lost` is each producer's first truncated batch. Without `error`, the truncated records can never be committed.
        With `error`, they may be committed elsewhere, and their producers get that error.
        """
        self.jobs.end_exclusive()
        self._is_in_doubt = False
        self._refused.note_lost(lost, self.log.producers, self._runtime.env.wall_ms())
        self.generation += 1
        self.durable_log_start = min(self.durable_log_start, self.log.log_start_offset)
        gone = KafkaError(ErrorCode.not_leader_or_follower, "the new leader's log does not contain the batch")
        self._waits.fail(error or gone, upto_offset)
        image, self._next_image = self._next_image, None
        if image is not None:
            self.apply(image)

    def damage_ended(self) -> None:
        """End the healing attempt, successful or not: lead with the present log if the metadata names this node."""
        self.is_damaged = False
        image = self.image
        if image is None or image.leader != self.node_id or self.leader is not None or self.is_closed:
            return
        if self.is_fit_to_lead(image):
            self._lead(image)
            self._replication.role_changed(self)

    def close(self, error: KafkaError) -> None:
        """Stop serving: every waiting request gets `error`. The caller closes the log later, in a thread."""
        self.is_closed = True
        self.leader = self._appender = None
        self.generation += 1
        self._waits.fail(error)
        self._waits.fail_deletions(error)
        self.verifications.end_all(error)
        self._waits.release_fetches()
        self._waits.release_listeners(self)


def too_few(leader: PartitionLeader) -> str:
    return f"{len(leader.in_sync_replicas)} replicas are in sync, {leader.replicas_needed} are needed"


class ColdRead(NamedTuple):
    """A read of data that is not in the page cache, which would block the loop, and the response for the data."""

    response: FetchPartitionResponse
    partition: Partition
    generation: int
    """The partition's generation when the read began. If it has changed since, the data may be stale."""
    max_bytes: int
    job: ReadJob


ColdOutcomes: TypeAlias = list[tuple[ColdRead, Buffer | Exception]]


def run_cold_reads(runtime: Runtime, reads: list[ColdRead], done: Callable[[ColdOutcomes | None], None]) -> None:
    """Run the reads in a thread. Then call `done` with each one's data or error, or with None if they did not run."""
    future = runtime.loop.run_in_executor(runtime.env.executor, _run_reads, reads)

    def finished(outcomes: asyncio.Future[ColdOutcomes]) -> None:
        for read in reads:
            read.partition.jobs.end()
        done(None if outcomes.cancelled() else outcomes.result())

    future.add_done_callback(finished)


def _run_reads(reads: list[ColdRead]) -> ColdOutcomes:
    """Runs in a thread: touches files only."""
    outcomes: ColdOutcomes = []
    for read in reads:
        try:
            outcomes.append((read, read.job()))
        except Exception as error:
            outcomes.append((read, error))
    return outcomes


def add(waiters: Waiters, end_offset: int, waiter: Waiter) -> None:
    """Insert a waiter in offset order: usually at the end, earlier for a duplicate batch."""
    later: list[tuple[int, Waiter]] = []
    while waiters and waiters[-1][0] > end_offset:
        later.append(waiters.pop())
    waiters.append((end_offset, waiter))
    waiters.extend(reversed(later))


def resolve(future: asyncio.Future[None], error: KafkaError | None) -> None:
    """Complete the future of a task that waits, unless it has stopped waiting."""
    if not future.done():
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def wake(waiters: Waiters, end_offset: int) -> None:
    while waiters and waiters[0][0] <= end_offset:
        waiters.popleft()[1](None)


def check_producer_batch(
    settings: TopicSettings, records: memoryview, start: int, header: BatchHeader, now_ms: int
) -> None:
    """Raise KafkaError if the topic's settings do not allow the batch at `start`."""
    if header.attributes & TRANSACTIONAL and header.producer_id < 0:
        raise KafkaError(ErrorCode.invalid_record, "a transactional batch needs a producer id")
    if not settings.log_config.log_append_time and header.max_timestamp >= 0:
        if header.max_timestamp > now_ms + settings.timestamp_after_max_ms:
            raise KafkaError(
                ErrorCode.invalid_timestamp, f"timestamp {header.max_timestamp} lies too far in the future"
            )
        oldest_ms = min(header.base_timestamp, header.max_timestamp)
        if 0 <= oldest_ms < now_ms - settings.timestamp_before_max_ms:
            raise KafkaError(ErrorCode.invalid_timestamp, f"timestamp {oldest_ms} lies too far in the past")
    if settings.log_config.cleanup_compact:
        decoded = _decoded(settings, records, start, header)
        keyless = [(at, KEY_NEEDED) for at, record in enumerate(decoded) if record.key is None]
        if keyless:
            raise KafkaError(ErrorCode.invalid_record, KEY_NEEDED, keyless)


def recompressed(
    settings: TopicSettings, records: memoryview, start: int, header: BatchHeader, codec: int
) -> memoryview:
    """Return the same records, compressed with the topic's codec (`compression.type`)."""
    decoded = [(r.key, r.value, r.headers, r.timestamp_ms) for r in _decoded(settings, records, start, header)]
    encoded = encode_batch(
        decoded,
        codec=codec,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        is_transactional=header.is_transactional,
    )
    return memoryview(bytearray(encoded))


def _decoded(settings: TopicSettings, records: memoryview, start: int, header: BatchHeader) -> Iterator[Record]:
    """Return the records of a batch. Their number and size are bounded, because the loop waits for the decoding."""
    if header.record_count > DECODED_RECORDS_MAX:
        raise KafkaError(
            ErrorCode.invalid_record,
            f"{header.record_count} records in a batch; at most {DECODED_RECORDS_MAX} if the broker must decode it",
        )
    return decode_batch(records, start, DECODED_BYTES_PER_BYTE_MAX * settings.max_message_bytes)


def found_at_recovery(log: Log) -> tuple[int, str] | None:
    """Return the first offset of the damage found when the log was opened, and the reason."""
    report = log.recovery
    if report is None or not report.is_damaged:
        return None
    if not report.damages:
        return log.log_end_offset, "the log ends below what was durable"
    return min(damage.offset for damage in report.damages), "batches that were durable are bad or missing"


def is_damage(error: Exception) -> bool:
    """Whether a read failed because of damaged files: corrupt batches, a missing file, or EIO."""
    if isinstance(error, KafkaError):
        return error.code == ErrorCode.corrupt_message
    return isinstance(error, OSError) and error.errno in (errno.EIO, errno.ENOENT)
