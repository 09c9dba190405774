"""The simulated event loop keeps asyncio's guarantees, and its time is virtual."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.sim.machines import Machines

from chronik.testing.sim.host import Crashed
from chronik.testing.sim.world import SimulationFault


def test_callbacks_run_in_the_order_in_which_they_were_scheduled(machines: Machines) -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        seen: list[int] = []
        for number in range(5):
            loop.call_soon(seen.append, number)
        await asyncio.sleep(0)
        return seen

    assert machines.run(main()) == [0, 1, 2, 3, 4]


def test_timers_fire_in_the_order_of_their_deadlines_and_never_early(machines: Machines) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        seen: list[float] = []

        def fired(deadline: float) -> None:
            assert loop.time() >= deadline - 1e-6
            seen.append(deadline)

        deadlines = [loop.time() + delay_s for delay_s in (0.03, 0.01, 0.02, 0.01)]
        for deadline in deadlines:
            loop.call_at(deadline, fired, deadline)
        await asyncio.sleep(1)
        assert seen == sorted(deadlines)

    machines.run(main())


def test_a_long_sleep_takes_no_real_time_and_a_busy_loop_takes_virtual_time(machines: Machines) -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        loop = asyncio.get_running_loop()
        before_s = loop.time()
        for _ in range(100):
            await asyncio.sleep(0)
        return loop.time() - before_s

    assert 100 * 2e-6 <= machines.run(main()) < 0.1
    assert machines.world.now > 3599


def test_clocks_of_machines_drift_apart(machines: Machines) -> None:
    first, second = (host.clock for host in machines.hosts)
    before = first.monotonic_s() - second.monotonic_s()
    machines.pass_time(10_000.0)
    assert abs(first.monotonic_s() - second.monotonic_s() - before) > 0.001
    assert first.world_s(first.monotonic_s()) == pytest.approx(machines.world.now)


def test_timeouts_task_groups_locks_and_queues_work(machines: Machines) -> None:
    async def main() -> list[str]:
        seen: list[str] = []
        queue: asyncio.Queue[str] = asyncio.Queue()
        lock = asyncio.Lock()

        async def worker(name: str) -> None:
            async with lock:
                await asyncio.sleep(0.01)
                await queue.put(name)

        async with asyncio.TaskGroup() as group:
            for name in ("a", "b", "c"):
                group.create_task(worker(name))
        while not queue.empty():
            seen.append(queue.get_nowait())
        try:
            async with asyncio.timeout(0.5):
                await asyncio.sleep(10)
        except TimeoutError:
            seen.append("timeout")
        return seen

    assert machines.run(main()) == ["a", "b", "c", "timeout"]


def test_a_failing_task_group_cancels_its_tasks_in_the_order_of_creation(machines: Machines) -> None:
    async def main() -> list[int]:
        cancelled: list[int] = []

        async def wait(number: int) -> None:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                cancelled.append(number)
                raise

        async def fail() -> None:
            await asyncio.sleep(0.1)
            raise ValueError("on purpose")

        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                for number in range(6):
                    group.create_task(wait(number))
                group.create_task(fail())
        return cancelled

    assert machines.run(main()) == [0, 1, 2, 3, 4, 5]


def test_jobs_take_virtual_time_and_wait_for_a_free_thread(machines: Machines) -> None:
    disk = machines.disk()

    async def main() -> float:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        executor = machines.process().executor
        file = disk.open("/file", create=True)
        jobs = [loop.run_in_executor(executor, file.datasync) for _ in range(40)]
        await asyncio.gather(*jobs)
        return loop.time() - started_s

    assert machines.run(main()) > 10 * 20e-6


def test_awaiting_a_failed_job_raises_its_exception(machines: Machines) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(FileNotFoundError):
            await loop.run_in_executor(machines.process().executor, machines.disk().open, "/missing")

    machines.run(main())


def test_a_job_may_not_touch_the_loop(machines: Machines) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(SimulationFault):
            await loop.run_in_executor(machines.process().executor, loop.call_soon, print)

    machines.begin(main())
    with pytest.raises(SimulationFault):
        machines.pass_time(1)
    assert machines.world.violation is not None


def test_other_executors_are_refused(machines: Machines) -> None:
    async def main() -> None:
        with ThreadPoolExecutor() as other, pytest.raises(SimulationFault):
            asyncio.get_running_loop().run_in_executor(other, print)
        with pytest.raises(SimulationFault):
            asyncio.get_running_loop().run_in_executor(None, print)

    machines.run(main())


def test_a_callback_that_raises_is_a_violation(machines: Machines) -> None:
    machines.process().loop.call_soon_threadsafe(lambda: 1 // 0)
    machines.pass_time(1)
    assert "ZeroDivisionError" in (machines.world.violation or "")


def test_a_paused_process_continues_after_it_is_resumed(machines: Machines) -> None:
    seen: list[float] = []

    async def main() -> None:
        for _ in range(3):
            await asyncio.sleep(0.1)
            seen.append(machines.world.now)

    machines.begin(main())
    machines.pass_time(0.15)
    machines.hosts[0].pause()
    machines.pass_time(5)
    assert len(seen) == 1
    machines.hosts[0].resume()
    machines.pass_time(1)
    assert len(seen) == 3 and seen[1] > 5


def test_a_crash_runs_no_cleanup_code_timers_or_jobs(machines: Machines) -> None:
    """After a crash, no `finally` or `except` block of the process runs, and none of its timers or jobs."""
    disk = machines.disk()
    seen: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(0.5, seen.append, "timer")
        try:
            await asyncio.sleep(1)
        except BaseException:
            seen.append("except")
        finally:
            seen.append("finally")

    machines.begin(main())
    machines.pass_time(0.1)
    machines.hosts[0].kill()
    machines.pass_time(10)
    assert seen == []
    with pytest.raises(Crashed):
        disk.open("/file", create=True)


def test_a_process_that_dies_inside_a_call_runs_no_further_code(machines: Machines) -> None:
    disk = machines.disk()
    reached: list[str] = []

    async def main() -> None:
        file = disk.open("/file", create=True)
        try:
            file.pwrite(b"x", 0)
            reached.append("behind the write")
        finally:
            file.datasync()
            reached.append("finally")

    host = machines.hosts[0]
    host.on_crash_point = lambda host, point: host.kill() if point == "disk.written" else None
    machines.begin(main())
    machines.pass_time(1)
    assert reached == [] and not machines.process().is_alive
    assert machines.world.violation is None


def test_the_same_seed_gives_the_same_trace_and_another_seed_another_trace() -> None:
    def trace(seed: int) -> str:
        machines = Machines(seed)

        async def main() -> None:
            for _ in range(10):
                await asyncio.sleep(0.01)

        machines.run(main())
        machines.bury()
        return machines.world.trace_hash

    assert trace(1) == trace(1)
    assert trace(1) != trace(2)
