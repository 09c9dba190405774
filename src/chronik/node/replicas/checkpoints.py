"""Recovery points and high watermarks of all logs: two small files, written periodically.

After an unclean shutdown the recovery point separates damage from the normal effects of a crash. So it must be lowered
durably before a log is truncated or removed: otherwise the torn end of a log that was truncated on purpose would look
like damage. If records were lost, it stays as it is until the loss is reported: it is the only proof.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from uuid import UUID

from chronik.node.replicas.partition import Partition
from chronik.node.runtime import Runtime
from chronik.storage.folder import DataFolder, RecoveryPoint, TopicIdPartition, TopicPartition


class Checkpoints:
    """Owned by the loop; files are written in the executor, one at a time. Concurrent callers share a write."""

    def __init__(self, runtime: Runtime, folder: DataFolder, partitions: Mapping[tuple[str, int], Partition]) -> None:
        self._runtime = runtime
        self._folder = folder
        self._partitions = partitions
        self._lowered: dict[TopicPartition, int] = {}
        self._lock = asyncio.Lock()
        self._calls = 0
        self._written = 0
        self._last_points: Mapping[TopicPartition, RecoveryPoint] | None = None
        self._last_watermarks: Mapping[TopicIdPartition, int] | None = None

    async def write(self) -> None:
        """Write both files; when this returns, they are at least as new as the call."""
        self._calls += 1
        call = self._calls
        async with self._lock:
            if self._written >= call:
                return
            call = self._calls
            points = self._points()
            watermarks = watermarks_of(self._partitions.values())
            if points != self._last_points:
                await self._runtime.run_blocking(self._folder.recovery_points_job(points))
                self._last_points = points
            if watermarks != self._last_watermarks:
                await self._runtime.run_blocking(self._folder.high_watermarks_job(watermarks))
                self._last_watermarks = watermarks
            self._written = call

    async def lower(self, partition: Partition, offset: int) -> None:
        """Lower the recovery point to `offset` before a truncation, which holds the log exclusively."""
        self._lowered[(partition.topic, partition.index)] = offset
        await self.write()

    async def distrust_page_cache(self) -> None:
        """Record that a sync failed: the next process must not trust what this one wrote."""
        try:
            await self._runtime.run_blocking(self._folder.distrust_page_cache)
        except OSError as error:
            log = self._runtime.log.bind(component="storage")
            log.error("boot_record_not_written", error=str(error))

    def _points(self) -> dict[TopicPartition, RecoveryPoint]:
        points = recovery_points_of(self._folder, self._partitions.values())
        for key, offset in list(self._lowered.items()):
            partition = self._partitions.get(key)
            if partition is not None and partition.jobs.is_exclusive:
                points[key] = points[key]._replace(offset=min(points[key].offset, offset))
            else:
                # The truncation is over, and the log itself has the right end.
                del self._lowered[key]
        return points


def recovery_points_of(folder: DataFolder, partitions: Iterable[Partition]) -> dict[TopicPartition, RecoveryPoint]:
    """Return the recovery points. Logs that are not open, or with an unreported loss, keep their recorded ones."""
    points = dict(folder.recovery_points)
    for partition in partitions:
        if partition.loss is None:
            key = (partition.topic, partition.index)
            points[key] = RecoveryPoint(partition.topic_id, partition.log.synced_end_offset)
    return points


def watermarks_of(partitions: Iterable[Partition]) -> dict[tuple[UUID, int], int]:
    return {(partition.topic_id, partition.index): partition.high_watermark for partition in partitions}
