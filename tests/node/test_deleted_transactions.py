"""DeleteRecords inside and past an open transaction: what read_committed consumers see, on each leader and later run.

Each batch fills a segment, and retention runs often: the records that DeleteRecords hides are removed from the disk.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.node.cluster_harness import LocalNodes
from tests.node.support_transactions import PAUSE_S, TransactionalClient, leader
from tests.node.test_read_committed import visible
from tests.node.test_transactional_cluster import FETCH_VERSION, SETTINGS, TOPIC, send
from tests.support.eventually import until

from chronik.node.broker import Broker
from chronik.wire.api import ApiKey
from chronik.wire.batch import encode_batch, read_batch_header
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.fetch import (
    FetchPartition,
    FetchPartitionResponse,
    FetchRequest,
    FetchTopic,
    read_fetch_response,
    write_fetch_request,
)

SEGMENT_BYTES = 1024
TIMEOUT_S = 10.0


def filling(name: bytes) -> bytes:
    return name.ljust(SEGMENT_BYTES, b".")


async def make_topic(nodes: LocalNodes, through: Broker) -> None:
    topic = {
        "name": TOPIC,
        "num_partitions": 1,
        "replication_factor": 3,
        "configs": [
            {"name": "segment.bytes", "value": str(SEGMENT_BYTES)},
            {"name": "retention.ms", "value": "-1"},
        ],
    }
    values = {"topics": [topic], "timeout": 10_000, "validate_only": False}
    assert (await nodes.administer(through, ApiKey.CREATE_TOPICS, values)).topics[0].error_code is ErrorCode.none


async def leading(nodes: LocalNodes) -> Broker:
    """Return the leader once its replica serves."""

    def serves() -> Broker | None:
        broker = leader(nodes, TOPIC, 0)
        try:
            return broker if broker is not None and broker.host.require_leader(TOPIC, 0).leader is not None else None
        except KafkaError:
            return None

    found: Broker = await until(serves)
    return found


async def produce_plain(nodes: LocalNodes, name: bytes) -> None:
    batch = encode_batch([(None, filling(name), [], 1)])
    await (await leading(nodes)).host.append_internal(TOPIC, 0, batch, TIMEOUT_S)


async def delete_below(nodes: LocalNodes, offset: int) -> int:
    client = await nodes.client(await leading(nodes))
    topic = {"name": TOPIC, "partitions": [{"partition_index": 0, "offset": offset}]}
    answer = await client.call(ApiKey.DELETE_RECORDS, {"topics": [topic], "timeout": 10_000})
    client.close()
    (partition,) = answer.topics[0].partitions
    assert partition.error_code is ErrorCode.none
    return int(partition.low_watermark)


async def fetch_from(nodes: LocalNodes, offset: int) -> FetchPartitionResponse:
    client = await nodes.client(await leading(nodes))
    fetch = FetchRequest(
        topics=[FetchTopic(TOPIC, None, [FetchPartition(0, -1, offset, -1, -1, 1 << 20)])], isolation_level=1
    )
    body = await client.request(ApiKey.FETCH, FETCH_VERSION, write_fetch_request(FETCH_VERSION, fetch))
    client.close()
    return read_fetch_response(FETCH_VERSION, body).topics[0][2][0]


async def shown(nodes: LocalNodes, offset: int, end_offset: int) -> tuple[int, list[bytes], list[tuple[int, int]]]:
    """Return the last stable offset, the names of visible records, and the aborted list, at this high watermark."""
    while (response := await fetch_from(nodes, offset)).high_watermark != end_offset:
        await asyncio.sleep(PAUSE_S)
    stable, records, aborted = response.last_stable_offset, b"", []
    while offset < stable:
        # One response has the records of one segment.
        response = await fetch_from(nodes, offset)
        assert response.error_code == 0 and response.records
        records += bytes(response.records)
        aborted += [each for each in response.aborted_transactions or () if each not in aborted]
        offset = _end_of(response.records)
    whole = replace(response, records=records, aborted_transactions=aborted)
    return stable, [bytes(value or b"").rstrip(b".") for value in visible(whole)], aborted


def _end_of(records: Any) -> int:
    at = end_offset = 0
    while at < len(records):
        header = read_batch_header(records, at)
        at, end_offset = at + header.size_bytes, header.last_offset + 1
    return end_offset


async def removed_below(nodes: LocalNodes, offset: int) -> None:
    """Wait until every node's log begins at the offset and has no closed segment that ends there or below."""

    def is_removed(broker: Broker) -> bool:
        partition = broker.partition(TOPIC, 0)
        if partition is None or partition.log_start_offset != offset:
            return False
        _, *later = [each.base_offset for each in partition.log._segments.all]
        return not later or later[0] > offset

    await until(lambda: all(map(is_removed, nodes.brokers.values())), f"no segment below {offset} is left")


async def replace_leader(nodes: LocalNodes) -> None:
    """Kill the leader, and start it again when another node leads."""
    killed = await leading(nodes)
    await nodes.kill(killed)
    await leading(nodes)
    await nodes.start(killed.node_id)
    await in_sync(nodes)


async def restart_all(nodes: LocalNodes) -> None:
    for broker in list(nodes.brokers.values()):
        await nodes.kill(broker)
    await nodes.start_all()
    await in_sync(nodes)


async def in_sync(nodes: LocalNodes) -> None:
    def replicas() -> int:
        image = next(iter(nodes.brokers.values())).image.partition(TOPIC, 0)
        return 0 if image is None else len(image.isr)

    await until(lambda: replicas() == 3)


@pytest.mark.parametrize("is_commit", [True, False])
async def test_deleted_records_of_an_open_transaction(tmp_path: Path, is_commit: bool) -> None:
    async with LocalNodes(tmp_path, retention_check_interval_ms=50, **SETTINGS) as nodes:
        brokers = await nodes.start_all()
        await make_topic(nodes, brokers[0])
        early, client = TransactionalClient(nodes, "early"), TransactionalClient(nodes, "payments")
        for each in (early, client):
            assert await each.init() is ErrorCode.none
        aborted_id = early.producer.producer_id
        await send(nodes, early, 0, filling(b"aborted"), 0)
        assert await early.end(commit=False) is ErrorCode.none
        await shown(nodes, 0, 2)
        await send(nodes, client, 0, filling(b"first"), 0)
        await produce_plain(nodes, b"plain-3")
        await send(nodes, client, 0, filling(b"second"), 1)
        await produce_plain(nodes, b"plain-5")
        assert await shown(nodes, 0, 6) == (2, [], [(aborted_id, 0)])

        # Inside the transaction: its beginning is gone, and what follows is still undecided.
        assert await delete_below(nodes, 3) == 3
        await removed_below(nodes, 3)
        assert (await fetch_from(nodes, 0)).error_code == ErrorCode.offset_out_of_range
        assert await shown(nodes, 3, 6) == (3, [], [])
        await replace_leader(nodes)
        assert await shown(nodes, 3, 6) == (3, [], [])

        # Past all of its records: it is still open, and withholds what follows.
        assert await delete_below(nodes, -1) == 6
        await removed_below(nodes, 6)
        await produce_plain(nodes, b"plain-6")
        assert await shown(nodes, 6, 7) == (6, [], [])
        await restart_all(nodes)
        assert await shown(nodes, 6, 7) == (6, [], [])
        await send(nodes, client, 0, filling(b"third"), 2)
        assert await shown(nodes, 6, 8) == (6, [], [])

        producer_id = client.producer.producer_id
        assert await client.end(commit=is_commit) is ErrorCode.none
        expected: tuple[int, list[bytes], Any]
        if is_commit:
            expected = (9, [b"plain-6", b"third"], [])
        else:
            expected = (9, [b"plain-6"], [(producer_id, 2)])
        assert await shown(nodes, 6, 9) == expected
        await replace_leader(nodes)
        assert await shown(nodes, 6, 9) == expected
        await restart_all(nodes)
        assert await shown(nodes, 6, 9) == expected
        # Past the marker, nothing of the transaction is left.
        assert await delete_below(nodes, 9) == 9
        await removed_below(nodes, 9)
        await produce_plain(nodes, b"plain-9")
        assert await shown(nodes, 9, 10) == (10, [b"plain-9"], [])
        for each in (early, client):
            each.close()
