"""A job of the service fails and recovers by itself, and its counts survive that."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from threading import Event
from typing import Any

import pytest
from tests.support.eventually import eventually

from chronik.client.pipelines import PipelineJob, PipelineState
from chronik.observe.logging import make_logger, silent_logger
from chronik.observe.metrics import render
from chronik.pipeline.errors import PipelineError, Unavailable
from chronik.pipeline.land.progress import Figures
from chronik.pipeline.land.retry import Retries
from chronik.pipeline.service.job import Job, Work
from chronik.pipeline.service.metrics import families
from chronik.pipeline.service.publisher import Publisher
from chronik.pipeline.service.service import Service
from chronik.pipeline.service.starts import Starts

WAIT_S_MAX = 20.0


class TestClocks:
    __test__ = False

    def wall_ms(self) -> int:
        return 1000

    def monotonic_s(self) -> float:
        return 0.0


class FakeWork:
    """Lands 5 rows, and then fails or runs on."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.rows = self.dead_letters = self.size_bytes = 0
        self.last_commit_ms: int | None = None
        self.landed_ends: Mapping[int, int] = {0: 5}
        self.figures: Figures | None = None
        self.has_progressed = False
        self.calls: list[str] = []
        self._failure = failure

    def start(self) -> None:
        self.calls.append("start")

    def wait(self, seconds: float) -> bool:
        if self.has_progressed:
            if self._failure is not None:
                raise self._failure
            Event().wait(0.01)
            return False
        self.rows, self.dead_letters, self.size_bytes, self.last_commit_ms = 5, 1, 100, 1000
        self.figures, self.has_progressed = Figures(2.5, {0: 3, 1: 4}, None, 0.5), True
        return False

    def stop(self) -> None:
        self.calls.append("stop")

    def commit_last(self) -> None:
        self.calls.append("commit_last")


def job_of(attempts: list[Any], lines: list[dict[str, Any]] | None = None, longest_s: float = 0.01) -> Job:
    opened = iter(attempts)

    def open_work() -> Work:
        attempt = next(opened)
        if isinstance(attempt, Exception):
            raise attempt
        return attempt  # type: ignore[no-any-return]

    retries = Retries(float("inf"), longest_s)
    retries._pause_s = min(1.0, longest_s)
    log = silent_logger() if lines is None else make_logger(lambda line: lines.append(json.loads(line)), lambda: 0)
    return Job("orders", "landing", "orders", "t/orders", open_work, retries, Starts(1), TestClocks(), log)


@pytest.fixture
def started() -> Iterator[Callable[[Job], Job]]:
    jobs: list[Job] = []

    def start(job: Job) -> Job:
        jobs.append(job)
        job.start()
        return job

    yield start
    for job in jobs:
        job.stop()
        assert job.join(WAIT_S_MAX)


def test_a_failed_job_is_opened_again_until_it_runs(started: Callable[[Job], Job]) -> None:
    last, lines = FakeWork(), list[dict[str, Any]]()
    broken = FakeWork(Unavailable("brokers are down"))
    attempts = [PipelineError("no topic"), PipelineError("no topic"), broken, ValueError("a bug"), last]
    job = started(job_of(attempts, lines))
    eventually(lambda: last.has_progressed and job.state.state == "running", WAIT_S_MAX)
    # The counts of both attempts.
    eventually(lambda: (job.state.rows, job.state.bytes, job.state.dead_letters) == (10, 200, 2), WAIT_S_MAX)
    assert (job.state.lag, job.state.batch_s, job.state.restarts, job.state.reason) == (7, 0.5, 4, "")
    assert broken.calls == ["start", "stop", "commit_last"]
    events = [(line["event"], line.get("reason", "")) for line in lines]
    # A repeated reason is logged once.
    assert events == [
        ("job_failed", "no topic"), ("job_running", ""), ("job_waiting", "brokers are down"),
        ("job_error", ""), ("job_waiting", "orders: a bug"), ("job_running", ""),
    ]  # fmt: skip


def test_a_stopped_job_closes_its_query_and_ends() -> None:
    work = FakeWork()
    job = job_of([work])
    job.start()
    eventually(lambda: job.state.state == "running", WAIT_S_MAX)
    assert job.landed_ends == {0: 5}
    job.stop()
    assert job.join(WAIT_S_MAX) and job.state.state == "stopped"
    assert work.calls == ["start", "stop", "commit_last"]


def test_a_stopped_job_does_not_wait_for_its_pause(started: Callable[[Job], Job]) -> None:
    job = started(job_of([PipelineError("no topic")], longest_s=3600))
    eventually(lambda: job.state.state == "failed", WAIT_S_MAX)
    job.stop()
    assert job.join(WAIT_S_MAX)


def test_each_metric_exists_before_a_job_has_landed_anything() -> None:
    job = PipelineJob("orders", "landing", "orders", "t", "starting", 0)
    text = render(list(families([job]))).decode()
    labels = '{job="orders",kind="landing",source="orders",target="t"}'
    for name in ("rows_total", "bytes_total", "lag", "batch_seconds", "dead_letters_total", "restarts_total"):
        assert f"chronik_pipeline_{name}{labels} 0.0" in text
    assert f"chronik_pipeline_last_commit_timestamp_seconds{labels} 0.0" in text
    assert 'state="starting",target="t"} 1.0' in text
    assert "# TYPE chronik_pipeline_audit_complete gauge" in text


def identity() -> PipelineState:
    return PipelineState("p", "i", "h", 1, "v", "running", 0, 0)


def test_a_service_is_ready_while_all_its_jobs_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Publisher, "start", lambda _: None)
    service = Service(identity(), "127.0.0.1:1", "", TestClocks(), silent_logger())
    assert service._readyz().status == 503
    gate, stopping = Event(), Event()

    def gated() -> Work:
        if not gate.is_set():
            raise PipelineError("no topic")
        return FakeWork()

    jobs = [
        Job("a", "landing", "a", "t/a", gated, Retries(float("inf"), 0.01), Starts(1), TestClocks(), silent_logger()),
        job_of([FakeWork()]),
    ]
    seen: list[tuple[int, bytes]] = []

    def is_alive() -> bool:
        body, status, _ = service._readyz()
        seen.append((status, body))
        if status == 503 and jobs[0].state.state == "failed" and jobs[1].state.state == "running":
            gate.set()
        if status == 200:
            stopping.set()
        return True

    service.run(jobs, [], is_alive, stopping)
    assert (503, b"a is failed: no topic\n") in seen and seen[-1] == (200, b"ready\n")
    assert service.state().state == "stopped"
    assert [job.state for job in service.state().jobs] == ["stopped", "stopped"]
    assert service._healthz().status == 200


def test_a_service_ends_with_an_error_if_spark_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Publisher, "start", lambda _: None)
    service = Service(identity(), "127.0.0.1:1", "", TestClocks(), silent_logger())
    job = job_of([FakeWork()])
    with pytest.raises(PipelineError, match="Spark's JVM has ended"):
        service.run([job], [], lambda: False, Event())
    assert job.state.state == "stopped"
    assert service._readyz().status == 503


def test_a_service_is_alive_after_a_slow_start_of_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Publisher, "start", lambda _: None)
    clocks, now_s = TestClocks(), [0.0]
    monkeypatch.setattr(clocks, "monotonic_s", lambda: now_s[0])
    service = Service(identity(), "127.0.0.1:1", "", clocks, silent_logger())
    now_s[0] = 100.0
    first_turn: list[int] = []
    job = job_of([FakeWork()])

    class Turns(Event):
        def wait(self, timeout: float | None = None) -> bool:
            first_turn.append(service._healthz().status)
            return True

    service.run([job], [], lambda: True, Turns())
    assert first_turn[0] == 200
