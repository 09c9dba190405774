"""The limit on what replicas outside the ISR may copy: `leader.replication.throttled.rate` and the follower's rate.

A reassignment copies whole logs; without a limit it competes with clients for disk and network. Replicas in the ISR are
never throttled: producers wait for them.
"""

from __future__ import annotations

UNLIMITED = 2**63 - 1
"""Kafka's default rate."""


class ReplicationThrottle:
    """Bytes per second that one side of replication may move for throttled replicas, on one node.

    What was moved is a debt that is paid at the rate; nothing more is moved until it is paid. So no burst passes, and a
    response that exceeds the rate is balanced by the pause after it. Owned by the loop.
    """

    def __init__(self) -> None:
        self._rate = UNLIMITED
        self._debt_bytes = 0.0
        self._paid_s = 0.0

    @property
    def is_limited(self) -> bool:
        return self._rate < UNLIMITED

    @property
    def bytes_max(self) -> int:
        """The most bytes that one fetch should move: what the rate allows in a second."""
        return self._rate

    def limit(self, rate: int, now_s: float) -> None:
        self._pay(now_s)
        self._rate = rate
        if not self.is_limited:
            self._debt_bytes = 0.0

    def record(self, size_bytes: int, now_s: float) -> None:
        if self.is_limited:
            self._pay(now_s)
            self._debt_bytes += size_bytes

    def is_exceeded(self, now_s: float) -> bool:
        if not self.is_limited:
            return False
        self._pay(now_s)
        return self._debt_bytes > 0 or self._rate == 0

    def _pay(self, now_s: float) -> None:
        self._debt_bytes = max(0.0, self._debt_bytes - (now_s - self._paid_s) * self._rate)
        self._paid_s = now_s
