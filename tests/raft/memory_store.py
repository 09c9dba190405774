"""A Raft store in memory, which survives the simulated crashes of its nodes."""

from __future__ import annotations

from uuid import UUID

from chronik.raft.store import Persist, StoredState, stored_after


class MemoryRaftStore:
    def __init__(self, store_id: UUID) -> None:
        self.stored = StoredState(store_id)

    def load(self) -> StoredState:
        return self.stored

    def persist(self, persist: Persist) -> None:
        self.stored = stored_after(self.stored, persist)

    def close(self) -> None:
        """Nothing is open."""
