"""The oracle of groups: who owns which partitions, by what coordinators answered. Two owners at once are a violation.

- Once a member was told of generation g (its SyncGroup succeeded), no request of an older generation that is sent after
  that may succeed: neither a heartbeat nor a commit nor a SyncGroup. Generations only grow, and one that a SyncGroup
  told of is in the log.
- A member counts on its assignment until a request fails or its session ends, counted from when it sent the last
  SyncGroup or heartbeat that succeeded. Nobody else may be given one of its partitions before that.
"""

from __future__ import annotations

from dataclasses import dataclass

from chronik.testing.sim.world import World

SESSION_SHARE = 0.9
"""What is left of a session where the coordinator's clock runs as fast, and the member's as slow, as clocks may."""


@dataclass(slots=True)
class Belief:
    """What a member takes for its own, until then."""

    generation: int
    partitions: tuple[int, ...]
    until_s: float


class GroupOwnership:
    """One group. Members report what they send and what they are told, in the order in which it happens."""

    def __init__(self, world: World, group: str) -> None:
        self._world = world
        self._group = group
        self._formed_s: dict[int, float] = {}
        """By generation: when a member was first told of it."""
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
        """A request of this generation succeeded."""
        for newer, formed_s in self._formed_s.items():
            if newer > generation and formed_s < sent_s:
                self._world.violated(
                    f"group {self._group}: {what} of {member} in generation {generation} succeeded, sent "
                    f"{sent_s - formed_s:.3f} s after generation {newer} had begun"
                )

    def lost(self, member: str) -> None:
        """The member owns nothing from here on: a request of its failed, or it joins anew."""
        self._beliefs.pop(member, None)
