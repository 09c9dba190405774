"""Reconstructs the partitions of a history from all observations, and finds contradictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from chronik.testing.anomalies import Anomaly, AnomalyKind, Place
from chronik.testing.consumer_checks import Timeline
from chronik.testing.operations import (
    Assigned,
    HistoryError,
    Operation,
    Polled,
    SendAcknowledged,
    SendFailed,
    SendInvoked,
    SendUnknown,
)


@dataclass(slots=True)
class Sent:
    """One value that was sent. `outcome` is None while it is unknown; the fields after it are set with it."""

    producer: str
    invoked: int
    transaction: str | None = None
    outcome: str | None = None
    ended: int = -1
    partition: str = ""
    offset: int | None = None


class PartitionHistory:
    """All facts in the operations about sends and offsets, regardless of which consumer read what in which order."""

    def __init__(self) -> None:
        self.sends: dict[str, Sent] = {}
        self.polled_records = 0
        self.timelines: dict[str, Timeline] = {}
        self._values_at: dict[Place, dict[str, int]] = {}
        self._places_of: dict[str, dict[Place, int]] = {}
        self.polled: set[str] = set()
        self.transactional: set[str] = set()
        """The partitions with transactions: markers take offsets there."""
        self.highest_committed: dict[str, int] = {}
        """By partition: the highest offset that a read_committed consumer received."""
        self._read_committed: set[str] = set()
        self._highest_polled: dict[str, tuple[int, int]] = {}

    def take(self, number: int, operation: Operation) -> None:
        match operation:
            case SendInvoked(producer=producer, value=value, partition=invoked_for, transaction=transaction):
                if value in self.sends:
                    raise HistoryError(f"operation {number} sends {value!r} a second time: values must be unique")
                self.sends[value] = Sent(producer, number, transaction)
                if transaction is not None and invoked_for is not None:
                    self.transactional.add(invoked_for)
            case SendAcknowledged(value=value, partition=partition, offset=offset):
                sent = self._end(number, value, "ok")
                sent.partition, sent.offset = partition, offset
                if sent.transaction is not None:
                    self.transactional.add(partition)
                if offset is not None:
                    self._see(number, operation.at_s, Place(partition, offset), value)
            case SendFailed(value=value):
                self._end(number, value, "fail")
            case SendUnknown(value=value):
                self._end(number, value, "info")
            case Assigned(consumer=consumer, is_read_committed=True):
                self._read_committed.add(consumer)
            case Polled(consumer=consumer, records=records):
                is_read_committed = consumer in self._read_committed
                for partition, offset, value in records:
                    self._see(number, operation.at_s, Place(partition, offset), value)
                    self.polled.add(value)
                    highest = self._highest_polled.get(partition)
                    if highest is None or offset > highest[0]:
                        self._highest_polled[partition] = (offset, number)
                    if is_read_committed and offset > self.highest_committed.get(partition, -1):
                        self.highest_committed[partition] = offset
                self.polled_records += len(records)

    def known_offsets(self, is_hidden: Callable[[str], bool] | None = None) -> dict[str, list[int]]:
        """Return the sorted offsets of each partition at which any client saw a record that is not hidden."""
        known: dict[str, list[int]] = {}
        for partition, offset in sorted(self._values_at):
            if is_hidden is None or not all(map(is_hidden, self._values_at[Place(partition, offset)])):
                known.setdefault(partition, []).append(offset)
        return known

    def place_of(self, value: str) -> Place | None:
        """Return where the value is: where it was acknowledged, or where it was polled."""
        sent, places = self.sends[value], self._places_of.get(value)
        if sent.offset is not None:
            return Place(sent.partition, sent.offset)
        return min(places) if places else None

    def anomalies(self) -> Iterator[Anomaly]:
        yield from self._unread()
        yield from self._contradictions()
        yield from self._out_of_order()
        yield from self._never_sent()

    def _end(self, number: int, value: str, outcome: str) -> Sent:
        sent = self.sends.get(value)
        if sent is None:
            raise HistoryError(f"operation {number} ends a send of {value!r} that never began")
        if sent.outcome is not None:
            raise HistoryError(f"operation {number} ends the send of {value!r} a second time")
        sent.outcome, sent.ended = outcome, number
        return sent

    def _see(self, number: int, at_s: float, place: Place, value: str) -> None:
        self._values_at.setdefault(place, {}).setdefault(value, number)
        self._places_of.setdefault(value, {}).setdefault(place, number)
        self.timelines.setdefault(place.partition, Timeline()).reached(place.offset + 1, at_s)

    def _unread(self) -> Iterator[Anomaly]:
        for value, sent in self.sends.items():
            if sent.outcome != "ok" or sent.transaction is not None or value in self.polled:
                continue  # `VisibilityCheck` decides about transactions
            where = sent.partition if sent.offset is None else str(Place(sent.partition, sent.offset))
            evidence = f"{value!r} was acknowledged at {where} and never polled"
            highest = self._highest_polled.get(sent.partition)
            if sent.offset is None or highest is None or highest[0] < sent.offset:
                yield Anomaly(AnomalyKind.UNSEEN, sent.partition, evidence, (sent.invoked, sent.ended))
            else:
                evidence += f"; {Place(sent.partition, highest[0])} was"
                operations = (sent.invoked, sent.ended, highest[1])
                yield Anomaly(AnomalyKind.LOST_WRITE, sent.partition, evidence, operations)

    def _contradictions(self) -> Iterator[Anomaly]:
        for value, places in self._places_of.items():
            if len(places) > 1:
                evidence = f"{value!r} is at {', '.join(map(str, sorted(places)))}"
                operations = tuple(sorted(places.values()))
                yield Anomaly(AnomalyKind.DUPLICATE, min(places).partition, evidence, operations)
        for place, values in self._values_at.items():
            if len(values) > 1:
                evidence = f"{place} holds {', '.join(map(repr, values))}"
                operations = tuple(sorted(values.values()))
                yield Anomaly(AnomalyKind.INCONSISTENT_OFFSETS, place.partition, evidence, operations)

    def _out_of_order(self) -> Iterator[Anomaly]:
        """Check in the order of invocation: a producer that preserves order also preserves it across retries."""
        furthest: dict[tuple[str, str], tuple[int, str]] = {}
        for value, sent in self.sends.items():
            place = self.place_of(value)
            if place is None:
                continue
            partition, offset = place
            before = furthest.get((sent.producer, partition))
            if before is None or offset > before[0]:
                furthest[sent.producer, partition] = (offset, value)
                continue
            evidence = (
                f"{sent.producer} sent {before[1]!r} before {value!r}, "
                f"which is at {Place(partition, offset)}, not after {Place(partition, before[0])}"
            )
            earlier = self.sends[before[1]]
            is_internal = sent.transaction is not None and sent.transaction == earlier.transaction
            kind = AnomalyKind.INT_NONMONOTONIC_SEND if is_internal else AnomalyKind.NONMONOTONIC_SEND
            yield Anomaly(kind, partition, evidence, (earlier.invoked, sent.invoked))

    def _never_sent(self) -> Iterator[Anomaly]:
        for value, places in self._places_of.items():
            if value not in self.polled:
                continue
            (place, number), *_ = places.items()
            sent = self.sends.get(value)
            if sent is None:
                evidence = f"{place} holds {value!r}, which no producer sent"
                yield Anomaly(AnomalyKind.UNKNOWN_VALUE, place.partition, evidence, (number,))
            elif sent.outcome == "fail":
                evidence = f"{place} holds {value!r}, whose send had failed"
                yield Anomaly(AnomalyKind.ABORTED_READ, place.partition, evidence, (sent.ended, number))
