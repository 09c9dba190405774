"""Group commit: one sync covers every waiting append, and no sync starts before the appends that it must cover."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from random import Random
from typing import Any, cast

import pytest
from tests.node.support_async import async_test
from tests.support.eventually import until

from chronik.node.config import NodeConfig
from chronik.node.disk_watch import DiskWatch
from chronik.node.environment import Environment
from chronik.node.replicas.syncer import Syncer
from chronik.node.runtime import Runtime
from chronik.observe.logging import silent_logger
from chronik.observe.metrics import Metrics

DISK_TIMEOUT_MS = 200


class FakeJob:
    def __init__(self, log: "FakeLog", end: int) -> None:
        self.log = log
        self.end = end

    def run(self) -> None:
        self.log.syncs += 1
        threading.Event().wait(self.log.sync_s)
        if not self.log.may_sync.wait(timeout=10):
            raise TimeoutError
        if self.log.error is not None:
            raise self.log.error


class FakeLog:
    def __init__(self) -> None:
        self.end = 0
        self.synced_end = 0
        self.syncs = 0
        self.error: OSError | None = None
        self.sync_s = 0.0
        self.may_sync = threading.Event()
        self.may_sync.set()

    def sync_job(self) -> FakeJob | None:
        return FakeJob(self, self.end) if self.end > self.synced_end else None

    def synced(self, job: FakeJob) -> None:
        self.synced_end = job.end


class FakePartition:
    def __init__(self) -> None:
        self.log = FakeLog()
        self.done = 0
        self.failed: list[Exception] = []
        self.is_stalled = False

    def sync_job(self) -> FakeJob | None:
        return self.log.sync_job()

    def synced(self, job: FakeJob) -> None:
        self.log.synced(job)
        self.done += 1

    def sync_failed(self, job: FakeJob, error: Exception) -> None:
        self.failed.append(error)

    def stalled(self) -> None:
        self.is_stalled = True

    def resumed(self) -> None:
        self.is_stalled = False


@asynccontextmanager
async def opened() -> AsyncIterator[Syncer]:
    with ThreadPoolExecutor(4) as executor:
        env = Environment(disk=cast(Any, None), random=Random(1), executor=executor, wall_ms=lambda: 0)
        runtime = Runtime.make(NodeConfig(), env, Metrics(), silent_logger())
        yield Syncer(runtime, DiskWatch(runtime.loop, DISK_TIMEOUT_MS, runtime.log))


on_syncer = async_test(opened)


def append(syncer: Syncer, partition: FakePartition) -> None:
    partition.log.end += 1
    syncer.request(cast(Any, partition))


@on_syncer
async def test_appends_of_one_loop_iteration_share_a_sync(syncer: Syncer) -> None:
    partition = FakePartition()
    for _ in range(50):
        append(syncer, partition)
    await syncer.settled()
    assert partition.log.synced_end == 50
    assert partition.log.syncs == 1
    assert partition.done == 1


@on_syncer
async def test_the_next_sync_covers_records_appended_during_a_sync(syncer: Syncer) -> None:
    partition = FakePartition()
    partition.log.may_sync.clear()
    append(syncer, partition)
    async with asyncio.timeout(5):
        while not partition.log.syncs:
            await asyncio.sleep(0)
    append(syncer, partition)
    settled = asyncio.ensure_future(syncer.settled())
    partition.log.may_sync.set()
    await settled
    assert partition.log.syncs == 2
    assert partition.log.synced_end == 2


@on_syncer
async def test_settled_does_not_wait_for_later_sync_requests(syncer: Syncer) -> None:
    partition = FakePartition()
    append(syncer, partition)
    rounds = 0
    settled = asyncio.ensure_future(syncer.settled())
    async with asyncio.timeout(5):
        while not settled.done():
            append(syncer, partition)
            rounds += 1
            await asyncio.sleep(0)
    assert rounds


@on_syncer
async def test_a_failed_sync_is_reported_and_never_makes_records_durable(syncer: Syncer) -> None:
    broken, healthy = FakePartition(), FakePartition()
    broken.log.error = OSError(5, "device")
    append(syncer, broken)
    append(syncer, healthy)
    await syncer.settled()
    assert broken.log.synced_end == 0
    assert [error.args for error in broken.failed] == [(5, "device")]
    assert (healthy.log.synced_end, healthy.done) == (1, 1)


@on_syncer
async def test_many_files_are_synced_in_parallel_and_reported_as_they_finish(syncer: Syncer) -> None:
    partitions = [FakePartition() for _ in range(10)]
    partitions[0].log.may_sync.clear()
    for partition in partitions:
        append(syncer, partition)
    async with asyncio.timeout(5):
        while sum(partition.done for partition in partitions) < 6:
            await asyncio.sleep(0)
    assert partitions[0].log.synced_end == 0
    partitions[0].log.may_sync.set()
    await syncer.settled()
    assert [partition.log.syncs for partition in partitions] == [1] * 10
    assert [partition.log.synced_end for partition in partitions] == [1] * 10


@on_syncer
async def test_a_hung_sync_blocks_no_waiter_and_no_other_sync_starts(syncer: Syncer) -> None:
    hung, dirty, late = FakePartition(), FakePartition(), FakePartition()
    hung.log.may_sync.clear()
    append(syncer, hung)
    await until(lambda: hung.log.syncs)
    append(syncer, dirty)
    with pytest.raises(TimeoutError, match="does not answer"):
        await syncer.settled()
    assert syncer.disk.is_stuck
    assert (hung.is_stalled, dirty.is_stalled) == (True, True), "one waits for its sync, one for its turn"
    append(syncer, late)
    await until(lambda: late.is_stalled)
    with pytest.raises(TimeoutError, match="does not answer"):
        await syncer.settled()
    assert (hung.log.syncs, dirty.log.syncs, late.log.syncs) == (1, 0, 0)
    hung.log.may_sync.set()
    await until(lambda: late.log.synced_end)
    assert not syncer.disk.is_stuck
    assert not (hung.is_stalled or dirty.is_stalled or late.is_stalled)
    assert [each.log.synced_end for each in (hung, dirty, late)] == [1, 1, 1]
    await syncer.settled()


@on_syncer
async def test_a_sync_that_hangs_and_then_fails_is_reported_as_failed(syncer: Syncer) -> None:
    hung = FakePartition()
    hung.log.may_sync.clear()
    hung.log.error = OSError(5, "device")
    append(syncer, hung)
    await until(lambda: hung.is_stalled)
    hung.log.may_sync.set()
    await until(lambda: hung.failed)
    assert not hung.is_stalled
    assert (hung.done, hung.log.synced_end) == (0, 0)


@on_syncer
async def test_many_files_on_a_slow_disk_do_not_mark_the_disk_stuck(syncer: Syncer) -> None:
    partitions = [FakePartition() for _ in range(16)]
    for partition in partitions:
        partition.log.sync_s = DISK_TIMEOUT_MS / 2000
        append(syncer, partition)
    await syncer.settled()
    assert [partition.log.synced_end for partition in partitions] == [1] * 16
