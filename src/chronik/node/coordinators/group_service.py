"""Runs the group state machine on the node's loop: requests, replies, timers and the lease.

The state machine (`chronik.groups`) owns all rules, and `OffsetsTopic` stores its state. This module only has the
futures of the waiting requests and the timers.

A coordinator needs a lease. This node answers for a group only while it leads the group's partition with a valid lease.
The lease is checked when the response is sent (`_authority`); otherwise clients get NOT_COORDINATOR and look for the
coordinator elsewhere. The groups' clock stops without a lease: members that could not reach their coordinator keep
their membership if it is still their coordinator when the lease is renewed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

from chronik.groups.commits import CommitRequest
from chronik.groups.coordinator import GroupCoordinator
from chronik.groups.member import JoinRequest, SyncRequest
from chronik.groups.records import CommittedOffset, TopicPartition
from chronik.groups.step import Action, Append, GroupSettings, Moment, Rebalanced, Reply
from chronik.metadata.image import OFFSETS_TOPIC, BrokerImage
from chronik.node.admin.topics import Topics
from chronik.node.age_clock import AgeClock
from chronik.node.coordinators.offsets_topic import OffsetsTopic
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Values
from chronik.observe.metrics import GroupLag
from chronik.wire.errors import ErrorCode, KafkaError

LEASE_CHECK_S = 0.25
"""How soon after the lease ends the waiting requests are answered."""

EXPIRY_INTERVAL_S = 600.0


class GroupService:
    """The groups of this node. Owned by the loop.

    Invariant: `_replies` has the future of each request that the coordinator has not answered yet, by token.
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
        self._lease_is_valid = lease_is_valid
        self._age_clock = age_clock
        self._loop = runtime.loop
        self._log = runtime.log.bind(component="groups")
        self._coordinator = GroupCoordinator(settings, runtime.env.new_uuid)
        self.topic = OffsetsTopic(runtime, metadata, host, topics, self._coordinator, self._now, self._run)
        self._token = 0
        self._replies: dict[int, asyncio.Future[Values]] = {}
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
        self._is_stopped = False

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the groups that this node coordinates, if the offsets topic exists."""
        await self.topic.take_over()
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
        await self.topic.stop()

    # -- the lease -----------------------------------------------------------------------------------------------------

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
        self.topic.forget_deleted_topics()

    def _suspend(self) -> None:
        """The lease has ended: make waiting requests look for another coordinator, and expire no session."""
        if not self._is_suspended:
            self._is_suspended = True
            self._run(self._coordinator.refuse_waiting(self._now()))

    # -- requests ------------------------------------------------------------------------------------------------------

    async def join(self, request: JoinRequest) -> Values:
        await self.topic.ensure_exists()
        return await self._submit(request.group_id, lambda token, at: self._coordinator.join(request, token, at))

    async def sync(self, request: SyncRequest) -> Values:
        return await self._submit(request.group_id, lambda token, at: self._coordinator.sync(request, token, at))

    def heartbeat(self, group_id: str, member_id: str, generation: int, instance_id: str | None) -> ErrorCode:
        return self._authority(group_id).heartbeat(group_id, member_id, generation, instance_id, self._now())

    async def leave(self, group_id: str, members: list[tuple[str, str | None]]) -> Values:
        return await self._submit(group_id, lambda token, at: self._coordinator.leave(group_id, members, token, at))

    async def commit(self, request: CommitRequest) -> dict[TopicPartition, ErrorCode]:
        await self.topic.ensure_exists()
        values = await self._submit(request.group_id, lambda token, at: self._coordinator.commit(request, token, at))
        errors: dict[TopicPartition, ErrorCode] = values["errors"]
        return errors

    async def committed(
        self, group_id: str, partitions: Iterable[TopicPartition] | None
    ) -> tuple[ErrorCode, dict[TopicPartition, CommittedOffset | None]]:
        await self.topic.ensure_exists()
        return self._authority(group_id).committed(group_id, partitions)

    async def delete_offsets(
        self, group_id: str, partitions: list[TopicPartition]
    ) -> tuple[ErrorCode, dict[TopicPartition, ErrorCode]]:
        await self.topic.ensure_exists()
        values = await self._submit(
            group_id, lambda token, at: self._coordinator.delete_offsets(group_id, partitions, token, at)
        )
        return values["error_code"], values["errors"]

    async def delete_group(self, group_id: str) -> ErrorCode:
        await self.topic.ensure_exists()
        values = await self._submit(group_id, lambda token, at: self._coordinator.delete_group(group_id, token, at))
        error: ErrorCode = values["error_code"]
        return error

    async def describe(self, group_id: str) -> Values:
        await self.topic.ensure_exists()
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
        await self.topic.ensure_exists()
        if not self._lease_is_valid():
            raise KafkaError(ErrorCode.coordinator_not_available, "this node has lost contact with the controller")
        index = self._coordinator.partition_of(group_id)
        if index is None and self._coordinator.partition_count:
            raise KafkaError(ErrorCode.invalid_group_id, f"a name of {len(group_id)} characters is too long")
        image = self._metadata.image
        partition = None if index is None else image.partition(OFFSETS_TOPIC, index)
        leader = None if partition is None else image.brokers.get(partition.leader)
        if leader is None:
            raise KafkaError(ErrorCode.coordinator_not_available, "the group's partition has no leader")
        return leader

    def lag_gauges(self) -> Iterator[GroupLag]:
        if not self._lease_is_valid():
            return
        for group_id, (topic, index), committed in self._coordinator.all_committed():
            partition = self._host.partitions.get((topic, index))
            if partition is not None:
                yield GroupLag(group_id, topic, index, max(0, partition.high_watermark - committed.offset))

    # -- actions -------------------------------------------------------------------------------------------------------

    async def _submit(self, group_id: str, start: Callable[[int, Moment], list[Action]]) -> Values:
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
                    self.topic.append(action)
                case Rebalanced():
                    self._runtime.metrics.group_rebalances += 1
                    self._log.info(
                        "group_rebalanced",
                        group=action.group_id,
                        generation=action.generation,
                        members=action.member_count,
                    )
        self._set_timer()

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
