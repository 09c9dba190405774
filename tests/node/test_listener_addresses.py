"""Clients receive the addresses of the listener that they came in by; nodes speak TLS to each other."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.node.cluster_harness import LocalNodes
from tests.support.certificates import Certificates
from tests.support.eventually import until

from chronik.client.connection import Connection
from chronik.client.errors import ClientError
from chronik.metadata.commands import RegisterBroker, decode_command, encode_command
from chronik.metadata.image import BrokerImage
from chronik.node.broker import Broker
from chronik.node.config import ListenerConfig, NodeConfig, Security
from chronik.wire.api import ApiKey
from chronik.wire.batch import encode_batch
from chronik.wire.errors import ErrorCode
from chronik.wire.produce import ProduceRequest, ProduceTopic, read_produce_response, write_produce_request

INSIDE = "INSIDE"
UUID_1 = UUID(int=1)


class Cluster:
    """Three nodes with internal TLS. Nodes 1 and 2 also have the listener INSIDE, advertised as localhost."""

    def __init__(self, folder: Path) -> None:
        self.certificates = Certificates(folder / "certificates")
        self.nodes = LocalNodes(folder, security=Security(internal_tls=True), tls=self.certificates.tls())
        self.brokers: list[Broker] = []

    def config(self, node_id: int) -> NodeConfig:
        if node_id == 3:
            return self.nodes.config(node_id)
        inside = ListenerConfig(INSIDE, "127.0.0.1:0", "PLAINTEXT", "localhost:0")
        return self.nodes.config(node_id, listeners=(inside,))

    async def start(self) -> None:
        starts = (self.nodes.start(node_id, self.config(node_id)) for node_id in (1, 2, 3))
        self.brokers = list(await asyncio.gather(*starts))

    def addresses(self, listener: str) -> dict[int, tuple[str, int]]:
        host = "localhost" if listener == INSIDE else "127.0.0.1"
        return {
            broker.node_id: (host, broker.server.ports[listener])
            for broker in self.brokers
            if listener in broker.server.ports
        }

    async def client(self, listener: str, broker: Broker | None = None) -> Connection:
        port = (broker or self.brokers[0]).server.ports[listener]
        return await Connection.open("127.0.0.1", port, client_id=listener)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path)
    async with made.nodes:
        await made.start()
        yield made


def brokers_of(answer: Any) -> dict[int, tuple[str, int]]:
    ids = [each.node_id if hasattr(each, "node_id") else each.broker_id for each in answer.brokers]
    return {int(node_id): (each.host, each.port) for node_id, each in zip(ids, answer.brokers, strict=True)}


@pytest.mark.timeout(60)
async def test_clients_of_each_listener_get_its_addresses(cluster: Cluster) -> None:
    for listener in ("KAFKA", INSIDE):
        connection = await cluster.client(listener)
        expected = cluster.addresses(listener)
        assert len(expected) == (2 if listener == INSIDE else 3)
        async with asyncio.timeout(30):
            # On a busy machine, a broker may be fenced for a moment.
            while brokers_of(await connection.call(ApiKey.METADATA, {"topics": None})) != expected:
                await asyncio.sleep(0.05)
        described = await connection.call(ApiKey.DESCRIBE_CLUSTER, {"include_cluster_authorized_operations": False})
        assert brokers_of(described) == expected
        connection.close()


@pytest.mark.timeout(60)
async def test_leader_without_the_listener_is_not_named_to_its_clients(cluster: Cluster) -> None:
    outside = await cluster.client("KAFKA")
    topic = {"name": "t", "num_partitions": 6, "replication_factor": 3, "assignments": [], "configs": []}
    await outside.call(ApiKey.CREATE_TOPICS, {"topics": [topic], "timeout": 10_000, "validate_only": False})

    def leaders(answer: Any) -> dict[int, tuple[int, ErrorCode]]:
        return {each.partition_index: (each.leader_id, each.error_code) for each in answer.topics[0].partitions}

    request = {"topics": [{"name": "t", "topic_id": None}], "allow_auto_topic_creation": False}
    known = leaders(await outside.call(ApiKey.METADATA, request))
    assert {leader for leader, _ in known.values()} == {1, 2, 3}
    inside = await cluster.client(INSIDE)
    for version, error in ((5, ErrorCode.leader_not_available), (12, ErrorCode.listener_not_found)):
        answer = await inside.call(ApiKey.METADATA, request, at_most=version)
        for partition, (leader, code) in leaders(answer).items():
            if known[partition][0] == 3:
                assert (leader, code) == (-1, error)
            else:
                assert (leader, code) == known[partition]
        assert all(list(each.offline_replicas) == [3] for each in answer.topics[0].partitions)
    for connection in (outside, inside):
        connection.close()


@pytest.mark.timeout(60)
async def test_coordinator_has_the_address_of_the_listener_or_is_unavailable(cluster: Cluster) -> None:
    outside, inside = await cluster.client("KAFKA"), await cluster.client(INSIDE)
    keys = [f"group-{number}" for number in range(24)]
    request = {"key_type": 0, "coordinator_keys": keys}

    async def found(connection: Connection) -> dict[str, Any]:
        answer = await connection.call(ApiKey.FIND_COORDINATOR, request)
        return {each.key: each for each in answer.coordinators}

    async def all_found() -> dict[str, Any]:
        while True:
            coordinators = await found(outside)
            if all(each.error_code is ErrorCode.none for each in coordinators.values()):
                return coordinators
            await asyncio.sleep(0.05)

    known = await asyncio.wait_for(all_found(), 20)
    assert {each.node_id for each in known.values()} == {1, 2, 3}
    for key, each in known.items():
        assert (each.host, each.port) == cluster.addresses("KAFKA")[each.node_id], key
    for key, each in (await found(inside)).items():
        if known[key].node_id == 3:
            assert (each.error_code, each.node_id) == (ErrorCode.coordinator_not_available, -1)
        else:
            assert (each.host, each.port) == cluster.addresses(INSIDE)[known[key].node_id]
    for connection in (outside, inside):
        connection.close()


@pytest.mark.timeout(60)
async def test_node_without_a_certificate_is_refused_on_the_internal_port(cluster: Cluster, tmp_path: Path) -> None:
    port = cluster.nodes.internal_port(1)
    stranger = Certificates(tmp_path / "stranger")
    strangers: list[ssl.SSLContext | None] = [None, cluster.certificates.client()]
    since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=3)
    cluster.certificates.issue("expired", "127.0.0.1", since=since, days=1)
    strangers.append(cluster.certificates.client("expired"))
    for name in ("node", "ca"):
        foreign = cluster.certificates.client()
        foreign.load_cert_chain(stranger.folder / f"{name}.pem", stranger.folder / f"{name}.key")
        strangers.append(foreign)
    for context in strangers:
        with pytest.raises(ClientError):
            await Connection.open("127.0.0.1", port, ssl=context, timeout_s=5.0)

    def reasons() -> set[str]:
        return {line["reason"] for line in cluster.nodes.events(1, "connection_refused")}

    await until(lambda: len(reasons()) >= len(strangers), "each refusal is logged")
    texts = " ".join(reasons())
    assert "speaks plaintext to a TLS listener" in texts
    assert "has no certificate" in texts
    for reason in ("unable to get local issuer", "self-signed", "certificate has expired"):
        assert f"certificate was refused: {reason}" in texts


@pytest.mark.timeout(60)
async def test_certificate_alone_does_not_make_a_node(cluster: Cluster) -> None:
    """A certificate of the authority opens the port; requests still need the cluster secret."""
    cluster.certificates.issue("stray", "127.0.0.1")
    context = cluster.certificates.client("stray")
    with pytest.raises(ClientError):
        await Connection.open("127.0.0.1", cluster.nodes.internal_port(1), ssl=context, timeout_s=5.0)
    await until(
        lambda: any("has not proven" in line["reason"] for line in cluster.nodes.events(1, "connection_refused"))
    )


@pytest.mark.timeout(60)
async def test_peer_whose_certificate_is_for_another_host_is_not_connected(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certificates")
    certificates.issue("elsewhere", "elsewhere.example")
    folder = certificates.folder
    wrong = certificates.tls(certificate=str(folder / "elsewhere.pem"), key=str(folder / "elsewhere.key"))
    async with LocalNodes(tmp_path, security=Security(internal_tls=True), tls=certificates.tls()) as nodes:
        brokers = [await nodes.broker(nodes.config(1)), await nodes.broker(nodes.config(3, tls=wrong))]
        starting = [asyncio.create_task(broker.start()) for broker in brokers]

        def refusals() -> list[str]:
            lines = nodes.events(1, "peer_not_connected")
            return [line["reason"] for line in lines if line["peer"] == 3 and "IP address mismatch" in line["reason"]]

        try:
            await until(refusals, "node 1 refuses the certificate of node 3")
        finally:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            for broker in brokers:
                await broker.stop()
            for _ in range(3):
                await asyncio.sleep(0)  # an aborted socket closes in the loop's next turns


def test_registration_of_an_older_node_has_one_listener() -> None:
    command = RegisterBroker(1, BrokerImage(1, 1, "h", 9, UUID_1).incarnation, "h", 9)
    assert decode_command(encode_command(command)) == command
    broker = BrokerImage(1, 1, "h", 9, UUID_1)
    assert broker.address("KAFKA") == ("h", 9)
    assert broker.address(INSIDE) is None
    named = BrokerImage(1, 1, "h", 9, UUID_1, listeners={"KAFKA": ("h", 9), INSIDE: ("i", 8)})
    assert (named.address("KAFKA"), named.address(INSIDE)) == (("h", 9), ("i", 8))


@pytest.mark.timeout(60)
async def test_large_batches_replicate_over_tls(cluster: Cluster) -> None:
    connection = await cluster.client("KAFKA")
    topic = {"name": "t", "num_partitions": 3, "replication_factor": 3, "assignments": [], "configs": []}
    await connection.call(ApiKey.CREATE_TOPICS, {"topics": [topic], "timeout": 10_000, "validate_only": False})
    batch = memoryview(encode_batch([(None, bytes(900_000), [], 1)]))
    request = ProduceRequest(None, -1, 10_000, [ProduceTopic("t", None, [(index, batch) for index in range(3)])])
    for _ in range(5):
        # Node 1 leads one of the partitions, and forwards the other two.
        body = await connection.request(ApiKey.PRODUCE, 11, write_produce_request(11, request))
        ((_, _, partitions),) = read_produce_response(11, body).topics
        assert [response.error_code for response in partitions] == [ErrorCode.none] * 3
    for broker in cluster.brokers:
        for index in range(3):
            partition = broker.partition("t", index)
            assert partition is not None
            assert partition.log_end_offset == 5
    connection.close()
