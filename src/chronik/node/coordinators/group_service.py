"""Runs the group state machine on the node's loop: replies, ordered appends, timers and loading.

The state machine (`chronik.groups`) owns all rules. This module only has the futures of the waiting requests, one
append queue for each partition of the offsets topic, one timer, and the tasks that create and load that topic.

A coordinator needs a lease. This node answers for a group only while it leads the group's partition with a valid lease.
The lease is checked when the response is sent (`_authority`); otherwise clients get NOT_COORDINATOR and look for the
coordinator elsewhere. The groups' clock stops without a lease: members that could not reach their coordinator keep
their membership if it is still their coordinator when the lease is renewed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from chronik.groups.actions import Action, Append, Moment, Rebalanced, Reply
from chronik.groups.commits import CommitRequest
from chronik.groups.coordinator import GroupCoordinator
from chronik.groups.member import JoinRequest, SyncRequest
from chronik.groups.records import CommittedOffset, TopicPartition
from chronik.groups.settings import GroupSettings
from chronik.metadata.events import Event, LeaderChanged, TopicCreated, TopicDeleted
from chronik.metadata.image import OFFSETS_TOPIC, BrokerImage
from chronik.node.admin.topics import Topics
from chronik.node.age_clock import AgeClock
from chronik.node.coordinators.group_appender import GroupAppender
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.topic_plans import NewTopic
from chronik.node.replicas.partition import Partition
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Values
from chronik.node.serving.connection import Buffer
from chronik.wire.batch import check_batches, decode_batch, read_batch_header
from chronik.wire.errors import ErrorCode, KafkaError

OFFSETS_TOPIC_CONFIGS = {"cleanup.policy": "compact", "segment.bytes": str(16 * 1024 * 1024)}
"""Small segments: only closed ones are compacted, and a new coordinator reads everything that compaction leaves."""

LOAD_CHUNK_BYTES = 256 * 1024
"""The size of one chunk, which is read and decoded in the executor and replayed on the loop in one step."""

LOAD_RETRY_MIN_S = 0.05
LOAD_RETRY_MAX_S = 1.0
"""Retries start fast: after a failover the in-sync replicas return within milliseconds, and groups wait for them."""

START_WAIT_S = 0.5
"""Startup waits this long for groups to load. Groups that load longer answer COORDINATOR_LOAD_IN_PROGRESS."""

LEASE_CHECK_S = 0.25
"""How soon after the lease ends the waiting requests are answered."""

STOP_WAIT_S = 5.0
EXPIRY_INTERVAL_S = 600.0


class GroupService:
    """The groups of this node. Owned by the loop.

    Invariants: the coordinator is notified of the appends of one partition in the order in which it requested them, and
    of none that it requested before the partition was last loaded. Loaded state was read in the leader epoch in which
    this node leads, so no other coordinator has written since.
    """

    def __init__(
        self,
        runtime: Runtime,
        metadata: MetadataLog,
        host: PartitionHost,
        topics: Topics,
        lease_is_valid: Callable[[], bool],
        age_clock: AgeClock,
    ) -> None:
        config = runtime.config
        settings = GroupSettings(
            session_timeout_ms_min=config.group_min_session_timeout_ms,
            session_timeout_ms_max=config.group_max_session_timeout_ms,
            initial_rebalance_delay_ms=config.group_initial_rebalance_delay_ms,
            members_max=config.group_max_size,
            offsets_retention_ms=config.offsets_retention_minutes * 60_000,
        )
        self._runtime = runtime
        self._metadata = metadata
        self._host = host
        self._topics = topics
        self._lease_is_valid = lease_is_valid
        self._age_clock = age_clock
        self._loop = runtime.loop
        self._log = runtime.log.bind(component="groups")
        self._coordinator = GroupCoordinator(settings, runtime.env.new_uuid)
        self._token = 0
        self._replies: dict[int, asyncio.Future[Values]] = {}
        self._appenders: dict[int, GroupAppender] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms: int | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._lease_check: asyncio.TimerHandle | None = None
        self._leased_s = self._loop.time()
        """When the lease was last seen to be valid."""
        self._without_lease_s = 0.0
        """The total time without a lease, which the groups' clock excludes."""
        self._is_suspended = False
        """Whether the lease has ended and its renewal has not been seen yet."""
        self._topic_ready: asyncio.Task[None] | None = None
        self._loads: dict[int, asyncio.Task[None]] = {}
        self._is_stopped = False

    # Lifecycle

    async def start(self) -> None:
        """Load the groups that this node coordinates, if the offsets topic exists."""
        if self._metadata.image.topic(OFFSETS_TOPIC) is not None:
            self._take_over()
            loads = list(self._loads.values())
            if loads:
                await asyncio.wait(loads, timeout=START_WAIT_S)
        self._expiry = self._loop.call_later(EXPIRY_INTERVAL_S, self._expire)
        self._check_lease()

    async def stop(self) -> None:
        """Wait for running appends, then fail the waiting requests so that clients look elsewhere. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        for timer in (self._timer, self._expiry, self._lease_check):
            if timer is not None:
                timer.cancel()
        for task in [*self._loads.values(), *([self._topic_ready] if self._topic_ready is not None else [])]:
            task.cancel()
        running = [appender.task for appender in self._appenders.values() if appender.task is not None]
        if running:
            await asyncio.wait(running, timeout=STOP_WAIT_S)
        for partition in range(self._coordinator.partition_count):
            self._unload(partition)

    # The offsets topic

    async def ensure_topic(self) -> None:
        """Wait until the offsets topic exists and its local partitions are at least loading; create it if needed."""
        if self._coordinator.partition_count:
            return
        if self._is_stopped:
            raise KafkaError(ErrorCode.coordinator_not_available, "the node is stopping")
        try:
            await asyncio.shield(self._start_topic())
        except (KafkaError, TimeoutError) as error:
            raise KafkaError(ErrorCode.coordinator_not_available, f"no {OFFSETS_TOPIC}: {error}") from error

    def _start_topic(self) -> asyncio.Task[None]:
        """Return the single task that makes the topic ready; all callers share it."""
        task = self._topic_ready
        if task is None:
            task = self._topic_ready = self._loop.create_task(self._make_topic_ready(), name="offsets-topic")
            task.add_done_callback(self._topic_done)
        return task

    def _topic_done(self, task: asyncio.Task[None]) -> None:
        self._topic_ready = None
        if not task.cancelled() and task.exception() is not None:
            self._log.warning("offsets_topic_not_ready", error=repr(task.exception()))

    async def _make_topic_ready(self) -> None:
        if self._metadata.image.topic(OFFSETS_TOPIC) is None:
            partition_count = self._runtime.config.offsets_topic_partitions
            new = NewTopic(OFFSETS_TOPIC, num_partitions=partition_count, configs=OFFSETS_TOPIC_CONFIGS)
            try:
                await self._topics.create(new, by_broker=True)
            except KafkaError as error:
                if error.code is not ErrorCode.topic_already_exists:
                    raise
        await self._host.applied()
        self._take_over()
        # An empty partition loads at once, so the first request need not be retried.
        loads = list(self._loads.values())
        if loads:
            await asyncio.wait(loads, timeout=START_WAIT_S)

    def _take_over(self) -> None:
        topic = self._metadata.image.topic(OFFSETS_TOPIC)
        if topic is None or self._is_stopped:
            return
        self._coordinator.partition_count = len(topic.partitions)
        for partition in topic.partitions:
            if partition.leader == self._runtime.node_id:
                self._load(partition.partition)

    def metadata_event(self, event: Event) -> None:
        """Remove the offsets of deleted topics, and move coordinators with their partitions."""
        if self._is_stopped:
            return
        match event:
            case TopicDeleted(topic=topic) if topic.name == OFFSETS_TOPIC:
                for partition in range(self._coordinator.partition_count):
                    self._unload(partition)
                self._coordinator.partition_count = 0
            case TopicDeleted(topic=topic):
                self._run(self._coordinator.topics_deleted((topic.name,), self._now()))
            case TopicCreated(topic=topic) if topic.name == OFFSETS_TOPIC:
                self._start_topic()
            case LeaderChanged(topic=name, partition=partition) if name == OFFSETS_TOPIC:
                # On every new leader epoch: even if this node led before, another coordinator may have led since.
                self._unload(partition.partition)
                if partition.leader == self._runtime.node_id:
                    self._load(partition.partition)

    # Loading

    def _load(self, partition: int) -> None:
        if partition in self._loads or self._coordinator.is_loaded(partition) or self._is_stopped:
            return
        self._coordinator.start_loading(partition)
        task = self._loop.create_task(self._load_until_done(partition), name=f"load-groups-{partition}")
        self._loads[partition] = task

    async def _load_until_done(self, partition: int) -> None:
        pause_s = LOAD_RETRY_MIN_S
        told = ""
        while True:
            try:
                await self._host.applied()
                await self._read_partition(partition)
                break
            except KafkaError as error:
                # Normal after a failover: too few replicas are in sync yet, or another node leads now.
                if error.message != told:
                    told = error.message
                    self._log.info("groups_load_waits", partition=partition, reason=told)
            except Exception as error:
                self._log.exception("groups_load_failed", partition=partition, error=repr(error))
            self._coordinator.start_loading(partition)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LOAD_RETRY_MAX_S)
        del self._loads[partition]
        unreadable = self._coordinator.finish_loading(partition, self._now())
        if unreadable:
            self._log.warning("groups_records_unreadable", partition=partition, count=unreadable)
        self._forget_deleted_topics()

    def _forget_deleted_topics(self) -> None:
        topics = self._metadata.image.topics
        deleted = [topic for topic in self._coordinator.committed_topics() if topic not in topics]
        self._run(self._coordinator.topics_deleted(deleted, self._now()) if deleted else [])

    async def _read_partition(self, index: int) -> None:
        partition = self._host.partitions.get((OFFSETS_TOPIC, index))
        if partition is None:
            raise KafkaError(ErrorCode.not_leader_or_follower, f"{OFFSETS_TOPIC}-{index} is not open here")
        # Only the coordinator writes here, and only after loading: nothing is missed beyond the current end.
        end_offset = partition.log_end_offset
        await self._committed(partition, end_offset)
        offset = partition.log_start_offset
        count = 0
        while offset < end_offset:
            read = partition.log.read_job(offset, LOAD_CHUNK_BYTES, end_offset)
            chunk = await self._runtime.run_blocking(partial(_read, read))
            if chunk is None:
                break  # Compaction has removed the remaining records.
            records, offset = chunk
            self._coordinator.replay(index, records)
            count += len(records)
        if count:
            self._log.info("groups_loaded", partition=index, records=count)

    async def _committed(self, partition: Partition, end_offset: int) -> None:
        reached: asyncio.Future[None] = self._loop.create_future()

        def done(error: KafkaError | None) -> None:
            if not reached.done():
                if error is None:
                    reached.set_result(None)
                else:
                    reached.set_exception(error)

        partition.when_committed(end_offset, done)
        await reached

    def _unload(self, partition: int) -> None:
        task = self._loads.pop(partition, None)
        if task is not None:
            task.cancel()
        appender = self._appenders.pop(partition, None)
        if appender is not None:
            appender.close()
        self._run(self._coordinator.unload(partition, self._now()))

    # The lease

    def _authority(self, group_id: str) -> GroupCoordinator:
        """Return the coordinator if it may answer for the group now; raise NOT_COORDINATOR otherwise."""
        index = self._coordinator.partition_of(group_id)
        if index is not None:
            partition = self._host.partitions.get((OFFSETS_TOPIC, index))
            if partition is None or not partition.leads:
                raise KafkaError(ErrorCode.not_coordinator, f"{OFFSETS_TOPIC}-{index} is not led here under a lease")
            if self._is_suspended:
                self._resume()
        return self._coordinator

    def _check_lease(self) -> None:
        self._lease_check = self._loop.call_later(LEASE_CHECK_S, self._check_lease)
        if not self._lease_is_valid():
            self._suspend()
        elif self._is_suspended:
            self._resume()
        self._now()

    def _resume(self) -> None:
        self._is_suspended = False
        self._without_lease_s += self._loop.time() - self._leased_s
        # Without a lease, the offsets of deleted topics could not be removed from the log.
        self._forget_deleted_topics()

    def _suspend(self) -> None:
        """The lease has ended: make waiting requests look for another coordinator, and expire no session."""
        if not self._is_suspended:
            self._is_suspended = True
            self._run(self._coordinator.refuse_waiting(self._now()))

    # Requests

    async def join(self, request: JoinRequest) -> Values:
        await self.ensure_topic()
        return await self._ask(request.group_id, lambda token, at: self._coordinator.join(request, token, at))

    async def sync(self, request: SyncRequest) -> Values:
        return await self._ask(request.group_id, lambda token, at: self._coordinator.sync(request, token, at))

    def heartbeat(self, group_id: str, member_id: str, generation: int, instance_id: str | None) -> ErrorCode:
        return self._authority(group_id).heartbeat(group_id, member_id, generation, instance_id, self._now())

    async def leave(self, group_id: str, members: list[tuple[str, str | None]]) -> Values:
        return await self._ask(group_id, lambda token, at: self._coordinator.leave(group_id, members, token, at))

    async def commit(self, request: CommitRequest) -> dict[TopicPartition, ErrorCode]:
        await self.ensure_topic()
        values = await self._ask(request.group_id, lambda token, at: self._coordinator.commit(request, token, at))
        errors: dict[TopicPartition, ErrorCode] = values["errors"]
        return errors

    async def committed(
        self, group_id: str, partitions: Iterable[TopicPartition] | None
    ) -> tuple[ErrorCode, dict[TopicPartition, CommittedOffset | None]]:
        await self.ensure_topic()
        return self._authority(group_id).committed(group_id, partitions)

    async def delete_offsets(
        self, group_id: str, partitions: list[TopicPartition]
    ) -> tuple[ErrorCode, dict[TopicPartition, ErrorCode]]:
        await self.ensure_topic()
        values = await self._ask(
            group_id, lambda token, at: self._coordinator.delete_offsets(group_id, partitions, token, at)
        )
        return values["error_code"], values["errors"]

    async def delete_group(self, group_id: str) -> ErrorCode:
        await self.ensure_topic()
        values = await self._ask(group_id, lambda token, at: self._coordinator.delete_group(group_id, token, at))
        error: ErrorCode = values["error_code"]
        return error

    async def describe(self, group_id: str) -> Values:
        await self.ensure_topic()
        return self._authority(group_id).describe(group_id)

    def groups(self) -> list[Values]:
        """Return all groups of this node, or none without a lease. COORDINATOR_LOAD_IN_PROGRESS while groups load."""
        if not self._lease_is_valid():
            return []
        if self._coordinator.is_loading:
            raise KafkaError(ErrorCode.coordinator_load_in_progress, "groups are being loaded")
        return self._coordinator.groups()

    async def coordinator_of(self, group_id: str) -> BrokerImage:
        """Return the broker that coordinates a group: the leader of its partition. This node needs a valid lease."""
        await self.ensure_topic()
        if not self._lease_is_valid():
            raise KafkaError(ErrorCode.coordinator_not_available, "this node has no contact to the controller")
        index = self._coordinator.partition_of(group_id)
        if index is None and self._coordinator.partition_count:
            raise KafkaError(ErrorCode.invalid_group_id, f"a name of {len(group_id)} characters is too long")
        image = self._metadata.image
        partition = None if index is None else image.partition(OFFSETS_TOPIC, index)
        leader = None if partition is None else image.brokers.get(partition.leader)
        if leader is None:
            raise KafkaError(ErrorCode.coordinator_not_available, "the group's partition has no leader")
        return leader

    def lag_gauges(self) -> Iterator[tuple[str, str, int, int]]:
        """Yield group, topic, partition and the group's lag, for partitions that this node hosts."""
        if not self._lease_is_valid():
            return
        for group_id, (topic, index), committed in self._coordinator.all_committed():
            partition = self._host.partitions.get((topic, index))
            if partition is not None:
                yield group_id, topic, index, max(0, partition.high_watermark - committed.offset)

    # Actions

    async def _ask(self, group_id: str, start: Callable[[int, Moment], list[Action]]) -> Values:
        self._authority(group_id)
        self._token += 1
        reply: asyncio.Future[Values] = self._loop.create_future()
        self._replies[self._token] = reply
        self._run(start(self._token, self._now()))
        values = await reply
        # The lease may have ended while the request waited.
        self._authority(group_id)
        return values

    def _now(self) -> Moment:
        """Return the time of the groups' clock, which stops without a lease."""
        if not self._is_suspended and self._lease_is_valid():
            self._leased_s = self._loop.time()
        return Moment(int((self._leased_s - self._without_lease_s) * 1000), self._runtime.env.wall_ms())

    def _run(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Reply(token=token, values=values):
                    reply = self._replies.pop(token)
                    # It is already done if its connection was closed, which cancels the wait.
                    if not reply.done():
                        reply.set_result(values)
                case Append():
                    self._appender(action.partition).add(action)
                case Rebalanced():
                    self._runtime.metrics.group_rebalances += 1
                    self._log.info(
                        "group_rebalanced",
                        group=action.group_id,
                        generation=action.generation,
                        members=action.member_count,
                    )
        self._set_timer()

    def _appender(self, partition: int) -> GroupAppender:
        appender = self._appenders.get(partition)
        if appender is None:
            appender = self._appenders[partition] = GroupAppender(self._runtime, self._host, partition, self._appended)
        return appender

    def _appended(self, token: int, error: ErrorCode) -> None:
        self._run(self._coordinator.appended(token, error, self._now()))

    def _set_timer(self) -> None:
        """Set the single timer for all groups. It is only ever moved earlier, since an early tick is harmless."""
        deadline_ms = self._coordinator.next_deadline_ms()
        if deadline_ms is None or self._is_stopped or (self._timer_ms is not None and self._timer_ms <= deadline_ms):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ms = deadline_ms
        # The next whole millisecond: `_now` rounds down, so an earlier timer would only be set again.
        self._timer = self._loop.call_at((deadline_ms + 1) / 1000 + self._without_lease_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = self._timer_ms = None
        if self._lease_is_valid() and not self._is_suspended:
            self._run(self._coordinator.tick(self._now()))
        else:
            self._suspend()

    def _expire(self) -> None:
        self._expiry = self._loop.call_later(EXPIRY_INTERVAL_S, self._expire)
        at = self._now()._replace(wall_ms=self._age_clock.now_ms())
        self._run(self._coordinator.expire_offsets(at))


def _read(job: Callable[[], Buffer]) -> tuple[list[tuple[bytes | None, bytes | None]], int] | None:
    """Return the records of a log chunk and the offset after it, or None if it is empty. Runs in the executor."""
    data = memoryview(job())
    records: list[tuple[bytes | None, bytes | None]] = []
    next_offset: int | None = None
    while data:
        header = read_batch_header(data)
        batch, data = data[: header.size_bytes], data[header.size_bytes :]
        next_offset = header.next_offset
        try:
            check_batches(batch, len(batch), from_producer=False)
            if not header.is_control:
                records += [(record.key, record.value) for record in decode_batch(batch)]
        except KafkaError:
            # A record without a key is treated as unreadable: one damaged batch must not affect other groups.
            records.append((None, None))
    return None if next_offset is None else (records, next_offset)
