"""Health, readiness, metrics and the API over a real socket."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from chronik.metadata.image import BrokerImage, ClusterImage, PartitionImage, TopicImage
from chronik.node.admin.telemetry import ClientInstance
from chronik.node.broker import BrokerState
from chronik.node.config import NodeConfig
from chronik.node.replicas.healing import Damage
from chronik.node.replicas.partition import Partition
from chronik.node.runtime import Runtime
from chronik.observe.metrics import Metrics
from chronik.observe.traces import TraceRing
from chronik.web.app import create_app
from chronik.web.node_view import NodeView
from chronik.web.server import WebServer, bind


@dataclass
class Replica:
    """A partition's log on this node."""

    log_start_offset: int = 0
    log_end_offset: int = 0
    high_watermark: int = 0
    last_stable_offset: int = 0


@dataclass
class FakeBroker:
    image: ClusterImage | None = None
    controller_id: int = -1
    is_ready: bool = False
    disk_error: str | None = None
    damages: Sequence[Damage] = ()
    pushing_clients: Sequence[ClientInstance] = ()
    replicas: dict[tuple[str, int], Replica] = field(default_factory=dict)

    @property
    def state(self) -> BrokerState:
        return "ready" if self.is_ready else "disconnected"

    def partition(self, topic: str, index: int) -> Partition | None:
        return cast("Partition | None", self.replicas.get((topic, index)))


class Node(NodeView):
    """A node as the application sees it."""

    broker: Any

    now_ms = 1_700_000_000_000

    def __init__(self, config: NodeConfig | None = None) -> None:
        metrics = Metrics()
        traces = TraceRing(2, 100, lambda: 1_700_000_000_000.0, metrics)
        env = SimpleNamespace(wall_ms=lambda: self.now_ms, random=random.SystemRandom())
        runtime = SimpleNamespace(
            node_id=2,
            env=env,
            config=config or NodeConfig(node_id=2),
            metrics=metrics,
            traces=traces,
            run_blocking=asyncio.to_thread,
        )
        super().__init__(cast(Runtime, runtime))
        self.broker = FakeBroker()


def broker(node_id: int, *, is_fenced: bool = False) -> BrokerImage:
    return BrokerImage(node_id, 1, "127.0.0.1", 9091 + node_id, UUID(int=node_id), is_fenced=is_fenced)


def three_nodes_one_of_them_fenced() -> ClusterImage:
    orders = TopicImage(
        "orders",
        UUID(int=7),
        (
            PartitionImage(0, 1, 4, (1, 2, 3), (1, 2)),
            PartitionImage(1, 2, 5, (2, 1), (2, 1)),
            PartitionImage(2, -1, 6, (3,), (3,)),
        ),
        {"retention.ms": "1000"},
    )
    return ClusterImage(
        cluster_id="c",
        version=9,
        topics={"orders": orders},
        brokers={3: broker(3, is_fenced=True), 1: broker(1), 2: broker(2)},
    )


async def get_json(port: int, path: str) -> tuple[int, Any]:
    status, body = await get(port, path)
    return status, json.loads(body)


async def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return int(head.split()[1]), body


def served(work: Callable[[Node, int], Awaitable[None]]) -> Callable[[], None]:
    """Return a test that runs `work` with a node and the port of its HTTP server."""

    async def run() -> None:
        node = Node()
        listener = bind("127.0.0.1", 0)
        server = WebServer(create_app(node), listener)
        await server.start()
        try:
            async with asyncio.timeout(20):
                await work(node, listener.getsockname()[1])
        finally:
            await server.stop()

    return lambda: asyncio.run(run())


@served
async def test_a_node_is_alive_before_it_is_ready(node: Node, port: int) -> None:
    assert (await get(port, "/healthz"))[0] == 200
    assert await get(port, "/readyz") == (503, "not serving: the node is disconnected from the controller\n")
    node.broker.disk_error = "the disk does not answer"
    assert (await get(port, "/readyz"))[1].endswith("disconnected from the controller; the disk does not answer\n")
    node.broker.is_ready = True
    assert await get(port, "/readyz") == (200, "ready\n")


@served
async def test_metrics_are_the_current_metrics_of_this_node(node: Node, port: int) -> None:
    node.metrics.watermark_updates = 41
    assert "chronik_watermark_updates_total 41.0" in (await get(port, "/metrics"))[1]
    node.metrics.watermark_updates += 1
    assert "chronik_watermark_updates_total 42.0" in (await get(port, "/metrics"))[1]


@served
async def test_an_unknown_path_returns_404_and_post_returns_405(node: Node, port: int) -> None:
    assert (await get(port, "/nothing"))[0] == 404
    assert (await get(port, "/healthz", method="POST"))[0] == 405


@served
async def test_the_cluster_endpoint_returns_the_metadata_of_this_node(node: Node, port: int) -> None:
    assert (await get_json(port, "/api/cluster"))[0] == 503
    node.broker.image = three_nodes_one_of_them_fenced()
    node.broker.controller_id = 1
    status, view = await get_json(port, "/api/cluster")
    assert status == 200
    assert (view["node_id"], view["controller"], view["version"], view["cluster_id"]) == (2, 1, 9, "c")
    assert (view["state"], view["disk_error"], view["build"]) == ("disconnected", None, "pure")
    assert [(known["id"], known["state"], known["kafka"]) for known in view["nodes"]] == [
        (1, "alive", "127.0.0.1:9092"),
        (2, "alive", "127.0.0.1:9093"),
        (3, "fenced", "127.0.0.1:9094"),
    ]
    assert [(known["leaders"], known["replicas"], known["in_sync"]) for known in view["nodes"]] == [
        (1, 2, 2),
        (1, 2, 2),
        (0, 2, 1),
    ]
    assert (view["partitions"], view["under_replicated"], view["leaderless"]) == (3, 1, 1)
    assert (view["under_replicated_partitions"], view["leaderless_partitions"]) == (["orders-0"], ["orders-2"])


@served
async def test_an_unknown_controller_is_null(node: Node, port: int) -> None:
    node.broker.image = three_nodes_one_of_them_fenced()
    assert (await get_json(port, "/api/cluster"))[1]["controller"] is None


@served
async def test_topics_are_listed_and_described_with_the_offsets_of_this_node(node: Node, port: int) -> None:
    node.broker.image = three_nodes_one_of_them_fenced()
    node.broker.replicas[("orders", 1)] = Replica(3, 10, 8, 6)
    (listed,) = (await get_json(port, "/api/topics"))[1]["topics"]
    assert (listed["name"], listed["partitions"], listed["replication_factor"]) == ("orders", 3, 3)
    assert (await get_json(port, "/api/topics/orders"))[0] == 503
    node.broker.is_ready = True
    status, topic = await get_json(port, "/api/topics/orders")
    assert (status, topic["name"], topic["id"], topic["node"]) == (200, "orders", str(UUID(int=7)), 2)
    assert topic["configs"] == {"retention.ms": "1000"}
    assert [partition["high_watermark"] for partition in topic["partitions"]] == [None, 8, None]
    assert topic["partitions"][1] == {
        "partition": 1,
        "leader": 2,
        "epoch": 5,
        "replicas": [2, 1],
        "isr": [2, 1],
        "log_start_offset": 3,
        "log_end_offset": 10,
        "high_watermark": 8,
        "last_stable_offset": 6,
    }


@served
async def test_damages_of_this_node_are_listed_with_their_outcome_newest_first(node: Node, port: int) -> None:
    node.broker.image, node.broker.is_ready = three_nodes_one_of_them_fenced(), True
    node.broker.damages = [
        Damage("orders", 1, 50, "scrub", "segment 50: its file is missing", 1000, "healed", "", ("/d/x",), 2000),
        Damage("payments", 0, 7, "read", "a batch is not what was written", 3000, waits_for="nobody has it"),
    ]
    _, cluster = await get_json(port, "/api/cluster")
    assert [(each["topic"], each["state"], each["waits_for"]) for each in cluster["damages"]] == [
        ("payments", "waiting", "nobody has it"),
        ("orders", "healed", ""),
    ]
    _, topic = await get_json(port, "/api/topics/orders")
    (damage,) = topic["damages"]
    assert damage == {
        "topic": "orders",
        "partition": 1,
        "offset": 50,
        "how": "scrub",
        "reason": "segment 50: its file is missing",
        "found_ms": 1000,
        "state": "healed",
        "waits_for": "",
        "set_aside": ["/d/x"],
        "healed_ms": 2000,
    }


@served
async def test_an_unknown_topic_returns_404_and_an_error_message(node: Node, port: int) -> None:
    node.broker.image = three_nodes_one_of_them_fenced()
    status, answer = await get_json(port, "/api/topics/payments")
    assert status == 404
    assert "payments" in answer["error"]


@served
async def test_an_invalid_request_returns_an_error_with_advice(node: Node, port: int) -> None:
    node.broker.image, node.broker.is_ready = three_nodes_one_of_them_fenced(), True
    for path, status, advice in (
        ("topics/nothing/batches?partition=0", 404, "/api/topics"),
        ("topics/orders/batches", 400, "partition=N"),
        ("topics/orders/batches?partition=7", 404, "partition=0 to 2"),
        ("topics/orders/batches?partition=one", 400, "not a whole number"),
        ("topics/orders/batches?partition=0&from=-1", 400, "0 or more"),
        ("topics/orders/batches?partition=0&limit=0", 400, "1 to 5000"),
        ("topics/orders/batches?partition=0&limit=99999999999999999999", 400, "1 to 5000"),
        ("topics/orders/batches?partition=0&own=-1", 400, "pass 0 or 1"),
        ("topics/orders/batches?partition=0&form=3", 400, "parameter form: use partition, from, to, limit, own"),
        ("topics/nothing/messages?partition=0", 404, "/api/topics"),
        ("topics/orders/messages", 400, "partition=N"),
        ("topics/orders/messages?partition=0&own=2", 400, "pass 0 or 1"),
        ("topics/orders/messages?partition=3", 404, "partition=0 to 2"),
        ("topics/orders/messages?partition=0&offset=1&time=1", 400, "one of them"),
        ("topics/orders/messages?partition=0&offset=first", 400, "not a whole number"),
        ("topics/orders/messages?partition=0&limit=501", 400, "1 to 500"),
        ("topics/orders/messages?partition=0&off=1", 400, "unknown parameter off"),
        ("traces?after=-1", 400, "0 or more"),
        ("traces?after=1&last=1", 400, "one of them"),
        ("traces?limit=5001", 400, "1 to 5000"),
        ("traces?since=1", 400, "unknown parameter since"),
        ("doctor/nothing", 404, "/api/topics"),
        ("doctor/orders?seconds=0", 400, "1 to 60"),
        ("doctor/orders?second=1", 400, "unknown parameter second"),
        (f"events?topic={'x' * 1001}", 400, "at most 1000"),
    ):
        answered, body = await get_json(port, f"/api/{path}")
        assert (path, answered) == (path, status)
        assert advice in body["error"]


@served
async def test_all_concurrent_requests_are_answered(node: Node, port: int) -> None:
    answers = await asyncio.gather(*(get(port, "/healthz") for _ in range(50)))
    assert {status for status, _ in answers} == {200}


def test_bind_fails_if_the_port_is_in_use() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match="in use"):
            bind("127.0.0.1", other.getsockname()[1])


def test_a_server_that_never_started_frees_its_port() -> None:
    async def run() -> int:
        listener = bind("127.0.0.1", 0)
        port: int = listener.getsockname()[1]
        await WebServer(create_app(Node()), listener).stop()
        return port

    bind("127.0.0.1", asyncio.run(run())).close()


@served
async def test_invalid_names_and_numbers_return_a_one_line_error(node: Node, port: int) -> None:
    odd = ("%00", "%FF%FE", "a%0d%0ab", "..%2f..%2fetc", "%F0%9F%90%9F", "x" * 5000, "-", "+1", "1e3", "0x1", "%20")
    node.broker.image = three_nodes_one_of_them_fenced()
    node.broker.is_ready = True
    for name in odd:
        for path in (
            f"/api/topics/{name}",
            f"/api/topics/{name}/messages?partition=0",
            f"/api/doctor/{name}",
            f"/api/topics/orders/messages?partition={name}",
            f"/api/topics/orders/batches?partition=0&from={name}",
            f"/api/traces?after={name}",
            f"/api/events?topics={name}",
            f"/api/cluster?{name}=1",
            f"/page/{name}",
        ):
            status, answer = await get_json(port, path)
            assert status in (400, 404), (path, answer)
            assert "\n" not in answer["error"]
            assert len(answer["error"]) < 600
