"""Healing: a replica that found damage in its log becomes whole again from another replica, without an operator.

1. It has another replica lead, if it leads; and it reports to the controller that it lost records. From the commit of
   that report on it is neither in sync nor eligible, so that no record depends on it.
2. It moves the damaged segment and all later ones to `set-aside/`: its log ends before the damage.
3. It fetches what is missing from its leader, as any replica that is behind, and joins the ISR by the usual rule.

Nothing is set aside while no other replica is in sync: readers then get what there is. Nor while the partition would be
left with fewer replicas in sync than min.insync.replicas: a damaged replica still takes new records. It is tried again
until one of these has changed. A replica that an administrator chose to lead, at the price of what it lost, does not
wait for others. What was found is kept in memory; the node's log has a line for each step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from math import inf
from typing import Any

from chronik.node.environment import Environment
from chronik.node.replicas.damage import Damage, HowFound
from chronik.node.replicas.partition import Partition
from chronik.node.replicas.replica_reports import ReplicaReports
from chronik.node.replicas.replication import Replication
from chronik.observe.logging import Logger
from chronik.observe.metrics import Metrics
from chronik.wire.errors import ErrorCode, KafkaError

DAMAGES_KEPT_MAX = 100
OFFSETS_LOGGED_MAX = 100
RETRY_S = 2.0
POLL_S = 0.05
HAND_OVER_S = 1.5
"""A hand-over is given up sooner; then the controller moves the leadership."""
APPLIED_S = 10.0
"""Longer than a node needs to apply what the controller has committed."""
HEALS_A_DAY_MAX = 3
DAY_S = 86_400.0


class Healing:
    """Owned by the loop. Invariant: at most one partition is between its report and the end of its set-aside."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        env: Environment,
        data_path: str,
        replication: Replication,
        reports: ReplicaReports,
        metrics: Metrics,
        log: Logger,
    ) -> None:
        self.damages: deque[Damage] = deque(maxlen=DAMAGES_KEPT_MAX)
        """The latest, oldest first."""
        self._loop = loop
        self._env = env
        self._data_path = data_path
        self._replication = replication
        self._reports = reports
        self._metrics = metrics
        self._log = log.bind(component="storage")
        self._open: dict[Partition, Damage] = {}
        self._healed_s: dict[tuple[str, int], list[float]] = {}
        self._one = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        replication.damaged = self.found

    async def close(self) -> None:
        """Segments that are being set aside are set aside to the end, since half of that would leave a log unusable."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def found(self, partition: Partition, offset: int, how: HowFound, reason: str) -> None:
        """A batch at or after `offset` is not what was written, or is missing."""
        if partition.is_closed:
            # Its files are on their way out.
            return
        damage = self._open.get(partition)
        is_new = damage is None or damage.state != "waiting"
        if damage is None or is_new:
            damage = Damage(partition.topic, partition.index, offset, how, reason, self._env.wall_ms())
            self.damages.append(damage)
            self._open[partition] = damage
            self._count()
            self._run(self._heal(partition, damage))
        damage.offset = min(damage.offset, offset)
        if offset not in damage.logged and len(damage.logged) < OFFSETS_LOGGED_MAX:
            # Once for each offset: readers may return to it for ever.
            damage.logged.add(offset)
            self._metrics.damages_found[how] += 1
            if how != "recovery":  # the host has logged the recovery's whole report
                self._log.error(
                    "log_damaged",
                    topic=partition.topic,
                    partition=partition.index,
                    offset=offset,
                    how=how,
                    reason=reason,
                )

    def index_rebuilt(self, partition: Partition, base_offset: int, reason: str) -> None:
        """An index was wrong, which costs no record and needs no other replica."""
        now_ms = self._env.wall_ms()
        damage = Damage(partition.topic, partition.index, base_offset, "scrub", reason, now_ms, "healed")
        damage.healed_ms = now_ms
        self.damages.append(damage)

    # -- one replica ---------------------------------------------------------------------------------------------------

    async def _heal(self, partition: Partition, damage: Damage) -> None:
        where = {"topic": partition.topic, "partition": partition.index}
        try:
            while not partition.is_closed:
                if await self._set_aside(partition, damage, where):
                    break
                await asyncio.sleep(RETRY_S)
            await self._until(lambda: partition.is_closed or partition.node_id in partition.in_sync_replicas)
            if not partition.is_closed:
                damage.state, damage.healed_ms = "healed", self._env.wall_ms()
                self._metrics.replicas_healed += 1
                self._log.info("replica_healed", **where, offset=damage.offset, log_end_offset=partition.log_end_offset)
        finally:
            if self._open.get(partition) is damage:
                del self._open[partition]
                self._count()

    async def _set_aside(self, partition: Partition, damage: Damage, where: dict[str, Any]) -> bool:
        """One attempt; whether the log now ends before the damage."""
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
                # Damage was found further down meanwhile.
                return False
            damage.state, damage.waits_for = "fetching", ""
            return True
        # If another replica can lead, let it: readers get from it what is bad here.
        self._replication.log_failed(partition)
        if reason != damage.waits_for:
            self._log.warning(
                "damage_not_healed", **where, offset=damage.offset, reason=reason, then="it is tried again"
            )
        damage.waits_for = reason
        return False

    def _why_not(self, partition: Partition) -> str:
        """Why the replica cannot be healed now; empty if it can."""
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
        # From here on it is not named in a fetch: its leader must not take it for one that keeps up.
        partition.is_damaged = True
        replication.follow_again(partition)
        try:
            if _is_loss_accepted(partition):
                return await replication.set_aside(partition, damage.offset, self._data_path)
            if partition.leader is not None:
                replication.log_failed(partition)
                await self._until(lambda: partition.leader is None, HAND_OVER_S)
            await self._reports.spoiled(partition, damage.reason)
            await self._until(lambda: partition.is_closed or _is_out(partition), APPLIED_S)
            if not _is_out(partition):
                raise KafkaError(ErrorCode.request_timed_out, "this node did not apply in time that it lost records")
            return await replication.set_aside(partition, damage.offset, self._data_path)
        finally:
            partition.damage_ended()
            replication.follow_again(partition)

    async def _until(self, condition: Callable[[], bool], timeout_s: float = inf) -> None:
        """Wait for the condition, at most this long."""
        deadline_s = self._loop.time() + timeout_s
        while True:
            if condition() or self._loop.time() >= deadline_s:
                return
            await asyncio.sleep(POLL_S)

    def _count(self) -> None:
        self._metrics.replicas_healing = len(self._open)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work, name="healing")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _is_loss_accepted(partition: Partition) -> bool:
    """Whether an unclean election has this replica lead with what can be read of its log."""
    image = partition.image
    is_elected = image is not None and image.leader == partition.node_id and image.unclean_epoch == image.leader_epoch
    return is_elected and partition.log.is_broken


def _is_out(partition: Partition) -> bool:
    """Whether this node has applied that its replica is neither in sync nor eligible."""
    image = partition.image
    is_out = image is not None and partition.node_id not in (*image.isr, *image.eligible)
    return is_out and partition.leader is None
