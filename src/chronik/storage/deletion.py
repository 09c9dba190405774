"""Removing data that retention, DeleteRecords or compaction no longer need."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from chronik.storage.config import LogConfig
from chronik.storage.disk import Disk, remove_files
from chronik.storage.segment import LogSegment
from chronik.storage.small_files import write_number


class NumberFile(NamedTuple):
    """A file that holds one number, to be written durably.

    The number is read when the file is written: if two jobs run out of order, both write the newer number.
    """

    path: str
    number: Callable[[], int]


@dataclass(frozen=True, slots=True, eq=False)
class DeletionJob:
    """Files to remove in a thread. The log has already released them; without `run` the next open brings them back.

    `run` first makes the new log start and the names of new segments durable: a crash must not find the old segments
    gone and nothing in their place. Files are removed oldest first, so that a crash leaves no hole.
    """

    disk: Disk
    folder: str
    paths: Sequence[str]
    segments: int
    size_bytes: int
    number_file: NumberFile | None = None

    def run(self) -> None:
        if self.number_file is not None:
            path, number = self.number_file
            write_number(self.disk, path, number())
        if self.paths:
            self.disk.sync_dir(self.folder)
        remove_files(self.disk, self.paths)


def segments_to_delete(
    segments: Sequence[LogSegment],
    config: LogConfig,
    now_ms: int,
    upto_offset: int,
    log_start_offset: int,
    log_end_offset: int,
) -> int:
    """Return how many of the first segments can be deleted: all if the active one is too old as well.

    A segment with a record at or above `upto_offset` stays. Records without timestamps do not expire.
    """
    excess_bytes = sum(segment.size_bytes for segment in segments) - config.retention_bytes
    count = 0
    for segment in segments:
        is_active = count + 1 == len(segments)
        next_base = log_end_offset if is_active else segments[count + 1].base_offset
        if next_base > upto_offset or (is_active and segment.size_bytes == 0):
            break
        is_below_start = next_base <= log_start_offset and not is_active
        is_excess = config.cleanup_delete and config.retention_bytes >= 0 and excess_bytes >= segment.size_bytes
        if not is_below_start and not is_excess and not _is_expired(segment, config, now_ms):
            break
        excess_bytes -= segment.size_bytes
        count += 1
    return count


def _is_expired(segment: LogSegment, config: LogConfig, now_ms: int) -> bool:
    if not config.cleanup_delete or config.retention_ms < 0:
        return False
    largest, _ = segment.largest_timestamp()
    return 0 <= largest < now_ms - config.retention_ms
