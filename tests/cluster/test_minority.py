"""An isolated node acknowledges nothing with acks=all, and acknowledged records are kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

import pytest
from tests.cluster.conftest import StartNodes
from tests.cluster.support_cluster import Nodes
from tests.node.support_wire import ConnectionEnded, batch
from tests.support.eventually import eventually

from chronik.wire.errors import ErrorCode
from chronik.wire.records import Record

ALONE_S = 6.0
"""Three sessions: from before the failure is detected until well after."""
REQUEST_TIMEOUT_MS = 1_000


def append(nodes: Nodes, topic: str, name: str) -> bytes:
    """Append through the leader, retrying as a client does, and return the acknowledged value.

    Each attempt has its own value, because a failed attempt may have been stored.
    """
    attempts = count()

    def appended() -> bytes | None:
        leader = nodes.partitions(topic)[0].leader
        assert leader in {node.id for node in nodes.responsive}, f"the leader is {leader}"
        value = f"{name}/{next(attempts)}".encode()
        with nodes.connect(leader) as client:
            response = client.produce(topic, batch(value), timeout_ms=3_000)
        assert response.error_code == 0, ErrorCode(response.error_code)
        return value

    return eventually(appended, 30, f"a value {name!r} is acknowledged") or b""


def read(nodes: Nodes, topic: str) -> list[Record]:
    """Read all records from the leader; retry while it is not ready."""

    def records() -> list[Record]:
        try:
            with nodes.connect(nodes.leader(topic)) as client:
                return client.records(topic)
        except (OSError, ConnectionEnded) as error:
            raise AssertionError(f"not read: {error!r}") from None

    return eventually(records, 30, "the records are read")


def refused_while_alone(nodes: Nodes, topic: str, leader: int) -> list[bytes]:
    """Send to the isolated leader for a while; every response must be an error. Return the values sent."""
    sent: list[bytes] = []
    until_s = time.monotonic() + ALONE_S
    with nodes.connect(leader, timeout_s=10.0) as client:
        while time.monotonic() < until_s:
            value = b"alone-%d" % len(sent)
            sent.append(value)
            response = client.produce(topic, batch(value), timeout_ms=REQUEST_TIMEOUT_MS)
            assert response.error_code != 0, f"{value!r} was acknowledged at {response.base_offset} by one of three"
        # Its lease has expired: it rejects even acks=1, and does not return offsets as a leader would.
        last = client.produce(topic, batch(b"alone-last"), acks=1, timeout_ms=REQUEST_TIMEOUT_MS)
        sent.append(b"alone-last")
        assert last.error_code != 0
        fetched = client.fetch_one(topic, 0)
        assert fetched.error_code == ErrorCode.not_leader_or_follower
    return sent


def once_each(records: list[Record], *values: bytes) -> None:
    found = [record.value for record in records]
    for value in values:
        assert found.count(value) == 1, f"{value!r} is there {found.count(value)} times"
    assert [record.offset for record in records] == list(range(len(records)))


def without_the_others_dead(nodes: Nodes, leader: int) -> Callable[[], None]:
    others = [node_id for node_id in nodes.ids if node_id != leader]
    for node_id in others:
        nodes.kill(node_id)

    def undo() -> None:
        for node_id in others:
            nodes.start(node_id)

    return undo


def without_the_others_cut_off(nodes: Nodes, leader: int) -> Callable[[], None]:
    nodes.cut_off(leader)
    return nodes.heal


def without_the_others_frozen(nodes: Nodes, leader: int) -> Callable[[], None]:
    others = [node_id for node_id in nodes.ids if node_id != leader]
    for node_id in others:
        nodes.pause(node_id)

    def undo() -> None:
        for node_id in others:
            nodes.resume(node_id)

    return undo


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "isolate",
    [without_the_others_dead, without_the_others_cut_off, without_the_others_frozen],
    ids=lambda isolate: str(isolate.__name__),
)
def test_a_leader_without_a_majority_returns_an_error_for_acks_all(
    start_nodes: StartNodes, isolate: Callable[[Nodes, int], Callable[[], None]]
) -> None:
    nodes = start_nodes(cuttable=isolate is without_the_others_cut_off)
    topic = nodes.new_topic(1)
    before = append(nodes, topic, "before")
    leader = nodes.leader(topic)
    undo = isolate(nodes, leader)
    refused_while_alone(nodes, topic, leader)
    undo()
    nodes.wait_in_sync()
    after = append(nodes, topic, "after")
    once_each(read(nodes, topic), before, after)
    nodes.no_surprises()


@pytest.mark.timeout(180)
def test_the_majority_replaces_an_isolated_leader_and_drops_its_uncommitted_record(
    start_nodes: StartNodes,
) -> None:
    nodes = start_nodes(cuttable=True)
    topic = nodes.new_topic(1)
    before = append(nodes, topic, "before")
    old = nodes.leader(topic)
    nodes.cut_off(old)
    with nodes.connect(old) as client:
        # The node may still hold its lease: it appends the record but never acknowledges it for acks=all.
        alone = client.produce(topic, batch(b"alone"), timeout_ms=REQUEST_TIMEOUT_MS)
        assert alone.error_code != 0
    others = [node_id for node_id in nodes.ids if node_id != old]
    eventually(lambda: nodes.partitions(topic, others[0])[0].leader in others, 30, "one of the majority leads")
    new = nodes.partitions(topic, others[0])[0].leader
    with nodes.connect(new) as client:
        eventually(lambda: client.produce(topic, batch(b"meanwhile")).error_code == 0, 30, "it takes records")
    nodes.heal()
    nodes.wait_in_sync()
    after = append(nodes, topic, "after")
    records = read(nodes, topic)
    once_each(records, before, after)
    assert b"meanwhile" in [record.value for record in records]
    assert b"alone" not in [record.value for record in records], "the majority had gone on without it"
    nodes.no_surprises()
