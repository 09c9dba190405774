"""One job of the service, in a thread of its own: a landed topic or a sink, which fails and recovers by itself.

A failed job is opened again from its checkpoint, after a pause that doubles up to a bound, for as long as the service
runs. So it resumes by itself when brokers return, a topic is created, a disk is freed or a schema is fixed. What a
repeated attempt reads again lands once. `waiting`: the cause may pass by itself. `failed`: an operator has to act.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Event, Lock, Thread
from typing import Protocol

import msgspec

from chronik.client.pipelines import AuditState, JobKind, JobState, PipelineJob
from chronik.observe.logging import Logger
from chronik.pipeline.errors import PipelineError, Unavailable, failure_of, reason_of
from chronik.pipeline.land.progress import Figures
from chronik.pipeline.land.retry import Retries
from chronik.pipeline.service.starts import Starts

POLL_S = 0.5
REASON_CHARACTERS_MAX = 500


class Work(Protocol):
    """A query that runs. Counts are since it was opened. `TopicLanding` is one."""

    rows: int
    dead_letters: int
    size_bytes: int
    last_commit_ms: int | None
    landed_ends: Mapping[int, int]

    @property
    def figures(self) -> Figures | None: ...
    @property
    def has_progressed(self) -> bool: ...
    def start(self) -> None: ...
    def wait(self, seconds: float) -> bool: ...
    def stop(self) -> None: ...
    def commit_last(self) -> None: ...


class Clocks(Protocol):
    """Both clocks of a job."""

    def wall_ms(self) -> int: ...
    def monotonic_s(self) -> float: ...


class Job:
    """Runs until `stop`. The state may be read in any thread."""

    def __init__(
        self,
        name: str,
        kind: JobKind,
        source: str,
        target: str,
        open_work: Callable[[], Work],
        retries: Retries,
        starts: Starts,
        clocks: Clocks,
        log: Logger,
    ) -> None:
        self.source = source
        self.target = target
        self._open = open_work
        self._retries = retries
        self._starts = starts
        self._clocks = clocks
        self._log = log.bind(job=name)
        self._lock = Lock()
        self._state = PipelineJob(name, kind, source, target, "starting", clocks.wall_ms())
        self._before = self._state
        """The counts of all earlier attempts."""
        self._ends: Mapping[int, int] = {}
        self._logged = ""
        self._stopping = Event()
        self._thread = Thread(target=self._run, name=f"chronik-{name}", daemon=True)

    @property
    def name(self) -> str:
        return self._state.name

    @property
    def state(self) -> PipelineJob:
        with self._lock:
            return self._state

    @property
    def landed_ends(self) -> Mapping[int, int]:
        """Below these offsets, everything has landed. Empty until the first micro-batch of a run has ended."""
        with self._lock:
            return self._ends

    def set_audit(self, audit: AuditState) -> None:
        self._change(audit=audit)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Abandon the current micro-batch. Returns at once: call `join`."""
        self._stopping.set()

    def join(self, seconds: float) -> bool:
        """Return whether the job has ended."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            failure = self._attempt()
            if failure is None:
                break
            self._pause(failure)
        self._enter("stopped", "")

    def _attempt(self) -> PipelineError | None:
        """Run until the job fails, and return the failure, or None if it was stopped."""
        work: Work | None = None
        try:
            while not self._starts.may_begin(self.name, self._clocks.monotonic_s()):
                if self._stopping.wait(POLL_S):
                    return None
            work = self._open()
            work.start()
            while not self._stopping.is_set():
                has_ended = work.wait(POLL_S)
                self._observe(work)
                if work.has_progressed:
                    self._starts.end(self.name)
                if has_ended:
                    return Unavailable(f"{self.name} ended by itself")
        except Exception as error:
            if self._stopping.is_set():
                return None
            failure = failure_of(error)
            if failure is None:
                self._log.exception("job_error")
                return Unavailable(f"{self.name}: {reason_of(error)}")
            return failure
        finally:
            if work is not None:
                self._close(work)
            self._starts.end(self.name)
        return None

    def _close(self, work: Work) -> None:
        try:
            work.stop()
            work.commit_last()
            self._observe(work)
        except Exception as error:  # Spark itself may be gone
            self._log.warning("job_not_closed", reason=reason_of(error)[:REASON_CHARACTERS_MAX])
        with self._lock:
            self._before = self._state

    def _observe(self, work: Work) -> None:
        figures, before = work.figures, self._before
        if work.has_progressed and self._state.state != "running" and not self._stopping.is_set():
            failed_s = self._retries.succeeded(self._clocks.monotonic_s())
            self._logged = ""
            self._enter("running", "")
            self._log.info("job_running", **({} if failed_s is None else {"after_s": round(failed_s, 1)}))
        self._change(
            rows=before.rows + work.rows,
            dead_letters=before.dead_letters + work.dead_letters,
            bytes=before.bytes + work.size_bytes,
            last_commit_ms=work.last_commit_ms or before.last_commit_ms,
            lag=None if figures is None else sum(figures.lag.values()),
            rows_per_s=None if figures is None else figures.rows_per_s,
            batch_s=before.batch_s if figures is None or figures.batch_s is None else figures.batch_s,
        )
        with self._lock:
            self._ends = work.landed_ends or self._ends

    def _pause(self, failure: PipelineError) -> None:
        state: JobState = "waiting" if isinstance(failure, Unavailable) else "failed"
        now_s = self._clocks.monotonic_s()
        next_s = self._retries.failed(now_s)
        pause_s = 0.0 if next_s is None else next_s - now_s
        reason = str(failure)[:REASON_CHARACTERS_MAX]
        self._enter(state, reason)
        self._change(restarts=self._state.restarts + 1)
        if reason != self._logged:
            self._logged = reason
            log = self._log.warning if state == "waiting" else self._log.error
            log(f"job_{state}", reason=reason, retry_s=round(pause_s, 1))
        self._stopping.wait(pause_s)

    def _enter(self, state: JobState, reason: str) -> None:
        if state != self._state.state:
            self._change(since_ms=self._clocks.wall_ms())
        self._change(state=state, reason=reason)

    def _change(self, **fields: object) -> None:
        with self._lock:
            self._state = msgspec.structs.replace(self._state, **fields)
