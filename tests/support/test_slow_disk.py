"""The disk that can be slowed down: only while its switch file exists, and never on the loop."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Timer

import pytest
from tests.support.slow_disk import SlowDisk


def test_segment_reads_in_threads_are_slow_while_the_switch_file_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []
    wait = Event.wait

    def noted(self: Event, timeout: float | None = None) -> bool:
        waits.append(timeout)
        return True if timeout == 1.5 else wait(self, timeout)

    monkeypatch.setattr(Event, "wait", noted)
    switch = tmp_path / "slow"
    disk = SlowDisk(reads=str(switch))
    segment = disk.open(str(tmp_path / "0.log"), create=True)
    index = disk.open(str(tmp_path / "0.index"), create=True)
    segment.pwrite(b"abc", 0)
    index.pwrite(b"abc", 0)
    assert segment.pread_cached(0, 3) == b"abc"
    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(segment.pread, 0, 3).result() == b"abc"
        slept = len(waits)
        switch.write_text("1500")
        assert segment.pread_cached(0, 3) is None
        assert index.pread_cached(0, 3) == b"abc"
        assert segment.pread(0, 3) == b"abc"
        assert 1.5 not in waits[slept:], "the loop is never held up"
        assert executor.submit(segment.pread, 0, 3).result() == b"abc"
        assert waits.count(1.5) == 1
        switch.unlink()
        assert executor.submit(segment.pread, 0, 3).result() == b"abc"
        assert waits.count(1.5) == 1
    segment.close()
    segment.close()
    index.close()


def test_segment_syncs_are_slow_while_the_switch_file_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []
    monkeypatch.setattr(Event, "wait", lambda self, timeout=None: waits.append(timeout))
    switch = tmp_path / "slow"
    disk = SlowDisk(syncs=str(switch))
    segment = disk.open(str(tmp_path / "0.log"), create=True)
    index = disk.open(str(tmp_path / "0.index"), create=True)
    segment.pwrite(b"abc", 0)
    segment.datasync()
    assert waits == []
    switch.write_text("1500")
    segment.datasync()
    index.datasync()
    assert segment.pread_cached(0, 3) == b"abc"
    assert waits == [1.5]
    segment.close()
    index.close()


def test_writes_in_threads_hang_until_the_switch_file_is_removed(tmp_path: Path) -> None:
    switch = tmp_path / "sick"
    disk = SlowDisk(syncs=str(switch))
    segment = disk.open(str(tmp_path / "0.log"), create=True)
    index = disk.open(str(tmp_path / "0.index"), create=True)
    switch.write_text("hang")
    segment.pwrite(b"abc", 0)
    with ThreadPoolExecutor(8) as executor:
        hung = [
            executor.submit(segment.pwrite, b"def", 3),
            executor.submit(segment.datasync),
            executor.submit(index.datasync),
            executor.submit(index.truncate, 0),
            executor.submit(index.allocate, 10),
            executor.submit(disk.rename, str(tmp_path / "0.index"), str(tmp_path / "1.index")),
            executor.submit(disk.sync_dir, str(tmp_path)),
        ]
        assert executor.submit(segment.pread, 0, 6).result() == b"abc", "reads do not hang"
        assert not any(each.done() for each in hung)
        switch.unlink()
        for each in hung:
            each.result(timeout=10)
    assert segment.pread(0, 6) == b"abcdef"
    segment.close()
    index.close()


def test_a_frozen_disk_blocks_the_loop_too(tmp_path: Path) -> None:
    switch = tmp_path / "sick"
    disk = SlowDisk(syncs=str(switch))
    segment = disk.open(str(tmp_path / "0.log"), create=True)
    switch.write_text("freeze")
    Timer(0.1, switch.unlink).start()
    segment.pwrite(b"abc", 0)
    assert not switch.exists()
    segment.close()
