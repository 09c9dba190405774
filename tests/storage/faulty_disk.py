"""An in-memory disk that loses unsynced data, tears writes, fills up, fails and crashes as a test requests.

Like a kernel, it keeps the cached and the durable content of each file, and the visible and the durable names of each
folder. `kill` ends the process (the cache survives); `power_loss` ends the machine.
"""

import errno
import os
from collections.abc import Callable, Sequence
from random import Random

from chronik.storage.disk import Buffer, DiskSpace


class Crash(BaseException):
    """The process ends here. Not an Exception: no handler may catch it and continue."""


class Inode:
    def __init__(self) -> None:
        self.cached = bytearray()
        self.durable = bytearray()
        self.pending: list[tuple[int, bytes] | int] = []
        """Writes (offset, data) and truncations (size) since the last sync."""

    def apply(self, content: bytearray, change: tuple[int, bytes] | int, length: int | None = None) -> None:
        if isinstance(change, int):
            if change < len(content):
                del content[change:]
            else:
                content.extend(bytes(change - len(content)))
            return
        at, data = change
        data = data[:length]
        if at > len(content):
            content.extend(bytes(at - len(content)))
        content[at : at + len(data)] = data

    def change(self, change: tuple[int, bytes] | int) -> None:
        self.apply(self.cached, change)
        self.pending.append(change)

    def sync(self) -> None:
        self.durable = bytearray(self.cached)
        self.pending = []

    def lose_power(self, random: Random) -> None:
        kept = random.randint(0, len(self.pending))
        for change in self.pending[:kept]:
            self.apply(self.durable, change)
        if kept < len(self.pending) and not isinstance(self.pending[kept], int):
            at, data = self.pending[kept]  # type: ignore[misc]
            self.apply(self.durable, (at, data), random.randint(0, len(data)))
        self.cached = bytearray(self.durable)
        self.pending = []


class FaultyFile:
    def __init__(self, disk: "FaultyDisk", inode: Inode, path: str) -> None:
        self._disk = disk
        self._inode = inode
        self._path = path
        self._incarnation = disk.incarnation
        self._closed = False
        disk.open_files += 1

    def _check(self) -> None:
        assert not self._closed, f"{self._path} is used after it was closed"
        assert self._incarnation == self._disk.incarnation, "a file of a dead process is used"

    def pwrite(self, data: Buffer, at: int) -> None:
        self._check()
        content = bytes(data)
        try:
            self._disk.step("pwrite", self._path)
        except OSError:
            # A failed write leaves its first half on disk.
            self._inode.change((at, content[: len(content) // 2]))
            raise
        grown = max(0, at + len(content) - len(self._inode.cached))
        room = self._disk.capacity_bytes - self._disk.used_bytes()
        if grown > room:
            self._inode.change((at, content[: max(0, len(content) - grown + room)]))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._inode.change((at, content))

    def pwrite_durably(self, parts: Sequence[Buffer], at: int) -> None:
        self.pwrite(b"".join(parts), at)
        self.datasync()

    def pread(self, at: int, size: int) -> bytes:
        self._check()
        self._disk.reads += 1
        return bytes(self._inode.cached[at : at + size])

    def pread_cached(self, at: int, size: int) -> bytes | None:
        return self.pread(at, size) if self._disk.is_warm else None

    def pread_once(self, at: int, size: int) -> bytes:
        return self.pread(at, size)

    def datasync(self) -> None:
        self._check()
        self._disk.step("datasync", self._path)
        self._inode.sync()

    def size(self) -> int:
        return len(self._inode.cached)

    def truncate(self, size: int) -> None:
        self._check()
        self._disk.step("truncate", self._path)
        self._inode.change(size)

    def allocate(self, size: int) -> None:
        self._check()
        self._disk.step("allocate", self._path)
        if size <= len(self._inode.cached):
            return
        if size - len(self._inode.cached) > self._disk.capacity_bytes - self._disk.used_bytes():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._inode.change(size)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._disk.open_files -= 1


class FaultyDisk:
    """Set `crash_at` to end the process at that step, `fail` to make chosen steps fail."""

    def __init__(self) -> None:
        self.names: dict[str, Inode] = {}
        self.folders: dict[str, None] = {"/": None}
        self.capacity_bytes = 1 << 40
        self.is_warm = True
        self.incarnation = 0
        self.steps = 0
        self.reads = 0
        self.open_files = 0
        self.crash_at: int | None = None
        self.fail: Callable[[str, str], int | None] = lambda operation, path: None
        """Return the errno to fail with for an operation and its path, or None."""
        self._durable_names: dict[str, Inode] = {}
        self._journal: dict[str, list[tuple[str, str, Inode | None]]] = {}

    # -- faults --------------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Act as SIGKILL: written data survives."""
        self.incarnation += 1
        self.open_files = 0
        self.crash_at = None

    def power_loss(self, random: Random) -> None:
        """Lose unsynced data, except a random part that the kernel had already written back."""
        self.kill()
        for folder in sorted(self._journal):
            journal = self._journal[folder]
            self._settle(folder, random.randint(0, len(journal)))
        self.names = dict(self._durable_names)
        self._journal = {}
        for inode in self.names.values():
            inode.lose_power(random)

    def step(self, operation: str, path: str) -> None:
        if self.crash_at is not None and self.steps >= self.crash_at:
            raise Crash
        self.steps += 1
        code = self.fail(operation, path)
        if code is not None:
            raise OSError(code, os.strerror(code))

    def used_bytes(self) -> int:
        return sum(len(inode.cached) for inode in self.names.values())

    def content(self, path: str) -> bytearray:
        """Return the file's visible content, which a test may damage in place."""
        return self.names[path].cached

    # -- Disk ----------------------------------------------------------------------------------------------------------

    def open(self, path: str, create: bool = False) -> FaultyFile:
        if path not in self.names:
            if not create:
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            self.step("create", path)
            self.names[path] = Inode()
            self._log(path, "link", self.names[path])
        return FaultyFile(self, self.names[path], path)

    def open_private(self, path: str, create: bool = False) -> FaultyFile:
        return self.open(path, create)

    def listdir(self, path: str) -> list[str]:
        prefix = path + "/"
        names = [name[len(prefix) :] for name in [*self.names, *self.folders] if name.startswith(prefix)]
        return sorted({name.split("/")[0] for name in names})

    def mkdir(self, path: str) -> None:
        parts = path.strip("/").split("/")
        for count in range(1, len(parts) + 1):
            self.folders["/" + "/".join(parts[:count])] = None

    def remove(self, path: str) -> None:
        self.step("remove", path)
        if path not in self.names:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        del self.names[path]
        self._log(path, "unlink", None)

    def rename(self, old: str, new: str) -> None:
        self.step("rename", new)
        if old in self.folders:
            self.folders[new] = None
            # At once durable, with the names in it.
            for names in (self.names, self._durable_names):
                for name in [*names]:
                    if name.startswith(old + "/"):
                        names[new + name[len(old) :]] = names.pop(name)
            self._journal.pop(old, None)
            for name in [*self.folders]:
                if name == old or name.startswith(old + "/"):
                    del self.folders[name]
            return
        if old not in self.names:
            raise FileNotFoundError(errno.ENOENT, "no such file", old)
        inode = self.names.pop(old)
        self.names[new] = inode
        if (folder := old.rpartition("/")[0]) != new.rpartition("/")[0]:
            # One journal orders the changes of both folders.
            self._settle(folder, len(self._journal.get(folder, ())))
            self._journal[folder] = []
        self._log(new, "rename " + old, inode)

    def sync_dir(self, path: str) -> None:
        self.step("sync_dir", path)
        self._settle(path, len(self._journal.get(path, ())))
        self._journal[path] = []

    def exists(self, path: str) -> bool:
        return path in self.names or path in self.folders

    def size(self, path: str) -> int:
        if path not in self.names:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return len(self.names[path].cached)

    def rmtree(self, path: str) -> None:
        self.step("rmtree", path)
        for names in (self.names, self._durable_names):
            for name in [*names]:
                if name.startswith(path + "/"):
                    del names[name]
        self._journal.pop(path, None)
        self.folders = {name: None for name in self.folders if name != path and not name.startswith(path + "/")}

    def space(self, path: str) -> DiskSpace:
        return DiskSpace(self.capacity_bytes, self.capacity_bytes - self.used_bytes())

    def lock(self, path: str) -> FaultyFile:
        return self.open(path, create=True)

    def _log(self, path: str, what: str, inode: Inode | None) -> None:
        self._journal.setdefault(path.rpartition("/")[0], []).append((path, what, inode))

    def _settle(self, folder: str, count: int) -> None:
        """Make the first `count` name changes durable: a folder's changes are journaled in order."""
        for path, what, inode in self._journal.get(folder, [])[:count]:
            if what.startswith("rename "):
                self._durable_names.pop(what.removeprefix("rename "), None)
            if inode is None:
                self._durable_names.pop(path, None)
            else:
                self._durable_names[path] = inode
