"""The scrubber: re-reads every closed segment periodically, so that damage is found before the data is needed.

A pass is spread evenly over `scrub_interval_ms`. After each chunk the scrubber pauses long enough to stay below
DISK_TIME_SHARE_MAX, so a pass takes longer on a disk that is too slow or too full for the interval. Progress is kept in
memory only: a restart begins a new pass in a new random order, so that a node that restarts often does not always read
the same segments. Data in the page cache is checked there, and stays cached.

A segment whose index of aborted transactions is damaged is scrubbed at once, even without an interval: until the index
is rebuilt, consumers with isolation level read_committed get errors.
"""

from __future__ import annotations

import asyncio

from chronik.node.replicas.healing import Healing
from chronik.node.replicas.partition import Partition
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.storage.disk import StorageError
from chronik.storage.scrubbing import SegmentScrub

DISK_TIME_SHARE_MAX = 0.05
START_DELAY_S_MAX = 60.0
START_DELAY_SHARE = 0.1
"""The first pass begins after this share of the interval, or after START_DELAY_S_MAX if that is sooner."""
URGENT_PAUSE_S = 1.0
"""How long readers cannot have the same segment scrubbed again."""
BAD_INDEX = "an index does not describe the batches of its segment"


class Scrubber:
    """One task, and one for each urgent segment.

    Owned by the loop; segments are read in the executor, one chunk at a time.
    """

    def __init__(self, runtime: Runtime, host: PartitionHost, healing: Healing) -> None:
        self._runtime = runtime
        self._loop = runtime.loop
        self._interval_s = runtime.config.scrub_interval_ms / 1000
        """0 disables the passes."""
        self._host = host
        self._healing = healing
        self._metrics = runtime.metrics
        self._log = runtime.log.bind(component="storage")
        self._s_per_byte = 0.0
        self._is_stopped = False
        self._task: asyncio.Task[None] | None = None
        self._urgent: dict[tuple[Partition, int], asyncio.Task[None]] = {}
        host.replication.index_damaged = self.scrub_soon

    def start(self) -> None:
        if self._interval_s:
            self._task = self._loop.create_task(self._run(), name="scrubber")

    async def stop(self) -> None:
        self._is_stopped = True
        tasks = [*self._urgent.values()] if self._task is None else [self._task, *self._urgent.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def scrub_soon(self, partition: Partition, base_offset: int) -> None:
        """Scrub a segment now: its index of aborted transactions is damaged."""
        key = (partition, base_offset)
        if key not in self._urgent and not self._is_stopped:
            task = self._urgent[key] = self._loop.create_task(self._urgently(*key), name="scrubber")
            task.add_done_callback(lambda _: self._urgent.pop(key))

    async def _urgently(self, partition: Partition, base_offset: int) -> None:
        if not partition.is_closed and not partition.jobs.is_exclusive:
            try:
                partition.log.close_segment(base_offset, self._runtime.env.wall_ms())
            except StorageError as error:
                self._log.error("scrub_failed", **partition.log_fields, segment=base_offset, error=repr(error))
        await self._segment(partition, base_offset, is_urgent=True)
        await asyncio.sleep(URGENT_PAUSE_S)

    async def _run(self) -> None:
        await asyncio.sleep(min(self._interval_s * START_DELAY_SHARE, START_DELAY_S_MAX))
        while True:
            began_s = self._loop.time()
            await self._pass()
            self._metrics.scrub_passes += 1
            await asyncio.sleep(max(0.0, began_s + self._interval_s - self._loop.time()))

    async def _pass(self) -> None:
        partitions = list(self._host.partitions.values())
        self._runtime.env.random.shuffle(partitions)
        total_bytes = sum(partition.log.closed_bytes() for partition in partitions)
        self._s_per_byte = self._interval_s / max(1, total_bytes)
        for partition in partitions:
            for base_offset in partition.log.closed_segments():
                await self._segment(partition, base_offset)

    async def _segment(self, partition: Partition, base_offset: int, *, is_urgent: bool = False) -> None:
        scrub = partition.log.scrub(base_offset)
        is_readable = True
        while scrub is not None and is_readable and not scrub.is_done and self._may_go_on(partition, scrub):
            began_s, before = self._loop.time(), scrub.position
            with partition.jobs.running():
                is_readable = await self._step(partition, scrub)
            took_s, read_bytes = self._loop.time() - began_s, scrub.position - before
            self._metrics.scrubbed_bytes += read_bytes
            if not is_urgent:
                pause_s = max(took_s * (1 / DISK_TIME_SHARE_MAX - 1), read_bytes * self._s_per_byte - took_s)
                await asyncio.sleep(pause_s)

    async def _step(self, partition: Partition, scrub: SegmentScrub) -> bool:
        """Read the next chunk, and evaluate the segment after the last one; return whether that worked."""
        where = {**partition.log_fields, "segment": scrub.segment.base_offset}
        try:
            await self._runtime.run_blocking(scrub.step)
            if scrub.is_done and partition.log.still_has(scrub):
                await self._judge(partition, scrub)
        except OSError as error:
            self._log.error("scrub_failed", **where, error=repr(error))
            return False
        except Exception:
            self._log.exception("scrub_failed", **where)
            return False
        return True

    def _may_go_on(self, partition: Partition, scrub: SegmentScrub) -> bool:
        """Whether the segment still exists and no truncation is pending; if so, begin a job of the log."""
        is_there = not partition.is_closed and not partition.is_damaged and partition.log.still_has(scrub)
        return is_there and partition.jobs.begin()

    async def _judge(self, partition: Partition, scrub: SegmentScrub) -> None:
        base_offset = scrub.segment.base_offset
        if scrub.damage:
            partition.found_damaged(base_offset, "scrub", f"segment {base_offset}: {scrub.damage}")
        elif scrub.has_bad_index:
            log, is_rebuilt = partition.log, False
            while not is_rebuilt:
                fresh = await self._runtime.run_blocking(log.rebuild_indexes_job(scrub))
                is_rebuilt = log.indexes_rebuilt(scrub, fresh)
            self._log.warning("index_rebuilt", **partition.log_fields, segment=base_offset, reason=BAD_INDEX)
            self._metrics.damages_found["scrub"] += 1
            self._healing.index_rebuilt(partition, base_offset, BAD_INDEX)
