"""One partition as this node hosts it: its log, its watermark, and who waits for either."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeAlias
from uuid import UUID

from chronik.metadata.names import is_internal
from chronik.node.environment import Environment
from chronik.node.syncer import Syncer
from chronik.node.topic_settings import TopicSettings
from chronik.observe.logging import Logger
from chronik.observe.metrics import Metrics
from chronik.replication.leader import PartitionLeader
from chronik.storage.log import AppendResult, Duplicate, Log
from chronik.wire.batch import TRANSACTIONAL, BatchHeader, Record, check_batches, decode_batch, encode_batch
from chronik.wire.errors import ErrorCode, KafkaError

if TYPE_CHECKING:
    from chronik.storage.log import SyncJob

Waiter = Callable[[KafkaError | None], None]
LATEST_EPOCH = -1
DELETE_ALL = -1
KEY_NEEDED = "a compacted topic takes no record without a key"
DECODED_RECORDS_MAX = 100_000
DECODED_BYTES_PER_BYTE_MAX = 16


Appended: TypeAlias = AppendResult | Duplicate
"""What a produce did: the offsets of its records, new or (for a repeated batch) those they already had."""


class WaitingFetch(Protocol):
    """A fetch that waits for data."""

    def data_arrived(self, partition: Partition, size_bytes: int) -> None: ...

    def partition_gone(self) -> None: ...


class Partition:
    """Invariant: log_start_offset <= high_watermark <= log_end_offset; log end and watermark never fall.

    Everything that changes a partition runs on the node's loop, so that it has a single writer and offsets cannot race.
    """

    def __init__(
        self,
        topic: str,
        topic_id: UUID,
        index: int,
        log: Log,
        leader: PartitionLeader,
        settings: TopicSettings,
        *,
        replicas: tuple[int, ...],
        counts_unsynced: bool,
        env: Environment,
        syncer: Syncer,
        metrics: Metrics,
        logger: Logger,
    ) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.index = index
        self.log = log
        self.leader = leader
        self.settings = settings
        self.replicas = replicas
        self.is_internal = is_internal(topic)
        self.is_closed = False
        self._counts_unsynced = counts_unsynced
        self._env = env
        self._syncer = syncer
        self._metrics = metrics
        self._logger = logger
        self._written_waiters: deque[tuple[int, Waiter]] = deque()
        self._committed_waiters: deque[tuple[int, Waiter]] = deque()
        self._fetches: dict[WaitingFetch, None] = {}
        self._deleting = asyncio.Lock()

    # -- what others may know ------------------------------------------------------------------------------------------

    @property
    def log_start_offset(self) -> int:
        return self.log.log_start_offset

    @property
    def log_end_offset(self) -> int:
        return self.log.log_end_offset

    @property
    def high_watermark(self) -> int:
        return self.leader.high_watermark

    @property
    def leader_epoch(self) -> int:
        return self.leader.leader_epoch

    @property
    def visible_end_offset(self) -> int:
        """The first offset that consumers do not see."""
        return self.log.log_end_offset if self.settings.visible_when_appended else self.leader.high_watermark

    def check_leader_epoch(self, epoch: int) -> None:
        """A client that knows another epoch than ours has old metadata, or we have."""
        if epoch == LATEST_EPOCH or epoch == self.leader.leader_epoch:
            return
        if epoch < self.leader.leader_epoch:
            raise KafkaError(ErrorCode.fenced_leader_epoch, f"epoch {epoch} is over, now {self.leader.leader_epoch}")
        raise KafkaError(ErrorCode.unknown_leader_epoch, f"epoch {epoch} is not known here yet")

    def check_enough_replicas(self) -> None:
        """acks=all needs min.insync.replicas in sync before the append."""
        in_sync = len(self.leader.in_sync_replicas)
        # A topic with fewer replicas than the setting asks for all it has.
        needed = min(self.settings.min_insync_replicas, len(self.replicas))
        if in_sync < needed:
            raise KafkaError(ErrorCode.not_enough_replicas, f"{in_sync} replicas are in sync, {needed} are needed")

    # -- writing -------------------------------------------------------------------------------------------------------

    def append(self, records: memoryview, now_ms: int) -> Appended:
        """Append a producer's batch; its bytes are stamped in place and written as they came."""
        settings = self.settings
        batches = check_batches(records, settings.max_message_bytes)
        if len(batches) != 1:
            raise KafkaError(ErrorCode.invalid_record, f"{len(batches)} batches for one partition; one is allowed")
        start, header = batches[0]
        self._check_batch(records, start, header, now_ms)
        if header.producer_id >= 0:
            repeated = self.log.producers.check(header)
            if repeated is not None:
                return repeated
        wanted_codec = settings.broker_codec
        if wanted_codec is not None and wanted_codec != header.codec:
            records = self._recompressed(records, start, header, wanted_codec)
            batches = check_batches(records, settings.max_message_bytes)
        result = self.log.append(records, batches, self.leader.leader_epoch, now_ms)
        self._metrics.records_in += header.record_count
        self._appended(len(records))
        return result

    def append_internal(self, batch: bytes, now_ms: int) -> Appended:
        """Append a batch that this node made itself (group state)."""
        records = memoryview(bytearray(batch))
        batches = check_batches(records, len(records))
        result = self.log.append(records, batches, self.leader.leader_epoch, now_ms)
        self._appended(len(records))
        return result

    def _check_batch(self, records: memoryview, start: int, header: BatchHeader, now_ms: int) -> None:
        settings = self.settings
        if header.attributes & TRANSACTIONAL:
            raise KafkaError(ErrorCode.invalid_txn_state, "transactions are not supported by this node")
        if not settings.log_append_time and header.max_timestamp >= 0:
            if header.max_timestamp > now_ms + settings.timestamp_after_max_ms:
                raise KafkaError(
                    ErrorCode.invalid_timestamp, f"timestamp {header.max_timestamp} lies too far in the future"
                )
            oldest_ms = min(header.base_timestamp, header.max_timestamp)
            if 0 <= oldest_ms < now_ms - settings.timestamp_before_max_ms:
                raise KafkaError(ErrorCode.invalid_timestamp, f"timestamp {oldest_ms} lies too far in the past")
        if settings.is_compacted:
            decoded = self._decoded(records, start, header)
            keyless = [(at, KEY_NEEDED) for at, record in enumerate(decoded) if record.key is None]
            if keyless:
                raise KafkaError(ErrorCode.invalid_record, KEY_NEEDED, keyless)

    def _decoded(self, records: memoryview, start: int, header: BatchHeader) -> Iterator[Record]:
        """The records of a batch, where the topic's settings ask to look at them; bounded, since the loop waits."""
        if header.record_count > DECODED_RECORDS_MAX:
            raise KafkaError(
                ErrorCode.invalid_record,
                f"{header.record_count} records in a batch; this topic's settings allow {DECODED_RECORDS_MAX}",
            )
        return decode_batch(records, start, DECODED_BYTES_PER_BYTE_MAX * self.settings.max_message_bytes)

    def _recompressed(self, records: memoryview, start: int, header: BatchHeader, codec: int) -> memoryview:
        """The same records under the codec that the topic demands (`compression.type`)."""
        decoded = [(r.key, r.value, r.headers, r.timestamp_ms) for r in self._decoded(records, start, header)]
        encoded = encode_batch(
            decoded,
            codec=codec,
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            base_sequence=header.base_sequence,
        )
        return memoryview(bytearray(encoded))

    def _appended(self, size_bytes: int) -> None:
        if self._counts_unsynced:
            self._counted(self.log.log_end_offset, size_bytes)
        else:
            self._syncer.request(self)
            if self.settings.visible_when_appended:
                self._wake_fetches(size_bytes)

    def _counted(self, end_offset: int, size_bytes: int) -> None:
        """This node's copy counts as written up to `end_offset`."""
        rose = self.leader.counted(self.leader.node_id, end_offset)
        if self._written_waiters:
            _wake(self._written_waiters, end_offset)
        if rose:
            self._metrics.watermark_updates += 1
            if self._committed_waiters:
                _wake(self._committed_waiters, self.leader.high_watermark)
            if self._fetches:
                self._wake_fetches(size_bytes)
        elif self.settings.visible_when_appended:
            self._wake_fetches(size_bytes)

    # -- the syncer's side ---------------------------------------------------------------------------------------------

    def sync_done(self) -> None:
        if self.is_closed or self._counts_unsynced:
            return
        before = self.leader.high_watermark
        end = self.log.synced_end_offset
        self._counted(end, self.log.bytes_between(before, end) if self._fetches else 0)

    def sync_failed(self, job: SyncJob, error: Exception) -> None:
        self.log.sync_failed(job)
        self._logger.error("sync_failed", topic=self.topic, partition=self.index, error=repr(error))
        self._fail_waiters(KafkaError(ErrorCode.kafka_storage_error, f"the log could not be synced: {error}"))

    # -- waiting -------------------------------------------------------------------------------------------------------

    def is_written(self, end_offset: int) -> bool:
        return self._counts_unsynced or self.log.synced_end_offset >= end_offset

    def when_written(self, end_offset: int, waiter: Waiter) -> None:
        """Call back when this node's copy counts up to `end_offset` (acks=1): at once, if it does already."""
        if self.is_written(end_offset):
            waiter(None)
        elif self.log.read_only_forever:
            waiter(KafkaError(ErrorCode.kafka_storage_error, "the log could not be synced"))
        else:
            self._written_waiters.append((end_offset, waiter))

    def is_committed(self, end_offset: int) -> bool:
        return self.leader.high_watermark >= end_offset

    def when_committed(self, end_offset: int, waiter: Waiter) -> None:
        """Call back when the watermark has reached `end_offset` (acks=all)."""
        if self.is_committed(end_offset):
            waiter(None)
        elif self.log.read_only_forever:
            waiter(KafkaError(ErrorCode.kafka_storage_error, "the log could not be synced"))
        else:
            self._committed_waiters.append((end_offset, waiter))

    def wait_for_data(self, fetch: WaitingFetch) -> None:
        self._fetches[fetch] = None

    def stop_waiting(self, fetch: WaitingFetch) -> None:
        self._fetches.pop(fetch, None)

    def _wake_fetches(self, size_bytes: int) -> None:
        if self._fetches:
            for fetch in list(self._fetches):
                fetch.data_arrived(self, size_bytes)

    def _fail_waiters(self, error: KafkaError) -> None:
        for waiters in (self._written_waiters, self._committed_waiters):
            failed = list(waiters)
            waiters.clear()
            for _, waiter in failed:
                waiter(error)

    async def delete_records(self, offset: int) -> int:
        """Let go of everything below `offset` (-1: below the watermark); the new log start, once it is durable."""
        watermark = self.leader.high_watermark
        if offset == DELETE_ALL:
            offset = watermark
        if offset < 0 or offset > watermark:
            raise KafkaError(ErrorCode.offset_out_of_range, f"offset {offset} is not below the watermark {watermark}")
        job = self.log.increment_log_start(offset)
        async with self._deleting:
            await asyncio.get_running_loop().run_in_executor(self._env.executor, job.run)
        return self.log_start_offset

    # -- changes -------------------------------------------------------------------------------------------------------

    def configure(self, settings: TopicSettings) -> None:
        self.settings = settings
        self.log.configure(settings.log_config)

    def lead(self, leader_epoch: int) -> None:
        """A new leader epoch begins here, under the same log."""
        if leader_epoch == self.leader.leader_epoch:
            return
        self.leader = PartitionLeader(
            self.leader.node_id,
            leader_epoch,
            self.leader.in_sync_replicas,
            self.log.log_end_offset if self._counts_unsynced else self.log.synced_end_offset,
            self.leader.high_watermark,
        )
        self.log.start_epoch(leader_epoch)

    def close(self, error: KafkaError) -> None:
        """No more requests: everybody who waits gets `error`. The log is closed by the broker, in a thread."""
        self.is_closed = True
        self._fail_waiters(error)
        fetches, self._fetches = list(self._fetches), {}
        for fetch in fetches:
            fetch.partition_gone()


def _wake(waiters: deque[tuple[int, Waiter]], end_offset: int) -> None:
    while waiters and waiters[0][0] <= end_offset:
        waiters.popleft()[1](None)
