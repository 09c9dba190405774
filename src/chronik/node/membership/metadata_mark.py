"""How far the Raft store has been written: the file `metadata-mark` beside it, overwritten in place after each write.

    term int64, last index int64, crc32c of these sixteen bytes uint32; big-endian

SQLite silently discards its write-ahead log from the first bad frame on: a store that lost entries and votes would open
without an error. The mark itself is not synced. After a kill it is exact; after a power loss it may be older or
missing. Before entries are truncated on purpose, the mark is lowered durably.
"""

from __future__ import annotations

import contextlib
import struct
from typing import NamedTuple

from crc32c import crc32c

from chronik.raft.entries import StoredState
from chronik.raft.ready import Persist
from chronik.raft.store import RaftStore
from chronik.storage.disk import Disk, read_file

MARK_NAME = "metadata-mark"
_NUMBERS = struct.Struct(">qq")
_CHECKSUM = struct.Struct(">I")


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
        self._term = 0
        self._last_index = 0

    def load(self) -> StoredState:
        state = self._store.load()
        self.mark = self._read()
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

    def _read(self) -> MetadataMark:
        data = read_file(self._disk, self._path) or b""
        if len(data) != _NUMBERS.size + _CHECKSUM.size:
            return NO_MARK
        if _CHECKSUM.unpack_from(data, _NUMBERS.size)[0] != crc32c(data[: _NUMBERS.size]):
            return NO_MARK
        return MetadataMark(*_NUMBERS.unpack_from(data))

    def _write(self, mark: MetadataMark, *, durably: bool) -> None:
        data = _NUMBERS.pack(*mark)
        file = self._disk.open(self._path, create=True)
        try:
            file.pwrite(data + _CHECKSUM.pack(crc32c(data)), 0)
            if durably:
                file.datasync()
        finally:
            file.close()


def last_index_of(state: StoredState) -> int:
    """Return the last index of a store; 0 if it is empty."""
    if state.entries:
        return state.entries[-1].index
    return 0 if state.snapshot is None else state.snapshot.index
