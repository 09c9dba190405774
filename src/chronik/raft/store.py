"""What a Raft node stores: entries, term and vote, a snapshot; and the interface of its durable store.

`chronik.node.membership.raft_store` implements the store with a SQLite file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Protocol, TypeAlias
from uuid import UUID

import msgspec

from chronik.raft.membership import Membership

ENTRY_OVERHEAD_BYTES = 32
"""The size of an entry besides its data, on the wire and in memory, when sizes are bounded."""


Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number from a peer or a store: not negative, and within SQLite's integer range."""


class RaftError(Exception):
    """A state that is impossible while all members follow the protocol. The node must stop."""


class EntryKind(IntEnum):
    """COMMAND is for the state machine. The others are internal, and returned too so that indexes have no gap."""

    COMMAND = 0
    NO_OP = 1
    MEMBERSHIP = 2


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One entry of the log. Index and term together identify it: no other entry of the cluster has both."""

    index: Natural
    term: Natural
    kind: EntryKind
    data: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.data) + ENTRY_OVERHEAD_BYTES


class HardState(msgspec.Struct, frozen=True):
    """Term and vote must be durable before a message that depends on them. `commit` may lag: it speeds up restarts."""

    term: int = 0
    vote: int | None = None
    commit: int = 0


class Snapshot(msgspec.Struct, frozen=True):
    """The state machine after the entry `index`, and the membership in effect there."""

    index: int
    term: int
    membership: Membership
    data: bytes


@dataclass(frozen=True, slots=True)
class StoredState:
    """Everything a store holds. `entries` have no gaps; they may start before the snapshot ends, not after it.

    `store_id` is generated when the store is created and never changes.
    """

    store_id: UUID
    hard_state: HardState = field(default_factory=HardState)
    snapshot: Snapshot | None = None
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True)
class Persist:
    """One atomic write: store the snapshot, drop entries below `drop_before`, cut those from `cut_from` on, append."""

    hard_state: HardState
    snapshot: Snapshot | None = None
    drop_before: int | None = None
    cut_from: int | None = None
    entries: tuple[Entry, ...] = ()


class StoreError(Exception):
    """The store cannot be read or written. The message is one human-readable line."""


class RaftStore(Protocol):
    """Durable Raft state. Calls block; only one thread calls at a time."""

    def load(self) -> StoredState:
        """Return everything stored; a new store generates its id. StoreError if it cannot be read."""

    def persist(self, persist: Persist) -> None:
        """Make the write durable as a whole, or raise StoreError. The same write may be retried."""

    def close(self) -> None: ...


def stored_after(stored: StoredState, persist: Persist) -> StoredState:
    first = 0 if persist.drop_before is None else persist.drop_before
    cut_from = persist.entries[0].index if persist.entries else None
    if persist.cut_from is not None:
        cut_from = persist.cut_from if cut_from is None else min(cut_from, persist.cut_from)
    kept = tuple(
        entry for entry in stored.entries if first <= entry.index and (cut_from is None or entry.index < cut_from)
    )
    return StoredState(stored.store_id, persist.hard_state, persist.snapshot or stored.snapshot, kept + persist.entries)
