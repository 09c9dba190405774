"""The interface of a Raft node's durable store, and a store in memory.

`chronik.node.membership.raft_store` implements it with a SQLite file.
"""

from __future__ import annotations

from typing import Protocol
from uuid import UUID

from chronik.raft.entries import StoredState
from chronik.raft.ready import Persist


class StoreError(Exception):
    """The store cannot be read or written. The message is one human-readable line."""


class RaftStore(Protocol):
    """Durable Raft state. Calls block; only one thread calls at a time."""

    def load(self) -> StoredState:
        """Return everything stored; a new store generates its id. StoreError if it cannot be read."""

    def persist(self, persist: Persist) -> None:
        """Make the write durable as a whole, or raise StoreError. The same write may be retried."""

    def close(self) -> None: ...


class MemoryRaftStore:
    """`RaftStore` in memory, for tests and the simulator; it survives the simulated crashes of its nodes."""

    def __init__(self, store_id: UUID) -> None:
        self.stored = StoredState(store_id)

    def load(self) -> StoredState:
        return self.stored

    def persist(self, persist: Persist) -> None:
        self.stored = stored_after(self.stored, persist)

    def close(self) -> None:
        """Nothing is open."""


def stored_after(stored: StoredState, persist: Persist) -> StoredState:
    """Return what a store holds after the write."""
    first = 0 if persist.drop_before is None else persist.drop_before
    cut_from = persist.entries[0].index if persist.entries else None
    if persist.cut_from is not None:
        cut_from = persist.cut_from if cut_from is None else min(cut_from, persist.cut_from)
    kept = tuple(
        entry for entry in stored.entries if first <= entry.index and (cut_from is None or entry.index < cut_from)
    )
    return StoredState(stored.store_id, persist.hard_state, persist.snapshot or stored.snapshot, kept + persist.entries)
