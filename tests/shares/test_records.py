"""The records of `__share_group_state`: Kafka's bytes, and what a reader does with others."""

from __future__ import annotations

from uuid import UUID

import pytest

from chronik.shares.records import (
    SNAPSHOT,
    UPDATE,
    Snapshot,
    StateKey,
    UnreadableRecord,
    Update,
    read_key,
    read_snapshot,
    read_update,
    write_key,
    write_snapshot,
    write_update,
)
from chronik.shares.state import SharePartitionKey, StateBatch, is_share_key

TOPIC_ID = UUID("01020304-0506-0708-090a-0b0c0d0e0f10")
KEY = SharePartitionKey("queue", TOPIC_ID, 3)
BATCHES = (StateBatch(5, 9, 0, 1), StateBatch(10, 10, 2, 1))
SNAPSHOT_BYTES = bytes.fromhex(
    "0000" "00000007" "00000002" "00000004" "0000000000000005" "0000000000000064" "00000000000000c8"
    "03" "00000000000000050000000000000009" "00" "0001" "00" "000000000000000a000000000000000a" "02" "0001" "00"
    "01" "00" "04" "00000001"
)  # fmt: skip
UPDATE_BYTES = bytes.fromhex("00000000000700000004ffffffffffffffff0100")


def test_records_have_the_bytes_of_kafkas_schemas() -> None:
    snapshot = Snapshot(7, 2, 4, 5, BATCHES, 1, 100, 200)
    assert write_snapshot(snapshot) == SNAPSHOT_BYTES
    assert read_snapshot(SNAPSHOT_BYTES) == snapshot
    assert write_update(Update(7, 4, -1, ())) == UPDATE_BYTES
    assert read_update(UPDATE_BYTES) == Update(7, 4, -1, ())


def test_keys_have_the_bytes_of_kafkas_schemas() -> None:
    tail = b"\x00\x05queue" + TOPIC_ID.bytes + b"\x00\x00\x00\x03"
    for kind in (SNAPSHOT, UPDATE):
        assert write_key(kind, KEY) == bytes([0, kind]) + tail
        assert read_key(write_key(kind, KEY)) == StateKey(kind, KEY)
    assert read_key(b"\x00\x02" + tail) is None, "a kind of a later version"


@pytest.mark.parametrize("cut", range(1, len(SNAPSHOT_BYTES)))
def test_a_record_that_is_cut_short_is_unreadable(cut: int) -> None:
    with pytest.raises(UnreadableRecord):
        read_snapshot(SNAPSHOT_BYTES[:cut])


def test_coordinator_keys_are_written_as_kafka_writes_them() -> None:
    assert KEY.coordinator_key == "queue:AQIDBAUGBwgJCgsMDQ4PEA:3"
    assert is_share_key(KEY.coordinator_key) and is_share_key("a:b:" + KEY.coordinator_key)
    assert not is_share_key("queue") and not is_share_key("queue:AQID:3") and not is_share_key(":" + "A" * 22 + ":3")
