"""The service: all jobs of one file, their audits, their state over HTTP and in the cluster, until it is stopped.

It ends by itself only if Spark does. Then the process has to start again, which its supervisor does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event
from typing import Protocol

import msgspec

from chronik.client.endpoint import Endpoint
from chronik.client.pipelines import PipelineState, ServiceState
from chronik.client.properties import Target
from chronik.observe.logging import Logger
from chronik.observe.metrics import render
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.service.http import METRICS, Answer, HealthServer
from chronik.pipeline.service.job import Clocks, Job
from chronik.pipeline.service.metrics import families
from chronik.pipeline.service.publisher import Publisher

TICK_S = 1.0
ALIVE_S_MAX = 60.0
"""The service is not alive if its own loop has not run for this long."""
STOP_S_MAX = 20.0


class Background(Protocol):
    """What else runs in a thread of its own, such as the audits."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


class Service:
    """Call `run` in the main thread."""

    def __init__(
        self,
        identity: PipelineState,
        target: Target,
        listen: str,
        clocks: Clocks,
        log: Logger,
    ) -> None:
        """`identity`: the state of a service without jobs. Raises PipelineError if the address is in use."""
        self._identity = identity
        self._target = target
        self._clocks = clocks
        self._log = log
        self._jobs: Sequence[Job] = ()
        self._state: ServiceState = "running"
        self._ticked_s = clocks.monotonic_s()
        self._is_spark_ready = False
        routes = {
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/metrics": self._metrics,
            "/status": self._status,
        }
        self._http = HealthServer(Endpoint.parse(listen), routes) if listen else None
        self.port = None if self._http is None else self._http.port

    def close(self) -> None:
        if self._http is not None:
            self._http.close()

    def run(
        self,
        jobs: Sequence[Job],
        background: Sequence[Background],
        is_spark_alive: Callable[[], bool],
        stopping: Event,
    ) -> None:
        """Run until `stopping` is set. Raises PipelineError if Spark ends."""
        # The start of Spark may have taken long: only from now on is a silent loop a fault.
        self._ticked_s = self._clocks.monotonic_s()
        self._jobs = jobs
        self._is_spark_ready = True
        publisher = Publisher(self._target, self.state, self._log)
        for each in (*jobs, *background, publisher):
            each.start()
        try:
            while not stopping.wait(TICK_S):
                self._ticked_s = self._clocks.monotonic_s()
                if not is_spark_alive():
                    self._is_spark_ready = False
                    raise PipelineError("Spark's JVM has ended: start the pipeline again, nothing is lost")
        finally:
            self._log.info("pipeline_stopping")
            for each in (*background, *jobs):
                each.stop()
            until_s = self._clocks.monotonic_s() + STOP_S_MAX
            late = [job.name for job in jobs if not job.join(max(0.0, until_s - self._clocks.monotonic_s()))]
            if late:
                self._log.warning("jobs_abandoned", jobs=late, then="their last micro-batch is read again")
            self._state = "stopped"
            publisher.stop()

    def state(self) -> PipelineState:
        return msgspec.structs.replace(
            self._identity,
            state=self._state,
            heartbeat_ms=self._clocks.wall_ms(),
            jobs=[job.state for job in self._jobs],
        )

    def _healthz(self) -> Answer:
        silent_s = self._clocks.monotonic_s() - self._ticked_s
        if self._jobs and silent_s > ALIVE_S_MAX:
            return Answer(f"not alive: the main loop has not run for {silent_s:.0f} s\n".encode(), 503)
        return Answer(b"alive\n")

    def _readyz(self) -> Answer:
        if not self._is_spark_ready:
            return Answer(b"not ready: Spark is not running\n", 503)
        waiting = [job.state for job in self._jobs if job.state.state != "running"]
        lines = [f"{job.name} is {job.state}{f': {job.reason}' if job.reason else ''}\n" for job in waiting]
        return Answer("".join(lines).encode(), 503) if lines else Answer(b"ready\n")

    def _metrics(self) -> Answer:
        return Answer(render(list(families([job.state for job in self._jobs]))), content_type=METRICS)

    def _status(self) -> Answer:
        return Answer(msgspec.json.encode(self.state()), content_type="application/json")
