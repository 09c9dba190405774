"""The metadata of nodes from before there were clusters: in the same file, as a snapshot and the commands after it.

    snapshot  version INTEGER PRIMARY KEY, image BLOB, checksum INTEGER     one row: the image after `version` commands
    commands  version INTEGER PRIMARY KEY, command BLOB, checksum INTEGER   the commands after it, without a gap

A checksum is the CRC32C of the version (8 bytes, big-endian) followed by the blob.
"""

from __future__ import annotations

import sqlite3
import struct

import msgspec
from crc32c import crc32c

from chronik.metadata.apply import apply
from chronik.metadata.commands import decode_command
from chronik.metadata.image import ClusterImage, decode_image, encode_image
from chronik.wire.errors import KafkaError


def is_former(connection: sqlite3.Connection) -> bool:
    """Whether the file was written before there were clusters."""
    columns = [row[1] for row in connection.execute("PRAGMA table_info(snapshot)")]
    return "version" in columns


def set_aside(connection: sqlite3.Connection) -> bytes | None:
    """The image that the file leads to; None where nothing was ever agreed on. The tables stay under other names.

    For a transaction. Raises sqlite3.DatabaseError where the file is damaged.
    """
    try:
        image = _image(connection)
    except (msgspec.MsgspecError, KafkaError, ValueError) as error:
        raise sqlite3.DatabaseError(f"metadata from before there were clusters cannot be read: {error}") from error
    connection.execute("ALTER TABLE snapshot RENAME TO former_snapshot")
    connection.execute("ALTER TABLE commands RENAME TO former_commands")
    return encode_image(image) if image.version else None


def _image(connection: sqlite3.Connection) -> ClusterImage:
    image = ClusterImage()
    for version, data, checksum in connection.execute("SELECT version, image, checksum FROM snapshot"):
        _check(version, data, checksum, "snapshot")
        image = decode_image(data)
    for version, data, checksum in connection.execute(
        "SELECT version, command, checksum FROM commands ORDER BY version"
    ):
        if version != image.version + 1:
            raise sqlite3.DatabaseError(f"command {image.version + 1} is missing")
        _check(version, data, checksum, "command")
        image, _ = apply(image, decode_command(data))
    return image


def _check(version: int, data: object, checksum: object, what: str) -> None:
    if not isinstance(data, bytes) or crc32c(data, crc32c(struct.pack(">q", version))) != checksum:
        raise sqlite3.DatabaseError(f"{what} {version} fails its checksum")
