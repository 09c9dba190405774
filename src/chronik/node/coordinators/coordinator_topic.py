"""An internal topic that stores a coordinator's state: its creation, the loading of its partitions, and appends.

The leader of a partition coordinates the keys (groups, transactional ids) that hash to it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import NamedTuple, Protocol

from chronik.groups.offsets import Producer
from chronik.groups.records import Record
from chronik.groups.step import Append
from chronik.metadata.events import Event, LeaderChanged, TopicCreated, TopicDeleted
from chronik.metadata.image import ClusterImage
from chronik.node.admin.topics import Topics
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.topic_plans import NewTopic
from chronik.node.replicas.partition import is_damage, resolve
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.connection import Buffer
from chronik.observe.logging import Logger
from chronik.wire.batch import (
    BatchHeader,
    check_batches,
    decode_batch,
    encode_batch,
    read_batch_header,
    read_marker,
)
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.records import NewRecord

COORDINATOR_TOPIC_CONFIGS: Mapping[str, str] = {"cleanup.policy": "compact", "segment.bytes": str(16 * 1024 * 1024)}
"""Small segments: only closed ones are compacted, and a new coordinator reads everything that compaction leaves."""

LOAD_CHUNK_BYTES = 256 * 1024
"""The size of one chunk, which is read and decoded in the executor and replayed on the loop in one step."""

LOAD_RETRY_MIN_S = 0.05
LOAD_RETRY_MAX_S = 1.0
"""Retries start fast: after a failover the in-sync replicas return within milliseconds, and clients wait for them."""

START_WAIT_S = 0.5
"""Startup waits this long for partitions to load. Those that load longer answer COORDINATOR_LOAD_IN_PROGRESS."""

STOP_WAIT_S = 5.0

DAMAGED_THEN = (
    "its clients wait until an intact replica leads the partition; if there is none, restore the log from a backup"
)

APPEND_BYTES_MAX = 512 * 1024
"""Waiting appends to the same partition share a write up to this size."""

ONE_APPEND_BYTES_MAX = 8 * 1024 * 1024
"""The state of one key, without tombstones. More, from members with megabytes of metadata, would delay all keys of the
partition."""

APPEND_TIMEOUT_S = 5.0
"""How long a batch may wait for the high watermark, like Kafka's `offsets.commit.timeout.ms`. After that it is unknown
whether the batch will be committed, so the waiting requests get an error."""


class LoadedRecords(NamedTuple):
    """Consecutive records of a loading partition: of a batch in a producer's transaction, or of other batches.

    With `is_commit` this is a marker, which ends the producer's transaction and has no records.
    """

    records: list[tuple[bytes | None, bytes | None]]
    producer: Producer | None = None
    is_commit: bool | None = None


class Coordinator(Protocol):
    """The service whose state the topic stores."""

    partition_count: int
    """The number of partitions of the topic; 0 until it exists."""

    skips_damage: bool
    """Whether to load without a damaged batch if no other replica can lead. Otherwise the partition is not served."""

    def is_loaded(self, partition: int) -> bool: ...

    def start_loading(self, partition: int) -> None: ...

    def replay(self, partition: int, loaded: LoadedRecords) -> None:
        """Read the next records of a loading partition, in log order."""

    def finish_loading(self, partition: int, leader_epoch: int) -> int:
        """Serve the partition from now on; return the number of unreadable records that were skipped.

        Raise CORRUPT_MESSAGE if the coordinator skips none.
        """

    def unload(self, partition: int) -> None: ...

    def appended(self, token: int, error: ErrorCode) -> None: ...


@dataclass(eq=False)
class CoordinatorTopic:
    """The topic, as far as this node leads its partitions. Owned by the loop.

    Invariants: the coordinator is notified of the appends of one partition in the order in which it requested them, and
    of none that it requested before the partition was last loaded. Loaded state was read in the leader epoch in which
    this node leads, so no other coordinator has written since.
    """

    name: str
    _partition_count: int
    """The number of partitions if the topic is created now."""
    _what: str
    """What the topic stores: the log component, and the first word of its events."""
    _runtime: Runtime
    _metadata: MetadataLog
    _host: PartitionHost
    _topics: Topics
    _coordinator: Coordinator
    _ready: asyncio.Task[None] | None = None
    _loads: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _appenders: dict[int, Appender] = field(default_factory=dict)
    _is_stopped: bool = False

    def __post_init__(self) -> None:
        self._loop = self._runtime.loop
        self._log = self._runtime.log.bind(component=self._what)

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Wait for running appends, then unload every partition."""
        self._is_stopped = True
        for task in [*self._loads.values(), *([self._ready] if self._ready is not None else [])]:
            task.cancel()
        running = [appender.task for appender in self._appenders.values() if appender.task is not None]
        if running:
            await asyncio.wait(running, timeout=STOP_WAIT_S)
        self._unload_all()

    async def ensure_exists(self) -> None:
        """Wait until the topic exists and its local partitions are at least loading; create it if needed."""
        if self._coordinator.partition_count:
            return
        if self._is_stopped:
            raise KafkaError(ErrorCode.coordinator_not_available, "the node is stopping")
        try:
            await asyncio.shield(self._get_ready())
        except (KafkaError, TimeoutError) as error:
            raise KafkaError(ErrorCode.coordinator_not_available, f"no {self.name}: {error}") from error

    def _get_ready(self) -> asyncio.Task[None]:
        """Return the single task that makes the topic ready; all callers share it."""
        task = self._ready
        if task is None:
            task = self._ready = self._loop.create_task(self._create_and_take_over(), name=f"create-{self.name}")
            task.add_done_callback(self._on_ready)
        return task

    def _on_ready(self, task: asyncio.Task[None]) -> None:
        self._ready = None
        if not task.cancelled() and task.exception() is not None:
            self._log.warning("coordinator_topic_not_ready", topic=self.name, error=repr(task.exception()))

    async def _create_and_take_over(self) -> None:
        if self._metadata.image.topic(self.name) is None:
            new = NewTopic(self.name, num_partitions=self._partition_count, configs=dict(COORDINATOR_TOPIC_CONFIGS))
            try:
                await self._topics.create(new, by_broker=True)
            except KafkaError as error:
                if error.code is not ErrorCode.topic_already_exists:
                    raise
        await self._host.applied()
        await self.take_over()

    async def take_over(self) -> None:
        """Load the partitions that this node leads, if the topic exists."""
        topic = self._metadata.image.topic(self.name)
        if topic is None or self._is_stopped:
            return
        self._coordinator.partition_count = len(topic.partitions)
        for partition in topic.partitions:
            if partition.leader == self._runtime.node_id:
                self._load(partition.partition)
        # An empty partition loads at once, so the first request need not be retried.
        if self._loads:
            await asyncio.wait(list(self._loads.values()), timeout=START_WAIT_S)

    def metadata_changed(self, image: ClusterImage, events: Sequence[Event]) -> None:
        """Load or unload partitions whose leader changed."""
        for event in events:
            if not self._is_stopped:
                self._on_event(event)

    def _on_event(self, event: Event) -> None:
        match event:
            case TopicDeleted(topic=topic) if topic.name == self.name:
                self._unload_all()
                self._coordinator.partition_count = 0
            case TopicCreated(topic=topic) if topic.name == self.name:
                self._get_ready()
            case LeaderChanged(topic=name, partition=partition) if name == self.name:
                # On every new leader epoch: even if this node led before, another coordinator may have led since.
                self._unload(partition.partition)
                if partition.leader == self._runtime.node_id:
                    self._load(partition.partition)

    # -- loading -------------------------------------------------------------------------------------------------------

    def _load(self, partition: int) -> None:
        if partition in self._loads or self._coordinator.is_loaded(partition):
            return
        self._coordinator.start_loading(partition)
        task = self._loop.create_task(self._load_until_done(partition), name=f"load-{self._what}-{partition}")
        self._loads[partition] = task

    async def _load_until_done(self, partition: int) -> None:
        pause_s = LOAD_RETRY_MIN_S
        reported = ""
        while True:
            try:
                await self._host.applied()
                await self._read_partition(partition)
                image = self._metadata.image.partition(self.name, partition)
                # A later leader epoch would have cancelled this task.
                unreadable = self._coordinator.finish_loading(partition, -1 if image is None else image.leader_epoch)
                break
            except KafkaError as error:
                if error.message != reported:
                    reported = error.message
                    if error.code is ErrorCode.corrupt_message:
                        self._log.error(
                            f"{self._what}_load_failed", partition=partition, reason=reported, then=DAMAGED_THEN
                        )
                    else:
                        # Normal after a failover: too few replicas are in sync yet, or another node leads now.
                        self._log.info(f"{self._what}_load_waits", partition=partition, reason=reported)
            except Exception as error:
                self._log.exception(f"{self._what}_load_failed", partition=partition, error=repr(error))
            self._coordinator.start_loading(partition)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LOAD_RETRY_MAX_S)
        del self._loads[partition]
        if unreadable:
            self._log.warning(f"{self._what}_records_unreadable", partition=partition, count=unreadable)

    async def _read_partition(self, index: int) -> None:
        partition = self._host.partitions.get((self.name, index))
        if partition is None:
            raise KafkaError(ErrorCode.not_leader_or_follower, f"{self.name}-{index} is not open here")
        if not partition.leads:
            # Metadata names this node, but its replica is not fit to lead yet, or the lease has ended.
            raise KafkaError(ErrorCode.not_leader_or_follower, f"{self.name}-{index} is not led here under a lease")
        # Only the coordinator writes here, and only after loading: nothing is missed beyond the current end. Markers of
        # transactions are the exception: the groups' coordinator learns of those that are written while it loads.
        end_offset = partition.log_end_offset
        committed: asyncio.Future[None] = self._loop.create_future()
        partition.when_committed(end_offset, partial(resolve, committed))
        await committed
        offset = partition.log_start_offset
        count = 0
        while offset < end_offset:
            try:
                read = partition.log.read_job(offset, LOAD_CHUNK_BYTES, end_offset)
                chunk = await self._runtime.run_blocking(partial(read_chunk, read))
            except Exception as error:
                if is_damage(error):
                    partition.found_damaged(offset, "read", str(error))
                raise
            if chunk is None:
                break  # Compaction has removed the remaining records.
            for damage in chunk.damages:
                is_elsewhere = partition.found_damaged(damage.offset, "read", damage.reason)
                if is_elsewhere or not self._coordinator.skips_damage:
                    raise KafkaError(ErrorCode.corrupt_message, f"{self.name}-{index}: {damage.reason}")
            offset = chunk.next_offset
            for loaded in chunk.parts:
                self._coordinator.replay(index, loaded)
                count += len(loaded.records)
        if count:
            self._log.info(f"{self._what}_loaded", partition=index, records=count)

    def _unload_all(self) -> None:
        for partition in range(self._coordinator.partition_count):
            self._unload(partition)

    def _unload(self, partition: int) -> None:
        task = self._loads.pop(partition, None)
        if task is not None:
            task.cancel()
        appender = self._appenders.pop(partition, None)
        if appender is not None:
            appender.close()
        self._coordinator.unload(partition)

    # -- appends -------------------------------------------------------------------------------------------------------

    def append(self, append: Append) -> None:
        """Append to a partition after the earlier appends, and report the outcome to the coordinator."""
        appender = self._appenders.get(append.partition)
        if appender is None:
            appender = Appender(
                self.name,
                append.partition,
                self._what,
                self._runtime,
                self._host,
                self._log,
                self._coordinator.appended,
            )
            self._appenders[append.partition] = appender
        appender.add(append)


@dataclass(eq=False)
class Appender:
    """Appends to one partition in order, one write at a time; all waiting appends share the next one (group commit).

    Consecutive appends share a batch too, except for those in different transactions.
    The number of waiting appends is bounded by the requests in flight, one for each connection.
    """

    _topic: str
    _partition: int
    _what: str
    _runtime: Runtime
    _host: PartitionHost
    _log: Logger
    _appended: Callable[[int, ErrorCode], None]
    task: asyncio.Task[None] | None = None
    _waiting: deque[Append] = field(default_factory=deque)
    _is_closed: bool = False

    def add(self, append: Append) -> None:
        self._waiting.append(append)
        if self.task is None:
            name = f"append-{self._what}-{self._partition}"
            self.task = self._runtime.loop.create_task(self._write_all(), name=name)

    def close(self) -> None:
        """Stop after the partition moved: drop the waiting appends, and ignore the outcome of the running one."""
        self._is_closed = True
        self._waiting.clear()

    async def _write_all(self) -> None:
        while self._waiting:
            taken = self._take()
            # No marker can be appended between this check and the append: neither waits.
            refused = {append.token: error for append in taken if (error := self._refusal(append))}
            accepted = [append for append in taken if append.token not in refused]
            error = await self._write(accepted) if accepted else ErrorCode.none
            outcomes = [(append, refused.get(append.token, error)) for append in taken]
            if error is ErrorCode.request_timed_out:
                # Later appends cannot be committed before this batch and have already waited for it: fail them too.
                outcomes += [(append, ErrorCode.not_enough_replicas) for append in self._waiting]
                self._waiting.clear()
            for append, outcome in outcomes:
                if self._is_closed:
                    return
                self._report(append, outcome)
        self.task = None

    def _report(self, append: Append, outcome: ErrorCode) -> None:
        try:
            self._appended(append.token, outcome)
        except Exception as error:
            # A fault in the state of one key must not stop the appends of the other keys.
            self._log.exception(f"{self._what}_append_not_applied", partition=self._partition, error=repr(error))

    def _refusal(self, append: Append) -> ErrorCode | None:
        """Return why the append must not be written: it is too large, or its transaction does not allow it any more."""
        # Tombstones of what earlier appends wrote are never too large: otherwise nothing could remove it.
        size_bytes = sum(len(key) + len(value) for key, value in append.records if value is not None)
        if size_bytes > ONE_APPEND_BYTES_MAX:
            reason = f"{size_bytes} bytes, at most {ONE_APPEND_BYTES_MAX}"
            self._log.warning(f"{self._what}_append_refused", partition=self._partition, reason=reason)
            return ErrorCode.message_too_large
        partition = self._host.partitions.get((self._topic, self._partition))
        if append.producer is None or partition is None:
            return None
        try:
            partition.log.producers.check_verified(*append.producer, append.verified_from)
        except KafkaError as error:
            self._log.info(f"{self._what}_append_refused", partition=self._partition, reason=error.message)
            return error.code
        return None

    def _take(self) -> list[Append]:
        taken = [self._waiting.popleft()]
        size_bytes = _size_bytes(taken[0])
        while self._waiting and (size_bytes := size_bytes + _size_bytes(self._waiting[0])) <= APPEND_BYTES_MAX:
            taken.append(self._waiting.popleft())
        return taken

    async def _write(self, appends: list[Append]) -> ErrorCode:
        wall_ms = self._runtime.env.wall_ms()
        try:
            batches = b"".join(
                _encode(producer, [record for append in run for record in append.records], wall_ms)
                for producer, run in groupby(appends, key=lambda append: append.producer)
            )
            await self._host.append_internal(self._topic, self._partition, batches, APPEND_TIMEOUT_S)
        except KafkaError as error:
            self._log.warning(f"{self._what}_append_failed", partition=self._partition, error=str(error))
            return error.code
        except Exception as error:
            self._log.exception(f"{self._what}_append_failed", partition=self._partition, error=repr(error))
            return ErrorCode.unknown_server_error
        return ErrorCode.none


def _size_bytes(append: Append) -> int:
    return sum(len(key) + len(value or b"") for key, value in append.records)


def _encode(producer: Producer | None, records: Iterable[Record], wall_ms: int) -> bytes:
    new_records: list[NewRecord] = [(key, value, [], wall_ms) for key, value in records]
    if producer is None:
        return encode_batch(new_records)
    producer_id, epoch = producer
    return encode_batch(new_records, producer_id=producer_id, producer_epoch=epoch, is_transactional=True)


class _Damage(NamedTuple):
    offset: int
    reason: str


class Chunk(NamedTuple):
    """Decoded records of a part of a log. `damages` are the batches that cannot be read."""

    parts: list[LoadedRecords]
    next_offset: int
    damages: list[_Damage]


def read_chunk(job: Callable[[], Buffer]) -> Chunk | None:
    """Return the records of a log chunk, or None if it is empty. Runs in the executor."""
    data = memoryview(job())
    loaded = [LoadedRecords([])]
    damages: list[_Damage] = []
    next_offset: int | None = None
    while data:
        header = read_batch_header(data)
        batch, data = data[: header.size_bytes], data[header.size_bytes :]
        next_offset = header.next_offset
        try:
            check_batches(batch, len(batch), from_producer=False)
            part = _decode(header, batch)
        except KafkaError as error:
            damages.append(_Damage(header.base_offset, f"the batch at offset {header.base_offset} is damaged: {error}"))
            # A record without a key is unreadable.
            part = LoadedRecords([(None, None)])
        if part.producer is None and loaded[-1].producer is None:
            loaded[-1].records.extend(part.records)
        else:
            loaded.append(part)
    return None if next_offset is None else Chunk(loaded, next_offset, damages)


def _decode(header: BatchHeader, batch: memoryview) -> LoadedRecords:
    producer = Producer(header.producer_id, header.producer_epoch) if header.is_transactional else None
    if header.is_control:
        # Compaction may leave a marker's batch without its record: nothing that it decides is left.
        is_marker = producer is not None and header.record_count > 0
        return LoadedRecords([], producer, read_marker(batch).is_commit) if is_marker else LoadedRecords([])
    return LoadedRecords([(record.key, record.value) for record in decode_batch(batch)], producer)
