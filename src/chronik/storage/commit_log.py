"""The commit log: one file for what a round of group commit covers, so that it needs one sync, not one per segment.

Files in `commit-log/` of the data folder: 0, 1, ... A file's blocks are written once, when it is created, and then
recycled, so that a sync changes no file metadata. A file is a sequence of frames, each at a multiple of 4 KiB, so that
writing one never touches the sectors of another:

    magic 8 bytes, generation 16 bytes, sequence int64, oldest int64, entries int32,
    size of the frame without padding uint32, crc32c of the frame without this field uint32; big-endian
    for each entry: topic id 16 bytes, partition int32, segment base offset int64, position int64, end offset int64,
    size uint32
    the data of all entries

An entry is what one log appended to its active segment since its last durable position. The segment has the same bytes
at the same position, perhaps only in the page cache. An entry with position -1 is void: it cancels all earlier entries
of its log for segments below the base offset.

Recovery writes the entries into their segments again, in order of sequence, before any log is opened. These rules make
that correct:
- Only an active segment whose name is durable gets entries. A segment that is missing was removed on purpose.
- Before a log's segments change in any other way than by appends and deletion (truncation, compaction, set-aside, a new
  log for the same partition), its segments are synced and a void entry is durable.
- A file is recycled only after every log with an entry in it was synced, in the order in which the files were used: a
  void entry outlives the entries that it cancels. Each frame names the oldest frame that recovery still needs, and a
  frame that moves this on is durable before an older frame is overwritten. So recovery notices a missing frame.
- A generation is one run of a node. `meta.json` names it while its frames count: from the time when the first one is
  durable. Recovery ends by removing that name, durably. So frames of earlier runs, and unacknowledged ones after a torn
  frame, never count again.
- `meta.json` also names the first frame of the file that is written to, from the time when it is durable. Recovery must
  find that frame or a later one: otherwise superseded frames in recycled files would hide that all others are lost.
- Frames are written one after another, each after the sync of the one before. After a failed write or sync nothing is
  written any more, and all logs are synced directly.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from errno import EIO, ENOSPC
from struct import Struct
from threading import Lock
from typing import Final, NamedTuple
from uuid import UUID

from crc32c import crc32c

from chronik.storage.disk import Buffer, Disk, File

FOLDER_NAME: Final = "commit-log"
PAGE_BYTES: Final = 4096
FILES_MAX: Final = 4
FILE_BYTES_MIN: Final = 8 * PAGE_BYTES
FREE_FILES_MIN: Final = 8
"""A file is created only if the disk has room for this many: small disks are for the logs."""
MAX_OFFSET: Final = (1 << 63) - 1

_MAGIC: Final = b"CHRFRAME"
_HEADER: Final = Struct(">8s16sqqiII")
_HEADER_CRC_AT: Final = _HEADER.size - 4
_ENTRY: Final = Struct(">16siqqqI")
VOID: Final = -1
_ZEROS: Final = bytes(1024 * 1024)


class LogId(NamedTuple):
    """One partition of one topic; a topic that is created again under the same name has another id."""

    topic_id: UUID
    partition: int


class Entry(NamedTuple):
    """What one log appended to a segment; or, with position -1, that its earlier entries are void."""

    log: LogId
    base_offset: int
    position: int
    end_offset: int
    data: Buffer = b""


def frame_bytes(entries: int, data_bytes: int) -> int:
    """Return the size of a frame with its padding."""
    return _padded(_HEADER.size + entries * _ENTRY.size + data_bytes)


def _padded(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


@dataclass(slots=True, eq=False)
class _LogFile:
    """One file. `serial` and `first_sequence` belong to its current use; `end` is where its next frame goes."""

    file: File
    size_bytes: int
    serial: int = 0
    first_sequence: int = 0
    end: int = 0


class CommitLog:
    """The frames of one run of a node.

    Invariant: at most one frame is not durable, and files are recycled in the order in which they were used. Methods
    block, and threads may call them at the same time. `is_broken`, `has_frames` and `flushed_upto` may be used by the
    loop: they wait for nothing.
    """

    def __init__(
        self,
        disk: Disk,
        folder: str,
        generation: UUID,
        file_bytes: int,
        files: int,
        count: Callable[[int], None],
        retire: Callable[[], None],
    ) -> None:
        """`files` is how many files, named from 0 on, exist.

        `count` makes durable that the frames of this generation count, and that there is one with this sequence or a
        later one. `retire` makes durable that no frame counts any more.
        """
        self.file_bytes = file_bytes
        self.is_broken = False
        """A write or sync failed: nothing is written any more."""
        self.flushed_upto = 0
        """The serial of the last file whose entries are all durable in their segments. Set by the owner of the logs."""
        self._disk = disk
        self._folder = folder
        self._generation = generation.bytes
        self._count = count
        self._retire = retire
        self._is_retired = False
        self._lock = Lock()
        self._next_number = 0
        self._added: int | None = None
        """The file that `add_file` creates, also if it failed: it is tried again."""
        self._free: deque[_LogFile] = deque()
        self._used: deque[_LogFile] = deque()
        """Oldest first; the last one is written to."""
        self._serial = 0
        self._sequence = 0
        self._oldest_noted = 1
        self._counted_from = 0
        """What `count` was last called with, 0 before the first frame."""
        self._last_uses: dict[LogId, int] = {}
        """The serial of the file with the last entry of each log."""
        for _ in range(files):
            self._open_file(self._take_number())

    # -- files ---------------------------------------------------------------------------------------------------------

    @property
    def wants_file(self) -> bool:
        return len(self._free) + len(self._used) < FILES_MAX and not self.is_broken

    def add_file(self) -> None:
        """Create one more file, with all its blocks written. One thread at a time calls this."""
        if self._disk.space(self._folder).free_bytes < FREE_FILES_MIN * self.file_bytes:
            raise OSError(ENOSPC, "too little room for a file of the commit log")
        with self._lock:
            if self._added is None:
                # Before the file exists: `void` may need one meanwhile, and must not use this one.
                self._added = self._take_number()
        create_file(self._disk, self._folder, self._added, self.file_bytes)
        with self._lock:
            self._open_file(self._added)
            self._added = None

    def _take_number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def _open_file(self, number: int) -> None:
        self._free.append(_LogFile(self._disk.open(f"{self._folder}/{number}"), self.file_bytes))

    def close(self) -> None:
        with self._lock:
            self.is_broken = True
            for each in (*self._free, *self._used):
                each.file.close()
            self._free.clear()
            self._used.clear()

    # -- writing -------------------------------------------------------------------------------------------------------

    def write(self, entries: Sequence[Entry]) -> int | None:
        """Make the entries durable in one frame; return the serial of its file, or None if no file has room for it.

        After an OSError it is unknown whether recovery will find the frame, and the commit log is broken.
        """
        size_bytes = frame_bytes(len(entries), sum(len(entry.data) for entry in entries))
        with self._lock:
            file = None if self.is_broken or self._is_retired else self._file_for(size_bytes)
            if file is None:
                return None
            for entry in entries:
                self._last_uses[entry.log] = file.serial
            self._write(file, entries)
            return file.serial

    def has_frames(self, log: LogId) -> bool:
        """Return whether recovery could find an entry of this log that is not void."""
        return log in self._last_uses

    def void(self, log: LogId, below: int = MAX_OFFSET) -> None:
        """Cancel the log's entries for segments with base offsets below `below`. Durable when it returns.

        The caller has synced these segments. Raises OSError if the commit log is broken and still counts.
        """
        with self._lock:
            if log not in self._last_uses:
                return
            if self.is_broken:
                raise OSError(EIO, "the commit log has failed, and not all logs are synced without it yet")
            file = self._file_for(PAGE_BYTES)
            if file is None:
                # Rounds can do without the commit log, a truncation cannot: its blocks need not be written for that.
                with closing(self._disk.open(f"{self._folder}/{self._next_number}", create=True)) as extra:
                    extra.allocate(self.file_bytes)
                    extra.datasync()
                self._disk.sync_dir(self._folder)
                self._open_file(self._take_number())
                file = self._next_file()
            self._write(file, [Entry(log, below, VOID, 0)])
            if below == MAX_OFFSET:
                self._last_uses.pop(log, None)

    def retire(self) -> None:
        """Make durable that no frame counts any more. The caller has synced all logs with entries."""
        with self._lock:
            self._retire()
            self._is_retired = True
            self._last_uses.clear()

    def _file_for(self, size_bytes: int) -> _LogFile | None:
        """Return the file that the next frame goes to. The last page of a file is kept for `_note_oldest`."""
        while len(self._used) > 1 and self._used[0].serial <= self.flushed_upto:
            self._free.append(self._used.popleft())
        if self._used and self._used[-1].end + size_bytes + PAGE_BYTES <= self.file_bytes:
            return self._used[-1]
        if not self._free or size_bytes + PAGE_BYTES > self.file_bytes:
            return None
        return self._next_file()

    def _next_file(self) -> _LogFile:
        if self._used and self._oldest_noted != self._used[0].first_sequence:
            # Before the free file is overwritten: recovery would miss its frames.
            self._write(self._used[-1], ())
        file = self._free.popleft()
        self._serial += 1
        file.serial, file.first_sequence, file.end = self._serial, self._sequence + 1, 0
        self._used.append(file)
        return file

    def _write(self, file: _LogFile, entries: Sequence[Entry]) -> None:
        oldest = self._used[0].first_sequence
        parts = encode_frame(self._generation, self._sequence + 1, oldest, entries)
        try:
            file.file.pwrite_durably(parts, file.end)
            if self._counted_from != file.first_sequence:
                self._count_from(file.first_sequence)
        except BaseException:
            self.is_broken = True
            raise
        self._sequence += 1
        if self._oldest_noted != oldest:
            self._oldest_noted = oldest
            first = self._used[0].serial
            self._last_uses = {log: serial for log, serial in self._last_uses.items() if serial >= first}
        file.end += sum([len(part) for part in parts])

    def _count_from(self, sequence: int) -> None:
        """Make durable that recovery must find a frame from this sequence on."""
        try:
            self._count(sequence)
        except OSError:
            # A full disk, perhaps. The next frame tries again; until then, the loss of this file would not be noticed.
            if not self._counted_from:
                raise  # Frames do not count yet.
        else:
            self._counted_from = sequence


class LogFrames(NamedTuple):
    """The commit log as one log sees it."""

    commit_log: CommitLog
    log: LogId

    @property
    def exist(self) -> bool:
        return self.commit_log.has_frames(self.log)

    def void(self, below: int = MAX_OFFSET) -> None:
        self.commit_log.void(self.log, below)


def create_file(disk: Disk, folder: str, number: int, size_bytes: int) -> None:
    """Create a file and write all its blocks. Durable when it returns; on an OSError, its space is free again."""
    path = f"{folder}/{number}"
    with closing(disk.open(path, create=True)) as file:
        try:
            for at in range(0, size_bytes, len(_ZEROS)):
                file.pwrite(_ZEROS[: size_bytes - at], at)
            file.datasync()
        except OSError:
            with suppress(OSError):
                disk.remove(path)
            raise
    disk.sync_dir(folder)


def prepare_files(disk: Disk, folder: str, size_bytes: int) -> int:
    """Keep the files of earlier runs that can be used again, remove all others, and return how many are kept."""
    disk.mkdir(folder)
    kept = 0
    while kept < FILES_MAX and disk.exists(path := f"{folder}/{kept}") and disk.size(path) == size_bytes:
        with closing(disk.open(path)) as file:
            file.datasync()
        kept += 1
    for name in disk.listdir(folder):
        if not name.isdigit() or int(name) >= kept:
            disk.remove(f"{folder}/{name}")
    disk.sync_dir(folder)
    disk.sync_dir(folder.rpartition("/")[0] or "/")
    return kept


def encode_frame(generation: bytes, sequence: int, oldest: int, entries: Sequence[Entry]) -> list[Buffer]:
    """Return the frame with its padding, in parts."""
    table = [
        _ENTRY.pack(log.topic_id.bytes, log.partition, base_offset, position, end_offset, len(data))
        for log, base_offset, position, end_offset, data in entries
    ]
    parts: list[Buffer] = [b"".join(table), *[entry.data for entry in entries]]
    size_bytes = _HEADER.size + sum([len(part) for part in parts])
    header = _HEADER.pack(_MAGIC, generation, sequence, oldest, len(entries), size_bytes, 0)[:_HEADER_CRC_AT]
    checksum = crc32c(header)
    for part in parts:
        checksum = crc32c(part, checksum)
    parts.append(bytes(_padded(size_bytes) - size_bytes))
    return [header + checksum.to_bytes(4, "big"), *parts]


class Frame(NamedTuple):
    sequence: int
    oldest: int
    entries: Sequence[Entry]


def frames_in(content: memoryview, generation: bytes) -> list[Frame]:
    """Return all intact frames of the generation: also behind a damaged one, and those that a later use overwrites."""
    frames = []
    at = 0
    while at + _HEADER.size <= len(content):
        frame = _frame_at(content, at, generation)
        if frame is None:
            at += PAGE_BYTES
        else:
            frames.append(frame[0])
            at += frame[1]
    return frames


def _frame_at(content: memoryview, at: int, generation: bytes) -> tuple[Frame, int] | None:
    magic, its_generation, sequence, oldest, count, size_bytes, checksum = _HEADER.unpack_from(content, at)
    table_end = _HEADER.size + count * _ENTRY.size
    if magic != _MAGIC or its_generation != generation or not count >= 0 or not table_end <= size_bytes:
        return None
    frame = content[at : at + size_bytes]
    if len(frame) < size_bytes or crc32c(frame[_HEADER.size :], crc32c(frame[:_HEADER_CRC_AT])) != checksum:
        return None
    entries, data_at = [], table_end
    for index in range(count):
        topic_id, partition, base, position, end, size = _ENTRY.unpack_from(frame, _HEADER.size + index * _ENTRY.size)
        log = LogId(UUID(bytes=topic_id), partition)
        entries.append(Entry(log, base, position, end, frame[data_at : data_at + size]))
        data_at += size
    return Frame(sequence, oldest, entries), _padded(size_bytes)
