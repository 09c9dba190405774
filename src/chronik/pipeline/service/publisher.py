"""Writes the service's state to the topic `__chronik_pipelines`, in a thread of its own. Its failures stop nothing."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread

from chronik.client.pipelines import HEARTBEAT_S, PipelineState, create_topic, read_states, write_state
from chronik.client.properties import Target
from chronik.observe.logging import Logger
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.source.blocking import BlockingCluster

LAST_S_MAX = 5.0
POLL_S = 1.0


class Publisher:
    """Publishes every few seconds, and when a job changes its state, until `stop`, which publishes once more."""

    def __init__(self, target: Target, state: Callable[[], PipelineState], log: Logger) -> None:
        self._target = target
        self._state = state
        self._log = log
        self._stopping = Event()
        self._is_failing = False
        self._thread = Thread(target=self._run, name="chronik-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Publish the last state, if the brokers answer in time."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(LAST_S_MAX)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopping.is_set()
            state = self._state()
            self._publish(state)
            for _ in range(round(HEARTBEAT_S / POLL_S)):
                if is_last or self._stopping.wait(POLL_S) or _summary(self._state()) != _summary(state):
                    break

    def _publish(self, state: PipelineState) -> None:
        try:
            with BlockingCluster(self._target) as cluster:
                cluster.run(create_topic(cluster.cluster))
                cluster.run(write_state(cluster.cluster, state))
        except PipelineError as error:
            if not self._is_failing:
                self._is_failing = True
                self._log.warning("state_not_published", reason=str(error), then="/status still has it")
            return
        self._is_failing = False


def _summary(state: PipelineState) -> list[tuple[str, str | None]]:
    """Return what is published at once if it changes."""
    return [(job.state, None if job.audit is None else job.audit.verdict) for job in state.jobs]


def other_service(target: Target, name: str, now_ms: int) -> PipelineState | None:
    """Return the state of a running service with this name, if the cluster knows one. Raises PipelineError."""
    with BlockingCluster(target) as cluster:
        states = cluster.run(read_states(cluster.cluster, now_ms))
    return next((state for state in states if state.name == name and state.state == "running"), None)
