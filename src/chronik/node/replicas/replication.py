"""Replication on this node: fetchers, ISR changes, leadership handovers and truncations.

The rules are in `chronik.replication`. This module applies them on a timer and carries out their decisions: fetchers
for the leaders that this node follows, proposals to the controller for partitions that it leads, and truncations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias
from uuid import UUID

from chronik.client.connection import Connection
from chronik.metadata.broker_configs import BROKER_CONFIGS, FOLLOWER_THROTTLED_RATE, LEADER_THROTTLED_RATE
from chronik.metadata.image import ClusterImage, PartitionImage
from chronik.node.replicas.checkpoints import Checkpoints
from chronik.node.replicas.partition import HowFound, Partition
from chronik.node.replicas.replica_fetcher import ReplicaFetcher
from chronik.node.replicas.replica_reports import ReplicaReports, Report
from chronik.node.runtime import Runtime
from chronik.node.topic_settings import dynamic_values
from chronik.replication.follower import NO_LEADER, PartitionFollower, StartOver, Truncate
from chronik.replication.leader import UNKNOWN, PartitionLeader, ProposedIsr
from chronik.replication.throttle import UNLIMITED, ReplicationThrottle
from chronik.storage.log import Log
from chronik.wire.errors import ErrorCode, KafkaError

CHECK_INTERVAL_S = 0.5
STALLED_S = 1.0
"""A check this late means that this node itself stalled and received no fetches meanwhile."""
PROPOSALS_AT_ONCE_MAX = 64
PROPOSAL_TIMEOUT_S = 3.0
SETTLE_S = 0.06
"""Delay before the next proposal after a failed handover. It is short because nothing is served until then."""
HEARD_S_MAX = 0.5
"""How long a leader with a read-only log, and its producers, wait for the outcome of the handover in the metadata."""
TRANSFER_INTERVAL_S = 0.5
HAND_OVER_S_MAX = 1.0
"""How long a leader stops accepting records while its successor catches up."""
FETCHED_AGAIN = "a transaction is undecided here, and compaction may have removed its marker at the leader"
SET_ASIDE = "damaged segments were set aside"

IsrMembers: TypeAlias = tuple[tuple[int, int], ...]
"""Broker ids with their broker epochs, -1 if unknown."""

ProposeIsr: TypeAlias = Callable[[UUID, int, int, int, IsrMembers, int], Awaitable[object]]
"""(topic id, partition, leader epoch, partition epoch, members, hand over to).

The last is -1 if this node continues to lead. Returns when the controller has committed the proposal. Raises KafkaError
if it has not, or if the outcome is unknown: the proposal may still be committed.
"""


@dataclass(frozen=True, slots=True)
class ClusterLinks:
    """Supplied by the broker. `connect` opens a connection for replication only, since its requests may take long."""

    connect: Callable[[int], Awaitable[Connection]]
    propose_isr: ProposeIsr
    report_replicas: Report
    lease_is_valid: Callable[[], bool]


class Replication:
    """Owned by the loop. Invariant: a partition is fetched from its leader by one fetcher, or led here, or neither."""

    def __init__(
        self, runtime: Runtime, links: ClusterLinks, checkpoints: Checkpoints, reports: ReplicaReports, data_path: str
    ) -> None:
        self.live: Mapping[int, int] = {}
        self.broker_epoch = -1
        self.leader_throttle = ReplicationThrottle()
        self.follower_throttle = ReplicationThrottle()
        self.connect = links.connect
        self.lease_is_valid = links.lease_is_valid
        self.leader_lacks = reports.leader_lacks
        self.damaged: Callable[[Partition, int, HowFound, str], None] = lambda *damage: None
        """Called when damage is found in a partition's log; set by the healing component."""
        self.index_damaged: Callable[[Partition, int], None] = lambda *index: None
        """Called when a segment's index of aborted transactions is damaged; set by the scrubber."""
        self._runtime = runtime
        self._loop = runtime.loop
        self._node_id = runtime.node_id
        self._propose_isr = links.propose_isr
        self._checkpoints = checkpoints
        self._reports = reports
        self._data_path = data_path
        self._log = runtime.log.bind(component="replication")
        self._led: dict[Partition, None] = {}
        self._fetchers: dict[int, ReplicaFetcher] = {}
        self._followed: dict[Partition, ReplicaFetcher] = {}
        self._heard_ms: dict[int, int] = {}
        self._proposals = asyncio.Semaphore(PROPOSALS_AT_ONCE_MAX)
        self._changes: dict[Partition, asyncio.Future[None]] = {}
        """For each partition with a pending ISR proposal: done when the metadata changes the partition."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._transferring: set[tuple[UUID, int]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._checked_s = self._loop.time()
        self._is_closed = False

    def close(self) -> None:
        """Stop all fetchers and proposals. The partitions stay as they are."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for fetcher in self._fetchers.values():
            fetcher.close()
        self._fetchers = {}
        self._followed = {}
        self._led = {}

    def now_ms(self) -> int:
        return int(self._loop.time() * 1000)

    def replica_heard(self, replica_id: int) -> None:
        self._heard_ms[replica_id] = self.now_ms()

    # -- metadata ------------------------------------------------------------------------------------------------------

    def brokers_changed(self, image: ClusterImage) -> None:
        self.live = {
            broker.id: broker.epoch
            for broker in image.brokers.values()
            if broker.may_join_isr or broker.id == self._node_id
        }
        own = image.brokers.get(self._node_id)
        epoch = -1 if own is None else own.epoch
        if epoch != self.broker_epoch:
            # Leaders accept positions only under this broker's current epoch.
            self.broker_epoch = epoch
            for fetcher in self._fetchers.values():
                fetcher.resend_positions()

    def limit_rates(self, image: ClusterImage) -> None:
        """Apply the dynamic limits for replicas that are not in sync."""
        for throttle, name in (
            (self.leader_throttle, LEADER_THROTTLED_RATE),
            (self.follower_throttle, FOLLOWER_THROTTLED_RATE),
        ):
            values = dynamic_values(name, self._node_id, image)
            rate = BROKER_CONFIGS[name].parse(values[0].value) if values else UNLIMITED
            throttle.limit(int(rate) if isinstance(rate, int | float) else UNLIMITED, self._loop.time())

    def role_changed(self, partition: Partition) -> None:
        """Follow the partition's leader, or monitor its replicas if this node leads."""
        if self._is_closed:
            return
        changed = self._changes.pop(partition, None)
        if changed is not None and not changed.done():
            changed.set_result(None)
        role = partition.role
        leader_id = role.leader_id if isinstance(role, PartitionFollower) else NO_LEADER
        if partition.is_closed or self._node_id not in partition.replicas:
            leader_id = NO_LEADER
        known = self._followed.get(partition)
        if known is not None and known.leader_id != leader_id:
            self._leave(partition, known)
        if leader_id not in (NO_LEADER, self._node_id):
            fetcher = self._fetchers.get(leader_id)
            if fetcher is None:
                fetcher = self._fetchers[leader_id] = ReplicaFetcher(self._runtime, leader_id, self)
            self._followed[partition] = fetcher
            fetcher.follow(partition)
        if partition.leader is not None and len(partition.replicas) > 1:
            self._led[partition] = None
            if self._timer is None:
                self._checked_s = self._loop.time()
                self._timer = self._loop.call_later(CHECK_INTERVAL_S, self._check_all)
        else:
            self._led.pop(partition, None)

    def partition_closed(self, partition: Partition) -> None:
        self._led.pop(partition, None)
        known = self._followed.get(partition)
        if known is not None:
            self._leave(partition, known)

    def _leave(self, partition: Partition, fetcher: ReplicaFetcher) -> None:
        del self._followed[partition]
        fetcher.leave(partition)
        if not len(fetcher):
            fetcher.close()
            del self._fetchers[fetcher.leader_id]

    # -- in-sync replicas ----------------------------------------------------------------------------------------------

    def _check_all(self) -> None:
        self._timer = self._loop.call_later(CHECK_INTERVAL_S, self._check_all) if self._led else None
        now_s = self._loop.time()
        has_stalled = now_s - self._checked_s > STALLED_S
        self._checked_s = now_s
        for partition in list(self._led):
            if has_stalled and partition.leader is not None:
                partition.leader.stalled(self.now_ms())
            self.check_isr(partition)

    def check_isr(self, partition: Partition) -> None:
        leader = partition.leader
        if leader is None or self._is_closed:
            return
        now_ms = self.now_ms()
        to = partition.hands_over_to
        proposed: ProposedIsr | None = None
        if to != NO_LEADER:
            if leader.durable_end_of(to) >= partition.log_end_offset:
                proposed = leader.propose_hand_over(
                    to, now_ms, self.live, leaves=partition.log.read_only or partition.is_damaged
                )
        else:
            before = leader.high_watermark
            proposed = leader.check_isr(partition.log_end_offset, now_ms, self.live, self._heard_ms)
            partition.watermark_checked(before)
        if proposed is not None:
            self._run(self._propose(partition, leader, proposed))

    async def _propose(self, partition: Partition, leader: PartitionLeader, proposed: ProposedIsr) -> None:
        async with self._proposals:
            reason = await self._put_to_controller(partition, proposed)
        is_committed = not reason
        leader.isr.ended(proposed.partition_epoch, is_committed, self.now_ms())
        self._log.info(
            "isr_proposed",
            **partition.log_fields,
            isr=[replica for replica, _ in proposed.isr],
            hand_over_to=proposed.hand_over_to,
            committed=is_committed,
            reason=reason,
        )
        if proposed.hand_over_to == NO_LEADER or partition.leader is not leader:
            return
        self._loop.call_later(HEARD_S_MAX, self._hand_over_is_unheard, partition, leader)
        if not is_committed:
            # The handover may still be committed: serve nothing until the next proposal decides that.
            partition.hands_over_to = NO_LEADER
            self._loop.call_later(SETTLE_S, self.check_isr, partition)

    def _hand_over_is_unheard(self, partition: Partition, leader: PartitionLeader) -> None:
        """A node with a failed disk may never learn the outcome of its handover: it cannot store metadata either."""
        if partition.leader is leader and partition.log.read_only:
            partition.hands_over_to = NO_LEADER
            partition.fail_with_unknown_outcome()

    async def _put_to_controller(self, partition: Partition, proposed: ProposedIsr) -> str:
        """Return why the proposal is not known to be committed, or an empty string if it is committed.

        A controller with a hanging disk cannot respond although the quorum may have committed the proposal. In that
        case the metadata shows the outcome.
        """

        async def propose() -> None:
            await self._propose_isr(
                partition.topic_id,
                partition.index,
                proposed.leader_epoch,
                proposed.partition_epoch,
                proposed.isr,
                proposed.hand_over_to,
            )

        answer = self._run(propose())
        changed = self._changes[partition] = self._loop.create_future()
        await asyncio.wait([answer, changed], timeout=PROPOSAL_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            if not changed.done():
                return "no response in time"
            is_committed = set(partition.in_sync_replicas) == {replica for replica, _ in proposed.isr}
            return "" if is_committed else "the partition has changed meanwhile"
        try:
            await answer
        except (KafkaError, TimeoutError) as error:
            return str(error) or "no response in time"
        except Exception:
            self._log.exception("isr_proposal_failed", **partition.log_fields)
            return "unexpected"
        return ""

    # -- leadership handover -------------------------------------------------------------------------------------------

    def hand_over(self, partition: Partition, leader_epoch: int, to: int) -> None:
        """Hand over leadership once the successor `to` has the whole log."""
        leader = partition.leader
        if leader is None or leader.leader_epoch != leader_epoch or not partition.leads:
            return
        if to == self._node_id or to not in leader.in_sync_replicas:
            return
        partition.hand_over(to)
        self._loop.call_later(HAND_OVER_S_MAX, self._hand_over_is_late, partition, leader, to)
        self.check_isr(partition)

    def log_failed(self, partition: Partition) -> None:
        """Hand over to another in-sync replica: this node can no longer accept records."""
        leader = partition.leader
        if leader is None or self._is_closed:
            return
        for replica in leader.in_sync_replicas:
            if replica != self._node_id and replica in self.live:
                self.hand_over(partition, leader.leader_epoch, replica)
                return

    def sync_failed(self, partition: Partition) -> None:
        self._run(self._checkpoints.distrust_page_cache())
        if partition.acknowledges_unsynced:
            # The disk may reject that note too, so the controller must know.
            self._reports.may_have_lost(partition, "a sync failed")
        self.log_failed(partition)

    def cannot_lead(self, partition: Partition) -> None:
        def led() -> PartitionImage | None:
            is_led = not partition.is_closed and partition.leader is None
            return partition.image if is_led else None

        self.transfer_leadership(partition.topic, partition.topic_id, partition.index, led)

    def transfer_leadership(
        self, topic: str, topic_id: UUID, index: int, led: Callable[[], PartitionImage | None]
    ) -> None:
        """Transfer leadership that this node cannot take, because its log is not open or is damaged.

        This node has acknowledged nothing in that leader epoch, so every in-sync replica has all records. `led` returns
        the partition while this node still cannot lead it, else None.
        """
        key = (topic_id, index)
        if key not in self._transferring and not self._is_closed:
            self._transferring.add(key)
            self._run(self._transfer_leadership(topic, key, led))

    async def _transfer_leadership(
        self, topic: str, key: tuple[UUID, int], led: Callable[[], PartitionImage | None]
    ) -> None:
        logged = ""
        while (image := led()) is not None and image.leader == self._node_id and not self._is_closed:
            to = next((other for other in image.isr if other != self._node_id and other in self.live), NO_LEADER)
            reason = "no other replica is in sync"
            if to != NO_LEADER:
                reason = await self._propose_leader(to, key, image)
            if reason != logged:
                logged = reason
                say = self._log.error if reason else self._log.info
                say("cannot_lead", topic=topic, partition=key[1], hand_over_to=to, reason=reason)
            await asyncio.sleep(TRANSFER_INTERVAL_S)
        self._transferring.discard(key)

    async def _propose_leader(self, to: int, key: tuple[UUID, int], image: PartitionImage) -> str:
        """Return why the transfer failed, or an empty string if it succeeded."""
        members = tuple((replica, UNKNOWN) for replica in image.isr)
        try:
            async with asyncio.timeout(PROPOSAL_TIMEOUT_S):
                await self._propose_isr(*key, image.leader_epoch, image.partition_epoch, members, to)
        except (KafkaError, TimeoutError) as error:
            return str(error) or "no response in time"
        return ""

    def _hand_over_is_late(self, partition: Partition, leader: PartitionLeader, to: int) -> None:
        if partition.leader is leader and partition.hands_over_to == to and leader.isr.is_settled:
            partition.cancel_handover()

    # -- truncations ---------------------------------------------------------------------------------------------------

    async def truncate(self, partition: Partition, role: PartitionFollower, decision: Truncate | StartOver) -> bool:
        """Truncate a follower's log while no other job uses it; return whether it was truncated."""
        # In its own task: the caller may be cancelled before the truncation ends.
        return await asyncio.shield(self._run(self._truncate(partition, role, decision)))

    async def _truncate(self, partition: Partition, role: PartitionFollower, decision: Truncate | StartOver) -> bool:
        log = partition.log
        offset = decision.offset
        if partition.jobs.is_exclusive or partition.is_closed or partition.role is not role:
            return False
        await partition.jobs.begin_exclusive()
        before = log.log_end_offset
        if partition.is_closed:
            partition.jobs.end_exclusive()
            return False
        self._log_truncation(partition, role, decision)
        image = partition.image
        fetches_again = isinstance(decision, Truncate) and decision.fetches_again
        # Records from before an unclean election may have been acknowledged, even if this replica does not know it.
        is_given_up = image is not None and log.epoch_of(min(offset, before - 1)) < image.unclean_epoch
        keeps = not fetches_again and (decision.below_watermark or is_given_up)
        is_done = False
        lost = [] if fetches_again or isinstance(decision, StartOver) else log.producers.first_from(offset)
        try:
            # Before the truncation: otherwise, after a crash, the missing end would look like damage.
            await self._checkpoints.lower(partition, 0 if keeps else await self._end_after(log, decision))
        except OSError as error:
            self._log.error("recovery_point_not_lowered", topic=partition.topic, error=str(error))
            partition.truncation_ended(before)
            return False
        try:
            folders = await self._runtime.run_blocking(partial(self._truncate_log, log, decision, keeps))
            is_done = True
            if folders:
                reason = "an unclean election has accepted their loss"
                self._log.warning("records_set_aside", **partition.log_fields, folders=folders, reason=reason)
        except Exception as error:
            # Half done: only reopening the log can show what is left.
            log.read_only = log.read_only_forever = True
            log.read_only_reason = f"truncation failed: {error}"
            self._log.exception("truncation_failed", **partition.log_fields)
        if isinstance(decision, StartOver):
            role.started_over(decision)
            partition.truncation_ended(0)
        else:
            role.truncated(log.log_end_offset)
            # Not the log's end: a set-aside removes whole segments, and the leader has the records below `offset`.
            partition.truncation_ended(offset, lost, _unknown(FETCHED_AGAIN) if fetches_again else None)
        return is_done

    async def _end_after(self, log: Log, decision: Truncate | StartOver) -> int:
        """Return where the truncation will end the log: before `offset`, if that lies inside a batch."""
        if isinstance(decision, StartOver):
            return min(decision.offset, log.log_end_offset)
        try:
            return await self._runtime.run_blocking(partial(log.end_after_truncation, decision.offset))
        except KafkaError:
            return 0  # The chain of batches is broken, which the truncation reports.

    def _truncate_log(self, log: Log, decision: Truncate | StartOver, keeps: bool) -> list[str]:
        """Truncate the log in a thread, and return the folders of the segments that were set aside before."""
        starts_over = isinstance(decision, StartOver)
        folders: list[str] = []
        if keeps:
            first = log.log_start_offset if starts_over else decision.offset
            folders = log.set_aside_from(first, self._data_path, self._runtime.env.wall_ms())
        if starts_over:
            log.truncate_fully(decision.offset)
        else:
            log.truncate_to(decision.offset)
        return folders

    def _log_truncation(self, partition: Partition, role: PartitionFollower, decision: Truncate | StartOver) -> None:
        """Log the truncation, as an error if it removes records that were acknowledged to clients."""
        say = self._log.error if decision.below_watermark else self._log.info
        say(
            "truncated_below_watermark" if decision.below_watermark else "log_truncated",
            **partition.log_fields,
            offset=decision.offset,
            log_end_offset=partition.log_end_offset,
            high_watermark=role.high_watermark,
            leader=role.leader_id,
            leader_epoch=role.leader_epoch,
            starts_over=isinstance(decision, StartOver),
            reason=FETCHED_AGAIN if isinstance(decision, Truncate) and decision.fetches_again else "",
        )

    # -- damage --------------------------------------------------------------------------------------------------------

    def follow_again(self, partition: Partition) -> None:
        """Send the partition's position to its leader again, or stop sending it while the replica is being healed."""
        fetcher = self._followed.get(partition)
        if fetcher is not None:
            fetcher.resend_position(partition)

    async def set_aside(self, partition: Partition, offset: int) -> tuple[str, ...]:
        """Move aside the segment that should hold `offset` and all later ones; return the folders they moved to.

        KafkaError if the log is not available for that. OSError if it is half done: then the log is read-only.
        """
        # In its own task: the caller may be cancelled before this ends.
        return await asyncio.shield(self._run(self._set_aside(partition, offset)))

    async def _set_aside(self, partition: Partition, offset: int) -> tuple[str, ...]:
        log, role = partition.log, partition.role
        if partition.jobs.is_exclusive:
            raise KafkaError(ErrorCode.kafka_storage_error, "the log is being truncated")
        await partition.jobs.begin_exclusive()
        try:
            if partition.is_closed or not isinstance(role, PartitionFollower):
                raise KafkaError(ErrorCode.not_leader_or_follower, "the replica does not follow")
            # Before moving segments: otherwise, after a crash, the missing end would look like damage.
            await self._checkpoints.lower(partition, log.log_start_offset)
            move = partial(log.set_aside_from, offset, self._data_path, self._runtime.env.wall_ms())
            folders = await self._runtime.run_blocking(move)
            role.truncated(log.log_end_offset)
            return tuple(folders)
        finally:
            partition.truncation_ended(log.log_end_offset, error=_unknown(SET_ASIDE))

    def _run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._loop.create_task(work, name="replication")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _unknown(reason: str) -> KafkaError:
    return KafkaError(ErrorCode.request_timed_out, f"{reason}; the records may still be committed")
