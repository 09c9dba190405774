"""The account of one experiment: the outcome of each record. Uses no clock and no client, so that it is easy to test.

Record i is produced to partition i modulo the number of partitions. The counters:

- `acked`: the client reported success. Under acks=0 no broker confirms anything: `acked` is then the records that the
  client handed to the network, and `missing` means sent but never read, not a broken promise.
- `missing`: acked but not read. `failed`: the client reported an error, or nothing at all. Such a record may or may not
  be stored, so neither reading it nor missing it is a fault.
- `duplicates`: deliveries of a record beyond its first, whether the log holds it twice or one offset was read twice.
- `out_of_order`: first deliveries after a record that was produced later to the same partition, or from an offset that
  is not above all earlier offsets.
- `unexpected`: deliveries of records that were never produced, or from the wrong partition.
- `gaps`: offsets between the first and the last read of a partition that were not read.
"""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EARLIER_RATE = 100 * 4391 / 5000
"""The success rate of the earlier system's first recorded run; a partial success must exceed it."""
PASS, PARTIAL, FAIL = "PASS", "PARTIAL", "FAIL"


@dataclass(slots=True)
class PartitionDeliveries:
    """The deliveries of one partition, in order."""

    offsets: array[int] = field(default_factory=lambda: array("q"))
    highest_offset: int = -1
    highest_number: int = -1
    out_of_order: int = 0

    def add(self, offset: int, number: int, is_first: bool) -> None:
        if is_first and (offset <= self.highest_offset or number < self.highest_number):
            self.out_of_order += 1
        self.offsets.append(offset)
        self.highest_offset = max(self.highest_offset, offset)
        self.highest_number = max(self.highest_number, number)

    @property
    def gaps(self) -> int:
        if not self.offsets:
            return 0
        return max(self.offsets) - min(self.offsets) + 1 - len(set(self.offsets))


class Account:
    """All records of one run. Each record takes one byte per flag, so that a million records cost little memory."""

    def __init__(self, messages: int, partitions: int) -> None:
        self.messages = messages
        self.produced = 0
        self.acked = 0
        self.failed = 0
        self.first_error: str | None = None
        self.missing = 0
        self.duplicates = 0
        self.unexpected = 0
        self._acked = bytearray(messages)
        self._seen = bytearray(messages)
        self._partitions = [PartitionDeliveries() for _ in range(partitions)]
        self._next_offsets = [0] * partitions

    def sent(self) -> None:
        self.produced += 1

    def acknowledged(self, number: int) -> None:
        if not self._acked[number]:
            self._acked[number] = 1
            self.acked += 1
            self.missing += not self._seen[number]

    def refused(self, reason: str) -> None:
        self.failed += 1
        self.first_error = self.first_error or reason

    def give_up_waiting(self) -> None:
        """Count as failed the records that the client did not report on before it finished."""
        silent = self.produced - self.acked - self.failed
        if silent > 0:
            self.failed += silent
            self.first_error = self.first_error or "the client did not report in time"

    def delivered(self, partition: int, offset: int, number: int | None) -> None:
        """Account for one record that was read; `number` is None for a record that the experiment did not produce."""
        self._next_offsets[partition] = max(self._next_offsets[partition], offset + 1)
        if number is None or not 0 <= number < self.messages or number % len(self._partitions) != partition:
            self.unexpected += 1
            return
        is_first = not self._seen[number]
        if is_first:
            self._seen[number] = 1
            self.missing -= self._acked[number]
        else:
            self.duplicates += 1
        self._partitions[partition].add(offset, number, is_first)

    @property
    def consumed(self) -> int:
        return sum(len(partition.offsets) for partition in self._partitions)

    @property
    def out_of_order(self) -> int:
        return sum(partition.out_of_order for partition in self._partitions)

    @property
    def success_rate(self) -> float:
        """Percent of the records that were read at least once, rounded down so that only all of them give 100."""
        if not self.messages:
            return 100.0
        return math.floor(100_000 * sum(self._seen) / self.messages) / 1000

    @property
    def verdict(self) -> str:
        faults = (self.failed, self.missing, self.duplicates, self.out_of_order, self.unexpected)
        if not any(faults) and self.acked == self.messages:
            return PASS
        return PARTIAL if self.success_rate > EARLIER_RATE else FAIL

    def next_offset(self, partition: int) -> int:
        """Return the offset after the highest that was read, or 0 if nothing was read."""
        return self._next_offsets[partition]

    def incomplete(self) -> frozenset[int]:
        """Return the partitions that acked records are missing from."""
        count = len(self._partitions)
        unseen = (number for number in range(self.messages) if self._acked[number] and not self._seen[number])
        return frozenset(number % count for number in unseen)

    def complaint(self) -> str | None:
        """Return what is wrong, in one line."""
        wrong = {
            "never handed to the client": self.messages - self.produced,
            "not acknowledged": self.failed,
            "missing": self.missing,
            "duplicated": self.duplicates,
            "out of order": self.out_of_order,
            "unexpected": self.unexpected,
        }
        faults = [f"{count} {name}" for name, count in wrong.items() if count]
        reason = f" (the first error: {self.first_error})" if self.first_error else ""
        return f"of {self.messages} records: {', '.join(faults)}{reason}" if faults else None

    def partition_figures(self, leaders: Mapping[int, int]) -> list[dict[str, Any]]:
        count_of_partitions = len(self._partitions)
        expected = self.messages / count_of_partitions
        figures = []
        for index, partition in enumerate(self._partitions):
            count = len(partition.offsets)
            acked, seen = self._acked[index::count_of_partitions], self._seen[index::count_of_partitions]
            figures.append(
                {
                    "partition": index,
                    "leader": leaders.get(index),
                    "acked": sum(acked),
                    "messages": count,
                    "missing": sum(map(operator.gt, acked, seen)),
                    "duplicates": count - sum(seen),
                    "percent": round(100 * count / self.messages, 1) if self.messages else 0.0,
                    "deviation": math.trunc(count - expected),
                    "deviation_percent": round(100 * (count - expected) / expected, 2) if expected else 0.0,
                    "first_offset": min(partition.offsets, default=None),
                    "last_offset": max(partition.offsets, default=None),
                    "gaps": partition.gaps,
                    "out_of_order": partition.out_of_order,
                }
            )
        return figures

    @property
    def imbalance(self) -> int:
        """The message count of the largest partition minus that of the smallest."""
        counts = [len(partition.offsets) for partition in self._partitions]
        return max(counts) - min(counts)
