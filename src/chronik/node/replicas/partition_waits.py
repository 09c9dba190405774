"""Requests waiting on a partition: produces and deletions for an offset, fetches for data, follower sessions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeAlias, TypeVar

from chronik.wire.errors import KafkaError

P = TypeVar("P")
P_contra = TypeVar("P_contra", contravariant=True)
Waiter: TypeAlias = Callable[[KafkaError | None], None]
Waiters: TypeAlias = "deque[tuple[int, Waiter]]"


class WaitingFetch(Protocol[P_contra]):
    """A fetch that waits for data."""

    def data_arrived(self, partition: P_contra, size_bytes: int) -> None: ...

    def partition_gone(self) -> None: ...


class ReplicaListener(Protocol[P_contra]):
    """A follower's fetch session: it is notified of everything that the follower lacks."""

    def data_appended(self, partition: P_contra) -> None: ...

    def watermark_rose(self, partition: P_contra) -> None:
        """The high watermark or the log start rose."""

    def leader_gone(self, partition: P_contra) -> None:
        """The leader epoch in which the listener registered has ended."""


class PartitionWaits(Generic[P]):
    """Invariant: waiters are sorted by the offset they wait for. Owned by the loop; each is called once."""

    __slots__ = ("committed", "deleted", "fetches", "listeners", "written")

    def __init__(self) -> None:
        self.written: Waiters = deque()
        """Called when this node's log is durable up to their offset."""
        self.committed: Waiters = deque()
        """Called when the high watermark reaches their offset."""
        self.deleted: Waiters = deque()
        """Called when the low watermark reaches their offset."""
        self.fetches: dict[WaitingFetch[P], None] = {}
        self.listeners: dict[ReplicaListener[P], None] = {}

    def wake_fetches(self, partition: P, size_bytes: int) -> None:
        for fetch in list(self.fetches):
            fetch.data_arrived(partition, size_bytes)

    def tell_appended(self, partition: P) -> None:
        for listener in list(self.listeners):
            listener.data_appended(partition)

    def tell_watermark(self, partition: P) -> None:
        for listener in list(self.listeners):
            listener.watermark_rose(partition)

    def written_is_not_enough(self) -> None:
        """The log may be truncated from now on: acks=1 waiters wait for the watermark instead."""
        while self.written:
            add(self.committed, *self.written.popleft())

    def fail(self, error: KafkaError, from_offset: int = 0) -> None:
        """Fail all produce waiters for an offset beyond `from_offset`."""
        for waiters in (self.written, self.committed):
            failed = []
            while waiters and waiters[-1][0] > from_offset:
                failed.append(waiters.pop()[1])
            for waiter in reversed(failed):
                waiter(error)

    def forget_deletion(self, waiter: Waiter) -> None:
        """Remove the waiter of a request that was answered or timed out."""
        self.deleted = deque(waiting for waiting in self.deleted if waiting[1] is not waiter)

    def fail_deletions(self, error: KafkaError) -> None:
        while self.deleted:
            self.deleted.popleft()[1](error)

    def let_fetches_go(self) -> None:
        """Wake all waiting fetches, so that each checks again whether this node may serve it."""
        fetches, self.fetches = list(self.fetches), {}
        for fetch in fetches:
            fetch.partition_gone()

    def let_listeners_go(self, partition: P) -> None:
        listeners, self.listeners = list(self.listeners), {}
        for listener in listeners:
            listener.leader_gone(partition)


def add(waiters: Waiters, end_offset: int, waiter: Waiter) -> None:
    """Insert a waiter in offset order: usually at the end, earlier for a duplicate batch."""
    behind: list[tuple[int, Waiter]] = []
    while waiters and waiters[-1][0] > end_offset:
        behind.append(waiters.pop())
    waiters.append((end_offset, waiter))
    waiters.extend(reversed(behind))


def wake(waiters: Waiters, end_offset: int) -> None:
    while waiters and waiters[0][0] <= end_offset:
        waiters.popleft()[1](None)
