"""Offsets, sizes and segments, as Apache Kafka's own tools read them; and its load generators."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from tests.cluster.support_cluster import Nodes
from tests.cluster.support_tools import KafkaTools, json_lines
from tests.node.support_wire import TIMESTAMP_MS, batch, unique
from tests.support.eventually import eventually

from chronik.wire.api import ApiKey

RECORDS = 30
SEGMENT_BYTES = 1024 * 1024


def test_kafka_get_offsets_returns_offsets_by_time_and_omits_missing_ones(
    shared_nodes: Nodes, kafka_tools: KafkaTools
) -> None:
    topic = shared_nodes.new_topic(2, retention_ms="-1")
    with shared_nodes.connect(1) as client:
        client.append(topic, *[b"x"] * RECORDS)
        late = batch(b"late", b"later", timestamp_ms=TIMESTAMP_MS + 1_000)
        assert client.produce(topic, late).error_code == 0
        assert client.produce(topic, batch(b"early", timestamp_ms=TIMESTAMP_MS - 1_000)).error_code == 0

    def offsets(time: str) -> list[str]:
        at = ("--bootstrap-server", shared_nodes.bootstrap, "--topic", topic)
        return sorted(kafka_tools.ok("kafka-get-offsets", *at, "--time", time).split())

    first, second = f"{topic}:0", f"{topic}:1"
    for latest in ("latest", "-1"):
        assert offsets(latest) == [f"{first}:{RECORDS + 3}", f"{second}:0"]
    for earliest in ("earliest", "-2", "earliest-local", "-4"):
        assert offsets(earliest) == [f"{first}:0", f"{second}:0"]
    # An empty partition has no newest record, and nothing is tiered: neither has an offset.
    assert offsets("max-timestamp") == [f"{first}:{RECORDS + 1}"]
    assert offsets("latest-tiered") == []
    assert offsets(str(TIMESTAMP_MS + 5)) == [f"{first}:5"]
    assert offsets(str(TIMESTAMP_MS + 999)) == [f"{first}:{RECORDS}"]


def test_kafka_log_dirs_reports_the_size_on_disk_of_every_replica(shared_nodes: Nodes, kafka_tools: KafkaTools) -> None:
    topic = shared_nodes.new_topic(3, retention_ms="-1")
    with shared_nodes.connect(1) as client:
        for index in range(3):
            client.append(topic, *[b"%d" % index * 1_000] * (10 * (index + 1)), partition=index)
    at = ("--bootstrap-server", shared_nodes.bootstrap, "--topic-list", topic)

    def as_on_disk() -> bool:
        (answer,) = json_lines(kafka_tools.ok("kafka-log-dirs", *at, "--describe"))
        assert [broker["broker"] for broker in answer["brokers"]] == shared_nodes.ids
        for broker in answer["brokers"]:
            (folder,) = broker["logDirs"]
            assert folder["error"] is None
            assert folder["logDir"] == shared_nodes.node(broker["broker"]).folder
            shown = {entry["partition"]: entry for entry in folder["partitions"]}
            assert sorted(shown) == [f"{topic}-{index}" for index in range(3)]
            for index in range(3):
                entry = shown[f"{topic}-{index}"]
                assert entry["size"] == batch_bytes(shared_nodes, broker["broker"], f"{topic}-{index}")
                assert (entry["offsetLag"], entry["isFuture"]) == (0, False)
        return True

    eventually(as_on_disk, 20, "every replica reports all records")
    one = json_lines(kafka_tools.ok("kafka-log-dirs", *at, "--describe", "--broker-list", "2"))[0]
    assert [broker["broker"] for broker in one["brokers"]] == [2]


def batch_bytes(nodes: Nodes, node_id: int, partition: str) -> int:
    """Return the bytes of whole batches in a partition's segments: the active segment is preallocated with zeros."""
    total = 0
    for segment in Path(nodes.node(node_id).folder, "logs", partition).glob("*.log"):
        data = segment.read_bytes()
        at = 0
        while len(data) - at >= 12 and (length := int.from_bytes(data[at + 8 : at + 12], "big")):
            at += 12 + length
        total += at
    return total


def test_describe_log_dirs_reports_the_size_on_disk_of_all_partitions_of_a_node(shared_nodes: Nodes) -> None:
    shared_nodes.new_topic(2)

    def add_up(node_id: int) -> bool:
        folder = Path(shared_nodes.node(node_id).folder)
        with shared_nodes.connect(node_id) as client:
            (answer,) = client.call(ApiKey.DESCRIBE_LOG_DIRS, 4, {"topics": None}).results
        shown = {
            f"{topic.name}-{partition.partition_index}": partition.partition_size
            for topic in answer.topics
            for partition in topic.partitions
        }
        on_disk = {found.name: batch_bytes(shared_nodes, node_id, found.name) for found in (folder / "logs").iterdir()}
        assert shown == {name: size for name, size in on_disk.items() if name in shown}
        assert set(on_disk) == set(shown)
        assert sum(shown.values()) > 0
        space = shutil.disk_usage(folder)
        assert answer.total_bytes == space.total
        assert 0 < answer.usable_bytes <= answer.total_bytes
        return True

    for node_id in shared_nodes.ids:
        eventually(partial(add_up, node_id), 20, f"node {node_id} reports its logs")


def test_kafka_dump_log_reads_the_segments_of_the_leader_and_followers(
    shared_nodes: Nodes, kafka_tools: KafkaTools
) -> None:
    topic = shared_nodes.new_topic(1, retention_ms="-1", segment_bytes=str(SEGMENT_BYTES))
    with shared_nodes.connect(1) as client:
        for number in range(5):
            client.append(topic, b"a%d" % number, b"b%d" % number)
        # Does not fit into the same segment. The tool reads the zeros of an active segment as a broken batch.
        client.append(topic, bytes(SEGMENT_BYTES - 200))
    for node_id in shared_nodes.ids:
        segment = Path(shared_nodes.node(node_id).folder, "logs", f"{topic}-0", f"{0:020}.log")

        def dumped(segment: Path = segment) -> bool:
            out = kafka_tools.ok("kafka-dump-log", "--files", str(segment), "--print-data-log")
            records = re.findall(r"offset: (\d+) .*key: (\S+) payload: (\S+)", out)
            assert records == [
                (str(2 * number + at), "k", f"{letter}{number}")
                for number in range(5)
                for at, letter in enumerate("ab")
            ]
            assert len(re.findall(r"isvalid: true", out)) == 5
            return True

        eventually(dumped, 20, f"node {node_id} has all ten records")


def test_kafka_perf_and_verifiable_clients_consume_what_they_produced(
    shared_nodes: Nodes, kafka_tools: KafkaTools
) -> None:
    at = ("--bootstrap-server", shared_nodes.bootstrap)
    topic, count = shared_nodes.new_topic(3), 3_000
    size = ("--num-records", str(count), "--record-size", "100", "--throughput", "-1")
    out = kafka_tools.ok("kafka-producer-perf-test", "--topic", topic, *size, *at)
    assert f"{count} records sent" in out.splitlines()[-1]
    consumed = kafka_tools.ok("kafka-consumer-perf-test", *at, "--topic", topic, "--num-records", str(count))
    columns, values = (line.split(", ") for line in consumed.splitlines()[-2:])
    found = dict(zip(columns, values, strict=True))
    assert int(found["data.consumed.in.nMsg"]) == count

    topic, count = shared_nodes.new_topic(3), 200
    sent = json_lines(
        kafka_tools.alone("kafka-verifiable-producer", *at, "--topic", topic, "--max-messages", str(count))
    )
    acked = {(event["partition"], event["offset"]): event["value"] for event in named(sent, "producer_send_success")}
    assert len(acked) == count
    read = ("--topic", topic, "--group-id", unique("verifiable"), "--max-messages", str(count), "--verbose")
    events = json_lines(
        kafka_tools.ok("kafka-verifiable-consumer", *at, *read, "--reset-policy", "earliest", "--enable-autocommit")
    )
    got = {(event["partition"], event["offset"]): event["value"] for event in named(events, "record_data")}
    assert got == acked


def named(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["name"] == name]


def test_kafka_client_metrics_makes_java_clients_push_their_metrics(
    shared_nodes: Nodes, kafka_tools: KafkaTools
) -> None:
    at, topic, name = ("--bootstrap-server", shared_nodes.bootstrap), shared_nodes.new_topic(1), unique("pushed")
    subscribe = ("--alter", "--name", name, "--metrics", "org.apache.kafka.producer.", "--interval", "100")
    kafka_tools.ok("kafka-client-metrics", *at, *subscribe, "--match", f"client_id={name}")

    def described() -> list[dict[str, str | None]]:
        resource = {"resource_type": 16, "resource_name": name, "configuration_keys": None}
        results = []
        for node in shared_nodes:
            with shared_nodes.connect(node.id) as client:
                results += client.call(ApiKey.DESCRIBE_CONFIGS, 4, {"resources": [resource]}).results
        return [{config.name: config.value for config in result.configs} for result in results]

    expected = {"metrics": "org.apache.kafka.producer.", "interval.ms": "100", "match": f"client_id={name}"}
    eventually(lambda: described() == [expected] * 3, 10, "every node knows the subscription")

    def pushed() -> dict[str, float]:
        clients = [
            client
            for node in shared_nodes
            for client in json.loads(node.get("/api/client-metrics")[1])["clients"]
            if client["client_id"] == name
        ]
        assert all(client["software_name"] == "apache-kafka-java" for client in clients)
        return {metric["name"]: metric["value"] for client in clients for metric in client["metrics"]}

    properties = ("--command-property", f"client.id={name}")
    rate = ("--num-records", "300", "--record-size", "100", "--throughput", "100")
    kafka_tools.ok("kafka-producer-perf-test", "--topic", topic, *rate, *at, *properties)
    # The client pushes for the last time when it begins to close, which may be before its last record is sent.
    assert 0 < pushed()["org.apache.kafka.producer.record.send.total"] <= 300

    kafka_tools.ok("kafka-client-metrics", *at, "--delete", "--name", name)
    eventually(lambda: described() == [{}] * 3, 10, "every node has dropped the subscription")
