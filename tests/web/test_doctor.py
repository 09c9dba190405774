"""/api/doctor of a real cluster; the tests of the doctor itself are in tests/doctor."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.web.support_http import batch_of, get, put

from chronik.testing.cluster import TestCluster
from chronik.web.doctor import in_own_thread


def test_the_doctor_reports_a_healthy_topic_and_examines_one_topic_at_a_time(chronik_cluster: TestCluster) -> None:
    topic = chronik_cluster.topic(partitions=2)
    put(chronik_cluster.bootstrap, topic, 0, batch_of([b"x"] * 3))
    address = chronik_cluster.nodes[0].http

    def ask(_: int) -> tuple[int, Any]:
        return get(address, f"/api/doctor/{topic}?seconds=1")

    with ThreadPoolExecutor(2) as threads:
        answers = dict(threads.map(ask, range(2)))
    assert answers.keys() == {200, 503}
    assert (answers[200]["verdict"], answers[200]["topic"]) == ("healthy", topic)
    assert answers[200]["summary"]
    assert len(answers[200]["partitions"]) == 2
    assert f"the doctor is examining {topic}" in answers[503]["error"]


def test_an_unknown_group_is_an_error(chronik_cluster: TestCluster) -> None:
    topic = chronik_cluster.topic(partitions=1)
    status, body = get(chronik_cluster.nodes[0].http, f"/api/doctor/{topic}?group=nobody&seconds=1")
    assert status == 404
    assert "group nobody does not exist" in body["error"]


async def test_work_in_its_own_thread_returns_raises_and_ends_with_its_caller() -> None:
    async def result() -> int:
        await asyncio.sleep(0)
        return 7

    async def failure() -> int:
        raise ValueError("no")

    ended = asyncio.Event()
    here = asyncio.get_running_loop()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            here.call_soon_threadsafe(ended.set)

    assert await in_own_thread(result) == 7
    with pytest.raises(ValueError, match="no"):
        await in_own_thread(failure)
    waiting = asyncio.create_task(in_own_thread(endless))
    await asyncio.sleep(0.05)
    waiting.cancel()
    async with asyncio.timeout(10):
        await ended.wait()
    assert waiting.cancelled() or waiting.cancelling()
