"""Checks of transactions: what read_committed consumers receive, and what happens to the offsets of groups.

`chronik.testing.history` defines the anomalies. Each check is one pass over the transactions after all operations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from chronik.testing.anomalies import Anomaly, AnomalyKind, Place
from chronik.testing.operations import Committed, OffsetsFetched, Operation
from chronik.testing.partition_history import PartitionHistory, Sent
from chronik.testing.transactions import Outcome, Transaction, TransactionHistory

VALUES_SHOWN_MAX = 3


class VisibilityCheck:
    """A read_committed consumer receives all records of a committed transaction, and none of an aborted one.

    A record is missing if it was acknowledged and no read_committed consumer received it, although one received a later
    record of its partition. `final_starts`: a read_committed consumer read these partitions from here to their end.
    """

    def __init__(
        self, history: TransactionHistory, partitions: PartitionHistory, final_starts: Mapping[str, int]
    ) -> None:
        self._history = history
        self._partitions = partitions
        self._final_starts = final_starts

    def anomalies(self) -> Iterator[Anomaly]:
        for transaction in self._history.transactions.values():
            received = [value for value in transaction.values if value in self._history.received]
            match transaction.outcome:
                case Outcome.ABORT:
                    if received:
                        yield self._aborted_read(transaction, received)
                case Outcome.COMMIT:
                    yield from self._intermediate_read(transaction, received)
                    yield from self._missing(transaction, received)

    def _aborted_read(self, transaction: Transaction, received: list[str]) -> Anomaly:
        how = "aborted" if transaction.ended >= 0 else "never asked to commit"
        evidence = f"read_committed consumers received {_named(received)} of {transaction.name}, which {how}"
        return self._anomaly(AnomalyKind.G1A, transaction, received, evidence)

    def _intermediate_read(self, transaction: Transaction, received: list[str]) -> Iterator[Anomaly]:
        early = [value for value in received if self._history.received[value] < transaction.commit_invoked]
        if early:
            evidence = (
                f"read_committed consumers received {_named(early)} of {transaction.name} before it asked to commit"
            )
            yield self._anomaly(AnomalyKind.G1B, transaction, early, evidence)

    def _missing(self, transaction: Transaction, received: list[str]) -> Iterator[Anomaly]:
        missing: list[str] = []
        for value in transaction.values:
            sent = self._partitions.sends[value]
            if sent.outcome != "ok" or value in self._received_in(sent.partition):
                continue
            if self._is_passed(sent):
                missing.append(value)
            else:
                evidence = f"{value!r} of the committed {transaction.name} was never polled"
                yield Anomaly(AnomalyKind.UNSEEN, sent.partition, evidence, (sent.invoked, sent.ended))
        if missing:
            kind = AnomalyKind.TORN_TRANSACTION if received else AnomalyKind.LOST_TRANSACTION
            rest = f"; they received {_named(received)}" if received else ""
            evidence = f"read_committed consumers passed {_named(missing)} of the committed {transaction.name}{rest}"
            yield self._anomaly(kind, transaction, missing, evidence)

    def _received_in(self, partition: str) -> Container[str]:
        """A partition that no read_committed consumer read is judged by what any consumer received."""
        is_read = partition in self._partitions.highest_committed or partition in self._final_starts
        return self._history.received if is_read else self._partitions.polled

    def _is_passed(self, sent: Sent) -> bool:
        if sent.offset is None:
            return False
        highest = self._partitions.highest_committed.get(sent.partition, -1)
        return highest > sent.offset or sent.offset >= self._final_starts.get(sent.partition, sent.offset + 1)

    def _anomaly(self, kind: AnomalyKind, transaction: Transaction, values: list[str], evidence: str) -> Anomaly:
        sends = [self._partitions.sends[value] for value in values[:VALUES_SHOWN_MAX]]
        shown = [sends[0].invoked, transaction.commit_invoked, transaction.ended]
        shown += [self._history.received.get(value, -1) for value in values[:VALUES_SHOWN_MAX]]
        operations = tuple(sorted({number for number in shown if number >= 0}))
        return Anomaly(kind, sends[0].partition, evidence, operations, transaction.producer)


@dataclass(slots=True)
class _Write:
    """Offsets that a group may have: written between `started_s` and `ended_s`, which is infinite if it is unknown."""

    started_s: float
    ended_s: float
    number: int


@dataclass(slots=True)
class _Register:
    """All writes of one group's offset of one partition."""

    writes: dict[int, list[_Write]] = field(default_factory=dict)
    """By offset: the writes that committed, or may have."""
    certain: list[_Write] = field(default_factory=list)
    """The writes that certainly committed, in the order of their ends."""
    aborted: dict[int, list[Transaction]] = field(default_factory=dict)
    """By offset: the transactions that sent it and aborted."""
    latest_start_s: list[float] = field(default_factory=list)
    """For each certain write: when the latest of the writes up to it started."""

    def wrote(self, offset: int, write: _Write) -> None:
        self.writes.setdefault(offset, []).append(write)
        if write.ended_s < float("inf"):
            self.certain.append(write)

    def order(self) -> None:
        self.certain.sort(key=lambda write: write.ended_s)
        self.latest_start_s = list(accumulate((write.started_s for write in self.certain), max))


class OffsetsCheck:
    """A group's offsets move if and only if their transaction commits; consumed records are processed exactly once.

    A fetched offset must be the last one written before the fetch, or one that was written during it. Fetches wait for
    transactions that commit (`require_stable`).
    """

    def __init__(self, history: TransactionHistory) -> None:
        self._history = history
        self._commits: list[tuple[int, Committed]] = []
        self._fetches: list[tuple[int, OffsetsFetched]] = []

    def take(self, number: int, operation: Operation) -> None:
        match operation:
            case Committed():
                self._commits.append((number, operation))
            case OffsetsFetched():
                self._fetches.append((number, operation))

    def anomalies(self) -> Iterator[Anomaly]:
        groups = self._groups()
        for number, fetch in self._fetches:
            registers = groups.get(fetch.group, {})
            for partition, offset in fetch.offsets.items():
                if partition in registers:
                    yield from self._judge(number, fetch, partition, offset, registers[partition])
        yield from self._processed_twice()

    def _groups(self) -> dict[str, dict[str, _Register]]:
        """Return the registers by group and partition."""
        groups: dict[str, dict[str, _Register]] = {}
        for number, commit in self._commits:
            write = _Write(commit.invoked_s, commit.at_s, number)
            for partition, offset in commit.offsets.items():
                groups.setdefault(commit.group, {}).setdefault(partition, _Register()).wrote(offset, write)
        for transaction in self._history.transactions.values():
            write = _Write(transaction.commit_invoked_s, transaction.ended_s, transaction.commit_invoked)
            for sent in transaction.offsets:
                for partition, offset in sent.offsets.items():
                    register = groups.setdefault(sent.group, {}).setdefault(partition, _Register())
                    if transaction.outcome is Outcome.ABORT:
                        register.aborted.setdefault(offset, []).append(transaction)
                    else:
                        register.wrote(offset, write)
        for registers in groups.values():
            for register in registers.values():
                register.order()
        return groups

    @staticmethod
    def _judge(
        number: int, fetch: OffsetsFetched, partition: str, offset: int | None, register: _Register
    ) -> Iterator[Anomaly]:
        before = bisect_left(register.certain, fetch.invoked_s, key=lambda write: write.ended_s)
        floor_s = register.latest_start_s[before - 1] if before else float("-inf")
        writes = [] if offset is None else register.writes.get(offset, [])
        if any(write.started_s < fetch.at_s and write.ended_s >= floor_s for write in writes):
            return
        where = f"group {fetch.group} was at {'no offset' if offset is None else offset} of {partition}"
        aborted = [] if offset is None else register.aborted.get(offset, [])
        if aborted:
            evidence = f"{where}, an offset of {aborted[0].name}, which aborted"
            operations = (number,) if aborted[0].ended < 0 else (aborted[0].ended, number)
            yield Anomaly(AnomalyKind.ABORTED_OFFSETS, partition, evidence, operations, aborted[0].producer)
        elif before:
            last = max(register.certain[:before], key=lambda write: write.started_s)
            evidence = f"{where} after operation {last.number} had moved it to another offset"
            yield Anomaly(AnomalyKind.LOST_OFFSETS, partition, evidence, (last.number, number))

    def _processed_twice(self) -> Iterator[Anomaly]:
        """Find records that two committed transactions of one group consumed."""
        consumed: dict[tuple[str, str, int], Transaction] = {}
        for transaction in self._history.committed():
            for group in dict.fromkeys(sent.group for sent in transaction.offsets):
                for number, polled in transaction.inputs:
                    for partition, offset, value in polled.records:
                        first = consumed.setdefault((group, partition, offset), transaction)
                        if first is not transaction:
                            evidence = (
                                f"group {group} consumed {value!r} at {Place(partition, offset)} in {first.name} "
                                f"and in {transaction.name}; both committed"
                            )
                            operations = tuple(sorted((first.inputs[0][0], number)))
                            yield Anomaly(
                                AnomalyKind.PROCESSED_TWICE, partition, evidence, operations, transaction.producer
                            )


def _named(values: list[str]) -> str:
    shown = ", ".join(map(repr, values[:VALUES_SHOWN_MAX]))
    more = len(values) - VALUES_SHOWN_MAX
    return f"{shown} and {more} more" if more > 0 else shown
