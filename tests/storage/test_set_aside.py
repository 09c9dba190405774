"""Setting files aside: a failure at any time loses nothing, and only files that are old enough are removed."""

import errno
from pathlib import Path
from random import Random

import pytest
from tests.storage.faulty_disk import Crash, FaultyDisk

from chronik.storage.disk import RealDisk
from chronik.storage.folder import expired_set_aside, set_aside

DATA = "/data"
NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000


def written(disk: FaultyDisk, *names: str) -> list[str]:
    """Create durable files of a log."""
    disk.mkdir(f"{DATA}/logs/t-0")
    paths = [f"{DATA}/logs/t-0/{name}" for name in names]
    for path in paths:
        file = disk.open(path, create=True)
        file.pwrite(path.encode(), 0)
        file.datasync()
        file.close()
    for folder in (f"{DATA}/logs/t-0", f"{DATA}/logs", DATA):
        disk.sync_dir(folder)
    return paths


def test_set_aside_moves_files_with_their_content_and_skips_missing_files() -> None:
    disk = FaultyDisk()
    a, b = written(disk, "a.log", "b.log")
    folder = set_aside(disk, DATA, [b, f"{DATA}/logs/t-0/none.log", a], "t-0-17", NOW_MS)
    assert folder == f"{DATA}/set-aside/t-0-17-{NOW_MS}"
    assert disk.listdir(folder) == ["a.log", "b.log"]
    assert bytes(disk.content(f"{folder}/a.log")) == a.encode()
    assert disk.listdir(f"{DATA}/logs/t-0") == []


def test_two_folders_of_the_same_name_and_time_do_not_collide() -> None:
    disk = FaultyDisk()
    a, b = written(disk, "a.log", "b.log")
    first = set_aside(disk, DATA, [a], "t-0-0", NOW_MS)
    second = set_aside(disk, DATA, [b], "t-0-0", NOW_MS)
    assert first != second
    assert [disk.listdir(first), disk.listdir(second)] == [["a.log"], ["b.log"]]


def test_set_aside_moves_a_whole_folder(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "t-0"
    log.mkdir(parents=True)
    (log / "00.log").write_bytes(b"records")
    folder = set_aside(RealDisk(), str(tmp_path), [str(log)], "t-0", NOW_MS)
    assert (Path(folder) / "t-0" / "00.log").read_bytes() == b"records"
    assert not log.exists()


@pytest.mark.parametrize("seed", range(20))
def test_a_power_loss_at_any_step_leaves_each_file_in_exactly_one_place(seed: int) -> None:
    steps = 0
    while True:
        disk = FaultyDisk()
        paths = written(disk, "a.log", "b.log", "c.log")
        disk.crash_at = disk.steps + steps
        try:
            folder = set_aside(disk, DATA, paths, "t-0-17", NOW_MS)
        except Crash:
            folder = ""
        disk.power_loss(Random(seed))
        for path in paths:
            places = [name for name in disk.names if name.endswith(path[-5:])]
            assert len(places) == 1 and bytes(disk.content(places[0])) == path.encode()
            assert not folder or places[0].startswith(folder)
        if folder:
            return
        steps += 1


def test_a_failed_move_leaves_the_remaining_files_in_place() -> None:
    disk = FaultyDisk()
    a, b = written(disk, "a.log", "b.log")
    disk.fail = lambda operation, path: errno.EIO if operation == "rename" and path.endswith("b.log") else None
    with pytest.raises(OSError, match="Input/output"):
        set_aside(disk, DATA, [a, b], "t-0-17", NOW_MS)
    assert disk.exists(b) and not disk.exists(a)
    assert disk.exists(f"{DATA}/set-aside/t-0-17-{NOW_MS}/a.log")


def test_only_folders_older_than_the_retention_have_expired() -> None:
    disk = FaultyDisk()
    assert expired_set_aside(disk, DATA, NOW_MS, 0) == []
    a, b = written(disk, "a.log", "b.log")
    old = set_aside(disk, DATA, [a], "t-0-0", NOW_MS)
    set_aside(disk, DATA, [b], "t-0-0", NOW_MS + DAY_MS)
    disk.mkdir(f"{DATA}/set-aside/of-somebody-else")
    disk.mkdir(f"{DATA}/set-aside/t-0-7")
    assert expired_set_aside(disk, DATA, NOW_MS + DAY_MS - 1, DAY_MS) == []
    assert expired_set_aside(disk, DATA, NOW_MS + DAY_MS, DAY_MS) == [old]
    assert expired_set_aside(disk, DATA, NOW_MS + 9 * DAY_MS, -1) == []
