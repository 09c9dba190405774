"""The records of the transaction topic: read back as written, and as Kafka writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chronik.transactions.records import UnreadableRecord, read_key, read_value, write_key, write_value
from chronik.transactions.transaction import TransactionMetadata, TransactionState

INT64 = st.integers(-1, 2**63 - 1)

METADATA = st.builds(
    TransactionMetadata,
    producer_id=INT64,
    producer_epoch=st.integers(-1, 32_767),
    timeout_ms=st.integers(0, 2**31 - 1),
    state=st.sampled_from(TransactionState),
    updated_ms=INT64,
    partitions=st.frozensets(st.tuples(st.text(max_size=200), st.integers(0, 2**31 - 1)), max_size=20),
    start_ms=INT64,
    previous_producer_id=INT64,
    next_producer_id=INT64,
    client_version=st.integers(0, 2),
)


@given(METADATA, st.text(max_size=300))
def test_records_are_read_as_they_were_written(metadata: TransactionMetadata, name: str) -> None:
    assert read_value(write_value(metadata)) == metadata
    assert read_key(write_key(name)) == name


@given(METADATA, st.integers(0, 400))
def test_truncated_value_is_unreadable(metadata: TransactionMetadata, length: int) -> None:
    value = write_value(metadata)
    if length < len(value):
        with pytest.raises(UnreadableRecord):
            read_value(value[:length])


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_unreadable(data: bytes) -> None:
    for read in (read_key, read_value):
        try:
            read(data)
        except UnreadableRecord:
            continue


def test_version_0_of_a_value_is_read() -> None:
    topic = b"\x00\x06orders" + b"\x00\x00\x00\x02" + b"\x00\x00\x00\x00" + b"\x00\x00\x00\x07"
    value = (
        b"\x00\x00"
        + (42).to_bytes(8, "big")
        + (3).to_bytes(2, "big")
        + (60_000).to_bytes(4, "big")
        + b"\x01"
        + b"\x00\x00\x00\x01"
        + topic
        + (1_700_000_000_001).to_bytes(8, "big")
        + (1_700_000_000_000).to_bytes(8, "big")
    )
    assert read_value(value) == TransactionMetadata(
        42,
        3,
        60_000,
        TransactionState.ONGOING,
        1_700_000_000_001,
        frozenset({("orders", 0), ("orders", 7)}),
        1_700_000_000_000,
    )


def test_version_1_of_a_value_has_kafkas_bytes() -> None:
    metadata = TransactionMetadata(
        42,
        3,
        60_000,
        TransactionState.PREPARE_COMMIT,
        1,
        frozenset({("t", 5)}),
        0,
        previous_producer_id=41,
        client_version=2,
    )
    assert write_value(metadata).hex() == (
        "0001"
        "000000000000002a"
        "0003"
        "0000ea60"
        "02"
        "02" "0274" "02" "00000005" "00"
        "0000000000000001"
        "0000000000000000"
        "02" "00" "08" "0000000000000029" "02" "02" "0002"
    )  # fmt: skip


def test_keys_of_other_kinds_are_skipped() -> None:
    assert read_key(b"\x00\x01\x00\x01x") is None
