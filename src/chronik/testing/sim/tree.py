"""Files and folders as a kernel keeps them: the content that processes see, and what survives a power failure.

A file's content is durable after its sync; a name is durable after the sync of its folder. The kernel may also have
written back some unsynced changes: a prefix of them with the next one torn, or any of the changed pages.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple, TypeAlias

PAGE_BYTES = 4096
GARBAGE_BYTES_MAX = 256


class Write(NamedTuple):
    at: int
    data: bytes


class Resize(NamedTuple):
    """Truncate the file, or extend it with zeros."""

    size: int


Change: TypeAlias = Write | Resize


def apply(content: bytearray, change: Change) -> None:
    if isinstance(change, Resize):
        if change.size < len(content):
            del content[change.size :]
        else:
            content.extend(bytes(change.size - len(content)))
        return
    at, data = change
    if not data:
        return
    if at > len(content):
        content.extend(bytes(at - len(content)))
    content[at : at + len(data)] = data


class FileNode:
    """Invariant: `durable` with all `pending` applied is `cached`, unless a sync failed."""

    __slots__ = ("cached", "durable", "is_in_doubt", "pending")

    def __init__(self) -> None:
        self.cached = bytearray()
        self.durable = bytearray()
        self.pending: list[Change] = []
        self.is_in_doubt = False
        """A sync failed: the kernel marked the pages clean, but they are not on the device."""

    def change(self, change: Change) -> None:
        apply(self.cached, change)
        self.pending.append(change)

    def sync(self) -> None:
        for change in self.pending:
            apply(self.durable, change)
        self.pending.clear()

    def fail_sync(self) -> None:
        """Drop the pending changes: the kernel now treats them as written, but they are not."""
        self.pending.clear()
        self.is_in_doubt = True

    def forget_doubtful(self) -> None:
        """Drop pages whose sync failed, as the kernel may do at any time: reads then return the device's content."""
        if self.is_in_doubt:
            self.cached = bytearray(self.durable)
            self.pending.clear()
            self.is_in_doubt = False

    settle = sync

    def copy(self) -> FileNode:
        """Copy the content that a reader sees. The copy is durable."""
        copied = FileNode()
        copied.cached, copied.durable = bytearray(self.cached), bytearray(self.cached)
        return copied

    def lose_power(self, random: Random) -> None:
        if self.pending:
            how = random.random()
            if how < 0.2:
                pass
            elif how < 0.3:
                self.sync()
            elif how < 0.7 or any(isinstance(change, Resize) for change in self.pending):
                self._keep_prefix(random)
            else:
                self._keep_pages(random)
        self.pending.clear()
        self.is_in_doubt = False
        self.cached = bytearray(self.durable)

    def _keep_prefix(self, random: Random) -> None:
        kept = random.randrange(len(self.pending))
        for change in self.pending[:kept]:
            apply(self.durable, change)
        torn = self.pending[kept]
        if not isinstance(torn, Write) or not torn.data:
            return
        length = random.randint(0, len(torn.data))
        apply(self.durable, Write(torn.at, torn.data[:length]))
        rest = min(len(torn.data) - length, GARBAGE_BYTES_MAX)
        if rest and random.random() < 0.5:
            # The blocks were allocated but not written: they hold whatever was on the device.
            garbage = random.randbytes(rest) if random.random() < 0.5 else bytes(rest)
            apply(self.durable, Write(torn.at + length, garbage))

    def _keep_pages(self, random: Random) -> None:
        """Keep the old or the new content of each page: write-back has no order."""
        new, old = self.cached, self.durable
        kept = bytearray()
        for at in range(0, len(new), PAGE_BYTES):
            page = new[at : at + PAGE_BYTES]
            if random.random() < 0.5:
                before = old[at : at + PAGE_BYTES]
                page = before + bytes(len(page) - len(before))
            kept += page
        self.durable = kept


class Rename(NamedTuple):
    """An atomic change of a folder: remove `old`, add `new` with a node; either may be missing."""

    old: str | None
    new: str | None
    node: FileNode | FolderNode | None


class FolderNode:
    """Invariant: `durable` with all of `journal` applied in order is `names`."""

    __slots__ = ("durable", "journal", "names")

    def __init__(self) -> None:
        self.names: dict[str, FileNode | FolderNode] = {}
        self.durable: dict[str, FileNode | FolderNode] = {}
        self.journal: list[Rename] = []

    def change(self, old: str | None, new: str | None, node: FileNode | FolderNode | None) -> None:
        rename = Rename(old, new, node)
        _rename(self.names, rename)
        self.journal.append(rename)

    def sync(self) -> None:
        for rename in self.journal:
            _rename(self.durable, rename)
        self.journal.clear()

    def settle(self) -> None:
        """Write everything back, in this folder and below, as the kernel does eventually."""
        self.sync()
        for name in sorted(self.names):
            self.names[name].settle()

    def copy(self) -> FolderNode:
        copied = FolderNode()
        copied.names = {name: node.copy() for name, node in self.names.items()}
        copied.durable = dict(copied.names)
        return copied

    def lose_power(self, random: Random) -> None:
        """Keep a prefix of the changes, since folders are journaled in order. Then do the same for all entries."""
        kept = random.randint(0, len(self.journal)) if self.journal else 0
        for rename in self.journal[:kept]:
            _rename(self.durable, rename)
        self.journal.clear()
        self.names = dict(self.durable)
        for name in sorted(self.names):
            self.names[name].lose_power(random)

    def forget_doubtful(self) -> None:
        for name in sorted(self.names):
            self.names[name].forget_doubtful()

    def folder(self, path: str) -> FolderNode | None:
        """Return the folder at this path below, if there is one."""
        node = self
        for name in filter(None, path.split("/")):
            child = node.names.get(name)
            if not isinstance(child, FolderNode):
                return None
            node = child
        return node

    def size_bytes(self) -> int:
        """Return the total size of all files below."""
        return sum(
            node.size_bytes() if isinstance(node, FolderNode) else len(node.cached) for node in self.names.values()
        )


def _rename(names: dict[str, FileNode | FolderNode], rename: Rename) -> None:
    if rename.old is not None:
        names.pop(rename.old, None)
    if rename.new is not None and rename.node is not None:
        names[rename.new] = rename.node
