"""Share groups: Apache Kafka's tools, `chronik group` and the page agree; Kafka's tools read our records."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer
from tests.cli.run_chronik import chronik
from tests.clients.drivers.share import ConfluentShares, ShareMember
from tests.cluster.support_cluster import Nodes
from tests.cluster.support_tools import KafkaTools, table
from tests.node.support_wire import unique
from tests.support.eventually import eventually
from tests.web.support_http import get

RECORDS = 10


def set_earliest(nodes: Nodes, tools: KafkaTools, group: str) -> None:
    at = ("--bootstrap-server", nodes.bootstrap, "--entity-type", "groups", "--entity-name", group)
    tools.ok("kafka-configs", *at, "--alter", "--add-config", "share.auto.offset.reset=earliest")
    tools.until(lambda out: "share.auto.offset.reset=earliest" in out, "kafka-configs", *at, "--describe")


def filled_topic(nodes: Nodes) -> str:
    topic = nodes.new_topic(2, retention_ms="-1")
    with nodes.connect(1) as client:
        for index in range(2):
            client.append(topic, *(b"%d-%d" % (index, number) for number in range(RECORDS)), partition=index)
    return topic


@pytest.fixture
def group(shared_nodes: Nodes, kafka_tools: KafkaTools) -> str:
    group = unique("shared")
    set_earliest(shared_nodes, kafka_tools, group)
    return group


def drain(member: ShareMember, count: int) -> None:
    """Take this many records, and accept them."""
    taken = 0

    def poll() -> bool:
        nonlocal taken
        taken += len(member.poll())
        return taken >= count

    eventually(poll, 30, f"{count} records are delivered")
    member.commit()


@pytest.fixture
def member(shared_nodes: Nodes, group: str) -> Iterator[tuple[ShareMember, str]]:
    topic = filled_topic(shared_nodes)
    member = ConfluentShares().join(shared_nodes.bootstrap, group, topic)
    drain(member, 2 * RECORDS)
    yield member, topic
    member.close()


def test_kafka_share_groups_lists_and_describes(
    shared_nodes: Nodes, kafka_tools: KafkaTools, group: str, member: tuple[ShareMember, str]
) -> None:
    _, topic = member
    server = ("--bootstrap-server", shared_nodes.bootstrap)
    at = (*server, "--group", group)
    rows = table(kafka_tools.ok("kafka-share-groups", *server, "--list", "--state"))
    assert {row["GROUP"]: row["STATE"] for row in rows}[group] == "Stable"
    everything = {row["GROUP"]: row for row in table(kafka_tools.ok("kafka-groups", *server, "--list"))}
    assert (everything[group]["TYPE"], everything[group]["PROTOCOL"]) == ("Share", "share")
    only = kafka_tools.ok("kafka-groups", *server, "--list", "--share")
    assert {row["TYPE"] for row in table(only)} == {"Share"}
    offsets = table(kafka_tools.ok("kafka-share-groups", *at, "--describe", "--offsets"))
    found = {(row["TOPIC"], int(row["PARTITION"])): (row["START-OFFSET"], row["LAG"]) for row in offsets}
    assert found == {(topic, index): (str(RECORDS), "0") for index in range(2)}
    shown = table(kafka_tools.ok("kafka-share-groups", *at, "--describe", "--members"))
    described = chronik("group", "describe", group, "--json", "-b", shared_nodes.bootstrap).json()
    assert [row["CONSUMER-ID"] for row in shown] == [each["member"] for each in described["members"]]
    assert {
        (each["topic"], each["partition"]): (str(each["start"]), str(each["lag"])) for each in described["partitions"]
    } == found
    for each in described["partitions"]:
        assert (each["in_flight"], each["delivered"], each["accepted"]) == (0, RECORDS, RECORDS)
    status, page = get(shared_nodes.node(1).http, f"/api/groups/{group}")
    assert status == 200, page
    assert (page["group_type"], page["assignor"], page["lag"]) == ("share", "simple", 0)
    assert {
        (each["topic"], each["partition"]): (str(each["committed"]), str(each["lag"])) for each in page["partitions"]
    } == found
    assert [each["member"] for each in page["members"]] == [each["member"] for each in described["members"]]
    state = kafka_tools.ok("kafka-share-groups", *at, "--describe", "--state")
    assert re.search(rf"^{group} .*Stable\s+1\s*$", state, re.MULTILINE), state


def test_kafka_share_groups_resets_and_deletes_offsets_and_groups(
    shared_nodes: Nodes, kafka_tools: KafkaTools, group: str
) -> None:
    topic = filled_topic(shared_nodes)
    at = ("--bootstrap-server", shared_nodes.bootstrap, "--group", group)

    def starts() -> dict[int, str]:
        rows = table(kafka_tools.ok("kafka-share-groups", *at, "--describe", "--offsets"))
        return {int(row["PARTITION"]): row["START-OFFSET"] for row in rows if row["TOPIC"] == topic}

    first = ConfluentShares().join(shared_nodes.bootstrap, group, topic)
    drain(first, 2 * RECORDS)
    assert "is not EMPTY" in kafka_tools.run("kafka-share-groups", *at, "--delete").out
    first.close()
    kafka_tools.ok("kafka-share-groups", *at, "--reset-offsets", "--to-earliest", "--topic", topic, "--execute")
    assert starts() == {0: "0", 1: "0"}
    second = ConfluentShares().join(shared_nodes.bootstrap, group, topic)
    drain(second, 2 * RECORDS)
    second.close()
    assert starts() == {0: str(RECORDS), 1: str(RECORDS)}
    kafka_tools.ok("kafka-share-groups", *at, "--delete-offsets", "--topic", topic)
    gone = kafka_tools.run("kafka-share-groups", *at, "--describe", "--offsets")
    assert topic not in gone.out
    kafka_tools.ok("kafka-share-groups", *at, "--delete")
    assert group not in kafka_tools.ok("kafka-share-groups", *at[:2], "--list").split()


def test_kafka_console_share_consumer_reads_and_accepts(
    shared_nodes: Nodes, kafka_tools: KafkaTools, group: str
) -> None:
    topic = filled_topic(shared_nodes)
    out = kafka_tools.alone(
        "kafka-console-share-consumer",
        *("--bootstrap-server", shared_nodes.bootstrap, "--topic", topic, "--group", group),
        *("--max-messages", str(2 * RECORDS), "--timeout-ms", "20000"),
    )
    assert sorted(out.split()) == sorted(f"{index}-{number}" for index in range(2) for number in range(RECORDS))
    described = chronik("group", "describe", group, "--json", "-b", shared_nodes.bootstrap).json()
    assert [(each["start"], each["lag"]) for each in described["partitions"]] == [(RECORDS, 0)] * 2


def test_kafka_dump_log_decodes_the_records_of_all_group_kinds(
    shared_nodes: Nodes, kafka_tools: KafkaTools, group: str, member: tuple[ShareMember, str]
) -> None:
    _, topic = member
    readers = []
    for name, protocol in ((f"{group}-classic", "classic"), (f"{group}-consumer", "consumer")):
        reader = Consumer(
            {
                "bootstrap.servers": shared_nodes.bootstrap,
                "group.id": name,
                "group.protocol": protocol,
                "auto.offset.reset": "earliest",
            }
        )
        reader.subscribe([topic])
        assert reader.poll(20) is not None
        reader.commit(asynchronous=False)
        readers.append(reader)
    try:
        decoded = "".join(dumped(shared_nodes, kafka_tools, "__consumer_offsets", "--offsets-decoder"))
        states = "".join(dumped(shared_nodes, kafka_tools, "__share_group_state", "--share-group-state-decoder"))
    finally:
        for reader in readers:
            reader.close()
    # The versions of the keys are Kafka's kinds of records; the tool shows them by number.
    for kind in (10, 11, 12, 13, 14, 15):
        assert re.search(rf'"type":"{kind}","data":{{"groupId":"{group}"', decoded), kind
    for kind in (3, 5, 6, 7, 8):
        assert re.search(rf'"type":"{kind}","data":{{"(groupId|group)":"{group}-consumer"', decoded), kind
    assert re.search(rf'"type":"2","data":{{"group":"{group}-classic"', decoded)
    for name in (f"{group}-classic", f"{group}-consumer"):
        assert re.search(rf'"type":"1","data":{{"group":"{name}","topic":"{topic}"', decoded), name
    assert '"initializedTopics":[{"topicId":' in decoded
    assert re.search(rf'"type":"0","data":{{"groupId":"{group}"', states), "a snapshot"


def dumped(nodes: Nodes, tools: KafkaTools, topic: str, decoder: str) -> Iterator[str]:
    """Yield what the tool prints of each segment with records, of all nodes."""
    for node_id in nodes.ids:
        for segment in sorted(Path(nodes.node(node_id).folder, "logs").glob(f"{topic}-*/*.log")):
            if any(segment.read_bytes()[:64]):
                yield tools.run("kafka-dump-log", decoder, "--files", str(segment)).out
