"""Direct writes on the machine's own disk. Skipped if it has none."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from errno import EBADF
from pathlib import Path
from uuid import UUID

import pytest

from chronik.storage.commit_log import PAGE_BYTES, VOID, CommitLog, Entry, LogId, frames_in
from chronik.storage.direct_writes import DirectWriter
from chronik.storage.disk import RealDisk

GENERATION = UUID(int=7)
LOG = LogId(UUID(int=42), 0)
WAIT_S = 10.0


@pytest.fixture
def direct(tmp_path: Path) -> Iterator[DirectWriter]:
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(PAGE_BYTES))
    try:
        writer = DirectWriter(4 * PAGE_BYTES)
        DirectWriter.close_file(DirectWriter.open_file(str(probe)))
    except OSError as error:
        pytest.skip(f"no direct writes: {error}")
    yield writer
    writer.close()


def ended(direct: DirectWriter) -> bool:
    """Wait until a write has ended."""
    is_readable = bool(select.select([direct.event_fd], [], [], WAIT_S)[0])
    return is_readable and os.eventfd_read(direct.event_fd) > 0


def test_a_write_is_in_the_file_when_the_event_is_readable(direct: DirectWriter, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * PAGE_BYTES))
    fd = DirectWriter.open_file(str(path))
    assert direct.result(wait=False) is None
    for page in (1, 2):
        direct.buffer[:PAGE_BYTES] = bytes([page]) * PAGE_BYTES
        direct.submit(fd, PAGE_BYTES, page * PAGE_BYTES)
        assert ended(direct)
        assert direct.result(wait=False) == PAGE_BYTES
    DirectWriter.close_file(fd)
    assert path.read_bytes() == b"".join(bytes([page]) * PAGE_BYTES for page in (0, 1, 2, 0))


def test_a_write_that_cannot_begin_raises_and_a_later_one_succeeds(direct: DirectWriter, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE_BYTES))
    fd = DirectWriter.open_file(str(path))
    with pytest.raises(OSError) as caught:
        direct.submit(10_000, PAGE_BYTES, 0)
    assert caught.value.errno == EBADF
    direct.submit(fd, PAGE_BYTES, 0)
    assert direct.result(wait=True) == PAGE_BYTES
    DirectWriter.close_file(fd)


def test_frames_that_the_loop_and_threads_write_follow_each_other(direct: DirectWriter, tmp_path: Path) -> None:
    commit_log = CommitLog(RealDisk(), str(tmp_path), GENERATION, 8 * PAGE_BYTES, 0, lambda: None, direct)
    commit_log.add_file()
    first, second, third = [Entry(LOG, 0, number * 5, number, b"%05d" % number) for number in (1, 2, 3)]
    assert not commit_log.submit([first]), "a file is taken into use by a thread"
    assert commit_log.write([first]) == 1
    assert commit_log.submit([second])
    assert not commit_log.submit([third]), "one frame at a time"
    commit_log.void(LOG)  # waits for the second
    assert commit_log.submitted() == 1
    assert commit_log.submit([third])
    while (serial := commit_log.submitted()) is None:
        # The first event is that of the second frame.
        assert ended(direct)
    assert serial == 1
    commit_log.close()
    frames = frames_in(memoryview((tmp_path / "0").read_bytes()), GENERATION.bytes)
    assert [frame.sequence for frame in frames] == [1, 2, 3, 4]
    assert [frame.entries[0].position for frame in frames] == [5, 10, VOID, 15]
    assert [bytes(frame.entries[0].data) for frame in frames] == [b"00001", b"00002", b"", b"00003"]


def test_the_loop_does_not_wait_for_a_thread_that_uses_the_commit_log(direct: DirectWriter, tmp_path: Path) -> None:
    commit_log = CommitLog(RealDisk(), str(tmp_path), GENERATION, 8 * PAGE_BYTES, 0, lambda: None, direct)
    commit_log.add_file()
    entry = Entry(LOG, 0, 0, 1, b"12345")
    assert commit_log.write([entry]) == 1
    assert commit_log.submit([entry])
    assert ended(direct)
    with commit_log._lock:
        assert commit_log.submitted() is None
        assert not commit_log.submit([entry])
    assert commit_log.submitted() == 1
    commit_log.close()
