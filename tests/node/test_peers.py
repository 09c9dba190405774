"""Links between nodes: which nodes may connect, how others are refused, and how a lost peer is detected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from tests.node.cluster_harness import SECRET, LocalNodes
from tests.support.eventually import until
from tests.support.handshake import NONCE, Refused, proven_connection

from chronik.client.connection import Connection
from chronik.client.endpoint import Endpoint
from chronik.client.errors import ClientError, ConnectionLost, Unreachable
from chronik.node.broker import Broker
from chronik.node.config import ConfigError, NodeConfig, Peer, check
from chronik.node.membership import cluster_member
from chronik.node.membership.internal_api import (
    VERSION,
    AllocateProducerIdsCall,
    Call,
    CallReply,
    Hello,
    InternalKey,
    ProducerIdsResult,
    decode_call_reply,
    encode,
)
from chronik.node.membership.peers import PeerState

Story = Callable[[LocalNodes], Coroutine[Any, Any, None]]
PEER_TIMEOUT_S = 20.0


async def peer(broker: Broker, hello: Hello) -> Connection:
    """Connect as a node that knows the secret, with any HELLO."""
    return await proven_connection(broker.internal_server.port, hello, SECRET)


async def greet(broker: Broker, hello: Hello) -> str:
    """Return why the node refuses this HELLO; empty if it accepts."""
    try:
        (await peer(broker, hello)).close()
    except Refused as refused:
        return str(refused)
    return ""


async def test_nodes_are_connected_and_agree_on_the_cluster(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        for broker in brokers:
            await until(
                partial(lambda broker: all(map(broker.member.peers.is_connected, broker.member.peers.known())), broker)
            )
            assert broker.member.peers.known() == [other.node_id for other in brokers if other is not broker]
        assert len({broker.image.cluster_id for broker in brokers}) == 1


async def test_a_killed_peer_is_detected_quickly_and_reconnected_after_restart(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        one, two, three = await nodes.start_all()
        await nodes.kill(three)
        for broker in (one, two):
            await until(partial(lambda broker: broker.member.peers.status(3).state is PeerState.REFUSED, broker))
            assert not broker.member.handshake.is_present(3)
        await nodes.start(3)
        for broker in (one, two):
            await until(partial(lambda broker: broker.member.peers.is_connected(3), broker))


async def test_a_pending_response_does_not_keep_a_dead_peer_present(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response may depend on that death: a forwarded produce waits until the dead node leaves the ISR."""

    async with LocalNodes(tmp_path, count=1, default_replication_factor=1) as nodes:
        (one,) = await nodes.start_all()
        asked = asyncio.Event()

        async def never(call: Call, caller_id: int) -> CallReply:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(one.member.controller, "answer", never)
        connection = await peer(one, Hello("", 5, UUID(int=5), 1, "127.0.0.1:5"))
        answer = connection.send(InternalKey.CONTROLLER_CALL, VERSION, encode(AllocateProducerIdsCall(5, 1)))
        await asked.wait()
        assert one.member.handshake.is_present(5)
        assert connection._transport is not None
        connection._transport.write_eof()
        await until(lambda: not one.member.handshake.is_present(5))
        assert not answer.done() and not connection.is_closed
        connection.close()


async def test_both_sides_log_why_a_node_of_another_cluster_is_refused(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, count=2, default_replication_factor=1) as nodes:
        await nodes.start(1, nodes.config(1, peers=[], cluster_id="ours"))
        await nodes.start(2, nodes.config(2, peers=[], cluster_id="theirs"))
        await nodes.stop(nodes.brokers[2])
        again = await nodes.start(2, nodes.config(2, peers=[1]))
        await until(lambda: again.member.peers.status(1).state is PeerState.REJECTED)
        for word in ("ours", "theirs", "correct the peers"):
            assert word in again.member.peers.status(1).reason
        assert len(nodes.events(2, "peer_not_connected")) == 1
        assert "theirs" in nodes.events(1, "peer_refused")[0]["reason"]
        assert len(nodes.events(1, "peer_refused")) == 1


async def test_a_new_node_with_another_cluster_id_reports_the_mismatch_and_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_member, "REFUSED_S", 0.5)

    async with LocalNodes(tmp_path, count=2) as nodes:
        await nodes.start(1, nodes.config(1, peers=[], cluster_id="ours"))
        with pytest.raises(ConfigError, match="belongs to cluster ours, node 2 to theirs"):
            await nodes.start(2, nodes.config(2, peers=[1], cluster_id="theirs"))
        assert nodes.brokers[1].is_ready


async def test_a_second_process_with_the_same_node_id_is_refused_while_the_first_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_member, "REFUSED_S", 0.5)

    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        nodes.add(9)
        config = msgspec.structs.replace(nodes.config(9, peers=[1, 3]), node_id=2)
        with pytest.raises(ConfigError, match="node id 2 is used twice"):
            await nodes.start(9, config)
        assert all(broker.is_ready for broker in brokers)
        assert brokers[0].image.brokers[2].port == brokers[1].server.port
        assert "used twice" in nodes.events(1, "peer_refused")[0]["reason"]


async def test_a_node_contacted_under_a_wrong_id_returns_its_own_id(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, count=1, default_replication_factor=1) as nodes:
        (one,) = await nodes.start_all()
        refusal = await greet(one, Hello("", 5, UUID(int=5), 7, "127.0.0.1:5"))
        assert "node 1 answers at" in refusal
        assert "looks for node 7" in refusal
        assert await greet(one, Hello("", 5, UUID(int=5), 1, "127.0.0.1:5")) == ""
        assert "used twice" in await greet(one, Hello("", 1, UUID(int=5), 1, "127.0.0.1:5"))
        assert "names no address" in await greet(one, Hello("", 5, UUID(int=5), 1, "nowhere"))


async def test_a_slow_call_does_not_delay_later_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalNodes(tmp_path, count=1, default_replication_factor=1) as nodes:
        (one,) = await nodes.start_all()
        going_on = asyncio.Event()
        answer = one.member.controller.answer

        async def slowly(call: Call, caller_id: int) -> CallReply:
            await going_on.wait()
            return await answer(call, caller_id)

        monkeypatch.setattr(one.member.controller, "answer", slowly)
        hello = Hello("", 5, UUID(int=5), 1, "127.0.0.1:5")
        connection = await peer(one, hello)
        slow = connection.send(InternalKey.CONTROLLER_CALL, VERSION, encode(AllocateProducerIdsCall(5, 10)))
        async with asyncio.timeout(5):
            await connection.send(InternalKey.HELLO, VERSION, encode(hello))
        assert not slow.done()
        going_on.set()
        async with asyncio.timeout(5):
            assert decode_call_reply(await slow).result == ProducerIdsResult(0, 10)
        connection.close()


async def test_a_peers_new_connection_closes_its_older_one_for_the_same_purpose(tmp_path: Path) -> None:
    """The peer abandoned its unread requests on the old connection, so they must not arrive after newer ones."""

    async with LocalNodes(tmp_path, count=1, default_replication_factor=1) as nodes:
        (one,) = await nodes.start_all()

        async def opened(purpose: str) -> Connection:
            return await peer(one, Hello("", 5, UUID(int=5), 1, "127.0.0.1:5", purpose))

        old, other = await opened("produce"), await opened("fetch")
        new = await opened("produce")
        async with asyncio.timeout(5):
            assert isinstance(await old.wait_closed(), ConnectionLost)
        assert one.member.handshake.is_present(5) and not other.is_closed and not new.is_closed
        other.close()
        new.close()
        await until(lambda: not one.member.handshake._processes[5].newest)


async def test_clients_get_no_response_from_internal_apis(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, count=1, default_replication_factor=1) as nodes:
        (one,) = await nodes.start_all()
        for key in InternalKey:
            connection = await nodes.client(one)
            with pytest.raises(ConnectionLost):
                await connection.send(key, VERSION, encode(Hello("", 5, UUID(int=5), 1, "127.0.0.1:5", nonce=NONCE)))


async def test_a_call_to_a_disconnected_peer_fails_at_once_with_the_reason(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        one, _, three = await nodes.start_all()
        await nodes.kill(three)
        await until(lambda: one.member.peers.status(3).state is PeerState.REFUSED)
        async with asyncio.timeout(PEER_TIMEOUT_S / 2):
            with pytest.raises(ClientError, match="node 3"):
                await one.member.peers.call(3, InternalKey.CONTROLLER_CALL, b"", PEER_TIMEOUT_S)
            with pytest.raises(Unreachable):
                await one.member.peers.connection(3)
        with pytest.raises(Unreachable, match="not known"):
            await one.member.peers.call(77, InternalKey.CONTROLLER_CALL, b"", 10.0)


async def test_a_peers_configured_address_overrides_its_advertised_one(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        one, two, _ = await nodes.start_all()
        link = one.member.peers._links[2]
        one.member.peers.learn(2, Endpoint("127.0.0.1", 1))
        assert one.member.peers._links[2] is link
        assert str(link.endpoint) == two.member.identity.internal


async def test_an_unresponsive_peer_is_disconnected_and_reconnected(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        one, two, _ = await nodes.start_all()
        await until(lambda: one.member.peers.is_connected(2))
        data = await one.member.peers.connection(2)
        # Node 2 stops reading, as if its process were stopped or the network were cut.
        for connection in two.internal_server._connections:
            connection._transport.pause_reading()  # type: ignore[union-attr]
        await until(lambda: data.is_closed, "what goes to it is given up", timeout_s=12.0)
        await until(lambda: one.member.peers.is_connected(2), timeout_s=8.0)


async def test_a_connection_request_fails_if_its_peer_is_dropped_and_can_be_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the caller's task ends as if it had been cancelled, and a follower never fetches again."""

    async with LocalNodes(tmp_path) as nodes:
        one, *_ = await nodes.start_all()
        opening = asyncio.Event()
        with monkeypatch.context() as patch:
            patch.setattr(one.member.peers, "open", lambda *_: _for_ever(opening))
            asking = [asyncio.create_task(one.member.peers.connection(2, "test")) for _ in range(2)]
            await opening.wait()
            asking[0].cancel()
            await asyncio.wait(asking[:1])
            assert asking[0].cancelled()
            one.member.peers.close_data(2)
            with pytest.raises(Unreachable, match="node 2 was dropped"):
                await asking[1]
        assert not (await one.member.peers.connection(2, "test")).is_closed


async def _for_ever(begun: asyncio.Event) -> Connection:
    begun.set()
    await asyncio.Event().wait()
    raise AssertionError


def test_invalid_peer_lists_are_refused_at_start() -> None:
    for peers, words in (
        ((Peer(1, "127.0.0.1:5092"),), "no majority"),
        ((Peer(2, "127.0.0.1:5092"),), "have the same address"),
        ((Peer(2, "127.0.0.1:5093"), Peer(3, "127.0.0.1:5093")), "have the same address"),
        ((Peer(2, "127.0.0.1:5093"), Peer(2, "127.0.0.1:5094")), "have the same id"),
        ((Peer(-2, "127.0.0.1:5093"),), "negative"),
        ((Peer(2, "0.0.0.0:5093"),), "is not an address to connect to"),
    ):
        with pytest.raises(ConfigError, match=words):
            check(NodeConfig(node_id=1, peers=peers))
    check(NodeConfig(node_id=1, peers=(Peer(1, "127.0.0.1:5092"), Peer(2, "127.0.0.1:5093"))))
