"""Where a Raft node keeps its term, vote, log and snapshot: `metadata.db`, a SQLite database, synced by each write.

    settings    format = 1, store_id = the store's own id (a UUID as text), drawn when the file was made
    hard_state  slot INTEGER PRIMARY KEY = 0, term, vote (-1: none), commit_index, checksum
    snapshot    position INTEGER PRIMARY KEY, term, membership BLOB, data BLOB, checksum        at most one row
    entries     position INTEGER PRIMARY KEY, term, kind, data BLOB, checksum                   without a gap

`position` is the entry's index, which is a word of SQL; `membership` is the msgpack of `raft.membership`. Checksums are
`sqlite_file.row_checksum` over the row's numbers in the order above, then its blobs.
"""

from __future__ import annotations

import errno
import sqlite3
import struct
from collections.abc import Callable
from typing import Protocol
from uuid import UUID

from chronik.node.former_metadata import is_former, set_aside
from chronik.node.membership.sqlite_file import SqliteFile, StoreError, row_checksum
from chronik.raft.entries import Entry, EntryKind, HardState, Snapshot, StoredState
from chronik.raft.membership import Membership, decode_membership, encode_membership
from chronik.raft.ready import Persist

FORMAT = 1
NO_VOTE = -1
FIRST = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS hard_state (
    slot INTEGER PRIMARY KEY, term INTEGER NOT NULL, vote INTEGER NOT NULL, commit_index INTEGER NOT NULL,
    checksum INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS snapshot (
    position INTEGER PRIMARY KEY, term INTEGER NOT NULL, membership BLOB NOT NULL, data BLOB NOT NULL,
    checksum INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS entries (
    position INTEGER PRIMARY KEY, term INTEGER NOT NULL, kind INTEGER NOT NULL, data BLOB NOT NULL,
    checksum INTEGER NOT NULL);
"""


class RaftStore(Protocol):
    """Durable Raft state. Blocking; called from one thread at a time."""

    def load(self) -> StoredState:
        """All that is stored; a new store draws its id. StoreError where it cannot be read."""

    def persist(self, persist: Persist) -> None:
        """Makes the write durable as a whole, or raises StoreError. May be tried again with the same write."""

    def close(self) -> None: ...


class SqliteRaftStore:
    """`RaftStore` in one SQLite file.

    Invariant: after any crash the file holds exactly the writes whose `persist` returned, and perhaps one more.
    """

    def __init__(self, path: str, new_store_id: Callable[[], UUID]) -> None:
        self._file = SqliteFile(path, _SCHEMA, FORMAT, self._upgrade)
        self._new_store_id = new_store_id

    def load(self) -> StoredState:
        """What is from before there were clusters is a snapshot with no members: whoever starts on it has to be one."""
        with self._file.reading() as connection:
            try:
                store_id = self._store_id(connection)
                stored = StoredState(store_id, _hard_state(connection), _snapshot(connection), _entries(connection))
            except (ValueError, TypeError, struct.error) as error:
                raise sqlite3.DatabaseError(f"a row cannot be read: {error}") from error
            _check_end(stored, _last_position(connection))
            return stored

    def persist(self, persist: Persist) -> None:
        state = persist.hard_state
        numbers = (state.term, NO_VOTE if state.vote is None else state.vote, state.commit)
        with self._file.transaction() as connection:
            row = (0, *numbers, row_checksum(numbers))
            connection.execute("INSERT OR REPLACE INTO hard_state VALUES (?, ?, ?, ?, ?)", row)
            if persist.snapshot is not None:
                connection.execute("DELETE FROM snapshot")
                connection.execute("INSERT INTO snapshot VALUES (?, ?, ?, ?, ?)", _snapshot_row(persist.snapshot))
            if persist.drop_before is not None:
                connection.execute("DELETE FROM entries WHERE position < ?", (persist.drop_before,))
            if persist.cut_from is not None:
                connection.execute("DELETE FROM entries WHERE position >= ?", (persist.cut_from,))
            if persist.entries:
                self._append(connection, persist.entries)

    def close(self) -> None:
        self._file.close()

    def _append(self, connection: sqlite3.Connection, entries: tuple[Entry, ...]) -> None:
        first = entries[0].index
        # A write that reported an error may have reached the disk all the same, and comes again.
        connection.execute("DELETE FROM entries WHERE position >= ?", (first,))
        last = _last_position(connection)
        if last != first - 1:
            raise StoreError(f"{self._file.path} ends at entry {last}, not {first - 1}: restart the node")
        connection.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", map(_entry_row, entries))

    def _upgrade(self, connection: sqlite3.Connection) -> None:
        if not is_former(connection):
            return
        image = set_aside(connection)
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
        if image is not None:
            numbers = (FIRST, NO_VOTE, FIRST)
            connection.execute("INSERT INTO hard_state VALUES (0, ?, ?, ?, ?)", (*numbers, row_checksum(numbers)))
            row = _snapshot_row(Snapshot(FIRST, FIRST, Membership(), image))
            connection.execute("INSERT INTO snapshot VALUES (?, ?, ?, ?, ?)", row)

    def _store_id(self, connection: sqlite3.Connection) -> UUID:
        row = connection.execute("SELECT value FROM settings WHERE name = 'store_id'").fetchone()
        if row is not None:
            return UUID(row[0])
        store_id = self._new_store_id()
        with self._file.transaction():
            connection.execute("INSERT INTO settings VALUES ('store_id', ?)", (str(store_id),))
        return store_id


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


def is_full(error: Exception) -> bool:
    """Whether a write failed for want of room on the disk."""
    cause = error.__cause__
    if isinstance(cause, sqlite3.Error):
        return getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


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


def _hard_state(connection: sqlite3.Connection) -> HardState:
    row = connection.execute("SELECT term, vote, commit_index, checksum FROM hard_state").fetchone()
    if row is None:
        return HardState()
    term, vote, commit, checksum = row
    _check(checksum, row_checksum((term, vote, commit)), "the term and vote")
    return HardState(term, None if vote == NO_VOTE else vote, commit)


def _snapshot_row(snapshot: Snapshot) -> tuple[int, int, bytes, bytes, int]:
    membership = encode_membership(snapshot.membership)
    checksum = row_checksum((snapshot.index, snapshot.term), membership, snapshot.data)
    return snapshot.index, snapshot.term, membership, snapshot.data, checksum


def _snapshot(connection: sqlite3.Connection) -> Snapshot | None:
    row = connection.execute("SELECT position, term, membership, data, checksum FROM snapshot").fetchone()
    if row is None:
        return None
    index, term, membership, data, checksum = row
    _check(checksum, row_checksum((index, term), membership, data), f"snapshot {index}")
    return Snapshot(index, term, decode_membership(membership), data)


def _entry_row(entry: Entry) -> tuple[int, int, int, bytes, int]:
    checksum = row_checksum((entry.index, entry.term, entry.kind), entry.data)
    return entry.index, entry.term, int(entry.kind), entry.data, checksum


def _entries(connection: sqlite3.Connection) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    for index, term, kind, data, checksum in connection.execute("SELECT * FROM entries ORDER BY position"):
        if entries and index != entries[-1].index + 1:
            raise sqlite3.DatabaseError(f"entry {entries[-1].index + 1} is missing")
        _check(checksum, row_checksum((index, term, kind), data), f"entry {index}")
        entries.append(Entry(index, term, EntryKind(kind), data))
    first = _last_snapshot(connection) + 1
    if entries and entries[0].index > first:
        raise sqlite3.DatabaseError(f"entry {first} is missing")
    return tuple(entries)


def _check_end(stored: StoredState, last: int) -> None:
    """Neither the snapshot nor what was known to be committed may reach beyond the log."""
    expected = max(stored.hard_state.commit, stored.snapshot.index if stored.snapshot else 0)
    if last < expected:
        raise sqlite3.DatabaseError(f"the log ends at entry {last}, before {expected}")


def _last_snapshot(connection: sqlite3.Connection) -> int:
    (position,) = connection.execute("SELECT coalesce(max(position), 0) FROM snapshot").fetchone()
    return int(position)


def _last_position(connection: sqlite3.Connection) -> int:
    (last,) = connection.execute("SELECT max(position) FROM entries").fetchone()
    return _last_snapshot(connection) if last is None else int(last)


def _check(checksum: object, expected: int, what: str) -> None:
    if checksum != expected:
        raise sqlite3.DatabaseError(f"{what} fails its checksum")
