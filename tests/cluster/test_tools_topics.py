"""Topics, configs, replicas and leaders, as Apache Kafka's own tools show and change them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.support_cluster import Nodes
from tests.cluster.support_tools import KafkaTools, table
from tests.node.support_wire import unique
from tests.support.eventually import eventually

from chronik.wire.api import ApiKey

FOREVER = ("--config", "retention.ms=-1")

WriteJson = Callable[[object], str]


@pytest.fixture
def write_json(tmp_path: Path) -> WriteJson:
    """Write the JSON file that a tool takes as input."""

    def write(orders: object) -> str:
        path = tmp_path / f"{unique('orders')}.json"
        path.write_text(json.dumps(orders))
        return str(path)

    return write


def described(out: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Parse kafka-topics --describe: the topic's line and the lines of its partitions."""
    lines = [
        {key.strip(): value.strip() for key, _, value in (cell.partition(":") for cell in line.strip().split("\t"))}
        for line in out.splitlines()
        if line.strip()
    ]
    return lines[0], lines[1:]


def numbers(cell: str) -> tuple[int, ...]:
    return tuple(int(number) for number in cell.split(",") if number)


def test_kafka_topics_creates_describes_alters_and_deletes_a_topic(
    shared_nodes: Nodes, kafka_tools: KafkaTools
) -> None:
    at, name = ("--bootstrap-server", shared_nodes.bootstrap), unique("tools")
    create = ("--create", "--topic", name, "--partitions", "3", "--replication-factor", "3", *FOREVER)
    assert f"Created topic {name}." in kafka_tools.ok("kafka-topics", *at, *create)
    again = kafka_tools.run("kafka-topics", *at, *create)
    assert again.status == 1
    assert "exists" in again.out
    kafka_tools.ok("kafka-topics", *at, *create, "--if-not-exists")
    kafka_tools.until(lambda out: name in out.split(), "kafka-topics", *at, "--list")

    kafka_tools.ok("kafka-topics", *at, "--alter", "--topic", name, "--partitions", "5")
    describe = ("--describe", "--topic", name)
    topic, partitions = described(
        kafka_tools.until(lambda out: "PartitionCount: 5" in out, "kafka-topics", *at, *describe)
    )
    assert (topic["Topic"], topic["PartitionCount"], topic["ReplicationFactor"]) == (name, "5", "3")
    assert "retention.ms=-1" in topic["Configs"].split(",")
    describe = ("--describe", "--topic-id", topic["TopicId"])
    by_id, _ = described(kafka_tools.until(lambda out: "PartitionCount: 5" in out, "kafka-topics", *at, *describe))
    assert by_id == topic
    shown = {
        int(partition["Partition"]): (
            int(partition["Leader"]),
            numbers(partition["Replicas"]),
            sorted(numbers(partition["Isr"])),
        )
        for partition in partitions
    }
    assert shown == {
        index: (state.leader, state.replicas, sorted(state.isr))
        for index, state in shared_nodes.partitions(name).items()
    }

    kafka_tools.ok("kafka-topics", *at, "--delete", "--topic", name)
    kafka_tools.until(lambda out: name not in out.split(), "kafka-topics", *at, "--list")
    missing = f"Topic '{name}' does not exist"
    kafka_tools.until(lambda out: missing in out, "kafka-topics", *at, "--describe", "--topic", name, status=1)


def test_kafka_topics_shows_the_partitions_that_miss_the_replica_of_a_dead_node(
    nodes: Nodes, kafka_tools: KafkaTools
) -> None:
    alone = {"name": "alone", "assignments": [{"partition_index": 0, "broker_ids": [3]}]}
    with nodes.connect(1) as client:
        wanted = {**alone, "num_partitions": -1, "replication_factor": -1}
        made = client.call(ApiKey.CREATE_TOPICS, 7, {"topics": [wanted], "timeout": 10_000}).topics[0]
    assert made.error_code == 0, made.error_message
    everywhere = nodes.new_topic(3, min_insync_replicas="3")
    nodes.wait_in_sync()

    def partitions_with(flag: str) -> set[tuple[str, int]]:
        out = kafka_tools.ok("kafka-topics", "--bootstrap-server", nodes.bootstrap, "--describe", flag)
        found = re.findall(r"Topic: (\S+)\s+Partition: (\d+)", out)
        return {(topic, int(index)) for topic, index in found if not topic.startswith("__")}

    flags = ("--under-replicated-partitions", "--unavailable-partitions", "--under-min-isr-partitions")
    assert [partitions_with(flag) for flag in flags] == [set(), set(), set()]

    nodes.kill(3)
    shrunk = {(everywhere, index) for index in range(3)}
    eventually(
        lambda: all(3 not in state.isr for state in nodes.partitions(everywhere).values()), 30, "node 3 is not in sync"
    )
    eventually(lambda: nodes.partitions("alone")[0].leader == -1, 30, "its only replica does not lead")
    # The only replica stays in the ISR, because it has all committed records: no leader, yet no replica lags.
    assert partitions_with("--under-replicated-partitions") == shrunk
    assert partitions_with("--unavailable-partitions") == {("alone", 0)}
    assert partitions_with("--under-min-isr-partitions") == shrunk | {("alone", 0)}

    nodes.start(3)
    nodes.wait_in_sync()
    assert [partitions_with(flag) for flag in flags] == [set(), set(), set()]


def test_kafka_configs_describes_and_alters_configs_of_topics_and_brokers(
    shared_nodes: Nodes, kafka_tools: KafkaTools
) -> None:
    at, name = ("--bootstrap-server", shared_nodes.bootstrap), shared_nodes.new_topic(1)

    def configs(kind: str, entity: tuple[str, ...], *more: str) -> dict[str, str]:
        return parsed(kafka_tools.ok("kafka-configs", *at, "--entity-type", kind, *entity, "--describe", *more))

    def parsed(out: str) -> dict[str, str]:
        return dict(re.findall(r"^  ([a-z.]+)=(\S*)", out, re.MULTILINE))

    def become(kind: str, entity: tuple[str, ...], expected: dict[str, str]) -> None:
        describe = ("--entity-type", kind, *entity, "--describe")
        kafka_tools.until(lambda out: parsed(out) == expected, "kafka-configs", *at, *describe)

    topic = ("--entity-name", name)
    alter = ("kafka-configs", *at, "--alter", "--entity-type", "topics", *topic)
    kafka_tools.ok(*alter, "--add-config", "retention.ms=3600000,cleanup.policy=[compact,delete]")
    become("topics", topic, {"retention.ms": "3600000", "cleanup.policy": "compact,delete"})
    kafka_tools.ok(*alter, "--delete-config", "cleanup.policy")
    become("topics", topic, {"retention.ms": "3600000"})
    eventually(lambda: configs("topics", topic, "--all")["cleanup.policy"] == "delete", 30, "the default is back")
    wrong = kafka_tools.run(*alter, "--add-config", "retention.ms=soon")
    assert wrong.status == 1
    assert "retention.ms" in wrong.err

    for node in shared_nodes:
        static = configs("brokers", ("--entity-name", str(node.id)), "--all")
        assert (static["node.id"], static["log.dirs"]) == (str(node.id), node.folder)
    everywhere = ("kafka-configs", *at, "--alter", "--entity-type", "brokers", "--entity-default")
    kafka_tools.ok(*everywhere, "--add-config", "log.retention.ms=86400000")
    become("brokers", ("--entity-default",), {"log.retention.ms": "86400000"})
    kafka_tools.ok(*everywhere, "--delete-config", "log.retention.ms")
    become("brokers", ("--entity-default",), {})


def test_kafka_reassign_partitions_moves_replicas_and_reports_completion(
    shared_nodes: Nodes, kafka_tools: KafkaTools, write_json: WriteJson
) -> None:
    at, name = ("--bootstrap-server", shared_nodes.bootstrap), unique("moved")
    create = ("--create", "--topic", name, "--replica-assignment", "1:2,1:2", *FOREVER)
    kafka_tools.ok("kafka-topics", *at, *create)
    for index in range(2):
        with shared_nodes.connect(1) as client:
            client.append(name, *(b"%d" % number for number in range(50)), partition=index)
    topics = write_json({"version": 1, "topics": [{"topic": name}]})
    proposed = kafka_tools.ok(
        "kafka-reassign-partitions", *at, "--topics-to-move-json-file", topics, "--broker-list", "2,3", "--generate"
    )
    current, wanted = (json.loads(line) for line in proposed.splitlines() if line.startswith("{"))
    assert replicas_in(current) == {0: [1, 2], 1: [1, 2]}
    assert {frozenset(replicas) for replicas in replicas_in(wanted).values()} == {frozenset({2, 3})}

    plan = ("--reassignment-json-file", write_json(wanted))
    started = kafka_tools.ok("kafka-reassign-partitions", *at, *plan, "--execute", "--throttle", "10000000")
    assert "Successfully started partition reassignments" in started

    def throttles() -> set[str]:
        entities = (("topics", name), *(("brokers", str(node.id)) for node in shared_nodes))
        shown = [
            kafka_tools.ok("kafka-configs", *at, "--entity-type", kind, "--entity-name", entity, "--describe")
            for kind, entity in entities
        ]
        return set(re.findall(r"^  ([a-z.]+\.throttled\.[a-z]+)=", "\n".join(shown), re.MULTILINE))

    sides = ("leader", "follower")
    assert throttles() == {f"{side}.replication.throttled.{what}" for side in sides for what in ("replicas", "rate")}

    def has_moved() -> bool:
        # --verify also removes replication throttles.
        verified = kafka_tools.ok("kafka-reassign-partitions", *at, *plan, "--verify")
        return len(re.findall(r"Reassignment of partition \S+ is completed", verified)) == 2

    eventually(has_moved, 60, "kafka-reassign-partitions reports that all replicas are moved")
    assert throttles() == set()
    states = shared_nodes.partitions(name)
    assert {index: list(state.replicas) for index, state in states.items()} == replicas_in(wanted)
    assert "No partition reassignments found" in kafka_tools.ok("kafka-reassign-partitions", *at, "--list")
    for index in range(2):
        with shared_nodes.connect(shared_nodes.leader(name, index)) as client:
            assert [record.value for record in client.records(name, partition=index)] == [b"%d" % n for n in range(50)]


def replicas_in(plan: dict[str, Any]) -> dict[int, list[int]]:
    return {entry["partition"]: entry["replicas"] for entry in plan["partitions"]}


def test_kafka_leader_election_elects_the_preferred_leader(
    shared_nodes: Nodes, kafka_tools: KafkaTools, write_json: WriteJson
) -> None:
    at, name = ("--bootstrap-server", shared_nodes.bootstrap), unique("elected")
    kafka_tools.ok("kafka-topics", *at, "--create", "--topic", name, "--replica-assignment", "1:2:3")
    elect = ("kafka-leader-election", *at, "--election-type", "preferred", "--topic", name, "--partition", "0")
    assert f"already elected for partitions {name}-0" in kafka_tools.ok(*elect)
    # A new order of the same replicas: the leader stays, but is no longer the preferred one.
    order = {"topic": name, "partition": 0, "replicas": [2, 3, 1]}
    plan = write_json({"version": 1, "partitions": [order]})
    kafka_tools.ok("kafka-reassign-partitions", *at, "--reassignment-json-file", plan, "--execute")
    eventually(lambda: shared_nodes.partitions(name)[0].replicas == (2, 3, 1), 30, "the order is new")
    out = kafka_tools.ok(*elect)
    assert f"partitions {name}-0" in out  # elected now, or already elected by the controller
    assert shared_nodes.partitions(name)[0].leader == 2


def test_kafka_delete_records_advances_the_log_start_offset(
    shared_nodes: Nodes, kafka_tools: KafkaTools, write_json: WriteJson
) -> None:
    at, name = ("--bootstrap-server", shared_nodes.bootstrap), shared_nodes.new_topic(2, retention_ms="-1")
    for index in range(2):
        with shared_nodes.connect(1) as client:
            client.append(name, *[b"x"] * 20, partition=index)
    orders = [
        {"topic": name, "partition": 0, "offset": 7},
        {"topic": name, "partition": 1, "offset": -1},
    ]
    file = write_json({"version": 1, "partitions": orders})
    out = kafka_tools.ok("kafka-delete-records", *at, "--offset-json-file", file)
    low = dict(re.findall(rf"partition: {name}-(\d)\s+low_watermark: (\d+)", out))
    assert low == {"0": "7", "1": "20"}
    starts = kafka_tools.ok("kafka-get-offsets", *at, "--topic", name, "--time", "earliest")
    assert sorted(starts.split()) == [f"{name}:0:7", f"{name}:1:20"]


def test_kafka_cluster_and_kafka_broker_api_versions_list_every_node(
    shared_nodes: Nodes, kafka_tools: KafkaTools
) -> None:
    at = ("--bootstrap-server", shared_nodes.bootstrap)
    with shared_nodes.connect(1) as client:
        cluster_id = client.metadata().cluster_id
    assert kafka_tools.ok("kafka-cluster", "cluster-id", *at).split() == ["Cluster", "ID:", cluster_id]
    endpoints = kafka_tools.ok("kafka-cluster", "list-endpoints", *at)
    versions = kafka_tools.ok("kafka-broker-api-versions", *at)
    for node in shared_nodes:
        assert re.search(rf"^{node.id}\s+127\.0\.0\.1\s+{node.kafka.port}\b", endpoints, re.MULTILINE), endpoints
        assert re.search(rf"^127\.0\.0\.1:{node.kafka.port} \(id: {node.id} ", versions, re.MULTILINE), versions
    assert len(re.findall(r"DescribeLogDirs\(35\): 1 to 4 \[usable: 4\]", versions)) == 3
    unknown = kafka_tools.run("kafka-cluster", "unregister", *at, "--id", "99")
    assert unknown.status == 1
    assert "no longer registered" not in unknown.out


def test_kafka_metadata_quorum_describes_the_raft_group(shared_nodes: Nodes, kafka_tools: KafkaTools) -> None:
    at = ("--bootstrap-server", shared_nodes.bootstrap)
    out = kafka_tools.ok("kafka-metadata-quorum", *at, "describe", "--status")
    status = dict(re.findall(r"^(\w+):\s+(.*)$", out, re.MULTILINE))
    voters = json.loads(status["CurrentVoters"])
    assert {voter["id"] for voter in voters} == {node.id for node in shared_nodes}
    assert int(status["LeaderId"]) in {node.id for node in shared_nodes}
    assert int(status["HighWatermark"]) > 0
    replicas = table(
        kafka_tools.ok("kafka-metadata-quorum", *at, "describe", "--replication").replace("NodeId", "NODEID")
    )
    assert sorted(replica["Status"] for replica in replicas) == ["Follower", "Follower", "Leader"]
    assert {replica["NODEID"] for replica in replicas} == {str(node.id) for node in shared_nodes}


def test_kafka_configs_describes_and_alters_the_loggers_of_a_broker(
    shared_nodes: Nodes, kafka_tools: KafkaTools
) -> None:
    at = ("--bootstrap-server", shared_nodes.bootstrap)

    def levels(node_id: int) -> dict[str, str]:
        of_node = ("--entity-type", "broker-loggers", "--entity-name", str(node_id))
        out = kafka_tools.ok("kafka-configs", *at, *of_node, "--describe")
        return dict(re.findall(r"^  ([a-z]+)=([A-Z]+)", out, re.MULTILINE))

    alter = ("kafka-configs", *at, "--alter", "--entity-type", "broker-loggers", "--entity-name", "2")
    assert levels(2)["storage"] == "INFO"
    kafka_tools.ok(*alter, "--add-config", "storage=DEBUG")
    assert (levels(2)["storage"], levels(1)["storage"], levels(3)["storage"]) == ("DEBUG", "INFO", "INFO")
    kafka_tools.ok(*alter, "--delete-config", "storage")
    assert levels(2)["storage"] == "INFO"
