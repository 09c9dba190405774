"""What a Raft node keeps on disk: the interface of its store, and a store in memory.

`chronik.node.membership.raft_store` keeps the same in a SQLite file.
"""

from __future__ import annotations

from typing import Protocol
from uuid import UUID

from chronik.raft.entries import StoredState
from chronik.raft.ready import Persist


class StoreError(Exception):
    """The store cannot be read or written. The message is one line for people."""


class RaftStore(Protocol):
    """Durable Raft state. Blocking; called from one thread at a time."""

    def load(self) -> StoredState:
        """All that is stored; a new store draws its id. StoreError where it cannot be read."""

    def persist(self, persist: Persist) -> None:
        """Makes the write durable as a whole, or raises StoreError. May be tried again with the same write."""

    def close(self) -> None: ...


class MemoryRaftStore:
    """`RaftStore` in memory, for tests and the simulator: whoever holds it outlives the nodes that crash on it."""

    def __init__(self, store_id: UUID) -> None:
        self.stored = StoredState(store_id)

    def load(self) -> StoredState:
        return self.stored

    def persist(self, persist: Persist) -> None:
        self.stored = stored_after(self.stored, persist)

    def close(self) -> None:
        """Nothing is open."""


def stored_after(stored: StoredState, persist: Persist) -> StoredState:
    """What a store holds after the write."""
    first = 0 if persist.drop_before is None else persist.drop_before
    cut_from = persist.entries[0].index if persist.entries else None
    if persist.cut_from is not None:
        cut_from = persist.cut_from if cut_from is None else min(cut_from, persist.cut_from)
    kept = tuple(
        entry for entry in stored.entries if first <= entry.index and (cut_from is None or entry.index < cut_from)
    )
    return StoredState(stored.store_id, persist.hard_state, persist.snapshot or stored.snapshot, kept + persist.entries)
