"""One replica's files are lost, truncated, damaged or stale: no acknowledged record is lost, without human repair.

A commit log would bring back what is cut from the log of a killed node: such tests have none.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.cluster.conftest import StartNodes
from tests.cluster.support_cluster import Nodes
from tests.cluster.support_logs import (
    check_all_are_read,
    check_whole_again,
    cut_at_a_batch,
    cut_the_last_batch,
    damage_a_batch,
    filled_topic,
    flip_in_the_last_batch,
    is_listed_up_to,
    log_of,
    produce,
    remove,
)
from tests.support.eventually import eventually

RECORDS = 2_000


@pytest.mark.parametrize(
    ("hurt", "is_first"),
    [
        (remove, True),
        (cut_at_a_batch, False),
        pytest.param(remove, False, marks=pytest.mark.soak),
        pytest.param(cut_at_a_batch, True, marks=pytest.mark.soak),
    ],
)
def test_a_replica_that_lost_records_does_not_lead(
    start_nodes: StartNodes, hurt: Callable[[Path], object], is_first: bool
) -> None:
    nodes = start_nodes(recovery_point_interval_ms=200, commit_log=hurt is remove)
    topic = filled_topic(nodes, RECORDS)
    victim = nodes.partitions(topic)[0].replicas[0]
    if hurt is cut_at_a_batch:
        eventually(lambda: is_listed_up_to(nodes, victim, RECORDS), what="the recovery point is written")
    nodes.kill_all()
    hurt(log_of(nodes, victim, topic))
    if is_first:
        nodes.start(victim)
    nodes.start_all()
    check_whole_again(nodes, topic, RECORDS)


def have_hurt_replica_return_first(nodes: Nodes, topic: str, hurt: Callable[[int], object]) -> None:
    """Stop all nodes and damage one; it returns with one other node, and the last leader only after that."""
    state = nodes.partitions(topic)[0]
    # The controller elects in the order of the replicas, so it would often choose the victim.
    victim, other = (replica for replica in state.replicas if replica != state.leader)
    for node_id in nodes.ids:
        nodes.pause(node_id)  # so that no node notices that another ends
    nodes.kill(victim)
    nodes.kill(other)
    hurt(victim)
    nodes.launch(victim)
    nodes.launch(other)
    # The last leader is paused, so it is fenced late: usually after both other nodes have registered.
    assert nodes.leader(topic) == other
    nodes.kill(state.leader)
    nodes.start(state.leader)


@pytest.mark.parametrize("hurt", [remove, pytest.param(cut_at_a_batch, marks=pytest.mark.soak), damage_a_batch])
def test_a_replica_that_lost_records_does_not_lead_while_the_last_leader_is_down(
    start_nodes: StartNodes, hurt: Callable[[Path], object]
) -> None:
    nodes = start_nodes(recovery_point_interval_ms=200, commit_log=hurt is remove)
    topic = filled_topic(nodes, RECORDS)
    for node_id in nodes.ids:
        eventually(partial(is_listed_up_to, nodes, node_id, RECORDS), what="the recovery points are written")
    have_hurt_replica_return_first(nodes, topic, lambda victim: hurt(log_of(nodes, victim, topic)))
    check_whole_again(nodes, topic, RECORDS)


def test_a_node_on_an_old_copy_does_not_lead_while_the_last_leader_is_down(nodes: Nodes) -> None:
    topic = filled_topic(nodes, RECORDS)
    folders = {node_id: nodes.data_folder(node_id) for node_id in nodes.ids}
    for node_id, folder in folders.items():
        nodes.stop(node_id)
        shutil.copytree(folder, folder.with_name(f"copy-{node_id}"))
        nodes.start(node_id)
        nodes.wait_in_sync()
    produce(nodes, topic, RECORDS, RECORDS)

    def put_back(victim: int) -> None:
        shutil.rmtree(folders[victim])
        folders[victim].with_name(f"copy-{victim}").rename(folders[victim])

    have_hurt_replica_return_first(nodes, topic, put_back)
    check_whole_again(nodes, topic, 2 * RECORDS)


def test_a_replica_that_loses_its_log_seconds_after_its_first_record_does_not_lead(start_nodes: StartNodes) -> None:
    nodes = start_nodes(recovery_point_interval_ms=600_000)
    topic = nodes.new_topic(1)
    produce(nodes, topic, 0, RECORDS)
    victim = nodes.partitions(topic)[0].replicas[0]
    nodes.kill_all()
    remove(log_of(nodes, victim, topic))
    nodes.start_all()
    check_whole_again(nodes, topic, RECORDS)


def spoil_topic_id(log: Path) -> None:
    path = log / "topic-id"
    path.write_bytes(path.read_bytes().replace(b"-", b"+"))


@pytest.mark.parametrize("hurt", [spoil_topic_id, lambda log: (log / "topic-id").unlink()], ids=["damaged", "missing"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_listed_log_is_used_although_its_topic_id_is_gone(
    start_nodes: StartNodes, count: int, hurt: Callable[[Path], object]
) -> None:
    nodes = start_nodes(count)
    topic = filled_topic(nodes, RECORDS)
    victim = nodes.ids[-1]
    nodes.stop(victim)
    hurt(log_of(nodes, victim, topic))
    nodes.start(victim)
    check_whole_again(nodes, topic, RECORDS)
    assert "topic_id_restored" in nodes.log_text(victim)
    assert "log_open_failed" not in nodes.log_text(victim)


@pytest.mark.parametrize("count", [1, 3])
def test_the_advice_for_a_log_of_an_unproven_owner_is_right(start_nodes: StartNodes, count: int) -> None:
    nodes = start_nodes(count, recovery_point_interval_ms=200)
    topic = filled_topic(nodes, RECORDS)
    victim = nodes.ids[-1]
    nodes.stop(victim)
    log = log_of(nodes, victim, topic)
    spoil_topic_id(log)
    (nodes.data_folder(victim) / "recovery-points").unlink()
    nodes.start(victim)
    said = eventually(lambda: [line for line in nodes.log_text(victim).splitlines() if "log_open_failed" in line])
    assert f"{log}/topic-id is damaged" in said[0] and "the node retries every 0.2 s" in said[0]
    if count == 1:
        assert "Otherwise remove topic-id: the node uses the log as it is" in said[0]
        (log / "topic-id").unlink()
    else:
        assert f"If another replica leads the partition, move {log} to another place" in said[0]
        log.rename(nodes.data_folder(victim) / "elsewhere")
    check_whole_again(nodes, topic, RECORDS)


def test_a_damaged_replica_that_returns_first_does_not_block_its_partition(start_nodes: StartNodes) -> None:
    nodes = start_nodes(recovery_point_interval_ms=200, commit_log=False)
    topic = filled_topic(nodes, RECORDS)
    victim = nodes.partitions(topic)[0].replicas[0]
    eventually(lambda: is_listed_up_to(nodes, victim, RECORDS), what="the recovery point is written")
    nodes.kill_all()
    damage_a_batch(log_of(nodes, victim, topic))
    nodes.start(victim)
    for node_id in nodes.ids:
        if node_id != victim:
            nodes.start(node_id)
    assert nodes.leader(topic) != victim
    check_all_are_read(nodes, topic, RECORDS)
    produce(nodes, topic, RECORDS, 100)


def test_a_node_on_an_old_copy_of_its_data_folder_does_not_lead(nodes: Nodes) -> None:
    topic = filled_topic(nodes, RECORDS)
    victim = nodes.partitions(topic)[0].replicas[0]
    folder = nodes.data_folder(victim)
    nodes.stop(victim)
    shutil.copytree(folder, folder.with_name("copy"))
    nodes.start(victim)
    nodes.wait_in_sync()
    produce(nodes, topic, RECORDS, RECORDS)
    nodes.kill_all()
    shutil.rmtree(folder)
    folder.with_name("copy").rename(folder)
    nodes.start(victim)
    nodes.start_all()
    check_whole_again(nodes, topic, 2 * RECORDS)


def test_an_eligible_replica_without_its_log_is_not_elected(nodes: Nodes) -> None:
    topic = nodes.new_topic(1, min_insync_replicas="3")
    produce(nodes, topic, 0, RECORDS)
    nodes.wait_in_sync()
    victim, *others = nodes.partitions(topic)[0].replicas
    nodes.kill(victim)
    eventually(lambda: victim not in nodes.partitions(topic)[0].isr, what="the replica is eligible only")
    nodes.kill_all()
    remove(log_of(nodes, victim, topic))
    nodes.start(victim)
    for node_id in others:
        nodes.start(node_id)
    check_whole_again(nodes, topic, RECORDS)


def test_a_node_refuses_an_old_copy_of_its_metadata_and_rejoins_without_it(nodes: Nodes) -> None:
    topic = nodes.new_topic(1)
    produce(nodes, topic, 0, RECORDS)
    victim = nodes.partitions(topic)[0].replicas[0]
    folder = nodes.data_folder(victim)
    nodes.stop(victim)
    shutil.copy(folder / "metadata.db", folder / "metadata.copy")
    nodes.start(victim)
    nodes.wait_in_sync()
    nodes.stop(victim)
    for path in folder.glob("metadata.db*"):
        path.unlink()
    shutil.copy(folder / "metadata.copy", folder / "metadata.db")
    nodes.launch(victim)
    eventually(lambda: nodes.node(victim).process.state != "running", 60.0, "the node gives up")
    assert "has forgotten votes" in nodes.log_text(victim)
    (folder / "metadata.db").unlink()
    nodes.start(victim)
    check_whole_again(nodes, topic, RECORDS)


def test_a_cluster_without_metadata_deletes_no_log(nodes: Nodes) -> None:
    topic = filled_topic(nodes, RECORDS)
    nodes.kill_all()
    before = {node_id: sorted(log_of(nodes, node_id, topic).glob("*.log")) for node_id in nodes.ids}
    for node_id in nodes.ids:
        for path in nodes.data_folder(node_id).glob("metadata.db*"):
            path.unlink()
    for node_id in nodes.ids:
        nodes.launch(node_id)
    eventually(lambda: not nodes.responsive, 60.0, "all nodes give up")
    for node_id in nodes.ids:
        assert "chronik cluster restore-metadata" in nodes.log_text(node_id)
    assert before == {node_id: sorted(log_of(nodes, node_id, topic).glob("*.log")) for node_id in nodes.ids}


def test_a_node_refuses_to_start_on_metadata_that_lost_its_last_writes(nodes: Nodes) -> None:
    """SQLite silently drops the end of a damaged write-ahead log: the node must not vote with the remaining state."""
    nodes.new_topic(1)
    lagging, victim, whole = nodes.ids
    nodes.kill(lagging)
    folder = nodes.data_folder(victim)
    size = (folder / "metadata.db-wal").stat().st_size
    topic = nodes.new_topic(1)
    produce(nodes, topic, 0, RECORDS)
    nodes.kill_all()
    with (folder / "metadata.db-wal").open("r+b") as file:
        file.truncate(size)
    nodes.launch(victim)
    nodes.launch(lagging)
    eventually(lambda: nodes.node(victim).process.state != "running", 60.0, "the node gives up")
    assert "has forgotten votes" in nodes.log_text(victim)
    nodes.start(whole)
    for path in folder.glob("metadata.db*"):
        path.unlink()
    nodes.start(victim)
    check_whole_again(nodes, topic, RECORDS)


@pytest.mark.parametrize("hurt", [cut_the_last_batch, flip_in_the_last_batch])
def test_a_replica_that_lost_its_last_batch_does_not_lead(
    start_nodes: StartNodes, hurt: Callable[[Path], object]
) -> None:
    """Within the seconds before a recovery point covers the batch."""
    nodes = start_nodes(recovery_point_interval_ms=3_600_000, commit_log=False)
    topic = nodes.new_topic(1)
    lagging, victim, whole = nodes.ids
    nodes.kill(lagging)
    produce(nodes, topic, 0, RECORDS)
    nodes.kill_all()
    hurt(log_of(nodes, victim, topic))
    nodes.launch(victim)
    nodes.launch(lagging)
    eventually(lambda: nodes.controller() in (victim, lagging), 60.0, "two nodes are a majority")
    nodes.start(whole)
    nodes.start_all()
    check_whole_again(nodes, topic, RECORDS)
