"""Connections that cost resources: half-open, idle by the thousand, never reading, or more than the maximum."""

from __future__ import annotations

import json
import resource
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from tests.cluster.support_cluster import reset_peak
from tests.conftest import StartNode
from tests.faults.support_load import MB, HealthyClient, memory_bytes, no_surprises
from tests.node.support_wire import WireClient, batch, connect, fetch_of
from tests.support.eventually import eventually
from tests.support.node import Node

from chronik.wire.api import ApiKey

IDLE_CONNECTIONS = 1000
HALF_OPEN_CONNECTIONS = 200
PIPELINED_FETCHES = 100


@pytest.fixture(scope="module")
def crowded(start_shared_node: StartNode) -> Node:
    """A node for this module alone, because its connections and its memory are measured."""
    return start_shared_node()


def connections(node: Node) -> int:
    """Return the node's own count of connections."""
    for line in node.get("/metrics").splitlines():
        if line.startswith("chronik_connections "):
            return int(float(line.rpartition(" ")[2]))
    raise AssertionError("no gauge of connections in /metrics")


def refusals(node: Node) -> list[str]:
    """Return the reasons that the node logged for connections it closed."""
    lines = [json.loads(line) for line in node.log_text().splitlines() if line.startswith("{")]
    return [line["reason"] for line in lines if line["event"] == "connection_refused"]


@pytest.mark.parametrize("claimed", [1000, 200 * 1024, 90 * MB], ids=["1 KB", "200 KB", "90 MB"])
def test_incomplete_frames_use_memory_for_received_bytes_only(crowded: Node, claimed: int) -> None:
    sent = struct.pack(">i", claimed) + b"\x00" * 100
    with HealthyClient(crowded), ExitStack() as stack:
        before = reset_peak(crowded.pid)
        for _ in range(HALF_OPEN_CONNECTIONS):
            stack.enter_context(connect(crowded)).send_bytes(sent)
        eventually(lambda: connections(crowded) > HALF_OPEN_CONNECTIONS, what="the node has accepted them all")
        peak = memory_bytes(crowded, "VmHWM") - before
        assert peak < 40 * MB, f"{peak / MB:.0f} MB for {HALF_OPEN_CONNECTIONS} x {len(sent)} bytes"
    eventually(lambda: connections(crowded) == 0, what="all are gone when their peers are")


def test_concurrent_large_frames_stay_within_the_memory_budget_of_the_node(start_node: StartNode) -> None:
    node = start_node(in_flight_bytes_max=32 * MB, topic_defaults={"max.message.bytes": 16 * MB})
    large = batch(bytes(8 * MB))
    with HealthyClient(node), ExitStack() as stack, ThreadPoolExecutor(20) as threads:
        topic = stack.enter_context(connect(node)).new_topic()
        before = reset_peak(node.pid)
        clients = [stack.enter_context(connect(node, timeout_s=30)) for _ in range(20)]
        answers = [threads.submit(client.produce, topic, large, timeout_ms=30_000) for client in clients]
        assert sorted(answer.result().base_offset for answer in answers) == list(range(20))
        peak = memory_bytes(node, "VmHWM") - before
        assert peak < 150 * MB, f"{peak / MB:.0f} MB at the peak for 20 frames of 8 MB, 32 MB allowed"


def test_a_thousand_idle_connections_do_not_slow_down_an_active_client(crowded: Node) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * IDLE_CONNECTIONS:
        pytest.skip(f"only {hard} open files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * IDLE_CONNECTIONS), hard))
    with ExitStack() as stack:
        before = memory_bytes(crowded)
        for index in range(IDLE_CONNECTIONS):
            client = stack.enter_context(connect(crowded))
            if index % 2:
                client.call(ApiKey.API_VERSIONS, 3, {})
        eventually(lambda: connections(crowded) == IDLE_CONNECTIONS, what="the node counts them all")
        with HealthyClient(crowded, slowest_s_max=2.0) as healthy:
            eventually(lambda: healthy.rounds >= 200, timeout_s=20, what="200 rounds among idle connections")
        grown = memory_bytes(crowded) - before
        assert grown < 40 * MB, f"{grown / MB:.0f} MB for {IDLE_CONNECTIONS} idle connections"
    eventually(lambda: connections(crowded) == 0, what="all are gone")


def test_a_consumer_that_does_not_read_its_responses_uses_bounded_memory(crowded: Node) -> None:
    with HealthyClient(crowded, slowest_s_max=5.0), connect(crowded) as producer:
        topic = producer.new_topic()
        for _ in range(40):
            producer.append(topic, bytes(1_000_000))
        before = reset_peak(crowded.pid)
        with connect(crowded) as reader:
            reader.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
            request = fetch_of((topic, 0, 0), max_bytes=50 * MB, partition_max_bytes=50 * MB)
            with reader.one_write():
                sent = [reader.send_fetch(request) for _ in range(PIPELINED_FETCHES)]
            # Other clients are served meanwhile, and the node buffers a response or two for this client, not a hundred.
            for _ in range(20):
                producer.append(topic, b"meanwhile")
            peak = memory_bytes(crowded, "VmHWM") - before
            assert peak < 200 * MB, f"{peak / MB:.0f} MB for a reader that does not read"
            # The client was only slow: when it reads, it receives every response, in order.
            assert [reader.fetched(correlation_id).error_code for correlation_id in sent[:5]] == [0] * 5
        no_surprises(crowded)


def test_consumers_that_do_not_read_their_responses_share_one_memory_budget(start_node: StartNode) -> None:
    node = start_node(in_flight_bytes_max=64 * MB)
    with HealthyClient(node, slowest_s_max=5.0), connect(node) as producer, ExitStack() as stack:
        topic = producer.new_topic()
        for _ in range(20):
            producer.append(topic, bytes(1_000_000))
        before = reset_peak(node.pid)
        for _ in range(50):
            reader = stack.enter_context(connect(node))
            reader.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
            reader.send_fetch(fetch_of((topic, 0, 0), max_bytes=50 * MB, partition_max_bytes=50 * MB))
        for _ in range(20):
            producer.append(topic, b"meanwhile")
        peak = memory_bytes(node, "VmHWM") - before
        assert peak < 250 * MB, f"{peak / MB:.0f} MB for 50 readers that do not read, 64 MB allowed"


def test_a_consumer_that_does_not_read_its_responses_is_closed_when_idle_too_long(start_node: StartNode) -> None:
    node = start_node(connection_idle_ms_max=1000)
    with connect(node) as producer:
        topic = producer.new_topic()
        for _ in range(20):
            producer.append(topic, bytes(1_000_000))
    with connect(node) as reader:
        reader.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        reader.send_fetch(fetch_of((topic, 0, 0), max_bytes=50 * MB, partition_max_bytes=50 * MB))
        eventually(lambda: connections(node) == 0, timeout_s=30, what="the node closes it")


def test_a_connection_beyond_the_limit_is_refused_and_open_connections_keep_working(start_node: StartNode) -> None:
    node = start_node(connections_max=20)
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(node)) for _ in range(20)]
        for client in clients:
            client.call(ApiKey.API_VERSIONS, 3, {})
        for _ in range(5):
            with connect(node) as refused:
                assert refused.ended_without_a_byte()
        assert any("20 connections are open" in reason for reason in refusals(node))
        topic = clients[0].new_topic()
        assert [client.append(topic, b"x") for client in clients] == list(range(20))
        clients[-1].socket.close()

        def is_let_in() -> bool:
            with connect(node) as late:
                try:
                    late.call(ApiKey.API_VERSIONS, 3, {})
                except Exception:
                    return False
                return True

        eventually(is_let_in, what="a place that was freed is given away")
    no_surprises(node)


def test_an_oversized_frame_is_refused_as_soon_as_its_size_is_read(start_node: StartNode) -> None:
    node = start_node(frame_bytes_max=1 * MB)
    with HealthyClient(node):
        with WireClient(node.kafka_port) as client:
            client.send_bytes(struct.pack(">i", 1 * MB + 1))
            assert client.ended_without_a_byte()
        with WireClient(node.kafka_port) as client:
            topic = client.new_topic()
            assert client.append(topic, bytes(1 * MB - 500)) == 0
    assert any("allowed are" in reason for reason in refusals(node))


def test_closed_connections_leak_no_memory(crowded: Node) -> None:
    with HealthyClient(crowded):
        for _ in range(300):
            connect(crowded).socket.close()
        before = memory_bytes(crowded)
        for _ in range(2000):
            connect(crowded).socket.close()
        eventually(lambda: connections(crowded) == 1, what="only the healthy client is left")
        grown = memory_bytes(crowded) - before
        assert grown < 10 * MB, f"{grown / MB:.0f} MB after 2,000 connections"
