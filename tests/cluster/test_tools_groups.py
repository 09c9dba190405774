"""Groups and their lag: Apache Kafka's tools, Burrow, kadm, `chronik group`, the page and the metrics agree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from tests.cli.run_chronik import chronik
from tests.cluster.support_cluster import Nodes
from tests.cluster.support_lag_checkers import Burrow, ask_kadm, burrow_is_missing, kadm_is_missing
from tests.cluster.support_tools import KafkaTools, table
from tests.node.support_wire import unique
from tests.support.eventually import eventually
from tests.web.support_http import get

PARTITIONS = 3
RECORDS = 40
COMMITTED = {0: 40, 1: 25}
"""Two of the three partitions; the group has committed nothing for the last one."""

Lags = dict[int, int | None]


def filled_topic(nodes: Nodes) -> str:
    topic = nodes.new_topic(PARTITIONS, retention_ms="-1")
    with nodes.connect(1) as client:
        for index in range(PARTITIONS):
            client.append(topic, *(b"%d" % number for number in range(RECORDS)), partition=index)
    return topic


@contextmanager
def members(nodes: Nodes, topic: str, group: str, protocol: str = "classic") -> Iterator[dict[str, set[int]]]:
    """Two consumers that own the topic's partitions and commit COMMITTED; yield the partitions of each client id."""
    settings = {"bootstrap.servers": nodes.bootstrap, "group.id": group, "enable.auto.commit": False}
    settings["group.protocol"] = protocol
    readers = {name: Consumer({**settings, "client.id": name}) for name in ("reader-a", "reader-b")}
    try:
        for reader in readers.values():
            reader.subscribe([topic])

        def all_assigned() -> dict[str, set[int]] | None:
            held: dict[str, set[int]] = {}
            for name, reader in readers.items():
                reader.poll(0.05)
                held[name] = {part.partition for part in reader.assignment()}
            return held if all(held.values()) and sum(map(len, held.values())) == PARTITIONS else None

        held = eventually(all_assigned, 30, "both members hold partitions")
        assert held is not None
        for name, reader in readers.items():
            offsets = [TopicPartition(topic, part, COMMITTED[part]) for part in held[name] if part in COMMITTED]
            if offsets:
                reader.commit(offsets=offsets, asynchronous=False)
        yield held
    finally:
        for reader in readers.values():
            reader.close()


def lag_of_chronik_group(nodes: Nodes, group: str) -> Lags:
    shown = chronik("group", "describe", group, "--json", "-b", nodes.bootstrap).json()
    return {entry["partition"]: entry["lag"] for entry in shown["partitions"]}


def lag_of_the_page(nodes: Nodes, group: str) -> Lags:
    status, shown = get(nodes.node(1).http, f"/api/groups/{group}")
    assert status == 200, shown
    return {entry["partition"]: entry["lag"] for entry in shown["partitions"]}


def lag_of_the_metrics(nodes: Nodes, group: str) -> Lags:
    lags: Lags = {}
    for node in nodes.responsive:
        text = node.get("/metrics")[1].decode()
        found = re.findall(rf'^chronik_group_lag{{group="{group}",.*partition="(\d+)".*}} (\S+)', text, re.MULTILINE)
        lags.update({int(partition): int(float(lag)) for partition, lag in found})
    return lags


def test_every_tool_reports_the_same_lag_and_members(shared_nodes: Nodes, kafka_tools: KafkaTools) -> None:
    topic, group = filled_topic(shared_nodes), unique("lagging")
    at = ("--bootstrap-server", shared_nodes.bootstrap, "--group", group)
    with members(shared_nodes, topic, group) as held:
        owners = {partition: name for name, partitions in held.items() for partition in partitions}
        rows = table(kafka_tools.ok("kafka-consumer-groups", *at, "--describe", "--offsets"))
        assert {(row["GROUP"], row["TOPIC"]) for row in rows} == {(group, topic)}
        by_partition = {int(row["PARTITION"]): row for row in rows}
        assert {index: row["CURRENT-OFFSET"] for index, row in by_partition.items()} == {0: "40", 1: "25", 2: "-"}
        assert {row["LOG-END-OFFSET"] for row in rows} == {str(RECORDS)}
        assert {index: row["CLIENT-ID"] for index, row in by_partition.items()} == owners
        assert {row["HOST"] for row in rows} == {"/127.0.0.1"}
        lags = {index: None if row["LAG"] == "-" else int(row["LAG"]) for index, row in by_partition.items()}
        assert lags == {0: 0, 1: 15, 2: None}
        assert lag_of_chronik_group(shared_nodes, group) == lags
        assert lag_of_the_page(shared_nodes, group) == lags
        assert lag_of_the_metrics(shared_nodes, group) == {0: 0, 1: 15}

        shown = table(kafka_tools.ok("kafka-consumer-groups", *at, "--describe", "--members", "--verbose"))
        assert {row["CLIENT-ID"]: partitions_in(row["CURRENT-ASSIGNMENT"], topic) for row in shown} == held
        assert {row["CONSUMER-ID"] for row in shown} == {row["CONSUMER-ID"] for row in rows}
        state = kafka_tools.ok("kafka-consumer-groups", *at, "--describe", "--state")
        assert re.search(rf"^{group} .*127\.0\.0\.1:\d+\s+\(\d\)\s+range\s+Stable\s+2\s*$", state, re.MULTILINE), state

        listed = kafka_tools.ok(
            "kafka-consumer-groups", "--bootstrap-server", shared_nodes.bootstrap, "--list", "--state"
        )
        assert {row["GROUP"]: row["STATE"] for row in table(listed)}[group] == "Stable"
        everything = kafka_tools.ok("kafka-groups", "--bootstrap-server", shared_nodes.bootstrap, "--list")
        assert {row["GROUP"]: (row["TYPE"], row["PROTOCOL"]) for row in table(everything)}[group] == (
            "Classic",
            "consumer",
        )

        # The tools do not change a group with members.
        refused = kafka_tools.run(
            "kafka-consumer-groups", *at, "--reset-offsets", "--to-earliest", "--topic", topic, "--execute"
        )
        assert "inactive" in refused.out
        refused = kafka_tools.run("kafka-consumer-groups", *at, "--delete")
        assert "not empty" in refused.out
        assert lag_of_chronik_group(shared_nodes, group) == lags


def test_tools_describe_a_group_of_the_new_protocol(shared_nodes: Nodes, kafka_tools: KafkaTools) -> None:
    topic, group = filled_topic(shared_nodes), unique("modern")
    at = ("--bootstrap-server", shared_nodes.bootstrap, "--group", group)
    with members(shared_nodes, topic, group, "consumer") as held:
        shown = table(kafka_tools.ok("kafka-consumer-groups", *at, "--describe", "--members", "--verbose"))
        for column in ("CURRENT-ASSIGNMENT", "TARGET-ASSIGNMENT"):
            assert {row["CLIENT-ID"]: partitions_in(row[column], topic) for row in shown} == held
        (status, described) = get(shared_nodes.node(1).http, f"/api/groups/{group}")
        assert status == 200
        epochs = {row["CONSUMER-ID"]: int(row["CURRENT-EPOCH"]) for row in shown}
        assert epochs == {member["member"]: member["epoch"] for member in described["members"]}
        assert {int(row["TARGET-EPOCH"]) for row in shown} == {described["assignment_epoch"]}
        state = kafka_tools.ok("kafka-consumer-groups", *at, "--describe", "--state", "--verbose")
        epoch = described["epoch"]
        assert re.search(rf"^{group} .*\s+uniform\s+Stable\s+{epoch}\s+{epoch}\s+2\s*$", state, re.MULTILINE), state
        rows = table(kafka_tools.ok("kafka-consumer-groups", *at, "--describe", "--offsets"))
        assert {int(row["PARTITION"]): row["LAG"] for row in rows} == {0: "0", 1: "15", 2: "-"}
        listed = kafka_tools.ok("kafka-groups", *at[:2], "--list", "--consumer")
        assert {row["GROUP"]: (row["TYPE"], row["PROTOCOL"]) for row in table(listed)}[group] == (
            "Consumer",
            "consumer",
        )


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_kafka_console_consumer_reads_and_commits(shared_nodes: Nodes, kafka_tools: KafkaTools, protocol: str) -> None:
    topic, group = filled_topic(shared_nodes), unique(f"console-{protocol}")
    out = kafka_tools.alone(
        "kafka-console-consumer",
        *("--bootstrap-server", shared_nodes.bootstrap, "--topic", topic, "--group", group, "--from-beginning"),
        *("--max-messages", str(PARTITIONS * RECORDS), "--timeout-ms", "20000"),
        *("--command-property", f"group.protocol={protocol}"),
    )
    assert sorted(out.split()) == sorted(PARTITIONS * [str(number) for number in range(RECORDS)])
    assert lag_of_chronik_group(shared_nodes, group) == dict.fromkeys(range(PARTITIONS), 0)
    listed = kafka_tools.ok("kafka-groups", "--bootstrap-server", shared_nodes.bootstrap, "--list")
    assert {row["GROUP"]: row["TYPE"] for row in table(listed)}[group] == protocol.capitalize()


def partitions_in(assignment: str, topic: str) -> set[int]:
    found = re.fullmatch(rf"{topic}\(([\d,]+)\)|{topic}:([\d,]+)", assignment)
    assert found, assignment
    return {int(number) for number in (found[1] or found[2]).split(",")}


def test_kafka_consumer_groups_resets_and_deletes_the_offsets_of_an_empty_group(
    shared_nodes: Nodes, kafka_tools: KafkaTools
) -> None:
    topic, group = filled_topic(shared_nodes), unique("resting")
    at = ("--bootstrap-server", shared_nodes.bootstrap, "--group", group)
    with members(shared_nodes, topic, group):
        pass

    def reset(*how: str, topics: str = topic) -> dict[int, int]:
        out = kafka_tools.ok("kafka-consumer-groups", *at, "--reset-offsets", "--topic", topics, *how)
        return {int(row["PARTITION"]): int(row["NEW-OFFSET"]) for row in table(out)}

    def offsets() -> dict[int, int]:
        rows = table(kafka_tools.ok("kafka-consumer-groups", *at, "--describe"))
        assert {row["CONSUMER-ID"] for row in rows} == {"-"}
        return {int(row["PARTITION"]): int(row["CURRENT-OFFSET"]) for row in rows}

    eventually(lambda: offsets() == COMMITTED, 20, "the group has no members, and its offsets")
    assert reset("--to-earliest", "--dry-run") == {0: 0, 1: 0, 2: 0}
    assert offsets() == COMMITTED
    for how, moved in [
        (("--to-offset", "7"), {0: 7, 1: 7, 2: 7}),
        (("--shift-by", "3"), {0: 10, 1: 10, 2: 10}),
        (("--to-latest",), {0: 40, 1: 40, 2: 40}),
        (("--to-datetime", "2023-11-14T22:13:20.025"), {0: 25, 1: 25, 2: 25}),
        (("--to-earliest",), {0: 0, 1: 0, 2: 0}),
    ]:
        assert reset(*how, "--execute") == moved
        assert offsets() == moved
    assert reset("--to-offset", "5", "--execute", topics=f"{topic}:1") == {1: 5}
    kafka_tools.ok("kafka-consumer-groups", *at, "--delete-offsets", "--topic", f"{topic}:2")
    assert offsets() == {0: 0, 1: 5}
    assert lag_of_chronik_group(shared_nodes, group) == {0: 40, 1: 35}

    kafka_tools.ok("kafka-consumer-groups", *at, "--delete")
    gone = kafka_tools.run("kafka-consumer-groups", *at, "--describe")
    assert "GroupIdNotFoundException" in gone.out
    assert group not in kafka_tools.ok("kafka-consumer-groups", *at[:2], "--list").split()


def test_burrow_reports_topics_groups_and_lag(shared_nodes: Nodes, tmp_path: Path) -> None:
    if reason := burrow_is_missing():
        pytest.skip(reason)
    topic, group = filled_topic(shared_nodes), unique("burrowed")
    with Burrow(tmp_path, shared_nodes.bootstrap) as burrow:
        # Burrow panics on a request for a topic of which it knows only some end offsets; here it starts with all of
        # them.
        eventually(lambda: "starting consumers" in burrow.log(), 30, "it has asked every node for its ends")
        eventually(
            lambda: burrow.ask(f"/topic/{topic}").get("offsets") == [RECORDS] * PARTITIONS,
            30,
            "it knows the topic's ends",
        )
        # Burrow only counts commits made while it runs, by reading __consumer_offsets.
        with members(shared_nodes, topic, group):

            def lags() -> dict[int, dict[str, Any]] | None:
                answer = burrow.ask(f"/consumer/{group}/lag")
                if answer["error"]:
                    return None
                partitions = answer["status"]["partitions"]
                # The entry of a partition without a committed offset is empty.
                found = {entry["partition"]: entry for entry in partitions if entry.get("end")}
                return found if set(found) == set(COMMITTED) else None

            found = eventually(lags, 30, "it knows the group")
            assert found is not None
            # Without the owners: Burrow cannot read the member metadata that Kafka writes since 2.4.
            for index, entry in found.items():
                assert entry["topic"] == topic
                assert entry["end"]["offset"] == COMMITTED[index]
                assert entry["current_lag"] == RECORDS - COMMITTED[index]
            assert {index: entry["current_lag"] for index, entry in found.items()} == {
                index: lag for index, lag in lag_of_chronik_group(shared_nodes, group).items() if lag is not None
            }
        assert group in burrow.ask("/consumer")["consumers"]


def test_kadm_reports_the_same_lag_offsets_members_and_replicas(shared_nodes: Nodes) -> None:
    if reason := kadm_is_missing():
        pytest.skip(reason)
    topic, group = filled_topic(shared_nodes), unique("kadm")
    with members(shared_nodes, topic, group) as held:
        found = ask_kadm(shared_nodes.bootstrap, group, topic)
        assert found["brokers"] == shared_nodes.ids
        assert found["state"] == "Stable"
        # Without a committed offset, kadm counts the whole partition as lag.
        lags = {0: 0, 1: 15, 2: RECORDS}
        assert {int(index): entry["lag"] for index, entry in found["group"].items()} == lags
        assert found["total_lag"] == sum(lags.values())
        assert {int(index): entry["committed"] for index, entry in found["group"].items()} == {**COMMITTED, 2: -1}
        owners = {partition: name for name, partitions in held.items() for partition in partitions}
        assert {int(index): entry["client_id"] for index, entry in found["group"].items()} == owners
        for index, state in shared_nodes.partitions(topic).items():
            shown = found["partitions"][str(index)]
            assert (shown["leader"], tuple(shown["replicas"])) == (state.leader, state.replicas)
            assert not shown["offline_replicas"]
            assert (shown["start"], shown["end"]) == (0, RECORDS)
        sizes = [found["log_bytes"][str(node_id)] for node_id in shared_nodes.ids]
        assert min(sizes) == max(sizes) > 0
