"""A SQLite file that a node keeps state in: opened and checked, written by whole transactions, each with a sync.

    settings  name TEXT PRIMARY KEY, value      `format` is the layout's number; the rest is the owner's

SQLite guards its write-ahead log with checksums but not its pages, so owners keep one per row, by `row_checksum`.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from crc32c import crc32c

_SETTINGS = "CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;"


class StoreError(Exception):
    """The file cannot be read or written; the message is one line for people."""


class SqliteFile:
    """One file, one connection. Blocking; called from one thread at a time, though not always the same one.

    Invariant: when a transaction has returned, what it wrote survives any crash; otherwise none of it counts.
    """

    def __init__(
        self,
        path: str,
        schema: str,
        layout_format: int,
        upgrade: Callable[[sqlite3.Connection], None] = lambda connection: None,
    ) -> None:
        """`upgrade` may change a file of an older layout, before the schema is laid over it; in one transaction."""
        self.path = path
        self._upgrade = upgrade
        self._schema = schema
        self._format = layout_format
        self._connection: sqlite3.Connection | None = None

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Opens the file if need be, and says of any damage which file has it."""
        try:
            yield self._open()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            # The latter where SQLite quotes what it found in the file.
            raise StoreError(
                f"{self.path} is damaged or cannot be opened ({one_line(error)}): "
                "remove it, and a node of a cluster joins again with its logs; for a node alone, run "
                "`chronik cluster restore-metadata`"
            ) from error

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, and durable at its end."""
        try:
            connection = self._open()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise StoreError(f"{self.path} cannot be written: {one_line(error)}") from error

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
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
        connection.execute("BEGIN IMMEDIATE")
        try:
            self._upgrade(connection)
            for statement in (_SETTINGS + self._schema).split(";"):
                connection.execute(statement)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        connection.execute("INSERT OR IGNORE INTO settings VALUES ('format', ?)", (self._format,))
        (found,) = connection.execute("SELECT value FROM settings WHERE name = 'format'").fetchone()
        if found != self._format:
            raise StoreError(f"{self.path} has format {found}, this version reads {self._format}: use a newer version")


def one_line(error: Exception) -> str:
    """SQLite quotes statements as they are written."""
    return " ".join(str(error).split())


def row_checksum(numbers: tuple[int, ...], *blobs: bytes) -> int:
    """The CRC32C of the numbers (8 bytes each, big-endian), then each blob after its length (as one more number)."""
    checksum = crc32c(struct.pack(f">{len(numbers)}q", *numbers))
    for blob in blobs:
        checksum = crc32c(blob, crc32c(struct.pack(">q", len(blob)), checksum))
    return checksum
