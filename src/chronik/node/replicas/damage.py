"""Damage in a replica's log: how it is detected, and its state until it is healed."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from chronik.storage.log import Log
from chronik.wire.errors import ErrorCode, KafkaError

BAD_BATCH = "a batch is not what was written"

HowFound: TypeAlias = Literal["scrub", "recovery", "read"]
DamageState: TypeAlias = Literal["waiting", "fetching", "healed"]


@dataclass(slots=True)
class Damage:
    """Damage found in the log of one replica, and its outcome."""

    topic: str
    partition: int
    offset: int
    how: HowFound
    reason: str
    found_ms: int
    state: DamageState = "waiting"
    waits_for: str = ""
    """Why healing does not progress now."""
    set_aside: tuple[str, ...] = ()
    """Folders with the damaged segments. They are removed after their retention."""
    healed_ms: int | None = None
    logged: set[int] = field(default_factory=set)
    """The damaged offsets that the node has already logged."""


class Lost(NamedTuple):
    """Records from `offset` on are corrupt or missing."""

    offset: int
    reason: str


def found_at_recovery(log: Log) -> Lost | None:
    """Return the damage found when the log was opened."""
    report = log.recovery
    if report is None or not report.is_damaged:
        return None
    if not report.damages:
        return Lost(log.log_end_offset, "the log ends below what was durable")
    return Lost(min(damage.offset for damage in report.damages), "batches that were durable are bad or missing")


def is_damage(error: Exception) -> bool:
    """Whether a read failed because of damaged files: corrupt batches, a missing file, or EIO."""
    if isinstance(error, KafkaError):
        return error.code == ErrorCode.corrupt_message
    return isinstance(error, OSError) and error.errno in (errno.EIO, errno.ENOENT)
