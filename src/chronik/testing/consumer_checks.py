"""Checks that follow consumers through a history: skipped and repeated records, lag, ownership, and the final read.

Each check takes all operations in order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from chronik.testing.anomalies import Anomaly, AnomalyKind, Place
from chronik.testing.operations import (
    Assigned,
    Committed,
    HistoryError,
    OffsetsFetched,
    OffsetsSent,
    Operation,
    Polled,
    TransactionEnded,
)


@dataclass(frozen=True, slots=True)
class Lag:
    """At its poll, operation `operation`, the consumer had not received a record that was known for `seconds`."""

    seconds: float
    consumer: str
    partition: str
    next_offset: int
    operation: int


@dataclass(slots=True)
class Timeline:
    """How far a partition was known to reach, and since when: both lists rise together."""

    ends: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def reached(self, end: int, at_s: float) -> None:
        if not self.ends or end > self.ends[-1]:
            self.ends.append(end)
            self.times_s.append(at_s)

    def known_since_s(self, offset: int) -> float | None:
        """Return when a record at or after `offset` became known."""
        index = bisect_right(self.ends, offset)
        return self.times_s[index] if index < len(self.ends) else None


class Position(NamedTuple):
    """A consumer's position: the last offset that it has passed, and the operation that shows it."""

    offset: int
    operation: int


class PollCheck:
    """Follows each consumer through its polls. `known` are the offsets at which any client saw a record.

    `committed` are the offsets among them that read_committed consumers must receive; those of aborted transactions
    are missing. In `dense` partitions, there is a record at every offset. `rereaders` lag on purpose, so their lag is
    ignored; so is the lag of read_committed consumers, which wait for open transactions.
    """

    def __init__(
        self,
        known: dict[str, list[int]],
        committed: dict[str, list[int]],
        timelines: dict[str, Timeline],
        dense: Container[str],
        rereaders: Container[str] = (),
    ) -> None:
        self._known = known
        self._committed = committed
        self._timelines = timelines
        self._dense = dense
        self._rereaders = rereaders
        self._read_committed: set[str] = set()
        self._positions: dict[str, dict[str, Position | None]] = {}
        self.anomalies: list[Anomaly] = []
        self.worst_lag: Lag | None = None

    def take(self, number: int, operation: Operation) -> None:
        match operation:
            case Assigned(consumer=consumer, positions=positions, is_read_committed=is_read_committed):
                if is_read_committed:
                    self._read_committed.add(consumer)
                before = self._positions.get(consumer, {})
                self._positions[consumer] = {
                    partition: before.get(partition) if offset is None else Position(offset - 1, number)
                    for partition, offset in positions.items()
                }
            case Polled(consumer=consumer):
                current = self._positions.setdefault(consumer, {})
                self._follow(number, operation, current)
                if consumer not in self._rereaders and consumer not in self._read_committed:
                    self._measure(number, operation, current)

    def _follow(self, number: int, polled: Polled, positions: dict[str, Position | None]) -> None:
        known = self._committed if polled.consumer in self._read_committed else self._known
        for partition, offset, value in polled.records:
            before = positions.get(partition)
            positions[partition] = Position(offset, number)
            if before is None or offset == before.offset + 1:
                continue
            inside = before.operation == number
            operations = (number,) if inside else (before.operation, number)
            evidence = f"{polled.consumer} received {value!r} at {Place(partition, offset)}"
            if offset <= before.offset:
                kind = AnomalyKind.INT_NONMONOTONIC_POLL if inside else AnomalyKind.EXTERNAL_NONMONOTONIC_POLL
                evidence += f" although it had passed {Place(partition, before.offset)}"
            else:
                skipped = self._between(partition, before.offset, offset, known)
                if not skipped:
                    continue
                kind = AnomalyKind.INT_POLL_SKIP if inside else AnomalyKind.EXTERNAL_POLL_SKIP
                evidence += f" after {Place(partition, before.offset)}: {skipped} records skipped"
            self.anomalies.append(Anomaly(kind, partition, evidence, operations))

    def _between(self, partition: str, after: int, before: int, known: dict[str, list[int]]) -> int:
        """Return how many records are known to exist between two offsets."""
        if partition in self._dense:
            return before - after - 1
        offsets = known.get(partition, [])
        return bisect_left(offsets, before) - bisect_right(offsets, after)

    def _measure(self, number: int, polled: Polled, positions: dict[str, Position | None]) -> None:
        for partition, position in positions.items():
            timeline = self._timelines.get(partition)
            if position is None or timeline is None:
                continue
            since_s = timeline.known_since_s(position.offset + 1)
            if since_s is None:
                continue
            lag_s = polled.invoked_s - since_s
            if lag_s > (0.0 if self.worst_lag is None else self.worst_lag.seconds):
                self.worst_lag = Lag(lag_s, polled.consumer, partition, position.offset + 1, number)


@dataclass(slots=True)
class Term:
    """A member's ownership of one partition, and the first proof that another member owned it later."""

    since_s: float
    assigned: int
    ended_s: float | None = None
    ended_by: str = ""
    ended: int = -1
    is_reported: bool = False


class OwnershipCheck:
    """A partition of a group never has two owners. `session_s`: how long a member may wait unanswered, plus slack.

    A member owns a partition from its assignment until an assignment without it. Recorded terms may overlap in a
    healthy cluster: a member that was cut off learns late that its group continued without it. Two cases prove an
    overlap:

    - A commit of a later generation was acknowledged, and after that a commit of the earlier owner. An acknowledgement
      shows that the member's generation was the current one between request and response, so the order is certain.
    - The earlier owner receives records more than a session after such a commit. A member whose heartbeats fail or get
      no response gives up within its session, so some coordinator still answers its heartbeats.
    """

    def __init__(self, session_s: float | None) -> None:
        self._session_s = session_s
        self._groups: dict[str, str] = {}
        self._terms: dict[tuple[str, str], dict[str, Term]] = {}
        """By group and partition: the open term of each member."""
        self.anomalies: list[Anomaly] = []

    def take(self, number: int, operation: Operation) -> None:
        match operation:
            case Assigned(at_s=at_s, consumer=consumer, positions=positions, group=str(group)):
                self._groups[consumer] = group
                for (name, partition), terms in self._terms.items():
                    if name == group and partition not in positions:
                        terms.pop(consumer, None)
                for partition in positions:
                    self._terms.setdefault((group, partition), {})[consumer] = Term(at_s, number)
            case Committed(invoked_s=invoked_s, consumer=consumer, group=group, offsets=offsets):
                for partition in offsets:
                    self._claim(number, group, partition, consumer, invoked_s, "committed it")
                    self._supersede(number, operation, partition)
            case Polled(invoked_s=invoked_s, consumer=consumer, records=records) if self._session_s is not None:
                group = self._groups.get(consumer, "")
                how = f"received records of it at {invoked_s:.1f} s"
                for partition in dict.fromkeys(partition for partition, _, _ in records):
                    self._claim(number, group, partition, consumer, invoked_s - self._session_s, how)

    def _claim(self, number: int, group: str, partition: str, consumer: str, at_s: float, how: str) -> None:
        """Report an overlap if the member acts as the owner although its term ended before `at_s`."""
        term = self._terms.get((group, partition), {}).get(consumer)
        if term is None or term.ended_s is None or term.is_reported or at_s <= term.ended_s:
            return
        term.is_reported = True
        evidence = (
            f"{consumer} owned {partition} in group {group} since {term.since_s:.1f} s and {how}, "
            f"after {term.ended_by} had committed it at {term.ended_s:.1f} s"
        )
        operations = (term.assigned, term.ended, number)
        self.anomalies.append(Anomaly(AnomalyKind.OWNERSHIP_OVERLAP, partition, evidence, operations))

    def _supersede(self, number: int, commit: Committed, partition: str) -> None:
        """End, at this commit's response, the terms of other members that were assigned before its request."""
        terms = self._terms.get((commit.group, partition), {})
        if commit.consumer not in terms:
            return
        for consumer, term in terms.items():
            if consumer != commit.consumer and term.ended_s is None and term.since_s <= commit.invoked_s:
                term.ended_s, term.ended_by, term.ended = commit.at_s, commit.consumer, number


class FinalReadCheck:
    """When no more records are sent, the consumer `final` reads everything, and no consumer lags.

    `final` starts at each partition's log start (the positions of its assignment) and reads to the end. Records below
    that start were deleted legitimately; every other record that any consumer ever received must still exist. If
    `final` is read_committed, records of transactions that did not commit are hidden from it.
    """

    def __init__(self, final: str, rereaders: Container[str] = ()) -> None:
        self._final = final
        self._rereaders = rereaders
        self.starts: dict[str, int] = {}
        self._read_committed: set[str] = set()
        """The consumers and groups that are read_committed."""
        self._sent: dict[str, list[OffsetsSent]] = {}
        """By transaction: the offsets that it commits."""
        self._read: set[tuple[Place, str]] = set()
        self._polled: dict[tuple[Place, str], int] = {}
        """Each record that another consumer received, and the first operation that shows it."""
        self._next: dict[tuple[str, str], tuple[int, int]] = {}
        """By consumer or group, and partition: the offset to read next, and the operation that shows it."""

    def take(self, number: int, operation: Operation) -> None:
        if isinstance(operation, Assigned) and operation.is_read_committed:
            self._read_committed.add(operation.consumer if operation.group is None else f"group {operation.group}")
        match operation:
            case Assigned(consumer=consumer, positions=positions) if consumer == self._final:
                for partition, position in positions.items():
                    self.starts[partition] = min(position or 0, self.starts.get(partition, position or 0))
            case Assigned(group=str(group), positions=positions):
                for partition in positions:
                    self._next.setdefault((f"group {group}", partition), (0, number))
            case Assigned(consumer=consumer, positions=positions) if consumer not in self._rereaders:
                for partition, position in positions.items():
                    if position is not None:
                        self._next[consumer, partition] = (position, number)
            case Committed(group=group, offsets=offsets) | OffsetsFetched(group=group, offsets=offsets):
                self._group_reached(number, group, offsets)
            case OffsetsSent(transaction=transaction):
                self._sent.setdefault(transaction, []).append(operation)
            case TransactionEnded(transaction=transaction, outcome=outcome):
                for sent in self._sent.pop(transaction, ()):
                    if outcome == "commit":
                        self._group_reached(number, sent.group, sent.offsets)
            case Polled(consumer=consumer, records=records):
                for partition, offset, value in records:
                    if consumer == self._final:
                        self._read.add((Place(partition, offset), value))
                    else:
                        self._polled.setdefault((Place(partition, offset), value), number)
                        if (consumer, partition) in self._next:
                            self._next[consumer, partition] = (offset + 1, number)

    def _group_reached(self, number: int, group: str, offsets: Mapping[str, int | None]) -> None:
        for partition, offset in offsets.items():
            key = f"group {group}", partition
            # The response to an older commit may arrive after the response to a newer one.
            if offset is not None and offset > self._next.get(key, (-1, number))[0]:
                self._next[key] = (offset, number)

    @property
    def committed_starts(self) -> Mapping[str, int]:
        """Where the final reader starts, if it is read_committed."""
        return self.starts if self._final in self._read_committed else {}

    def anomalies(
        self, ends: Mapping[str, int], committed_ends: Mapping[str, int], is_hidden: Callable[[str], bool]
    ) -> Iterator[Anomaly]:
        """Yield the anomalies. `ends` are the known end offsets of the partitions.

        `committed_ends` are the ends for read_committed consumers, which do not receive hidden records.
        """
        if not self.starts:
            raise HistoryError(f"{self._final} was assigned no partition, so no consumer read everything at the end")
        is_final_read_committed = self._final in self._read_committed
        for (place, value), number in self._polled.items():
            if is_final_read_committed and is_hidden(value):
                continue
            start = self.starts.get(place.partition)
            if start is not None and place.offset >= start and (place, value) not in self._read:
                evidence = f"{value!r} was read at {place}, and {self._final} did not find it there in the end"
                yield Anomaly(AnomalyKind.VANISHED, place.partition, evidence, (number,))
        for (reader, partition), (offset, number) in self._next.items():
            end = (committed_ends if reader in self._read_committed else ends).get(partition, 0)
            if offset < end:
                evidence = f"{reader} is at {Place(partition, offset)} in the end, but the log ends at {end}"
                yield Anomaly(AnomalyKind.LAG_AT_END, partition, evidence, (number,))
