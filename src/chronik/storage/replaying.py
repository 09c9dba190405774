"""Replaying a commit log: what its entries cover is written into the segments again, before any log is opened."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from uuid import UUID

from chronik.storage.commit_log import VOID, Entry, Frame, LogId, frames_in
from chronik.storage.disk import Disk
from chronik.storage.segment import segment_path
from chronik.storage.syncing import note_synced_end, read_synced_end


@dataclass(slots=True)
class ReplayReport:
    """What the replay of a commit log found and did, for one log line."""

    frames: int = 0
    entries: int = 0
    """Entries that are not void."""
    logs: int = 0
    written_bytes: int = 0
    """Bytes that a segment lacked."""
    unknown_logs: int = 0
    """Logs with entries, but without a folder: removed, or of a topic that was deleted."""
    damage: str = ""
    """Why records that were acknowledged may be missing from the logs."""
    set_aside: str = ""
    """Where a damaged commit log was moved."""


def read_entries(
    disk: Disk, folder: str, generation: UUID, from_sequence: int
) -> tuple[dict[LogId, list[Entry]], ReplayReport]:
    """Return the entries that count, by log and in order. There was a frame with `from_sequence` or a later one."""
    report = ReplayReport()
    frames: dict[int, Frame] = {}
    if not disk.exists(folder):
        report.damage = "its folder is missing"
        return {}, report
    for name in disk.listdir(folder):
        with closing(disk.open(f"{folder}/{name}")) as file:
            content = file.pread(0, file.size())
        frames |= {frame.sequence: frame for frame in frames_in(memoryview(content), generation.bytes)}
    entries: dict[LogId, list[Entry]] = {}
    newest = max(frames, default=0)
    if newest < from_sequence:
        # The missing frames may have cancelled any entry.
        report.damage = f"it has no intact frame from {from_sequence} on"
        return entries, report
    last = frames[newest]
    for sequence in range(last.oldest, last.sequence + 1):
        frame = frames.get(sequence)
        if frame is None:
            report.damage = f"frame {sequence} is damaged, and frame {last.sequence} is intact"
            # It may have cancelled any of them. After a kill, the page cache has what they cover.
            entries.clear()
            continue
        report.frames += 1
        for entry in frame.entries:
            known = entries.setdefault(entry.log, [])
            if entry.position == VOID:
                known[:] = [other for other in known if other.base_offset >= entry.base_offset]
            else:
                known.append(entry)
    entries = {log: known for log, known in entries.items() if known}
    report.entries = sum(map(len, entries.values()))
    return entries, report


def replay(disk: Disk, entries: Sequence[Entry], folder: str, report: ReplayReport) -> None:
    """Write one log's entries into its segments, durably. Repeating it changes nothing.

    The mark `synced-end` then covers the entries: a log that still ends below them has lost records.
    """
    by_segment: dict[int, list[Entry]] = {}
    for entry in entries:
        by_segment.setdefault(entry.base_offset, []).append(entry)
    for base_offset, pieces in by_segment.items():
        path = segment_path(folder, base_offset)
        if not disk.exists(path):
            # Retention removed it, or its loss shows when the log is opened.
            continue
        with closing(disk.open(path)) as file:
            end = file.size()
            for piece in pieces:
                if piece.position > end:
                    # What comes before it is lost. A hole would only hide that.
                    break
                if file.pread(piece.position, len(piece.data)) != piece.data:
                    file.pwrite(piece.data, piece.position)
                    report.written_bytes += len(piece.data)
                end = max(end, piece.position + len(piece.data))
            file.datasync()
    end_offset = max(entry.end_offset for entry in entries)
    if end_offset > read_synced_end(disk, folder):
        # The frames were a durable proof of the log's end, and no longer count when the replay is over.
        note_synced_end(disk, folder, end_offset, durably=True)
    report.logs += 1
