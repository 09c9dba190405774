"""Healing: repair a replica with a damaged log from another replica, without an operator.

1. If the damaged replica leads, it hands over leadership. It reports to the controller that it lost records. Once that
   report is committed, the replica is neither in sync nor eligible, so no record depends on it.
2. It moves the damaged segment and all later ones to `set-aside/`, so that its log ends before the damage.
3. It fetches the missing records from its leader like any lagging replica, and joins the ISR by the usual rule.

Healing waits while no other replica is in sync: readers then get the data as it is. It also waits if the ISR would fall
below min.insync.replicas, because a damaged replica still accepts new records. It is retried until this changes. A
replica that an administrator elected despite its losses does not wait for other replicas. Damages are kept in memory;
the node's log has a line for each step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Literal, TypeAlias

from chronik.node.replicas.partition import HowFound, Partition
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.wire.errors import ErrorCode, KafkaError

DAMAGES_KEPT_MAX = 100
OFFSETS_LOGGED_MAX = 100
RETRY_S = 2.0
POLL_S = 0.05
HAND_OVER_S = 1.5
"""Longer than a handover may take. After that, the controller moves leadership."""
APPLIED_S = 10.0
"""Longer than a node needs to apply committed metadata."""
HEALS_A_DAY_MAX = 3
DAY_S = 86_400.0

DamageState: TypeAlias = Literal["waiting", "fetching", "healed"]


@dataclass(slots=True)
class Damage:
    """Damage found in the log of one replica, and its outcome."""

    topic: str
    partition: int
    offset: int
    how: HowFound
    reason: str
    found_ms: int
    state: DamageState = "waiting"
    waits_for: str = ""
    """Why healing does not progress now."""
    set_aside: tuple[str, ...] = ()
    """Folders with the damaged segments. They are removed after their retention."""
    healed_ms: int | None = None
    logged: set[int] = field(default_factory=set)
    """The damaged offsets that the node has already logged."""


class Healing:
    """Owned by the loop. Invariant: at most one partition is between its loss report and the end of its set-aside."""

    def __init__(self, runtime: Runtime, host: PartitionHost) -> None:
        self.damages: deque[Damage] = deque(maxlen=DAMAGES_KEPT_MAX)
        """The latest damages, oldest first."""
        self._loop = runtime.loop
        self._wall_ms = runtime.env.wall_ms
        self._metrics = runtime.metrics
        self._log = runtime.log.bind(component="storage")
        self._replication = host.replication
        self._reports = host.reports
        self._open: dict[Partition, Damage] = {}
        self._healed_s: dict[tuple[str, int], list[float]] = {}
        self._one = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        host.replication.damaged = self.found

    async def close(self) -> None:
        """Stop healing. A set-aside that has started runs to its end, because half of it leaves an unusable log."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def found(self, partition: Partition, offset: int, how: HowFound, reason: str) -> None:
        """Record and heal damage: a batch at or after `offset` is corrupt or missing."""
        if partition.is_closed:
            # Its files are being removed.
            return
        damage = self._open.get(partition)
        is_new = damage is None or damage.state != "waiting"
        if damage is None or is_new:
            damage = Damage(partition.topic, partition.index, offset, how, reason, self._wall_ms())
            self.damages.append(damage)
            self._open[partition] = damage
            self._count()
            task = self._loop.create_task(self._heal(partition, damage), name="healing")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        damage.offset = min(damage.offset, offset)
        if offset not in damage.logged and len(damage.logged) < OFFSETS_LOGGED_MAX:
            # Once for each offset: readers may retry it forever.
            damage.logged.add(offset)
            self._metrics.damages_found[how] += 1
            if how != "recovery":  # the host has logged the recovery's whole report
                self._log.error("log_damaged", **partition.log_fields, offset=offset, how=how, reason=reason)

    def index_rebuilt(self, partition: Partition, base_offset: int, reason: str) -> None:
        """Record a rebuilt index. A wrong index loses no record and needs no other replica."""
        now_ms = self._wall_ms()
        damage = Damage(partition.topic, partition.index, base_offset, "scrub", reason, now_ms, "healed")
        damage.healed_ms = now_ms
        self.damages.append(damage)

    # -- healing one replica -------------------------------------------------------------------------------------------

    async def _heal(self, partition: Partition, damage: Damage) -> None:
        try:
            while not partition.is_closed:
                if await self._set_aside(partition, damage):
                    break
                await asyncio.sleep(RETRY_S)
            await self._until(lambda: partition.is_closed or partition.node_id in partition.in_sync_replicas)
            if not partition.is_closed:
                damage.state, damage.healed_ms = "healed", self._wall_ms()
                self._metrics.replicas_healed += 1
                self._log.info(
                    "replica_healed",
                    **partition.log_fields,
                    offset=damage.offset,
                    log_end_offset=partition.log_end_offset,
                )
        finally:
            if self._open.get(partition) is damage:
                del self._open[partition]
                self._count()

    async def _set_aside(self, partition: Partition, damage: Damage) -> bool:
        """Make one attempt; return whether the log now ends before the damage."""
        where = partition.log_fields
        async with self._one:
            reason = self._why_not(partition)
            if not reason:
                try:
                    folders = await self._attempt(partition, damage)
                except (KafkaError, OSError) as error:
                    reason = str(error)
                except Exception as error:
                    reason = repr(error)
                    self._log.exception("healing_failed", **where)
        if not reason:
            if folders:
                damage.set_aside += folders
                self._healed_s.setdefault((partition.topic, partition.index), []).append(self._loop.time())
                self._log.warning(
                    "segments_set_aside", **where, log_end_offset=partition.log_end_offset, folders=folders
                )
            if damage.offset < partition.log_end_offset:
                # Damage was found at a lower offset meanwhile.
                return False
            damage.state, damage.waits_for = "fetching", ""
            return True
        # If another replica can lead, hand over: it can serve the records that are damaged here.
        self._replication.log_failed(partition)
        if reason != damage.waits_for:
            self._log.warning(
                "damage_not_healed", **where, offset=damage.offset, reason=reason, then="the node retries"
            )
        damage.waits_for = reason
        return False

    def _why_not(self, partition: Partition) -> str:
        """Return why the replica cannot be healed now, or an empty string if it can."""
        log, node_id = partition.log, partition.node_id
        if log.read_only_forever and not log.is_broken:
            return f"the log has failed, restart the node: {log.read_only_reason}"
        healed_s = self._healed_s.get((partition.topic, partition.index), [])
        if len([at_s for at_s in healed_s if at_s > self._loop.time() - DAY_S]) >= HEALS_A_DAY_MAX:
            return f"it was healed {HEALS_A_DAY_MAX} times within a day: replace the disk or the memory of this node"
        if _is_loss_accepted(partition):
            return ""
        isr = partition.in_sync_replicas
        others = [replica for replica in isr if replica != node_id and replica in self._replication.live]
        needed = 1
        if node_id in isr and not log.is_broken:
            needed = max(1, min(partition.settings.min_insync_replicas, len(partition.replicas) - 1))
        if len(others) < needed:
            return f"{len(others)} other replicas are in sync, {needed} are needed"
        return ""

    async def _attempt(self, partition: Partition, damage: Damage) -> tuple[str, ...]:
        replication = self._replication
        # From here on no fetch includes this partition: its leader must not consider the replica caught up.
        partition.is_damaged = True
        replication.follow_again(partition)
        try:
            if _is_loss_accepted(partition):
                return await replication.set_aside(partition, damage.offset)
            if partition.leader is not None:
                replication.log_failed(partition)
                await self._until(lambda: partition.leader is None, HAND_OVER_S)
            await self._reports.spoiled(partition, damage.reason)
            await self._until(lambda: partition.is_closed or _is_out(partition), APPLIED_S)
            if not _is_out(partition):
                raise KafkaError(ErrorCode.request_timed_out, "this node did not apply its own loss report in time")
            return await replication.set_aside(partition, damage.offset)
        finally:
            partition.damage_ended()
            replication.follow_again(partition)

    async def _until(self, condition: Callable[[], bool], timeout_s: float = inf) -> None:
        deadline_s = self._loop.time() + timeout_s
        while True:
            if condition() or self._loop.time() >= deadline_s:
                return
            await asyncio.sleep(POLL_S)

    def _count(self) -> None:
        self._metrics.replicas_healing = len(self._open)


def _is_loss_accepted(partition: Partition) -> bool:
    """Whether an unclean election made this replica the leader with a broken log."""
    image = partition.image
    is_elected = image is not None and image.leader == partition.node_id and image.unclean_epoch == image.leader_epoch
    return is_elected and partition.log.is_broken


def _is_out(partition: Partition) -> bool:
    """Whether this node has applied the metadata that makes its replica neither in sync nor eligible."""
    return partition.is_dispensable and partition.leader is None
