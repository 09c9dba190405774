"""The transaction coordinator in a cluster: requests, markers on every leader, failover, verification by leaders."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from uuid import UUID

import pytest
from tests.node.cluster_harness import DEADLINE_S, SECRET, LocalNodes
from tests.node.support_transactions import (
    TransactionalClient,
    coordinator_partition,
    create_topic,
    leader,
    markers,
)
from tests.support.eventually import until
from tests.support.handshake import proven_connection

from chronik.client.errors import ConnectionLost
from chronik.metadata.image import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from chronik.node.broker import Broker
from chronik.node.membership.internal_api import MARKERS, Hello
from chronik.transactions.coordinator import ProducerIdAndEpoch
from chronik.wire.api import ApiKey
from chronik.wire.batch import decode_batch, encode_batch, read_batch_header, read_marker
from chronik.wire.errors import ErrorCode
from chronik.wire.produce import ProduceRequest, ProduceTopic, read_produce_response, write_produce_request

SETTINGS = {"transaction_state_topic_partitions": 3, "offsets_topic_partitions": 3}
ID = "payments"
PARTITIONS = [("orders", 0), ("orders", 1), ("orders", 2)]
RETRIED_PRODUCE = (
    ErrorCode.not_leader_or_follower,
    ErrorCode.not_enough_replicas,
    ErrorCode.concurrent_transactions,
    ErrorCode.request_timed_out,
)


def has_markers(broker: Broker, index: int, expected: Sequence[tuple[int, int, bool, int]]) -> bool:
    return markers(broker, "orders", index) == expected


@pytest.mark.parametrize("version", [0, 2])
@pytest.mark.parametrize("commit", [True, False])
async def test_end_of_a_transaction_writes_one_marker_to_each_partition(
    tmp_path: Path, version: int, commit: bool
) -> None:
    async with LocalNodes(tmp_path, **SETTINGS) as nodes:
        await nodes.start_all()
        await create_topic(nodes, "orders")
        client = TransactionalClient(nodes, ID, version)
        assert await client.init() is ErrorCode.none
        first = client.producer
        assert await client.add(*PARTITIONS) is ErrorCode.none
        assert await client.end(commit=commit) is ErrorCode.none
        described = await client.until_state("CompleteCommit" if commit else "CompleteAbort")
        assert described.topics == ()
        # Version 2 ends each transaction with a higher epoch, which its marker and the next transaction have.
        assert client.producer.producer_epoch == first.producer_epoch + (version == 2)
        coordinator = await client.coordinator()
        image = coordinator.image.partition(*coordinator_partition(coordinator, ID))
        assert image is not None
        expected = (first.producer_id, client.producer.producer_epoch, commit, image.leader_epoch)
        leaders = {broker.node_id for each in PARTITIONS if (broker := leader(nodes, *each)) is not None}
        assert len(leaders) == 3, "the test needs markers to other nodes"
        for _, index in PARTITIONS:
            for broker in nodes.brokers.values():
                await until(partial(has_markers, broker, index, [expected]))
        assert await client.add(*PARTITIONS) is ErrorCode.none
        assert (await client.describe()).transaction_state == "Ongoing"
        client.close()


async def test_new_coordinator_finishes_a_prepared_transaction_once_the_leaders_answer(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, **SETTINGS) as nodes:
        await nodes.start_all()
        await create_topic(nodes, "orders")
        client = TransactionalClient(nodes, ID)
        await client.init()
        first = client.producer
        await client.add(*PARTITIONS)
        coordinator = await client.coordinator()
        # The coordinator dies between its answer and the markers.
        coordinator.transactions._markers.send = lambda action: None  # type: ignore[method-assign]
        assert await client.end() is ErrorCode.none
        bumped = client.producer
        assert (await client.describe()).transaction_state == "PrepareCommit"
        await nodes.kill(coordinator)
        described = await client.until_state("CompleteCommit")
        assert ProducerIdAndEpoch(described.producer_id, described.producer_epoch) == bumped
        for _, index in PARTITIONS:
            broker = await until(partial(leader, nodes, "orders", index))
            found = {each[:3] for each in markers(broker, "orders", index)}
            assert found == {(first.producer_id, bumped.producer_epoch, True)}
        assert await client.add(*PARTITIONS) is ErrorCode.none
        client.close()


async def test_open_transaction_survives_its_coordinator_and_is_aborted_at_its_timeout(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, **SETTINGS) as nodes:
        await nodes.start_all()
        await create_topic(nodes, "orders")
        client = TransactionalClient(nodes, ID)
        await client.init(timeout_ms=4_000)
        await client.add(*PARTITIONS)
        await nodes.kill(await client.coordinator())
        assert (await client.describe()).transaction_state == "Ongoing"
        described = await client.until_state("CompleteAbort")
        assert described.producer_epoch == client.producer.producer_epoch + 1, "the producer is fenced"
        assert await client.end() is ErrorCode.producer_fenced
        client.close()


async def test_second_producer_aborts_the_open_transaction_and_fences_the_first(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, **SETTINGS) as nodes:
        await nodes.start_all()
        await create_topic(nodes, "orders")
        zombie, successor = TransactionalClient(nodes, ID), TransactionalClient(nodes, ID)
        assert await zombie.init() is ErrorCode.none
        assert await zombie.add(*PARTITIONS) is ErrorCode.none
        assert await successor.init() is ErrorCode.none
        assert successor.producer.producer_id == zombie.producer.producer_id
        # One epoch for the abort, which no producer gets, and one for the successor; more if a slow machine loses
        # a lease, so that a request or a marker is repeated.
        assert successor.producer.producer_epoch >= zombie.producer.producer_epoch + 2
        broker = await until(partial(leader, nodes, "orders", 0))
        ended = {marker[:3] for marker in markers(broker, "orders", 0)}
        assert ended == {(*zombie.producer._replace(producer_epoch=zombie.producer.producer_epoch + 1), False)}
        assert await zombie.end() is ErrorCode.producer_fenced
        assert await zombie.add(*PARTITIONS) is ErrorCode.producer_fenced
        old = await zombie.call_once(ApiKey.ADD_PARTITIONS_TO_TXN, zombie.add_values(*PARTITIONS), at_most=1)
        errors = {each.partition_error_code for each in old.results_by_topic_v3_and_below[0].results_by_partition}
        assert errors == {ErrorCode.invalid_producer_epoch}, "the only such error that old clients know"
        zombie.close()
        successor.close()


async def test_markers_wait_for_a_leader_and_are_not_needed_in_a_deleted_topic(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, **SETTINGS) as nodes:
        await nodes.start_all()
        await create_topic(nodes, "orders")
        await create_topic(nodes, "alone", 3, replicas=1)
        client = TransactionalClient(nodes, ID)
        await client.init()
        coordinator = await client.coordinator()
        index = next(
            index for index in range(3) if (broker := leader(nodes, "alone", index)) and broker is not coordinator
        )
        other = leader(nodes, "alone", index)
        assert other is not None
        await client.add(("alone", index), *PARTITIONS)
        await nodes.kill(other)
        assert await client.end() is ErrorCode.none
        described = await client.until_state("PrepareCommit")
        await until(lambda: coordinator.transactions._markers.pending_count() == 1)
        described = await client.describe()
        assert [(topic.topic, topic.partitions) for topic in described.topics] == [("alone", (index,))]
        admin = await nodes.client(next(iter(nodes.brokers.values())))
        deleted = {"topics": [{"name": "alone", "topic_id": None}], "topic_names": ["alone"], "timeout": 10_000}
        await admin.call(ApiKey.DELETE_TOPICS, deleted)
        admin.close()
        await client.until_state("CompleteCommit")
        client.close()


async def test_new_leader_drops_markers_that_were_sent_to_it_before(tmp_path: Path) -> None:
    """Their sender may have had another leader write them since: they would end the producer's next transaction."""
    async with LocalNodes(tmp_path, **SETTINGS) as nodes:
        await nodes.start_all()
        await create_topic(nodes, "orders")
        old = leader(nodes, "orders", 0)
        assert old is not None
        partition = {"name": "orders", "partition_indexes": [0]}
        marker = {"producer_id": 7, "producer_epoch": 0, "transaction_result": True, "coordinator_epoch": 1_000}
        values = {"markers": [{**marker, "topics": [partition]}]}
        senders = []
        for broker in nodes.others(old):
            hello = Hello("", 5, UUID(int=5), broker.node_id, "127.0.0.1:5", MARKERS)
            sender = await proven_connection(broker.internal_server.port, hello, SECRET)
            accepted = broker.member.handshake._processes[5].newest[MARKERS]
            transport = accepted._transport
            assert transport is not None
            transport.pause_reading()
            request = asyncio.ensure_future(sender.call(ApiKey.WRITE_TXN_MARKERS, values, at_most=1))
            senders.append((broker, transport, request))
        await nodes.kill(old)
        new = await until(partial(leader, nodes, "orders", 0))
        partition_of_new = new.partition("orders", 0)
        assert partition_of_new is not None
        await until(lambda: partition_of_new.leads)
        for broker, transport, request in senders:
            if not transport.is_closing():
                transport.resume_reading()
            if broker is new:
                with pytest.raises(ConnectionLost):
                    await request
            request.cancel()
        assert markers(new, "orders", 0) == []


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"coordinator_epoch": 1_000}, ErrorCode.transaction_coordinator_fenced),
        ({"transaction_result": True}, ErrorCode.cluster_authorization_failed),
        ({"producer_epoch": 5}, ErrorCode.invalid_txn_state),
        ({"producer_id": 2**63 - 1}, ErrorCode.invalid_txn_state),
        ({}, ErrorCode.none),
    ],
)
async def test_client_may_only_abort_what_is_open(tmp_path: Path, changed: dict[str, object], error: ErrorCode) -> None:
    """A marker with the epoch of a later coordinator would fence the real one, and block the transactional id."""
    async with LocalNodes(tmp_path, 1, **SETTINGS) as nodes:
        await nodes.start_all()
        await create_topic(nodes, "orders", 1, 1)
        client = TransactionalClient(nodes, ID)
        assert await client.init() is ErrorCode.none
        assert await client.add(("orders", 0)) is ErrorCode.none
        broker = await until(partial(leader, nodes, "orders", 0))
        producer_id, epoch = client.producer
        batch = encode_batch(
            [(None, b"v", [], 1)], producer_id=producer_id, producer_epoch=epoch, base_sequence=0, is_transactional=True
        )
        connection = await nodes.client(broker)
        request = ProduceRequest(ID, -1, 5_000, [ProduceTopic("orders", None, [(0, memoryview(batch))])])
        answer = await connection.request(ApiKey.PRODUCE, 12, write_produce_request(12, request))
        assert read_produce_response(12, answer).topics[0][2][0].error_code == 0
        marker = {
            "producer_id": producer_id,
            "producer_epoch": epoch,
            "transaction_result": False,
            "coordinator_epoch": 0,
            "topics": [{"name": "orders", "partition_indexes": [0]}],
        }
        response = await connection.call(ApiKey.WRITE_TXN_MARKERS, {"markers": [{**marker, **changed}]}, at_most=1)
        assert response.markers[0].topics[0].partitions[0].error_code is error
        assert len(markers(broker, "orders", 0)) == (error is ErrorCode.none)
        connection.close()
        client.close()


async def test_damaged_state_is_served_by_a_coordinator_that_has_it_intact(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, **SETTINGS) as nodes:
        await nodes.start_all()
        await create_topic(nodes, "orders")
        client = TransactionalClient(nodes, ID)
        assert await client.init() is ErrorCode.none
        assert await client.add(*PARTITIONS) is ErrorCode.none
        damaged = await client.coordinator()
        topic, index = coordinator_partition(damaged, ID)
        (segment,) = (tmp_path / f"node-{damaged.node_id}").glob(f"**/{topic}-{index}/*.log")
        data = bytearray(segment.read_bytes())
        data[data.rindex(b"orders")] ^= 1
        segment.write_bytes(data)
        # The coordinator loads the partition again, as after a change of its leader epoch.
        damaged.transactions.topic._unload(index)
        damaged.transactions.topic._load(index)
        assert await client.end() is ErrorCode.none, "the open transaction was not lost"
        assert (await client.coordinator()) is not damaged
        await client.until_state("CompleteCommit")
        assert nodes.events(damaged.node_id, "transactions_load_failed")
        client.close()


async def test_add_offsets_adds_the_partition_of_the_group(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, **SETTINGS) as nodes:
        await nodes.start_all()
        client = TransactionalClient(nodes, ID)
        await client.init()
        assert await client.add_offsets("readers") is ErrorCode.none
        coordinator = await client.coordinator()
        index = coordinator.groups.partition_of("readers")
        assert index is not None
        described = await client.describe()
        assert [(topic.topic, topic.partitions) for topic in described.topics] == [(OFFSETS_TOPIC, (index,))]
        ended: list[tuple[int, int, int, bool]] = []
        for broker in nodes.brokers.values():
            broker.marker_writer._offsets_ended = lambda *marker: ended.append(marker)
        await client.end()
        await client.until_state("CompleteCommit")
        assert ended == [(index, *client.producer, True)], "the group's coordinator receives the marker once"
        client.close()


async def test_leaders_verify_with_a_coordinator_on_any_node(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, **SETTINGS) as nodes:
        await nodes.start_all()
        await create_topic(nodes, "orders")
        client = TransactionalClient(nodes, ID)
        await client.init()
        await client.add(("orders", 0))
        both = [("orders", 0), ("orders", 1)]
        for broker in nodes.brokers.values():
            verify = broker.transaction_coordinators.verify
            assert await verify(ID, *client.producer, both, False) == {
                ("orders", 0): ErrorCode.none,
                ("orders", 1): ErrorCode.transaction_abortable,
            }
            old = client.producer._replace(producer_epoch=client.producer.producer_epoch - 1)
            assert set((await verify(ID, *old, both, False)).values()) == {ErrorCode.invalid_producer_epoch}
            unknown = await verify("unknown", *client.producer, both, False)
            assert set(unknown.values()) == {ErrorCode.invalid_producer_id_mapping}
            at_once = await asyncio.gather(
                *(verify(ID, *client.producer, [each], False) for each in both),
                verify("unknown", *client.producer, both, False),
            )
            assert [list(each.values()) for each in at_once] == [
                [ErrorCode.none],
                [ErrorCode.transaction_abortable],
                [ErrorCode.invalid_producer_id_mapping] * 2,
            ]
        for broker in nodes.brokers.values():
            added = await broker.transaction_coordinators.verify(ID, *client.producer, both, True)
            assert set(added.values()) == {ErrorCode.none}
        (topic,) = (await client.describe()).topics
        assert topic.partitions == (0, 1)
        missing = await next(iter(nodes.brokers.values())).transaction_coordinators.verify(
            ID, *client.producer, [("missing", 0)], True
        )
        assert missing == {("missing", 0): ErrorCode.unknown_topic_or_partition}
        client.close()


async def test_leader_that_cannot_reach_the_coordinator_gets_a_network_error(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, **SETTINGS) as nodes:
        await nodes.start_all()
        client = TransactionalClient(nodes, ID)
        await client.init()
        coordinator = await client.coordinator()
        others = nodes.others(coordinator)
        await nodes.kill(coordinator)
        errors = {
            error
            for broker in others
            for error in (
                await broker.transaction_coordinators.verify(ID, *client.producer, [("orders", 0)], False)
            ).values()
        }
        assert errors <= {ErrorCode.network_exception, ErrorCode.coordinator_not_available}
        client.close()


async def test_node_without_the_state_topic_answers_that_there_is_no_coordinator(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, 1, default_replication_factor=1) as nodes:
        (broker,) = await nodes.start_all()
        assert await broker.transaction_coordinators.verify(ID, 1, 0, [("orders", 0)], False) == {
            ("orders", 0): ErrorCode.coordinator_not_available
        }
        client = TransactionalClient(nodes, ID)
        assert await client.init() is ErrorCode.none
        assert len(broker.image.require_topic(TRANSACTIONS_TOPIC).partitions) == 50
        client.close()


@pytest.mark.parametrize("version", [0, 2])
async def test_transactions_follow_each_other_without_a_pause(tmp_path: Path, version: int) -> None:
    """The first batches of a transaction reach the leaders while the markers of the last one are being written."""
    async with LocalNodes(tmp_path, **SETTINGS) as nodes:
        await nodes.start_all()
        await create_topic(nodes, "orders")
        client = TransactionalClient(nodes, ID, version)
        await client.init()
        connections = {node_id: await nodes.client(broker) for node_id, broker in nodes.brokers.items()}
        expected: dict[int, list[tuple[bytes, bool]]] = {index: [] for _, index in PARTITIONS}

        async def produce(index: int, value: bytes, sequence: int) -> None:
            batch = encode_batch(
                [(None, value, [], 1)],
                producer_id=client.producer.producer_id,
                producer_epoch=client.producer.producer_epoch,
                base_sequence=sequence,
                is_transactional=True,
            )
            topic = ProduceTopic("orders", None, [(index, memoryview(batch))])
            api_version = 12 if version == 2 else 11
            body = write_produce_request(api_version, ProduceRequest(ID, -1, 5_000, [topic]))
            # A slow machine may take longer than the coordinator waits, or than a lease lasts: retry as clients do.
            error = ErrorCode.not_leader_or_follower
            async with asyncio.timeout(DEADLINE_S):
                while error in RETRIED_PRODUCE:
                    broker = await until(partial(leader, nodes, "orders", index))
                    answer = await connections[broker.node_id].request(ApiKey.PRODUCE, api_version, body)
                    error = ErrorCode(read_produce_response(api_version, answer).topics[0][2][0].error_code)
            assert error is ErrorCode.none, (index, value)

        for number in range(20):
            value, commit = str(number).encode(), number % 3 > 0
            if version == 0:
                assert await client.add(*PARTITIONS) is ErrorCode.none
            # With version 2 each transaction has its own epoch, and each epoch begins with sequence 0.
            sequence = 0 if version == 2 else number
            await asyncio.gather(*(produce(index, value, sequence) for _, index in PARTITIONS))
            assert await client.end(commit=commit) is ErrorCode.none
            for outcomes in expected.values():
                outcomes.append((value, commit))
        await client.until_state("CompleteCommit")
        for _, index in PARTITIONS:
            broker = await until(partial(leader, nodes, "orders", index))
            assert outcomes_in(broker, index) == expected[index]
        for connection in connections.values():
            connection.close()
        client.close()


def outcomes_in(broker: Broker, index: int) -> list[tuple[bytes, bool]]:
    """Return each value in the log, and whether the marker after it commits it. A repeated marker ends nothing."""
    partition = broker.partition("orders", index)
    assert partition is not None
    log = partition.log
    data = bytes(log.read_job(log.log_start_offset, 1 << 24, log.log_end_offset)())
    outcomes: list[tuple[bytes, bool]] = []
    value: bytes | None = None
    at = 0
    while at < len(data):
        header = read_batch_header(data, at)
        if not header.is_control:
            (record,) = decode_batch(data, at)
            value = record.value
        elif value is not None:
            outcomes.append((value, read_marker(data, at).is_commit))
            value = None
        at += header.size_bytes
    return outcomes
