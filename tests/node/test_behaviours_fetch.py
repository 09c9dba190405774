"""Fetch as consumers rely on it: waiting, size limits, topic ids, and the fields that the broker sets in batches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.node.support_wire import (
    FETCH_BY_ID_VERSION,
    TIMESTAMP_MS,
    WireClient,
    batch,
    connect,
    decoded,
    fetch_of,
    unique,
    values_of,
)
from tests.support.node import Node

from chronik.wire.api import ApiKey
from chronik.wire.batch import encode_batch, read_batch_header
from chronik.wire.errors import ErrorCode

LONG_POLL_MS = 60_000


@pytest.fixture
def client(shared_node: Node) -> Iterator[WireClient]:
    with connect(shared_node) as client:
        yield client


@pytest.fixture
def producer(shared_node: Node) -> Iterator[WireClient]:
    with connect(shared_node) as producer:
        yield producer


# -- waiting and limits ----------------------------------------------------------------------------------------------


def test_min_bytes_is_summed_over_partitions(client: WireClient, producer: WireClient) -> None:
    topic = client.new_topic(partitions=3)
    one = len(batch(b"x" * 1000))
    # Slightly less than three batches: only the third one satisfies it, in any partition.
    waiting = client.send_fetch(
        fetch_of((topic, 0, 0), (topic, 1, 0), (topic, 2, 0), max_wait_ms=LONG_POLL_MS, min_bytes=3 * one - 10)
    )
    for partition in range(3):
        producer.append(topic, b"x" * 1000, partition=partition)
    answered = client.fetched(waiting).topics
    sizes = {p.partition: len(p.records) for _, _, partitions in answered for p in partitions}
    assert sizes == {0: one, 1: one, 2: one}


def test_min_bytes_includes_records_that_were_available_before_the_wait(
    client: WireClient, producer: WireClient
) -> None:
    topic = client.new_topic(partitions=2)
    one = len(batch(b"x" * 1000))
    producer.append(topic, b"x" * 1000, partition=0)
    waiting = client.send_fetch(
        fetch_of((topic, 0, 0), (topic, 1, 0), max_wait_ms=LONG_POLL_MS, min_bytes=2 * one - 10)
    )
    producer.append(topic, b"x" * 1000, partition=1)
    assert sum(len(p.records) for _, _, partitions in client.fetched(waiting).topics for p in partitions) == 2 * one


def test_a_fetch_without_new_records_returns_empty_at_its_deadline(client: WireClient) -> None:
    topic = client.new_topic()
    response = client.fetch_one(topic, max_wait_ms=100)
    assert (response.error_code, len(response.records), response.high_watermark) == (0, 0, 0)


def test_min_bytes_above_max_bytes_does_not_delay_the_records_that_fit(client: WireClient) -> None:
    topic = client.new_topic()
    for _ in range(5):
        client.append(topic, b"x" * 1000)
    client.socket.settimeout(20)
    response = client.fetch_one(topic, max_wait_ms=LONG_POLL_MS, min_bytes=1_000_000, max_bytes=2500)
    assert 1000 < len(response.records) <= 2500


def test_an_error_in_one_partition_ends_the_fetch_wait_at_once(client: WireClient) -> None:
    topic = client.new_topic()
    missing = unique("missing")
    client.append(topic, b"there")
    answered = client.fetch(
        fetch_of((topic, 0, 0), (missing, 0, 0), max_wait_ms=LONG_POLL_MS, min_bytes=1_000_000)
    ).topics
    responses = {name: partitions[0] for name, _, partitions in answered}
    assert responses[missing].error_code == ErrorCode.unknown_topic_or_partition
    assert values_of(responses[topic]) == [b"there"]


@pytest.mark.parametrize("offset", [-1, 2, 1 << 40])
def test_an_offset_outside_the_log_returns_an_error_at_once(client: WireClient, offset: int) -> None:
    topic = client.new_topic()
    client.append(topic, b"only")
    response = client.fetch_one(topic, offset, max_wait_ms=LONG_POLL_MS)
    assert response.error_code == ErrorCode.offset_out_of_range
    assert len(response.records) == 0


def test_the_first_non_empty_partition_ignores_the_size_limits(client: WireClient) -> None:
    topic = client.new_topic(partitions=3)
    client.append(topic, b"a" * 50_000, partition=1)
    client.append(topic, b"b" * 50_000, partition=2)
    answered = client.fetch(
        fetch_of((topic, 0, 0), (topic, 1, 0), (topic, 2, 0), max_bytes=1000, partition_max_bytes=1000)
    ).topics
    sizes = {p.partition: len(p.records) for _, _, partitions in answered for p in partitions}
    assert sizes[0] == 0
    assert sizes[1] > 50_000, "a batch larger than the limits comes whole"
    assert sizes[2] == 0, "only the first one is exempt"


def test_a_fetch_returns_whole_batches_within_the_partitions_limit(client: WireClient) -> None:
    topic = client.new_topic()
    size = 0
    for number in range(10):
        client.append(topic, b"%d" % number * 1000)
        size = len(batch(b"%d" % number * 1000))
    response = client.fetch_one(topic, partition_max_bytes=3 * size + size // 2)
    assert [value[:1] for value in values_of(response) if value] == [b"0", b"1", b"2"]


def test_a_fetch_from_the_middle_of_a_batch_returns_that_batch_whole(client: WireClient) -> None:
    topic = client.new_topic()
    client.append(topic, b"0", b"1", b"2", b"3")
    client.append(topic, b"4")
    response = client.fetch_one(topic, 2)
    assert [record.offset for record in decoded(response.records)] == [0, 1, 2, 3, 4]


def test_a_waiting_fetch_whose_topic_is_deleted_is_answered(client: WireClient, producer: WireClient) -> None:
    topic = client.new_topic()
    waiting = client.send_fetch(fetch_of((topic, 0, 0), max_wait_ms=LONG_POLL_MS))
    producer.call(ApiKey.DELETE_TOPICS, 4, {"topic_names": [topic], "timeout": 10_000})
    assert client.fetched(waiting).topics[0][2][0].error_code == ErrorCode.unknown_topic_or_partition


@pytest.mark.parametrize("version", range(4, 13))
def test_every_fetch_version_by_name_returns_the_same_records(client: WireClient, version: int) -> None:
    topic = client.new_topic()
    client.append(topic, b"a", b"b")
    response = client.fetch(fetch_of((topic, 0, 0)), version).topics[0][2][0]
    assert values_of(response) == [b"a", b"b"]
    assert response.high_watermark == response.last_stable_offset == 2


# -- topic ids -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(13, 19))
def test_fetch_accepts_the_topic_id_from_metadata(client: WireClient, version: int) -> None:
    topic = client.new_topic()
    topic_id = client.topic_id(topic)
    client.append(topic, b"by id")
    name, answered_id, partitions = client.fetch(fetch_of((topic_id, 0, 0)), version).topics[0]
    assert (name, answered_id) == (None, topic_id)
    assert values_of(partitions[0]) == [b"by id"]


def test_a_recreated_topic_has_a_new_id_and_none_of_the_old_records(client: WireClient) -> None:
    topic = client.new_topic()
    old_id = client.topic_id(topic)
    client.append(topic, b"old")
    deleted = client.call(ApiKey.DELETE_TOPICS, 4, {"topic_names": [topic], "timeout": 10_000}).responses[0]
    assert deleted.error_code is ErrorCode.none
    assert client.create_topic(topic).error_code is ErrorCode.none
    new_id = client.topic_id(topic)
    assert new_id != old_id
    by_old_id = client.fetch(fetch_of((old_id, 0, 0)), FETCH_BY_ID_VERSION).topics[0][2][0]
    assert by_old_id.error_code == ErrorCode.unknown_topic_id
    assert client.records(topic) == []
    assert client.append(topic, b"new") == 0
    by_new_id = client.fetch(fetch_of((new_id, 0, 0)), FETCH_BY_ID_VERSION).topics[0][2][0]
    assert values_of(by_new_id) == [b"new"]


def test_metadata_resolves_a_topic_by_its_id(client: WireClient) -> None:
    topic = client.new_topic()
    topic_id = client.topic_id(topic)
    found = client.call(ApiKey.METADATA, 12, {"topics": [{"topic_id": topic_id, "name": None}]}).topics[0]
    assert (found.error_code, found.name, found.topic_id) == (ErrorCode.none, topic, topic_id)


# -- fields that the broker sets -------------------------------------------------------------------------------------


def test_the_broker_overwrites_base_offset_and_leader_epoch_of_each_batch(client: WireClient) -> None:
    topic = client.new_topic()
    epoch = client.metadata(topic).topics[0].partitions[0].leader_epoch
    assert epoch >= 0
    lying = encode_batch([(b"k", b"x", (), TIMESTAMP_MS)] * 3, base_offset=77_777, leader_epoch=4242)
    assert client.produce(topic, lying).base_offset == 0
    client.append(topic, b"y")
    data = bytes(client.fetch_one(topic).records)
    first = read_batch_header(data)
    second = read_batch_header(data, first.size_bytes)
    assert [(h.base_offset, h.partition_leader_epoch) for h in (first, second)] == [(0, epoch), (3, epoch)]
    # Nothing else changed.
    assert data[16 : first.size_bytes] == lying[16:]


def test_a_fetch_is_served_with_metadatas_epoch_and_refused_with_a_newer_one(client: WireClient) -> None:
    topic = client.new_topic()
    client.append(topic, b"x")
    epoch = client.metadata(topic).topics[0].partitions[0].leader_epoch
    request = fetch_of((topic, 0, 0), max_wait_ms=LONG_POLL_MS)
    for claimed, expected in ((epoch, 0), (-1, 0), (epoch + 1, ErrorCode.unknown_leader_epoch)):
        wanted = request.topics[0].partitions[0]._replace(current_leader_epoch=claimed)
        request.topics[0].partitions[0] = wanted
        assert client.fetch(request).topics[0][2][0].error_code == expected
    asked = {"partition": 0, "current_leader_epoch": epoch, "leader_epoch": epoch}
    found = client.call(
        ApiKey.OFFSET_FOR_LEADER_EPOCH, 3, {"replica_id": -1, "topics": [{"topic": topic, "partitions": [asked]}]}
    )
    end = found.topics[0].partitions[0]
    assert (end.error_code, end.leader_epoch, end.end_offset) == (ErrorCode.none, epoch, 1)
