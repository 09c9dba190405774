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


KINDS: Final = tuple(kind.value for kind in AnomalyKind)


class Place(NamedTuple):
    """The position of a record."""

    partition: str
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}@{self.offset}"


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One violation, in words, with the operations (numbers in the history) that show it."""

    kind: AnomalyKind
    partition: str
    evidence: str
    operations: tuple[int, ...]
