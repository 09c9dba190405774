"""The record format of `__consumer_offsets`, compared with hand-written bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chronik.groups.records import (
    CommittedOffset,
    GroupKey,
    GroupMetadata,
    MemberMetadata,
    OffsetKey,
    UnreadableRecord,
    group_partition,
    read_group_value,
    read_key,
    read_offset_value,
    subscribed_topics,
    write_group_key,
    write_group_value,
    write_offset_key,
    write_offset_value,
)

names = st.text(st.characters(codec="utf-8"), max_size=20)
int32s = st.integers(-(2**31), 2**31 - 1)
int64s = st.integers(-(2**63), 2**63 - 1)
offsets = st.builds(CommittedOffset, int64s, int32s, names, int64s)
members = st.builds(
    MemberMetadata,
    names,
    st.none() | names,
    names,
    names,
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**31 - 1),
    st.binary(max_size=20),
    st.binary(max_size=20),
)
groups = st.builds(
    GroupMetadata,
    names,
    int32s,
    st.none() | names,
    st.none() | names,
    int64s,
    st.lists(members, max_size=3).map(tuple),
)


@given(names, names, int32s)
def test_offset_key_round_trips(group: str, topic: str, partition: int) -> None:
    assert read_key(write_offset_key(group, topic, partition)) == OffsetKey(group, topic, partition)


@given(offsets)
def test_offset_value_round_trips(committed: CommittedOffset) -> None:
    assert read_offset_value(write_offset_value(committed)) == committed


@given(names)
def test_group_key_round_trips(group: str) -> None:
    assert read_key(write_group_key(group)) == GroupKey(group)


@given(groups)
def test_group_value_round_trips(group: GroupMetadata) -> None:
    assert read_group_value(write_group_value(group)) == group


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_decoded_or_refused(data: bytes) -> None:
    for read in (read_key, read_offset_value, read_group_value):
        try:
            read(data)
        except UnreadableRecord:
            continue
    subscribed_topics(data)


def test_offset_record_has_kafkas_layout() -> None:
    assert write_offset_key("g", "t", 3) == bytes.fromhex("0001 0001 67 0001 74 00000003")
    committed = CommittedOffset(5, 2, "m", 9)
    assert write_offset_value(committed) == bytes.fromhex("0003 0000000000000005 00000002 0001 6d 0000000000000009")


def test_group_record_has_kafkas_layout() -> None:
    assert write_group_key("g") == bytes.fromhex("0002 0001 67")
    member = MemberMetadata("m", None, "c", "/h", 6, 7, b"S", b"AB")
    group = GroupMetadata("consumer", 4, "range", "m", 8, (member,))
    assert write_group_value(group) == bytes.fromhex(
        "0003"
        "0008 636f6e73756d6572"
        "00000004"
        "0005 72616e6765"
        "0001 6d"
        "0000000000000008"
        "00000001"
        "0001 6d ffff 0001 63 0002 2f68 00000006 00000007 00000001 53 00000002 4142"
    )


@pytest.mark.parametrize(
    ("data", "committed"),
    [
        ("0000 0000000000000005 0001 6d 0000000000000009", CommittedOffset(5, -1, "m", 9)),
        ("0001 0000000000000005 0001 6d 0000000000000009 000000000000000a", CommittedOffset(5, -1, "m", 9)),
        ("0002 0000000000000005 0001 6d 0000000000000009", CommittedOffset(5, -1, "m", 9)),
    ],
)
def test_older_offset_values_are_read(data: str, committed: CommittedOffset) -> None:
    assert read_offset_value(bytes.fromhex(data)) == committed


@pytest.mark.parametrize(
    ("data", "state_since_ms", "rebalance_timeout_ms"),
    [
        ("0000 0001 63 00000004 ffff ffff 00000001 0001 6d 0001 63 0001 68 00000007 00000000 00000000", -1, 7),
        ("0001 0001 63 00000004 ffff ffff 00000001 0001 6d 0001 63 0001 68 00000006 00000007 00000000 00000000", -1, 6),
        (
            "0002 0001 63 00000004 ffff ffff 0000000000000008 00000001"
            "0001 6d 0001 63 0001 68 00000006 00000007 00000000 00000000",
            8,
            6,
        ),
    ],
)
def test_older_group_values_are_read(data: str, state_since_ms: int, rebalance_timeout_ms: int) -> None:
    member = MemberMetadata("m", None, "c", "h", rebalance_timeout_ms, 7, b"", b"")
    assert read_group_value(bytes.fromhex(data)) == GroupMetadata("c", 4, None, None, state_since_ms, (member,))


@pytest.mark.parametrize(
    ("group", "partition"),
    # Java: Math.abs("...".hashCode()) % 50, as Kafka assigns groups to its 50 partitions.
    [("", 0), ("test", 48), ("hello world", 2), ("my-group", 12), ("gruppe-ü-😀", 16), ("polygenelubricants", 0)],
)
def test_group_maps_to_the_same_partition_as_in_kafka(group: str, partition: int) -> None:
    assert group_partition(group, 50) == partition


@given(st.text(max_size=30), st.integers(1, 100))
def test_group_partition_is_within_the_partition_count(group: str, count: int) -> None:
    assert 0 <= group_partition(group, count) < count
