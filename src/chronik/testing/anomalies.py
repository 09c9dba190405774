"""The kinds of anomaly that a history may show; `chronik.testing.history` defines each of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple


class AnomalyKind(StrEnum):
    LOST_WRITE = "lost-write"
    UNSEEN = "unseen"
    DUPLICATE = "duplicate"
    INCONSISTENT_OFFSETS = "inconsistent-offsets"
    NONMONOTONIC_SEND = "nonmonotonic-send"
    INT_POLL_SKIP = "int-poll-skip"
    EXTERNAL_POLL_SKIP = "external-poll-skip"
    INT_NONMONOTONIC_POLL = "int-nonmonotonic-poll"
    EXTERNAL_NONMONOTONIC_POLL = "external-nonmonotonic-poll"
    UNKNOWN_VALUE = "unknown-value"
    ABORTED_READ = "aborted-read"
    OWNERSHIP_OVERLAP = "ownership-overlap"
    VANISHED = "vanished"
    LAG_AT_END = "lag-at-end"
    INT_NONMONOTONIC_SEND = "int-nonmonotonic-send"
    G0 = "G0"
    G1A = "G1a"
    G1B = "G1b"
    G1C = "G1c"
    G1C_WRITE_ORDER = "G1c-write-order"
    LOST_TRANSACTION = "lost-transaction"
    TORN_TRANSACTION = "torn-transaction"
    ABORTED_OFFSETS = "aborted-offsets"
    LOST_OFFSETS = "lost-offsets"
    PROCESSED_TWICE = "processed-twice"


KINDS: Final = tuple(kind.value for kind in AnomalyKind)


class Place(NamedTuple):
    """The position of a record."""

    partition: str
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}@{self.offset}"


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One violation, in words, with the operations (numbers in the history) that show it.

    `producer` is the producer of the transaction that it concerns.
    """

    kind: AnomalyKind
    partition: str
    evidence: str
    operations: tuple[int, ...]
    producer: str | None = None
