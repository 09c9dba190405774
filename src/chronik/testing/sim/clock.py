"""A machine's monotonic and wall clocks: both run slightly fast or slow, and start at any value."""

from __future__ import annotations

from dataclasses import dataclass

from chronik.testing.sim.world import World

EPOCH_MS = 1_750_000_000_000


@dataclass(slots=True)
class Clock:
    """Invariant: `monotonic_s` never goes backwards; `wall_ms` may jump."""

    world: World
    rate: float = 1.0
    offset_s: float = 0.0
    wall_offset_ms: int = 0

    def monotonic_s(self) -> float:
        return self.offset_s + self.world.now * self.rate

    def step_wall(self, step_ms: int) -> None:
        """Set the wall clock forward or back."""
        self.wall_offset_ms += step_ms

    def run_at(self, rate: float) -> None:
        """Change the rate of both clocks from now on; neither jumps."""
        gained_s = self.world.now * (self.rate - rate)
        self.offset_s += gained_s
        self.wall_offset_ms += round(gained_s * 1000)
        self.rate = rate

    def world_s(self, monotonic_s: float) -> float:
        """Return the world time at which this clock shows `monotonic_s`."""
        return (monotonic_s - self.offset_s) / self.rate

    def wall_ms(self) -> int:
        return EPOCH_MS + self.wall_offset_ms + int(self.world.now * self.rate * 1000)
