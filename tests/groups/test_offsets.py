"""Any log of commits, tombstones, transactional commits and markers gives the offsets that Kafka would have."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.groups.kafka_offsets import KafkaOffsets
from tests.groups.play import GROUP, PARTITION, Held, LogEntry, Marker, Play, load

from chronik.groups.offsets import Producer
from chronik.groups.records import CommittedOffset, offset_record
from chronik.wire.errors import ErrorCode

producers = st.sampled_from((Producer(7, 0), Producer(8, 0), Producer(9, 0)))
records = st.builds(
    lambda offset, partition: offset_record(
        GROUP, ("t", partition), None if offset is None else CommittedOffset(offset, -1, "", 0)
    ),
    st.none() | st.integers(0, 1_000) | st.integers(0, 1_000),
    st.integers(0, 1),
)
entries: st.SearchStrategy[LogEntry] = st.one_of(
    records, st.builds(Held, records, producers), st.builds(Marker, producers, st.booleans())
)


@settings(max_examples=1_000)
@given(st.lists(entries, max_size=12), st.lists(st.builds(Marker, producers, st.booleans()), max_size=3))
def test_offsets_are_those_of_kafka(log: list[LogEntry], later: list[Marker]) -> None:
    coordinator = Play(is_loaded=False).coordinator
    load(coordinator, PARTITION, log, Play().at)
    expected = KafkaOffsets(log)
    assert coordinator.unstable_partitions(GROUP) == expected.unstable(GROUP)
    for marker in later:
        coordinator.transaction_ended(PARTITION, *marker)
    expected = KafkaOffsets([*log, *later])
    error, committed = coordinator.committed(GROUP, None)
    assert error is ErrorCode.none
    assert {partition: each and each.offset for partition, each in committed.items()} == expected.of(GROUP)
    assert coordinator.unstable_partitions(GROUP) == expected.unstable(GROUP)
