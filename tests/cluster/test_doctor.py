"""Provoke each cause of a stall with real nodes and clients: the doctor names it, in a terminal and on the page.

All tests share one cluster of three nodes. Forwarding is off, so that a client with stale metadata gets an error, and
reads can be made slow. The tests that stop nodes come last, because none restarts them.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any, TypeAlias

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from tests.cli.run_chronik import CHRONIK, chronik
from tests.cluster.support_cluster import Nodes
from tests.cluster.support_fixtures import nodes_of
from tests.node.support_wire import WireClient, batch
from tests.support.browser import Expect, OpenPage
from tests.support.eventually import eventually

from chronik.wire.errors import ErrorCode

pytestmark = pytest.mark.timeout(180)
Ask: TypeAlias = Callable[..., dict[str, Any]]
PARTITIONS = 3
PAUSE_S = 0.05
"""Between the calls of repeated work: some records each second are load enough, and the nodes share the CPU with it."""
TAIL_BATCHES = 600
"""More than the recent batches whose positions a log keeps in memory: older ones are read from disk."""


@pytest.fixture(scope="module")
def ward(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    cluster = Nodes(tmp_path_factory.mktemp("ward"), settings={"forwarding": False}, disk_switches=True)
    for nodes in nodes_of(request.config, cluster):
        nodes.wait_in_sync()
        yield nodes


@pytest.fixture
def ask(ward: Nodes, open_page: OpenPage, expect: Expect) -> Ask:
    """Return the doctor's diagnosis of a topic: from `doctor --json`, and from the page of a running node."""

    def ask(topic: str, group: str | None = None) -> dict[str, Any]:
        page = open_page(ward.responsive[0].http, f"/#/topics/{topic}", may_fail=True)
        if group is not None:
            page.get_by_label("Group to examine").select_option(group)
        page.get_by_role("button", name="Diagnose").click()
        chosen = () if group is None else ("--group", group)
        outcome = chronik("doctor", topic, "--json", "-b", ward.bootstrap, *chosen, timeout_s=120)
        assert outcome.code in (0, 1), outcome.err
        report: dict[str, Any] = json.loads(outcome.out)
        assert (outcome.code == 0) == (report["verdict"] == "healthy")
        shown = page.get_by_role("status", name="Diagnosis")
        expect(shown.get_by_role("heading")).to_have_text(report["verdict"])
        for evidence in report["evidence"]:
            for what in {"node", "client", "group"} & evidence.keys():
                expect(shown).to_contain_text(str(evidence[what]))
        return report

    return ask


@contextmanager
def running(work: Any) -> Iterator[None]:
    """Call `work` repeatedly in a thread until the block ends."""
    stop = Event()

    def run() -> None:
        while not stop.is_set():
            work()
            stop.wait(PAUSE_S)

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(20)


@contextmanager
def produced(nodes: Nodes, topic: str, acks: str = "all") -> Iterator[None]:
    """Produce to all partitions until the block ends."""
    producer = Producer({"bootstrap.servers": nodes.bootstrap, "acks": acks, "client.id": "writer"})

    def send() -> None:
        for partition in range(PARTITIONS):
            producer.produce(topic, b"x" * 50, partition=partition)
        producer.poll(0)

    with running(send):
        yield
    producer.purge()


@contextmanager
def consumer_of(nodes: Nodes, topic: str) -> Iterator[Consumer]:
    """A member of the topic's group that has read and committed records of each partition."""
    consumer = Consumer(
        {
            "bootstrap.servers": nodes.bootstrap,
            "group.id": f"group-of-{topic}",
            "client.id": "reader",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    try:
        consumer.subscribe([topic])
        partitions = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]

        def has_committed() -> bool:
            read(consumer)
            return all(place.offset > 0 for place in consumer.committed(partitions, timeout=10))

        eventually(has_committed, 30, "every partition was read and committed")
        yield consumer
    finally:
        consumer.close()


def read(consumer: Consumer) -> None:
    if consumer.consume(200, timeout=0.2):
        consumer.commit(asynchronous=False)


# -- all nodes run -----------------------------------------------------------------------------------------------------


def test_doctor_reports_a_healthy_cluster_under_load_as_healthy(ward: Nodes, ask: Ask) -> None:
    topic = ward.new_topic(PARTITIONS)
    with produced(ward, topic), consumer_of(ward, topic) as consumer, running(lambda: read(consumer)):
        report = ask(topic)
    assert (report["verdict"], report["also"]) == ("healthy", []), report
    assert [partition["partition"] for partition in report["partitions"]] == [0, 1, 2]
    assert all(partition["fetch_ms"] is not None for partition in report["partitions"])


def test_doctor_reports_a_watermark_that_waits_for_a_paused_follower(ward: Nodes, ask: Ask) -> None:
    topic = ward.new_topic(1, min_insync_replicas="3")
    leader = ward.leader(topic)
    paused = next(node for node in ward.ids if node not in (leader, ward.controller()))
    ward.pause(paused)
    try:
        with ward.connect(leader) as client:
            for _ in range(20):
                assert client.produce(topic, batch(b"x"), acks=1).error_code == 0
        report = ask(topic)
    finally:
        ward.resume(paused)
    assert report["verdict"] == "watermark-not-advancing", report
    (evidence,) = report["evidence"]
    assert (evidence["partition"], evidence["node"]) == (0, paused)
    assert evidence["numbers"]["lag"] >= 20
    ward.wait_in_sync()


def test_doctor_reports_fetches_that_hang_on_a_slow_disk(ward: Nodes, ask: Ask) -> None:
    topic = ward.new_topic(1, chronik_trace="true")
    leader = ward.leader(topic)
    with ward.connect(leader) as client:
        sent = [client.send_produce(topic, batch(b"x")) for _ in range(TAIL_BATCHES)]
        for correlation_id in sent:
            assert client.produced(correlation_id).error_code == 0
    ward.slow_reads(leader, 1500)

    def hang() -> dict[str, Any]:
        report = ask(topic)
        assert report["verdict"] == "fetch-hang", report
        return report

    try:
        # If the whole machine is slow for a moment, the doctor does not blame the disk.
        report = eventually(hang, 100)
    finally:
        ward.cure(leader)
    (evidence,) = report["evidence"]
    assert (evidence["partition"], evidence["node"]) == (0, leader)
    assert evidence["numbers"]["longest_ms"] >= 1500


def test_doctor_reports_a_client_that_keeps_sending_requests_to_the_wrong_node(ward: Nodes, ask: Ask) -> None:
    topic = ward.new_topic(1, chronik_trace="true")
    leader = ward.leader(topic)
    wrong = next(node for node in ward.ids if node != leader)
    with WireClient(ward.node(wrong).kafka.port, client_id="stale") as client:

        def produce() -> None:
            assert client.produce(topic, batch(b"x")).error_code == ErrorCode.not_leader_or_follower

        with running(produce):
            report = ask(topic)
    assert report["verdict"] == "leadership-rejections", report
    (evidence,) = report["evidence"]
    assert (evidence["node"], evidence["partition"], evidence["client"]) == (wrong, 0, "stale")


def test_doctor_reports_a_group_member_that_does_not_poll(ward: Nodes, ask: Ask) -> None:
    topic = ward.new_topic(PARTITIONS)
    with produced(ward, topic), consumer_of(ward, topic):
        report = ask(topic, f"group-of-{topic}")
    assert report["verdict"] == "consumer-stopped", report
    (evidence,) = report["evidence"]
    assert (evidence["client"], evidence["group"]) == ("reader", f"group-of-{topic}")
    assert evidence["numbers"]["lag"] > 0


def test_doctor_reports_a_partition_that_is_stuck_while_others_make_progress(ward: Nodes, ask: Ask) -> None:
    topic = ward.new_topic(PARTITIONS)
    with produced(ward, topic), consumer_of(ward, topic) as consumer:
        consumer.pause([TopicPartition(topic, 1)])
        with running(lambda: read(consumer)):
            report = ask(topic)
    assert report["verdict"] == "partition-imbalance", report
    (evidence,) = report["evidence"]
    assert (evidence["partition"], evidence["client"]) == (1, "reader")


# -- traces in a terminal, and bad input -------------------------------------------------------------------------------


def test_an_unknown_topic_or_group_prints_one_line_and_exits_with_2(ward: Nodes) -> None:
    topic = ward.new_topic(1)
    for arguments in (("doctor", "missing"), ("doctor", topic, "--group", "missing"), ("trace", "tail", "missing")):
        outcome = chronik(*arguments, "-b", ward.bootstrap)
        assert outcome.code == 2, outcome.err
        assert "missing" in outcome.error_line
        assert "does not exist" in outcome.error_line


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """End an endless process with the test, whatever its outcome."""
    try:
        yield
    finally:
        process.kill()


def test_trace_tail_shows_live_traces_of_all_nodes(ward: Nodes) -> None:
    topic = ward.new_topic(PARTITIONS)
    assert chronik("trace", "on", topic, "-b", ward.bootstrap).code == 0
    command = [str(CHRONIK), "trace", "tail", topic, "-b", ward.bootstrap]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tail, ended(tail):
        seen: list[str] = []
        reader = Thread(target=lambda: seen.extend(iter(tail.stdout.readline, "")), daemon=True)  # type: ignore[union-attr]
        reader.start()
        with produced(ward, topic), consumer_of(ward, topic):
            eventually(
                # Which nodes lead depends on the nodes that were alive when the topic was created.
                lambda: all(
                    any(f"node {state.leader} " in line and "produce-acknowledged" in line for line in list(seen))
                    for state in ward.partitions(topic).values()
                ),
                30,
                "each leader's acknowledgements are shown",
            )
            eventually(lambda: any("fetch-served" in line for line in list(seen)), 30, "fetches are shown")
        tail.send_signal(2)
        assert tail.wait(20) in (0, 130)
        assert "Traceback" not in (tail.stderr.read() if tail.stderr else "")
    assert chronik("trace", "off", topic, "-b", ward.bootstrap).code == 0


# -- nodes stop, and stay down -----------------------------------------------------------------------------------------


def test_doctor_reports_a_dead_node_and_survives_the_death_of_one_while_it_runs(ward: Nodes, ask: Ask) -> None:
    topic = ward.new_topic(PARTITIONS)
    command = [str(CHRONIK), "doctor", topic, "--json", "-b", ward.bootstrap]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as doctor:
        ward.kill(3)
        out, _ = doctor.communicate(timeout=60)
    assert json.loads(out)["verdict"] in ("healthy", "under-replicated", "no-leader", "watermark-not-advancing")

    def has_shrunk() -> bool:
        states = ward.partitions(topic).values()
        return all(3 not in state.isr and state.leader in (1, 2) for state in states)

    eventually(has_shrunk, 30, "node 3 has left every ISR")
    report = ask(topic)
    assert report["verdict"] == "under-replicated", report
    assert [(evidence["partition"], evidence["node"]) for evidence in report["evidence"]] == [(0, 3), (1, 3), (2, 3)]


def test_doctor_reports_no_leader_when_two_of_three_nodes_are_dead(ward: Nodes, ask: Ask) -> None:
    topic = ward.new_topic(PARTITIONS)
    ward.kill(2)
    report = ask(topic)
    assert report["verdict"] == "no-leader", report
    assert [evidence["partition"] for evidence in report["evidence"]] == [0, 1, 2]
    assert "2, 3" in report["next_step"]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_doctor_raises_no_false_alarm_in_20_runs(start_nodes: Any) -> None:
    nodes: Nodes = start_nodes()
    topic = nodes.new_topic(PARTITIONS)
    with produced(nodes, topic), consumer_of(nodes, topic) as consumer, running(lambda: read(consumer)):
        for _ in range(20):
            outcome = chronik("doctor", topic, "--json", "-b", nodes.bootstrap, timeout_s=120)
            assert json.loads(outcome.out)["verdict"] == "healthy", outcome.out
