"""The disk watch: a write that hangs is late; writes that queue in one thread are not, if each ends in time."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.eventually import until

from chronik.node.disk_watch import CHECKS, DiskWatch
from chronik.observe.logging import silent_logger

TIMEOUT_MS = 200


class Scene:
    def __init__(self) -> None:
        self.watch = DiskWatch(asyncio.get_running_loop(), TIMEOUT_MS, silent_logger())
        self.changes: list[bool] = []
        self.watch.subscribe(lambda: self.changes.append(self.watch.is_stuck))
        self.late: list[str] = []


async def test_a_hung_write_marks_the_disk_stuck_until_it_ends() -> None:
    scene = Scene()
    hung = scene.watch.begin(lambda: scene.late.append("hung"))
    scene.watch.begin(lambda: scene.late.append("quick")).end()
    await until(lambda: scene.watch.is_stuck)
    assert scene.late == ["hung"]
    hung.end()
    hung.end()
    assert not scene.watch.is_stuck
    assert scene.changes == [True, False]


async def test_the_disk_is_stuck_until_the_last_late_write_ends() -> None:
    scene = Scene()
    first, second = (scene.watch.begin(lambda: None) for _ in range(2))
    await until(lambda: first.is_late and second.is_late)
    first.end()
    assert scene.watch.is_stuck
    second.end()
    assert scene.changes == [True, False]


async def test_many_writes_in_one_thread_are_not_late_while_each_one_ends() -> None:
    scene = Scene()
    many = scene.watch.begin(lambda: scene.late.append("many"))
    for _ in range(4):
        await asyncio.sleep(TIMEOUT_MS / 2000)
        many.advance()
    assert not scene.late
    await until(lambda: scene.late == ["many"])
    many.end()


async def test_a_late_background_write_does_not_mark_the_disk_stuck() -> None:
    scene = Scene()
    write = scene.watch.begin(lambda: scene.late.append("background"), is_vital=False)
    await until(lambda: scene.late)
    assert not scene.watch.is_stuck
    write.end()
    assert scene.changes == []


async def test_time_when_the_loop_was_stopped_does_not_make_a_write_late() -> None:
    scene = Scene()
    write = scene.watch.begin(lambda: scene.late.append("held up"))
    for _ in range(CHECKS // 2):
        # As in a process that was stopped and continued, all timers are due at once.
        scene.watch._check()
    assert not scene.late
    write.end()


async def test_a_job_wait_ends_at_the_disk_timeout_or_at_once_on_a_stuck_disk() -> None:
    scene = Scene()
    loop = asyncio.get_running_loop()
    done: asyncio.Future[int] = loop.create_future()
    loop.call_later(TIMEOUT_MS / 4000, done.set_result, 7)
    assert await scene.watch.wait(done) == 7
    never: asyncio.Future[int] = loop.create_future()
    with pytest.raises(TimeoutError, match="does not answer"):
        await scene.watch.wait(never)
    hung = scene.watch.begin(lambda: None)
    await until(lambda: scene.watch.is_stuck)
    assert scene.watch.patience_s == 0
    with pytest.raises(TimeoutError, match="does not answer"):
        await scene.watch.wait(never)
    hung.end()
    failed: asyncio.Future[int] = loop.create_future()
    failed.set_exception(OSError(5, "device"))
    with pytest.raises(OSError, match="device"):
        await scene.watch.wait(failed)
