"""Only nodes that know the cluster secret are admitted, and no node can act for another."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from tests.node.cluster_harness import SECRET, LocalNodes
from tests.support.eventually import until
from tests.support.handshake import NONCE, NotProven, Stranger, proven_connection

from chronik.client.connection import Connection
from chronik.client.errors import ConnectionLost
from chronik.metadata.calls import AlterIsrCall, HeartbeatCall, IsrMember, RegisterBrokerCall
from chronik.node.broker import Broker
from chronik.node.config import ConfigError
from chronik.node.membership import cluster_member, internal_server, peer_handshake
from chronik.node.membership.cluster_secret import SECRET_NAME, ClusterSecret
from chronik.node.membership.internal_api import (
    VERSION,
    AllocateProducerIdsCall,
    Hello,
    HelloReply,
    InternalKey,
    ProofReply,
    decode_call_reply,
    decode_hello_reply,
    encode,
)
from chronik.node.membership.internal_server import KAFKA_APIS, UNPROVEN_APIS, UNPROVEN_FRAME_BYTES_MAX
from chronik.node.membership.peer_handshake import Caller
from chronik.raft import messages as raft
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode
from chronik.wire.fetch import FetchRequest, read_fetch_response, write_fetch_request
from chronik.wire.frames import response_prefix

Story = Callable[[LocalNodes], Coroutine[Any, Any, None]]
OTHER_TEXT = "what-some-other-cluster-knows-of-itself"
OTHER = ClusterSecret(OTHER_TEXT, "the test")
FIVE = Hello("", 5, UUID(int=5), 1, "127.0.0.1:5", nonce=NONCE)


def local_nodes(folder: Path, count: int = 1, **settings: Any) -> LocalNodes:
    return LocalNodes(folder, count, default_replication_factor=1, **settings)


def port(broker: Broker) -> int:
    return broker.internal_server.port


async def peer(broker: Broker, hello: Hello = FIVE) -> Connection:
    return await proven_connection(port(broker), hello, SECRET)


# -- before the proof --------------------------------------------------------------------------------------------------


async def test_an_unauthenticated_peer_gets_no_response_to_any_request(tmp_path: Path) -> None:
    keys = [*KAFKA_APIS, *(key for key in InternalKey if key not in UNPROVEN_APIS)]

    async with local_nodes(tmp_path) as nodes:
        (one,) = await nodes.start_all()
        for key in keys:
            stranger = await Stranger.connect(port(one))
            stranger.send(key, b"\x00" * 64)
            assert await stranger.rest() == b"", key
            # The same applies after a HELLO without a proof.
            stranger = await Stranger.connect(port(one))
            assert decode_hello_reply(await stranger.ask(InternalKey.HELLO, encode(FIVE))).nonce
            stranger.send(key, b"\x00" * 64)
            assert await stranger.rest() == b"", key
        assert one.is_ready


async def test_an_empty_proof_or_one_of_another_secret_closes_the_connection(tmp_path: Path) -> None:
    async with local_nodes(tmp_path) as nodes:
        (one,) = await nodes.start_all()
        for key in UNPROVEN_APIS:
            for body in (b"", b"\xc1", b"\x80", b"\xff" * 100, encode(Hello("", 5, UUID(int=5), 1, "127.0.0.1:5"))):
                stranger = await Stranger.connect(port(one))
                stranger.send(key, body)
                assert await stranger.rest() == b"", (key, body)
        with pytest.raises(NotProven):
            await proven_connection(port(one), FIVE, OTHER)
        assert not one.member.handshake.is_present(5)
        assert one.member.peers.known() == []


async def test_a_proof_is_not_accepted_twice(tmp_path: Path) -> None:
    async with local_nodes(tmp_path) as nodes:
        (one,) = await nodes.start_all()
        caller = Caller(SECRET, FIVE)
        first = await Stranger.connect(port(one))
        _, proof = caller.prove(await first.ask(InternalKey.HELLO, caller.hello))
        assert caller.confirms(await first.ask(InternalKey.PROOF, proof)) == (True, "")
        # Replay the proof on the same connection, and on another one with the same HELLO.
        first.send(InternalKey.PROOF, proof)
        assert await first.rest() == b""
        second = await Stranger.connect(port(one))
        await second.ask(InternalKey.HELLO, caller.hello)
        assert caller.confirms(await second.ask(InternalKey.PROOF, proof)) == (False, "")
        assert await second.rest() == b""
        # A second HELLO on one connection, for another attempt, is refused too.
        third = await Stranger.connect(port(one))
        await third.ask(InternalKey.HELLO, caller.hello)
        third.send(InternalKey.HELLO, caller.hello)
        assert await third.rest() == b""


async def test_connections_without_a_proof_are_closed_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internal_server, "UNPROVEN_S_MAX", 0.2)

    async with local_nodes(tmp_path) as nodes:
        (one,) = await nodes.start_all()
        known = await peer(one)
        silent = [await Stranger.connect(port(one)) for _ in range(3)]
        await silent[0].ask(InternalKey.HELLO, encode(FIVE))
        for stranger in silent:
            assert await stranger.rest() == b""
        assert one.internal_server._unproven == {}
        assert not known.is_closed


async def test_many_unauthenticated_connections_do_not_keep_nodes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internal_server, "UNPROVEN_MAX", 4)

    async with local_nodes(tmp_path) as nodes:
        (one,) = await nodes.start_all()
        known = await peer(one)
        silent = [await Stranger.connect(port(one)) for _ in range(12)]
        for stranger in silent[:8]:
            assert await stranger.rest() == b""
        assert len(one.internal_server._unproven) == 4
        await peer(one, Hello("", 6, UUID(int=6), 1, "127.0.0.1:6"))
        assert not known.is_closed
        for stranger in silent[8:]:
            stranger.close()


async def test_the_frame_size_limit_is_smaller_before_the_proof(tmp_path: Path) -> None:
    async with local_nodes(tmp_path) as nodes:
        (one,) = await nodes.start_all()
        stranger = await Stranger.connect(port(one))
        stranger.send(InternalKey.HELLO, encode(FIVE) + b"\x00" * UNPROVEN_FRAME_BYTES_MAX)
        assert await stranger.rest() == b""
        known = await peer(one)
        call = {**msgspec.to_builtins(AllocateProducerIdsCall(5, 1)), "padding": "x" * 10 * UNPROVEN_FRAME_BYTES_MAX}
        reply = await known.send(InternalKey.CONTROLLER_CALL, VERSION, msgspec.msgpack.encode(call))
        assert decode_call_reply(reply).code == 0


async def test_each_unauthenticated_peer_is_logged_once_and_a_flood_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_handshake, "STRANGERS_LOGGED_MAX", 3)

    async def call(one: Broker, node_id: int) -> None:
        with pytest.raises(NotProven):
            await proven_connection(port(one), Hello("", node_id, UUID(int=5), 1, "127.0.0.1:5"), OTHER)

    async with local_nodes(tmp_path) as nodes:
        (one,) = await nodes.start_all()
        for node_id in (5, 5, 5, 6, 7, 8, 9, 10):
            await call(one, node_id)
        refused = nodes.events(1, "peer_refused")
        assert [line["peer"] for line in refused] == [5, 6, 7]
        for word in ("does not know the secret", SECRET_NAME, "CHRONIK_CLUSTER_SECRET", "node 5"):
            assert word in refused[0]["reason"]
        monkeypatch.setattr(peer_handshake, "STRANGERS_LOGGED_S", 0.0)
        await call(one, 5)
        assert [line["count"] for line in nodes.events(1, "peers_refused")] == [3]
        assert len(nodes.events(1, "peer_refused")) == 4


# -- nodes with another secret -----------------------------------------------------------------------------------------


async def test_both_sides_log_why_a_node_with_another_secret_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_member, "REFUSED_S", 0.5)

    async with local_nodes(tmp_path, count=2) as nodes:
        one = await nodes.start(1, nodes.config(1, peers=[]))
        nodes.secrets[2] = OTHER_TEXT
        with pytest.raises(ConfigError, match=r"node 1 at .* and this node have different cluster secrets: copy"):
            await nodes.start(2, nodes.config(2, peers=[1]))
        assert len(nodes.events(2, "peer_not_connected")) == 1
        assert "different cluster secrets" in nodes.events(2, "peer_not_connected")[0]["reason"]
        (line,) = nodes.events(1, "peer_refused")
        assert "does not know the secret of this cluster" in line["reason"]
        assert one.is_ready
        assert [member.node_id for member in one.member.raft.node.membership.members] == [1]


async def test_a_node_rejects_a_peer_that_cannot_prove_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other direction: an impostor at a peer's address accepts every proof."""
    monkeypatch.setattr(cluster_member, "REFUSED_S", 0.5)
    hello_reply = encode(HelloReply("", 1, UUID(int=1), nonce=NONCE))

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for body in (hello_reply, encode(ProofReply(b"\x00" * 32, "trust me"))):
            frame = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
            writer.write(response_prefix(int.from_bytes(frame[4:8], "big"), False, len(body)) + body)
        await reader.read()
        writer.close()

    async with local_nodes(tmp_path, count=2) as nodes:
        server = await asyncio.start_server(impostor, "127.0.0.1", nodes.internal_port(1))
        with pytest.raises(ConfigError, match=r"node 1 at .* and this node have different cluster secrets"):
            await nodes.start(2, nodes.config(2, peers=[1]))
        assert "trust me" not in json.dumps(nodes.lines)
        server.close()


# -- impersonating another node ----------------------------------------------------------------------------------------


async def test_the_controller_refuses_calls_in_the_name_of_another_node(tmp_path: Path) -> None:
    calls = (
        AllocateProducerIdsCall(1, 10),
        RegisterBrokerCall(1, UUID(int=7), "127.0.0.1", 9, "127.0.0.1:9"),
        HeartbeatCall(1, UUID(int=7), 1, 1),
        AlterIsrCall(1, UUID(int=8), 0, 0, 0, (IsrMember(5),)),
    )

    async with local_nodes(tmp_path) as nodes:
        (one,) = await nodes.start_all()
        before = one.image.brokers[1]
        connection = await peer(one)
        for call in calls:
            reply = decode_call_reply(await connection.send(InternalKey.CONTROLLER_CALL, VERSION, encode(call)))
            assert reply.code == ErrorCode.cluster_authorization_failed
            assert reply.message == "node 5 may not make calls for node 1"
        assert one.image.brokers[1] == before
        refused = nodes.events(1, "call_refused")
        assert [(line["peer"], line["claimed"]) for line in refused] == [(5, 1)] * len(calls)
        assert [line["call"] for line in refused] == [type(call).__name__ for call in calls]
        own = await connection.send(InternalKey.CONTROLLER_CALL, VERSION, encode(AllocateProducerIdsCall(5, 10)))
        assert decode_call_reply(own).code == 0


async def test_a_raft_message_in_the_name_of_another_node_is_refused(tmp_path: Path) -> None:
    async with local_nodes(tmp_path) as nodes:
        (one,) = await nodes.start_all()
        connection = await peer(one)
        term, store = one.member.raft.node.term, UUID(int=9)
        message = raft.Message(
            6, store, 1, one.member.session.registration.folder_id, term + 5, raft.VoteRequest(99, term + 4)
        )
        connection.send_unanswered(InternalKey.RAFT, VERSION, raft.encode_message(message))
        (line,) = await until(lambda: nodes.events(1, "raft_message_refused"))
        assert line["peer"] == 5
        assert "node 6" in line["reason"]
        assert one.member.raft.node.term == term
        assert one.is_controller


async def test_a_replicas_fetch_in_the_name_of_another_node_is_refused(tmp_path: Path) -> None:
    async with local_nodes(tmp_path) as nodes:
        (one,) = await nodes.start_all()
        connection = await peer(one)
        body = write_fetch_request(18, FetchRequest(replica_id=6, replica_epoch=1, max_wait_ms=0, min_bytes=0))
        answer = read_fetch_response(18, await connection.send(ApiKey.FETCH, 18, body))
        assert answer.error_code == ErrorCode.cluster_authorization_failed
        (line,) = nodes.events(1, "fetch_refused")
        assert (line["peer"], line["claimed"]) == (5, 6)


@pytest.mark.parametrize("other", [Hello("", 6, UUID(int=5), 1, "127.0.0.1:5"), Hello("", 5, UUID(int=6), 1, "h:5")])
async def test_a_connection_cannot_change_its_peer_identity(tmp_path: Path, other: Hello) -> None:
    async with local_nodes(tmp_path) as nodes:
        (one,) = await nodes.start_all()
        connection = await peer(one)
        reply = decode_hello_reply(await connection.send(InternalKey.HELLO, VERSION, encode(other)))
        assert "this connection is not that of" in reply.refusal
        async with asyncio.timeout(5):
            assert isinstance(await connection.wait_closed(), ConnectionLost)
        assert not one.member.handshake.is_present(6)


# -- sources of the secret ---------------------------------------------------------------------------------------------


async def test_a_single_node_creates_a_private_secret_and_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "node-1" / SECRET_NAME
    old_mask = os.umask(0)
    try:
        async with local_nodes(tmp_path) as nodes:
            nodes.secrets[1] = ""
            (one,) = await nodes.start_all()
            made = path.read_text()
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert len(made.strip()) >= 43
            await nodes.stop(one)
            await nodes.start(1)
            assert path.read_text() == made
            assert made.strip() not in json.dumps(nodes.lines)
    finally:
        os.umask(old_mask)


async def test_two_nodes_create_different_secrets(tmp_path: Path) -> None:
    async with local_nodes(tmp_path, count=2) as nodes:
        nodes.secrets = {1: "", 2: ""}
        for node_id in (1, 2):
            await nodes.start(node_id, nodes.config(node_id, peers=[]))
        assert (tmp_path / "node-1" / SECRET_NAME).read_text() != (tmp_path / "node-2" / SECRET_NAME).read_text()


async def test_a_data_folder_without_a_secret_gets_one_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "node-1" / SECRET_NAME

    async with local_nodes(tmp_path) as nodes:
        (one,) = await nodes.start_all()
        assert not path.exists()
        await nodes.stop(one)
        nodes.secrets[1] = ""
        await nodes.start(1)
        assert path.exists()


async def test_a_node_with_peers_and_without_a_secret_does_not_start(tmp_path: Path) -> None:
    async with local_nodes(tmp_path, count=2) as nodes:
        nodes.secrets[2] = ""
        with pytest.raises(ConfigError) as refused:
            await nodes.start(2, nodes.config(2, peers=[1]))
        line = str(refused.value)
        for word in ("node 2 has no cluster secret", f"node-2/{SECRET_NAME}", "copy", "CHRONIK_CLUSTER_SECRET"):
            assert word in line
        assert not (tmp_path / "node-2" / SECRET_NAME).exists()


async def test_a_copied_secret_admits_a_node(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"

    async with local_nodes(tmp_path, count=2) as nodes:
        nodes.secrets = {1: "", 2: ""}
        one = await nodes.start(1, nodes.config(1, peers=[]))
        elsewhere.touch(mode=0o600)
        elsewhere.write_bytes((tmp_path / "node-1" / SECRET_NAME).read_bytes())
        await nodes.start(2, nodes.config(2, peers=[1], cluster_secret_file=str(elsewhere)))
        await until(lambda: 2 in one.image.brokers)
        assert not (tmp_path / "node-2" / SECRET_NAME).exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
async def test_a_secret_file_that_other_users_can_access_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "node-1" / SECRET_NAME

    async with local_nodes(tmp_path) as nodes:
        nodes.secrets[1] = ""
        (one,) = await nodes.start_all()
        await nodes.stop(one)
        path.chmod(mode)
        with pytest.raises(ConfigError, match=f"other users may read the cluster secret .*: chmod 600 {path}"):
            await nodes.start(1)


async def test_a_configured_secret_file_must_exist(tmp_path: Path) -> None:
    async with local_nodes(tmp_path) as nodes:
        nodes.secrets[1] = ""
        with pytest.raises(ConfigError, match="nowhere does not exist"):
            await nodes.start(1, nodes.config(1, peers=[], cluster_secret_file=str(tmp_path / "nowhere")))
        with pytest.raises(ConfigError, match="cannot be used"):
            await nodes.start(1, nodes.config(1, peers=[], cluster_secret_file=str(tmp_path)))
