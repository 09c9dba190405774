"""How far the logs of replicas are on their devices, whatever the nodes believe."""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import Final

from crc32c import crc32c

from chronik.node.replicas.partition import Partition
from chronik.storage.segment import segment_path
from chronik.storage.syncing import SYNCED_END_NAME
from chronik.testing.sim.disk import SimDisk
from chronik.testing.sim.tree import FileNode, FolderNode
from chronik.wire.batch import HEADER_BYTES, read_batch_header

_MARK: Final = Struct(">qI")


@dataclass(slots=True)
class Scan:
    """The durable part of one replica's log, as scanned until now."""

    generation: int
    """The partition's generation: after a truncation the scan begins anew."""
    segment: int
    """The base offset of the segment that the scan has reached, and the position in it."""
    position: int
    end: int


class DurableEnds:
    """For logs without a commit log, whose records are durable only when their segments are."""

    def __init__(self) -> None:
        self._scans: dict[Partition, Scan] = {}

    def reaches(self, disk: SimDisk, hosted: Partition, offset: int) -> bool:
        """Return whether each batch below `offset` that the replica has is on its device."""
        scan = self._scans.get(hosted)
        bases = [segment.base_offset for segment in hosted.log._segments.all]
        if not bases:
            return offset <= hosted.log_start_offset
        if scan is None or scan.generation != hosted.generation or scan.segment not in bases:
            scan = self._scans[hosted] = Scan(hosted.generation, bases[0], 0, bases[0])
        while scan.end < offset:
            file = _file(disk, segment_path(hosted.log.folder, scan.segment))
            if file is None or not self._next_batch(file, scan):
                later = [base for base in bases if base > scan.segment]
                if file is None or scan.position < len(file.cached) or not later:
                    return False
                scan.segment, scan.position = later[0], 0
        return True

    def _next_batch(self, file: FileNode, scan: Scan) -> bool:
        """Pass the next batch; return False if it is not there or not durable."""
        start = scan.position
        if len(file.cached) < start + HEADER_BYTES:
            return False
        header = read_batch_header(memoryview(bytes(file.cached[start : start + HEADER_BYTES])))
        end = start + header.size_bytes
        if file.durable[start:end] != file.cached[start:end]:
            return False
        scan.position, scan.end = end, header.next_offset
        return True


def marked_end(disk: SimDisk, folder: str) -> int:
    """Return the durable end that a log's files state, as the page cache has it; 0 if they state none."""
    file = _file(disk, f"{folder}/{SYNCED_END_NAME}")
    if file is None or len(file.cached) != _MARK.size:
        return 0
    mark, checksum = _MARK.unpack(file.cached)
    return int(mark) if checksum == crc32c(bytes(file.cached[:-4])) else 0


def _file(disk: SimDisk, path: str) -> FileNode | None:
    node: FileNode | FolderNode | None = disk.root
    for name in path.strip("/").split("/"):
        node = node.names.get(name) if isinstance(node, FolderNode) else None
    return node if isinstance(node, FileNode) else None
