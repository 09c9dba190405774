"""What a history must show when no more records are sent: one consumer reads everything, and no consumer lags.

The final reader starts at each partition's log start (the positions of its assignment) and reads to the end. Records
below that start were deleted legitimately; every other record that any consumer ever received must still exist.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from chronik.testing.anomalies import Anomaly, AnomalyKind, Place
from chronik.testing.operations import Assigned, Committed, HistoryError, Operation, Polled


class FinalReadCheck:
    """Takes the operations in order; `final` is the name of the consumer that reads everything at the end."""

    def __init__(self, final: str, rereaders: Container[str] = ()) -> None:
        self._final = final
        self._rereaders = rereaders
        self._starts: dict[str, int] = {}
        self._read: set[tuple[Place, str]] = set()
        self._polled: dict[tuple[Place, str], int] = {}
        """Each record that another consumer received, and the first operation that shows it."""
        self._next: dict[tuple[str, str], tuple[int, int]] = {}
        """By consumer or group, and partition: the offset to read next, and the operation that shows it."""

    def take(self, number: int, operation: Operation) -> None:
        match operation:
            case Assigned(consumer=consumer, positions=positions) if consumer == self._final:
                for partition, position in positions.items():
                    self._starts[partition] = min(position or 0, self._starts.get(partition, position or 0))
            case Assigned(group=str(group), positions=positions):
                for partition in positions:
                    self._next.setdefault((f"group {group}", partition), (0, number))
            case Assigned(consumer=consumer, positions=positions) if consumer not in self._rereaders:
                for partition, position in positions.items():
                    if position is not None:
                        self._next[consumer, partition] = (position, number)
            case Committed(group=group, offsets=offsets):
                for partition, offset in offsets.items():
                    key = f"group {group}", partition
                    # The response to an older commit may arrive after the response to a newer one.
                    if offset > self._next.get(key, (-1, number))[0]:
                        self._next[key] = (offset, number)
            case Polled(consumer=consumer, records=records):
                for partition, offset, value in records:
                    if consumer == self._final:
                        self._read.add((Place(partition, offset), value))
                    else:
                        self._polled.setdefault((Place(partition, offset), value), number)
                        if (consumer, partition) in self._next:
                            self._next[consumer, partition] = (offset + 1, number)

    def anomalies(self, ends: Mapping[str, int]) -> Iterator[Anomaly]:
        """Yield the anomalies; `ends` are the known end offsets of the partitions."""
        if not self._starts:
            raise HistoryError(f"{self._final} was assigned no partition, so no consumer read everything at the end")
        for (place, value), number in self._polled.items():
            start = self._starts.get(place.partition)
            if start is not None and place.offset >= start and (place, value) not in self._read:
                evidence = f"{value!r} was read at {place}, and {self._final} did not find it there in the end"
                yield Anomaly(AnomalyKind.VANISHED, place.partition, evidence, (number,))
        for (reader, partition), (offset, number) in self._next.items():
            end = ends.get(partition, 0)
            if offset < end:
                evidence = f"{reader} is at {Place(partition, offset)} in the end, but the log ends at {end}"
                yield Anomaly(AnomalyKind.LAG_AT_END, partition, evidence, (number,))
