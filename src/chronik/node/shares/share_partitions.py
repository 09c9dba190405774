"""The share partitions of this node: the records in flight of the partitions that it leads, for each share group.

`chronik.shares.share_partition` owns all rules. This module loads the state from the share coordinator, reads the log,
carries out the writes, and runs the timers of the locks. A share partition is dropped when the leader epoch ends, when
another leader or an administrator has changed its state, and when no member reads it any more. Its state is then read
again: only the state that the share coordinator has stored is valid.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol
from uuid import UUID

from chronik.metadata.events import Event, LeaderChanged, TopicDeleted
from chronik.metadata.group_configs import (
    DEAD_LETTER_TOPIC,
    SHARE_AUTO_OFFSET_RESET,
    SHARE_DELIVERY_COUNT_LIMIT,
    SHARE_ISOLATION_LEVEL,
    SHARE_PARTITION_MAX_RECORD_LOCKS,
    SHARE_RECORD_LOCK_DURATION_MS,
    SHARE_RENEW_ACKNOWLEDGE_ENABLE,
    duration_ms,
)
from chronik.metadata.image import ClusterImage
from chronik.node.config import group_setting
from chronik.node.coordinators.share_state import ShareStateClient
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.replicas.partition import BAD_BATCH, Partition, is_damage
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.connection import Buffer
from chronik.node.shares.share_sessions import PartitionId, ShareSession, ShareSessions
from chronik.observe.metrics import ShareFigures
from chronik.shares.share_partition import (
    Acknowledged,
    Acknowledgement,
    Acquired,
    Action,
    DeadLetter,
    FetchedBatch,
    Limits,
    SharePartition,
    ShareSettings,
    Write,
)
from chronik.shares.state import UNINITIALIZED_OFFSET, SharePartitionKey, WrittenState
from chronik.storage.aborted import AbortedTransaction
from chronik.wire.batch import read_batch_header
from chronik.wire.errors import ErrorCode, KafkaError

STATE_TIMEOUT_MS = 5_000
"""How long a read or a write of the state is repeated. Then its acknowledgements fail, and clients may repeat them."""

READ_BYTES_MIN = 64 * 1024
READ_BYTES_FIRST = 512 * 1024
READS_MAX = 64
"""Reads of one fetch that find only markers, aborted batches and records that others have acquired."""

EARLIEST, LATEST = "earliest", "latest"

STATE_ERRORS = {
    ErrorCode.invalid_request: ErrorCode.unknown_topic_or_partition,
    ErrorCode.fenced_state_epoch: ErrorCode.not_leader_or_follower,
    ErrorCode.fenced_leader_epoch: ErrorCode.not_leader_or_follower,
    ErrorCode.not_coordinator: ErrorCode.coordinator_not_available,
    ErrorCode.coordinator_load_in_progress: ErrorCode.coordinator_not_available,
    ErrorCode.network_exception: ErrorCode.coordinator_not_available,
    ErrorCode.request_timed_out: ErrorCode.coordinator_not_available,
}
"""An error of the share coordinator as a consumer gets it."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """What configs of a group say about its records."""

    records: ShareSettings
    offset_reset: str
    is_read_committed: bool
    may_renew: bool


class Waiting(Protocol):
    """A fetch that waits for records."""

    def wake(self) -> None: ...


class Fetched(NamedTuple):
    """The records that a member has acquired, in whole batches. The batches may contain other records too."""

    acquired: list[Acquired]
    records: Buffer


@dataclass(slots=True, eq=False)
class LedShare:
    """A share partition while this node leads it in one epoch."""

    key: SharePartitionKey
    topic: str
    log: Partition
    leader_epoch: int
    loading: asyncio.Task[None] | None = None
    machine: SharePartition | None = None
    is_reading: bool = False
    was_refused: bool = False
    """Whether a fetch found that another one was reading: it waits for that one to end."""
    is_dropped: bool = False
    record_bytes: float = 0.0
    """The size of a record in the last read; 0: unknown."""
    answers: dict[int, asyncio.Future[ErrorCode]] = field(default_factory=dict)
    waiting: dict[Waiting, None] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None
    timer_ms: int = 0

    def wake(self) -> None:
        for fetch in list(self.waiting):
            fetch.wake()


class SharePartitions:
    """Owned by the loop. Invariant: a share partition is in `_led` only in the leader epoch in which it was loaded."""

    def __init__(
        self, runtime: Runtime, metadata: MetadataLog, host: PartitionHost, state: ShareStateClient, sessions_max: int
    ) -> None:
        self._runtime = runtime
        self._loop = runtime.loop
        self._config = runtime.config
        self._metadata = metadata
        self._host = host
        self._state = state
        self._log = runtime.log.bind(component="shares")
        self._led: dict[SharePartitionKey, LedShare] = {}
        self._readers: dict[SharePartitionKey, int] = {}
        """How many sessions read each share partition."""
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._is_stopped = False
        self.sessions = ShareSessions(sessions_max, self._session_opened, self._session_closed)
        self.copy_dead_letter: Callable[[LedShare, DeadLetter], None] | None = None
        """Copies records to the dead-letter topic of a group, then calls `dead_letter_written`."""

    async def stop(self) -> None:
        """Release what is acquired, write that, and stop."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self.sessions.close_all()
        writing = list(self._tasks)
        if writing:
            await asyncio.wait(writing, timeout=1.0)
        for led in list(self._led.values()):
            self._drop(led, ErrorCode.not_leader_or_follower)
        for task in list(self._tasks):
            task.cancel()

    def group_settings(self, group_id: str) -> GroupSettings:
        own = self._metadata.image.group_configs.get(group_id, {})

        def number(name: str) -> int:
            return int(own.get(name, getattr(self._config, group_setting(name))))

        records = ShareSettings(
            number(SHARE_RECORD_LOCK_DURATION_MS),
            number(SHARE_DELIVERY_COUNT_LIMIT),
            number(SHARE_PARTITION_MAX_RECORD_LOCKS),
            bool(own.get(DEAD_LETTER_TOPIC)),
        )
        return GroupSettings(
            records,
            own.get(SHARE_AUTO_OFFSET_RESET, LATEST),
            own.get(SHARE_ISOLATION_LEVEL, "read_uncommitted") == "read_committed",
            own.get(SHARE_RENEW_ACKNOWLEDGE_ENABLE, "true") == "true",
        )

    def figures(self) -> Iterator[ShareFigures]:
        """Describe the share partitions that this node leads."""
        now_ms = self._now_ms()
        for key, led in self._led.items():
            machine = led.machine
            if machine is None or not led.log.leads:
                continue
            lock_ms, counts = machine.oldest_lock_ms(), machine.deliveries
            left_ms = machine.settings.record_lock_duration_ms if lock_ms is None else lock_ms - now_ms
            yield ShareFigures(
                key.group_id,
                led.topic,
                key.partition,
                machine.start_offset,
                machine.figures()["acquired"],
                max(0, machine.settings.record_lock_duration_ms - left_ms) / 1000,
                counts.delivered,
                counts.accepted,
                counts.released,
                counts.rejected,
                counts.exhausted,
                counts.exhausted_offset,
                *machine.most_delivered(),
                machine.settings.delivery_count_limit,
            )

    # -- leadership ----------------------------------------------------------------------------------------------------

    def metadata_changed(self, image: ClusterImage, events: Sequence[Event]) -> None:
        """Drop what this node no longer leads, and what it leads in a new epoch."""
        for event in events:
            match event:
                case LeaderChanged(topic_id=topic_id, partition=changed):
                    self._drop_all(topic_id, changed.partition)
                case TopicDeleted(topic=topic):
                    self._drop_all(topic.id, None)

    def _drop_all(self, topic_id: UUID, partition: int | None) -> None:
        for key, led in list(self._led.items()):
            if key.topic_id == topic_id and partition in (None, key.partition):
                self._drop(led, ErrorCode.not_leader_or_follower)

    def _drop(self, led: LedShare, error: ErrorCode) -> None:
        """Forget the records in flight. Acknowledgements that wait fail: their outcome is unknown."""
        led.is_dropped = True
        if self._led.get(led.key) is led:
            del self._led[led.key]
        if led.timer is not None:
            led.timer.cancel()
        if led.loading is not None:
            led.loading.cancel()
        if led.machine is not None:
            self._run(led, led.machine.fence(error))
        led.wake()

    def partition_of(self, key: SharePartitionKey) -> tuple[str, Partition]:
        """Return the topic and the partition if this node leads it under a lease; raise the client's error."""
        topic = self._metadata.image.names_by_id.get(key.topic_id)
        if topic is None:
            raise KafkaError(ErrorCode.unknown_topic_id, f"topic {key.topic_id} is not known")
        return topic, self._host.require_leader(topic, key.partition)

    async def led(self, key: SharePartitionKey) -> LedShare:
        """Return the share partition with its state loaded; raise the client's error."""
        topic, partition = self.partition_of(key)
        led = self._led.get(key)
        if led is not None and (led.log is not partition or led.leader_epoch != partition.leader_epoch):
            self._drop(led, ErrorCode.not_leader_or_follower)
            led = None
        if led is not None and led.machine is not None and led.machine.fenced is not None:
            self._drop(led, led.machine.fenced)
            led = None
        if led is None:
            led = self._led[key] = LedShare(key, topic, partition, partition.leader_epoch)
        if led.machine is None:
            await self._load(led)
        if led.machine is None or led.is_dropped:
            raise KafkaError(ErrorCode.not_leader_or_follower, f"{topic}-{key.partition} has another leader")
        led.machine.settings = self.group_settings(key.group_id).records
        return led

    async def _load(self, led: LedShare) -> None:
        """Load the state once for all requests that wait for it."""
        if led.loading is None:
            led.loading = self._loop.create_task(self._load_state(led), name=f"load-share-{led.topic}")
            # Retrieve the exception, because the callers may be gone.
            led.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        loading = led.loading
        try:
            await asyncio.shield(loading)
        except asyncio.CancelledError:
            if led.is_dropped:
                raise KafkaError(ErrorCode.not_leader_or_follower, f"{led.topic} has another leader") from None
            raise
        except Exception:
            # The next request tries again; without one, nothing is left of it.
            if led.loading is loading:
                led.loading = None
            self._drop_if_unread(led)
            raise

    async def _load_state(self, led: LedShare) -> None:
        key, epoch = led.key, led.leader_epoch
        state = (await self._state.read({key: epoch}, STATE_TIMEOUT_MS))[key]
        if state.error is not ErrorCode.none:
            raise self._state_error(led, state.error)
        settings = self.group_settings(key.group_id)
        start_offset = state.start_offset
        if start_offset == UNINITIALIZED_OFFSET:
            start_offset = await self._reset_offset(led, settings)
            # Before anything is delivered: another leader would compute a later offset, and skip records.
            written = WrittenState(state.state_epoch, epoch, start_offset, (), 0)
            error = (await self._state.write({key: written}, STATE_TIMEOUT_MS))[key]
            if error is not ErrorCode.none:
                raise self._state_error(led, error)
        if led.is_dropped:
            return
        machine = led.machine = SharePartition(settings.records, epoch)
        self._run(led, machine.load(state.state_epoch, start_offset, state.batches))
        self._log.info(
            "share_partition_loaded",
            group=key.group_id,
            **led.log.log_fields,
            start_offset=machine.start_offset,
            end_offset=machine.end_offset,
        )

    def _state_error(self, led: LedShare, error: ErrorCode) -> KafkaError:
        reason = f"the state of {led.topic}-{led.key.partition} cannot be used: {error.name}"
        return KafkaError(STATE_ERRORS.get(error, error), reason)

    async def _reset_offset(self, led: LedShare, settings: GroupSettings) -> int:
        """Return where a group without a start offset begins (`share.auto.offset.reset`)."""
        log, policy = led.log, settings.offset_reset
        if policy == EARLIEST:
            return log.log_start_offset
        log.check_end_is_known()
        ago_ms = duration_ms(policy)
        if ago_ms is None:
            return log.last_stable_offset if settings.is_read_committed else log.high_watermark
        end = log.high_watermark
        job = log.log.offset_for_timestamp_job(max(0, self._runtime.env.wall_ms() - ago_ms), end)
        found = await self._runtime.run_blocking(job)
        return end if found is None else max(found.offset, log.log_start_offset)

    # -- sessions ------------------------------------------------------------------------------------------------------

    def _session_opened(self, session: ShareSession, partition: PartitionId) -> None:
        key = SharePartitionKey(session.group_id, *partition)
        self._readers[key] = self._readers.get(key, 0) + 1

    def _session_closed(self, session: ShareSession, partition: PartitionId) -> None:
        key = SharePartitionKey(session.group_id, *partition)
        left = self._readers.get(key, 0) - 1
        if left > 0:
            self._readers[key] = left
        else:
            self._readers.pop(key, None)
        led = self._led.get(key)
        if led is not None and led.machine is not None:
            self._run(led, led.machine.release(session.member_id, self._now_ms()))
            led.wake()
        if led is not None:
            self._drop_if_unread(led)

    def _drop_if_unread(self, led: LedShare) -> None:
        """Drop what no member reads: an administrator may change the state of an empty group meanwhile."""
        if led.key in self._readers or led.is_dropped or led.is_reading or led.answers:
            return
        machine = led.machine
        is_loading = machine is None and led.loading is not None and not led.loading.done()
        if not is_loading and (machine is None or machine.fenced is not None or machine.is_idle):
            self._drop(led, ErrorCode.not_leader_or_follower)

    # -- acknowledging -------------------------------------------------------------------------------------------------

    async def acknowledge(
        self, key: SharePartitionKey, member_id: str, acknowledgements: Sequence[Acknowledgement]
    ) -> ErrorCode:
        """Acknowledge records; return when that is durable, or why it is not."""
        led = await self.led(key)
        machine = led.machine
        assert machine is not None
        token, actions = machine.acknowledge(member_id, acknowledgements, self._now_ms())
        answer: asyncio.Future[ErrorCode] = self._loop.create_future()
        led.answers[token] = answer
        self._run(led, actions)
        error = await answer
        self._drop_if_unread(led)
        return STATE_ERRORS.get(error, error) if error is not ErrorCode.invalid_request or machine.fenced else error

    # -- fetching ------------------------------------------------------------------------------------------------------

    async def fetch(
        self, led: LedShare, session: ShareSession, limits: Limits, max_bytes: int, is_first: bool
    ) -> Fetched | None:
        """Acquire records for a member; None if there are none now. One fetch at a time reads a share partition."""
        machine = led.machine
        if machine is None or led.is_reading:
            led.was_refused = True
            return None
        led.is_reading, led.was_refused = True, False
        try:
            for _ in range(READS_MAX):
                machine.log_start_moved(led.log.log_start_offset)
                self._run(led, machine.store_start())
                if not machine.can_acquire or led.is_dropped:
                    return None
                offset = machine.next_fetch_offset
                read = await self._read(led, offset, limits, max_bytes, is_first)
                if read is None or led.is_dropped or session.is_closed:
                    return None
                fetched = self._acquire(led, session, offset, *read, limits)
                if fetched is not None or machine.next_fetch_offset <= offset:
                    return fetched
            return None
        finally:
            led.is_reading = False
            if led.was_refused:
                self._loop.call_soon(led.wake)
            self._drop_if_unread(led)

    async def _read(
        self, led: LedShare, offset: int, limits: Limits, max_bytes: int, is_first: bool
    ) -> tuple[Buffer, list[AbortedTransaction]] | None:
        """Read the log from an offset, and the aborted transactions of what was read; None if there is nothing."""
        partition = led.log
        if not partition.leads:
            raise KafkaError(ErrorCode.not_leader_or_follower, f"{led.topic} is not led here under a lease")
        is_committed = self.group_settings(led.key.group_id).is_read_committed
        upto = partition.last_stable_offset if is_committed else partition.visible_end_offset
        if offset >= upto or offset > partition.log_end_offset:
            return None
        wanted = int(led.record_bytes * limits.max_records * 1.25) if led.record_bytes else READ_BYTES_FIRST
        size = max(0, min(max(wanted, READ_BYTES_MIN), max_bytes))
        generation = partition.generation
        try:
            read = partition.log.read(offset, size, upto, min_one_batch=is_first)
            data = await self._read_cold(partition, offset, size, upto, is_first) if read is None else read.data
            aborted: list[AbortedTransaction] = []
            job = partition.aborted_job(offset, min(upto, partition.log.read_limit(offset))) if is_committed else None
            if job is not None:
                try:
                    aborted = await self._runtime.run_blocking(job)
                except Exception as error:
                    partition.lookup_failed(error)
                    raise
        except KafkaError:
            raise
        except Exception as error:
            if is_damage(error):
                partition.found_damaged(offset, "read", str(error))
            else:
                self._log.exception("share_read_failed", **partition.log_fields, error=repr(error))
            raise KafkaError(ErrorCode.kafka_storage_error, "the log cannot be read") from error
        if partition.generation != generation or not partition.leads:
            raise KafkaError(ErrorCode.not_leader_or_follower, f"{led.topic} has another leader")
        return (data, aborted) if len(data) else None

    async def _read_cold(self, partition: Partition, offset: int, size: int, upto: int, is_first: bool) -> Buffer:
        if not partition.jobs.begin():
            raise KafkaError(ErrorCode.not_leader_or_follower, "the log is being truncated")
        try:
            job = partition.log.read_job(offset, size, upto, min_one_batch=is_first)
            data = await self._runtime.run_blocking(job)
        finally:
            partition.jobs.end()
        if job.damaged_at is not None:
            is_elsewhere = partition.found_damaged(job.damaged_at, "read", BAD_BATCH)
            raise KafkaError(ErrorCode.kafka_storage_error if is_elsewhere else ErrorCode.corrupt_message, BAD_BATCH)
        return data

    def _acquire(
        self,
        led: LedShare,
        session: ShareSession,
        offset: int,
        data: Buffer,
        aborted: list[AbortedTransaction],
        limits: Limits,
    ) -> Fetched | None:
        """Acquire records of the batches in `data`; return them with the batches that contain them."""
        machine = led.machine
        assert machine is not None
        positions: list[tuple[int, int, int]] = []
        batches: list[FetchedBatch] = []
        at, records = 0, 0
        while at < len(data):
            header = read_batch_header(data, at)
            is_readable = not header.is_control and not (
                aborted and header.is_transactional and _is_aborted(aborted, header.producer_id, header.base_offset)
            )
            batches.append(FetchedBatch(header.base_offset, header.last_offset, is_readable))
            positions.append((header.last_offset, at, at + header.size_bytes))
            records += header.last_offset_delta + 1
            at += header.size_bytes
        led.record_bytes = len(data) / max(1, records)
        acquired = machine.acquire(session.member_id, offset, batches, limits, self._now_ms())
        self._set_timer(led)
        if not acquired:
            return None
        first = next(start for last, start, _ in positions if last >= acquired[0].first_offset)
        end = next(end for last, _, end in positions if last >= acquired[-1].last_offset)
        return Fetched(acquired, data if (first, end) == (0, len(data)) else memoryview(data)[first:end])

    # -- actions -------------------------------------------------------------------------------------------------------

    def _now_ms(self) -> int:
        return int(self._loop.time() * 1000)

    def _run(self, led: LedShare, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Write():
                    task = self._loop.create_task(self._write(led, action), name=f"write-share-{led.topic}")
                    self._tasks[task] = None
                    task.add_done_callback(lambda task: self._tasks.pop(task, None))
                case Acknowledged(token=token, error=error):
                    answer = led.answers.pop(token)
                    if not answer.done():
                        answer.set_result(error)
                case DeadLetter():
                    if self.copy_dead_letter is not None:
                        self.copy_dead_letter(led, action)
        self._set_timer(led)

    def dead_letter_written(self, led: LedShare, letter: DeadLetter) -> None:
        if led.machine is not None and not led.is_dropped:
            self._run(led, led.machine.dead_letter_written(letter.first_offset, letter.last_offset))
            led.wake()

    async def _write(self, led: LedShare, write: Write) -> None:
        error = ErrorCode.unknown_server_error
        try:
            error = (await self._state.write({led.key: write.state}, STATE_TIMEOUT_MS))[led.key]
        finally:
            machine = led.machine
            if machine is not None and not led.is_dropped:
                self._run(led, machine.written(write.token, error, self._now_ms()))
                if error is not ErrorCode.none:
                    self._log.warning(
                        "share_state_write_failed",
                        group=led.key.group_id,
                        **led.log.log_fields,
                        error=error.name,
                        then="the records stay locked, or are delivered again",
                    )
                led.wake()
                self._drop_if_unread(led)

    def _set_timer(self, led: LedShare) -> None:
        """Set the timer of the locks. It is only ever moved earlier, since an early tick is harmless."""
        machine = led.machine
        deadline_ms = None if machine is None else machine.next_deadline_ms()
        if deadline_ms is None or led.is_dropped or (led.timer is not None and led.timer_ms <= deadline_ms):
            return
        if led.timer is not None:
            led.timer.cancel()
        led.timer_ms = deadline_ms
        led.timer = self._loop.call_at((deadline_ms + 1) / 1000, self._on_timer, led)

    def _on_timer(self, led: LedShare) -> None:
        led.timer = None
        if led.machine is not None and not led.is_dropped:
            self._run(led, led.machine.tick(self._now_ms()))
            led.wake()


def _is_aborted(aborted: Sequence[AbortedTransaction], producer_id: int, base_offset: int) -> bool:
    return any(
        each.producer_id == producer_id and each.first_offset <= base_offset <= each.last_offset for each in aborted
    )
