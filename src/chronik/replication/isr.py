"""The in-sync replicas as a leader may count on them (KIP-497).

The controller commits the ISR, and may have committed a change that the leader has not heard of. So the leader counts
with the largest set that can be the truth: a removal counts only when it is known to be committed, an addition from the
moment it is proposed, and until a newer commit is known or the controller has surely refused it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Final

RETRY_MS_MIN: Final = 50
RETRY_MS_MAX: Final = 2_000
HEARD_MS_MAX: Final = 1_000
"""A proposal that was accepted is known from the metadata soon; after this it is made again."""


class Outcome(Enum):
    """How a proposal ended, as far as the leader can know."""

    ACCEPTED = "accepted"
    """Committed; the metadata will say so."""
    REFUSED = "refused"
    """Surely never to be committed."""
    UNKNOWN = "unknown"
    """Lost, late, or refused because of a change that is not known here: it may have been committed."""


class InSyncReplicas:
    """Invariant: every ISR that the controller may have committed is a part of `maximal`. One proposal at a time."""

    __slots__ = ("_failures", "_has_unknown", "_in_flight", "_retry_at_ms", "committed", "maximal", "partition_epoch")

    def __init__(self, committed: Iterable[int], partition_epoch: int) -> None:
        self.committed = tuple(committed)
        self.maximal = self.committed
        self.partition_epoch = partition_epoch
        self._in_flight = False
        self._has_unknown = False
        self._retry_at_ms = 0
        self._failures = 0

    @property
    def is_settled(self) -> bool:
        """Whether nothing was proposed that may still become true."""
        return self.maximal == self.committed

    def may_propose(self, now_ms: int) -> bool:
        return not self._in_flight and now_ms >= self._retry_at_ms

    def propose(self, isr: Iterable[int]) -> None:
        """`isr` is on its way to the controller: what it adds counts from here on."""
        self._in_flight = True
        self.maximal += tuple(replica for replica in isr if replica not in self.maximal)

    def ended(self, partition_epoch: int, outcome: Outcome, now_ms: int) -> bool:
        """The proposal made at `partition_epoch` came back; tells whether `maximal` changed."""
        if partition_epoch != self.partition_epoch or not self._in_flight:
            return False
        self._in_flight = False
        if outcome is Outcome.ACCEPTED:
            self._has_unknown = True
            self._retry_at_ms = now_ms + HEARD_MS_MAX
            return False
        self._retry_at_ms = now_ms + min(RETRY_MS_MIN << min(self._failures, 16), RETRY_MS_MAX)
        self._failures += 1
        if outcome is Outcome.UNKNOWN:
            self._has_unknown = True
            return False
        if self._has_unknown or self.is_settled:
            # An earlier proposal of the same additions may still be committed.
            return False
        self.maximal = self.committed
        return True

    def committed_as(self, isr: Iterable[int], partition_epoch: int) -> bool:
        """The metadata says so. Whatever was proposed before is committed herein, or can no longer be."""
        if partition_epoch <= self.partition_epoch:
            return False
        self.committed = self.maximal = tuple(isr)
        self.partition_epoch = partition_epoch
        self._in_flight = self._has_unknown = False
        self._retry_at_ms = self._failures = 0
        return True
