"""A Raft node's term, vote, log and snapshot in a SQLite database, `metadata.db`. Each write is synced.

    settings    format = 1, store_id = the store's own id (a UUID as text), generated when the file was created
    hard_state  slot INTEGER PRIMARY KEY = 0, term, vote (-1: none), commit_index, checksum
    snapshot    position INTEGER PRIMARY KEY, term, membership BLOB, data BLOB, checksum        at most one row
    entries     position INTEGER PRIMARY KEY, term, kind, data BLOB, checksum                   without a gap

`position` is the entry's index, since `index` is an SQL keyword. `membership` is the msgpack of `raft.membership`.
Checksums are `row_checksum` over the row's numbers in the order above, then its blobs: SQLite protects its write-ahead
log with checksums, but not its pages.
"""

from __future__ import annotations

import errno
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import UUID

from crc32c import crc32c

from chronik.raft.membership import decode_membership, encode_membership
from chronik.raft.store import Entry, EntryKind, HardState, Persist, Snapshot, StoredState, StoreError

FORMAT = 1
NO_VOTE = -1
FIRST = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
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


class SqliteRaftStore:
    """`RaftStore` in one SQLite file with one connection. Called from one thread at a time, not always the same one.

    Invariant: after any crash the file holds exactly the writes whose `persist` returned, and perhaps one more.
    """

    def __init__(self, path: str, new_store_id: Callable[[], UUID]) -> None:
        self._path = path
        self._new_store_id = new_store_id
        self._connection: sqlite3.Connection | None = None

    def load(self) -> StoredState:
        try:
            connection = self._open()
            try:
                store_id = self._store_id(connection)
                stored = StoredState(store_id, _hard_state(connection), _snapshot(connection), _entries(connection))
            except (ValueError, TypeError, struct.error) as error:
                raise sqlite3.DatabaseError(f"a row cannot be read: {error}") from error
            last = _last_position(connection)
            expected = max(stored.hard_state.commit, stored.snapshot.index if stored.snapshot else 0)
            if last < expected:
                raise sqlite3.DatabaseError(f"the log ends at entry {last}, before {expected}")
            return stored
        except (sqlite3.Error, UnicodeDecodeError) as error:
            # UnicodeDecodeError occurs when SQLite quotes damaged text from the file.
            raise StoreError(
                f"{self._path} is damaged or cannot be opened ({one_line(error)}): "
                "remove it; a node with peers then rejoins its cluster with its logs, a single node needs "
                "`chronik cluster restore-metadata`"
            ) from error

    def persist(self, persist: Persist) -> None:
        state = persist.hard_state
        numbers = (state.term, NO_VOTE if state.vote is None else state.vote, state.commit)
        with self._transaction() as connection:
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
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run an atomic transaction that is durable when the block ends."""
        try:
            connection = self._open()
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
        except sqlite3.Error as error:
            raise StoreError(f"{self._path} cannot be written: {one_line(error)}") from error

    def _append(self, connection: sqlite3.Connection, entries: tuple[Entry, ...]) -> None:
        first = entries[0].index
        # A write that reported an error may still have reached the disk; it is retried.
        connection.execute("DELETE FROM entries WHERE position >= ?", (first,))
        last = _last_position(connection)
        if last != first - 1:
            raise StoreError(f"{self._path} ends at entry {last}, not {first - 1}: restart the node")
        connection.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", map(_entry_row, entries))

    def _store_id(self, connection: sqlite3.Connection) -> UUID:
        row = connection.execute("SELECT value FROM settings WHERE name = 'store_id'").fetchone()
        if row is not None:
            return UUID(row[0])
        store_id = self._new_store_id()
        with self._transaction():
            connection.execute("INSERT INTO settings VALUES ('store_id', ?)", (str(store_id),))
        return store_id

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            try:
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        report = [row[0] for row in connection.execute("PRAGMA quick_check(1)")]
        if report != ["ok"]:
            raise sqlite3.DatabaseError(report[0])
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
        connection.execute("INSERT OR IGNORE INTO settings VALUES ('format', ?)", (FORMAT,))
        (version,) = connection.execute("SELECT value FROM settings WHERE name = 'format'").fetchone()
        if version != FORMAT:
            raise StoreError(f"{self._path} has format {version}, this version reads {FORMAT}: use a newer version")


def is_full(error: Exception) -> bool:
    """Return whether a write failed because the disk is full."""
    cause = error.__cause__
    if isinstance(cause, sqlite3.Error):
        return getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


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


def _last_snapshot(connection: sqlite3.Connection) -> int:
    (position,) = connection.execute("SELECT coalesce(max(position), 0) FROM snapshot").fetchone()
    return int(position)


def _last_position(connection: sqlite3.Connection) -> int:
    (last,) = connection.execute("SELECT max(position) FROM entries").fetchone()
    return _last_snapshot(connection) if last is None else int(last)


def _check(checksum: object, expected: int, what: str) -> None:
    if checksum != expected:
        raise sqlite3.DatabaseError(f"{what} fails its checksum")


def one_line(error: Exception) -> str:
    """Return the error text on one line: SQLite quotes multi-line statements."""
    return " ".join(str(error).split())


def row_checksum(numbers: tuple[int, ...], *blobs: bytes) -> int:
    """Return the CRC32C of the numbers (8 bytes each, big-endian), then of each blob after its 8-byte length."""
    checksum = crc32c(struct.pack(f">{len(numbers)}q", *numbers))
    for blob in blobs:
        checksum = crc32c(blob, crc32c(struct.pack(">q", len(blob)), checksum))
    return checksum
