"""Group commit with a commit log: one sync for many logs, and segments are synced before it is recycled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from errno import EIO
from random import Random
from unittest.mock import patch
from uuid import UUID

from tests.node.support_async import async_test
from tests.storage.faulty_disk import FaultyDisk
from tests.storage.helpers import NOW_MS, append_many, offsets
from tests.support.eventually import until

from chronik.node.config import NodeConfig
from chronik.node.disk_watch import DiskWatch
from chronik.node.environment import Environment
from chronik.node.replicas import committer
from chronik.node.replicas.committer import ROUND_BYTES_MAX, Committer, begin_commit_log
from chronik.node.replicas.syncer import Syncer
from chronik.node.runtime import Runtime
from chronik.observe.logging import silent_logger
from chronik.observe.metrics import Metrics
from chronik.storage.commit_log import FREE_FILES_MIN, LogFrames, LogId
from chronik.storage.config import LogConfig
from chronik.storage.folder import DataFolder, RecoveryPoint
from chronik.storage.log import Log
from chronik.storage.syncing import FlushJob, SyncJob

PATH = "/data"
LOGS = 5
TOPIC = UUID(int=1)
BYTES = 4 * 64 * 1024


class Hosted:
    """As much of a partition as a syncer sees."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.errors: list[Exception] = []
        self.is_changing = False
        self.refusals = 0

    @property
    def can_flush(self) -> bool:
        self.refusals += self.is_changing
        return not self.is_changing

    def sync_job(self) -> SyncJob | None:
        return self.log.sync_job()

    def synced(self, job: SyncJob) -> None:
        self.log.synced(job)

    def sync_failed(self, job: SyncJob, error: Exception) -> None:
        self.log.sync_failed(job)
        self.errors.append(error)

    def flush_job(self) -> FlushJob | None:
        return self.log.flush_job()

    def flushed(self, job: FlushJob) -> bool:
        return self.log.flushed(job)

    def flush_failed(self, job: FlushJob, error: Exception) -> None:
        self.log.flush_failed(job)
        self.errors.append(error)

    def stalled(self) -> None: ...

    def resumed(self) -> None: ...


class Node:
    """Logs, a syncer and a commit log on a faulty disk. `syncs` has the path of each sync of a file."""

    def __init__(self, disk: FaultyDisk, folder: DataFolder, syncer: Syncer) -> None:
        assert syncer.committer is not None
        self.disk, self.folder, self.syncer, self.committer = disk, folder, syncer, syncer.committer
        self.syncs: list[str] = []
        self.error: Callable[[str], int | None] = lambda path: None
        disk.fail = self._step
        self.hosted = [self._open(index) for index in range(LOGS)]
        points = {(f"t{index}", 0): RecoveryPoint(TOPIC, 0) for index in range(LOGS)}
        folder.recovery_points_job(points)()

    def _step(self, operation: str, path: str) -> int | None:
        if operation != "datasync":
            return None
        self.syncs.append(path)
        return self.error(path)

    def _open(self, index: int) -> Hosted:
        self.folder.claim_log(f"t{index}", 0, UUID(int=index), NOW_MS)
        log = Log.open(self.disk, self.folder.log_path(f"t{index}", 0), LogConfig(), NOW_MS)
        log.frames = LogFrames(self.committer.commit_log, LogId(UUID(int=index), 0))
        return Hosted(log)

    async def append(self, logs: int = LOGS, value_bytes: int = 20) -> list[str]:
        """Append to the first logs and wait until that is synced; return the folders of the files that were synced."""
        before = len(self.syncs)
        for hosted in self.hosted[:logs]:
            append_many(hosted.log, 1, value_bytes=value_bytes)
            self.syncer.request(hosted)
        await self.syncer.settled()
        for hosted in self.hosted[:logs]:
            assert hosted.errors or hosted.log.synced_end_offset == hosted.log.log_end_offset
        files = [path for path in self.syncs[before:] if path.endswith(".log") or "/commit-log/" in path]
        return sorted(path.split("/")[-2] for path in files)

    def recovered(self) -> list[list[int]]:
        """Lose power and return the offsets that each log has."""
        self.disk.fail = lambda operation, path: None
        self.disk.power_loss(Random(1))
        folder = DataFolder.open(self.disk, PATH, 1, "cluster")
        paths = [folder.log_path(f"t{index}", 0) for index in range(LOGS)]
        return [offsets(Log.open(self.disk, path, LogConfig(), NOW_MS)) for path in paths]


@asynccontextmanager
async def opened(has_room: bool = True) -> AsyncIterator[Node]:
    disk = FaultyDisk()
    with ThreadPoolExecutor(1) as executor:
        env = Environment(disk=disk, random=Random(1), executor=executor, wall_ms=lambda: 0)
        config = NodeConfig(commit_log=True, commit_log_bytes=BYTES)
        runtime = Runtime.make(config, env, Metrics(), silent_logger())
        folder = DataFolder.open(disk, PATH, 1, "cluster")
        commit_log = await begin_commit_log(runtime, folder)
        assert commit_log is not None
        watch = DiskWatch(runtime.loop, 5_000, runtime.log)
        frames = Committer(runtime, watch, commit_log)
        while has_room and commit_log.wants_file:
            commit_log.add_file()
        if not has_room:
            disk.capacity_bytes = (FREE_FILES_MIN - 1) * commit_log.file_bytes
        frames.start()
        node = Node(disk, folder, Syncer(runtime, watch, frames))
        # The first sync of a segment makes its name durable.
        assert await node.append() == [f"t{index}-0" for index in range(LOGS)]
        yield node
        await frames.close()
        commit_log.close()


on_node = async_test(opened)


@on_node
async def test_a_round_is_one_sync(node: Node) -> None:
    assert await node.append() == ["commit-log"]
    assert await node.append(3) == ["commit-log"]
    assert await node.append(1) == ["commit-log"]
    assert node.recovered() == [[0, 1, 2, 3]] + [[0, 1, 2]] * 2 + [[0, 1]] * 2


@on_node
async def test_a_round_of_many_bytes_syncs_the_segments(node: Node) -> None:
    assert ROUND_BYTES_MAX >= BYTES
    assert await node.append(2, value_bytes=BYTES // 8) == ["t0-0", "t1-0"]
    assert node.recovered() == [[0, 1], [0, 1], [0], [0], [0]]


@on_node
async def test_segments_are_synced_before_a_file_of_the_commit_log_is_recycled(node: Node) -> None:
    for _ in range(120):
        await node.append()
    assert node.committer.commit_log._serial > 4
    await until(lambda: node.committer._work is None)
    frames = [path for path in node.syncs if "/commit-log/" in path]
    segments = [path for path in node.syncs if path.endswith(".log")]
    assert len(frames) > 100
    assert LOGS < len(segments) < 120
    assert node.recovered() == [list(range(121))] * LOGS


@on_node
async def test_a_node_continues_without_a_commit_log_that_fails(node: Node) -> None:
    await node.append()
    node.error = lambda path: EIO if "/commit-log/" in path else None
    assert set(await node.append()) == {"commit-log", *(f"t{index}-0" for index in range(LOGS))}
    node.error = lambda path: None
    assert "commit-log" not in await node.append()
    # Once all segments are synced, it does not count: a truncation must not be undone by the next start.
    await until(lambda: not node.folder.meta.commit_log)
    node.hosted[0].log.truncate_to(1)
    assert node.recovered() == [[0]] + [[0, 1, 2, 3]] * (LOGS - 1)


@on_node
async def test_the_commit_log_keeps_what_a_segment_could_not_be_synced_with(node: Node) -> None:
    await node.append()
    node.error = lambda path: EIO if "/t1-0/" in path else None
    while not node.committer.is_stuck:
        await node.append(2)
    assert [len(hosted.errors) for hosted in node.hosted] == [0, 1, 0, 0, 0]
    node.error = lambda path: None
    acknowledged = node.hosted[1].log.synced_end_offset
    for _ in range(40):
        await node.append(1)
    assert len(node.recovered()[1]) >= acknowledged


@on_node
async def test_a_log_whose_sync_failed_leaves_the_flush_of_other_logs_complete(node: Node) -> None:
    first, second = (hosted.log for hosted in node.hosted[:2])
    await node.append()
    # Its next sync is one of the segment, and fails.
    second._syncs.request_checkpoint(second.config.checkpoint_bytes)
    node.error = lambda path: EIO if "/t1-0/" in path else None
    await node.append()
    assert second.read_only_forever
    node.error = lambda path: None
    # The flush is to write its checkpoint.
    first._syncs.bytes_since_checkpoint = first.config.checkpoint_bytes
    before = list(first._syncs.snapshots)
    while not node.committer.is_stuck:
        for hosted in (node.hosted[0], *node.hosted[2:]):
            append_many(hosted.log, 1)
            node.syncer.request(hosted)
        await node.syncer.settled()
    assert first._syncs.snapshots != before


@on_node
async def test_no_flush_of_a_log_begins_while_a_thread_changes_it(node: Node) -> None:
    node.hosted[1].is_changing = True
    node.syncs.clear()
    while len({path for path in node.syncs if path.endswith(".log")}) < LOGS - 1:
        await node.append()
    await until(lambda: node.hosted[1].refusals > 2)
    assert not any("/t1-0/" in path for path in node.syncs)
    assert node.committer.commit_log.flushed_upto == 0
    node.hosted[1].is_changing = False
    await until(lambda: node.committer.commit_log.flushed_upto > 0)
    assert any("/t1-0/" in path for path in node.syncs)


@on_node
async def test_a_node_that_stops_waits_for_a_flush_which_may_fail(node: Node) -> None:
    began, may_end = threading.Event(), threading.Event()

    def fail_once(path: str) -> int | None:
        if not path.endswith("/t1-0/00000000000000000000.log") or began.is_set():
            return None
        began.set()
        may_end.wait(10)
        return EIO

    node.error = fail_once
    for _ in range(40):
        for hosted in node.hosted:
            append_many(hosted.log, 1)
            node.syncer.request(hosted)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await node.syncer.settled()
        if began.is_set():
            break
    assert began.is_set()
    closing = asyncio.create_task(node.committer.close())
    await asyncio.sleep(0)
    assert not closing.done()
    may_end.set()
    await closing
    assert node.committer.is_stuck
    await node.syncer.settled()
    # The kernel reports a failed sync once: the next one of the same file succeeds.
    assert [hosted.log.close() for hosted in node.hosted] == [True, False, True, True, True]


@on_node
async def test_a_node_that_stops_does_not_wait_for_a_disk_that_hangs(node: Node) -> None:
    began, may_end = threading.Event(), threading.Event()

    def hang(path: str) -> int | None:
        if path.endswith("/t1-0/00000000000000000000.log"):
            began.set()
            may_end.wait(10)
        return None

    node.error = hang
    node.syncer.disk.timeout_s = 0.05
    while not began.is_set():
        for hosted in node.hosted:
            append_many(hosted.log, 1)
            node.syncer.request(hosted)
        await asyncio.sleep(0.01)
    await node.committer.close()
    assert node.committer.is_stuck
    may_end.set()
    await node.syncer.settled()


async def test_a_commit_log_for_which_the_disk_has_no_room_begins_when_it_has() -> None:
    with patch.object(committer, "ADD_RETRY_S", 0.01):
        async with opened(has_room=False) as node:
            assert "commit-log" not in await node.append()
            node.disk.capacity_bytes *= 2
            await until(lambda: len(node.committer.commit_log._free) > 0)
            assert await node.append() == ["commit-log"]


@on_node
async def test_a_clean_stop_leaves_no_commit_log_that_counts(node: Node) -> None:
    await node.append()
    assert all(hosted.log.close() for hosted in node.hosted)
    node.folder.record_clean_shutdown(node.folder.recovery_points)
    assert not node.folder.meta.commit_log
    assert node.recovered() == [[0, 1]] * LOGS
