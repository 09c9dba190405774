"""Finding records by timestamp. Everything here blocks: run it in a thread."""

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final, NamedTuple

from chronik.storage.disk import Disk
from chronik.storage.index import OFFSET_ENTRY, TIME_ENTRY, SparseIndex
from chronik.storage.segment import NO_TIMESTAMP, SegmentView, SharedFile, segment_path
from chronik.wire.batch import BatchHeader, decode_batch
from chronik.wire.errors import KafkaError

DECODED_BYTES_MAX: Final = 32 * 1024 * 1024


class TimestampOffset(NamedTuple):
    """A record's offset and its own timestamp."""

    offset: int
    timestamp_ms: int


@dataclass(frozen=True, slots=True, eq=False)
class TimeLookup:
    """The log when the lookup was created: closed segments by base offset, the active one as a view.

    Closed segments are opened one at a time. One that retention removes in the meantime is skipped.
    """

    disk: Disk
    folder: str
    closed: Sequence[int]
    active: SegmentView | None
    start: int
    end: int

    def first_at_or_after(self, timestamp_ms: int) -> TimestampOffset | None:
        """Return the first record that is not older than `timestamp_ms`."""
        with closing(self._views()) as views:
            for view in views:
                record = self._first_in(view, timestamp_ms)
                if record is not None:
                    return record
        return None

    def largest(self) -> TimestampOffset | None:
        """Return the first record that has the largest timestamp."""
        largest, base_offset, its_offset = NO_TIMESTAMP, -1, -1
        with closing(self._views()) as views:
            for view in views:
                timestamp_ms, offset = self._largest_in(view)
                if timestamp_ms > largest:
                    if view is self.active:
                        return self._record(view, offset, timestamp_ms)
                    largest, base_offset, its_offset = timestamp_ms, view.base_offset, offset
        view_again = self._open(base_offset) if base_offset >= 0 else None
        if view_again is None:
            return None
        with view_again as view:
            return self._record(view, its_offset, largest)

    def _views(self) -> Generator[SegmentView]:
        """Yield the segments in order, and release each one afterwards."""
        try:
            for base_offset in self.closed:
                view = self._open(base_offset)
                if view is not None:
                    with view:
                        yield view
            if self.active is not None:
                yield self.active
        finally:
            if self.active is not None:
                self.active.release()

    def _open(self, base_offset: int) -> SegmentView | None:
        try:
            file = self.disk.open(segment_path(self.folder, base_offset))
        except FileNotFoundError:
            return None
        return SegmentView(
            base_offset,
            file.size(),
            SharedFile(file),
            SparseIndex(self.disk, segment_path(self.folder, base_offset, ".index"), OFFSET_ENTRY).view(),
            SparseIndex(self.disk, segment_path(self.folder, base_offset, ".timeindex"), TIME_ENTRY).view(),
        )

    def _largest_in(self, view: SegmentView) -> tuple[int, int]:
        """Return the largest timestamp among the segment's records in the log's range, and its batch's last offset."""
        is_active = view is self.active
        if view.base_offset >= self.start and not is_active:
            return view.largest_timestamp()
        # The index also covers records below the log start; that of the active segment ends at its last entry.
        largest, its_offset = NO_TIMESTAMP, -1
        position = view.position_near(self.start)
        entry = view.times.last()
        if is_active and entry is not None and view.base_offset + entry[1] >= self.start:
            batch = view.find(view.base_offset + entry[1])
            if batch is not None and batch[1].max_timestamp == entry[0]:
                position = batch[0]
        for _, header in view.walk(position):
            if header.last_offset >= self.start and header.max_timestamp > largest:
                largest, its_offset = header.max_timestamp, header.last_offset
        return largest, its_offset

    def _record(self, view: SegmentView, offset: int, timestamp_ms: int) -> TimestampOffset | None:
        batch = view.find(offset)
        return self._first_record(view, *batch, timestamp_ms) if batch is not None else None

    def _first_in(self, view: SegmentView, timestamp_ms: int) -> TimestampOffset | None:
        if view is not self.active and view.base_offset >= self.start and view.largest_timestamp()[0] < timestamp_ms:
            return None
        position = view.position_near(self.start)
        entry = view.times.floor(0, timestamp_ms - 1)
        if entry is not None:
            # All records up to that offset are older than `timestamp_ms`.
            batch = view.find(view.base_offset + entry[1])
            if batch is not None and batch[1].max_timestamp == entry[0]:
                position = max(position, batch[0])
        for at, header in view.walk(position):
            if header.last_offset < self.start or header.max_timestamp < timestamp_ms:
                continue
            record = self._first_record(view, at, header, timestamp_ms)
            if record is not None:
                return record
        return None

    def _first_record(
        self, view: SegmentView, position: int, header: BatchHeader, timestamp_ms: int
    ) -> TimestampOffset | None:
        batch = view.shared.file.pread(position, header.size_bytes)
        try:
            for record in decode_batch(batch, max_bytes=DECODED_BYTES_MAX):
                if record.timestamp_ms >= timestamp_ms and self.start <= record.offset < self.end:
                    return TimestampOffset(record.offset, record.timestamp_ms)
        except KafkaError:
            # The batch cannot be decoded (a decompression bomb, or no records): its start is the best approximation.
            return TimestampOffset(max(header.base_offset, self.start), header.max_timestamp)
        return None
