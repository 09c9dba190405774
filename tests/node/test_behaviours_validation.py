"""What a broker must refuse, change or create by itself, including topics created by Metadata."""

from __future__ import annotations

import time
from collections.abc import Iterator
from uuid import uuid4

import pytest
from tests.conftest import StartNode
from tests.node.support_wire import TIMESTAMP_MS, WireClient, batch, connect, decoded, unique
from tests.support.node import Node

from chronik.wire.api import ApiKey
from chronik.wire.batch import encode_batch, read_batch_header
from chronik.wire.errors import ErrorCode

DAY_MS = 86_400_000
INVALID_TIMESTAMP = 32
GZIP = 1


@pytest.fixture
def client(shared_node: Node) -> Iterator[WireClient]:
    with connect(shared_node) as client:
        yield client


# -- topics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "ümlaut", "a" * 250, "a\x00b", "../up", "a:b"])
def test_create_topics_metadata_and_produce_refuse_an_invalid_topic_name(client: WireClient, name: str) -> None:
    created = client.create_topic(name)
    assert created.error_code is ErrorCode.invalid_topic_exception
    assert created.error_message
    asked = client.metadata(name, create=True).topics[0]
    assert asked.error_code is ErrorCode.invalid_topic_exception
    assert client.produce(name, batch(b"x")).error_code in (
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.invalid_topic_exception,
    )


def test_a_topic_can_have_the_longest_valid_name(client: WireClient) -> None:
    name = unique("long").ljust(249, "n")
    assert client.create_topic(name).error_code is ErrorCode.none
    assert client.append(name, b"x") == 0


@pytest.mark.parametrize(
    ("config", "value"),
    [
        ("no.such.config", "1"),
        ("retention.ms", "soon"),
        ("retention.ms", "-2"),
        ("cleanup.policy", "shred"),
        ("compression.type", "zip"),
        ("segment.bytes", "1"),
        ("min.insync.replicas", "0"),
        ("message.timestamp.type", "Never"),
    ],
)
def test_the_error_for_an_invalid_config_names_the_config(client: WireClient, config: str, value: str) -> None:
    name = unique("topic")
    created = client.create_topic(name, configs={config: value})
    assert created.error_code is ErrorCode.invalid_config
    assert config in created.error_message
    assert client.metadata(name).topics[0].error_code is ErrorCode.unknown_topic_or_partition

    topic = client.new_topic()
    change = {"name": config, "config_operation": 0, "value": value}
    resource = {"resource_type": 2, "resource_name": topic, "configs": [change]}
    altered = client.call(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource]}).responses[0]
    assert altered.error_code is ErrorCode.invalid_config


@pytest.mark.parametrize("version", [5, 6, 7])
def test_create_topics_returns_the_source_of_every_config(client: WireClient, version: int) -> None:
    wanted = {
        "name": unique("topic"),
        "num_partitions": 1,
        "replication_factor": 1,
        "configs": [{"name": "retention.ms", "value": "1000"}],
    }
    topic = client.call(ApiKey.CREATE_TOPICS, version, {"topics": [wanted], "timeout": 10_000}).topics[0]
    assert topic.error_code is ErrorCode.none
    sources = {config.name: config.config_source for config in topic.configs}
    assert len(sources) > 10
    assert sources["retention.ms"] == 1, "a config of the topic's own"
    assert set(sources.values()) <= {1, 2, 3, 4, 5, 6}, "Java fails on any other, -1 included"


def test_a_refused_topic_has_no_null_configs(client: WireClient) -> None:
    refused = client.create_topic("bad/name")
    assert refused.configs == ()
    assert refused.topic_config_error_code == 0


def test_describe_configs_returns_the_source_of_every_config(client: WireClient) -> None:
    topic = client.new_topic(retention_ms="1000")
    resource = {"resource_type": 2, "resource_name": topic, "configuration_keys": None}
    for version in range(1, 5):
        found = client.call(ApiKey.DESCRIBE_CONFIGS, version, {"resources": [resource]}).results[0]
        assert found.error_code is ErrorCode.none
        assert {config.config_source for config in found.configs} <= {1, 2, 3, 4, 5, 6}


def test_metadata_creates_a_topic_only_if_the_request_allows_it(client: WireClient) -> None:
    name = unique("asked-for")
    assert client.metadata(name, create=False).topics[0].error_code is ErrorCode.unknown_topic_or_partition
    made = client.metadata(name, create=True).topics[0]
    assert made.error_code is ErrorCode.none
    assert made.partitions[0].leader_id == client.metadata().brokers[0].node_id
    assert client.append(name, b"at once") == 0


def test_metadata_creates_the_missing_topics_of_coordinators_on_request(start_node: StartNode) -> None:
    """As in Kafka: lag tools read the offsets topic, and request its metadata first."""
    with connect(start_node(offsets_topic_partitions=4, transaction_state_topic_partitions=3)) as client:
        (found,) = client.metadata("__consumer_offsets", create=True).topics
        assert (found.error_code, found.is_internal, len(found.partitions)) == (0, True, 4)
        (other,) = client.metadata("__transaction_state", create=True).topics
        assert (other.error_code, other.is_internal, len(other.partitions)) == (0, True, 3)


def test_metadata_creates_no_topic_if_auto_creation_is_disabled(start_node: StartNode) -> None:
    node = start_node(auto_create_topics=False)
    with connect(node) as client:
        name = unique("asked-for")
        for _ in range(2):
            asked = client.metadata(name, create=True).topics[0]
            assert asked.error_code is ErrorCode.unknown_topic_or_partition
        assert client.produce(name, batch(b"x")).error_code == ErrorCode.unknown_topic_or_partition


@pytest.mark.parametrize("version", [12, 13])
def test_metadata_by_id_ignores_the_name_that_a_client_sends_with_it(client: WireClient, version: int) -> None:
    topic = client.new_topic()
    (known,) = client.call(ApiKey.METADATA, version, {"topics": [{"name": topic}]}).topics
    for name in ("", None, "another"):
        (found,) = client.call(
            ApiKey.METADATA, version, {"topics": [{"name": name, "topic_id": known.topic_id}]}
        ).topics
        assert (found.error_code, found.name, found.topic_id) == (0, topic, known.topic_id)
        unknown = {"name": name, "topic_id": uuid4()}
        (missing,) = client.call(
            ApiKey.METADATA, version, {"topics": [unknown], "allow_auto_topic_creation": True}
        ).topics
        assert (missing.error_code, missing.topic_id) == (ErrorCode.unknown_topic_id, unknown["topic_id"])
    listed = client.call(ApiKey.METADATA, version, {"topics": None}).topics
    assert "another" not in {topic.name for topic in listed}


def test_every_metadata_version_returns_all_topics_or_none(client: WireClient) -> None:
    topic = client.new_topic()
    for version in range(13):
        everything = client.call(ApiKey.METADATA, version, {"topics": [] if version == 0 else None})
        assert topic in {found.name for found in everything.topics}
        if version >= 1:
            assert client.call(ApiKey.METADATA, version, {"topics": []}).topics == ()


# -- records ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", range(5), ids=["none", "gzip", "snappy", "lz4", "zstd"])
def test_a_record_without_a_key_is_refused_by_a_compacted_topic(client: WireClient, codec: int) -> None:
    topic = client.new_topic(cleanup_policy="compact")
    keyless = encode_batch([(b"k", b"with", (), TIMESTAMP_MS), (None, b"without", (), TIMESTAMP_MS)], codec=codec)
    refused = client.produce(topic, keyless)
    assert refused.error_code == ErrorCode.invalid_record
    assert refused.error_message
    assert [index for index, _ in refused.record_errors] == [1]
    assert client.records(topic) == []
    assert client.produce(topic, batch(b"with", codec=codec)).error_code == 0


def test_a_batch_above_max_message_bytes_is_too_large(client: WireClient) -> None:
    topic = client.new_topic(max_message_bytes="1000")
    assert client.produce(topic, batch(b"x" * 1000)).error_code == ErrorCode.message_too_large
    assert client.produce(topic, batch(b"x" * 500)).error_code == 0
    by_default = client.new_topic()
    assert client.produce(by_default, batch(b"x" * 1_100_000)).error_code == 10
    assert len(client.records(topic)) == 1


def test_several_batches_for_one_partition_are_refused(client: WireClient) -> None:
    topic = client.new_topic()
    assert client.produce(topic, batch(b"a") + batch(b"b")).error_code == ErrorCode.invalid_record
    assert client.records(topic) == []


@pytest.mark.parametrize("version", [3, 6])
def test_zstd_below_produce_7_is_refused(client: WireClient, version: int) -> None:
    topic = client.new_topic()
    answer = client.produce(topic, batch(b"x", codec=4), version=version)
    assert answer.error_code == ErrorCode.unsupported_compression_type


def test_log_append_time_replaces_the_producers_timestamp(client: WireClient) -> None:
    topic = client.new_topic(message_timestamp_type="LogAppendTime")
    before_ms = int(time.time() * 1000)
    answer = client.produce(topic, batch(b"a", b"b", timestamp_ms=5))
    after_ms = int(time.time() * 1000)
    assert before_ms - 1 <= answer.log_append_time_ms <= after_ms + 1
    stored = bytes(client.fetch_one(topic).records)
    assert read_batch_header(stored).log_append_time
    assert [record.timestamp_ms for record in decoded(stored)] == [answer.log_append_time_ms] * 2
    assert client.list_offset(topic, answer.log_append_time_ms).offset == 0


def test_a_timestamp_too_far_in_the_future_or_the_past_is_refused(client: WireClient) -> None:
    topic = client.new_topic(message_timestamp_after_max_ms=str(DAY_MS), message_timestamp_before_max_ms=str(DAY_MS))
    now_ms = int(time.time() * 1000)
    for offset_ms, expected in ((0, 0), (2 * DAY_MS, INVALID_TIMESTAMP), (-2 * DAY_MS, INVALID_TIMESTAMP)):
        answer = client.produce(topic, batch(b"x", timestamp_ms=now_ms + offset_ms))
        assert answer.error_code == expected
        assert bool(answer.error_message) == bool(expected)


def test_compression_type_gzip_recompresses_other_batches(client: WireClient) -> None:
    topic = client.new_topic(compression_type="gzip")
    headers = [("h", b"1"), ("h", None)]
    expected = [(b"k", b"a" * 500, headers, TIMESTAMP_MS), (None, None, [], TIMESTAMP_MS + 5)]
    producer_id, _ = client.init_producer_id()
    for codec in range(5):
        sent = encode_batch(expected, codec=codec, producer_id=producer_id, producer_epoch=0, base_sequence=2 * codec)
        assert client.produce(topic, sent).base_offset == 2 * codec
    data = bytes(client.fetch_one(topic).records)
    at = 0
    while at < len(data):
        header = read_batch_header(data, at)
        assert (header.codec, header.producer_id) == (GZIP, producer_id)
        at += header.size_bytes
    records = [(r.key, r.value, r.headers, r.timestamp_ms) for r in decoded(data)]
    assert records == expected * 5


def test_compression_type_uncompressed_stores_plain_records(client: WireClient) -> None:
    topic = client.new_topic(compression_type="uncompressed")
    client.produce(topic, batch(b"x" * 1000, codec=GZIP))
    stored = client.fetch_one(topic).records
    assert read_batch_header(stored).codec == 0
    assert [record.value for record in decoded(stored)] == [b"x" * 1000]


def test_compression_type_producer_keeps_every_byte(client: WireClient) -> None:
    topic = client.new_topic()
    for codec in range(5):
        sent = batch(b"x" * 1000, codec=codec)
        client.produce(topic, sent)
        assert bytes(client.fetch_one(topic, codec).records)[16:] == sent[16:]


def test_a_dynamic_config_change_applies_to_the_next_batch(client: WireClient) -> None:
    topic = client.new_topic()
    assert client.produce(topic, batch(b"x" * 1000)).error_code == 0
    change = {"name": "max.message.bytes", "config_operation": 0, "value": "500"}
    resource = {"resource_type": 2, "resource_name": topic, "configs": [change]}
    altered = client.call(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource]}).responses[0]
    assert altered.error_code is ErrorCode.none
    assert client.produce(topic, batch(b"x" * 1000)).error_code == 10


def test_internal_topics_refuse_records_from_clients(client: WireClient) -> None:
    client.call(ApiKey.FIND_COORDINATOR, 2, {"key": "g", "key_type": 0})
    answer = client.produce("__consumer_offsets", batch(b"x"))
    assert answer.error_code == ErrorCode.invalid_topic_exception
    created = client.create_topic("__consumer_offsets")
    assert created.error_code in (ErrorCode.topic_already_exists, ErrorCode.invalid_topic_exception)
