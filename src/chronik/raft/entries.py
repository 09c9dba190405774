"""What a Raft node keeps: entries, the term and vote, a snapshot; and how it gets them back after a restart."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, TypeAlias
from uuid import UUID

import msgspec

from chronik.raft.membership import Membership

ENTRY_OVERHEAD_BYTES = 32
"""What an entry costs beside its data, on the wire and in memory, when sizes are bounded."""


Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number that a peer or a store may give: not negative, and within what SQLite can hold."""


class RaftError(Exception):
    """Something that cannot be while the members keep to the protocol. The node must stop rather than go on from it."""


class EntryKind(IntEnum):
    """COMMAND is for the state machine; the others are Raft's own, and handed out so that indexes have no gap."""

    COMMAND = 0
    NO_OP = 1
    MEMBERSHIP = 2


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One entry of the log. Index and term together name it: no other entry of the cluster has both."""

    index: Natural
    term: Natural
    kind: EntryKind
    data: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.data) + ENTRY_OVERHEAD_BYTES


class HardState(msgspec.Struct, frozen=True):
    """What must be durable before any message that speaks of it. `commit` may lag; it only saves time at a restart."""

    term: int = 0
    vote: int | None = None
    commit: int = 0


class Snapshot(msgspec.Struct, frozen=True):
    """The state machine after the entry `index`, and the membership in force there."""

    index: int
    term: int
    membership: Membership
    data: bytes


@dataclass(frozen=True, slots=True)
class StoredState:
    """All that a store holds. `entries` follow each other; they may start before the snapshot ends, not after it.

    `store_id` was drawn when the store was made and lives as long as it does.
    """

    store_id: UUID
    hard_state: HardState = field(default_factory=HardState)
    snapshot: Snapshot | None = None
    entries: tuple[Entry, ...] = ()
