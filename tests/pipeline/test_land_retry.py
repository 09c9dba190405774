"""When a failing landing tries again, and when it stops."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chronik.cli.pipeline import _watch
from chronik.pipeline.errors import PipelineError, Unavailable, failure_of, reason_of
from chronik.pipeline.land.retry import LONGEST_S, Retries
from chronik.pipeline.land.topic_landing import TopicLanding, _one_line


def test_pauses_double_up_to_a_bound_and_end_after_the_given_time() -> None:
    retries, now_s, pauses = Retries(100), 1000.0, list[float]()
    while (at_s := retries.failed(now_s)) is not None:
        pauses.append(at_s - now_s)
        now_s = at_s
    assert pauses == [1, 2, 4, 8, 16, LONGEST_S, LONGEST_S, 9]
    assert now_s == 1100
    assert Retries(0).failed(5) is None


def test_a_finished_micro_batch_resets_the_time_and_the_pauses() -> None:
    retries = Retries(10)
    assert retries.succeeded(0) is None
    assert retries.failed(0) == 1 and retries.failed(1) == 3
    assert retries.is_failing and retries.succeeded(9) == 9
    assert not retries.is_failing and retries.failed(100) == 101


def test_jobs_that_fail_together_try_again_at_different_times() -> None:
    early, late = Retries(100, chance=lambda: 1.0), Retries(100, chance=lambda: 0.0)
    assert [early.failed(0), late.failed(0)] == [0.5, 1]
    assert [early.failed(0), late.failed(0)] == [1, 2]


def test_an_error_keeps_its_kind_on_its_way_through_spark() -> None:
    text = (
        "Job aborted: Traceback (most recent call last):\n  File x\nchronik.pipeline.errors.{}: no answer; start it\n"
    )
    for kind in (PipelineError, Unavailable):
        failure = failure_of(RuntimeError(text.format(kind.__name__)))
        assert type(failure) is kind and str(failure) == "no answer; start it"
    assert failure_of(RuntimeError("something else")) is None


def test_the_reason_of_an_error_is_never_a_line_that_says_nothing() -> None:
    spark = (
        "An error occurred while calling o95.collectToPython.\n: org.apache.spark.SparkException: Job aborted\n"
        "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n"
        '  File "task.py", line 1, in f\nOverflowError: date value out of range\n\n\tat org.apache.spark.X\n'
    )
    assert reason_of(RuntimeError(spark)) == "OverflowError: date value out of range"
    no_trace = "An error occurred while calling o95.collectToPython.\n: org.apache.spark.SparkException: Job aborted"
    assert reason_of(RuntimeError(no_trace)) == ": org.apache.spark.SparkException: Job aborted"
    assert reason_of(RuntimeError()) == "RuntimeError"


def test_a_fault_of_spark_or_of_a_store_is_tried_again_and_a_refusal_is_not() -> None:
    def kind(text: str) -> type[Exception]:
        return type(_one_line("t", RuntimeError(f"Traceback (most recent call last):\nOSError: Kernel error\n {text}")))

    assert kind("Server returned non-2xx status code\n 403 Forbidden") is PipelineError
    assert kind("Server returned non-2xx status code: 404 Not Found: <Error><Code>NoSuchBucket") is PipelineError
    assert kind("Server returned non-2xx status code: 503 Slow Down") is Unavailable
    assert kind("Python worker exited unexpectedly (crashed)") is Unavailable


def test_a_source_that_cannot_be_opened_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark opens it in a Python worker, which may be the one that was killed."""

    def read(_: object) -> None:
        raise RuntimeError("An error occurred while calling o143.load.\n: Python worker exited unexpectedly")

    monkeypatch.setattr(TopicLanding, "_read", read)
    landing = TopicLanding.__new__(TopicLanding)
    landing.topic, landing._settings = "t", cast("Any", SimpleNamespace(token="token"))
    with pytest.raises(Unavailable, match="landing t stopped: : Python worker exited unexpectedly"):
        landing.start()


class FakeLanding:
    """Ends, or fails, after some waits."""

    topic = "t"
    figures = None

    def __init__(self, outcomes: Iterator[bool | PipelineError]) -> None:
        self.outcomes = outcomes

    def wait(self, seconds: float) -> bool:
        outcome = next(self.outcomes)
        if isinstance(outcome, PipelineError):
            raise outcome
        return outcome


def test_a_topic_that_fails_does_not_stop_the_other_topics(capsys: pytest.CaptureFixture[str]) -> None:
    bad = FakeLanding(iter([False, PipelineError("no room")]))
    good = FakeLanding(iter([False, False, False, True]))
    with pytest.raises(PipelineError, match=r"no room \(1 of 2 topics have failed\)"):
        _watch(cast("Any", [bad, good]))
    assert list(good.outcomes) == []
    assert capsys.readouterr().err.count("t is not landed any more, other topics are: no room") == 1
