"""A `MetadataStore` on the simulated disk, so that its durability follows the same crash rules as the logs.

    metadata.db        frames, one after the other
    frame              size int32 of what follows the CRC, crc32c uint32 over that, then
                       version int64 of the first command, count int32, and for each command: size int32, bytes
    metadata.db.snap   the snapshot, replaced as a whole: crc32c uint32, version int64, image

A frame is one `append`: all of it counts or none. What follows the last whole frame is cut off at the next opening.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

from crc32c import crc32c

from chronik.node.metadata_store import MetadataStoreError
from chronik.storage.disk import Disk, File, read_file, write_file_atomic

_FRAME = Struct(">iI")
_START = Struct(">qi")
_SIZE = Struct(">i")
_SNAPSHOT = Struct(">Iq")


class DiskMetadataStore:
    """Invariant: after any crash the store holds every command whose `append` returned, in order and without a gap."""

    def __init__(self, disk: Disk, path: str) -> None:
        self.path = path
        self._disk = disk
        self._file: File | None = None
        self._end = 0
        self._last_version = 0

    def load(self) -> tuple[bytes | None, list[bytes]]:
        try:
            return self._load()
        except OSError as error:
            raise MetadataStoreError(f"{self.path} cannot be opened: {error}") from error

    def _load(self) -> tuple[bytes | None, list[bytes]]:
        snapshot: bytes | None = None
        covered = 0
        data = read_file(self._disk, f"{self.path}.snap")
        if data is not None:
            crc, covered = _SNAPSHOT.unpack_from(data)
            snapshot = data[_SNAPSHOT.size :]
            if crc != crc32c(data[4:]):
                raise MetadataStoreError(f"{self.path}.snap is damaged")
        file = self._file = self._disk.open(self.path, create=True)
        self._disk.sync_dir(self.path.rpartition("/")[0])
        content = file.pread(0, file.size())
        commands: list[bytes] = []
        at, version = 0, covered
        while at + _FRAME.size <= len(content):
            size, crc = _FRAME.unpack_from(content, at)
            body = content[at + _FRAME.size : at + _FRAME.size + size]
            if size < _START.size or len(body) < size or crc32c(body) != crc:
                break
            first, framed = _read_frame(body)
            for number, command in enumerate(framed, first):
                if number == version + 1:
                    commands.append(command)
                    version = number
                elif number > version:
                    raise MetadataStoreError(f"{self.path} lacks command {version + 1}")
            at += _FRAME.size + size
        if at < len(content):
            file.truncate(at)
        # What was read may be in the page cache only; from here on it counts.
        file.datasync()
        self._end, self._last_version = at, version
        return snapshot, commands

    def append(self, version: int, commands: Sequence[bytes]) -> None:
        if self._file is None or version != self._last_version + 1:
            raise MetadataStoreError(f"{self.path} ends at command {self._last_version}: restart the node")
        body = _START.pack(version, len(commands)) + b"".join(_SIZE.pack(len(each)) + each for each in commands)
        frame = _FRAME.pack(len(body), crc32c(body)) + body
        is_written = False
        try:
            self._file.pwrite(frame, self._end)
            is_written = True
            self._file.datasync()
        except OSError as error:
            if is_written:
                self._last_version = -1  # nobody knows what is durable: only a new start can tell
            else:
                self._file.truncate(self._end)
            raise MetadataStoreError(f"{self.path} cannot be written: {error}") from error
        self._end += len(frame)
        self._last_version = version + len(commands) - 1

    def replace_by_snapshot(self, version: int, image: bytes) -> None:
        """The frames that the snapshot covers go with the next opening; until then they do no harm."""
        body = _SNAPSHOT.pack(0, version)[4:] + image
        try:
            write_file_atomic(self._disk, f"{self.path}.snap", _crc(body) + body)
        except OSError as error:
            raise MetadataStoreError(f"{self.path}.snap cannot be written: {error}") from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _crc(body: bytes) -> bytes:
    return Struct(">I").pack(crc32c(body))


def _read_frame(body: bytes) -> tuple[int, list[bytes]]:
    first, count = _START.unpack_from(body)
    at = _START.size
    commands: list[bytes] = []
    for _ in range(count):
        (size,) = _SIZE.unpack_from(body, at)
        commands.append(body[at + _SIZE.size : at + _SIZE.size + size])
        at += _SIZE.size + size
    return first, commands
