"""The loop waits a moment for a write of the commit log, and never longer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from tests.support.eventually import until

from chronik.node.commit_log_thread import CommitLogThread

NAME = "test-commit-log"


@pytest.fixture
async def thread() -> AsyncIterator[CommitLogThread]:
    thread = CommitLogThread(asyncio.get_running_loop(), NAME)
    yield thread
    thread.close()
    await until(lambda: NAME not in {each.name for each in threading.enumerate()})


async def test_a_short_call_is_done_when_run_returns(thread: CommitLogThread) -> None:
    def is_done_at_once() -> bool:
        return thread.waits and thread.run(threading.get_ident).done()

    # On a busy machine many calls take longer than the loop waits.
    await until(is_done_at_once)
    assert await thread.run(threading.get_ident) != threading.get_ident()


async def test_the_loop_continues_while_a_call_hangs_and_gets_its_outcome_later(thread: CommitLogThread) -> None:
    disk_answers = threading.Event()
    hung = thread.run(disk_answers.wait)
    queued = thread.run(lambda: "after it")
    assert not hung.done() and not queued.done()
    assert not thread.waits, "the next calls do not wait"
    await asyncio.sleep(0)
    assert not hung.done()
    disk_answers.set()
    assert await hung is True
    assert await queued == "after it"
    await until(lambda: thread.waits)


async def test_an_error_of_a_call_is_its_outcome_and_the_next_call_runs(thread: CommitLogThread) -> None:
    def fail() -> None:
        raise OSError("the disk failed")

    with pytest.raises(OSError, match="the disk failed"):
        await thread.run(fail)
    assert await thread.run(lambda: 1) == 1


async def test_an_outcome_that_nobody_waits_for_any_more_is_dropped(thread: CommitLogThread) -> None:
    disk_answers = threading.Event()
    cancelled = thread.run(disk_answers.wait)
    cancelled.cancel()
    disk_answers.set()
    assert await thread.run(lambda: 1) == 1


def test_a_disk_that_answers_after_the_loop_was_closed_ends_the_thread_quietly() -> None:
    disk_answers = threading.Event()

    async def node() -> None:
        thread = CommitLogThread(asyncio.get_running_loop(), NAME)
        thread.run(disk_answers.wait)
        thread.close()

    asyncio.run(node())
    (late,) = [each for each in threading.enumerate() if each.name == NAME]
    disk_answers.set()
    late.join(10)
    assert not late.is_alive()
