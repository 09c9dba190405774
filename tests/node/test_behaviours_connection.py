"""What every client relies on first: API versions, the order of responses, and acks=0."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.conftest import StartNode
from tests.node.support_wire import (
    WireClient,
    batch,
    connect,
    fetch_of,
    unique,
    values_of,
)
from tests.support.eventually import eventually
from tests.support.node import Node

from chronik.node.serving.server import decode_request
from chronik.wire import messages
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

UNSUPPORTED_VERSION = 35
LONG_POLL_MS = 60_000


@pytest.fixture
def client(shared_node: Node) -> Iterator[WireClient]:
    with connect(shared_node) as client:
        yield client


# -- ApiVersions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [6, 99, 32767, -1])
@pytest.mark.parametrize("body", [b"", b"\xff" * 40], ids=["empty", "garbage"])
def test_an_unsupported_api_versions_request_gets_a_v0_response_unparsed(
    client: WireClient, version: int, body: bytes
) -> None:
    correlation_id = client.send(ApiKey.API_VERSIONS, version, body)
    got, answer = client.receive()
    assert got == correlation_id
    error, count, key, lowest, highest = struct.unpack(">hihhh", answer)
    assert (error, count, key) == (UNSUPPORTED_VERSION, 1, ApiKey.API_VERSIONS)
    assert (lowest, highest) == (0, 5)
    # The connection stays usable with an advertised version.
    assert client.call(ApiKey.API_VERSIONS, highest, {}).error_code is ErrorCode.none


@pytest.mark.parametrize("version", range(6))
def test_the_header_of_an_api_versions_response_is_v0_in_every_version(client: WireClient, version: int) -> None:
    correlation_id = client.send(ApiKey.API_VERSIONS, version, messages.write_request(ApiKey.API_VERSIONS, version, {}))
    got, answer = client.receive()
    assert got == correlation_id
    # The header has no tagged fields after the correlation id: the body parses from its first byte.
    response = messages.read_response(ApiKey.API_VERSIONS, version, answer)
    assert {api.api_key for api in response.api_keys} >= {ApiKey.PRODUCE, ApiKey.FETCH, ApiKey.FIND_COORDINATOR}


def test_a_client_that_meant_another_cluster_or_node_must_bootstrap_again(client: WireClient) -> None:
    metadata = client.call(ApiKey.METADATA, 12, {"topics": []})
    cluster, node = metadata.cluster_id, metadata.brokers[0].node_id
    for cluster_id, node_id, error in (
        (None, -1, ErrorCode.none),
        (cluster, node, ErrorCode.none),
        (cluster, node + 1, ErrorCode.rebootstrap_required),
        ("other", node, ErrorCode.rebootstrap_required),
        (cluster, -1, ErrorCode.invalid_request),
        (None, node, ErrorCode.invalid_request),
    ):
        answer = client.call(ApiKey.API_VERSIONS, 5, {"cluster_id": cluster_id, "node_id": node_id})
        assert (answer.error_code, bool(answer.api_keys)) == (error, error is ErrorCode.none)


def test_produce_is_advertised_from_0_and_accepted_from_3_to_12_by_name(client: WireClient) -> None:
    apis = {api.api_key: api for api in client.call(ApiKey.API_VERSIONS, 3, {}).api_keys}
    assert (apis[ApiKey.PRODUCE].min_version, apis[ApiKey.PRODUCE].max_version) == (0, 13)
    topic = client.new_topic()
    for index, version in enumerate(range(3, 13)):
        assert client.produce(topic, batch(b"v%d" % version), version=version).base_offset == index


def test_every_advertised_api_answers_its_lowest_and_its_highest_version(client: WireClient, shared_node: Node) -> None:
    for api in client.call(ApiKey.API_VERSIONS, 3, {}).api_keys:
        if api.api_key in (ApiKey.PRODUCE, ApiKey.FETCH):
            continue  # hot path: the tests next to this one cover each version
        for version in (api.min_version, api.max_version):
            with connect(shared_node) as other:
                other.call(ApiKey(api.api_key), version, {})


def test_an_unadvertised_version_closes_the_connection(shared_node: Node) -> None:
    for key, version in ((ApiKey.PRODUCE, 2), (ApiKey.METADATA, 99), (ApiKey.HEARTBEAT, -1), (999, 0)):
        with connect(shared_node) as client:
            client.send(key, version, b"\x00" * 20)
            assert client.ended_without_a_byte(), (key, version)


# -- acks=0 ----------------------------------------------------------------------------------------------------------


def test_an_acks_0_produce_gets_no_response_and_its_records_are_appended(client: WireClient) -> None:
    topic = client.new_topic()
    client.send_produce(topic, batch(b"unanswered"), acks=0)
    # The next response on this connection belongs to the next request.
    assert client.produce(topic, batch(b"answered")).base_offset == 1
    assert [record.value for record in client.records(topic)] == [b"unanswered", b"answered"]


def test_an_error_with_acks_0_closes_the_connection_without_a_response(client: WireClient, shared_node: Node) -> None:
    with connect(shared_node) as producer:
        producer.send_produce(unique("no-such-topic"), batch(b"lost"), acks=0)
        assert producer.ended_without_a_byte()
    topic = client.new_topic()
    with connect(shared_node) as producer:
        damaged = bytearray(batch(b"damaged"))
        damaged[-1] ^= 1
        producer.send_produce(topic, bytes(damaged), acks=0)
        assert producer.ended_without_a_byte()
    assert client.records(topic) == []


@pytest.mark.parametrize("ending", ["close", "half-close"])
def test_acks_0_frames_sent_before_the_connection_closes_are_appended(
    client: WireClient, shared_node: Node, ending: str
) -> None:
    topic = client.new_topic()
    expected = [b"%d" % number for number in range(300)]
    with connect(shared_node) as producer:
        for value in expected:
            producer.send_produce(topic, batch(value * 1000), acks=0)
        if ending == "half-close":
            producer.socket.shutdown(socket.SHUT_WR)
            assert producer.ended_without_a_byte()
    eventually(lambda: client.offset_at(topic, -1) == len(expected), what="all frames are appended")
    assert [record.value for record in client.records(topic)] == [value * 1000 for value in expected]


def test_requests_sent_before_a_half_close_are_answered(client: WireClient, shared_node: Node) -> None:
    topic = client.new_topic()
    with connect(shared_node) as producer:
        sent = [producer.send_produce(topic, batch(b"%d" % number)) for number in range(10)]
        producer.socket.shutdown(socket.SHUT_WR)
        assert [producer.produced(correlation_id).base_offset for correlation_id in sent] == list(range(10))
        assert producer.ended_without_a_byte()


def test_invalid_acks_are_refused(client: WireClient) -> None:
    topic = client.new_topic()
    assert client.produce(topic, batch(b"x"), acks=2).error_code == ErrorCode.invalid_required_acks
    assert client.records(topic) == []


# -- order and pipelining --------------------------------------------------------------------------------------------


def test_responses_after_a_long_polling_fetch_keep_request_order(client: WireClient, shared_node: Node) -> None:
    topic = client.new_topic()
    with connect(shared_node) as consumer:
        fetch = consumer.send_fetch(fetch_of((topic, 0, 0), max_wait_ms=LONG_POLL_MS))
        versions = consumer.send(ApiKey.API_VERSIONS, 0, b"")
        produce = consumer.send_produce(topic, batch(b"by the consumer itself"))
        # The consumer's own record, sent after the fetch on the same connection, ends the wait.
        assert values_of(consumer.fetched(fetch).topics[0][2][0]) == [b"by the consumer itself"]
        consumer.answer(ApiKey.API_VERSIONS, 0, versions)
        assert consumer.produced(produce).base_offset == 0


def test_a_hundred_pipelined_requests_of_all_kinds_are_answered_in_order(client: WireClient) -> None:
    topic = client.new_topic()
    expected: list[int] = []
    with client.one_write():
        for number in range(100):
            if number % 4 == 0:
                expected.append(client.send_produce(topic, batch(b"%d" % number)))
            elif number % 4 == 1:
                expected.append(client.send_fetch(fetch_of((topic, 0, 0), max_wait_ms=20)))
            else:
                key = ApiKey.API_VERSIONS if number % 4 == 2 else ApiKey.METADATA
                expected.append(client.send(key, 1, messages.write_request(key, 1, {})))
    assert [client.receive()[0] for _ in expected] == expected
    assert [record.value for record in client.records(topic)] == [b"%d" % number for number in range(0, 100, 4)]


def test_a_thousand_produce_requests_in_one_write_keep_their_order(client: WireClient) -> None:
    topic = client.new_topic()
    with client.one_write():
        correlation_ids = [client.send_produce(topic, batch(b"%d" % number), acks=1) for number in range(1000)]
    offsets = [client.produced(correlation_id).base_offset for correlation_id in correlation_ids]
    assert offsets == list(range(1000))
    assert [record.value for record in client.records(topic)] == [b"%d" % number for number in range(1000)]


def test_a_frame_that_arrives_byte_by_byte_is_answered(client: WireClient) -> None:
    frame, correlation_id = client.frame(ApiKey.METADATA, 1, messages.write_request(ApiKey.METADATA, 1, {"topics": []}))
    for at in range(len(frame)):
        client.send_bytes(frame[at : at + 1])
    answer = messages.read_response(ApiKey.METADATA, 1, client.answer(ApiKey.METADATA, 1, correlation_id))
    assert len(answer.brokers) == 1


def test_a_batch_larger_than_the_receive_buffer_is_appended_whole(start_node: StartNode) -> None:
    node = start_node(topic_defaults={"max.message.bytes": 64 * 1024 * 1024})
    with connect(node) as client:
        topic = client.new_topic()
        value = bytes(range(256)) * (20 * 1024 * 1024 // 256)
        first = client.send_produce(topic, batch(value))
        second = client.send_produce(topic, batch(b"behind it"))
        assert [client.produced(first).base_offset, client.produced(second).base_offset] == [0, 1]
        assert [record.value for record in client.records(topic)] == [value, b"behind it"]


# -- transactions ----------------------------------------------------------------------------------------------------


def test_a_transactional_batch_needs_the_id_of_an_open_transaction(client: WireClient) -> None:
    topic, transactional_id = client.new_topic(), unique("t")
    found = client.call(ApiKey.FIND_COORDINATOR, 2, {"key": transactional_id, "key_type": 1})
    assert found.error_code is ErrorCode.none
    timeout = {"transaction_timeout": 60_000}
    init = {"transactional_id": transactional_id, "producer_id": -1, "producer_epoch": -1}
    eventually(lambda: client.call(ApiKey.INIT_PRODUCER_ID, 4, init | timeout).error_code is ErrorCode.none, 10.0)
    producer = client.call(ApiKey.INIT_PRODUCER_ID, 4, init | timeout)
    transactional = batch(
        b"x",
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        base_sequence=0,
        is_transactional=True,
    )
    without_id = client.produce(topic, transactional)
    assert without_id.error_code == ErrorCode.transactional_id_authorization_failed
    of_another = client.produce(topic, transactional, transactional_id=unique("unknown"))
    assert of_another.error_code == ErrorCode.invalid_producer_id_mapping
    not_added = client.produce(topic, transactional, transactional_id=transactional_id)
    assert not_added.error_code in (ErrorCode.invalid_txn_state, ErrorCode.transaction_abortable)
    assert client.records(topic) == []


def test_init_transactions_of_confluent_kafka_succeeds(shared_node: Node) -> None:
    confluent_kafka = pytest.importorskip("confluent_kafka")
    producer = confluent_kafka.Producer({"bootstrap.servers": shared_node.bootstrap, "transactional.id": unique("t")})
    producer.init_transactions(30.0)
    producer.begin_transaction()
    producer.abort_transaction(30.0)


def test_init_transactions_of_kafka_python_succeeds(shared_node: Node) -> None:
    kafka = pytest.importorskip("kafka")
    producer = kafka.KafkaProducer(
        bootstrap_servers=shared_node.bootstrap,
        transactional_id=unique("t"),
        max_block_ms=30_000,
        enable_idempotence=True,
    )
    try:
        producer.init_transactions()
        producer.begin_transaction()
        producer.abort_transaction()
    finally:
        producer.close(timeout=5)


# -- large requests, which are decoded in a thread ---------------------------------------------------------------------

MANY = 20_000


def test_a_large_request_is_answered_in_order_and_the_node_serves_others(client: WireClient, shared_node: Node) -> None:
    names = [{"name": f"absent-{number}"} for number in range(MANY)]
    values = {"topics": names, "allow_auto_topic_creation": False}
    body = messages.write_request(ApiKey.METADATA, 12, values)
    first = client.send(ApiKey.METADATA, 12, body)
    second = client.send(ApiKey.API_VERSIONS, 0, b"")
    with connect(shared_node) as other:
        assert other.call(ApiKey.API_VERSIONS, 3, {}).error_code is ErrorCode.none
    answer = messages.read_response(ApiKey.METADATA, 12, client.answer(ApiKey.METADATA, 12, first))
    assert len(answer.topics) == MANY
    assert client.receive()[0] == second


def test_a_large_malformed_request_closes_its_connection(client: WireClient) -> None:
    client.send(ApiKey.METADATA, 12, b"\xff" * 200_000)
    assert client.ended_without_a_byte()


async def test_only_large_requests_are_decoded_in_a_thread() -> None:
    decoded: list[int] = []

    async def run_blocking(call: Callable[[], Any]) -> Any:
        message = call()
        decoded.append(len(message.topics))
        return message

    runtime = cast(Any, SimpleNamespace(run_blocking=run_blocking))
    for count in (10, MANY):
        values = {"topics": [{"name": f"t{number}"} for number in range(count)], "allow_auto_topic_creation": False}
        body = messages.write_request(ApiKey.METADATA, 12, values)
        assert len((await decode_request(runtime, ApiKey.METADATA, 12, body)).topics) == count
    assert decoded == [MANY]
