"""The interface to the operating system: storage accesses every file through a `Disk`.

`RealDisk` is the machine's own file system. The simulator and the tests use disks that lose unsynced data, tear writes,
fill up and fail. All calls may block; an `OSError` carries the system's errno.
"""

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Final, NamedTuple, Protocol, TypeAlias

from chronik.wire.errors import ErrorCode, KafkaError

Buffer: TypeAlias = bytes | bytearray | memoryview

_PARTS_MAX: Final = 1024
"""Buffers in one call of the system."""
_UNSUPPORTED: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_FULL: Final = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_PRIVATE_MODE: Final = 0o600
_OTHERS: Final = 0o077


class NotPrivate(PermissionError):
    """Users other than the owner may read or write the file."""


class StorageError(KafkaError):
    """The log cannot be written now; it contains no part of the append."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.kafka_storage_error, message)


class StorageFull(StorageError):
    """The disk, quota or file size limit is reached. The log accepts appends again when there is space."""


def storage_error(operation: str, error: OSError) -> StorageError:
    """Return the error that a client receives for an `OSError`."""
    kind = StorageFull if error.errno in _FULL else StorageError
    return kind(f"{operation}: {error.strerror or error}")


class DiskSpace(NamedTuple):
    """The total and available space of a folder's file system."""

    total_bytes: int
    free_bytes: int


class File(Protocol):
    """An open file. Positions are absolute: there is no cursor, so threads may share a file."""

    def pwrite(self, data: Buffer, at: int) -> None:
        """Write all of `data` at `at`, or raise; after an error any part of it may have been written."""

    def pwrite_durably(self, parts: Sequence[Buffer], at: int) -> None:
        """Write these parts one after another and make them durable; after an error any part may be written."""

    def pread(self, at: int, size: int) -> bytes:
        """Return up to `size` bytes from `at`; fewer only at the end of the file."""

    def pread_cached(self, at: int, size: int) -> bytes | bytearray | None:
        """Like `pread`, but return None if the read would wait for the device."""

    def pread_once(self, at: int, size: int) -> bytes | bytearray:
        """Like `pread`, for data that will not be read again soon: data read from the device is not kept in memory."""

    def datasync(self) -> None:
        """Make the written data and the file's size durable. After an error it is unknown which data is durable."""

    def size(self) -> int: ...

    def truncate(self, size: int) -> None: ...

    def allocate(self, size: int) -> None:
        """Extend the file with zeros to `size` and reserve its blocks; do nothing if that is not supported."""

    def close(self) -> None: ...


class Disk(Protocol):
    """A file system. A name is durable after `sync_dir` of its folder, content after the file's `datasync`."""

    def open(self, path: str, create: bool = False) -> File:
        """Open for reading and writing; with `create`, create an empty file if there is none."""

    def open_private(self, path: str, create: bool = False) -> File:
        """Open a file that only its owner may use, for reading; `create` is as for `open`, with private permissions.

        Raises NotPrivate if other users have any permission.
        """

    def listdir(self, path: str) -> list[str]:
        """Return the names in a folder, sorted."""

    def mkdir(self, path: str) -> None:
        """Create a folder and its parents, if they are missing."""

    def remove(self, path: str) -> None: ...

    def rename(self, old: str, new: str) -> None:
        """Replace `new` by `old` atomically."""

    def sync_dir(self, path: str) -> None: ...

    def exists(self, path: str) -> bool: ...

    def size(self, path: str) -> int: ...

    def rmtree(self, path: str) -> None: ...

    def space(self, path: str) -> DiskSpace: ...

    def lock(self, path: str) -> File:
        """Open and lock `path` against all other processes until it is closed; BlockingIOError if it is locked."""


class RealFile:
    """A file of the machine's own file system."""

    __slots__ = ("_disk", "_fd")

    def __init__(self, disk: "RealDisk", fd: int) -> None:
        self._disk = disk
        self._fd = fd

    def pwrite(self, data: Buffer, at: int) -> None:
        written = os.pwrite(self._fd, data, at)
        if written == len(data):
            return
        rest = memoryview(data)[written:]
        while len(rest):
            at += written
            written = os.pwrite(self._fd, rest, at)
            if written == 0:
                raise OSError(errno.EIO, "nothing was written")
            rest = rest[written:]

    def pwrite_durably(self, parts: Sequence[Buffer], at: int) -> None:
        written = 0
        if self._disk.can_write_durably and len(parts) <= _PARTS_MAX:
            # A thread waits for the interpreter after each call: so there is only one.
            try:
                written = os.pwritev(self._fd, parts, at, os.RWF_DSYNC)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                self._disk.can_write_durably = False
        rest = b"".join(parts)[written:] if written < sum([len(part) for part in parts]) else b""
        if rest:
            self.pwrite(rest, at + written)
            self.datasync()

    def pread(self, at: int, size: int) -> bytes:
        data = os.pread(self._fd, size, at)
        if len(data) == size or not data:
            return data
        parts = [data]
        got = len(data)
        while got < size:
            data = os.pread(self._fd, size - got, at + got)
            if not data:
                break
            parts.append(data)
            got += len(data)
        return b"".join(parts)

    def pread_cached(self, at: int, size: int) -> bytes | bytearray | None:
        if not self._disk.can_read_cached:
            return self.pread(at, size)
        buffer = bytearray(size)
        try:
            got = os.preadv(self._fd, [buffer], at, os.RWF_NOWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self._disk.can_read_cached = False
            return self.pread(at, size)
        if got == size:
            return buffer
        if at + got < self.size():
            return None
        del buffer[got:]
        return buffer

    def pread_once(self, at: int, size: int) -> bytes | bytearray:
        cached = self.pread_cached(at, size)
        if cached is not None:
            return cached
        data = self.pread(at, size)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, at, size, os.POSIX_FADV_DONTNEED)
        return data

    def datasync(self) -> None:
        os.fdatasync(self._fd)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def allocate(self, size: int) -> None:
        self._disk.allocate(self._fd, size)

    def close(self) -> None:
        fd = self.detach()
        if fd >= 0:
            os.close(fd)

    def detach(self) -> int:
        """Return the descriptor, which the caller now owns; -1 if the file is closed."""
        fd, self._fd = self._fd, -1
        return fd


class RealDisk:
    """The machine's own file system."""

    def __init__(self) -> None:
        self.can_read_cached = hasattr(os, "preadv") and hasattr(os, "RWF_NOWAIT")
        self.can_write_durably = hasattr(os, "pwritev") and hasattr(os, "RWF_DSYNC")
        # posix_fallocate writes to every block if the file system cannot allocate; this does not.
        libc = ctypes.CDLL(None, use_errno=True)
        self._fallocate = getattr(libc, "fallocate64", None)
        if self._fallocate is not None:
            self._fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

    def allocate(self, fd: int, size: int) -> None:
        if self._fallocate is None:
            return
        if self._fallocate(fd, 0, 0, size) != 0:
            code = ctypes.get_errno()
            if code in _UNSUPPORTED:
                self._fallocate = None
                return
            raise OSError(code, os.strerror(code))

    def open(self, path: str, create: bool = False) -> RealFile:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return RealFile(self, os.open(path, flags, 0o644))

    def open_private(self, path: str, create: bool = False) -> RealFile:
        # Open read-only if nothing is to be written: secrets are often mounted read-only.
        flags = os.O_CLOEXEC | (os.O_RDWR | os.O_CREAT if create else os.O_RDONLY)
        file = RealFile(self, os.open(path, flags, _PRIVATE_MODE))
        if os.fstat(file._fd).st_mode & _OTHERS:
            file.close()
            raise NotPrivate(errno.EACCES, "other users may use it", path)
        return file

    def listdir(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def mkdir(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new)

    def sync_dir(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def rmtree(self, path: str) -> None:
        shutil.rmtree(path)

    def space(self, path: str) -> DiskSpace:
        stat = os.statvfs(path)
        return DiskSpace(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)

    def lock(self, path: str) -> RealFile:
        file = self.open(path, create=True)
        try:
            fcntl.flock(file._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise
        return file


def machine_boot_id() -> str:
    """Return an id that changes at each boot, which empties the page cache; empty if the system does not report it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot_id:
            return boot_id.read().strip()
    except OSError:
        return ""


def read_file(disk: Disk, path: str, *, private: bool = False) -> bytes | None:
    """Return the content of a small file; None if it does not exist. NotPrivate if `private` is set and it is not."""
    try:
        file = disk.open_private(path) if private else disk.open(path)
    except FileNotFoundError:
        return None
    with closing(file):
        return file.pread(0, file.size())


def write_file_atomic(disk: Disk, path: str, data: bytes, *, private: bool = False) -> None:
    """Replace a small file atomically and durably: after a crash it holds its old content or the new one, never a part.

    A `private` file is private from the moment it exists.
    """
    temporary = path + ".tmp"
    open_temporary = disk.open_private if private else disk.open
    with closing(open_temporary(temporary, create=True)) as file:
        file.truncate(0)
        file.pwrite(data, 0)
        file.datasync()
    disk.rename(temporary, path)
    disk.sync_dir(os.path.dirname(path))


def remove_files(disk: Disk, paths: Iterable[str]) -> None:
    """Remove the files in this order; skip those that do not exist."""
    for path in paths:
        if disk.exists(path):
            disk.remove(path)
