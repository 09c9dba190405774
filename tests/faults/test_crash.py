"""kill -9 at any moment: acknowledged records survive, once and in order; so do topics and groups."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import StartNode
from tests.faults.support_load import Account, Found, Writer, no_surprises, wait_for_acknowledged
from tests.node.support_wire import ConnectionEnded, WireClient, batch, connect, unique
from tests.support.eventually import eventually
from tests.support.node import Node

from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

ROUNDS = 3
SOAK_ROUNDS = 40
ACKNOWLEDGED_PER_ROUND = 300


def crash(node: Node) -> None:
    node.kill()
    node.start()


def write_and_crash(node: Node, rounds: int) -> None:
    """Write to two partitions and kill the node in the middle, again and again on the same data."""
    with connect(node) as client:
        topic = client.new_topic(partitions=2, segment_bytes=str(1024 * 1024))
    accounts: list[Account] = []
    for round_ in range(rounds):
        running = [
            Writer(node, Account(topic, partition), f"{round_}-{partition}-{acks}", acks=acks)
            for partition in range(2)
            for acks in (-1, 1)
        ]
        accounts += [writer.account for writer in running]
        wait_for_acknowledged(running, ACKNOWLEDGED_PER_ROUND * (round_ % 3 + 1) // 2)
        node.kill()
        for writer in running:
            writer.join()
            assert writer.stopped_by is not None, "the node was killed under it"
            assert writer.account.errors == []
        node.start()
        with connect(node) as client:
            for partition in range(2):
                found = Found.of(client.records(topic, partition=partition))
                for account in accounts:
                    if account.partition == partition:
                        account.check(found)
    no_surprises(node)


def test_every_acknowledged_record_survives_repeated_kill_9(start_node: StartNode) -> None:
    write_and_crash(start_node(durability="synced"), ROUNDS)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_acknowledged_record_survives_forty_kills(start_node: StartNode) -> None:
    write_and_crash(start_node(durability="synced", recovery_point_interval_ms=200), SOAK_ROUNDS)


def test_an_idempotent_producer_delivers_each_record_once_in_order_despite_two_kills(node: Node) -> None:
    confluent_kafka = pytest.importorskip("confluent_kafka")
    with connect(node) as client:
        topic = client.new_topic(partitions=2)
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": node.bootstrap,
            "enable.idempotence": True,
            "linger.ms": 5,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 200,
            "retry.backoff.ms": 20,
            "message.timeout.ms": 60_000,
        }
    )
    delivered: dict[bytes, tuple[int, int]] = {}
    failed: list[Any] = []

    def report(error: Any, message: Any) -> None:
        if error is not None:
            failed.append(error)
        else:
            delivered[message.value()] = (message.partition(), message.offset())

    sent: list[list[bytes]] = [[], []]

    def send_until(goal: int) -> None:
        while len(delivered) < goal:
            for partition in range(2):
                value = b"%d-%d" % (partition, len(sent[partition]))
                sent[partition].append(value)
                producer.produce(topic, value, partition=partition, on_delivery=report)
            producer.poll(0.001)

    for _ in range(2):
        send_until(len(delivered) + 500)
        crash(node)
    send_until(len(delivered) + 500)
    assert producer.flush(60) == 0
    assert failed == []
    with connect(node) as client:
        for partition in range(2):
            records = client.records(topic, partition=partition)
            assert [record.value for record in records] == sent[partition]
            for record in records:
                assert delivered[record.value or b""] == (partition, record.offset)


def test_committed_offsets_survive_kill_9(node: Node) -> None:
    with connect(node) as client:
        topic = client.new_topic()
        groups = [unique("group") for _ in range(4)]
        for group in groups:
            coordinated(client, group)
    for round_ in range(2):
        committers = [Committer(node, group, topic, first=1000 * round_ + 1) for group in groups]
        for committer in committers:
            committer.wait_for(committer.first + 50)
        node.kill()
        for committer in committers:
            committer.thread.join(30)
        node.start()
        with connect(node) as client:
            for committer in committers:
                coordinated(client, committer.group)
                wanted = [{"name": topic, "partition_indexes": [0]}]
                answer = client.call(ApiKey.OFFSET_FETCH, 7, {"group_id": committer.group, "topics": wanted})
                offset = answer.topics[0].partitions[0].committed_offset
                assert committer.acknowledged <= offset <= committer.sent


class Committer:
    """Commits one offset after another, as a consumer outside any generation does."""

    def __init__(self, node: Node, group: str, topic: str, first: int) -> None:
        self.group = group
        self.first = first
        self.sent = self.acknowledged = first - 1
        self._topic = topic
        self._client = connect(node)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def wait_for(self, offset: int) -> None:
        eventually(lambda: self.acknowledged >= offset, timeout_s=30, what=f"{self.group} has committed {offset}")

    def _run(self) -> None:
        try:
            while True:
                self.sent += 1
                partition = {"partition_index": 0, "committed_offset": self.sent}
                answer = self._client.call(
                    ApiKey.OFFSET_COMMIT,
                    7,
                    {
                        "group_id": self.group,
                        "generation_id_or_member_epoch": -1,
                        "topics": [{"name": self._topic, "partitions": [partition]}],
                    },
                )
                assert answer.topics[0].partitions[0].error_code is ErrorCode.none
                self.acknowledged = self.sent
        except (OSError, ConnectionEnded):
            self._client.socket.close()


def coordinated(client: WireClient, group: str) -> None:
    eventually(
        lambda: client.call(ApiKey.FIND_COORDINATOR, 2, {"key": group, "key_type": 0}).error_code is ErrorCode.none,
        what=f"{group} has a coordinator",
    )


def test_a_created_topic_survives_kill_9(node: Node) -> None:
    for number in range(2):
        with connect(node) as client:
            name = f"created-{number}"
            created = client.create_topic(name, partitions=3, configs={"retention.ms": "123456"})
            assert created.error_code is ErrorCode.none
        crash(node)
        with connect(node) as client:
            found = client.metadata(name).topics[0]
            assert (found.error_code, found.topic_id) == (ErrorCode.none, created.topic_id)
            assert len(found.partitions) == 3
            assert config(client, name, "retention.ms") == "123456"
            assert [client.append(name, b"x", partition=partition) for partition in range(3)] == [0, 0, 0]


def test_acknowledged_topic_changes_survive_kill_9(node: Node) -> None:
    with connect(node) as client:
        kept, gone = client.new_topic(), client.new_topic()
        client.append(gone, b"old")
        change = {"name": "retention.ms", "config_operation": 0, "value": "777"}
        resource = {"resource_type": 2, "resource_name": kept, "configs": [change]}
        client.call(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource]})
        client.call(
            ApiKey.CREATE_PARTITIONS,
            2,
            {"topics": [{"name": kept, "count": 4, "assignments": None}], "timeout": 10_000},
        )
        client.call(ApiKey.DELETE_TOPICS, 4, {"topic_names": [gone], "timeout": 10_000})
    crash(node)
    with connect(node) as client:
        assert client.metadata(gone).topics[0].error_code is ErrorCode.unknown_topic_or_partition
        assert len(client.metadata(kept).topics[0].partitions) == 4
        assert config(client, kept, "retention.ms") == "777"
        assert client.append(kept, b"x", partition=3) == 0
        assert client.create_topic(gone).error_code is ErrorCode.none
        assert client.records(gone) == []


def test_a_new_topic_does_not_reuse_the_leftover_log_of_a_deleted_topic(node: Node, tmp_path: Path) -> None:
    logs = node.data_dir / "logs"
    with connect(node) as client:
        topic = client.new_topic()
        client.append(topic, b"old")
    node.kill()
    points = node.data_dir / "recovery-points"
    shutil.copytree(logs, tmp_path / "old-logs")
    shutil.copy(points, tmp_path / "old-points")
    node.start()
    with connect(node) as client:
        client.call(ApiKey.DELETE_TOPICS, 4, {"topic_names": [topic], "timeout": 10_000})
        assert client.create_topic(topic).error_code is ErrorCode.none
    node.kill()
    # As if the node had crashed before the old topic's files were deleted from disk and the new log was listed.
    shutil.rmtree(logs)
    shutil.copytree(tmp_path / "old-logs", logs)
    shutil.copy(tmp_path / "old-points", points)
    node.start()
    with connect(node) as client:
        assert client.records(topic) == []
        assert client.append(topic, b"new") == 0


def config(client: WireClient, topic: str, name: str) -> str:
    resource = {"resource_type": 2, "resource_name": topic, "configuration_keys": [name]}
    value: str = client.call(ApiKey.DESCRIBE_CONFIGS, 4, {"resources": [resource]}).results[0].configs[0].value
    return value


def test_recovery_truncates_a_torn_batch_and_the_log_accepts_writes(node: Node) -> None:
    with connect(node) as client:
        topic = client.new_topic()
        for number in range(10):
            client.append(topic, b"%d" % number)
        end = client.offset_at(topic, -1)
    node.kill()
    (segment,) = (node.data_dir / "logs" / f"{topic}-0").glob("*.log")
    written = segment.read_bytes().rstrip(b"\0")
    torn = bytearray(batch(b"torn" * 100, base_offset=end))[:-50]
    with segment.open("r+b") as file:
        file.truncate(len(written))
        file.seek(len(written))
        file.write(torn)
    node.start()
    with connect(node) as client:
        assert client.offset_at(topic, -1) == end
        assert client.append(topic, b"next") == end
        assert [record.value for record in client.records(topic)] == [*(b"%d" % n for n in range(10)), b"next"]
