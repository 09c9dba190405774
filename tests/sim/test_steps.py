"""Jobs in steps: other code runs between the disk operations of a job, and a crash may come between any two."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.sim.machines import Machines

import chronik
from chronik.storage.syncing import FlushJob
from chronik.testing.sim.disk import ProcessDisk
from chronik.testing.sim.host import Host
from chronik.testing.sim.steps import MODULES_WITH_LOCKS, SteppedExecutor, SteppedLock, stepped_locks

SOURCE = Path(chronik.__file__).parent


@pytest.fixture
def stepped() -> Iterator[Machines]:
    """One machine whose process does its jobs in steps."""
    machines = Machines(count=1)
    machines.hosts[0].kill()
    machines.hosts[0].executor_type = SteppedExecutor
    machines.restart()
    yield machines
    machines.bury()


def write_twice(disk: ProcessDisk, seen: list[str]) -> None:
    file = disk.open("/file", create=True)
    try:
        for number in range(2):
            seen.append(f"write {number}")
            file.pwrite(b"x", number)
            file.datasync()
        seen.append("end")
    finally:
        seen.append("finally")


def test_the_loop_and_other_jobs_run_between_the_operations_of_a_job(stepped: Machines) -> None:
    disk, seen = stepped.disk(), list[str]()

    def read(file_names: list[list[str]]) -> None:
        file_names.append(disk.listdir("/"))
        seen.append("other job")

    async def main() -> None:
        loop, executor = asyncio.get_running_loop(), stepped.process().executor
        job = loop.run_in_executor(executor, write_twice, disk, seen)
        other = loop.run_in_executor(executor, read, [])
        while not job.done():
            await asyncio.sleep(10e-6)
            seen.append("loop")
        await other

    stepped.run(main())
    within = seen[seen.index("write 0") : seen.index("end")]
    assert "loop" in within and "other job" in within


def test_the_code_of_a_step_runs_in_a_thread_of_its_process(stepped: Machines) -> None:
    disk, seen = stepped.disk(), list[bool]()
    world = stepped.world

    def job() -> None:
        for _ in range(3):
            seen.append(world.in_thread and world.running is stepped.process())
            disk.listdir("/")

    async def main() -> None:
        work = asyncio.get_running_loop().run_in_executor(stepped.process().executor, job)
        while not work.done():
            seen.append(not world.in_thread and world.running is stepped.process())
            await asyncio.sleep(1e-6)

    stepped.run(main())
    assert all(seen) and len(seen) > 6
    assert world.running is None and not world.in_thread


@pytest.mark.parametrize("point", ["disk.write", "disk.written", "disk.sync", "disk.synced"])
def test_a_crash_between_two_steps_runs_no_cleanup_code(stepped: Machines, point: str) -> None:
    seen = list[str]()
    host = stepped.hosts[0]
    host.on_crash_point = lambda host, reached: host.kill() if reached == point else None

    async def main() -> None:
        await asyncio.get_running_loop().run_in_executor(stepped.process().executor, write_twice, stepped.disk(), seen)

    stepped.begin(main())
    stepped.pass_time(1)
    assert seen == ["write 0"] and not stepped.process().is_alive
    assert stepped.world.violation is None


def test_a_sync_does_not_cover_what_is_written_while_it_returns(stepped: Machines) -> None:
    """Of many syncs, some cover a write beside them and some do not."""
    disk, durable = stepped.disk(), list[bool]()

    async def main() -> None:
        loop, executor = asyncio.get_running_loop(), stepped.process().executor
        file = disk.open("/file", create=True)
        for number in range(200):
            sync = loop.run_in_executor(executor, file.datasync)
            await asyncio.sleep(disk.device.sync_s / 2)
            file.pwrite(b"x", number)
            was_running = not sync.done()
            await sync
            if was_running:
                durable.append(len(file.node.durable) == number + 1)

    stepped.run(main())
    assert set(durable) == {True, False}


def test_a_job_waits_for_a_lock_that_another_job_holds(stepped: Machines) -> None:
    disk, seen = stepped.disk(), list[str]()
    lock = SteppedLock(stepped.world)

    def job(name: str) -> None:
        with lock:
            seen.append(name)
            disk.sync_dir("/")
            seen.append(name)

    async def main() -> None:
        loop, executor = asyncio.get_running_loop(), stepped.process().executor
        await asyncio.gather(*(loop.run_in_executor(executor, job, name) for name in "abc"))

    stepped.run(main())
    assert seen[0::2] == seen[1::2] and sorted(seen[0::2]) == ["a", "b", "c"]


def test_the_loop_must_not_wait_for_a_lock(stepped: Machines) -> None:
    disk, lock = stepped.disk(), SteppedLock(stepped.world)

    def hold() -> None:
        with lock:
            disk.sync_dir("/")

    async def main() -> None:
        job = asyncio.get_running_loop().run_in_executor(stepped.process().executor, hold)
        while not job.done():
            with lock:
                await asyncio.sleep(0)

    stepped.begin(main())
    stepped.pass_time(1)
    assert "waits for a lock" in (stepped.world.violation or "")


def test_a_file_that_is_closed_while_a_thread_uses_it_is_a_violation(stepped: Machines) -> None:
    began: list[bool] = []

    async def main() -> None:
        file = stepped.disk().open("/file", create=True)
        job = asyncio.get_running_loop().run_in_executor(stepped.process().executor, file.datasync)
        while not began:
            await asyncio.sleep(1e-6)
        file.close()
        await job

    stepped.hosts[0].on_crash_point = lambda host, point: began.append(True) if point == "disk.sync" else None
    stepped.begin(main())
    stepped.pass_time(1)
    assert "was closed while a thread was in disk.sync" in (stepped.world.violation or "")


def test_a_job_waits_while_the_device_hangs_or_the_process_is_paused(stepped: Machines) -> None:
    seen = list[float]()

    def job() -> None:
        for _ in range(2):
            stepped.disk().sync_dir("/")
            seen.append(stepped.world.now)

    def strike(host: Host, point: str) -> None:
        if point == "disk.synced_dir":
            host.disk.hang(1.0, frozenset())
            host.pause()
            host.on_crash_point = None

    async def main() -> None:
        await asyncio.get_running_loop().run_in_executor(stepped.process().executor, job)

    stepped.hosts[0].on_crash_point = strike
    stepped.begin(main())
    stepped.pass_time(3)
    assert len(seen) == 1
    stepped.hosts[0].resume()
    stepped.pass_time(1)
    assert len(seen) == 2 and seen[1] > 3


def test_all_locks_that_jobs_hold_across_steps_are_replaced() -> None:
    """A `threading.Lock` would block the simulation. Those of `others` are replaced elsewhere, held across no disk
    operation, or not used in the simulation."""
    others = {"storage/syncing.py", "storage/segment.py", "observe/logging.py", "node/commit_log_thread.py"}
    modules = {Path(module.__file__ or "").relative_to(SOURCE).as_posix() for module in MODULES_WITH_LOCKS}
    rooms = ("storage", "node", "observe", "raft", "replication")
    paths = [path for room in rooms for path in sorted((SOURCE / room).rglob("*.py"))]
    with_locks = {
        path.relative_to(SOURCE).as_posix()
        for path in paths
        if any(line.startswith(("from threading import", "import threading")) for line in path.read_text().splitlines())
    }
    assert with_locks == modules | others


def test_a_flush_has_a_replaced_lock(stepped: Machines) -> None:
    make = partial(FlushJob, stepped.disk(), "/", [], 0)
    with stepped_locks(stepped.world):
        assert isinstance(make().lock, SteppedLock)
    assert not isinstance(make().lock, SteppedLock)


def test_a_thread_that_waits_when_the_run_is_over_is_freed() -> None:
    machines = Machines(count=1)
    machines.hosts[0].kill()
    machines.hosts[0].executor_type = SteppedExecutor
    machines.restart()
    seen = list[str]()

    async def main() -> None:
        await asyncio.get_running_loop().run_in_executor(
            machines.process().executor, write_twice, machines.disk(), seen
        )

    machines.begin(main())
    machines.world.run(10.0, lambda: bool(seen))
    machines.bury()
    assert seen == ["write 0", "finally"]
    assert machines.world.violation is None
