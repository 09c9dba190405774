"""The kinds of anomaly that a history may show; `chronik.testing.history` defines each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

LOST_WRITE: Final = "lost-write"
UNSEEN: Final = "unseen"
DUPLICATE: Final = "duplicate"
INCONSISTENT_OFFSETS: Final = "inconsistent-offsets"
NONMONOTONIC_SEND: Final = "nonmonotonic-send"
INT_POLL_SKIP: Final = "int-poll-skip"
EXTERNAL_POLL_SKIP: Final = "external-poll-skip"
INT_NONMONOTONIC_POLL: Final = "int-nonmonotonic-poll"
EXTERNAL_NONMONOTONIC_POLL: Final = "external-nonmonotonic-poll"
UNKNOWN_VALUE: Final = "unknown-value"
ABORTED_READ: Final = "aborted-read"
OWNERSHIP_OVERLAP: Final = "ownership-overlap"
VANISHED: Final = "vanished"
LAG_AT_END: Final = "lag-at-end"

KINDS: Final = (
    LOST_WRITE,
    UNSEEN,
    DUPLICATE,
    INCONSISTENT_OFFSETS,
    NONMONOTONIC_SEND,
    INT_POLL_SKIP,
    EXTERNAL_POLL_SKIP,
    INT_NONMONOTONIC_POLL,
    EXTERNAL_NONMONOTONIC_POLL,
    UNKNOWN_VALUE,
    ABORTED_READ,
    OWNERSHIP_OVERLAP,
    VANISHED,
    LAG_AT_END,
)


class Place(NamedTuple):
    """The position of a record."""

    partition: str
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}@{self.offset}"


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One violation, in words, with the operations (numbers in the history) that show it."""

    kind: str
    partition: str | None
    evidence: str
    operations: tuple[int, ...]
