"""The durable state of a shared partition, as its leader and the share coordinator exchange it."""

import base64
from collections.abc import Iterable
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


def combine(known: Iterable[StateBatch], written: Iterable[StateBatch], start_offset: int) -> tuple[StateBatch, ...]:
    """Return the state of all offsets from `start_offset` on, in order of offsets.

    For an offset with two states the one with more deliveries is later, and at the same count the final one. So the
    order in which writes arrive does not matter, and an accepted record never becomes available again.
    """
    batches = [batch for batch in (*known, *written) if batch.last_offset >= start_offset]
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
        latest = max(open_batches, key=lambda batch: (batch.delivery_count, batch.delivery_state))
        state, count = latest.delivery_state, latest.delivery_count
        previous = combined[-1] if combined else None
        if previous is not None and (previous[1] + 1, previous[2], previous[3]) == (first, state, count):
            combined[-1] = previous._replace(last_offset=end - 1)
        else:
            combined.append(StateBatch(first, end - 1, state, count))
    return tuple(combined)
