"""Follows consumers through a history: which records a poll skipped or repeated, and how far consumers lagged."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container
from dataclasses import dataclass, field
from typing import NamedTuple

from chronik.testing.anomalies import Anomaly, AnomalyKind, Place
from chronik.testing.operations import Assigned, Operation, Polled


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

    `rereaders` lag on purpose, so their lag is ignored.
    """

    def __init__(
        self,
        known: dict[str, list[int]],
        timelines: dict[str, Timeline],
        dense: bool,
        rereaders: Container[str] = (),
    ) -> None:
        self._known = known
        self._timelines = timelines
        self._dense = dense
        self._rereaders = rereaders
        self._positions: dict[str, dict[str, Position | None]] = {}
        self.anomalies: list[Anomaly] = []
        self.worst_lag: Lag | None = None

    def take(self, number: int, operation: Operation) -> None:
        match operation:
            case Assigned(consumer=consumer, positions=positions):
                before = self._positions.get(consumer, {})
                self._positions[consumer] = {
                    partition: before.get(partition) if offset is None else Position(offset - 1, number)
                    for partition, offset in positions.items()
                }
            case Polled(consumer=consumer):
                current = self._positions.setdefault(consumer, {})
                self._follow(number, operation, current)
                if consumer not in self._rereaders:
                    self._measure(number, operation, current)

    def _follow(self, number: int, polled: Polled, positions: dict[str, Position | None]) -> None:
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
                skipped = self._between(partition, before.offset, offset)
                if not skipped:
                    continue
                kind = AnomalyKind.INT_POLL_SKIP if inside else AnomalyKind.EXTERNAL_POLL_SKIP
                evidence += f" after {Place(partition, before.offset)}: {skipped} records skipped"
            self.anomalies.append(Anomaly(kind, partition, evidence, operations))

    def _between(self, partition: str, after: int, before: int) -> int:
        """Return how many records are known to exist between two offsets."""
        if self._dense:
            return before - after - 1
        known = self._known[partition]
        return bisect_left(known, before) - bisect_right(known, after)

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
