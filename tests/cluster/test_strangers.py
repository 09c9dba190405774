"""Processes that know a node's internal address but not the secret of its cluster: they get nothing, and log why."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from uuid import UUID

import pytest
from tests.cluster.support_cluster import Nodes, free_port
from tests.cluster.support_strangers import Stray, said_by, stray
from tests.cluster.test_minority import append, once_each, read
from tests.node.support_wire import WireClient, batch, unique
from tests.support.eventually import eventually
from tests.support.handshake import NONCE, NotProven, Stranger, proven_connection
from tests.support.node import Node

from chronik.metadata.calls import HeartbeatCall
from chronik.node.config import INTERNAL_PORT_BELOW_KAFKA
from chronik.node.membership.cluster_secret import SECRET_NAME, ClusterSecret
from chronik.node.membership.internal_api import VERSION, CallReply, Hello, InternalKey, decode_call_reply, encode
from chronik.node.membership.internal_server import KAFKA_APIS, UNPROVEN_APIS
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

StartStray: TypeAlias = Callable[..., Stray]

CANNOT = 2
OUTCOME_TIMEOUT_S = 60.0
NINE = Hello("", 9, UUID(int=9), 1, "127.0.0.1:9", nonce=NONCE)


@pytest.fixture
def start_stray(tmp_path: Path) -> Iterator[StartStray]:
    """Start one more node with the test's settings and environment variables."""
    started: list[Stray] = []

    def start(settings: Mapping[str, Any], variables: Mapping[str, str] | None = None) -> Stray:
        started.append(stray(tmp_path / f"stray-{len(started) + 1}", settings, variables or {}))
        return started[-1]

    yield start
    for each in started:
        each.kill()


def secret_of(folder: Path) -> ClusterSecret:
    return ClusterSecret((folder / SECRET_NAME).read_text(), "the test")


def produce(node: Node, topic: str, value: bytes) -> None:
    with WireClient(node.kafka_port) as client:
        client.create_topic(topic)
        assert client.produce(topic, batch(value)).error_code == 0


def values(node: Node, topic: str) -> list[bytes | None]:
    with WireClient(node.kafka_port) as client:
        return [record.value for record in client.records(topic)]


@pytest.mark.timeout(180)
def test_two_foreign_nodes_cannot_outvote_a_standalone_node(node: Node, start_stray: StartStray) -> None:
    topic = unique("topic")
    produce(node, topic, b"before")
    peers = [{"id": 1, "internal": f"127.0.0.1:{node.internal_port}"}]
    # Each has its own secret, but not the node's.
    strays = [
        start_stray({"node_id": node_id, "peers": peers}, {"CHRONIK_CLUSTER_SECRET": secrets.token_urlsafe(32)})
        for node_id in (2, 3)
    ]
    eventually(
        lambda: all(each.has_ended or each.is_ready for each in strays),
        OUTCOME_TIMEOUT_S,
        "the strangers are in, or gone",
    )
    for each in strays:
        each.kill()
    # The strangers are gone. The node serves, also after a restart, as a cluster of one.
    assert node._is_ready()
    node.restart()
    assert values(node, topic) == [b"before"]
    assert [each.code for each in strays] == [CANNOT, CANNOT]
    for each in strays:
        line = said_by(each.output)
        assert f"node 1 at 127.0.0.1:{node.internal_port} and this node have different cluster secrets" in line
        assert f"copy {SECRET_NAME}" in line
    assert "claims to be node 2 does not know the secret" in node.log_text()
    assert "claims to be node 3 does not know the secret" in node.log_text()


@pytest.mark.timeout(60)
def test_a_node_with_peers_but_no_secret_exits_and_explains_how_to_get_one(node: Node, start_stray: StartStray) -> None:
    peers = [{"id": 1, "internal": f"127.0.0.1:{node.internal_port}"}]
    started = start_stray({"node_id": 2, "peers": peers})
    eventually(lambda: started.has_ended, OUTCOME_TIMEOUT_S, "it gives up")
    assert started.code == CANNOT
    line = said_by(started.output)
    for word in (
        "node 2 has no cluster secret",
        f"data/{SECRET_NAME} does not exist",
        "copy",
        "CHRONIK_CLUSTER_SECRET",
    ):
        assert word in line
    assert node._is_ready()


def test_an_unauthenticated_connection_to_the_internal_port_gets_no_response(node: Node) -> None:
    keys = [*KAFKA_APIS, *(key for key in InternalKey if key not in UNPROVEN_APIS)]

    async def ask() -> None:
        for key in keys:
            for said in ([], [(InternalKey.HELLO, encode(NINE))]):
                stranger = await Stranger.connect(node.internal_port)
                for greeting, body in said:
                    await stranger.ask(greeting, body)
                stranger.send(key, b"\x00" * 64, version=18 if key is ApiKey.FETCH else VERSION)
                assert await stranger.rest() == b"", (key, said)
        with pytest.raises(NotProven):
            await proven_connection(node.internal_port, NINE, ClusterSecret(secrets.token_urlsafe(32), "the test"))

    asyncio.run(ask())
    assert node._is_ready()


def test_a_standalone_node_never_exposes_its_secret(node: Node, start_stray: StartStray) -> None:
    path = node.data_dir / SECRET_NAME
    secret = path.read_text().strip()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(secret) >= 43
    shown = [node.log_text(), Path(f"/proc/{node.pid}/cmdline").read_text()]
    shown += [node.get(page) for page in ("/", "/metrics", "/api/cluster", "/api/topics", "/api/traces")]
    with WireClient(node.kafka_port) as client:
        wanted = {"resources": [{"resource_type": 4, "resource_name": "1"}]}
        shown.append(repr(client.call(ApiKey.DESCRIBE_CONFIGS, 4, wanted)))
    for text in shown:
        assert secret not in text
    path.chmod(0o640)
    node.terminate()
    ended = start_stray({"node_id": 1, "data_dir": str(node.data_dir)})
    eventually(lambda: ended.has_ended, OUTCOME_TIMEOUT_S, "it does not start")
    assert f"other users may read the cluster secret {path}: chmod 600 {path}" in said_by(ended.output)
    assert secret not in ended.output
    path.chmod(0o600)
    node.start()


@pytest.mark.timeout(60)
def test_a_standalone_node_open_to_clients_keeps_its_internal_port_on_loopback(start_stray: StartStray) -> None:
    kafka = free_port(1)
    listen = {"kafka": f"0.0.0.0:{kafka}"}
    accepted = {"advertise": {"kafka": f"127.0.0.1:{kafka}"}, "security": {"insecure": True}}
    started = start_stray({"listen": listen, **accepted})
    eventually(lambda: started.is_ready or started.has_ended, OUTCOME_TIMEOUT_S, "it is ready")
    # Every address in 127.0.0.0/8 is this machine, but only a listener on all addresses answers here.
    socket.create_connection(("127.0.0.2", kafka), timeout=5).close()
    socket.create_connection(("127.0.0.1", kafka - INTERNAL_PORT_BELOW_KAFKA), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", kafka - INTERNAL_PORT_BELOW_KAFKA), timeout=5)


@pytest.mark.timeout(180)
def test_nodes_with_different_secrets_refuse_each_other(nodes: Nodes) -> None:
    nodes.stop(3)
    path = nodes.data_folder(3) / SECRET_NAME
    right = path.read_text()
    path.write_text(secrets.token_urlsafe(32) + "\n")
    nodes.launch(3)
    eventually(lambda: nodes.node(3).process.state is None, OUTCOME_TIMEOUT_S, "node 3 gives up")
    reason = nodes.node(3).process.reason()
    assert "and this node have different cluster secrets: copy cluster-secret" in reason
    for node_id in (1, 2):
        lines = [line for line in nodes.log_text(node_id).splitlines() if "claims to be node 3" in line]
        assert len(lines) == 1, "once, not at each attempt"
        assert nodes.node(node_id).is_ready
    path.write_text(right)
    nodes.start(3)
    nodes.wait_in_sync()
    nodes.no_surprises()


@pytest.mark.timeout(180)
def test_the_controller_refuses_a_call_in_the_name_of_another_node(nodes: Nodes) -> None:
    """A node that knows the secret, and has proven that it is node 9."""
    controller = nodes.node(nodes.controller())
    other = next(node_id for node_id in nodes.ids if node_id != controller.id)
    secret = secret_of(Path(controller.folder))

    async def call(claimed: int) -> CallReply:
        hello = Hello("", 9, UUID(int=9), controller.id, "127.0.0.1:9")
        connection = await proven_connection(controller.internal.port, hello, secret)
        heartbeat = encode(HeartbeatCall(claimed, UUID(int=9), 1, 1, wants_shutdown=True))
        reply = decode_call_reply(await connection.send(InternalKey.CONTROLLER_CALL, VERSION, heartbeat))
        connection.close()
        return reply

    refused = asyncio.run(call(other))
    assert (refused.code, refused.message) == (
        ErrorCode.cluster_authorization_failed,
        f"node 9 may not make calls for node {other}",
    )
    assert '"call_refused"' in nodes.log_text(controller.id)
    # Its own call is processed: no such broker is registered.
    assert asyncio.run(call(9)).code not in (0, ErrorCode.cluster_authorization_failed)
    nodes.wait_in_sync()


def test_nodes_of_a_local_cluster_share_a_secret_and_never_expose_it(shared_nodes: Nodes) -> None:
    found = {(Path(node.folder) / SECRET_NAME).read_text() for node in shared_nodes}
    (secret,) = found
    for node in shared_nodes:
        assert stat.S_IMODE(os.stat(f"{node.folder}/{SECRET_NAME}").st_mode) == 0o600
        shown: list[Any] = [shared_nodes.log_text(node.id), Path(node.config_path).read_text()]
        shown += [Path(f"/proc/{node.process.pid}/cmdline").read_text(), str(shared_nodes._environment)]
        shown.append(node.get("/api/cluster")[1].decode())
        for text in shown:
            assert secret.strip() not in text


@pytest.mark.timeout(300)
def test_the_documented_secret_rotation_works_without_downtime(nodes: Nodes) -> None:
    topic = nodes.new_topic(1)
    sent = [append(nodes, topic, "before")]
    old, new = secret_text(nodes, 1), secrets.token_urlsafe(32)
    for step, lines in enumerate(([old, new], [new, old], [new])):
        for node_id in nodes.ids:
            nodes.stop(node_id)
            sent.append(append(nodes, topic, f"step {step}, without node {node_id}"))
            Path(nodes.node(node_id).folder, SECRET_NAME).write_text("\n".join(lines) + "\n")
            nodes.start(node_id)
            nodes.wait_in_sync()
    once_each(read(nodes, topic), *sent)
    assert {secret_text(nodes, node_id) for node_id in nodes.ids} == {new}
    nodes.no_surprises()


def secret_text(nodes: Nodes, node_id: int) -> str:
    return Path(nodes.node(node_id).folder, SECRET_NAME).read_text().strip()
