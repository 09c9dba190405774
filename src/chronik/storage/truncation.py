"""Helpers for truncating a log: removing its last files, and rebuilding its producer state."""

from collections.abc import Sequence

from chronik.storage.config import LogConfig
from chronik.storage.disk import Disk, read_file
from chronik.storage.producers import ProducerStates
from chronik.storage.segment import LogSegment, segment_path
from chronik.storage.snapshot import decode_snapshot, restore_producers

__all__ = ["files_from", "rebuild_producers", "remove_segments"]

_ORDER = {".snapshot": 0, ".index": 1, ".timeindex": 1, ".log": 2}


def files_from(disk: Disk, folder: str, base_offset: int, end_offset: int) -> list[str]:
    """Return the files of all segments from `base_offset` on, and the snapshots above `end_offset`. Blocks.

    Found by name: a damaged log may not know all of them. Snapshots come first, then segments, newest first, each after
    its indexes. So if only some files are moved, the remaining log has no hole.
    """
    found: list[tuple[bool, int, int, str]] = []
    for name in disk.listdir(folder):
        stem, dot, suffix = name.partition(".")
        kind = _ORDER.get(dot + suffix)
        if kind is None or not stem.isdigit():
            continue
        offset, is_snapshot = int(stem), kind == 0
        if offset > end_offset if is_snapshot else offset >= base_offset:
            found.append((not is_snapshot, -offset, kind, f"{folder}/{name}"))
    return [path for *_, path in sorted(found)]


def remove_segments(disk: Disk, segments: Sequence[LogSegment]) -> None:
    """Remove the files of the log's last segments, newest first: a crash leaves a log without a hole."""
    for segment in reversed(segments):
        for path in reversed(segment.paths()):
            if disk.exists(path):
                disk.remove(path)


def rebuild_producers(
    disk: Disk,
    folder: str,
    segments: Sequence[LogSegment],
    snapshots: Sequence[int],
    config: LogConfig,
    before: ProducerStates,
) -> ProducerStates:
    """Return the producer state at the log's end, from the last snapshot and the batches after it. Blocks.

    Each producer's last-seen time comes from `before`: a batch's own timestamp is the client's.
    """
    snapshot = None
    if snapshots:
        snapshot = decode_snapshot(read_file(disk, segment_path(folder, snapshots[-1], ".snapshot")) or b"")
    producers = restore_producers(snapshot, config.producer_expiration_ms)
    start = snapshot.offset if snapshot is not None else 0
    for at, segment in enumerate(segments):
        if at + 1 < len(segments) and segments[at + 1].base_offset <= start:
            continue
        was_open = segment.is_open
        view = segment.view()
        try:
            for _, header in view.walk(view.position_near(start)):
                if header.producer_id >= 0 and not header.is_control and header.base_offset >= start:
                    append_time_ms = header.max_timestamp if header.log_append_time else -1
                    known = before.get(header.producer_id)
                    seen_ms = header.max_timestamp if known is None else known.last_seen_ms
                    producers.record(header, header.base_offset, seen_ms, append_time_ms)
        finally:
            view.release()
            if not was_open:
                segment.let_go()
    return producers
