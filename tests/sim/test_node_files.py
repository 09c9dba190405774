"""The simulator damages the files of a stopped node: exactly as intended, durably, and only what was durable."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from uuid import UUID

import pytest
from tests.sim.machines import Machines

from chronik.node.membership.cluster_member import STORE_NAME
from chronik.storage.commit_log import FILE_BYTES_MIN, FILES_MAX, Entry, LogId
from chronik.storage.config import LogConfig
from chronik.storage.disk import read_file, write_file_atomic
from chronik.storage.folder import DataFolder, RecoveryPoint
from chronik.storage.log import Log
from chronik.testing.sim.node_files import Exposed, NodeFiles
from chronik.testing.sim.tree import FileNode
from chronik.wire.batch import check_batches, encode_batch

NODE = "/data/node-1"
TOPIC_ID = UUID(int=7)
LOG = ("records", 0)
BATCHES = 30
POINT = 40
SEEDS = range(60)


class Stopped:
    """A machine whose node was killed: one log of 60 records in several segments, durable up to `POINT` and beyond."""

    def __init__(self, topic: str = LOG[0]) -> None:
        self.machines = Machines(count=1)
        self.log = (topic, 0)
        disk = self.machines.disk()
        folder = DataFolder.open(disk, NODE, 1, "c")
        folder.claim_log(topic, 0, TOPIC_ID, 0)
        log = Log.open(disk, folder.log_path(topic, 0), LogConfig(segment_bytes=1_000), 0)
        for number in range(BATCHES):
            data = bytearray(encode_batch([(None, b"%d" % number, (), 0), (None, b"x" * 50, (), 0)]))
            log.append(data, check_batches(memoryview(data), len(data)), 0, 0)
            job = log.sync_job()
            if job is not None:
                job.run()
                log.synced(job)
        folder.recovery_points_job({(topic, 0): RecoveryPoint(TOPIC_ID, POINT)})()
        write_file_atomic(disk, f"{NODE}/{STORE_NAME}", b"store")
        self.machines.hosts[0].kill()
        self.files = NodeFiles(self.machines.hosts[0], NODE, 1)
        self.exposed = Exposed(self.log, POINT)

    def opened(self) -> Log:
        """Open the log as the node would find it after a power failure."""
        self.machines.hosts[0].power_off()
        self.machines.restart()
        disk = self.machines.disk()
        folder = DataFolder.open(disk, NODE, 1, "c")
        point = folder.recovery_point(*self.log, TOPIC_ID)
        return Log.open(disk, folder.log_path(*self.log), LogConfig(segment_bytes=1_000), 0, recovery_point=point)


@pytest.fixture
def stopped() -> Iterator[Stopped]:
    made = Stopped()
    yield made
    made.machines.bury()


def test_records_below_the_synced_end_are_exposed_after_a_kill(stopped: Stopped) -> None:
    assert stopped.files.exposed() == [Exposed(LOG, 2 * BATCHES)]
    assert stopped.files.whole_end(LOG) == 2 * BATCHES
    assert stopped.opened().log_end_offset == 2 * BATCHES


def test_inspecting_a_folder_changes_nothing(stopped: Stopped) -> None:
    before = stopped.files.copy()
    stopped.files.exposed()
    stopped.files.put_back(before)
    assert stopped.opened().log_end_offset == 2 * BATCHES


def test_a_removed_log_stays_removed_after_a_power_failure(stopped: Stopped) -> None:
    stopped.files.remove_log(stopped.exposed)
    assert stopped.files.whole_end(LOG) == 0
    assert stopped.opened().log_end_offset == 0


def test_a_shortened_log_lacks_durable_records() -> None:
    notes = set()
    for seed in SEEDS:
        stopped = Stopped()
        note = stopped.files.shorten(stopped.exposed, Random(seed))
        notes.add(note.split()[0])
        end = stopped.files.whole_end(LOG)
        assert end is None or end < POINT or note == f"lost {0:020}.log"
        stopped.machines.bury()
    assert notes == {"has", "lost"}


def test_a_compacted_log_is_shortened_only_if_the_loss_is_detectable() -> None:
    for seed in SEEDS:
        stopped = Stopped("__consumer_offsets")
        stopped.files.shorten(stopped.exposed, Random(seed))
        end = stopped.files.whole_end(stopped.log)
        assert end is None or end < POINT
        stopped.machines.bury()


def test_a_damaged_batch_fails_its_check() -> None:
    for seed in SEEDS:
        stopped = Stopped()
        stopped.files.damage(stopped.exposed, Random(seed))
        end = stopped.files.whole_end(LOG)
        assert end is None or end < POINT
        stopped.machines.bury()


def test_a_folder_is_restored_from_its_copy(stopped: Stopped) -> None:
    copy = stopped.files.copy()
    for _ in range(2):
        stopped.files.remove_log(stopped.exposed)
        stopped.files.put_back(copy)
        assert stopped.files.whole_end(LOG) == 2 * BATCHES
    assert stopped.opened().log_end_offset == 2 * BATCHES


def test_a_removed_raft_store_can_be_restored(stopped: Stopped) -> None:
    store = stopped.files.take_store()
    assert store is not None
    stopped.machines.restart()
    assert read_file(stopped.machines.disk(), f"{NODE}/{STORE_NAME}") is None
    stopped.machines.hosts[0].kill()
    stopped.files.put_store(store)
    stopped.machines.hosts[0].power_off()
    stopped.machines.restart()
    assert read_file(stopped.machines.disk(), f"{NODE}/{STORE_NAME}") == b"store"


def test_a_lost_commit_log_is_noticed_if_it_counted() -> None:
    notes = set()
    for seed in range(16):
        machines = Machines(count=1)
        disk = machines.disk()
        commit_log = DataFolder.open(disk, NODE, 1, "c").begin_commit_log(UUID(int=1), FILES_MAX * FILE_BYTES_MIN)
        commit_log.add_file()
        files = NodeFiles(machines.hosts[0], NODE, 1)
        assert files.lose_commit_log(Random(seed)) is None
        commit_log.write([Entry(LogId(TOPIC_ID, 0), 0, 0, 1, b"x")])
        machines.hosts[0].power_off()
        notes.add(files.lose_commit_log(Random(seed)))
        machines.restart()
        replayed = DataFolder.open(machines.disk(), NODE, 1, "c").replayed
        assert replayed is not None and replayed.damage
        machines.bury()
    assert notes == {f"lost the {what} of its commit log" for what in ("folder", "files", "frames", "newest frames")}


def test_rot_damages_a_closed_segment_only_and_spares_the_given_logs(stopped: Stopped) -> None:
    before = stopped.files.copy()
    segments = sorted(name for name in _log_files(stopped) if name.endswith(".log"))
    last = bytes(_log_files(stopped)[segments[-1]])
    for seed in SEEDS:
        stopped.files.put_back(before)
        assert stopped.files.rot(Random(seed), [LOG]) is None
        assert stopped.files.whole_end(LOG) == 2 * BATCHES
        rotted = stopped.files.rot(Random(seed), [])
        assert rotted is not None and rotted[0] == LOG
        assert stopped.files.whole_end(LOG) is None
        assert _log_files(stopped)[segments[-1]] == last


def _log_files(stopped: Stopped) -> dict[str, bytes]:
    folder = stopped.machines.hosts[0].disk.root.folder(f"{NODE}/logs/{LOG[0]}-{LOG[1]}")
    assert folder is not None
    return {name: bytes(file.cached) for name, file in folder.names.items() if isinstance(file, FileNode)}
