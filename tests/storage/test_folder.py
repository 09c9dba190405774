"""The data folder: its owner, its lock, and what a node learns from it at startup."""

import contextlib
import os
import shutil
from pathlib import Path
from uuid import UUID

import pytest

from chronik.storage.disk import RealDisk, RealFile, StorageError
from chronik.storage.folder import BootRecord, Claim, DataFolder, DataFolderError, RecoveryPoint

TOPIC_ID = UUID(int=7)
NOW_MS = 1_700_000_000_000


def opened(path: Path, node_id: int = 1) -> DataFolder:
    return DataFolder.open(RealDisk(), str(path / "data"), node_id, "new-cluster")


def test_a_data_folder_keeps_the_node_id_and_cluster_id_of_its_creation(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    assert (folder.meta.format_version, folder.meta.node_id, folder.meta.cluster_id) == (1, 1, "new-cluster")
    folder.close()
    again = DataFolder.open(RealDisk(), str(tmp_path / "data"), 1, "other")
    assert again.meta.cluster_id == "new-cluster"
    again.close()


def test_a_data_folder_refuses_a_second_node_while_the_first_runs(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    with pytest.raises(DataFolderError, match="in use by another node"):
        opened(tmp_path)
    folder.close()
    opened(tmp_path).close()


def test_a_node_refuses_the_data_folder_of_another_node(tmp_path: Path) -> None:
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


def test_a_folder_with_logs_but_no_meta_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data" / "logs" / "topic-0").mkdir(parents=True)
    with pytest.raises(DataFolderError, match="holds logs but no"):
        opened(tmp_path)


def test_a_folder_that_cannot_be_created_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    with pytest.raises(DataFolderError) as raised:
        opened(tmp_path)
    assert "\n" not in str(raised.value)
    assert "cannot be used" in str(raised.value)


def test_only_a_clean_shutdown_leaves_a_marker_and_the_next_start_removes_it(tmp_path: Path) -> None:
    assert not opened_and_closed(tmp_path, clean=True)
    assert opened_and_closed(tmp_path, clean=False)
    assert not opened_and_closed(tmp_path, clean=True)


def opened_and_closed(path: Path, *, clean: bool) -> bool:
    folder = opened(path)
    if clean:
        folder.record_clean_shutdown({("topic", 0): RecoveryPoint(UUID(int=1), 5)})
    folder.close()
    return folder.was_clean


def test_the_clean_shutdown_marker_names_the_stopped_broker_epoch(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    assert (folder.was_clean, folder.stopped_epoch) == (False, None)
    folder.record_clean_shutdown({}, {}, 17)
    folder.close()
    again = opened(tmp_path)
    assert (again.was_clean, again.stopped_epoch) == (True, 17)
    again.close()


@pytest.mark.parametrize(("mark", "was_clean"), [(b"", True), (b"1x", False)], ids=["of the first versions", "damaged"])
def test_a_marker_without_an_epoch_yields_no_stopped_epoch(tmp_path: Path, mark: bytes, was_clean: bool) -> None:
    opened(tmp_path).close()
    (tmp_path / "data" / "clean-shutdown").write_bytes(mark)
    folder = opened(tmp_path)
    assert (folder.was_clean, folder.stopped_epoch) == (was_clean, None)
    folder.close()


def test_recovery_points_persist_and_a_damaged_file_yields_none(tmp_path: Path) -> None:
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


def test_partitions_are_listed_and_a_removed_partition_disappears_at_once(tmp_path: Path) -> None:
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


def test_a_new_topic_does_not_inherit_the_log_of_a_deleted_topic_of_its_name(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.claim_log("topic", 0, UUID(int=1), NOW_MS)
    data = Path(folder.log_path("topic", 0)) / "data"
    data.write_text("old")
    folder.claim_log("topic", 0, UUID(int=1), NOW_MS)
    assert data.exists()
    moved_to = folder.claim_log("topic", 0, UUID(int=2), NOW_MS).moved_to
    assert not data.exists()
    assert moved_to is not None and (Path(moved_to) / "topic-0" / "data").read_text() == "old"
    folder.close()


def test_a_new_data_folder_syncs_its_parent_folders(tmp_path: Path) -> None:
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


def test_the_boot_record_names_the_last_registered_process_and_later_ones(tmp_path: Path) -> None:
    first, second, third = (UUID(int=number) for number in (1, 2, 3))
    folder = opened(tmp_path)
    assert folder.boot is None
    folder.record_start(first)
    folder.record_registration("boot 1", 7, first, 11)
    folder.close()
    for incarnation in (second, third):
        folder = opened(tmp_path)
        folder.record_start(incarnation)
        folder.close()
    folder = opened(tmp_path)
    assert folder.boot == BootRecord("boot 1", 7, (first, second, third), 11)
    folder.record_registration("boot 2", 9, third, 12)
    folder.close()
    folder = opened(tmp_path)
    assert folder.boot == BootRecord("boot 2", 9, (third,), 12)
    folder.close()


def test_the_boot_record_is_bounded_and_keeps_the_last_registered_process(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.record_registration("boot 1", 7, UUID(int=0), 11)
    for number in range(1, 100):
        folder.record_start(UUID(int=number))
    assert folder.boot is not None
    numbers = [incarnation.int for incarnation in folder.boot.incarnations]
    assert len(numbers) == 32 and numbers[0] == 0 and numbers[-1] == 99
    folder.close()


def test_after_a_failed_sync_the_next_process_distrusts_the_page_cache(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.record_registration("boot 1", 7, UUID(int=1), 11)
    folder.distrust_page_cache()
    folder.close()
    folder = opened(tmp_path)
    assert folder.boot == BootRecord("", 7, (UUID(int=1),), 11)
    folder.close()


def test_a_log_with_a_recovery_point_but_no_folder_is_lost(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.claim_log("orders", 0, TOPIC_ID, NOW_MS)
    folder.recovery_points[("orders", 0)] = RecoveryPoint(TOPIC_ID, 0)
    assert not folder.is_lost("orders", 0, TOPIC_ID)
    shutil.rmtree(folder.log_path("orders", 0))
    assert folder.is_lost("orders", 0, TOPIC_ID)
    assert not folder.is_lost("orders", 0, UUID(int=8)), "a new topic of that name had no log yet"
    assert not folder.is_lost("orders", 1, TOPIC_ID), "it was never listed"
    folder.close()


@pytest.mark.parametrize("name", ["recovery-points", "high-watermarks", "boot-record"])
def test_a_flipped_bit_in_a_checkpoint_file_is_detected(tmp_path: Path, name: str) -> None:
    folder = opened(tmp_path)
    folder.record_registration("boot 1", 7, UUID(int=1), 11)
    folder.record_clean_shutdown({("orders", 0): RecoveryPoint(TOPIC_ID, 60)}, {(TOPIC_ID, 0): 60}, 3)
    folder.close()
    path = tmp_path / "data" / name
    good = path.read_bytes()
    for at in range(len(good)):
        spoilt = bytearray(good)
        spoilt[at] ^= 1 << (at % 8)
        path.write_bytes(spoilt)
        folder = opened(tmp_path)
        read = {"recovery-points": folder.recovery_points, "high-watermarks": folder.high_watermarks}.get(name)
        assert not (folder.boot if read is None else read), f"byte {at} passed"
        folder.close()


@pytest.mark.parametrize("flipped", range(8))
def test_a_flipped_bit_in_a_topic_id_deletes_no_record(tmp_path: Path, flipped: int) -> None:
    folder = opened(tmp_path)
    folder.claim_log("orders", 0, TOPIC_ID, NOW_MS)
    log = Path(folder.log_path("orders", 0))
    records = log / f"{0:020d}.log"
    records.write_bytes(b"records")
    good = (log / "topic-id").read_bytes()
    for at in range(len(good)):
        spoilt = bytearray(good)
        spoilt[at] ^= 1 << flipped
        (log / "topic-id").write_bytes(spoilt)
        with contextlib.suppress(StorageError):
            folder.claim_log("orders", 0, TOPIC_ID, NOW_MS)
        assert records.read_bytes() == b"records"
    folder.close()


@pytest.mark.parametrize("content", [None, b"", b"00000000-0000", b"\xff" * 40])
def test_a_topic_id_is_restored_if_the_recovery_points_list_the_log(tmp_path: Path, content: bytes | None) -> None:
    folder = opened(tmp_path)
    folder.claim_log("orders", 0, TOPIC_ID, NOW_MS)
    folder.recovery_points[("orders", 0)] = RecoveryPoint(TOPIC_ID, 3)
    log = Path(folder.log_path("orders", 0))
    (log / f"{0:020d}.log").write_bytes(b"records")
    good = (log / "topic-id").read_bytes()
    (log / "topic-id").unlink()
    if content is not None:
        (log / "topic-id").write_bytes(content)
    assert not folder.is_lost("orders", 0, TOPIC_ID)
    assert folder.claim_log("orders", 0, TOPIC_ID, NOW_MS).restored.startswith("it is ")
    assert (log / "topic-id").read_bytes() == good
    assert folder.claim_log("orders", 0, TOPIC_ID, NOW_MS) == Claim()
    folder.close()


@pytest.mark.parametrize("point", [None, RecoveryPoint(UUID(int=8), 3)])
def test_a_log_with_a_damaged_topic_id_is_not_used_without_proof_of_its_owner(
    tmp_path: Path, point: RecoveryPoint | None
) -> None:
    folder = opened(tmp_path)
    folder.claim_log("orders", 0, TOPIC_ID, NOW_MS)
    if point is not None:
        folder.recovery_points[("orders", 0)] = point
    log = Path(folder.log_path("orders", 0))
    (log / f"{0:020d}.log").write_bytes(b"records")
    (log / "topic-id").write_bytes(b"damaged")
    with pytest.raises(StorageError, match=f"{log}/topic-id is damaged .* does not list this log .* remove topic-id"):
        folder.claim_log("orders", 0, TOPIC_ID, NOW_MS)
    assert (log / "topic-id").read_bytes() == b"damaged"
    (log / "topic-id").unlink()
    assert folder.claim_log("orders", 0, TOPIC_ID, NOW_MS).restored == "it is missing"
    assert (log / f"{0:020d}.log").read_bytes() == b"records"
    folder.close()


def test_a_damaged_topic_id_of_an_empty_listed_log_loses_nothing(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.claim_log("orders", 0, TOPIC_ID, NOW_MS)
    folder.recovery_points[("orders", 0)] = RecoveryPoint(TOPIC_ID, 0)
    (Path(folder.log_path("orders", 0)) / "topic-id").write_bytes(b"damaged")
    assert not folder.is_lost("orders", 0, TOPIC_ID)
    assert folder.claim_log("orders", 0, TOPIC_ID, NOW_MS) == Claim()
    folder.close()


def test_an_incomplete_topic_id_of_an_empty_log_is_rewritten(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.claim_log("orders", 0, TOPIC_ID, NOW_MS)
    path = Path(folder.log_path("orders", 0)) / "topic-id"
    good = path.read_bytes()
    path.write_bytes(good[:10])
    folder.claim_log("orders", 0, TOPIC_ID, NOW_MS)
    assert path.read_bytes() == good
    folder.close()


def test_a_restarted_node_syncs_a_topic_id_that_may_not_be_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power loss removes the id and leaves records whose topic is unknown (seed 2968494986)."""
    synced: list[str] = []
    datasync = RealFile.datasync

    def recorded(file: RealFile) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file._fd}"))
        datasync(file)

    folder = opened(tmp_path)
    folder.claim_log("orders", 0, TOPIC_ID, NOW_MS)
    folder.close()
    monkeypatch.setattr(RealFile, "datasync", recorded)
    folder = opened(tmp_path)
    folder.claim_log("orders", 0, TOPIC_ID, NOW_MS)
    assert synced == [f"{folder.log_path('orders', 0)}/topic-id"]
    folder.close()


def test_a_topic_id_file_of_an_earlier_version_is_readable(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.claim_log("orders", 0, TOPIC_ID, NOW_MS)
    log = Path(folder.log_path("orders", 0))
    (log / "topic-id").write_text(f"{TOPIC_ID}\n")
    (log / f"{0:020d}.log").write_bytes(b"records")
    folder.claim_log("orders", 0, TOPIC_ID, NOW_MS)
    assert (log / f"{0:020d}.log").exists()
    folder.claim_log("orders", 0, UUID(int=8), NOW_MS)
    assert not (log / f"{0:020d}.log").exists()
    folder.close()


def test_opening_a_stopped_nodes_folder_locks_it_and_changes_no_file(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.claim_log("t", 0, TOPIC_ID, NOW_MS)
    folder.claim_log("untold", 0, TOPIC_ID, NOW_MS)
    points = {("t", 0): RecoveryPoint(TOPIC_ID, 5), ("gone", 1): RecoveryPoint(UUID(int=8), 9)}
    folder.record_clean_shutdown(points, {(TOPIC_ID, 0): 4}, 6)
    folder.close()
    (tmp_path / "data" / "logs" / "untold-0" / "topic-id").write_text("damaged")
    before = {path: path.read_bytes() for path in sorted((tmp_path / "data").rglob("*")) if path.is_file()}
    stopped = DataFolder.open_stopped(RealDisk(), str(tmp_path / "data"))
    assert (stopped.meta.node_id, stopped.was_clean, stopped.recovery_points) == (1, True, points)
    assert stopped.high_watermarks == {(TOPIC_ID, 0): 4}
    ids = [stopped.topic_id("t", 0), stopped.topic_id("gone", 1), stopped.topic_id("untold", 0)]
    assert ids == [TOPIC_ID, UUID(int=8), None]
    with pytest.raises(DataFolderError, match="stop its node first"):
        DataFolder.open_stopped(RealDisk(), str(tmp_path / "data"))
    stopped.close()
    assert before == {path: path.read_bytes() for path in sorted((tmp_path / "data").rglob("*")) if path.is_file()}
    again = opened(tmp_path)
    assert again.was_clean
    again.close()


def test_opening_a_folder_that_belongs_to_no_node_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataFolderError, match="not the data folder of a node"):
        DataFolder.open_stopped(RealDisk(), str(tmp_path))
    assert list(tmp_path.iterdir()) == []
