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

The report also has the worst real-time lag: how long, at a poll, a consumer had not received a record that was known to
exist. Pure: a history in, a report out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from chronik.testing.anomalies import KINDS, Anomaly
from chronik.testing.consumer_checks import FinalReadCheck, Lag, OwnershipCheck, PollCheck
from chronik.testing.operations import Operation
from chronik.testing.partition_history import PartitionHistory

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

    @property
    def is_clean(self) -> bool:
        return not self.anomalies

    def counts(self) -> dict[str, int]:
        """Return the number of anomalies of each kind, including zeros."""
        return {kind: len(self.anomalies.get(kind, ())) for kind in KINDS}

    def __str__(self) -> str:
        lines = [
            f"{self.operations} operations: {self.sent} sent, {self.acknowledged} acknowledged, "
            f"{self.unknown} unknown, {self.polled} polled: {'clean' if self.is_clean else 'NOT clean'}"
        ]
        for kind, anomalies in self.anomalies.items():
            lines.append(f"{kind}: {len(anomalies)}")
            lines += [f"  {each.evidence} (operations {each.operations})" for each in anomalies[:SHOWN_PER_KIND_MAX]]
        return "\n".join(lines)


def check(
    operations: Sequence[Operation],
    *,
    dense: bool = False,
    rereaders: Container[str] = (),
    session_s: float | None = None,
    final: str | None = None,
) -> Report:
    """Return the report on a history.

    `dense` means that the topics have a record at every offset (no transactions, no compaction), so that a skipped
    offset is an anomaly even if no client ever saw its record. `rereaders` are consumers that return to old records on
    purpose: their lag is not measured, but all other checks apply. `session_s` is the time, with some slack, after
    which a group member gives up without an answer. `final` reads everything at the end.
    """
    partitions = PartitionHistory()
    for number, operation in enumerate(operations):
        partitions.take(number, operation)
    polls = PollCheck(partitions.known_offsets(), partitions.timelines, dense, rereaders)
    ownership = OwnershipCheck(session_s)
    final_read = None if final is None else FinalReadCheck(final, rereaders)
    for number, operation in enumerate(operations):
        polls.take(number, operation)
        ownership.take(number, operation)
        if final_read is not None:
            final_read.take(number, operation)
    found = [*partitions.anomalies(), *polls.anomalies, *ownership.anomalies]
    if final_read is not None:
        found += final_read.anomalies({name: timeline.ends[-1] for name, timeline in partitions.timelines.items()})
    anomalies: dict[str, list[Anomaly]] = {}
    for anomaly in found:
        anomalies.setdefault(anomaly.kind, []).append(anomaly)
    outcomes = Counter(send.outcome for send in partitions.sends.values())
    return Report(
        anomalies={kind: anomalies[kind] for kind in KINDS if kind in anomalies},
        worst_lag=polls.worst_lag,
        operations=len(operations),
        sent=len(partitions.sends),
        acknowledged=outcomes["ok"],
        unknown=outcomes["info"] + outcomes[None],
        polled=partitions.polled_records,
    )


def merge(histories: Iterable[Iterable[Operation]]) -> list[Operation]:
    """Merge histories that were recorded side by side with one clock. Equal times keep the given order."""
    return sorted((operation for history in histories for operation in history), key=lambda operation: operation.at_s)
