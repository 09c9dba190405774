"""The oracle for a sick device: one node whose disk fails or hangs does not stop acknowledgements by other nodes."""

from __future__ import annotations

from chronik.testing.sim.history import History
from chronik.testing.sim.world import World

LOOK_S = 0.5
SILENCE_S_MAX = 12.0
"""Above the promised 10 s for partitions that the sick node led: simulated clients look for a leader less often."""


class Availability:
    """From `begin` to `end`, checks that each partition of the topic keeps acknowledging acks=all batches."""

    def __init__(self, world: World, history: History, topic: str) -> None:
        self._world = world
        self._history = history
        self._topic = topic
        self._since_s: float | None = None
        self._why = ""

    def begin(self, why: str) -> None:
        self._since_s = self._world.now
        self._why = why
        self._look()

    def end(self) -> None:
        self._since_s = None

    def _look(self) -> None:
        if self._since_s is None:
            return
        for partition in self._history.partitions_of(self._topic):
            silent_s = self._world.now - max(self._since_s, partition.acknowledged_s)
            if silent_s > SILENCE_S_MAX:
                self._world.violated(f"{partition.name}: nothing was acknowledged for {silent_s:.1f} s: {self._why}")
        self._world.after(LOOK_S, self._look)
