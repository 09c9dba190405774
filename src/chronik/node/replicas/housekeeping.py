"""Periodic work of a node: retention, compaction, recovery points, set-aside folders, and samples of watermark lag."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from chronik.node.replicas.partition import Partition, is_damage
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.observe.watermarks import WatermarkMonitor, WatermarkPosition
from chronik.storage.aborted import AbortedIndexDamaged
from chronik.storage.compaction import CompactionJob
from chronik.storage.disk import StorageError, storage_error
from chronik.storage.folder import expired_set_aside
from chronik.wire.errors import KafkaError

YIELD_EVERY_PARTITIONS = 100


class Housekeeping:
    """Four timers: retention, compaction, recovery points, and the removal of expired set-aside folders.

    Retention and compaction visit every hosted partition; a failure in one is logged and does not end the round.

    Owned by the loop: decisions and the swap of results run on the loop, file reads and writes in the executor.
    """

    def __init__(self, runtime: Runtime, host: PartitionHost, age_ms: Callable[[], int]) -> None:
        """`age_ms` returns the time from which ages are computed: see `AgeClock`."""
        self._runtime = runtime
        self._host = host
        self._age_ms = age_ms
        self._log = runtime.log.bind(component="storage")
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        config, loop = self._runtime.config, self._runtime.loop
        for name, interval_ms, visit in (
            ("retention", config.retention_check_interval_ms, self._retain),
            ("compaction", config.compaction_check_interval_ms, self._compact),
        ):
            round_of = self._round(name, visit)
            self._tasks.append(loop.create_task(self._every(interval_ms, round_of), name=name))
        for name, interval_ms, work in (
            ("recovery-points", config.recovery_point_interval_ms, self._host.record_recovery_points),
            ("set-aside", config.retention_check_interval_ms, self._remove_set_aside),
        ):
            self._tasks.append(loop.create_task(self._every(interval_ms, work), name=name))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _every(self, interval_ms: int, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(interval_ms / 1000)
            try:
                await work()
            except OSError as error:
                self._log.error("housekeeping_failed", error=repr(error))  # a full disk; retried in the next round
            except Exception:
                self._log.exception("housekeeping_failed")

    def _round(self, name: str, visit: Callable[[Partition], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        async def visit_all() -> None:
            for count, partition in enumerate(list(self._host.partitions.values())):
                if partition.is_closed or not partition.jobs.begin():
                    continue
                with partition.jobs.running():
                    try:
                        await visit(partition)
                    except (OSError, StorageError) as error:
                        self._log.error(f"{name}_failed", **partition.log_fields, error=repr(error))
                    except Exception:
                        self._log.exception(f"{name}_failed", **partition.log_fields)
                if count % YIELD_EVERY_PARTITIONS == 0:
                    await asyncio.sleep(0)

        return visit_all

    async def _retain(self, partition: Partition) -> None:
        now_ms = self._age_ms()
        partition.log.roll_if_needed(now_ms)
        job = partition.log.apply_retention(now_ms, partition.high_watermark)
        if job is not None:
            partition.log_start_rose()
            await self._runtime.run_blocking(job.run)
            self._log.info(
                "segments_deleted",
                **partition.log_fields,
                segments=job.segments,
                size_bytes=job.size_bytes,
                log_start_offset=partition.log_start_offset,
            )

    async def _remove_set_aside(self) -> None:
        disk, data_path = self._runtime.env.disk, self._host.folder.path
        now_ms, retention_ms = self._age_ms(), self._runtime.config.set_aside_retention_ms
        find = partial(expired_set_aside, disk, data_path, now_ms, retention_ms)
        for folder in await self._runtime.run_blocking(find):
            await self._runtime.run_blocking(partial(disk.rmtree, folder))
            self._log.info("set_aside_removed", folder=folder)

    async def _compact(self, partition: Partition) -> None:
        log = partition.log
        job = log.compaction_job(self._age_ms(), partition.high_watermark)
        if job is None:
            return
        try:
            await self._runtime.run_blocking(job.run)
        except (KafkaError, FileNotFoundError) as error:
            failed_at = error.base_offset if isinstance(error, AbortedIndexDamaged) else job.reading_at
            if failed_at not in log.closed_segments():
                # Retention removed the segment meanwhile.
                return
            partition.lookup_failed(error)
            if not is_damage(error):
                raise
            partition.found_damaged(job.reading_at, "read", f"compaction of segment {job.reading_at}: {error}")
            return
        finally:
            if not partition.is_closed:
                await self._replace_compacted(partition, job)
        if job.swap_error is not None:
            raise storage_error("the old segments stay in use, and the next round retries", job.swap_error)
        self._log.info(
            "log_compacted",
            **partition.log_fields,
            removed_records=job.removed_records,
            removed_bytes=job.removed_bytes,
            compacted_upto=job.cleaned_upto,
        )

    async def _replace_compacted(self, partition: Partition, job: CompactionJob) -> None:
        try:
            deletion = partition.log.finish_compaction(job)
        except StorageError:
            partition.log_failed()
            raise
        await self._runtime.run_blocking(deletion.run)


class WatermarkWatch:
    """Samples the watermarks of the partitions that this node leads, at the interval of `observe.watermarks`.

    Owned by the loop. Call `start` once the logs are open, and `stop` before they are closed.
    """

    def __init__(self, runtime: Runtime, partitions: Mapping[tuple[str, int], Partition]) -> None:
        self.monitor = WatermarkMonitor()
        self._loop = runtime.loop
        self._partitions = partitions
        self._log = runtime.log.bind(component="replication")
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = self._loop.call_later(self.monitor.interval_s, self._sample)

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _sample(self) -> None:
        positions = [
            WatermarkPosition(partition.topic, partition.index, partition.log_end_offset, partition.high_watermark)
            for partition in self._partitions.values()
            if partition.leader is not None and partition.log_end_offset > partition.high_watermark
        ]
        for lag in self.monitor.sample(positions, self._loop.time()):
            self._log.info("watermark_lag", **lag._replace(age_s=round(lag.age_s, 3))._asdict())
        self._timer = self._loop.call_later(self.monitor.interval_s, self._sample)
