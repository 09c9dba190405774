"""Offsets that clients request: ListOffsets, and committed offsets of groups."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
from tests.node.support_wire import TIMESTAMP_MS, WireClient, batch, connect, unique
from tests.support.eventually import eventually
from tests.support.node import Node

from chronik.wire.api import ApiKey
from chronik.wire.batch import encode_batch
from chronik.wire.errors import ErrorCode

LATEST = -1
EARLIEST = -2
MAX_TIMESTAMP = -3


@pytest.fixture
def client(shared_node: Node) -> Iterator[WireClient]:
    with connect(shared_node) as client:
        yield client


def timed(*timestamps_ms: int, codec: int = 0) -> bytes:
    return encode_batch([(b"k", b"%d" % time_ms, (), time_ms) for time_ms in timestamps_ms], codec=codec)


# -- ListOffsets -----------------------------------------------------------------------------------------------------


def test_list_offsets_returns_earliest_and_latest_of_empty_and_filled_partitions(client: WireClient) -> None:
    topic = client.new_topic()
    assert (client.offset_at(topic, EARLIEST), client.offset_at(topic, LATEST)) == (0, 0)
    client.append(topic, b"a", b"b", b"c")
    assert (client.offset_at(topic, EARLIEST), client.offset_at(topic, LATEST)) == (0, 3)


@pytest.mark.parametrize("version", range(1, 12))
def test_every_version_of_list_offsets_returns_the_end_offset(client: WireClient, version: int) -> None:
    topic = client.new_topic()
    client.append(topic, b"a", b"b", b"c")
    assert client.offset_at(topic, LATEST, version=version) == 3


@pytest.mark.parametrize(("timestamp", "known_from"), [(-3, 7), (-4, 8), (-5, 9), (-6, 11), (-7, 99)])
def test_a_special_timestamp_needs_the_version_that_has_it(client: WireClient, timestamp: int, known_from: int) -> None:
    topic = client.new_topic()
    client.append(topic, b"a", b"b")
    for version in (1, known_from - 1, known_from):
        if version > 11:
            continue
        partition = {"partition_index": 0, "timestamp": timestamp}
        values = {"replica_id": -1, "topics": [{"name": topic, "partitions": [partition]}]}
        found = client.call(ApiKey.LIST_OFFSETS, version, values).topics[0].partitions[0]
        if version < known_from:
            assert (found.error_code, found.offset) == (ErrorCode.unsupported_version, -1)
        else:
            assert (found.error_code, found.offset) == (0, {-3: 1, -4: 0, -5: -1, -6: -1}[timestamp])


def test_list_offsets_v0_which_burrow_uses_returns_a_list(client: WireClient) -> None:
    topic = client.new_topic()
    client.append(topic, b"a", b"b", b"c")

    def asked(timestamp: int, offsets_max: int) -> bytes:
        name = struct.pack(">ih", 1, len(topic)) + topic.encode()
        partition = struct.pack(">iiqi", 1, 0, timestamp, offsets_max)
        sent = client.send(ApiKey.LIST_OFFSETS, 0, struct.pack(">i", -1) + name + partition)
        answer = client.answer(ApiKey.LIST_OFFSETS, 0, sent)
        assert answer.startswith(name + struct.pack(">ii", 1, 0))
        return answer[len(name) + 8 :]

    assert asked(LATEST, 1) == struct.pack(">hiq", ErrorCode.none, 1, 3)
    assert asked(EARLIEST, 1) == struct.pack(">hiq", ErrorCode.none, 1, 0)
    assert asked(LATEST, 0) == struct.pack(">hi", ErrorCode.none, 0)
    assert asked(TIMESTAMP_MS, 1) == struct.pack(">hi", ErrorCode.unsupported_version, 0)


def test_earliest_follows_delete_records(client: WireClient) -> None:
    topic = client.new_topic()
    for value in (b"a", b"b", b"c"):
        client.append(topic, value)
    wanted = {"name": topic, "partitions": [{"partition_index": 0, "offset": 2}]}
    deleted = client.call(ApiKey.DELETE_RECORDS, 2, {"topics": [wanted], "timeout": 10_000})
    assert deleted.topics[0].partitions[0].low_watermark == 2
    assert (client.offset_at(topic, EARLIEST), client.offset_at(topic, LATEST)) == (2, 3)
    assert client.fetch_one(topic, 1).error_code == ErrorCode.offset_out_of_range


@pytest.mark.parametrize("codec", range(5), ids=["none", "gzip", "snappy", "lz4", "zstd"])
def test_a_timestamp_lookup_returns_the_first_record_that_is_not_older(client: WireClient, codec: int) -> None:
    topic = client.new_topic()
    start = TIMESTAMP_MS
    for first in range(0, 12, 4):
        times = [start + 1000 * (first + step) for step in range(4)]
        assert client.produce(topic, timed(*times, codec=codec)).error_code == 0
    for time_ms, expected in ((0, 0), (start, 0), (start + 1, 1), (start + 5000, 5), (start + 11_000, 11)):
        found = client.list_offset(topic, time_ms)
        assert (found.offset, found.timestamp) == (expected, start + 1000 * expected)
    assert client.offset_at(topic, start + 11_001) == -1


@pytest.mark.parametrize("codec", range(5), ids=["none", "gzip", "snappy", "lz4", "zstd"])
def test_max_timestamp_returns_the_offset_of_the_record_itself(client: WireClient, codec: int) -> None:
    topic = client.new_topic()
    assert client.offset_at(topic, MAX_TIMESTAMP) == -1
    start = TIMESTAMP_MS
    client.produce(topic, timed(start, start + 1, codec=codec))
    # The newest record is in the middle of its batch, and that batch is not the last one.
    client.produce(topic, timed(start + 5, start + 900, start + 7, codec=codec))
    client.produce(topic, timed(start + 20, start + 21, codec=codec))
    found = client.list_offset(topic, MAX_TIMESTAMP)
    assert (found.offset, found.timestamp) == (3, start + 900)


def test_end_offsets_never_decrease_across_restarts(node: Node) -> None:
    ends: list[int] = []
    with connect(node) as client:
        topic = client.new_topic()
    for stop in (node.terminate, node.kill):
        with connect(node) as client:
            ends.append(client.offset_at(topic, LATEST))
            for _ in range(5):
                client.append(topic, b"x", b"y")
            ends.append(client.offset_at(topic, LATEST))
        stop()
        node.start()
    with connect(node) as client:
        ends.append(client.offset_at(topic, LATEST))
        assert [record.offset for record in client.records(topic)] == list(range(20))
    assert ends == [0, 10, 10, 20, 20]


def test_the_log_start_offset_of_delete_records_survives_a_crash(node: Node) -> None:
    with connect(node) as client:
        topic = client.new_topic()
        for value in (b"a", b"b", b"c"):
            client.append(topic, value)
        wanted = {"name": topic, "partitions": [{"partition_index": 0, "offset": -1}]}
        client.call(ApiKey.DELETE_RECORDS, 2, {"topics": [wanted], "timeout": 10_000})
    node.kill()
    node.start()
    with connect(node) as client:
        assert (client.offset_at(topic, EARLIEST), client.offset_at(topic, LATEST)) == (3, 3)
        assert client.append(topic, b"d") == 3


# -- committed offsets -----------------------------------------------------------------------------------------------


def committed(client: WireClient, group: str, topics: list[dict[str, object]] | None, version: int) -> object:
    values: dict[str, object] = {"group_id": group, "topics": topics}
    if version >= 8:
        values = {"groups": [{"group_id": group, "topics": topics, "member_id": None, "member_epoch": -1}]}
    answer = client.call(ApiKey.OFFSET_FETCH, version, values)
    return answer.groups[0] if version >= 8 else answer


def coordinated(client: WireClient, group: str) -> str:
    """Wait until the group has a coordinator and return the group."""
    eventually(
        lambda: client.call(ApiKey.FIND_COORDINATOR, 2, {"key": group, "key_type": 0}).error_code is ErrorCode.none,
        what="the group has a coordinator",
    )
    return group


def commit(client: WireClient, group: str, topic: str, partition: int, offset: int) -> None:
    wanted = {"partition_index": partition, "committed_offset": offset, "committed_metadata": f"at {offset}"}
    answer = client.call(
        ApiKey.OFFSET_COMMIT,
        7,
        {
            "group_id": group,
            "generation_id_or_member_epoch": -1,
            "topics": [{"name": topic, "partitions": [wanted]}],
        },
    )
    assert answer.topics[0].partitions[0].error_code is ErrorCode.none


@pytest.mark.parametrize("version", range(1, 10))
def test_offset_fetch_of_an_unknown_group_returns_minus_1_without_an_error(client: WireClient, version: int) -> None:
    group = coordinated(client, unique("unknown"))
    topic = client.new_topic()
    answer = committed(client, group, [{"name": topic, "partition_indexes": [0, 1]}], version)
    if version >= 2:
        assert answer.error_code is ErrorCode.none  # type: ignore[attr-defined]
    partitions = answer.topics[0].partitions  # type: ignore[attr-defined]
    assert [(p.partition_index, p.committed_offset, p.error_code) for p in partitions] == [
        (0, -1, ErrorCode.none),
        (1, -1, ErrorCode.none),
    ]


@pytest.mark.parametrize("version", range(2, 10))
def test_offset_fetch_with_null_topics_returns_all_offsets_of_the_group(client: WireClient, version: int) -> None:
    group = coordinated(client, unique("group"))
    topic = client.new_topic(partitions=3)
    assert committed(client, group, None, version).topics == ()  # type: ignore[attr-defined]
    commit(client, group, topic, 0, 7)
    commit(client, group, topic, 2, 9)
    topics = committed(client, group, None, version).topics  # type: ignore[attr-defined]
    found = {(t.name, p.partition_index): (p.committed_offset, p.metadata) for t in topics for p in t.partitions}
    assert found == {(topic, 0): (7, "at 7"), (topic, 2): (9, "at 9")}


def test_a_recreated_topic_does_not_inherit_committed_offsets(client: WireClient) -> None:
    group = coordinated(client, unique("group"))
    topic = client.new_topic()
    commit(client, group, topic, 0, 5)
    client.call(ApiKey.DELETE_TOPICS, 4, {"topic_names": [topic], "timeout": 10_000})
    client.create_topic(topic)

    def is_gone() -> bool:
        answer = committed(client, group, [{"name": topic, "partition_indexes": [0]}], 7)
        return bool(answer.topics[0].partitions[0].committed_offset == -1)  # type: ignore[attr-defined]

    eventually(is_gone, what="the deleted topic's committed offset is gone")


def test_a_batch_with_unordered_timestamps_is_found_by_its_newest(client: WireClient) -> None:
    topic = client.new_topic()
    client.produce(topic, timed(TIMESTAMP_MS + 100, TIMESTAMP_MS))
    client.produce(topic, batch(b"later", timestamp_ms=TIMESTAMP_MS + 50))
    assert client.offset_at(topic, TIMESTAMP_MS + 60) == 0
    assert client.offset_at(topic, TIMESTAMP_MS + 101) == -1
