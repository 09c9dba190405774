"""Leader epochs: which began where, as followers and clients ask for them."""

import pytest
from tests.storage.faulty_disk import FaultyDisk
from tests.storage.helpers import FOLDER, append, batch, reopen

from chronik.storage.epochs import LeaderEpochs


@pytest.mark.parametrize(
    ("asked", "answer"),
    [(0, (0, 5)), (1, (1, 9)), (2, (1, 9)), (3, (1, 9)), (4, (4, 20)), (5, (-1, -1)), (-1, (-1, -1))],
)
def test_the_end_of_an_epoch_is_where_the_next_begins(asked: int, answer: tuple[int, int]) -> None:
    assert LeaderEpochs([(1, 5), (4, 9)]).end_offset(asked, 20) == answer


def test_an_epoch_without_records_leaves_no_trace() -> None:
    epochs = LeaderEpochs()
    for epoch in (1, 2, 3):
        epochs.assign(epoch, 0)
    epochs.assign(2, 7)
    assert epochs.entries() == [(3, 0)]


def test_epochs_follow_the_logs_start_and_end() -> None:
    epochs = LeaderEpochs([(0, 0), (2, 10), (5, 20)])
    epochs.truncate_to(20)
    assert epochs.entries() == [(0, 0), (2, 10)]
    epochs.start_at(12)
    assert epochs.entries() == [(2, 12)]
    assert (epochs.epoch_of(11), epochs.epoch_of(12), epochs.latest) == (-1, 2, 2)


def test_the_file_is_kafkas() -> None:
    epochs = LeaderEpochs([(0, 0), (3, 1745)])
    assert epochs.encode() == b"0\n2\n0 0\n3 1745\n"
    read = LeaderEpochs.decode(epochs.encode())
    assert read is not None
    assert read.entries() == [(0, 0), (3, 1745)]


@pytest.mark.parametrize("data", [b"", b"1\n0\n", b"0\n2\n0 0\n", b"0\n2\n1 0\n0 5\n", b"\xff\xfe", b"0\n1\nx y\n"])
def test_a_damaged_file_is_not_believed(data: bytes) -> None:
    assert LeaderEpochs.decode(data) is None


@pytest.mark.parametrize("how", ["cleanly", "killed"])
def test_a_log_keeps_its_epochs(how: str) -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    for epoch in (0, 0, 2, 5, 5):
        append(log, batch(), epoch=epoch)
    log.start_epoch(6)
    assert log.end_offset_for_epoch(6) == (6, 5)
    assert log.end_offset_for_epoch(5) == (5, 5)
    if how == "cleanly":
        log.close()
        assert bytes(disk.content(f"{FOLDER}/leader-epoch-checkpoint")) == b"0\n4\n0 0\n2 2\n5 3\n6 5\n"
    disk.kill()
    log = reopen(disk)
    assert log.epochs.entries()[:3] == [(0, 0), (2, 2), (5, 3)]
    log.truncate_to(3)
    assert log.epochs.latest == 2
    assert log.epoch_of(1) == 0
