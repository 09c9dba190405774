"""The in-sync replicas that a leader must wait for (KIP-497).

The controller commits the ISR, and may have committed a change that the leader has not seen yet. So the leader uses the
largest set that may be in effect: a removal takes effect only once it is known to be committed, an addition from the
moment it is proposed until a newer commit is known.

A proposal that failed may still be committed: its response was lost, or another controller handled it. Since the
controller accepts each partition epoch once, another proposal resolves this: either it is committed, or the metadata
shows what was.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

RETRY_MS_MIN: Final = 50
RETRY_MS_MAX: Final = 2_000
HEARD_MS_MAX: Final = 1_000
"""How long the leader waits for the metadata to show a committed proposal before it proposes again."""


class InSyncReplicas:
    """Invariant: every ISR that the controller may have committed is a subset of `maximal`. One proposal at a time."""

    __slots__ = ("_failures", "_in_flight", "_retry_at_ms", "committed", "is_settled", "maximal", "partition_epoch")

    def __init__(self, committed: Iterable[int], partition_epoch: int) -> None:
        self.committed = tuple(committed)
        self.maximal = self.committed
        self.partition_epoch = partition_epoch
        self.is_settled = True
        """Whether no proposal is left that may still be committed."""
        self._in_flight = False
        self._retry_at_ms = 0
        self._failures = 0

    def may_propose(self, now_ms: int) -> bool:
        return not self._in_flight and now_ms >= self._retry_at_ms

    def propose(self, isr: Iterable[int]) -> None:
        """Note that `isr` was sent to the controller: the replicas it adds are in `maximal` from now on."""
        self._in_flight = True
        self.is_settled = False
        self.maximal += tuple(replica for replica in isr if replica not in self.maximal)

    def ended(self, partition_epoch: int, is_committed: bool, now_ms: int) -> None:
        """Note the result of the proposal made at `partition_epoch`. Only the metadata shows which ISR it committed."""
        if partition_epoch != self.partition_epoch:
            return
        self._in_flight = False
        if is_committed:
            self._retry_at_ms = now_ms + HEARD_MS_MAX
        else:
            self._retry_at_ms = now_ms + min(RETRY_MS_MIN << min(self._failures, 16), RETRY_MS_MAX)
            self._failures += 1

    def committed_as(self, isr: Iterable[int], partition_epoch: int) -> bool:
        """Apply the ISR from the metadata. Any earlier proposal is part of it, or can no longer be committed."""
        if partition_epoch <= self.partition_epoch:
            return False
        self.committed = self.maximal = tuple(isr)
        self.partition_epoch = partition_epoch
        self.is_settled = True
        self._in_flight = False
        self._retry_at_ms = self._failures = 0
        return True
