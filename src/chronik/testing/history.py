"""Checks a recorded history for the anomalies that Jepsen's tests of Kafka look for.

The log of each partition is reconstructed from all observations: the offsets of acknowledgements and of polled records.
The anomalies are:

    lost-write                  acknowledged, never polled, although a consumer polled beyond its offset
    unseen                      acknowledged, never polled, and no consumer polled beyond it (yet)
    duplicate                   one value at two places
    inconsistent-offsets        one offset, two values
    nonmonotonic-send           a producer's later send has a lower offset than its earlier one
    int-poll-skip               inside one poll, records between two neighbours are missing
    external-poll-skip          the same between a consumer's position and its next poll
    int-nonmonotonic-poll       inside one poll, a record comes after one of a higher or the same offset
    external-nonmonotonic-poll  the same between a consumer's position and its next poll
    unknown-value               a record that no producer sent (its content was changed)
    aborted-read                a record whose send had certainly failed
    ownership-overlap           two members of a group own a partition at the same time (see `OwnershipCheck`)

and, if a consumer reads everything at the end (see `FinalReadCheck`):

    vanished                    polled once, not below the log start, and not found by the final reader
    lag-at-end                  a consumer's position, or a group's last committed offset, is not the end

Of transactions, the anomalies are:

    G1a                         a read_committed consumer received a record of a transaction that aborted
    G1b                         one received a record before its transaction asked to commit
    G1c                         transactions consumed each other's records in a circle
    lost-transaction            committed, and read_committed consumers passed records without receiving any
    torn-transaction            the same, but they received some of its records
    int-nonmonotonic-send       inside one transaction, a later send has a lower offset than an earlier one
    aborted-offsets             a group has an offset that only aborted transactions sent
    lost-offsets                a group does not have the offset that a committed transaction, or a commit, wrote last
    processed-twice             two committed transactions of one group consumed the same record

Kafka permits two more, so they are reported, but a history with them is clean, unless `isolates_writes`:

    G0                          transactions wrote in contradictory orders, in two partitions or in one
    G1c-write-order             a circle of consumed records and write orders

Kafka does not isolate writes: concurrent transactions append to a partition in turn, and a consumer receives both in
the order of the log. Jepsen's tests of Kafka and Redpanda allow both for this reason. A workload in which concurrent
transactions never share a partition can exclude them. All other anomalies are never correct under protocol V2
(KIP-890, part 2). Under V1, every transaction of a producer has the same epoch, so a delayed EndTxn of one transaction
may end the next one early: part of it commits, or an abort hides what is later committed. Any Kafka-compatible system
permits that by design. `late_ends` names producers with V1 whose requests are delayed this long: G1a, G1b, lost and
torn transactions of them are reported as permitted. A client that keeps its connection cannot cause it, so nothing is
permitted by default.

A transaction with an unknown outcome committed if a read_committed consumer received a record of it: then all of its
records must be received. Records of aborted transactions are not lost if nobody receives them, and a read_committed
consumer does not skip them. Transaction markers take an offset; `dense` does not apply to partitions with transactions.

The report also has the worst real-time lag: how long, at a poll, a consumer had not received a record that was known to
exist. Pure: a history in, a report out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from chronik.testing.anomalies import KINDS, Anomaly, AnomalyKind
from chronik.testing.consumer_checks import FinalReadCheck, Lag, OwnershipCheck, PollCheck
from chronik.testing.operations import Operation
from chronik.testing.partition_history import PartitionHistory
from chronik.testing.transaction_checks import OffsetsCheck, VisibilityCheck
from chronik.testing.transaction_cycles import CycleCheck
from chronik.testing.transactions import TransactionHistory

WRITE_ORDER: Final = frozenset([AnomalyKind.G0, AnomalyKind.G1C_WRITE_ORDER])
LATE_END: Final = frozenset(
    [AnomalyKind.G1A, AnomalyKind.G1B, AnomalyKind.LOST_TRANSACTION, AnomalyKind.TORN_TRANSACTION]
)
SHOWN_PER_KIND_MAX: Final = 5


@dataclass(frozen=True, slots=True)
class Report:
    """The verdict on one history."""

    anomalies: dict[str, list[Anomaly]]
    worst_lag: Lag | None
    operations: int
    sent: int
    acknowledged: int
    unknown: int
    polled: int
    transactions: int = 0
    permitted: dict[str, list[Anomaly]] = field(default_factory=dict)
    """What Kafka permits by design."""

    @property
    def is_clean(self) -> bool:
        return not self.anomalies

    def counts(self) -> dict[str, int]:
        """Return the number of anomalies of each kind, including zeros."""
        return {kind: len(self.anomalies.get(kind, ())) for kind in KINDS}

    def __str__(self) -> str:
        lines = [
            f"{self.operations} operations: {self.sent} sent, {self.acknowledged} acknowledged, "
            f"{self.unknown} unknown, {self.polled} polled, {self.transactions} transactions: "
            f"{'clean' if self.is_clean else 'NOT clean'}"
        ]
        for title, found in (("", self.anomalies), ("permitted ", self.permitted)):
            for kind, anomalies in found.items():
                lines.append(f"{title}{kind}: {len(anomalies)}")
                shown = anomalies[:SHOWN_PER_KIND_MAX]
                lines += [f"  {each.evidence} (operations {each.operations})" for each in shown]
        return "\n".join(lines)


def check(
    operations: Sequence[Operation],
    *,
    dense: bool = False,
    rereaders: Container[str] = (),
    session_s: float | None = None,
    final: str | None = None,
    isolates_writes: bool = False,
    late_ends: Container[str] = (),
) -> Report:
    """Return the report on a history.

    `dense` means that partitions without transactions have a record at every offset (no compaction), so that a skipped
    offset is an anomaly even if no client ever saw its record. `rereaders` are consumers that return to old records on
    purpose: their lag is not measured, but all other checks apply. `session_s` is the time, with some slack, after
    which a group member gives up without an answer. `final` reads everything at the end. `isolates_writes` means that
    concurrent transactions never write to the same partition. `late_ends` are producers with protocol V1 whose EndTxn
    may arrive during a later transaction.
    """
    partitions = PartitionHistory()
    transactions = TransactionHistory()
    offsets = OffsetsCheck(transactions)
    for number, operation in enumerate(operations):
        partitions.take(number, operation)
        transactions.take(number, operation)
        offsets.take(number, operation)
    transactions.settle()
    known = partitions.known_offsets()
    committed = partitions.known_offsets(transactions.is_hidden) if transactions.transactions else known
    dense_partitions = partitions.timelines.keys() - partitions.transactional if dense else ()
    polls = PollCheck(known, committed, partitions.timelines, dense_partitions, rereaders)
    ownership = OwnershipCheck(session_s)
    final_read = None if final is None else FinalReadCheck(final, rereaders)
    for number, operation in enumerate(operations):
        polls.take(number, operation)
        ownership.take(number, operation)
        if final_read is not None:
            final_read.take(number, operation)
    found = [*partitions.anomalies(), *polls.anomalies, *ownership.anomalies]
    if final_read is not None:
        ends, committed_ends = (
            {name: sorted_offsets[-1] + 1 for name, sorted_offsets in offsets_of.items()}
            for offsets_of in (known, committed)
        )
        found += final_read.anomalies(ends, committed_ends, transactions.is_hidden)
    starts = {} if final_read is None else final_read.committed_starts
    found += VisibilityCheck(transactions, partitions, starts).anomalies()
    found += CycleCheck(transactions, partitions).anomalies()
    found += offsets.anomalies()
    anomalies: dict[str, list[Anomaly]] = {}
    permitted: dict[str, list[Anomaly]] = {}
    for anomaly in found:
        is_permitted = (anomaly.kind in WRITE_ORDER and not isolates_writes) or (
            anomaly.kind in LATE_END and anomaly.producer in late_ends
        )
        (permitted if is_permitted else anomalies).setdefault(anomaly.kind, []).append(anomaly)
    outcomes = Counter(send.outcome for send in partitions.sends.values())
    return Report(
        anomalies={kind: anomalies[kind] for kind in KINDS if kind in anomalies},
        worst_lag=polls.worst_lag,
        operations=len(operations),
        sent=len(partitions.sends),
        acknowledged=outcomes["ok"],
        unknown=outcomes["info"] + outcomes[None],
        polled=partitions.polled_records,
        transactions=len(transactions.transactions),
        permitted={kind: permitted[kind] for kind in KINDS if kind in permitted},
    )


def merge(histories: Iterable[Iterable[Operation]]) -> list[Operation]:
    """Merge histories that were recorded side by side with one clock. Equal times keep the given order."""
    return sorted((operation for history in histories for operation in history), key=lambda operation: operation.at_s)
