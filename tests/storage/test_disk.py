"""The implementation of the disk interface on the local file system."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from chronik.storage.disk import RealDisk, read_file, write_file_atomic
from chronik.storage.segment import SharedFile


def test_a_file_returns_the_bytes_that_were_written(tmp_path: Path) -> None:
    file = RealDisk().open(str(tmp_path / "f"), create=True)
    file.pwrite(memoryview(b"world"), 6)
    file.pwrite(bytearray(b"hello "), 0)
    assert file.pread(0, 100) == b"hello world"
    assert bytes(file.pread_cached(6, 5) or b"") == b"world"
    assert bytes(file.pread_cached(6, 50) or b"") == b"world"
    assert file.size() == 11
    file.truncate(5)
    assert file.pread(0, 100) == b"hello"
    file.datasync()
    file.close()
    file.close()


def test_allocated_bytes_are_zeros(tmp_path: Path) -> None:
    file = RealDisk().open(str(tmp_path / "f"), create=True)
    file.pwrite(b"x", 0)
    file.allocate(10_000)
    assert file.pread(0, 10_001) in (b"x" + bytes(9999), b"x")
    file.close()


def test_a_short_write_is_completed_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite
    file = RealDisk().open(str(tmp_path / "f"), create=True)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: whole(fd, memoryview(data)[:3], at))
    file.pwrite(b"abcdefgh", 0)
    assert file.pread(0, 10) == b"abcdefgh"

    def fills_up(fd: int, data: bytes, at: int) -> int:
        if at >= 20:
            raise OSError(errno.ENOSPC, "full")
        return whole(fd, memoryview(data)[:3], at)

    monkeypatch.setattr(os, "pwrite", fills_up)
    with pytest.raises(OSError, match="full"):
        file.pwrite(b"x" * 30, 0)
    file.close()


def test_cached_reads_become_plain_reads_if_the_system_does_not_support_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = RealDisk()
    file = disk.open(str(tmp_path / "f"), create=True)
    file.pwrite(b"data", 0)

    def refuses(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "preadv", refuses)
    assert file.pread_cached(0, 4) == b"data"
    assert not disk.can_read_cached
    file.close()


def test_a_cached_read_returns_none_if_pages_are_not_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RealDisk().open(str(tmp_path / "f"), create=True)
    file.pwrite(b"data", 0)

    def would_block(*_: object) -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "preadv", would_block)
    assert file.pread_cached(0, 4) is None
    monkeypatch.setattr(os, "preadv", lambda *_: 2)
    assert file.pread_cached(0, 4) is None, "a part is not enough"
    file.close()


PARTS = (b"he", bytearray(b"llo"), b"", memoryview(b" world"))


@pytest.mark.parametrize("can_write_durably", [True, False])
@pytest.mark.parametrize("count", [4, 3000], ids=["one-call", "more-parts-than-one-call-takes"])
def test_parts_are_written_one_after_another(tmp_path: Path, can_write_durably: bool, count: int) -> None:
    disk = RealDisk()
    disk.can_write_durably &= can_write_durably
    file = disk.open(str(tmp_path / "f"), create=True)
    file.pwrite_durably((PARTS * count)[:count], 3)
    assert file.pread(3, 20) == b"hello worldhello worldhello world"[: min(20, 11 * (count // 4))]
    file.close()


def test_an_incomplete_durable_write_is_completed_and_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RealDisk().open(str(tmp_path / "f"), create=True)
    write, sync = os.pwritev, os.fdatasync
    synced: list[None] = []
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at, flags: write(fd, [b"".join(parts)[:4]], at, flags))
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(sync(fd)))
    file.pwrite_durably(PARTS, 0)
    assert file.pread(0, 20) == b"hello world"
    assert len(synced) == 1
    file.close()


def test_durable_writes_become_plain_writes_if_the_system_does_not_support_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = RealDisk()
    file = disk.open(str(tmp_path / "f"), create=True)

    def refuses(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "pwritev", refuses)
    file.pwrite_durably(PARTS, 0)
    assert file.pread(0, 20) == b"hello world"
    assert not disk.can_write_durably
    file.close()


def test_an_atomic_write_replaces_the_whole_file(tmp_path: Path) -> None:
    disk = RealDisk()
    path = str(tmp_path / "f")
    assert read_file(disk, path) is None
    write_file_atomic(disk, path, b"first, and longer")
    write_file_atomic(disk, path, b"second")
    assert read_file(disk, path) == b"second"
    assert disk.listdir(str(tmp_path)) == ["f"]


def test_the_last_user_closes_a_shared_file(tmp_path: Path) -> None:
    file = RealDisk().open(str(tmp_path / "f"), create=True)
    shared = SharedFile(file)
    reader = shared.acquire()
    shared.release()
    reader.file.pwrite(b"still open", 0)
    reader.release()
    with pytest.raises(OSError, match="Bad file"):
        file.pread(0, 1)


def test_the_disk_reports_free_and_total_space(tmp_path: Path) -> None:
    space = RealDisk().space(str(tmp_path))
    assert 0 < space.free_bytes <= space.total_bytes
    assert space.total_bytes == shutil.disk_usage(tmp_path).total
