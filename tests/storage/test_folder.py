"""The data folder: whose it is, who holds it, and what a start learns from it."""

import contextlib
import os
from pathlib import Path
from uuid import UUID

import pytest

from chronik.storage.disk import RealDisk, RealFile
from chronik.storage.errors import DataFolderError, StorageError
from chronik.storage.folder import DataFolder, Life, RecoveryPoint

TOPIC_ID = UUID(int=7)


def opened(path: Path, node_id: int = 1) -> DataFolder:
    return DataFolder.open(RealDisk(), str(path / "data"), node_id, "new-cluster")


def test_a_new_folder_gets_the_nodes_name_and_keeps_it(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    assert (folder.meta.format_version, folder.meta.node_id, folder.meta.cluster_id) == (1, 1, "new-cluster")
    folder.close()
    again = DataFolder.open(RealDisk(), str(tmp_path / "data"), 1, "other")
    assert again.meta.cluster_id == "new-cluster"
    again.close()


def test_a_second_node_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    with pytest.raises(DataFolderError, match="in use by another node"):
        opened(tmp_path)
    folder.close()
    opened(tmp_path).close()


def test_another_nodes_folder_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with pytest.raises(DataFolderError, match=r"belongs to node 1, this is node 2.*--node-id 1"):
        opened(tmp_path, node_id=2)
    opened(tmp_path).close()


@pytest.mark.parametrize(
    ("meta", "why"),
    [
        ('{"format_version": 99, "node_id": 1, "cluster_id": "x"}', "has format 99"),
        ("not json", "cannot be read"),
        ('{"node_id": 1}', "cannot be read"),
        ("[]", "cannot be read"),
    ],
)
def test_a_folder_of_an_unknown_format_is_refused(tmp_path: Path, meta: str, why: str) -> None:
    opened(tmp_path).close()
    (tmp_path / "data" / "meta.json").write_text(meta)
    with pytest.raises(DataFolderError, match=why):
        opened(tmp_path)


def test_logs_without_meta_are_not_taken_for_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "data" / "logs" / "topic-0").mkdir(parents=True)
    with pytest.raises(DataFolderError, match="holds logs but no"):
        opened(tmp_path)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    with pytest.raises(DataFolderError) as raised:
        opened(tmp_path)
    assert "\n" not in str(raised.value)
    assert "cannot be used" in str(raised.value)


def test_only_a_clean_shutdown_leaves_the_marker_and_only_for_one_start(tmp_path: Path) -> None:
    assert not opened_and_closed(tmp_path, clean=True)
    assert opened_and_closed(tmp_path, clean=False)
    assert not opened_and_closed(tmp_path, clean=True)


def opened_and_closed(path: Path, *, clean: bool) -> bool:
    folder = opened(path)
    if clean:
        folder.record_clean_shutdown({("topic", 0): RecoveryPoint(UUID(int=1), 5)})
    folder.close()
    return folder.was_clean


def test_the_marker_says_which_broker_epoch_has_stopped(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    assert (folder.was_clean, folder.stopped_epoch) == (False, None)
    folder.record_clean_shutdown({}, {}, 17)
    folder.close()
    again = opened(tmp_path)
    assert (again.was_clean, again.stopped_epoch) == (True, 17)
    again.close()


@pytest.mark.parametrize(("mark", "was_clean"), [(b"", True), (b"1x", False)], ids=["of the first versions", "damaged"])
def test_a_marker_without_an_epoch_proves_nothing(tmp_path: Path, mark: bytes, was_clean: bool) -> None:
    opened(tmp_path).close()
    (tmp_path / "data" / "clean-shutdown").write_bytes(mark)
    folder = opened(tmp_path)
    assert (folder.was_clean, folder.stopped_epoch) == (was_clean, None)
    folder.close()


def test_recovery_points_are_kept_and_a_damaged_file_counts_as_none(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    points = {
        ("a.topic-with_signs", 3): RecoveryPoint(UUID(int=1), 17),
        ("b", 0): RecoveryPoint(UUID(int=2), 1 << 40),
    }
    folder.recovery_points_job(points)()
    folder.close()
    again = opened(tmp_path)
    assert again.recovery_points == points
    assert again.recovery_point("b", 0, UUID(int=2)) == 1 << 40
    assert again.recovery_point("b", 0, UUID(int=3)) is None
    again.close()
    (tmp_path / "data" / "recovery-points").write_text("1\n2\na 0 1\n")
    assert opened(tmp_path).recovery_points == {}


def test_partitions_are_listed_and_a_removed_one_is_gone_at_once(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    for topic, partition in (("a-b", 0), ("a-b", 12), ("c", 0)):
        Path(folder.log_path(topic, partition)).mkdir(parents=True)
    assert folder.partitions() == [("a-b", 0), ("a-b", 12), ("c", 0)]
    remove = folder.remove_log("a-b", 12)
    assert folder.partitions() == [("a-b", 0), ("c", 0)]
    remove()
    folder.remove_log("c", 0)
    folder.close()
    again = opened(tmp_path)
    assert sorted(path.name for path in (tmp_path / "data" / "logs").iterdir()) == ["a-b-0"]
    again.close()


def test_a_log_of_a_deleted_topic_of_the_same_name_is_not_inherited(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.claim_log("topic", 0, UUID(int=1))
    data = Path(folder.log_path("topic", 0)) / "data"
    data.write_text("old")
    folder.claim_log("topic", 0, UUID(int=1))
    assert data.exists()
    folder.claim_log("topic", 0, UUID(int=2))
    assert not data.exists()
    folder.close()


def test_the_name_of_a_folder_that_is_made_is_made_durable(tmp_path: Path) -> None:
    class Watched(RealDisk):
        synced: list[str]

        def sync_dir(self, path: str) -> None:
            self.synced.append(path)
            super().sync_dir(path)

    disk = Watched()
    disk.synced = []
    DataFolder.open(disk, str(tmp_path / "a" / "b"), 1, "cluster").close()
    assert str(tmp_path) in disk.synced
    assert str(tmp_path / "a") in disk.synced


def test_a_life_is_told_to_the_next_process_until_a_sync_fails(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    assert folder.last_life is None
    folder.record_life("boot 1", 7)
    folder.close()
    folder = opened(tmp_path)
    assert folder.last_life == Life("boot 1", 7)
    folder.forget_life()
    folder.close()
    folder = opened(tmp_path)
    assert folder.last_life is None
    folder.close()


@pytest.mark.parametrize("flipped", range(8))
def test_a_flipped_bit_in_a_topic_id_deletes_no_record(tmp_path: Path, flipped: int) -> None:
    folder = opened(tmp_path)
    folder.claim_log("orders", 0, TOPIC_ID)
    log = Path(folder.log_path("orders", 0))
    records = log / f"{0:020d}.log"
    records.write_bytes(b"records")
    good = (log / "topic-id").read_bytes()
    for at in range(len(good)):
        spoilt = bytearray(good)
        spoilt[at] ^= 1 << flipped
        (log / "topic-id").write_bytes(spoilt)
        with contextlib.suppress(StorageError):
            folder.claim_log("orders", 0, TOPIC_ID)
        assert records.read_bytes() == b"records"
    folder.close()


def test_an_unfinished_topic_id_of_a_log_without_records_is_written_anew(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.claim_log("orders", 0, TOPIC_ID)
    path = Path(folder.log_path("orders", 0)) / "topic-id"
    good = path.read_bytes()
    path.write_bytes(good[:10])
    folder.claim_log("orders", 0, TOPIC_ID)
    assert path.read_bytes() == good
    folder.close()


def test_a_topic_id_that_a_killed_process_may_not_have_synced_is_synced_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power loss takes it, and leaves records of which nobody knows whose they are (seed 2968494986)."""
    synced: list[str] = []
    datasync = RealFile.datasync

    def recorded(file: RealFile) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file._fd}"))
        datasync(file)

    folder = opened(tmp_path)
    folder.claim_log("orders", 0, TOPIC_ID)
    folder.close()
    monkeypatch.setattr(RealFile, "datasync", recorded)
    folder = opened(tmp_path)
    folder.claim_log("orders", 0, TOPIC_ID)
    assert synced == [f"{folder.log_path('orders', 0)}/topic-id"]
    folder.close()


def test_a_topic_id_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.claim_log("orders", 0, TOPIC_ID)
    log = Path(folder.log_path("orders", 0))
    (log / "topic-id").write_text(f"{TOPIC_ID}\n")
    (log / f"{0:020d}.log").write_bytes(b"records")
    folder.claim_log("orders", 0, TOPIC_ID)
    assert (log / f"{0:020d}.log").exists()
    folder.claim_log("orders", 0, UUID(int=8))
    assert not (log / f"{0:020d}.log").exists()
    folder.close()
