"""The in-sync replicas as a leader may count on them (KIP-497).

The controller commits the ISR, and may have committed a change that the leader has not heard of. So the leader counts
with the largest set that can be the truth: a removal counts only when it is known to be committed, an addition from the
moment it is proposed until a newer commit is known.

A proposal that failed may still be committed: its answer was lost, or another controller gave it. Since the controller
takes each partition epoch once, a further proposal settles it: either that one is committed, or the metadata shows what
was.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

RETRY_MS_MIN: Final = 50
RETRY_MS_MAX: Final = 2_000
HEARD_MS_MAX: Final = 1_000
"""A proposal that was committed is known from the metadata soon; after this another is made."""


class InSyncReplicas:
    """Invariant: every ISR that the controller may have committed is a part of `maximal`. One proposal at a time."""

    __slots__ = ("_failures", "_in_flight", "_retry_at_ms", "committed", "is_settled", "maximal", "partition_epoch")

    def __init__(self, committed: Iterable[int], partition_epoch: int) -> None:
        self.committed = tuple(committed)
        self.maximal = self.committed
        self.partition_epoch = partition_epoch
        self.is_settled = True
        """Whether nothing was proposed that may still become true."""
        self._in_flight = False
        self._retry_at_ms = 0
        self._failures = 0

    def may_propose(self, now_ms: int) -> bool:
        return not self._in_flight and now_ms >= self._retry_at_ms

    def propose(self, isr: Iterable[int]) -> None:
        """`isr` is on its way to the controller: what it adds counts from here on."""
        self._in_flight = True
        self.is_settled = False
        self.maximal += tuple(replica for replica in isr if replica not in self.maximal)

    def ended(self, partition_epoch: int, is_committed: bool, now_ms: int) -> None:
        """The proposal made at `partition_epoch` came back. What it says is known when the metadata says it."""
        if partition_epoch != self.partition_epoch:
            return
        self._in_flight = False
        if is_committed:
            self._retry_at_ms = now_ms + HEARD_MS_MAX
        else:
            self._retry_at_ms = now_ms + min(RETRY_MS_MIN << min(self._failures, 16), RETRY_MS_MAX)
            self._failures += 1

    def committed_as(self, isr: Iterable[int], partition_epoch: int) -> bool:
        """The metadata says so. Whatever was proposed before is committed herein, or can no longer be."""
        if partition_epoch <= self.partition_epoch:
            return False
        self.committed = self.maximal = tuple(isr)
        self.partition_epoch = partition_epoch
        self.is_settled = True
        self._in_flight = False
        self._retry_at_ms = self._failures = 0
        return True
