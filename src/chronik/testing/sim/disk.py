"""A machine's disk, and one process's view of it: `storage.disk.Disk` over a simulated tree of files.

Each operation takes time, may fail, and is a crash point of the process. In a dead process every operation raises
`Crashed`, so that code that runs while it unwinds changes nothing.

If the process has a `SteppedExecutor`, other code runs between the begin of an operation in a thread and its effect:
files and folders are looked up after that. A sync also takes time after its effect: it does not cover what is written
until it returns.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, NoReturn

from chronik.storage.disk import Buffer, DiskSpace
from chronik.testing.sim.tree import FileNode, FolderNode, Resize, Write

if TYPE_CHECKING:
    from chronik.testing.sim.host import Host, Process

SYNC_S_MIN = 20e-6
CALL_S = 3e-6
BYTE_S = 1e-9
UNLIMITED_BYTES = 1 << 40
SYNCS = frozenset(["disk.sync", "disk.sync_dir"])
WRITES = SYNCS | {
    "disk.create",
    "disk.mkdir",
    "disk.write",
    "disk.truncate",
    "disk.allocate",
    "disk.rename",
    "disk.remove",
}
"""The operations that a failing or hanging device affects."""


class SimDisk:
    """The device: its tree, its speed (drawn for each machine, reduced by faults), and its current faults."""

    def __init__(self, host: Host, machine: Random) -> None:
        self.usual_sync_s = machine.choice((200e-6, 1e-3, 4e-3, 12e-3))
        """Mean duration of a sync."""
        self.cold_share = machine.choice((0.0, 0.05, 0.3))
        """The share of reads that miss the page cache."""
        self.random = host.world.random(f"{host.name}:disk")
        self.slowness = 1.0
        self.root = FolderNode()
        self.capacity_bytes: int | None = None
        """None: unlimited."""
        self.sync_error_share = 0.0
        self.syncs_failed = 0
        self.is_failing = False
        """Every write and every sync fails with EIO."""
        self.hangs_until_s = 0.0
        """No executor job does its work before this world time."""
        self.holds_up: frozenset[str] = frozenset()
        """The operations that block the loop as well while the device hangs."""
        self.locks: dict[FileNode, Process] = {}
        self._host = host
        self._hung: list[Callable[[], None]] = []

    @property
    def sync_s(self) -> float:
        return self.usual_sync_s * self.slowness

    def fill(self, left_bytes: int) -> None:
        """Fill the device with other data until only `left_bytes` are free."""
        self.capacity_bytes = self.root.size_bytes() + left_bytes

    def make_room(self) -> None:
        self.capacity_bytes = None

    def lacks(self, more_bytes: int) -> int:
        """Return how many of `more_bytes` do not fit."""
        if self.capacity_bytes is None or more_bytes <= 0:
            return 0
        return max(0, self.root.size_bytes() + more_bytes - self.capacity_bytes)

    def hang(self, seconds: float, holds_up: frozenset[str]) -> None:
        """Block executor jobs for this long from now on."""
        self.hangs_until_s = self._host.world.now + seconds
        self.holds_up = holds_up
        self._host.world.after(seconds, self._answer_again)

    def _answer_again(self) -> None:
        if not self.is_hanging:
            self.heal()

    def heal(self) -> None:
        """End failures and hangs; blocked jobs resume."""
        self.is_failing = False
        self.hangs_until_s = 0.0
        self.holds_up = frozenset()
        hung, self._hung = self._hung, []
        for call in hung:
            self._host.world.after(0.0, call)

    @property
    def is_hanging(self) -> bool:
        return self._host.world.now < self.hangs_until_s

    def when_healed(self, call: Callable[[], None]) -> None:
        self._hung.append(call)

    def process_ended(self) -> None:
        self.locks.clear()
        self.root.forget_doubtful()


class ProcessDisk:
    """`Disk` for one process."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.device = process.host.disk
        self._world = process.world

    # -- common to all operations --------------------------------------------------------------------------------------

    def begin(self, operation: str, size_bytes: int = 0) -> None:
        """Charge the operation's time. The process may die here, before the operation."""
        self.process.check_alive()
        self._world.trace(operation, self.process.serial, size_bytes)
        self.process.charge((CALL_S + size_bytes * BYTE_S) * self.device.slowness)
        self.process.reached(operation)
        self.process.step()
        device = self.device
        if device.is_failing and operation in WRITES and operation != "disk.sync":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if operation in device.holds_up and not self._world.in_thread:
            self.process.loop.charge_until(device.hangs_until_s)

    def sync(self, operation: str) -> None:
        self.begin(operation)
        device = self.device
        self.process.charge(SYNC_S_MIN + device.random.expovariate(1.0) * device.sync_s)
        self.process.step(ends_within=True)

    def end(self, point: str) -> None:
        """Pass the time until the operation returns, and its crash point."""
        self.process.step()
        self.process.reached(point)

    def _folder(self, path: str) -> FolderNode:
        folder = self.device.root.folder(path)
        if folder is None:
            _no_such(path)
        return folder

    def _parent(self, path: str) -> tuple[FolderNode, str]:
        folder, _, name = path.rpartition("/")
        return self._folder(folder), name

    # -- Disk ----------------------------------------------------------------------------------------------------------

    def open(self, path: str, create: bool = False) -> SimFile:
        self.process.check_alive()
        folder, name = self._parent(path)
        node = folder.names.get(name)
        if node is None:
            if not create:
                _no_such(path)
            self.begin("disk.create")
            folder, name = self._parent(path)
            node = folder.names.get(name)
            if node is None:
                node = FileNode()
                folder.change(None, name, node)
        if not isinstance(node, FileNode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return SimFile(self, node, path)

    def open_private(self, path: str, create: bool = False) -> SimFile:
        return self.open(path, create)

    def listdir(self, path: str) -> list[str]:
        self.begin("disk.listdir")
        return sorted(self._folder(path).names)

    def mkdir(self, path: str) -> None:
        node = self.device.root
        for name in path.strip("/").split("/"):
            child = node.names.get(name)
            if child is None:
                self.begin("disk.mkdir")
                child = node.names.get(name)
                if child is None:
                    child = FolderNode()
                    node.change(None, name, child)
            if not isinstance(child, FolderNode):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            node = child

    def remove(self, path: str) -> None:
        self.begin("disk.remove")
        folder, name = self._parent(path)
        if not isinstance(folder.names.get(name), FileNode):
            _no_such(path)
        folder.change(name, None, None)
        self.end("disk.removed")

    def rename(self, old: str, new: str) -> None:
        self.begin("disk.rename")
        folder, old_name = self._parent(old)
        target, new_name = self._parent(new)
        node = folder.names.get(old_name)
        if node is None:
            _no_such(old)
        occupied = target.names.get(new_name)
        if isinstance(occupied, FolderNode) and occupied.names:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), new)
        if target is folder:
            folder.change(old_name, new_name, node)
        else:
            # A file system journals both folders in one transaction: after a power loss, one of them has the name.
            target.change(None, new_name, node)
            target.sync()
            folder.change(old_name, None, None)
        self.end("disk.renamed")

    def sync_dir(self, path: str) -> None:
        self.sync("disk.sync_dir")
        self._folder(path).sync()
        self.end("disk.synced_dir")

    def exists(self, path: str) -> bool:
        self.process.check_alive()
        parent, _, name = path.rpartition("/")
        folder = self.device.root.folder(parent)
        return folder is not None and name in folder.names

    def size(self, path: str) -> int:
        return self.open(path).size()

    def rmtree(self, path: str) -> None:
        folder = self._folder(path)
        for name in sorted(folder.names):
            if isinstance(folder.names.get(name), FolderNode):
                self.rmtree(f"{path}/{name}")
            else:
                self.begin("disk.remove")
                folder.change(name, None, None)
        parent, own_name = self._parent(path)
        self.begin("disk.remove")
        parent.change(own_name, None, None)

    def space(self, path: str) -> DiskSpace:
        capacity = UNLIMITED_BYTES if self.device.capacity_bytes is None else self.device.capacity_bytes
        return DiskSpace(capacity, max(0, capacity - self.device.root.size_bytes()))

    def lock(self, path: str) -> SimFile:
        file = self.open(path, create=True)
        if file.node in self.device.locks:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), path)
        self.device.locks[file.node] = self.process
        return file


class SimFile:
    """`File` for one process."""

    __slots__ = ("_disk", "_is_open", "_path", "node")

    def __init__(self, disk: ProcessDisk, node: FileNode, path: str) -> None:
        self.node = node
        self._disk = disk
        self._path = path
        self._is_open = True

    def _begin(self, operation: str, size_bytes: int = 0) -> None:
        self._check_open()
        self._disk.begin(operation, size_bytes)
        self._check_still_open(operation)

    def _check_open(self) -> None:
        self._disk.process.check_alive()
        if not self._is_open:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self._path)

    def _check_still_open(self, operation: str) -> None:
        """Report a violation if other code closed the file since the operation began: another file could be hit."""
        if not self._is_open:
            self._disk.process.world.violated(f"{self._path} was closed while a thread was in {operation}")
            self._check_open()

    def pwrite(self, data: Buffer, at: int) -> None:
        content = bytes(data)
        self._begin("disk.write", len(content))
        missing = self._disk.device.lacks(at + len(content) - len(self.node.cached))
        if missing:
            self.node.change(Write(at, content[: max(0, len(content) - missing)]))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.node.change(Write(at, content))
        self._disk.end("disk.written")

    def pwrite_durably(self, parts: Sequence[Buffer], at: int) -> None:
        self.pwrite(b"".join(parts), at)
        self.datasync()

    def pread(self, at: int, size: int) -> bytes:
        self._begin("disk.read", size)
        return bytes(self.node.cached[at : at + size])

    def pread_cached(self, at: int, size: int) -> bytes | None:
        device = self._disk.device
        if device.random.random() < device.cold_share:
            return None
        return self.pread(at, size)

    def pread_once(self, at: int, size: int) -> bytes:
        return self.pread(at, size)

    def datasync(self) -> None:
        self._check_open()
        self._disk.sync("disk.sync")
        self._check_still_open("disk.sync")
        device = self._disk.device
        if device.is_failing or (device.sync_error_share and device.random.random() < device.sync_error_share):
            device.syncs_failed += 1
            self.node.fail_sync()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.node.sync()
        self._disk.end("disk.synced")

    def size(self) -> int:
        self._check_open()
        return len(self.node.cached)

    def truncate(self, size: int) -> None:
        self._begin("disk.truncate")
        self._resize(size)

    def allocate(self, size: int) -> None:
        self._begin("disk.allocate")
        if size > len(self.node.cached):
            self._resize(size)

    def _resize(self, size: int) -> None:
        if self._disk.device.lacks(size - len(self.node.cached)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.node.change(Resize(size))

    def close(self) -> None:
        self._disk.process.check_alive()
        self._is_open = False
        if self._disk.device.locks.get(self.node) is self._disk.process:
            del self._disk.device.locks[self.node]


def _no_such(path: str) -> NoReturn:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
