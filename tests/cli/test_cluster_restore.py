"""`chronik cluster restore-metadata`, used wrongly: one line that names the folders and the way out."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID, uuid4

import pytest
from tests.cli.run_chronik import Outcome, chronik

from chronik.node.membership.raft_store import SqliteRaftStore
from chronik.raft.store import Entry, EntryKind, HardState, Persist
from chronik.storage.disk import RealDisk
from chronik.storage.folder import DataFolder, RecoveryPoint

ORDERS, OTHER = UUID(int=1), UUID(int=2)


def make_node(folder: Path, node_id: int, cluster_id: str = "one", topic_id: UUID = ORDERS) -> Path:
    """Create a data folder with an empty log, as a clean stop leaves it."""
    path = folder / f"node-{node_id}"
    made = DataFolder.open(RealDisk(), str(path), node_id, cluster_id)
    made.claim_log("orders", 0, topic_id, 0)
    made.record_clean_shutdown({("orders", 0): RecoveryPoint(topic_id, 0)}, {})
    made.close()
    return path


def restore(*paths: Path) -> Outcome:
    return chronik("cluster", "restore-metadata", *[part for path in paths for part in ("--node-dir", str(path))])


def test_restore_metadata_rebuilds_lost_metadata_from_the_data_folders(tmp_path: Path) -> None:
    paths = [make_node(tmp_path, node_id) for node_id in (1, 2)]
    blank = SqliteRaftStore(str(paths[1] / "metadata.db"), uuid4)
    blank_id = blank.load().store_id
    blank.close()
    done = restore(*paths, paths[0])
    assert done.code == 0, done.err
    assert "orders" in done.out and str(ORDERS) in done.out
    assert "lost: settings of topics" in done.out and "retention.ms=-1" in done.out
    stored = []
    for path in paths:
        store = SqliteRaftStore(str(path / "metadata.db"), uuid4)
        stored.append(store.load())
        store.close()
    assert stored[0].snapshot == stored[1].snapshot and stored[0].snapshot is not None
    members = stored[0].snapshot.membership.members
    assert [(member.node_id, member.is_voter) for member in members] == [(1, True), (2, True)]
    assert [member.store for member in members] == [state.store_id for state in stored]
    assert blank_id not in [member.store for member in members], "what it voted for is forgotten"
    again = restore(*paths)
    assert again.code == 2 and f"{paths[0]}/metadata.db has metadata" in again.error_line


def test_restore_metadata_does_not_overwrite_existing_metadata(tmp_path: Path) -> None:
    first, second = make_node(tmp_path, 1), make_node(tmp_path, 2)
    store = SqliteRaftStore(str(second / "metadata.db"), uuid4)
    store.load()
    store.persist(Persist(HardState(1, None, 0), entries=(Entry(1, 1, EntryKind.NO_OP, b""),)))
    store.close()
    refused = restore(first, second)
    assert refused.code == 2
    assert f"{second}/metadata.db has metadata or cannot be read: start the nodes that have it" in refused.error_line
    assert not (first / "metadata.db").exists()


def test_restore_metadata_does_not_change_a_damaged_metadata_file(tmp_path: Path) -> None:
    path = make_node(tmp_path, 1)
    (path / "metadata.db").write_bytes(b"\xff" * 8192)
    refused = restore(path)
    assert refused.code == 2 and "move metadata.db out of every data folder" in refused.error_line
    assert (path / "metadata.db").read_bytes() == b"\xff" * 8192


def test_restore_metadata_refuses_data_folders_of_two_clusters(tmp_path: Path) -> None:
    first, second = make_node(tmp_path, 1), make_node(tmp_path, 2, cluster_id="two")
    refused = restore(first, second)
    assert refused.code == 2
    assert f"{first} belongs to cluster one, {second} to two: pass the folders of one cluster" in refused.error_line


def test_restore_metadata_refuses_two_topics_with_the_same_name(tmp_path: Path) -> None:
    first, second = make_node(tmp_path, 1), make_node(tmp_path, 2, topic_id=OTHER)
    refused = restore(first, second)
    assert refused.code == 2
    assert f"{first}/logs/orders-0 and {second}/logs/orders-0 belong to two topics" in refused.error_line
    assert not (first / "metadata.db").exists()


def test_restore_metadata_refuses_the_data_folder_of_a_running_node(tmp_path: Path) -> None:
    path = make_node(tmp_path, 1)
    running = DataFolder.open(RealDisk(), str(path), 1, "")
    refused = restore(path)
    running.close()
    assert refused.code == 2 and f"data folder {path} is in use: stop its node first" in refused.error_line


@pytest.mark.parametrize("is_made", [True, False])
def test_restore_metadata_refuses_a_path_that_is_not_a_data_folder(tmp_path: Path, is_made: bool) -> None:
    path = tmp_path / "no-node"
    if is_made:
        path.mkdir()
    refused = restore(path)
    assert refused.code == 2 and f"{path} is not the data folder of a node" in refused.error_line


def test_restore_metadata_refuses_two_data_folders_of_the_same_node(tmp_path: Path) -> None:
    first, second = make_node(tmp_path / "a", 1), make_node(tmp_path / "b", 1)
    refused = restore(first, second)
    assert refused.code == 2 and f"{first} and {second} both belong to node 1" in refused.error_line


def test_restore_metadata_refuses_folders_without_logs_and_a_missing_cluster(tmp_path: Path) -> None:
    DataFolder.open(RealDisk(), str(tmp_path / "empty"), 1, "one").close()
    refused = restore(tmp_path / "empty")
    assert refused.code == 2 and "there are no logs" in refused.error_line
    refused = chronik("cluster", "restore-metadata", "--dir", str(tmp_path / "absent"))
    assert refused.code == 2 and "there is no cluster" in refused.error_line
