"""`chronik topic recover` on real processes: an operator chooses the replica whose records are kept."""

from __future__ import annotations

import json
import re
from typing import Any

import confluent_kafka
from tests.cli.run_chronik import CHRONIK, Outcome, chronik
from tests.cluster.conftest import StartNodes
from tests.cluster.support_cluster import Nodes
from tests.cluster.support_logs import (
    check_all_are_read,
    check_whole_again,
    cut_at_a_batch,
    filled_topic,
    is_listed_up_to,
    log_of,
    produce,
    remove,
    stored_batches,
)
from tests.support.eventually import eventually
from tests.support.terminal import Terminal

from chronik.storage.disk import RealDisk
from chronik.storage.folder import DataFolder, DataFolderError
from chronik.storage.syncing import lower_synced_end

RECORDS = 2_000
NO_LEADER = -1


def arguments(nodes: Nodes, topic: str, node_id: int, *more: str) -> tuple[str, ...]:
    bootstrap = ",".join(node.bootstrap for node in nodes.responsive)
    return ("topic", "recover", topic, "--partition", "0", "--from", str(node_id), "-b", bootstrap, *more)


def recover(nodes: Nodes, topic: str, node_id: int, *more: str) -> Outcome:
    return chronik(*arguments(nodes, topic, node_id, *more))


def replicas_of(outcome: Outcome) -> dict[int, dict[str, Any]]:
    return {replica["node"]: replica for replica in json.loads(outcome.out)["replicas"]}


def wait_until_offline(nodes: Nodes, topic: str) -> None:
    eventually(lambda: nodes.partitions(topic)[0].leader == NO_LEADER, 30.0, f"{topic}-0 has no leader")


def lose_all_but_one(start_nodes: StartNodes) -> tuple[Nodes, str, int, int]:
    """Remove two of three logs and cut the third. Return the nodes, the topic, the third node and its log's end."""
    # A commit log would bring back what is cut from the log of a killed node.
    nodes = start_nodes(recovery_point_interval_ms=200, commit_log=False)
    topic = filled_topic(nodes, RECORDS)
    *removed, kept = nodes.partitions(topic)[0].replicas
    eventually(lambda: is_listed_up_to(nodes, kept, RECORDS), what="the recovery point is written")
    nodes.kill_all()
    for node_id in removed:
        remove(log_of(nodes, node_id, topic))
    end = cut_at_a_batch(log_of(nodes, kept, topic))
    nodes.start_all()
    wait_until_offline(nodes, topic)
    return nodes, topic, kept, end


def test_topic_recover_restores_a_partition_from_the_chosen_replica(
    start_nodes: StartNodes,
) -> None:
    nodes, topic, kept, end = lose_all_but_one(start_nodes)
    lost, *_ = [node_id for node_id in nodes.ids if node_id != kept]

    shown = recover(nodes, topic, kept, "--json")
    assert shown.code == 1 and "--accept-loss" in shown.error_line
    for node_id, replica in replicas_of(shown).items():
        found = end if node_id == kept else 0
        assert (replica["state"], replica["log_start_offset"], replica["log_end_offset"]) == ("answers", 0, found)
        assert (replica["lost"], replica["lost_is_exact"]) == (end - found, True)
    table = recover(nodes, topic, lost)
    assert table.code == 1 and f"{lost} (chosen)" in table.out
    assert f"{end} records that other replicas of {topic}-0 have are lost" in table.error_line
    assert nodes.partitions(topic)[0].leader == NO_LEADER, "nothing was changed"

    done = recover(nodes, topic, kept, "--accept-loss")
    assert done.code == 0, done.err
    assert f"node {kept} leads {topic}-0" in done.out
    check_all_are_read(nodes, topic, end)
    produce(nodes, topic, end, 100)
    check_whole_again(nodes, topic, end + 100)

    again = recover(nodes, topic, kept, "--accept-loss", "--json")
    assert again.code == 2 and "there is nothing to recover" in again.error_line
    assert json.loads(again.out)["recovered"] is False


def test_records_that_are_given_up_are_set_aside(start_nodes: StartNodes) -> None:
    nodes, topic, kept, _ = lose_all_but_one(start_nodes)
    empty = next(node_id for node_id in nodes.ids if node_id != kept)
    batches = [data for _, data in stored_batches(log_of(nodes, kept, topic))]
    done = recover(nodes, topic, empty, "--accept-loss")
    assert done.code == 0, done.err
    nodes.wait_in_sync()
    (aside,) = (nodes.data_folder(kept) / "set-aside").glob(f"{topic}-0-*")
    assert [data for _, data in stored_batches(aside)] == batches
    produce(nodes, topic, 0, 100)
    check_whole_again(nodes, topic, 100)


def test_an_open_transaction_that_lost_records_ends_at_its_timeout(start_nodes: StartNodes) -> None:
    # A commit log would bring back what is cut from the log of a killed node.
    nodes = start_nodes(recovery_point_interval_ms=200, commit_log=False)
    topic = nodes.new_topic(1)
    settings = {"transactional.id": topic, "transaction.timeout.ms": 12_000, "linger.ms": 0}
    producer = confluent_kafka.Producer({"bootstrap.servers": nodes.bootstrap, **settings})
    producer.init_transactions(30.0)
    producer.begin_transaction()
    producer.produce(topic, b"before")
    producer.commit_transaction(30.0)
    producer.begin_transaction()
    for number in range(10):
        producer.produce(topic, f"lost {number}".encode())
        assert producer.flush(30.0) == 0
    *removed, kept = nodes.partitions(topic)[0].replicas
    nodes.wait_in_sync()
    eventually(lambda: is_listed_up_to(nodes, kept, 12), what="the recovery point is written")
    nodes.kill_all()
    for node_id in removed:
        remove(log_of(nodes, node_id, topic))
    end = cut_at_a_batch(log_of(nodes, kept, topic))
    assert 2 < end < 12, "the cut is inside the open transaction"
    nodes.start_all()
    wait_until_offline(nodes, topic)
    assert recover(nodes, topic, kept, "--accept-loss").code == 0

    def has_ended() -> bool:
        (partition,) = chronik("topic", "describe", topic, "-b", nodes.bootstrap, "--json").json()["partitions"]
        stable, end_offset = partition["last_stable_offset"], partition["log_end_offset"]
        return bool(stable == end_offset > end)

    eventually(has_ended, 60.0, "the transaction is aborted")
    successor = confluent_kafka.Producer({"bootstrap.servers": nodes.bootstrap, **settings})
    successor.init_transactions(30.0)
    successor.begin_transaction()
    successor.produce(topic, b"after")
    successor.commit_transaction(30.0)
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": nodes.bootstrap, "group.id": topic, "isolation.level": "read_committed"}
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    read = [message.value() for message in consumer.consume(2, 30.0)]
    consumer.close()
    assert read == [b"before", b"after"]


def test_topic_recover_asks_for_confirmation_and_shows_which_nodes_are_down(start_nodes: StartNodes) -> None:
    nodes, topic, kept, end = lose_all_but_one(start_nodes)
    down = next(node_id for node_id in nodes.ids if node_id != kept)
    nodes.stop(down)
    for node_id in (down, kept):
        outcome = recover(nodes, topic, node_id, "--accept-loss" if node_id == down else "--json")
        assert outcome.code == (2 if node_id == down else 1)
    assert "start it first" in recover(nodes, topic, down, "--accept-loss").error_line
    replica = replicas_of(recover(nodes, topic, kept, "--json"))
    # A stopped node is listed for ten seconds.
    assert replica[down]["state"] in ("down", "down or fenced") and replica[down]["log_end_offset"] is None
    assert (replica[kept]["lost"], replica[kept]["lost_is_exact"]) == (0, False)
    assert measured(recover(nodes, topic, kept), down) == ["unknown"] * 4

    command = [str(CHRONIK), *arguments(nodes, topic, kept, "--accept-loss")]
    for answer, code in ((b"n\n", 1), (b"y\n", 0)):
        assert nodes.partitions(topic)[0].leader == NO_LEADER
        with Terminal(command) as terminal:
            eventually(lambda: f"Make node {kept} the leader of {topic}-0" in terminal.text, 30.0, "it asks")
            terminal.press(answer)
            assert terminal.process.wait(60.0) == code, terminal.text
    nodes.start(down)
    check_whole_again(nodes, topic, end)


def measured(outcome: Outcome, node_id: int) -> list[str]:
    """Return the columns of the printed table after the node and its state: start, end, last epoch, loss."""
    (row,) = [line for line in outcome.out.splitlines() if re.match(rf"\s+{node_id}\b", line)]
    return re.split(r"\s{2,}", row.strip())[2:]


def test_topic_recover_shows_only_what_replicas_report(start_nodes: StartNodes) -> None:
    nodes, topic, kept, end = lose_all_but_one(start_nodes)
    empty, down = [node_id for node_id in nodes.ids if node_id != kept]
    whole = recover(nodes, topic, kept)
    assert measured(whole, kept)[:2] == ["0", str(end)] and measured(whole, kept)[3] == "0"
    for node_id in (empty, down):
        assert measured(whole, node_id) == ["0", "0", "-", str(end)], "an empty log has no last epoch"
    nodes.kill(down)
    one_down = recover(nodes, topic, empty)
    assert measured(one_down, down) == ["unknown"] * 4
    assert measured(one_down, empty) == ["0", "0", "-", f"{end} or more"]
    assert f"{end} or more records that other replicas" in one_down.error_line
    nodes.kill(empty)
    all_but_one = recover(nodes, topic, kept)
    assert measured(all_but_one, empty) == measured(all_but_one, down) == ["unknown"] * 4
    assert measured(all_but_one, kept)[1:4:2] == [str(end), "unknown"]


def shorten_unnoticed(nodes: Nodes, node_id: int, topic: str) -> int:
    """Truncate the log and lower the end that the node knows, so that it cannot detect the loss. Return the end."""
    end = cut_at_a_batch(log_of(nodes, node_id, topic))

    def opened() -> DataFolder:
        try:
            return DataFolder.open(RealDisk(), nodes.node(node_id).folder, node_id, "")
        except DataFolderError as error:
            raise AssertionError(str(error)) from None

    folder = eventually(opened, 10.0, "the killed process has released its folder")
    points = {
        key: point._replace(offset=min(point.offset, end)) if key == (topic, 0) else point
        for key, point in folder.recovery_points.items()
    }
    folder.recovery_points_job(points)()
    folder.close()
    lower_synced_end(RealDisk(), str(log_of(nodes, node_id, topic)), end)
    return end


def test_topic_recover_elects_a_longer_replica_after_the_shorter_leader_stops(start_nodes: StartNodes) -> None:
    # A commit log would bring back what is cut from the log of a killed node.
    nodes = start_nodes(recovery_point_interval_ms=200, commit_log=False)
    topic = "two-replicas"
    made = chronik("topic", "create", topic, "--partitions", "1", "--replication-factor", "2", "-b", nodes.bootstrap)
    assert made.code == 0, made.err
    produce(nodes, topic, 0, RECORDS)
    nodes.wait_in_sync()
    short, whole = nodes.partitions(topic)[0].replicas
    (other,) = set(nodes.ids) - {short, whole}
    eventually(lambda: is_listed_up_to(nodes, whole, RECORDS), what="the recovery point is written")
    eventually(lambda: f" {RECORDS}\n" in watermarks(nodes, whole), what="the watermark is written")
    nodes.kill_all()
    end = shorten_unnoticed(nodes, short, topic)
    nodes.launch(other)
    nodes.start(short)
    assert nodes.leader(topic) == short
    # The records that this leader accepts alone are lost later.
    produce(nodes, topic, end, 10)
    nodes.start(whole)
    eventually(lambda: "follower_refuses_truncation" in nodes.log_text(whole), 30.0, "the whole replica refuses")

    refused = recover(nodes, topic, whole, "--accept-loss")
    assert refused.code == 2 and f"stop node {short} first" in refused.error_line
    nodes.stop(short)
    wait_until_offline(nodes, topic)
    done = recover(nodes, topic, whole, "--accept-loss")
    assert done.code == 0, done.err
    assert nodes.leader(topic) == whole
    check_all_are_read(nodes, topic, RECORDS)
    nodes.start(short)
    produce(nodes, topic, RECORDS, 100)
    nodes.wait_in_sync()
    check_all_are_read(nodes, topic, RECORDS + 100)
    nodes.no_surprises()


def watermarks(nodes: Nodes, node_id: int) -> str:
    path = nodes.data_folder(node_id) / "high-watermarks"
    return path.read_text() if path.exists() else ""
