"""The records of consumer groups: Kafka's bytes, and what is read back."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chronik.groups import consumer_records as codec
from chronik.groups.consumer_member import ClassicMetadata, CurrentAssignment, MemberMetadata, MemberState
from chronik.groups.consumer_records import ResolvedExpression
from chronik.groups.image_records import ImageKey, Kind, epoch_record, read_epoch, read_target, target_record, tombstone
from chronik.groups.records import Record, UnreadableRecord
from chronik.groups.replay import read_any_key
from chronik.groups.topics import Topic

TOPIC_ID = UUID("11111111-2222-3333-4444-555555555555")

GOLDEN: list[tuple[Record, str, str]] = [
    (epoch_record(Kind.GROUP, "g", 7), "0003 0001 67", "0000 00000007 00"),
    (epoch_record(Kind.TARGET, "g", 7), "0006 0001 67", "0000 00000007 00"),
    (
        target_record(Kind.TARGET_MEMBER, "g", "m", frozenset({(TOPIC_ID, 1), (TOPIC_ID, 0)})),
        "0007 0001 67 0001 6d",
        "0000 02 11111111222233334444555555555555 03 00000000 00000001 00 00",
    ),
    (
        codec.current_record(
            "g",
            "m",
            CurrentAssignment(3, 2, MemberState.UNREVOKED_PARTITIONS, frozenset(), frozenset({(TOPIC_ID, 5)})),
        ),
        "0008 0001 67 0001 6d",
        "0000 00000003 00000002 01 01 02 11111111222233334444555555555555 02 00000005 00 00",
    ),
    (
        codec.member_record("g", "m", MemberMetadata("i", None, "c", "/h", ("t",), "", 100, "range")),
        "0005 0001 67 0001 6d",
        "0000 02 69 00 02 63 03 2f68 02 02 74 00 00000064 06 72616e6765 00",
    ),
    (
        codec.member_record("g", "m", MemberMetadata(classic=ClassicMetadata(9, (("p", b"\x01\x02"),)))),
        "0005 0001 67 0001 6d",
        "0000 00 00 01 01 01 00 ffffffff 00 01 00 0d 01 00000009 02 02 70 03 0102 00 00",
    ),
    (
        codec.partitions_record("g", [Topic("t", TOPIC_ID, (("r",), ()))]),
        "0004 0001 67",
        "0000 02 11111111222233334444555555555555 02 74 00000002 03 00000000 02 02 72 00 00000001 01 00 00 00",
    ),
    (
        codec.expression_record("g", "t.*", ResolvedExpression(("t",), 4, 5)),
        "0010 0001 67 0003 742e2a",
        "0000 02 02 74 0000000000000004 0000000000000005 00",
    ),
]


@pytest.mark.parametrize(("record", "key", "value"), GOLDEN)
def test_a_record_has_the_bytes_of_kafkas_format(record: Record, key: str, value: str) -> None:
    assert record[0].hex() == key.replace(" ", "")
    assert record[1] is not None
    assert record[1].hex() == value.replace(" ", "")


def test_keys_are_read_back_by_their_kind() -> None:
    kinds = {Kind.GROUP: "", Kind.PARTITIONS: "", Kind.MEMBER: "m", Kind.TARGET: "", Kind.TARGET_MEMBER: "m"}
    for kind, detail in {**kinds, Kind.CURRENT_MEMBER: "m", Kind.EXPRESSION: "t.*"}.items():
        key, value = tombstone(kind, "g", detail)
        assert read_any_key(key) == ImageKey(kind, "g", detail)
        assert value is None
    assert read_any_key(b"\x00\x11\x00\x01g") is None, "a streams group"


texts = st.text(max_size=8)
assignments = st.frozensets(st.tuples(st.uuids(), st.integers(0, 99)), max_size=6)


@given(
    st.builds(
        MemberMetadata,
        st.none() | texts,
        st.none() | texts,
        texts,
        texts,
        st.lists(texts, max_size=3).map(tuple),
        texts,
        st.integers(-1, 2**31 - 1),
        st.none() | texts,
        st.none()
        | st.builds(
            ClassicMetadata,
            st.integers(0, 2**31 - 1),
            st.lists(st.tuples(texts, st.binary(max_size=200)), max_size=3).map(tuple),
        ),
    )
)
def test_member_metadata_is_read_back(member: MemberMetadata) -> None:
    _, value = codec.member_record("g", "m", member)
    assert value is not None
    assert codec.read_member(value) == member


@given(
    st.builds(
        CurrentAssignment,
        st.integers(-2, 99),
        st.integers(-2, 99),
        st.sampled_from(MemberState),
        assignments,
        assignments,
    )
)
def test_current_and_target_assignments_are_read_back(current: CurrentAssignment) -> None:
    _, value = codec.current_record("g", "m", current)
    assert value is not None
    assert codec.read_current(value) == current
    _, value = target_record(Kind.TARGET_MEMBER, "g", "m", current.assigned)
    assert value is not None
    assert read_target(value) == current.assigned


def test_topics_and_expressions_are_read_back() -> None:
    topics = [Topic("t", TOPIC_ID, (("a", "b"), ())), Topic("u", UUID(int=1), ((), ()))]
    _, value = codec.partitions_record("g", topics)
    assert value is not None
    assert codec.read_partitions(value) == topics
    _, value = codec.expression_record("g", ".*", ResolvedExpression(("t", "u"), 2**40, 9))
    assert value is not None
    assert codec.read_expression(value) == ResolvedExpression(("t", "u"), 2**40, 9)


def test_newer_tagged_fields_are_skipped_and_other_bytes_refused() -> None:
    assert read_epoch(b"\x00\x00\x00\x00\x00\x07\x01\x00\x08" + bytes(8)) == 7, "the metadata hash of Kafka 4.1"
    for value in (b"", b"\x00\x01\x00\x00\x00\x07\x00", b"\x00\x00\x00"):
        with pytest.raises(UnreadableRecord):
            read_epoch(value)
    for value in (b"\x00\x00\xff\xff\xff\xff\x0f", b"\x00\x00\x02\x11", b"\x00\x00\x80"):
        with pytest.raises(UnreadableRecord):
            read_target(value)
    with pytest.raises(UnreadableRecord):
        codec.read_current(b"\x00\x00" + bytes(8) + b"\x7f\x01\x01\x00")
