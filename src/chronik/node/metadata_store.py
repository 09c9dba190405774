"""The file that holds the metadata log: `metadata.db`, a SQLite database, written with a sync before each answer.

    settings  name TEXT PRIMARY KEY, value          format = 1
    snapshot  version INTEGER PRIMARY KEY, image BLOB, checksum INTEGER     one row: the image after `version` commands
    commands  version INTEGER PRIMARY KEY, command BLOB, checksum INTEGER   the commands after it, without a gap

`image` and `command` are the msgpack of `metadata.image` and `metadata.commands`; a checksum is the CRC32C of the
version (8 bytes, big-endian) followed by the blob. SQLite guards its write-ahead log but not its pages, hence ours.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Sequence
from typing import Protocol

from crc32c import crc32c

FORMAT = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS snapshot (version INTEGER PRIMARY KEY, image BLOB NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS commands (version INTEGER PRIMARY KEY, command BLOB NOT NULL, checksum INTEGER NOT NULL);
"""


class MetadataStoreError(Exception):
    """The store cannot be read or written; the message is one line for people."""


class MetadataStore(Protocol):
    """Durable commands. Blocking; called from one thread at a time."""

    @property
    def path(self) -> str: ...

    def load(self) -> tuple[bytes | None, list[bytes]]:
        """Opens the store: its snapshot, and the commands after it in order."""

    def append(self, version: int, commands: Sequence[bytes]) -> None:
        """Makes the commands durable together, the first of them as number `version`; all or none."""

    def replace_by_snapshot(self, version: int, image: bytes) -> None:
        """Stores the image after `version` commands and drops these."""

    def close(self) -> None: ...


class SqliteMetadataStore:
    """`MetadataStore` in one SQLite file.

    Invariant: after any crash the file holds every command whose `append` returned, in order and without a gap.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None

    def load(self) -> tuple[bytes | None, list[bytes]]:
        try:
            return self._load(self._open())
        except sqlite3.Error as error:
            raise MetadataStoreError(
                f"{self.path} is damaged or cannot be opened ({error}): "
                "restore it from a copy, or start with an empty data folder"
            ) from error

    def append(self, version: int, commands: Sequence[bytes]) -> None:
        connection = self._open()
        rows = [(number, data, _checksum(number, data)) for number, data in enumerate(commands, version)]
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                last = _last_version(connection)
                if last != version - 1:
                    # A commit that reported an error may have reached the disk all the same.
                    raise MetadataStoreError(f"{self.path} ends at command {last}, not {version - 1}: restart the node")
                connection.executemany("INSERT INTO commands VALUES (?, ?, ?)", rows)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise MetadataStoreError(f"{self.path} cannot be written: {error}") from error

    def replace_by_snapshot(self, version: int, image: bytes) -> None:
        connection = self._open()
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                connection.execute("DELETE FROM snapshot")
                connection.execute("INSERT INTO snapshot VALUES (?, ?, ?)", (version, image, _checksum(version, image)))
                connection.execute("DELETE FROM commands WHERE version <= ?", (version,))
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise MetadataStoreError(f"{self.path} cannot be written: {error}") from error

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            # Calls come one at a time, though from whichever thread of the executor is free.
            connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            self._connection = connection
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
        return self._connection

    def _load(self, connection: sqlite3.Connection) -> tuple[bytes | None, list[bytes]]:
        report = [row[0] for row in connection.execute("PRAGMA quick_check(1)")]
        if report != ["ok"]:
            raise sqlite3.DatabaseError(" ".join(str(report[0]).split()))
        connection.executescript(_SCHEMA)
        connection.execute("INSERT OR IGNORE INTO settings VALUES ('format', ?)", (FORMAT,))
        (found,) = connection.execute("SELECT value FROM settings WHERE name = 'format'").fetchone()
        if found != FORMAT:
            raise MetadataStoreError(
                f"{self.path} has format {found}, this version reads {FORMAT}: use a newer version"
            )
        snapshot: bytes | None = None
        expected = 1
        for version, image, checksum in connection.execute("SELECT version, image, checksum FROM snapshot"):
            _check(version, image, checksum, "snapshot")
            snapshot, expected = image, version + 1
        commands: list[bytes] = []
        for version, command, checksum in connection.execute("SELECT * FROM commands ORDER BY version"):
            if version != expected:
                raise sqlite3.DatabaseError(f"command {expected} is missing")
            _check(version, command, checksum, "command")
            commands.append(command)
            expected += 1
        return snapshot, commands


def _last_version(connection: sqlite3.Connection) -> int:
    (last,) = connection.execute(
        "SELECT coalesce((SELECT max(version) FROM commands), (SELECT max(version) FROM snapshot), 0)"
    ).fetchone()
    return int(last)


def _checksum(version: int, data: bytes) -> int:
    return crc32c(data, crc32c(struct.pack(">q", version)))


def _check(version: int, data: object, checksum: object, what: str) -> None:
    if not isinstance(data, bytes) or _checksum(version, data) != checksum:
        raise sqlite3.DatabaseError(f"{what} {version} fails its checksum")
