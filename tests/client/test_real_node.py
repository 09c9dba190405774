"""The client against a real node: raw batches, offsets, groups."""

from __future__ import annotations

import pytest
from tests.support.node import Node

from chronik.client.batches import Batches
from chronik.client.cluster import Cluster
from chronik.client.groups import Groups
from chronik.client.topics import EARLIEST, LATEST, LOG_END_READER, Topics
from chronik.wire.batch import decode_batch, encode_batch, read_batch_header
from chronik.wire.errors import ErrorCode, KafkaError


def cluster_of(node: Node) -> Cluster:
    return Cluster([("127.0.0.1", node.kafka_port)])


async def test_fetch_returns_batches_as_they_were_appended(shared_node: Node) -> None:
    async with cluster_of(shared_node) as cluster:
        topics, batches = Topics(cluster), Batches(cluster)
        await topics.create("client-batches", 2, None, {})
        records = [(b"k", b"v%d" % number, [("h", None)], 1_700_000_000_000 + number) for number in range(5)]
        assert await batches.append("client-batches", 1, encode_batch(records)) == 0
        assert await batches.append("client-batches", 1, encode_batch(records)) == 5
        fetched = await batches.fetch("client-batches", 1, 0)
        assert (fetched.high_watermark, fetched.log_start_offset) == (10, 0)
        first = read_batch_header(fetched.records)
        read = [*decode_batch(fetched.records), *decode_batch(fetched.records, first.size_bytes)]
        assert [record.offset for record in read] == list(range(10))
        assert [record.value for record in read] == [value for _, value, _, _ in records] * 2
        empty = await batches.fetch("client-batches", 0, 0, max_wait_ms=1)
        assert len(empty.records) == 0
        with pytest.raises(KafkaError) as refused:
            await batches.fetch("client-batches", 1, 11, max_wait_ms=1)
        assert refused.value.code == ErrorCode.offset_out_of_range


async def test_offsets_are_found_by_position_and_by_timestamp(shared_node: Node) -> None:
    async with cluster_of(shared_node) as cluster:
        topics = Topics(cluster)
        await topics.create("client-offsets", 1, None, {})
        batch = encode_batch([(None, b"v", [], 1_700_000_000_000 + 1000 * number) for number in range(3)])
        await Batches(cluster).append("client-offsets", 0, batch)
        asked = {
            place: (await topics.offsets("client-offsets", place))[0].offset
            for place in (EARLIEST, LATEST, 1_700_000_001_000, 1_800_000_000_000)
        }
        assert list(asked.values()) == [0, 3, 1, -1]
        assert (await topics.offsets("client-offsets", LATEST, reader=LOG_END_READER))[0].offset == 3


async def test_offsets_of_an_empty_group_can_be_set_and_deleted(shared_node: Node) -> None:
    async with cluster_of(shared_node) as cluster:
        groups = Groups(cluster)
        await Topics(cluster).create("client-groups", 2, None, {})
        offsets = {("client-groups", 0): 0, ("client-groups", 1): 7}
        assert await groups.committed("client-group") == {}
        await groups.commit("client-group", offsets)
        assert await groups.committed("client-group") == offsets
        assert (await groups.describe("client-group")).state == "Empty"
        assert "client-group" in [group.group for group in await groups.list()]
        await groups.delete("client-group")
        assert (await groups.describe("client-group")).state == "Dead"


async def test_single_configs_can_be_set_and_reset(shared_node: Node) -> None:
    async with cluster_of(shared_node) as cluster:
        topics = Topics(cluster)
        await topics.create("client-configs", 1, None, {"retention.ms": "1000", "segment.bytes": "1048576"})
        await topics.alter_configs("client-configs", {"retention.ms": None, "max.message.bytes": "5000"})
        own = {entry.name: entry.value for entry in await topics.configs("client-configs") if not entry.is_default}
        assert own == {"segment.bytes": "1048576", "max.message.bytes": "5000"}
