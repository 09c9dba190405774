"""The simulated disk loses exactly what a real disk may lose."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.machines import Machines

from chronik.storage.disk import Disk, RealDisk, read_file, write_file_atomic
from chronik.testing.sim.disk import SYNCS

SEEDS = range(40)


def after_power_loss(seed: int, work: Callable[[Disk], None], look: Callable[[Disk], object]) -> object:
    machines = Machines(seed, count=1)
    work(machines.disk())
    machines.hosts[0].power_off()
    machines.restart()
    seen = look(machines.disk())
    machines.bury()
    return seen


def content(disk: Disk) -> bytes | None:
    return read_file(disk, "/f")


def test_synced_bytes_survive_and_unsynced_bytes_may_be_lost_torn_or_kept() -> None:
    def work(disk: Disk) -> None:
        file = disk.open("/f", create=True)
        disk.sync_dir("/")
        file.pwrite(b"A" * 100, 0)
        file.datasync()
        file.pwrite(b"B" * 100, 100)

    seen = [after_power_loss(seed, work, content) for seed in SEEDS]
    assert all(isinstance(each, bytes) and each.startswith(b"A" * 100) for each in seen)
    assert b"A" * 100 in seen
    assert b"A" * 100 + b"B" * 100 in seen
    torn = [each for each in seen if isinstance(each, bytes) and 100 < len(each.rstrip(b"\0")) < 200]
    assert torn


def test_pages_are_written_back_in_any_order() -> None:
    def work(disk: Disk) -> None:
        file = disk.open("/f", create=True)
        file.allocate(8192)
        file.datasync()
        disk.sync_dir("/")
        file.pwrite(b"B" * 8192, 0)

    seen = {after_power_loss(seed, work, content) for seed in range(200)}
    assert bytes(4096) + b"B" * 4096 in seen


def test_a_new_file_may_be_lost_until_its_folder_is_synced() -> None:
    def work(disk: Disk) -> None:
        disk.open("/f", create=True).datasync()

    def work_and_sync(disk: Disk) -> None:
        work(disk)
        disk.sync_dir("/")

    assert {after_power_loss(seed, work, content) for seed in SEEDS} == {None, b""}
    assert {after_power_loss(seed, work_and_sync, content) for seed in SEEDS} == {b""}


def test_a_moved_file_survives_and_is_only_in_the_new_folder_after_both_syncs() -> None:
    def move(disk: Disk) -> None:
        write_file_atomic(disk, "/f", b"moved")
        disk.mkdir("/other")
        disk.sync_dir("/")
        disk.rename("/f", "/other/f")

    def move_and_sync(disk: Disk) -> None:
        move(disk)
        disk.sync_dir("/other")
        disk.sync_dir("/")

    def places(disk: Disk) -> tuple[bytes | None, bytes | None]:
        return content(disk), read_file(disk, "/other/f")

    assert all(b"moved" in after_power_loss(seed, move, places) for seed in SEEDS)  # type: ignore[operator]
    assert {after_power_loss(seed, move_and_sync, places) for seed in SEEDS} == {(None, b"moved")}


def test_a_replaced_file_has_its_old_or_new_content() -> None:
    def work(disk: Disk) -> None:
        write_file_atomic(disk, "/f", b"old")
        file = disk.open("/f.tmp", create=True)
        file.pwrite(b"new", 0)
        file.datasync()
        disk.rename("/f.tmp", "/f")

    assert {after_power_loss(seed, work, content) for seed in SEEDS} == {b"old", b"new"}


def test_a_removed_folder_may_reappear_with_its_content() -> None:
    def work(disk: Disk) -> None:
        disk.mkdir("/folder")
        write_file_atomic(disk, "/folder/f", b"x")
        disk.sync_dir("/")
        disk.rmtree("/folder")

    seen = {
        after_power_loss(seed, work, lambda disk: read_file(disk, "/folder/f") if disk.exists("/folder") else 0)
        for seed in SEEDS
    }
    assert {0, b"x"} <= seen


def test_a_killed_process_loses_none_of_its_writes(machines: Machines) -> None:
    machines.disk().open("/f", create=True).pwrite(b"cached", 0)
    machines.hosts[0].kill()
    machines.restart()
    assert content(machines.disk()) == b"cached"


def test_a_full_disk_writes_a_part_and_raises_enospc(machines: Machines) -> None:
    disk = machines.disk()
    file = disk.open("/f", create=True)
    machines.hosts[0].disk.fill(3)
    with pytest.raises(OSError) as raised:
        file.pwrite(b"12345", 0)
    assert raised.value.errno == errno.ENOSPC
    assert disk.size("/f") == 3
    file.pwrite(b"xyz", 0)
    machines.hosts[0].disk.make_room()
    file.pwrite(b"12345", 0)
    assert content(disk) == b"12345"


def test_a_sync_after_a_failed_sync_succeeds_without_writing_the_data(machines: Machines) -> None:
    disk = machines.disk()
    file = disk.open("/f", create=True)
    disk.sync_dir("/")
    file.pwrite(b"lost", 0)
    machines.hosts[0].disk.sync_error_share = 1.0
    with pytest.raises(OSError):
        file.datasync()
    machines.hosts[0].disk.sync_error_share = 0.0
    file.datasync()
    assert content(disk) == b"lost"
    machines.hosts[0].power_off()
    machines.restart()
    assert content(machines.disk()) == b""


def test_a_failing_device_refuses_every_write_and_still_serves_reads(machines: Machines) -> None:
    disk, device = machines.disk(), machines.hosts[0].disk
    write_file_atomic(disk, "/f", b"kept")
    file = disk.open("/f")
    device.is_failing = True
    refused: list[Callable[[], object]] = [
        lambda: file.pwrite(b"x", 0),
        lambda: file.truncate(0),
        lambda: file.allocate(100),
        file.datasync,
        lambda: disk.open("/g", create=True),
        lambda: disk.mkdir("/folder"),
        lambda: disk.remove("/f"),
        lambda: disk.rename("/f", "/g"),
        lambda: disk.sync_dir("/"),
    ]
    for write in refused:
        with pytest.raises(OSError) as raised:
            write()
        assert raised.value.errno == errno.EIO
    assert content(disk) == b"kept"
    device.heal()
    file.pwrite(b"again", 0)
    assert content(disk) == b"again"


def test_a_hanging_device_blocks_threads_but_not_the_loop(machines: Machines) -> None:
    disk, device = machines.disk(), machines.hosts[0].disk

    async def main() -> tuple[bool, bool, float]:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        device.hang(100.0, frozenset())
        jobs = [
            loop.run_in_executor(machines.process().executor, write_file_atomic, disk, f"/{number}", b"x")
            for number in range(20)
        ]
        disk.open("/by-the-loop", create=True).pwrite(b"x", 0)
        await asyncio.sleep(90)
        is_waiting, is_written = not any(job.done() for job in jobs), disk.exists("/0")
        await asyncio.gather(*jobs)
        return is_waiting, is_written, loop.time() - began_s

    is_waiting, is_written, took_s = machines.run(main())
    assert is_waiting and not is_written
    assert 99 < took_s < 102
    assert disk.listdir("/") == sorted(["by-the-loop", *map(str, range(20))])


def test_a_hanging_device_may_block_the_loop(machines: Machines) -> None:
    disk, device = machines.disk(), machines.hosts[0].disk

    async def main() -> float:
        began_s = asyncio.get_running_loop().time()
        device.hang(100.0, SYNCS)
        file = disk.open("/f", create=True)
        file.pwrite(b"x", 0)
        await asyncio.sleep(1)
        file.datasync()
        await asyncio.sleep(0)
        return asyncio.get_running_loop().time() - began_s

    assert 99 < machines.run(main()) < 101


def test_a_hanging_write_is_never_done_if_its_process_dies(machines: Machines) -> None:
    disk, device = machines.disk(), machines.hosts[0].disk

    async def main() -> None:
        device.hang(10.0, frozenset())
        await asyncio.get_running_loop().run_in_executor(
            machines.process().executor, write_file_atomic, disk, "/f", b"x"
        )

    machines.begin(main())
    machines.pass_time(5)
    machines.hosts[0].kill()
    machines.pass_time(10)
    machines.restart()
    assert content(machines.disk()) is None


def test_a_lock_is_held_until_its_process_ends(machines: Machines) -> None:
    machines.disk().lock("/lock")
    with pytest.raises(BlockingIOError):
        machines.disk().lock("/lock")
    machines.hosts[0].kill()
    machines.restart()
    machines.disk().lock("/lock").close()
    machines.disk().lock("/lock")


operation = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 1), st.integers(0, 300), st.binary(max_size=100)),
    st.tuples(st.just("truncate"), st.integers(0, 1), st.integers(0, 300)),
    st.tuples(st.just("allocate"), st.integers(0, 1), st.integers(1, 300)),
    st.tuples(st.just("rename"), st.integers(0, 1)),
    st.tuples(st.just("remove"), st.integers(0, 1)),
)


@settings(max_examples=60)
@given(st.lists(operation, max_size=12))
def test_a_simulated_disk_without_faults_behaves_like_a_real_disk(operations: list[tuple[object, ...]]) -> None:
    def play(disk: Disk, root: str) -> list[object]:
        disk.mkdir(f"{root}/sub")
        seen: list[object] = []
        names = [f"{root}/sub/x", f"{root}/sub/y"]
        for kind, number, *more in operations:
            assert isinstance(number, int)
            try:
                if kind == "rename":
                    disk.rename(names[number], names[1 - number])
                elif kind == "remove":
                    disk.remove(names[number])
                else:
                    file = disk.open(names[number], create=True)
                    if kind == "write":
                        file.pwrite(more[1], more[0])  # type: ignore[arg-type]
                    else:
                        getattr(file, str(kind))(more[0])
                    file.datasync()
                    seen.append((file.size(), file.pread(0, 1000)))
                    file.close()
            except OSError as error:
                seen.append(error.errno)
            seen.append(disk.listdir(f"{root}/sub"))
        return seen

    machines = Machines(count=1)
    try:
        with TemporaryDirectory() as folder:
            assert play(machines.disk(), "/simulated") == play(RealDisk(), folder)
    finally:
        machines.bury()
