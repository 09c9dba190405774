"""A `RaftStore` on the simulated disk, so that term, vote and log follow the same crash rules as all other files.

raft.db     crc32c uint32 of the bytes that follow, then `raft.store.StoredState` as msgpack; replaced as a whole
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from uuid import UUID

import msgspec
from crc32c import crc32c

from chronik.raft.store import Persist, StoredState, StoreError, stored_after
from chronik.storage.disk import Disk, read_file, write_file_atomic

_CRC = Struct(">I")


class DiskRaftStore:
    """Invariant: after any crash the file holds exactly the writes whose `persist` returned, and perhaps one more."""

    def __init__(self, disk: Disk, path: str, new_store_id: Callable[[], UUID]) -> None:
        self._disk = disk
        self._path = path
        self._new_store_id = new_store_id
        self._stored: StoredState | None = None

    def load(self) -> StoredState:
        try:
            data = read_file(self._disk, self._path)
            if data is None:
                self._write(StoredState(self._new_store_id()))
            else:
                self._stored = self._decoded(data)
        except OSError as error:
            raise StoreError(f"{self._path} cannot be opened: {error}") from error
        assert self._stored is not None
        return self._stored

    def persist(self, persist: Persist) -> None:
        if self._stored is None:
            raise StoreError(f"{self._path} is not open")
        try:
            self._write(stored_after(self._stored, persist))
        except OSError as error:
            raise StoreError(f"{self._path} cannot be written: {error}") from error

    def close(self) -> None:
        self._stored = None

    def _write(self, stored: StoredState) -> None:
        body = msgspec.msgpack.encode(stored)
        write_file_atomic(self._disk, self._path, _CRC.pack(crc32c(body)) + body)
        self._stored = stored

    def _decoded(self, data: bytes) -> StoredState:
        body = data[_CRC.size :]
        if len(data) < _CRC.size or _CRC.unpack_from(data)[0] != crc32c(body):
            raise StoreError(f"{self._path} is damaged")
        return msgspec.msgpack.decode(body, type=StoredState)
