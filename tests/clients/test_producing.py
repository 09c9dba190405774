"""Special cases of producing: idempotence, large records, missing topics."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.clients.conftest import OUTSIDE_BOOTSTRAP, NewName
from tests.clients.drivers.base import ADMINS, CLIENTS, Client, ClientError, Sent
from tests.conftest import StartNode
from tests.support.node import Node

MESSAGE_TOO_LARGE = 10
LARGE_BYTES = 900_000


@pytest.mark.parametrize("client", CLIENTS, indirect=True)
def test_idempotent_producer_writes_each_record_once_and_in_order(
    client: Client, bootstrap: str, topic: str, create_topic: Callable[[str, int], None]
) -> None:
    create_topic(topic, 3)
    records = [Sent(b"record %d" % number, b"key", partition=number % 3) for number in range(300)]
    client.produce(bootstrap, topic, sorted(records, key=lambda record: record.partition), idempotent=True)
    got = client.read(bootstrap, topic, len(records), partitions=(0, 1, 2))
    for partition in range(3):
        sent = [record.value for record in records if record.partition == partition]
        assert [record.value for record in got if record.partition == partition] == sent


@pytest.mark.parametrize("client", CLIENTS, indirect=True)
def test_large_records_are_read_back_unchanged(
    client: Client, bootstrap: str, topic: str, create_topic: Callable[[str, int], None]
) -> None:
    create_topic(topic, 1)
    large = [Sent(bytes([97 + number]) * LARGE_BYTES, b"large") for number in range(3)]
    client.produce(bootstrap, topic, large)
    got = client.read(bootstrap, topic, len(large))
    assert [record.value == sent.value for record, sent in zip(got, large, strict=True)] == [True] * len(large)


@pytest.mark.parametrize("client", ADMINS, indirect=True)
def test_record_larger_than_max_message_bytes_is_refused(
    client: Client, bootstrap: str, topic: str, create_topic: Callable[..., None]
) -> None:
    create_topic(topic, 1, {"max.message.bytes": "50000"})
    with pytest.raises(ClientError) as refused:
        client.produce(bootstrap, topic, [Sent(b"x" * 100_000, b"key")])
    assert refused.value.code == MESSAGE_TOO_LARGE
    client.produce(bootstrap, topic, [Sent(b"small", b"key")])
    assert [record.value for record in client.read(bootstrap, topic, 1)] == [b"small"]


@pytest.mark.parametrize("client", CLIENTS, indirect=True)
def test_producing_to_a_missing_topic_creates_it(client: Client, bootstrap: str, topic: str) -> None:
    client.produce(bootstrap, topic, [Sent(b"first", b"key")])
    assert [record.value for record in client.read(bootstrap, topic, 1)] == [b"first"]


@pytest.fixture(scope="module")
def strict_node(start_shared_node: StartNode) -> Node:
    return start_shared_node(auto_create_topics=False)


@pytest.mark.skipif(OUTSIDE_BOOTSTRAP is not None, reason="needs a node of its own, with auto-create off")
@pytest.mark.parametrize("client", CLIENTS, indirect=True)
def test_producing_to_a_missing_topic_fails_if_auto_creation_is_off(
    client: Client, strict_node: Node, new_name: NewName
) -> None:
    with pytest.raises(ClientError):
        client.produce(strict_node.bootstrap, new_name("missing"), [Sent(b"lost")])
