"""Which schema ids the records of a topic may have, by the strategy that names their subject."""

from __future__ import annotations

import pytest
from tests.schemas.test_commands import Registry

from chronik.schemas.validation import (
    RECORD_NAME,
    TOPIC_NAME,
    TOPIC_RECORD_NAME,
    RecordPrefix,
    SchemaCheck,
    ids_of,
    is_registered,
    unregistered,
)
from chronik.wire.batch import batch_prefixes, encode_batch
from chronik.wire.compression import GZIP, LZ4, NONE, SNAPPY, ZSTD
from chronik.wire.errors import KafkaError
from chronik.wire.records import NewRecord

KEY, VALUE = SchemaCheck("key", TOPIC_NAME), SchemaCheck("value", TOPIC_NAME)
PROTO = 'syntax = "proto3"; package p; message A { message B {} message C { message D {} } message E {} }'


def test_each_strategy_names_the_subject_that_must_have_the_id() -> None:
    registry = Registry()
    avro = registry.register("orders-value", {"type": "record", "name": "Order", "namespace": "n", "fields": []})
    registry.run("register", "n.Order", body={"schema": registry.state.ids["", avro].text})
    json_id = registry.register("orders-Item", {"title": "Item", "type": "object"}, "JSON")
    proto = registry.run("register", "p.A.C.D", body={"schema": PROTO, "schemaType": "PROTOBUF"})["id"]
    other = registry.run("register", "p.A.D", body={"schema": PROTO.replace("E {}", "F {}"), "schemaType": "PROTOBUF"})[
        "id"
    ]
    allowed = {
        (strategy, topic): {
            number
            for number in (avro, json_id, proto, other, 99)
            if is_registered(registry.state, topic, SchemaCheck("value", strategy), number)
        }
        for strategy in (TOPIC_NAME, RECORD_NAME, TOPIC_RECORD_NAME)
        for topic in ("orders", "other")
    }
    assert allowed == {
        (TOPIC_NAME, "orders"): {avro},
        (TOPIC_NAME, "other"): set(),
        (RECORD_NAME, "orders"): {avro, proto},
        (RECORD_NAME, "other"): {avro, proto},
        (TOPIC_RECORD_NAME, "orders"): {json_id},
        (TOPIC_RECORD_NAME, "other"): set(),
    }
    assert not is_registered(registry.state, "orders", KEY, avro)
    registry.run("delete_subject", "orders-value")
    assert not is_registered(registry.state, "orders", VALUE, avro)


@pytest.mark.parametrize("codec", [NONE, GZIP, SNAPPY, LZ4, ZSTD])
def test_the_first_bytes_of_keys_and_values_are_read_from_any_batch(codec: int) -> None:
    records: list[NewRecord] = [
        (None, b"\0\0\0\0\7value" * 50, [("header", b"x" * 200)], 1),
        (b"k", None, [], 2),
        (b"\0\0\0\1\0", b"\0\0\0", [("h", None)], 3),
        (b"", b"\1\0\0\0\7", [], 4),
    ]
    batch = encode_batch(records, codec=codec)
    prefixes = batch_prefixes(batch, 1 << 20)
    assert prefixes == [(key and key[:5], value and value[:5]) for key, value, _, _ in records]
    found = ids_of(prefixes, (VALUE,))
    assert found.ids == {VALUE: {7}} and [number for number, _ in found.errors] == [2, 3]
    assert [number for number, _ in ids_of(prefixes, (KEY,)).errors] == [1, 3]
    assert ids_of(prefixes, (KEY,)).ids == {KEY: {256}}


def test_errors_name_the_records_and_are_bounded() -> None:
    prefixes: list[RecordPrefix] = [(None, bytes([0, 0, 0, 0, number % 2])) for number in range(1_000)]
    errors = unregistered(prefixes, {VALUE: {1}})
    assert [number for number, _ in errors] == list(range(1, 200, 2))
    assert "schema id 1" in errors[0][1]
    assert len(ids_of([(None, b"x")] * 1_000, (VALUE,)).errors) == 100


def test_a_damaged_batch_is_corrupt_and_no_other_failure() -> None:
    batch = bytearray(encode_batch([(b"k", b"v" * 20, [], 1)]))
    for at in range(61, len(batch)):
        damaged = bytearray(batch)
        damaged[at] = 0xFF
        try:
            batch_prefixes(damaged, 1 << 20)
        except KafkaError as error:
            assert error.code.name == "corrupt_message"
