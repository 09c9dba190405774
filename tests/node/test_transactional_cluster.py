"""Transactional producers and read_committed consumers in a cluster: real nodes, coordinator, leaders and followers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.node.cluster_harness import DEADLINE_S, LocalNodes
from tests.node.support_transactions import PAUSE_S, TransactionalClient, create_topic, leader
from tests.node.test_read_committed import visible
from tests.support.eventually import until

from chronik.client.connection import Connection
from chronik.client.errors import ClientError
from chronik.node.broker import Broker
from chronik.wire.api import ApiKey
from chronik.wire.batch import encode_batch
from chronik.wire.errors import ErrorCode
from chronik.wire.fetch import (
    FetchPartition,
    FetchPartitionResponse,
    FetchRequest,
    FetchTopic,
    read_fetch_response,
    write_fetch_request,
)
from chronik.wire.produce import ProduceRequest, ProduceTopic, read_produce_response, write_produce_request

SETTINGS = {"transaction_state_topic_partitions": 3, "offsets_topic_partitions": 3}
TOPIC = "orders"
PARTITIONS = [(TOPIC, index) for index in range(3)]
FETCH_VERSION = 12
VERSIONS = {1: 11, 2: 12}
"""The Produce version of each transaction version."""
RETRIED = (
    ErrorCode.not_enough_replicas,
    ErrorCode.concurrent_transactions,
    ErrorCode.not_leader_or_follower,
    ErrorCode.request_timed_out,
    ErrorCode.not_enough_replicas_after_append,
)


async def send_once(
    nodes: LocalNodes, via: Broker, client: TransactionalClient, index: int, value: bytes, sequence: int
) -> ErrorCode:
    producer_id, epoch = client.producer
    version = VERSIONS[client.version]
    batch = encode_batch(
        [(None, value, [], 1)],
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        is_transactional=True,
    )
    topic = ProduceTopic(TOPIC, None, [(index, memoryview(batch))])
    connection = await nodes.client(via)
    try:
        body = write_produce_request(version, ProduceRequest(client.id, -1, 5_000, [topic]))
        answer = read_produce_response(version, await connection.request(ApiKey.PRODUCE, version, body))
    finally:
        connection.close()
    return ErrorCode(answer.topics[0][2][0].error_code)


async def send(nodes: LocalNodes, client: TransactionalClient, index: int, value: bytes, sequence: int) -> None:
    """Send one batch through any node, and again as clients do."""
    attempt = index
    async with asyncio.timeout(DEADLINE_S):
        while True:
            brokers = list(nodes.brokers.values())
            attempt += 1
            try:
                code = await send_once(nodes, brokers[attempt % len(brokers)], client, index, value, sequence)
                if code is ErrorCode.none:
                    return
                assert code in RETRIED
            except ClientError:
                pass
            await asyncio.sleep(PAUSE_S)


async def fetched(nodes: LocalNodes, index: int) -> FetchPartitionResponse:
    """Fetch all stable records of a partition from its leader."""
    broker = await until(lambda: leader(nodes, TOPIC, index))
    connection = await nodes.client(broker)
    wanted = FetchTopic(TOPIC, None, [FetchPartition(index, -1, 0, -1, -1, 1 << 20)])
    fetch = FetchRequest(topics=[wanted], max_wait_ms=100, isolation_level=1)
    body = await connection.request(ApiKey.FETCH, FETCH_VERSION, write_fetch_request(FETCH_VERSION, fetch))
    connection.close()
    return read_fetch_response(FETCH_VERSION, body).topics[0][2][0]


async def committed(nodes: LocalNodes, expected: list[bytes]) -> None:
    """Wait until read_committed consumers see exactly these values in each partition, and nothing is held back."""
    for _, index in PARTITIONS:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                response = await fetched(nodes, index)
                if response.error_code == 0 and response.last_stable_offset == response.high_watermark > 0:
                    break
                await asyncio.sleep(PAUSE_S)
        assert visible(response) == expected, f"partition {index}"


async def group_coordinator(nodes: LocalNodes, group: str) -> Broker:
    client = await nodes.client(next(iter(nodes.brokers.values())))
    async with asyncio.timeout(DEADLINE_S):
        while True:
            answer = await client.call(ApiKey.FIND_COORDINATOR, {"key_type": 0, "coordinator_keys": [group]})
            (found,) = answer.coordinators
            if found.error_code is ErrorCode.none:
                client.close()
                return nodes.brokers[found.node_id]
            await asyncio.sleep(PAUSE_S)


async def commit_offset(groups: Connection, client: TransactionalClient, group: str, offset: int) -> ErrorCode:
    """Commit an offset of partition 0 in the client's transaction, which begins with it if none is open."""
    producer_id, epoch = client.producer
    committed = {
        "partition_index": 0,
        "committed_offset": offset,
        "committed_leader_epoch": -1,
        "committed_metadata": "",
    }
    values = {
        "transactional_id": client.id,
        "group_id": group,
        "producer_id": producer_id,
        "producer_epoch": epoch,
        "generation_id": -1,
        "member_id": "",
        "group_instance_id": None,
        "topics": [{"name": TOPIC, "partitions": [committed]}],
    }
    answer = await groups.call(ApiKey.TXN_OFFSET_COMMIT, values, at_most=5)
    code: ErrorCode = answer.topics[0].partitions[0].error_code
    return code


@pytest.mark.parametrize("version", [1, 2])
async def test_transactions_over_several_leaders_are_all_or_nothing(tmp_path: Path, version: int) -> None:
    async with LocalNodes(tmp_path, **SETTINGS) as nodes:
        await nodes.start_all()
        await create_topic(nodes, TOPIC)
        client = TransactionalClient(nodes, "payments", version)
        assert await client.init() is ErrorCode.none
        expected: list[bytes] = []
        sequence = 0
        for number in range(6):
            if version == 1:
                assert await client.add(*PARTITIONS) is ErrorCode.none
            first = 0 if version == 2 else sequence
            values = [b"%d.%d" % (number, at) for at in range(2)]
            await asyncio.gather(*(send(nodes, client, index, values[0], first) for _, index in PARTITIONS))
            await asyncio.gather(*(send(nodes, client, index, values[1], first + 1) for _, index in PARTITIONS))
            sequence += 2
            is_commit = number % 3 != 1
            # The next transaction begins at once, while the markers of this one are being written.
            assert await client.end(commit=is_commit) is ErrorCode.none
            expected += values if is_commit else []
        await committed(nodes, expected)
        client.close()


async def test_offsets_are_committed_while_the_markers_of_the_last_transaction_are_written(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, **SETTINGS) as nodes:
        await nodes.start_all()
        await create_topic(nodes, TOPIC)
        client = TransactionalClient(nodes, "payments", 2)
        assert await client.init() is ErrorCode.none
        groups = await nodes.client(await group_coordinator(nodes, "g"))
        for number in range(15):
            async with asyncio.timeout(DEADLINE_S):
                while (code := await commit_offset(groups, client, "g", number)) is not ErrorCode.none:
                    assert code in (ErrorCode.concurrent_transactions, ErrorCode.coordinator_load_in_progress)
                    await asyncio.sleep(PAUSE_S)
            assert await client.end() is ErrorCode.none
        groups.close()
        client.close()


@pytest.mark.parametrize("version", [1, 2])
async def test_a_transaction_continues_at_the_next_leader(tmp_path: Path, version: int) -> None:
    async with LocalNodes(tmp_path, **SETTINGS) as nodes:
        await nodes.start_all()
        await create_topic(nodes, TOPIC)
        client = TransactionalClient(nodes, "payments", version)
        assert await client.init() is ErrorCode.none
        if version == 1:
            assert await client.add(*PARTITIONS) is ErrorCode.none
        for _, index in PARTITIONS:
            await send(nodes, client, index, b"before", 0)
        killed = await until(lambda: leader(nodes, TOPIC, 0))
        await nodes.kill(killed)
        await until(lambda: leader(nodes, TOPIC, 0))
        for _, index in PARTITIONS:
            await send(nodes, client, index, b"after", 1)
            assert (await fetched(nodes, index)).last_stable_offset <= 0
        assert await client.end() is ErrorCode.none
        await committed(nodes, [b"before", b"after"])
        client.close()


@pytest.mark.parametrize("version", [1, 2])
async def test_a_zombie_appends_nothing_after_its_transaction_was_aborted(tmp_path: Path, version: int) -> None:
    async with LocalNodes(tmp_path, **SETTINGS) as nodes:
        brokers = await nodes.start_all()
        await create_topic(nodes, TOPIC)
        zombie = TransactionalClient(nodes, "payments", version)
        assert await zombie.init() is ErrorCode.none
        if version == 1:
            assert await zombie.add(*PARTITIONS) is ErrorCode.none
        await send(nodes, zombie, 0, b"aborted", 0)
        successor = TransactionalClient(nodes, "payments", version)
        assert await successor.init() is ErrorCode.none
        for index, sequence in ((0, 1), (1, 0)):
            # Partition 0 has the marker, partition 1 asks the coordinator; version 2 never named partition 1.
            for via in brokers:
                code = await send_once(nodes, via, zombie, index, b"late", sequence)
                assert code is ErrorCode.invalid_producer_epoch
        if version == 1:
            assert await successor.add(*PARTITIONS) is ErrorCode.none
        for _, index in PARTITIONS:
            await send(nodes, successor, index, b"committed", 0)
        assert await successor.end() is ErrorCode.none
        await committed(nodes, [b"committed"])
        zombie.close()
        successor.close()
