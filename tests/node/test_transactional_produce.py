"""Transactional batches at the leader of a partition: verification with the coordinator, order, markers and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.node.support_replicas import TOPIC, Cluster, Node, ServerConnection, on_cluster
from tests.node.test_replication_following import is_caught_up
from tests.support.eventually import until

from chronik.node.replicas.partition import TransactionMarker
from chronik.node.serving.held_bytes import HeldBytes
from chronik.wire.batch import BatchHeader, encode_batch, read_batch_header, read_marker
from chronik.wire.errors import ErrorCode, KafkaError

PRODUCER = 7


def batch(*values: bytes, sequence: int = 0, epoch: int = 0, producer_id: int = PRODUCER, codec: int = 0) -> bytes:
    return encode_batch(
        [(b"k", value, (), 1) for value in values],
        codec=codec,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        is_transactional=True,
    )


def headers(node: Node) -> Iterator[BatchHeader]:
    contents, at = node.contents(), 0
    while at < len(contents):
        header = read_batch_header(contents, at)
        yield header
        at += header.size_bytes


def sequences(node: Node) -> list[int]:
    return [header.base_sequence for header in headers(node) if not header.is_control]


# -- verification ------------------------------------------------------------------------------------------------------


@on_cluster()
async def test_the_first_batch_of_a_transaction_waits_for_the_coordinator_and_later_ones_do_not(
    cluster: Cluster,
) -> None:
    leader = cluster[1]
    leader.coordinator.hold()
    first = leader.produce_request(batch(b"a"))
    await until(lambda: leader.coordinator.requests)
    assert leader.partition.log_end_offset == 0
    leader.coordinator.release()
    assert (await first).base_offset == 0
    assert (await leader.produce_request(batch(b"b", sequence=1))).base_offset == 1
    assert leader.coordinator.requests == [("payments", PRODUCER, 0, ((TOPIC, 0),), False)]


@on_cluster()
async def test_each_transaction_is_verified_anew(cluster: Cluster) -> None:
    leader = cluster[1]
    await leader.produce_request(batch(b"a"))
    await leader.end_transaction(PRODUCER, 0)
    await leader.produce_request(batch(b"b", sequence=1))
    assert len(leader.coordinator.requests) == 2


@pytest.mark.parametrize(("version", "adds"), [(3, False), (9, False), (11, False), (12, True), (13, True)])
@on_cluster()
async def test_the_batch_adds_its_partition_from_version_12_on(cluster: Cluster, version: int, adds: bool) -> None:
    leader = cluster[1]
    assert (await leader.produce_request(batch(b"a"), version=version)).error_code == 0
    assert [request[-1] for request in leader.coordinator.requests] == [adds]


@on_cluster()
async def test_a_transactional_batch_needs_a_transactional_id(cluster: Cluster) -> None:
    response = await cluster[1].produce_request(batch(b"a"), None)
    assert response.error_code == ErrorCode.transactional_id_authorization_failed
    assert cluster[1].partition.log_end_offset == 0


@on_cluster()
async def test_a_transactional_batch_needs_a_producer_id(cluster: Cluster) -> None:
    response = await cluster[1].produce_request(batch(b"a", producer_id=-1, epoch=-1, sequence=-1))
    assert response.error_code == ErrorCode.invalid_record


@on_cluster()
async def test_a_request_with_a_transactional_id_may_have_plain_batches(cluster: Cluster) -> None:
    plain = encode_batch([(b"k", b"v", (), 1)])
    assert (await cluster[1].produce_request(plain)).error_code == 0
    assert cluster[1].coordinator.requests == []


@pytest.mark.parametrize(
    ("answer", "version", "code"),
    [
        (ErrorCode.network_exception, 13, ErrorCode.not_enough_replicas),
        (ErrorCode.coordinator_load_in_progress, 13, ErrorCode.not_enough_replicas),
        (ErrorCode.coordinator_not_available, 9, ErrorCode.not_enough_replicas),
        (ErrorCode.not_coordinator, 9, ErrorCode.not_enough_replicas),
        (ErrorCode.concurrent_transactions, 11, ErrorCode.not_enough_replicas),
        (ErrorCode.concurrent_transactions, 12, ErrorCode.concurrent_transactions),
        (ErrorCode.transaction_abortable, 10, ErrorCode.invalid_txn_state),
        (ErrorCode.transaction_abortable, 11, ErrorCode.transaction_abortable),
        (ErrorCode.invalid_txn_state, 13, ErrorCode.invalid_txn_state),
        (ErrorCode.producer_fenced, 13, ErrorCode.invalid_producer_epoch),
        (ErrorCode.invalid_producer_id_mapping, 9, ErrorCode.invalid_producer_id_mapping),
    ],
)
@on_cluster()
async def test_an_unverified_batch_gets_an_error_that_its_client_understands(
    cluster: Cluster, answer: ErrorCode, version: int, code: ErrorCode
) -> None:
    leader = cluster[1]
    leader.coordinator.answer = answer
    response = await leader.produce_request(batch(b"a"), version=version)
    assert (response.error_code, response.base_offset) == (code, -1)
    assert leader.partition.log_end_offset == 0
    leader.coordinator.answer = ErrorCode.none
    assert (await leader.produce_request(batch(b"a"), version=version)).error_code == 0


@on_cluster()
async def test_acks_0_closes_the_connection_if_the_transaction_is_not_verified(cluster: Cluster) -> None:
    leader = cluster[1]
    connection = ServerConnection(None)
    closed: list[bool] = []
    connection.when_closed(connection, lambda: closed.append(True))
    leader.produce_request(batch(b"a"), acks=0, connection=connection)
    await until(lambda: leader.partition.log_end_offset == 1)
    assert not closed
    await leader.end_transaction(PRODUCER, 0)
    leader.coordinator.answer = ErrorCode.invalid_txn_state
    leader.produce_request(batch(b"a", sequence=1), acks=0, connection=connection)
    await until(lambda: closed)


# -- order -------------------------------------------------------------------------------------------------------------


@on_cluster()
async def test_pipelined_batches_wait_for_the_verification_and_keep_their_order(cluster: Cluster) -> None:
    leader = cluster[1]
    leader.coordinator.hold()
    outcomes = [leader.produce_request(batch(b"a", sequence=sequence)) for sequence in range(5)]
    leader.coordinator.release()
    responses = await asyncio.gather(*outcomes)
    assert [response.base_offset for response in responses] == [0, 1, 2, 3, 4]
    assert sequences(leader) == [0, 1, 2, 3, 4]
    assert len(leader.coordinator.requests) == 1


@on_cluster()
async def test_a_batch_that_is_sent_again_during_its_verification_is_appended_once(cluster: Cluster) -> None:
    leader = cluster[1]
    leader.coordinator.hold()
    outcomes = [leader.produce_request(batch(b"a")) for _ in range(2)]
    leader.coordinator.release()
    assert [response.base_offset for response in await asyncio.gather(*outcomes)] == [0, 0]
    assert leader.partition.log_end_offset == 1


@on_cluster()
async def test_a_later_batch_does_not_overtake_one_that_was_not_verified(cluster: Cluster) -> None:
    """The log does not know the producer, and would accept any sequence as the first."""
    leader = cluster[1]
    leader.coordinator.answer = ErrorCode.concurrent_transactions
    assert (await leader.produce_request(batch(b"a"))).error_code == ErrorCode.not_enough_replicas
    leader.coordinator.answer = ErrorCode.none
    later = batch(b"b", sequence=1)
    assert (await leader.produce_request(later)).error_code == ErrorCode.not_enough_replicas
    assert (await leader.produce_request(batch(b"a"))).error_code == 0
    assert (await leader.produce_request(later)).error_code == 0
    assert sequences(leader) == [0, 1]


@on_cluster()
async def test_batches_under_verification_are_bounded(cluster: Cluster) -> None:
    class Held(ServerConnection):
        holds = 0

        def hold(self) -> None:
            self.holds += 1

        def release(self) -> None:
            self.holds -= 1

    leader = cluster[1]
    leader.produce_services = replace(leader.produce_services, verifying=HeldBytes(leader.loop, 100))
    connection = Held(None)
    leader.coordinator.hold()
    first = leader.produce_request(batch(b"a"), connection=connection)
    assert connection.holds == 0
    second = leader.produce_request(batch(b"b", sequence=1), connection=connection)
    assert connection.holds == 1
    leader.coordinator.release()
    await asyncio.gather(first, second)
    await until(lambda: connection.holds == 0)
    assert leader.produce_services.verifying.bytes == 0


# -- markers -----------------------------------------------------------------------------------------------------------


@on_cluster()
async def test_a_marker_is_committed_on_all_replicas_with_the_coordinators_epoch(cluster: Cluster) -> None:
    leader = cluster[1]
    await leader.produce_request(batch(b"a"))
    await leader.end_transaction(PRODUCER, 0, is_commit=False, coordinator_epoch=5)
    assert leader.partition.high_watermark == 2
    await until(lambda: is_caught_up(cluster))
    for node in cluster.nodes.values():
        data, marker = headers(node)
        assert (marker.is_control, marker.is_transactional, marker.producer_id) == (True, True, PRODUCER)
        assert tuple(read_marker(node.contents(), data.size_bytes)) == (False, 5)


@on_cluster()
async def test_a_marker_of_an_old_coordinator_or_epoch_is_refused(cluster: Cluster) -> None:
    leader = cluster[1]
    await leader.produce_request(batch(b"a", epoch=3))
    with pytest.raises(KafkaError) as old_epoch:
        await leader.end_transaction(PRODUCER, 2)
    assert old_epoch.value.code is ErrorCode.invalid_producer_epoch
    await leader.end_transaction(PRODUCER, 3, coordinator_epoch=6)
    with pytest.raises(KafkaError) as old_coordinator:
        await leader.end_transaction(PRODUCER, 3, coordinator_epoch=5)
    assert old_coordinator.value.code is ErrorCode.transaction_coordinator_fenced
    assert leader.partition.log_end_offset == 2


@on_cluster(configs={"min.insync.replicas": "3"})
async def test_a_marker_needs_enough_replicas(cluster: Cluster) -> None:
    leader = cluster[1]
    await leader.produce_request(batch(b"a"))
    cluster.change(isr=(1, 2))
    with pytest.raises(KafkaError) as refused:
        await leader.end_transaction(PRODUCER, 0)
    assert refused.value.code is ErrorCode.not_enough_replicas
    assert leader.partition.log_end_offset == 1


@on_cluster()
async def test_only_the_leader_writes_markers(cluster: Cluster) -> None:
    with pytest.raises(KafkaError) as refused:
        await cluster[2].end_transaction(PRODUCER, 0)
    assert refused.value.code is ErrorCode.not_leader_or_follower
    with pytest.raises(KafkaError) as unknown:
        await cluster[1].host.append_marker("nothing", 0, TransactionMarker(PRODUCER, 0, True, 1), 1.0)
    assert unknown.value.code is ErrorCode.unknown_topic_or_partition


@on_cluster()
async def test_no_batch_follows_a_marker_that_was_written_during_its_verification(cluster: Cluster) -> None:
    """The coordinator confirms the transaction, then aborts it. Its batch would begin a transaction without an end."""
    leader = cluster[1]
    leader.coordinator.hold()
    late = leader.produce_request(batch(b"late"))
    await until(lambda: leader.coordinator.requests)
    await leader.end_transaction(PRODUCER, 0, is_commit=False)
    leader.coordinator.release()
    assert (await late).error_code == ErrorCode.invalid_txn_state
    assert [header.is_control for header in headers(leader)] == [True]
    assert list(leader.partition.log.open_transactions()) == []


@on_cluster()
async def test_a_transaction_of_version_2_begins_while_the_marker_of_the_last_is_written(cluster: Cluster) -> None:
    leader = cluster[1]
    await leader.produce_request(batch(b"first"), version=12)
    leader.coordinator.hold()
    following = leader.produce_request(batch(b"next", epoch=1), version=12)
    await until(lambda: len(leader.coordinator.requests) == 2)
    await leader.end_transaction(PRODUCER, 1)
    leader.coordinator.release()
    assert (await following).error_code == 0
    assert [header.is_control for header in headers(leader)] == [False, True, False]


@on_cluster()
async def test_an_answer_for_the_last_transaction_does_not_verify_the_next(cluster: Cluster) -> None:
    leader = cluster[1]
    leader.coordinator.hold()
    late = leader.produce_request(batch(b"late"))
    await until(lambda: leader.coordinator.requests)
    await leader.end_transaction(PRODUCER, 0, is_commit=False)
    leader.coordinator.answer = ErrorCode.transaction_abortable
    following = leader.produce_request(batch(b"next"))
    leader.coordinator.release()
    assert (await late).error_code == ErrorCode.invalid_txn_state
    assert (await following).error_code == ErrorCode.transaction_abortable
    assert leader.partition.log_end_offset == 1


@on_cluster()
async def test_a_leader_that_was_replaced_during_a_verification_appends_nothing(cluster: Cluster) -> None:
    """Another leader may have written the marker. Then this node leads again, in a new epoch."""
    leader = cluster[1]
    leader.coordinator.hold()
    late = leader.produce_request(batch(b"late"))
    await until(lambda: leader.coordinator.requests)
    cluster.change(leader=2)
    cluster.change(leader=1)
    assert leader.partition.leads
    leader.coordinator.release()
    assert (await late).error_code == ErrorCode.not_leader_or_follower
    assert leader.partition.log_end_offset == 0
    assert (await leader.produce_request(batch(b"late"))).error_code == 0


@on_cluster()
async def test_a_bumped_epoch_begins_at_sequence_0_and_the_old_epoch_is_fenced(cluster: Cluster) -> None:
    leader = cluster[1]
    await leader.produce_request(batch(b"a", epoch=0), version=12)
    await leader.end_transaction(PRODUCER, 1)
    zombie = await leader.produce_request(batch(b"z", sequence=1, epoch=0), version=12)
    assert zombie.error_code == ErrorCode.invalid_producer_epoch
    gap = await leader.produce_request(batch(b"b", sequence=1, epoch=1), version=12)
    assert gap.error_code == ErrorCode.out_of_order_sequence_number
    assert (await leader.produce_request(batch(b"b", epoch=1), version=12)).error_code == 0


@on_cluster(configs={"compression.type": "gzip"})
async def test_a_recompressed_batch_stays_transactional(cluster: Cluster) -> None:
    leader = cluster[1]
    await leader.produce_request(batch(b"a"))
    assert [(header.codec, header.is_transactional) for header in headers(leader)] == [(1, True)]
    assert [producer_id for producer_id, _ in leader.partition.log.open_transactions()] == [PRODUCER]


@on_cluster()
async def test_batches_under_verification_fail_as_soon_as_leadership_ends(cluster: Cluster) -> None:
    """And later ones of the producer are not forwarded before them."""
    leader = cluster[1]
    leader.coordinator.hold()
    first = leader.produce_request(batch(b"a"))
    await until(lambda: leader.coordinator.requests)
    cluster.change(leader=2)
    assert (await first).error_code == ErrorCode.not_leader_or_follower
    with pytest.raises(KafkaError):
        leader.partition.check_forwardable(memoryview(batch(b"b", sequence=1)), 1)
    leader.partition.check_forwardable(memoryview(batch(b"a")), 1)
