"""A wait that exceeds its deadline is notified once; a wait that ends in time costs nothing."""

import asyncio

from chronik.node.serving.deadlines import TICK_S, Deadlines


class Wait:
    def __init__(self) -> None:
        self.is_over = False
        self.passed = 0

    def deadline_passed(self) -> None:
        self.passed += 1
        self.is_over = True


async def eventually_passed(wait: Wait) -> None:
    async with asyncio.timeout(5):
        while not wait.passed:
            await asyncio.sleep(TICK_S / 5)


async def test_a_pending_wait_is_notified_when_its_deadline_passes() -> None:
    deadlines = Deadlines(asyncio.get_running_loop())
    short, long, ended = Wait(), Wait(), Wait()
    deadlines.add(60_000, long)
    deadlines.add(20, short)
    deadlines.add(20, ended)
    ended.is_over = True
    await eventually_passed(short)
    assert (short.passed, long.passed, ended.passed) == (1, 0, 0)
    deadlines.close()


async def test_deadlines_continue_after_an_idle_period() -> None:
    deadlines = Deadlines(asyncio.get_running_loop())
    for _ in range(3):
        wait = Wait()
        deadlines.add(0, wait)
        await eventually_passed(wait)
    deadlines.close()


async def test_a_deadline_never_fires_early() -> None:
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(loop)
    for timeout_ms in (0, 1, 49, 50, 51, 120):
        wait = Wait()
        started_s = loop.time()
        deadlines.add(timeout_ms, wait)
        await eventually_passed(wait)
        assert loop.time() - started_s >= timeout_ms / 1000
    deadlines.close()


async def test_completed_waits_are_removed() -> None:
    deadlines = Deadlines(asyncio.get_running_loop())
    for _ in range(1000):
        wait = Wait()
        deadlines.add(30_000, wait)
        wait.is_over = True
    assert len(deadlines) == 1
    deadlines.close()
