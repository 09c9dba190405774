"""Jobs start one after another."""

from __future__ import annotations

from threading import Event, Lock

from tests.pipeline.test_service_job import WAIT_S_MAX, FakeWork, TestClocks
from tests.support.eventually import eventually

from chronik.observe.logging import silent_logger
from chronik.pipeline.errors import Unavailable
from chronik.pipeline.land.retry import Retries
from chronik.pipeline.service.job import Job, Work
from chronik.pipeline.service.starts import Starts


def test_jobs_start_in_the_order_in_which_they_came() -> None:
    starts = Starts(1)
    assert starts.may_begin("a", 0)
    assert not starts.may_begin("b", 1) and not starts.may_begin("c", 1)
    starts.end("a")
    assert not starts.may_begin("c", 2) and starts.may_begin("b", 2)
    starts.end("b")
    assert not starts.may_begin("a", 3), "a job that failed is behind those that have not started yet"
    assert starts.may_begin("c", 3)


def test_a_start_that_takes_too_long_does_not_hold_up_others() -> None:
    starts = Starts(1, longest_s=60)
    assert starts.may_begin("a", 0) and not starts.may_begin("b", 59.9) and starts.may_begin("b", 60)


def test_a_job_that_stops_waiting_leaves_the_queue() -> None:
    starts = Starts(1)
    assert starts.may_begin("a", 0) and not starts.may_begin("b", 0) and not starts.may_begin("c", 0)
    starts.end("b")
    starts.end("a")
    assert starts.may_begin("c", 1)


def test_larger_machines_start_several_at_once() -> None:
    starts = Starts(2)
    assert [starts.may_begin(name, 0) for name in "abc"] == [True, True, False]
    starts.end("b")
    assert starts.may_begin("c", 0)


class Machine:
    """It completes one start at a time: with a second one, both fail."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.starting = self.failed = 0

    def begin(self) -> bool:
        with self.lock:
            self.starting += 1
            return self.starting == 1

    def end(self) -> None:
        with self.lock:
            self.starting -= 1


class StarvedWork(FakeWork):
    """A start that takes some waits."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self._waits = 0
        self._has_room = True

    def start(self) -> None:
        self._has_room = self._machine.begin()

    def wait(self, seconds: float) -> bool:
        self._waits += 1
        if self._waits == 3:
            self.has_progressed = True
            self._machine.end()
        if not self._has_room:
            self._machine.failed += 1
            raise Unavailable("Python worker failed to connect back")
        return Event().wait(0.001)


def test_six_jobs_on_a_starved_machine_start_without_a_failure() -> None:
    machine, starts = Machine(), Starts(1)

    def opened() -> Work:
        return StarvedWork(machine)

    jobs = [
        Job(f"t{number}", "landing", "t", "t", opened, Retries(float("inf")), starts, TestClocks(), silent_logger())
        for number in range(6)
    ]
    for job in jobs:
        job.start()
    eventually(lambda: all(job.state.state == "running" for job in jobs), WAIT_S_MAX)
    for job in jobs:
        job.stop()
    assert all(job.join(WAIT_S_MAX) for job in jobs)
    assert machine.failed == 0
