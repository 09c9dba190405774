"""The oracle for groups: tracks partition owners by coordinators' responses. Two owners at once are a violation.

- Once a SyncGroup of generation g has succeeded, no heartbeat, commit or SyncGroup of an older generation that is sent
  later may succeed. Generations only grow, and a generation that a SyncGroup returned is in the log.
- A member owns its assignment until a request fails or its session ends. The session starts when the member sends the
  last SyncGroup or heartbeat that succeeds. No other member may be assigned one of its partitions before that.
"""

from __future__ import annotations

from dataclasses import dataclass

from chronik.testing.sim.world import World

SESSION_SHARE = 0.9
"""The share of a session left in the worst case: coordinator's clock as fast, member's as slow as allowed."""


@dataclass(slots=True)
class Belief:
    """The partitions that a member considers its own, and until when."""

    generation: int
    partitions: tuple[int, ...]
    until_s: float


class GroupOwnership:
    """One group. Members report their requests and the responses, in the order in which they happen."""

    def __init__(self, world: World, group: str) -> None:
        self._world = world
        self._group = group
        self._formed_s: dict[int, float] = {}
        """By generation: when a member first received it."""
        self._beliefs: dict[str, Belief] = {}

    def synced(self, member: str, generation: int, partitions: list[int], sent_s: float, session_s: float) -> None:
        self.answered(member, generation, sent_s, "SyncGroup")
        self._formed_s.setdefault(generation, self._world.now)
        mine = Belief(generation, tuple(partitions), sent_s + session_s * SESSION_SHARE)
        for other, belief in self._beliefs.items():
            both = [partition for partition in belief.partitions if partition in mine.partitions]
            left_s = belief.until_s - self._world.now
            if other != member and both and belief.generation != generation and left_s > 0:
                self._world.violated(
                    f"group {self._group}: {member} was given partitions {both} in generation {generation}, and "
                    f"{other} has them by generation {belief.generation} for {left_s:.3f} s yet"
                )
        self._beliefs[member] = mine

    def heartbeat_succeeded(self, member: str, generation: int, sent_s: float, session_s: float) -> None:
        self.answered(member, generation, sent_s, "a heartbeat")
        belief = self._beliefs.get(member)
        if belief is not None and belief.generation == generation:
            belief.until_s = max(belief.until_s, sent_s + session_s * SESSION_SHARE)

    def answered(self, member: str, generation: int, sent_s: float, what: str) -> None:
        """Check that a successful request of this generation was not sent after a newer one began."""
        for newer, formed_s in self._formed_s.items():
            if newer > generation and formed_s < sent_s:
                self._world.violated(
                    f"group {self._group}: {what} of {member} in generation {generation} succeeded, sent "
                    f"{sent_s - formed_s:.3f} s after generation {newer} had begun"
                )

    def lost(self, member: str) -> None:
        """Note that the member owns nothing from now on: one of its requests failed, or it leaves."""
        self._beliefs.pop(member, None)
