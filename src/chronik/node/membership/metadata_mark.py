"""How far the Raft store has been written: the file `metadata-mark` beside it holds the term and the last index.

SQLite silently discards its write-ahead log from the first bad frame on: a store that lost entries and votes would open
without an error. The mark itself is not synced. After a kill it is exact; after a power loss it may be older or
missing. Before entries are truncated on purpose, the mark is lowered durably.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from chronik.raft.store import Persist, RaftStore, StoredState
from chronik.storage.disk import Disk
from chronik.storage.small_files import read_numbers, write_numbers

MARK_NAME = "metadata-mark"


class MetadataMark(NamedTuple):
    term: int
    last_index: int


NO_MARK = MetadataMark(0, 0)


class MarkedRaftStore:
    """A `RaftStore` that writes a mark after each write. Blocking; called from one thread at a time.

    Invariant: the store holds at least what the mark on disk records, unless it lost writes.
    """

    def __init__(self, store: RaftStore, disk: Disk, folder: str) -> None:
        self._store = store
        self._disk = disk
        self._path = f"{folder}/{MARK_NAME}"
        self.mark = NO_MARK
        """The mark that the previous process left, set by `load`."""
        self._term = self._last_index = 0

    def load(self) -> StoredState:
        state = self._store.load()
        self.mark = MetadataMark(*(read_numbers(self._disk, self._path, 2) or NO_MARK))
        self._term = state.hard_state.term
        self._last_index = last_index_of(state)
        if not self._last_index and self.mark != NO_MARK:
            # This store is new: the mark of the previous store does not apply to it.
            self._write(NO_MARK, durably=True)
            self.mark = NO_MARK
        return state

    def persist(self, persist: Persist) -> None:
        if persist.cut_from is not None and persist.cut_from <= self._last_index:
            # With the old term: the store has the new one only after its write.
            self._write(MetadataMark(self._term, persist.cut_from - 1), durably=True)
            self._last_index = persist.cut_from - 1
        self._store.persist(persist)
        self._term = persist.hard_state.term
        if persist.snapshot is not None:
            self._last_index = max(self._last_index, persist.snapshot.index)
        if persist.entries:
            self._last_index = persist.entries[-1].index
        with contextlib.suppress(OSError):
            # The write is durable; only the mark is out of date.
            self._write(MetadataMark(self._term, self._last_index), durably=False)

    def close(self) -> None:
        self._store.close()

    def _write(self, mark: MetadataMark, *, durably: bool) -> None:
        write_numbers(self._disk, self._path, *mark, durably=durably)


def last_index_of(state: StoredState) -> int:
    """Return the last index of a store; 0 if it is empty."""
    if state.entries:
        return state.entries[-1].index
    return 0 if state.snapshot is None else state.snapshot.index
