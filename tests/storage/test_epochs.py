"""Leader epochs: the start and end offsets that followers and clients request."""

import pytest
from tests.storage.faulty_disk import FaultyDisk
from tests.storage.helpers import FOLDER, append, batch, reopen

from chronik.storage.epochs import LeaderEpochs
from chronik.storage.small_files import encode_lines


@pytest.mark.parametrize(
    ("asked", "answer"),
    [(0, (0, 5)), (1, (1, 9)), (2, (1, 9)), (3, (1, 9)), (4, (4, 20)), (5, (-1, -1)), (-1, (-1, -1))],
)
def test_an_epoch_ends_at_the_start_of_the_next_epoch(asked: int, answer: tuple[int, int]) -> None:
    assert LeaderEpochs([(1, 5), (4, 9)]).end_offset(asked, 20) == answer


def test_an_epoch_without_records_leaves_no_entry() -> None:
    epochs = LeaderEpochs()
    for epoch in (1, 2, 3):
        epochs.assign(epoch, 0)
    epochs.assign(2, 7)
    assert epochs.entries() == [(3, 0)]


def test_epochs_are_trimmed_to_the_logs_start_and_end() -> None:
    epochs = LeaderEpochs([(0, 0), (2, 10), (5, 20)])
    epochs.truncate_to(20)
    assert epochs.entries() == [(0, 0), (2, 10)]
    epochs.start_at(12)
    assert epochs.entries() == [(2, 12)]
    assert (epochs.epoch_of(11), epochs.epoch_of(12), epochs.latest) == (-1, 2, 2)


def test_the_file_has_kafkas_format_with_a_checksum() -> None:
    epochs = LeaderEpochs([(0, 0), (3, 1745)])
    assert epochs.encode() == b"1\n2\n0 0\n3 1745\ncrc32c=cb05cc82\n"
    read = LeaderEpochs.decode(epochs.encode())
    assert read is not None
    assert read.entries() == [(0, 0), (3, 1745)]


@pytest.mark.parametrize(
    "data", [b"", b"1\n0\n", b"\xff\xfe", encode_lines("1", ["1 0", "0 5"]), encode_lines("1", ["x y"])]
)
def test_a_damaged_file_is_rejected(data: bytes) -> None:
    assert LeaderEpochs.decode(data) is None


def test_a_flipped_bit_is_detected() -> None:
    good = LeaderEpochs([(0, 0), (3, 1745)]).encode()
    for at in range(len(good)):
        for bit in range(8):
            spoilt = bytearray(good)
            spoilt[at] ^= 1 << bit
            assert LeaderEpochs.decode(bytes(spoilt)) is None


def test_a_log_rebuilds_its_epochs_if_their_file_is_damaged() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    for epoch in (0, 0, 2, 5, 5):
        append(log, batch(), epoch=epoch)
    log.close()
    path = f"{FOLDER}/leader-epoch-checkpoint"
    spoilt = bytearray(disk.content(path))
    spoilt[4] ^= 1
    file = disk.open(path)
    file.pwrite(bytes(spoilt), 0)
    file.close()
    log = reopen(disk)
    assert log.recovery is not None and log.recovery.rebuilt_epochs
    assert log.epochs.entries() == [(0, 0), (2, 2), (5, 3)]


@pytest.mark.parametrize("how", ["cleanly", "killed"])
def test_a_log_keeps_its_epochs_across_restarts(how: str) -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    for epoch in (0, 0, 2, 5, 5):
        append(log, batch(), epoch=epoch)
    log.start_epoch(6)
    assert log.end_offset_for_epoch(6) == (6, 5)
    assert log.end_offset_for_epoch(5) == (5, 5)
    if how == "cleanly":
        log.close()
        assert bytes(disk.content(f"{FOLDER}/leader-epoch-checkpoint")) == encode_lines(
            "1", ["0 0", "2 2", "5 3", "6 5"]
        )
    disk.kill()
    log = reopen(disk)
    assert log.epochs.entries()[:3] == [(0, 0), (2, 2), (5, 3)]
    log.truncate_to(3)
    assert log.epochs.latest == 2
    assert log.epoch_of(1) == 0
