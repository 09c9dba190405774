"""The records of share groups, written and read back."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chronik.groups import share_records as codec
from chronik.groups.image_records import ImageKey, Kind, tombstone
from chronik.groups.records import UnreadableRecord
from chronik.groups.replay import read_any_key
from chronik.groups.share_member import ShareAssignment, ShareMetadata
from chronik.groups.share_topics import SharedTopic, ShareTopics

texts = st.text(max_size=20)
ids = st.uuids()
indexes = st.integers(0, 2**31 - 1)
epochs = st.integers(0, 2**31 - 1)
topics = st.dictionaries(ids, st.builds(SharedTopic, texts, st.frozensets(indexes, min_size=1, max_size=4)), max_size=3)


@given(st.builds(ShareMetadata, st.none() | texts, texts, texts, st.lists(texts, max_size=3).map(tuple)))
def test_a_member_is_read_back(member: ShareMetadata) -> None:
    key, value = codec.share_member_record("g", "m", member)
    assert read_any_key(key) == ImageKey(Kind.SHARE_MEMBER, "g", "m")
    assert value is not None
    assert codec.read_share_member(value) == member


@given(st.builds(ShareAssignment, epochs, epochs, st.frozensets(st.tuples(ids, indexes), max_size=5)))
def test_a_current_assignment_is_read_back(current: ShareAssignment) -> None:
    _, value = codec.share_current_record("g", "m", current)
    assert value is not None
    assert codec.read_share_current(value) == current


@given(st.builds(ShareTopics, topics, topics, st.dictionaries(ids, texts, max_size=3)))
def test_the_state_of_partitions_is_read_back(state: ShareTopics) -> None:
    _, value = codec.share_state_record("g", state)
    assert value is not None
    assert codec.read_share_state(value) == state


@given(epochs, st.integers(-(2**63), 2**63 - 1))
def test_the_group_is_read_back(epoch: int, metadata_hash: int) -> None:
    _, value = codec.share_group_record("g", codec.ShareGroupValue(epoch, metadata_hash))
    assert value is not None
    assert codec.read_share_group(value) == (epoch, metadata_hash)


def test_the_records_have_the_bytes_that_kafka_writes() -> None:
    topic_id = UUID(int=1)
    state = ShareTopics({}, {topic_id: SharedTopic("t", frozenset({0}))}, {UUID(int=2): "u"})
    key, value = codec.share_state_record("g", state)
    assert key == b"\x00\x0f\x00\x01g"
    expected = b"\x00\x00" + b"\x01" + b"\x02" + topic_id.bytes + b"\x02t" + b"\x02\x00\x00\x00\x00" + b"\x00"
    assert value == expected + b"\x02" + UUID(int=2).bytes + b"\x02u" + b"\x00" + b"\x00"
    key, value = codec.share_group_record("g", codec.ShareGroupValue(3, 4))
    assert (key, value) == (b"\x00\x0b\x00\x01g", b"\x00\x00" + bytes([0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 4]) + b"\x00")


def test_a_tombstone_names_the_member() -> None:
    key, value = tombstone(Kind.SHARE_CURRENT_MEMBER, "g", "m")
    assert (key, value) == (b"\x00\x0e\x00\x01g\x00\x01m", None)


@given(st.binary(max_size=60))
def test_damaged_values_are_unreadable_or_read_but_never_crash(value: bytes) -> None:
    for read in (codec.read_share_member, codec.read_share_current, codec.read_share_state, codec.read_share_group):
        try:
            read(value)
        except UnreadableRecord:
            continue


def test_a_value_of_a_later_version_is_unreadable() -> None:
    with pytest.raises(UnreadableRecord):
        codec.read_share_group(b"\x00\x01" + bytes(13))
