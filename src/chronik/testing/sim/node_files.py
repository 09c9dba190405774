"""Damage to the files of a node that is down: removed, cut, corrupted, or restored from a copy. One kind, `rot`, also
damages the files of a running node.

Every change here is durable at once. Only durable records are damaged: those below the recovery point or the synced end
in the node's files. A crash may also lose records above these offsets, and no node could tell the difference.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

from chronik.metadata.image import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from chronik.node.membership.cluster_member import STORE_NAME
from chronik.storage.aborted import SUFFIX as ABORTED_SUFFIX
from chronik.storage.commit_log import FOLDER_NAME as COMMIT_LOG_NAME
from chronik.storage.commit_log import frames_in
from chronik.storage.folder import LOGS_NAME, META_NAME, DataFolder, TopicPartition
from chronik.storage.syncing import read_synced_end
from chronik.testing.sim.disk import ProcessDisk
from chronik.testing.sim.host import Host
from chronik.testing.sim.tree import FileNode, FolderNode, Resize, Write
from chronik.wire.batch import HEADER_BYTES, BatchHeader, check_batches, read_batch_header
from chronik.wire.errors import KafkaError

SEGMENT_SUFFIX = ".log"
LENGTH_AT, LENGTH_END, MAGIC_AT = 8, 12, 16
"""Of a batch, the length and everything from the magic on are verified; base offset and leader epoch are not."""


class Batch(NamedTuple):
    segment: str
    at: int
    header: BatchHeader


class Exposed(NamedTuple):
    """A log with durable records: those below `upto`, its recovery point or synced end."""

    log: TopicPartition
    upto: int


class NodeFiles:
    """The data folder of one node. Methods that change it require that the node is down, except `rot`."""

    def __init__(self, host: Host, path: str, node_id: int) -> None:
        self._root = host.disk.root
        self._host = host
        self._path = path
        self._node_id = node_id

    @property
    def exist(self) -> bool:
        return self._root.folder(self._path) is not None

    # -- queries -------------------------------------------------------------------------------------------------------

    def exposed(self) -> list[Exposed]:
        """Return the logs with durable records, sorted by name."""
        return [
            Exposed(log, point)
            for log, point in sorted(self._recovery_points().items())
            if any(batch.header.base_offset < point for batch in self._batches(log))
        ]

    def whole_end(self, log: TopicPartition) -> int | None:
        """Return the offset up to which the log has every batch, intact, from its start on; None if one is bad.

        In a compacted log, gaps are ignored.
        """
        folder = self._log(log) or FolderNode()
        end: int | None = None
        for name in _segments(folder):
            if end is None or _is_compacted(log):
                end = int(name.removesuffix(SEGMENT_SUFFIX))
            if end != int(name.removesuffix(SEGMENT_SUFFIX)):
                return None
            data = memoryview(bytes(_file(folder, name).cached))
            used = 0
            for at, header in _chain(data):
                used = at + header.size_bytes
                if header.base_offset != end and not _is_compacted(log):
                    return None
                try:
                    check_batches(data[at : at + header.size_bytes], header.size_bytes, from_producer=False)
                except KafkaError:
                    return None
                end = header.next_offset
            if any(data[used:]):
                return None
        return end or 0

    def _recovery_points(self) -> dict[TopicPartition, int]:
        """Return the durable ends that the node would read at its start. Uses a copy: opening a folder changes it."""
        if not self.exist:
            return {}
        disk = _CopiedDisk(self._host)
        folder = DataFolder.open(disk, self._path, self._node_id, "")
        return {
            log: max(point.offset, read_synced_end(disk, folder.log_path(*log)))
            for log, point in folder.recovery_points.items()
        }

    def _own(self) -> FolderNode:
        folder = self._root.folder(self._path)
        assert folder is not None, f"{self._path} does not exist"
        return folder

    def _log(self, log: TopicPartition) -> FolderNode | None:
        return self._root.folder(f"{self._path}/{LOGS_NAME}/{log[0]}-{log[1]}")

    def _batches(self, log: TopicPartition) -> list[Batch]:
        """Return the batches in order; each segment up to its first unreadable header."""
        folder = self._log(log) or FolderNode()
        return [
            Batch(name, at, header)
            for name in _segments(folder)
            for at, header in _chain(memoryview(bytes(_file(folder, name).cached)))
        ]

    # -- damage --------------------------------------------------------------------------------------------------------

    def remove_log(self, exposed: Exposed) -> str:
        """Remove the folder of one replica, as an operator might who repairs the wrong one by hand."""
        self._root.settle()
        logs = self._root.folder(f"{self._path}/{LOGS_NAME}")
        assert logs is not None
        logs.change(f"{exposed.log[0]}-{exposed.log[1]}", None, None)
        logs.settle()
        return "is removed"

    def shorten(self, exposed: Exposed, random: Random) -> str:
        """Cut a segment between two batches or within one, or remove it."""
        self._root.settle()
        log = self._log(exposed.log)
        assert log is not None
        batches = [batch for batch in self._batches(exposed.log) if batch.header.base_offset < exposed.upto]
        if _is_compacted(exposed.log):
            # A compacted log may have gaps between batches: only an end that is too early is detectable.
            last = _segments(log)[-1]
            batches = [batch for batch in batches if batch.segment == last]
            if not batches:
                return self.damage(exposed, random)
        chosen = batches[-1] if random.random() < 0.5 else random.choice(batches)
        # Without its first segment a log looks as retention leaves it: detection is not promised.
        may_go = chosen.segment != _segments(log)[0] or len(_segments(log)) == 1
        if random.random() < 0.2 and may_go and not _is_compacted(exposed.log):
            log.change(chosen.segment, None, None)
            log.settle()
            return f"lost {chosen.segment}"
        keep = chosen.at
        if random.random() < 0.5:
            keep += random.randrange(1, chosen.header.size_bytes)
        file = _file(log, chosen.segment)
        del file.cached[keep:]
        file.durable = bytearray(file.cached)
        return f"has {chosen.segment} cut to {keep} bytes, in the batch at {chosen.header.base_offset}"

    def damage(self, exposed: Exposed, random: Random) -> str:
        """Flip one bit of a batch."""
        self._root.settle()
        log = self._log(exposed.log)
        assert log is not None
        whole = [batch for batch in self._batches(exposed.log) if batch.header.next_offset <= exposed.upto]
        chosen = random.choice(whole or self._batches(exposed.log)[:1])
        at = _checked_byte(chosen.header, random)
        file = _file(log, chosen.segment)
        file.cached[chosen.at + at] ^= 1 << random.randrange(8)
        file.durable = bytearray(file.cached)
        return f"has another byte {at} in the batch at {chosen.header.base_offset}"

    def rot(self, random: Random, spared: Container[TopicPartition]) -> tuple[TopicPartition, str] | None:
        """Flip a bit in a closed segment, or cut it between two batches; return the log and what happened to it.

        The node may run: it must detect this when it reads the segment. None if no closed segment has durable records,
        except in logs that are `spared`.
        """
        candidates: list[tuple[Exposed, Batch]] = []
        for exposed in self.exposed():
            if exposed.log in spared:
                continue
            folder = self._log(exposed.log)
            last = _segments(folder)[-1] if folder is not None else ""
            candidates += [
                (exposed, batch)
                for batch in self._batches(exposed.log)
                if batch.segment != last and batch.header.next_offset <= exposed.upto
            ]
        if not candidates:
            return None
        exposed, chosen = random.choice(candidates)
        folder = self._log(exposed.log)
        assert folder is not None
        file, at = _file(folder, chosen.segment), chosen.at
        where = f"{exposed.log[0]}-{exposed.log[1]} in the batch at {chosen.header.base_offset}"
        if random.random() < 0.5 and at > 0 and not _is_compacted(exposed.log):
            file.change(Resize(at))
            what = f"has {chosen.segment} cut to {at} bytes, {where}"
        else:
            at += _checked_byte(chosen.header, random)
            file.change(Write(at, bytes([file.cached[at] ^ 1 << random.randrange(8)])))
            what = f"has another byte {at} in {chosen.segment}, {where}"
        file.sync()
        return exposed.log, what

    def rot_index(self, random: Random, *, is_running: bool) -> str | None:
        """Remove, cut or change an index of aborted transactions; return what happened. None if there is none.

        It can be rebuilt from its segment. In a running node, only closed segments are scrubbed.
        """
        logs = self._root.folder(f"{self._path}/{LOGS_NAME}") or FolderNode()
        found: list[tuple[FolderNode, str, str]] = []
        for log, folder in sorted(logs.names.items()):
            if isinstance(folder, FolderNode):
                last = _segments(folder)[-1:] if is_running else []
                open_ = [name.replace(SEGMENT_SUFFIX, ABORTED_SUFFIX) for name in last]
                names = [name for name in sorted(folder.names) if name.endswith(ABORTED_SUFFIX)]
                found += [(folder, log, name) for name in names if name not in open_]
        if not found:
            return None
        folder, log, name = random.choice(found)
        file = _file(folder, name)
        if random.random() < 0.3:
            folder.change(name, None, None)
            folder.settle()
            return f"lost {name} of {log}"
        if random.random() < 0.5 or not file.cached:
            file.change(Resize(random.randrange(len(file.cached) + 1)))
        else:
            at = random.randrange(len(file.cached))
            file.change(Write(at, bytes([file.cached[at] ^ 1 << random.randrange(8)])))
        file.sync()
        return f"has another {name} in {log}"

    def lose_commit_log(self, random: Random) -> str | None:
        """Remove or zero all files of the commit log, or the newest one; return what happened. None if no frame counts.

        If only the last frames are lost, that looks like a torn write.
        """
        self._root.settle()
        own = self._own()
        meta, commit_log = own.names.get(META_NAME), own.names.get(COMMIT_LOG_NAME)
        if not isinstance(meta, FileNode) or not isinstance(commit_log, FolderNode):
            return None
        counted = json.loads(bytes(meta.cached)).get("commit_log")
        if not counted:
            return None
        how = random.choice(("folder", "files", "frames", "newest frames"))
        if how == "folder":
            own.change(COMMIT_LOG_NAME, None, None)
        if how == "newest frames":
            generation = UUID(counted.partition("/")[0]).bytes

            def newest_frame(file: FileNode) -> int:
                frames = frames_in(memoryview(bytes(file.cached)), generation)
                return max((frame.sequence for frame in frames), default=0)

            file = max((_file(commit_log, name) for name in sorted(commit_log.names)), key=newest_frame)
            file.change(Write(0, bytes(len(file.cached))))
        for name in sorted(commit_log.names):
            if how == "files":
                commit_log.change(name, None, None)
            elif how == "frames":
                file = _file(commit_log, name)
                file.change(Write(0, bytes(len(file.cached))))
        self._root.settle()
        return f"lost the {how} of its commit log"

    def copy(self) -> FolderNode:
        self._root.settle()
        return self._own().copy()

    def put_back(self, copy: FolderNode) -> None:
        """Restore the folder from the copy."""
        self._replace(copy.copy())
        assert self.exist, f"{self._path} was not restored"

    def wipe(self) -> None:
        """Remove the whole folder, as a replaced disk does."""
        self._replace(None)

    def _replace(self, folder: FolderNode | None) -> None:
        parent, _, name = self._path.rpartition("/")
        holder = self._root.folder(parent)
        if holder is not None:
            holder.change(name, name, folder)
            self._root.settle()

    def take_store(self) -> FileNode | None:
        """Remove the Raft store and return it, so that it can be restored."""
        self._root.settle()
        own = self._own()
        store = own.names.get(STORE_NAME)
        own.change(STORE_NAME, None, None)
        own.settle()
        return store if isinstance(store, FileNode) else None

    def copy_store(self) -> FileNode | None:
        """Return a copy of the Raft store, to be restored later. The node may run."""
        store = self._own().names.get(STORE_NAME)
        if not isinstance(store, FileNode):
            return None
        copy = store.copy()
        copy.settle()
        return copy

    def put_store(self, store: FileNode) -> None:
        own = self._own()
        own.change(None, STORE_NAME, store)
        own.settle()


def _chain(data: memoryview) -> Iterator[tuple[int, BatchHeader]]:
    """Yield the batches of a segment with their positions, up to the first bytes that are no batch."""
    at = 0
    while len(data) - at >= HEADER_BYTES and (header := read_batch_header(data, at)).magic == 2:
        if not HEADER_BYTES <= header.size_bytes <= len(data) - at:
            return
        yield at, header
        at += header.size_bytes


def _checked_byte(header: BatchHeader, random: Random) -> int:
    """Return the position of a byte in a batch that is verified when the batch is read."""
    if random.random() < 0.3:
        return random.randrange(LENGTH_AT, LENGTH_END)
    return random.randrange(MAGIC_AT, header.size_bytes)


def _segments(log: FolderNode) -> list[str]:
    return sorted(name for name in log.names if name.endswith(SEGMENT_SUFFIX))


def _file(log: FolderNode, name: str) -> FileNode:
    file = log.names[name]
    assert isinstance(file, FileNode)
    return file


def _is_compacted(log: TopicPartition) -> bool:
    """Return whether the log is compacted, by the topic names that the workload uses."""
    return log[0] in (OFFSETS_TOPIC, TRANSACTIONS_TOPIC, "latest", "table")


class _CopiedDisk(ProcessDisk):
    """A copy of a machine's files for use outside the simulation: no time passes, and nothing fails."""

    def __init__(self, host: Host) -> None:
        faultless = {"locks": {}, "is_failing": False, "sync_error_share": 0.0, "lacks": lambda more_bytes: 0}
        device: Any = SimpleNamespace(root=host.disk.root.copy(), **faultless)
        nobody: Any = SimpleNamespace(check_alive=lambda: None)
        self.device, self.process = device, nobody

    def begin(self, operation: str, size_bytes: int = 0) -> None:
        return

    def sync(self, operation: str) -> None:
        return

    def end(self, point: str) -> None:
        return
