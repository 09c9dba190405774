"""The durable state of a shared partition, as its leader and the share coordinator exchange it."""

import base64
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Final, NamedTuple
from uuid import UUID

UNINITIALIZED_OFFSET: Final = -1
"""No start offset yet: the group's `share.auto.offset.reset` decides."""

NO_LEADER_EPOCH: Final = -1
NO_COUNT: Final = -1
UUID_CHARS: Final = 22


class DeliveryState(IntEnum):
    """The state of delivered records, in Kafka's numbers. ACQUIRED is never durable."""

    AVAILABLE = 0
    ACQUIRED = 1
    ACKNOWLEDGED = 2
    ARCHIVING = 3
    """A copy is being written to the dead-letter topic (KIP-1191)."""
    ARCHIVED = 4


COMPLETE: Final = (DeliveryState.ACKNOWLEDGED, DeliveryState.ARCHIVED)
"""The states of records that are not delivered again."""


class SharePartitionKey(NamedTuple):
    """A partition as one share group sees it."""

    group_id: str
    topic_id: UUID
    partition: int

    @property
    def coordinator_key(self) -> str:
        """The key of FindCoordinator (type 2), which also selects the partition of `__share_group_state`."""
        topic_id = base64.urlsafe_b64encode(self.topic_id.bytes).rstrip(b"=").decode()
        return f"{self.group_id}:{topic_id}:{self.partition}"


def is_share_key(key: str) -> bool:
    """Whether this is the `coordinator_key` of some partition; a group id may contain colons."""
    parts = key.rsplit(":", 2)
    return len(parts) == 3 and bool(parts[0]) and len(parts[1]) == UUID_CHARS and parts[2].isdecimal()


class StateBatch(NamedTuple):
    """The state of the offsets from `first_offset` to `last_offset`, both inclusive."""

    first_offset: int
    last_offset: int
    delivery_state: int
    delivery_count: int


@dataclass(frozen=True, slots=True)
class InitialState:
    """What a new shared partition starts with. A higher `state_epoch` replaces everything that was stored before."""

    state_epoch: int
    start_offset: int = UNINITIALIZED_OFFSET


@dataclass(frozen=True, slots=True)
class WrittenState:
    """A change of the state by the partition's leader; offsets that `batches` does not cover keep their state."""

    state_epoch: int
    leader_epoch: int
    start_offset: int
    """-1 leaves it as it is."""
    batches: tuple[StateBatch, ...]
    delivery_complete_count: int = NO_COUNT


def combine(known: Sequence[StateBatch], written: Iterable[StateBatch], start_offset: int) -> tuple[StateBatch, ...]:
    """Return the state of all offsets from `start_offset` on, in order of offsets. `known` is the result of a call.

    A complete record stays complete; otherwise the state with more deliveries is later. So the order in which writes
    arrive does not matter. Neighbours that are complete share a batch, however they became so: otherwise alternating
    outcomes behind one record that is held for long would add a batch each.
    """
    known = known[bisect_left(known, start_offset, key=_last_offset) :]
    if known and known[0].first_offset < start_offset:
        known = (known[0]._replace(first_offset=start_offset), *known[1:])
    changes = [batch for batch in written if batch.last_offset >= start_offset]
    if not changes:
        return tuple(known)
    # Only the batches that the changes touch, and the neighbours that they may join, are looked at one by one.
    first, last = min(batch.first_offset for batch in changes), max(batch.last_offset for batch in changes)
    begin = max(0, bisect_left(known, first, key=_last_offset) - 1)
    end = bisect_right(known, last, key=_first_offset) + 1
    return (*known[:begin], *_overlaid([*known[begin:end], *changes], start_offset), *known[end:])


def _first_offset(batch: StateBatch) -> int:
    return batch.first_offset


def _last_offset(batch: StateBatch) -> int:
    return batch.last_offset


def _overlaid(batches: list[StateBatch], start_offset: int) -> list[StateBatch]:
    """Return the latest state of each offset of batches that may overlap."""
    bounds = sorted(
        {max(batch.first_offset, start_offset) for batch in batches} | {batch.last_offset + 1 for batch in batches}
    )
    batches.sort()
    combined: list[StateBatch] = []
    open_batches: list[StateBatch] = []
    at = 0
    for first, end in pairwise(bounds):
        while at < len(batches) and batches[at].first_offset <= first:
            open_batches.append(batches[at])
            at += 1
        open_batches = [batch for batch in open_batches if batch.last_offset >= first]
        if not open_batches:
            continue
        latest = max(open_batches, key=_progress)._replace(first_offset=first, last_offset=end - 1)
        joined = _joined(combined[-1], latest) if combined else None
        if joined is not None:
            combined[-1] = joined
        else:
            combined.append(latest)
    return combined


def _progress(batch: StateBatch) -> tuple[bool, int, int]:
    return batch.delivery_state in COMPLETE, batch.delivery_count, batch.delivery_state


def _joined(previous: StateBatch, batch: StateBatch) -> StateBatch | None:
    """Return one batch for both; None if they differ, or are not neighbours."""
    if previous.last_offset + 1 != batch.first_offset:
        return None
    if previous[2:] == batch[2:]:
        return previous._replace(last_offset=batch.last_offset)
    if previous.delivery_state not in COMPLETE or batch.delivery_state not in COMPLETE:
        return None
    is_same = previous.delivery_state == batch.delivery_state
    state = batch.delivery_state if is_same else DeliveryState.ARCHIVED
    count = max(previous.delivery_count, batch.delivery_count)
    return StateBatch(previous.first_offset, batch.last_offset, state, count)
