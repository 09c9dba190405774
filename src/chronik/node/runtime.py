"""What every part of a node uses: its loop, its environment, its settings, and its logs, metrics and traces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from chronik.node.config import NodeConfig
from chronik.node.environment import Environment
from chronik.observe.logging import Logger
from chronik.observe.metrics import Metrics
from chronik.observe.traces import TraceRing

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Runtime:
    """Created once for each run of a node, and passed to its services."""

    loop: asyncio.AbstractEventLoop
    env: Environment
    config: NodeConfig
    metrics: Metrics
    traces: TraceRing
    log: Logger

    @classmethod
    def make(cls, config: NodeConfig, env: Environment, metrics: Metrics, log: Logger) -> Runtime:
        traces = TraceRing(config.node_id, config.trace_ring_events, env.wall_ms, metrics)
        return cls(asyncio.get_running_loop(), env, config, metrics, traces, log)

    @property
    def node_id(self) -> int:
        return self.config.node_id

    async def run_blocking(self, call: Callable[[], T]) -> T:
        return await self.loop.run_in_executor(self.env.executor, call)
