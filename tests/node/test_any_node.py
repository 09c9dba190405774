"""Clients may use any node: requests reach the node that can answer them, and the outcome returns the same way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.node.cluster_harness import LocalNodes
from tests.node.support_replicas import FakeCoordinator
from tests.support.eventually import until

from chronik.client.connection import Connection
from chronik.node.broker import Broker
from chronik.node.coordinators.transactions import Transactions
from chronik.wire.api import ApiKey
from chronik.wire.batch import decode_batch, encode_batch, read_batch_header
from chronik.wire.errors import ErrorCode
from chronik.wire.fetch import FetchPartition, FetchRequest, FetchTopic, read_fetch_response, write_fetch_request
from chronik.wire.produce import (
    ProducePartitionResponse,
    ProduceRequest,
    ProduceResponse,
    ProduceTopic,
    read_produce_response,
    write_produce_request,
)

Story = Callable[[LocalNodes], Coroutine[Any, Any, None]]
PRODUCE_VERSION = 11
FETCH_VERSION = 12
PARTITIONS = 3


async def create(client: Connection, name: str, partitions: int = PARTITIONS) -> Any:
    topic = {"name": name, "num_partitions": partitions, "replication_factor": 3, "assignments": [], "configs": []}
    answer = await client.call(ApiKey.CREATE_TOPICS, {"topics": [topic], "timeout": 10_000, "validate_only": False})
    return answer.topics[0]


def request_of(values: dict[int, bytes], acks: int) -> bytes:
    batches: list[tuple[int, memoryview | None]] = [
        (partition, memoryview(encode_batch([(None, value, [], 1)]))) for partition, value in values.items()
    ]
    topic = ProduceTopic("t", None, batches)
    return write_produce_request(PRODUCE_VERSION, ProduceRequest(None, acks, 5_000, [topic]))


async def produce_whole(client: Connection, values: dict[int, bytes], acks: int = -1) -> ProduceResponse:
    body = await client.request(ApiKey.PRODUCE, PRODUCE_VERSION, request_of(values, acks))
    return read_produce_response(PRODUCE_VERSION, body)


async def produce(client: Connection, partition: int, value: bytes, acks: int = -1) -> ProducePartitionResponse:
    return (await produce_whole(client, {partition: value}, acks)).topics[0][2][0]


async def values_of(nodes: LocalNodes, partition: int) -> list[bytes | None]:
    """Return the values that a consumer reads from the partition's leader."""
    broker = next(iter(nodes.brokers.values()))
    leader = broker.image.topics["t"].partitions[partition].leader
    client = await nodes.client(nodes.brokers[leader])
    wanted = FetchTopic("t", None, [FetchPartition(partition, -1, 0, -1, -1, 1 << 20)])
    body = await client.request(
        ApiKey.FETCH, FETCH_VERSION, write_fetch_request(FETCH_VERSION, FetchRequest(topics=[wanted], max_wait_ms=0))
    )
    records = bytes(read_fetch_response(FETCH_VERSION, body).topics[0][2][0].records)
    client.close()
    found: list[bytes | None] = []
    at = 0
    while at < len(records):
        found += [record.value for record in decode_batch(records, at)]
        at += read_batch_header(records, at).size_bytes
    return found


def leader_of(nodes: LocalNodes, partition: int) -> Broker:
    broker = next(iter(nodes.brokers.values()))
    return nodes.brokers[broker.image.topics["t"].partitions[partition].leader]


async def test_a_topic_created_at_any_node_exists_at_every_node_on_response(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        for asked in brokers:
            created = await create(await nodes.client(asked), f"by-{asked.node_id}")
            assert created.error_code is ErrorCode.none
            for broker in brokers:
                assert broker.image.topics[f"by-{asked.node_id}"].id == created.topic_id
                assert broker.partition(f"by-{asked.node_id}", 0) is not None
        refused = await create(await nodes.client(brokers[1]), "by-1")
        assert refused.error_code is ErrorCode.topic_already_exists


async def test_leaders_are_spread_and_metadata_lists_all_brokers(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        await create(await nodes.client(brokers[0]), "t")
        for broker in brokers:
            client, before = await nodes.client(broker), await nodes.controller()
            answer = await client.call(ApiKey.METADATA, {"topics": [{"name": "t"}]}, at_most=12)
            assert sorted(member.node_id for member in answer.brokers) == [1, 2, 3]
            assert answer.controller_id in (before.node_id, (await nodes.controller()).node_id)
            assert sorted(partition.leader_id for partition in answer.topics[0].partitions) == [1, 2, 3]


async def test_config_changes_and_deletions_at_any_node_take_effect_there(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        follower = nodes.others(await nodes.controller())[0]
        client = await nodes.client(follower)
        await create(client, "t")
        change = {"name": "retention.ms", "config_operation": 0, "value": "5000"}
        resource = {"resource_type": 2, "resource_name": "t", "configs": [change]}
        altered = await client.call(ApiKey.INCREMENTAL_ALTER_CONFIGS, {"resources": [resource], "validate_only": False})
        assert altered.responses[0].error_code is ErrorCode.none
        assert follower.image.topics["t"].configs == {"retention.ms": "5000"}
        grown = await client.call(
            ApiKey.CREATE_PARTITIONS,
            {"topics": [{"name": "t", "count": 5, "assignments": None}], "timeout": 5_000, "validate_only": False},
        )
        assert grown.results[0].error_code is ErrorCode.none
        assert all(len(broker.image.topics["t"].partitions) == 5 for broker in brokers)
        deleted = await client.call(
            ApiKey.DELETE_TOPICS, {"topics": [{"name": "t", "topic_id": None}], "timeout": 5_000}, at_most=6
        )
        assert deleted.responses[0].error_code is ErrorCode.none
        assert "t" not in follower.image.topics
        again = await create(client, "t")
        assert again.error_code is ErrorCode.none


async def test_a_batch_sent_to_any_node_reaches_its_leader_in_order(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        client = await nodes.client(brokers[0])
        await create(client, "t")
        for acks in (1, -1):
            # Pipelined on one connection, over all partitions.
            answers = [
                client.send(ApiKey.PRODUCE, PRODUCE_VERSION, request_of({n % 3: b"%d:%d" % (acks, n)}, acks))
                for n in range(60)
            ]
            for answer in answers:
                assert read_produce_response(PRODUCE_VERSION, await answer).topics[0][2][0].error_code == 0
        for partition in range(PARTITIONS):
            expected = [b"%d:%d" % (acks, n) for acks in (1, -1) for n in range(60) if n % 3 == partition]
            assert await values_of(nodes, partition) == expected
        assert brokers[0].metrics.produce_forwarded == 80
        assert sum(broker.metrics.not_leader for broker in brokers) == 0


async def test_one_request_for_partitions_of_all_leaders_gets_one_complete_response(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        client = await nodes.client(brokers[0])
        await create(client, "t")
        response = await produce_whole(client, {0: b"a", 1: b"b", 2: b"c", 7: b"nowhere"})
        outcomes = {each.partition: ErrorCode(each.error_code) for each in response.topics[0][2]}
        assert outcomes == {
            0: ErrorCode.none,
            1: ErrorCode.none,
            2: ErrorCode.none,
            7: ErrorCode.unknown_topic_or_partition,
        }


async def test_an_acks_0_producer_loses_nothing_at_the_wrong_node(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        client = await nodes.client(brokers[0])
        await create(client, "t")
        for n in range(90):
            client.send_unanswered(ApiKey.PRODUCE, PRODUCE_VERSION, request_of({n % 3: b"%d" % n}, 0))
        # Such producers end this way: they send everything, then close the connection.
        await client.drained()
        await asyncio.sleep(0.05)
        client.close()
        for partition in range(PARTITIONS):
            expected = [b"%d" % n for n in range(90) if n % 3 == partition]
            async with asyncio.timeout(10):
                while await values_of(nodes, partition) != expected:
                    await asyncio.sleep(0.05)


async def test_without_forwarding_the_response_names_the_leader(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, forwarding=False) as nodes:
        brokers = await nodes.start_all()
        client = await nodes.client(brokers[0])
        await create(client, "t")
        partition = next(n for n in range(PARTITIONS) if leader_of(nodes, n) is not brokers[0])
        leader = leader_of(nodes, partition)
        response = await produce_whole(client, {partition: b"x"})
        answer = response.topics[0][2][0]
        assert answer.error_code == ErrorCode.not_leader_or_follower
        assert answer.current_leader == (leader.node_id, leader.image.topics["t"].partitions[partition].leader_epoch)
        assert [(node[0], node[2]) for node in response.node_endpoints] == [(leader.node_id, leader.server.port)]
        assert brokers[0].metrics.not_leader == 1
        assert brokers[0].metrics.produce_forwarded == 0


async def test_producing_continues_after_a_controller_that_leads_partitions_is_killed(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        await nodes.start_all()
        victim = await nodes.controller()
        survivor = nodes.others(victim)[0]
        client = await nodes.client(survivor)
        await create(client, "t")
        acknowledged: dict[int, list[bytes]] = {n: [] for n in range(PARTITIONS)}

        async def produce_round(number: int) -> bool:
            outcomes = [await produce(client, n, b"%d" % number) for n in range(PARTITIONS)]
            for outcome in outcomes:
                if outcome.error_code == 0:
                    acknowledged[outcome.partition].append(b"%d" % number)
            return all(outcome.error_code == 0 for outcome in outcomes)

        assert await produce_round(0)
        await nodes.kill(victim)
        number = 1
        async with asyncio.timeout(10):
            while not await produce_round(number):
                number += 1
                await asyncio.sleep(0.05)
        for partition in range(PARTITIONS):
            stored = await values_of(nodes, partition)
            assert [value for value in stored if value in acknowledged[partition]] == acknowledged[partition]
        back = await nodes.start(victim.node_id)
        await until(lambda: all(len(p.isr) == 3 for p in back.image.topics["t"].partitions), "all are in sync again")


async def test_a_clean_shutdown_transfers_leadership_before_the_node_stops(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        await create(await nodes.client(brokers[0]), "t")
        leaving = leader_of(nodes, 0)
        client = await nodes.client(leaving)
        stopping = asyncio.create_task(nodes.stop(leaving))
        refusals: list[ProducePartitionResponse] = []
        async with asyncio.timeout(10):
            while not refusals:
                answer = await produce(client, 0, b"x")
                if answer.error_code:
                    refusals.append(answer)
        # The leaving node names the new leader while it still answers, and the new leader accepts the batch.
        assert refusals[0].error_code == ErrorCode.not_leader_or_follower
        assert refusals[0].current_leader is not None
        heir = nodes.brokers[refusals[0].current_leader[0]]
        assert (await produce(await nodes.client(heir), 0, b"y")).error_code == 0
        await stopping
        assert all(partition.leader != leaving.node_id for partition in heir.image.topics["t"].partitions)


async def test_a_healthy_leader_that_is_replaced_hands_over_all_acks_1_records(tmp_path: Path) -> None:
    """Reassign away from the leader, then elect it again: acks=1 loses nothing while all nodes are healthy."""

    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        client = await nodes.client(brokers[0])
        await create(client, "t")
        acknowledged: list[bytes] = []

        async def write() -> None:
            while True:
                value = b"%d" % len(acknowledged)
                writer = await nodes.client(leader_of(nodes, 0))
                if (await produce(writer, 0, value, acks=1)).error_code == 0:
                    acknowledged.append(value)
                writer.close()

        writing = asyncio.create_task(write())
        await until(lambda: len(acknowledged) > 20)
        partition = brokers[0].image.topics["t"].partitions[0]
        first = partition.leader
        others = [replica for replica in partition.replicas if replica != first]
        target = {"name": "t", "partitions": [{"partition_index": 0, "replicas": others}]}
        moved = await client.call(ApiKey.ALTER_PARTITION_REASSIGNMENTS, {"timeout": 5_000, "topics": [target]})
        assert moved.responses[0].partitions[0].error_code is ErrorCode.none
        await until(lambda: brokers[0].image.topics["t"].partitions[0].replicas == tuple(others))
        target["partitions"] = [{"partition_index": 0, "replicas": [first, *others]}]
        await client.call(ApiKey.ALTER_PARTITION_REASSIGNMENTS, {"timeout": 5_000, "topics": [target]})
        await until(lambda: first in brokers[0].image.topics["t"].partitions[0].isr)
        asked = {"topic": "t", "partitions": [0]}
        values = {"election_type": 0, "topic_partitions": [asked], "timeout": 5_000}
        elected = await client.call(ApiKey.ELECT_LEADERS, values)
        outcome = elected.replica_election_results[0].partition_result[0].error_code
        assert outcome in (ErrorCode.none, ErrorCode.election_not_needed)
        await until(lambda: leader_of(nodes, 0).node_id == first)
        count = len(acknowledged)
        await until(lambda: len(acknowledged) > count)
        writing.cancel()
        await asyncio.wait([writing])
        led = leader_of(nodes, 0).host.require_leader("t", 0)
        # Consumers read up to the high watermark, and with acks=1 the last records may not be committed yet.
        await until(lambda: led.is_committed(led.log_end_offset))
        read = await values_of(nodes, 0)
        # A batch that was stored but not acknowledged was sent again, so ignore duplicates.
        assert [value for value in dict.fromkeys(read) if value in set(acknowledged)] == acknowledged


async def test_transactional_batches_through_any_node_are_verified_by_their_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = FakeCoordinator()
    asked_by: list[int] = []

    async def verify(transactions: Transactions, *question: Any) -> Any:
        asked_by.append(transactions._node_id)
        return await coordinator.verify(*question)

    monkeypatch.setattr(Transactions, "verify", verify)

    def body(version: int, producer_id: int) -> bytes:
        batch = encode_batch(
            [(None, b"v", [], 1)], producer_id=producer_id, producer_epoch=0, base_sequence=0, is_transactional=True
        )
        records = memoryview(batch)
        topic = ProduceTopic("t" if version < 13 else None, topic_id if version >= 13 else None, [(0, records)])
        return write_produce_request(version, ProduceRequest("payments", -1, 5_000, [topic]))

    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        await create(await nodes.client(brokers[0]), "t")
        topic_id = brokers[0].image.topics["t"].id
        leader = leader_of(nodes, 0)
        client = await nodes.client(nodes.others(leader)[0])
        for producer_id, version in enumerate((7, 11, 12, 13)):
            response = read_produce_response(
                version, await client.request(ApiKey.PRODUCE, version, body(version, producer_id))
            )
            assert response.topics[0][2][0].error_code == 0
        assert [(producer_id, adds) for _, producer_id, _, _, adds in coordinator.requests] == [
            (0, False),
            (1, False),
            (2, True),
            (3, True),
        ]
        assert set(asked_by) == {leader.node_id}
        coordinator.answer = ErrorCode.transaction_abortable
        codes = []
        for producer_id, version in ((10, 9), (11, 11), (12, 13)):
            answer = await client.request(ApiKey.PRODUCE, version, body(version, producer_id))
            codes.append(read_produce_response(version, answer).topics[0][2][0].error_code)
        abortable = ErrorCode.transaction_abortable
        assert codes == [ErrorCode.invalid_txn_state, abortable, abortable]
