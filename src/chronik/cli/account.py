"""The account of an experiment: what was produced, acknowledged and consumed, partition by partition."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

COLUMNS = (
    "partition",
    "produced",
    "acked",
    "consumed",
    "missing",
    "duplicates",
    "out_of_order",
    "first_offset",
    "last_offset",
)


@dataclass(slots=True)
class PartitionAccount:
    """One partition. Records are known by the number they were produced with, which rises."""

    partition: int
    produced: int = 0
    acked: set[int] = field(default_factory=set)
    consumed: list[tuple[int, int]] = field(default_factory=list)
    """Offset and record number, in the order of delivery."""

    def figures(self) -> dict[str, Any]:
        numbers = [number for _, number in self.consumed]
        unique = set(numbers)
        out_of_order = sum(
            later[0] <= earlier[0] or later[1] < earlier[1]
            for earlier, later in zip(self.consumed, self.consumed[1:], strict=False)
        )
        offsets = [offset for offset, _ in self.consumed]
        return {
            "partition": self.partition,
            "produced": self.produced,
            "acked": len(self.acked),
            "consumed": len(numbers),
            "missing": len(self.acked - unique),
            "duplicates": len(numbers) - len(unique),
            "out_of_order": out_of_order,
            "first_offset": min(offsets, default=None),
            "last_offset": max(offsets, default=None),
        }


class Account:
    """All partitions of one topic."""

    def __init__(self, partitions: int) -> None:
        self._partitions = [PartitionAccount(partition) for partition in range(partitions)]

    def produced(self, partition: int) -> None:
        self._partitions[partition].produced += 1

    def acknowledged(self, partition: int, number: int) -> None:
        self._partitions[partition].acked.add(number)

    def consumed(self, partition: int, offset: int, number: int) -> None:
        self._partitions[partition].consumed.append((offset, number))

    @property
    def acked_count(self) -> int:
        return sum(len(partition.acked) for partition in self._partitions)

    @property
    def consumed_count(self) -> int:
        return sum(len(partition.consumed) for partition in self._partitions)

    def rows(self) -> list[dict[str, Any]]:
        """One row per partition, and their sum."""
        rows = [partition.figures() for partition in self._partitions]
        total: dict[str, Any] = {"partition": "all", "first_offset": None, "last_offset": None}
        for column in COLUMNS[1:7]:
            total[column] = sum(row[column] for row in rows)
        return [*rows, {column: total[column] for column in COLUMNS}]

    def complaint(self) -> str | None:
        """What is wrong, in a line; None where every record that was produced arrived once and in order."""
        total = self.rows()[-1]
        wrong = {
            "not acknowledged": total["produced"] - total["acked"],
            "missing": total["missing"],
            "duplicated": total["duplicates"],
            "out of order": total["out_of_order"],
        }
        found = [f"{count} {name}" for name, count in wrong.items() if count]
        return f"of {total['produced']} records: {', '.join(found)}" if found else None
