"""Samples the watermarks of the partitions that this node leads, at the interval of `observe.watermarks`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from chronik.node.replicas.partition import Partition
from chronik.observe.logging import Logger
from chronik.observe.watermarks import WatermarkMonitor, WatermarkPosition


class WatermarkWatch:
    """Owned by the loop. Call `start` once the logs are open, and `stop` before they are closed."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, partitions: Mapping[tuple[str, int], Partition], log: Logger
    ) -> None:
        self.monitor = WatermarkMonitor()
        self._loop = loop
        self._partitions = partitions
        self._log = log.bind(component="replication")
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = self._loop.call_later(self.monitor.interval_s, self._look)

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        positions = [
            WatermarkPosition(partition.topic, partition.index, partition.log_end_offset, partition.high_watermark)
            for partition in self._partitions.values()
            if partition.leader is not None and partition.log_end_offset > partition.high_watermark
        ]
        for lag in self.monitor.sample(positions, self._loop.time()):
            self._log.info("watermark_lag", **lag._replace(age_s=round(lag.age_s, 3))._asdict())
        self._timer = self._loop.call_later(self.monitor.interval_s, self._look)
