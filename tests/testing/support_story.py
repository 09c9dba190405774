"""A history that a test tells operation by operation, and what the checker reports on it."""

from __future__ import annotations

from collections.abc import Container
from typing import Literal

from chronik.testing.history import Report, check
from chronik.testing.operations import (
    Assigned,
    Committed,
    OffsetsFetched,
    OffsetsSent,
    Operation,
    Polled,
    SendAcknowledged,
    SendFailed,
    SendInvoked,
    SendUnknown,
    TransactionEnded,
    TransactionEndInvoked,
)

P = "t-0"
Q = "t-1"


class Story:
    """Records a history, one operation per second."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    @property
    def now_s(self) -> float:
        return float(len(self.operations))

    def send(self, value: str, producer: str = "p") -> None:
        self.operations.append(SendInvoked(self.now_s, producer, value, P))

    def ok(self, value: str, offset: int | None, partition: str = P, producer: str = "p") -> None:
        self.operations.append(SendAcknowledged(self.now_s, producer, value, partition, offset))

    def fail(self, value: str) -> None:
        self.operations.append(SendFailed(self.now_s, "p", value, "refused"))

    def info(self, value: str) -> None:
        self.operations.append(SendUnknown(self.now_s, "p", value, "timed out"))

    def written(self, *values: str) -> None:
        """Send and acknowledge each value, at consecutive offsets from 0."""
        for offset, value in enumerate(values):
            self.send(value)
            self.ok(value, offset)

    def assign(self, consumer: str = "c", **positions: int | None) -> None:
        named = {name.replace("_", "-"): offset for name, offset in positions.items()}
        self.operations.append(Assigned(self.now_s, consumer, named))

    def poll(self, *records: tuple[int, str], consumer: str = "c", partition: str = P) -> None:
        found = tuple((partition, offset, value) for offset, value in records)
        self.operations.append(Polled(self.now_s, self.now_s - 0.5, consumer, found))

    def member(self, consumer: str, *partitions: str, group: str = "g") -> None:
        self.operations.append(Assigned(self.now_s, consumer, dict.fromkeys(partitions, 0), group))

    def commit(self, consumer: str, offset: int, partition: str = P, group: str = "g", took_s: float = 0.5) -> None:
        self.operations.append(Committed(self.now_s, self.now_s - took_s, consumer, group, {partition: offset}))

    def check(
        self,
        *,
        dense: bool = False,
        session_s: float | None = None,
        final: str | None = None,
        isolates_writes: bool = False,
        late_ends: Container[str] = (),
    ) -> Report:
        return check(
            self.operations,
            dense=dense,
            session_s=session_s,
            final=final,
            isolates_writes=isolates_writes,
            late_ends=late_ends,
        )

    # -- transactions --------------------------------------------------------------------------------------------------

    def reader(self, consumer: str = "c", *partitions: str, group: str | None = None) -> None:
        """Assign the partitions, from their start, to a read_committed consumer."""
        positions: dict[str, int | None] = dict.fromkeys(partitions or (P, Q), 0)
        self.operations.append(Assigned(self.now_s, consumer, positions, group, is_read_committed=True))

    def wrote(self, transaction: str, *places: tuple[str, int]) -> None:
        """Send and acknowledge a record at each place, with the value PARTITION@OFFSET. A transaction is PRODUCER/N."""
        producer = transaction.partition("/")[0]
        for partition, offset in places:
            value = f"{partition}@{offset}"
            self.operations.append(SendInvoked(self.now_s, producer, value, partition, transaction))
            self.operations.append(SendAcknowledged(self.now_s, producer, value, partition, offset))

    def end(
        self, transaction: str, outcome: Literal["commit", "abort", "unknown"], commits: bool | None = None
    ) -> None:
        """End a transaction. An unknown outcome is that of a commit, unless `commits` is false."""
        producer = transaction.partition("/")[0]
        is_commit = outcome != "abort" if commits is None else commits
        self.operations.append(TransactionEndInvoked(self.now_s, producer, transaction, is_commit))
        self.operations.append(TransactionEnded(self.now_s, producer, transaction, outcome))

    def read(self, *places: tuple[str, int], consumer: str = "c", transaction: str | None = None) -> None:
        """Poll the records that `wrote` wrote at these places."""
        found = tuple((partition, offset, f"{partition}@{offset}") for partition, offset in places)
        self.operations.append(Polled(self.now_s, self.now_s - 0.5, consumer, found, transaction))

    def offsets(self, transaction: str, offset: int, partition: str = P, group: str = "g") -> None:
        producer = transaction.partition("/")[0]
        self.operations.append(OffsetsSent(self.now_s, producer, transaction, group, {partition: offset}))

    def fetched(self, offset: int | None, partition: str = P, group: str = "g", took_s: float = 0.5) -> None:
        """Fetch the group's offset; None if it has none."""
        self.operations.append(OffsetsFetched(self.now_s, self.now_s - took_s, group, {partition: offset}))


def only(report: Report, kind: str, *evidence: str) -> None:
    """Check that the report names only this kind, once, with this evidence."""
    assert list(report.anomalies) == [kind], str(report)
    (anomaly,) = report.anomalies[kind]
    for part in evidence:
        assert part in anomaly.evidence
    assert anomaly.operations
    assert kind in str(report)
    assert report.counts()[kind] == 1
