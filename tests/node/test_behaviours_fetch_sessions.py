"""Fetch sessions on the wire: created, continued, refused, and limited to what is new."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.node.support_wire import NEW_SESSION, NO_SESSION, WireClient, connect, fetch_of, unique, values_of
from tests.support.node import Node

from chronik.wire.errors import ErrorCode
from chronik.wire.fetch import FetchResponse

LONG_POLL_MS = 60_000


@pytest.fixture
def client(shared_node: Node) -> Iterator[WireClient]:
    with connect(shared_node) as client:
        yield client


def named(response: FetchResponse) -> set[tuple[str | None, int]]:
    """Return the partitions that a response contains."""
    return {(name, partition.partition) for name, _, partitions in response.topics for partition in partitions}


def test_a_sessionless_fetch_creates_no_session(client: WireClient) -> None:
    topic = client.new_topic()
    response = client.fetch(fetch_of((topic, 0, 0), session=NO_SESSION))
    assert (response.error_code, response.session_id) == (0, 0)
    assert named(response) == {(topic, 0)}


def test_a_new_session_gets_a_full_response_and_then_only_changes(client: WireClient) -> None:
    topic = client.new_topic(partitions=3)
    client.append(topic, b"first", partition=0)
    created = client.fetch(fetch_of((topic, 0, 0), (topic, 1, 0), (topic, 2, 0), session=NEW_SESSION))
    assert created.session_id != 0
    assert named(created) == {(topic, 0), (topic, 1), (topic, 2)}

    client.append(topic, b"second", partition=2)
    # The client advances in partition 0. Partition 1 has nothing new; partition 2 has.
    more = client.fetch(fetch_of((topic, 0, 1), session=(created.session_id, 1)))
    assert (more.error_code, more.session_id) == (0, created.session_id)
    assert named(more) == {(topic, 2)}
    assert values_of(more.topics[0][2][0]) == [b"second"]

    nothing = client.fetch(fetch_of((topic, 2, 1), session=(created.session_id, 2)))
    assert named(nothing) == set()


def test_an_unlisted_session_partition_wakes_a_waiting_incremental_fetch(client: WireClient, shared_node: Node) -> None:
    topic = client.new_topic(partitions=2)
    created = client.fetch(fetch_of((topic, 0, 0), (topic, 1, 0), session=NEW_SESSION))
    waiting = client.send_fetch(fetch_of(session=(created.session_id, 1), max_wait_ms=LONG_POLL_MS))
    with connect(shared_node) as producer:
        producer.append(topic, b"news", partition=1)
    assert values_of(client.fetched(waiting).topics[0][2][0]) == [b"news"]


def test_an_unknown_session_returns_error_70(client: WireClient) -> None:
    topic = client.new_topic()
    response = client.fetch(fetch_of((topic, 0, 0), session=(123_456_789, 1)))
    assert response.error_code == ErrorCode.fetch_session_id_not_found
    assert response.topics == []


def test_a_wrong_session_epoch_returns_error_71_and_the_session_continues(client: WireClient) -> None:
    topic = client.new_topic()
    created = client.fetch(fetch_of((topic, 0, 0), session=NEW_SESSION))
    for epoch in (2, 7):
        refused = client.fetch(fetch_of((topic, 0, 0), session=(created.session_id, epoch)))
        assert refused.error_code == ErrorCode.invalid_fetch_session_epoch
    assert client.fetch(fetch_of(session=(created.session_id, 1))).error_code == 0


def test_forgotten_partitions_are_no_longer_served(client: WireClient) -> None:
    topic = client.new_topic(partitions=2)
    created = client.fetch(fetch_of((topic, 0, 0), (topic, 1, 0), session=NEW_SESSION))
    client.append(topic, b"kept", partition=0)
    client.append(topic, b"forgotten", partition=1)
    response = client.fetch(fetch_of(session=(created.session_id, 1), forgotten=[(topic, 1)]))
    assert named(response) == {(topic, 0)}


def test_a_partition_can_be_added_to_a_session(client: WireClient) -> None:
    topic = client.new_topic(partitions=2)
    created = client.fetch(fetch_of((topic, 0, 0), session=NEW_SESSION))
    client.append(topic, b"added", partition=1)
    response = client.fetch(fetch_of((topic, 1, 0), session=(created.session_id, 1)))
    assert named(response) == {(topic, 1)}


def test_a_closed_session_is_unknown(client: WireClient) -> None:
    topic = client.new_topic()
    created = client.fetch(fetch_of((topic, 0, 0), session=NEW_SESSION))
    closing = client.fetch(fetch_of((topic, 0, 0), session=(created.session_id, -1)))
    assert (closing.error_code, closing.session_id) == (0, 0)
    after = client.fetch(fetch_of((topic, 0, 0), session=(created.session_id, 1)))
    assert after.error_code == ErrorCode.fetch_session_id_not_found


def test_a_session_repeats_a_partition_error_until_it_is_resolved(client: WireClient) -> None:
    topic = client.new_topic()
    missing = unique("later")
    created = client.fetch(fetch_of((topic, 0, 0), (missing, 0, 0), session=NEW_SESSION))
    again = client.fetch(fetch_of(session=(created.session_id, 1)))
    assert named(again) == {(missing, 0)}
    assert again.topics[0][2][0].error_code == ErrorCode.unknown_topic_or_partition
    client.create_topic(missing)
    client.append(missing, b"now")
    assert values_of(client.fetch(fetch_of(session=(created.session_id, 2))).topics[0][2][0]) == [b"now"]


def test_a_new_session_recovers_a_fetch_whose_response_was_lost(client: WireClient, shared_node: Node) -> None:
    topic = client.new_topic()
    created = client.fetch(fetch_of((topic, 0, 0), session=NEW_SESSION))
    client.append(topic, b"x")
    with connect(shared_node) as lost:
        lost.send_fetch(fetch_of(session=(created.session_id, 1)))
        lost.receive()
    renewed = client.fetch(fetch_of((topic, 0, 0), session=(created.session_id, 0)))
    assert (renewed.error_code, named(renewed)) == (0, {(topic, 0)})
    assert values_of(renewed.topics[0][2][0]) == [b"x"]
