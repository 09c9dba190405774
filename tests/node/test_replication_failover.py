"""Leader changes: no committed record is lost, no uncommitted record is exposed, and every wait is answered."""

import asyncio
from typing import Any

import pytest
from tests.node.support_replicas import TOPIC, TOPIC_ID, Cluster, Node, on_cluster
from tests.node.test_replication_following import is_caught_up
from tests.support.eventually import until

from chronik.metadata.calls import HandOver
from chronik.metadata.image import NO_LEADER
from chronik.node.replicas.partition import Partition
from chronik.replication.follower import PartitionFollower, Truncate
from chronik.replication.leader import PartitionLeader
from chronik.wire.batch import encode_batch
from chronik.wire.errors import ErrorCode, KafkaError


async def error_of(future: "asyncio.Future[None]") -> ErrorCode:
    with pytest.raises(KafkaError) as raised:
        await asyncio.wait_for(future, 10)
    return raised.value.code


@on_cluster()
async def test_a_replaced_leader_truncates_its_unreplicated_records_and_fails_them(cluster: Cluster) -> None:
    await cluster[1].produce(b"committed")
    await until(lambda: is_caught_up(cluster))
    cluster.cut(1, 2)
    cluster.cut(1, 3)
    lost = cluster[1].produce(b"only", b"here")
    await until(lambda: cluster[1].partition.log.synced_end_offset == 3)
    cluster.change(leader=2, isr=(2, 3))
    await cluster[2].produce(b"other")
    cluster.heal()
    # The batch is certainly lost, so a forwarding node may send it again.
    assert await error_of(lost) is ErrorCode.not_leader_or_follower
    await until(lambda: is_caught_up(cluster))
    assert cluster[1].contents() == cluster[2].contents() == cluster[3].contents()
    assert cluster[1].partition.log_end_offset == 2


@on_cluster()
async def test_the_old_leader_acknowledges_a_batch_that_the_new_leader_has(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    cluster.cut(1, 3)
    waiting = cluster[1].produce(b"second")
    await until(lambda: cluster[2].partition.log.synced_end_offset == 2)
    assert not waiting.done()
    cluster.change(leader=2, isr=(1, 2))
    await asyncio.wait_for(waiting, 10)
    assert cluster[1].partition.leader is None
    assert cluster[2].partition.high_watermark == 2


def numbered(sequence: int, producer_id: int = 9) -> memoryview:
    batch = encode_batch([(b"k", b"v", (), 1)], producer_id=producer_id, producer_epoch=0, base_sequence=sequence)
    return memoryview(bytearray(batch))


def appended(partition: Partition, sequence: int, producer_id: int = 9) -> ErrorCode:
    """Append as a produce request does, and return the outcome."""
    records = numbered(sequence, producer_id)
    try:
        partition.append(records, 1)
    except KafkaError as error:
        partition.refused(records, error, 1)
        return error.code
    return ErrorCode.none


def may_pass_on(node: Node, sequence: int) -> bool:
    try:
        node.partition.check_forwardable(numbered(sequence), 1)
    except KafkaError as error:
        assert error.code is ErrorCode.not_leader_or_follower
        return False
    return True


@on_cluster()
async def test_a_replaced_leader_forwards_no_batch_after_an_unreplicated_one(cluster: Cluster) -> None:
    """Found by the simulator (three-nodes seed 674955305): the new leader answered OUT_OF_ORDER_SEQUENCE_NUMBER."""
    old = cluster[1].partition
    await cluster[1].committed(old.append(numbered(0), 1).last_offset + 1)
    await until(lambda: is_caught_up(cluster))
    cluster.cut(1, 2)
    cluster.cut(1, 3)
    old.append(numbered(1), 1)
    cluster.change(leader=2, isr=(2, 3))
    assert not may_pass_on(cluster[1], 2)
    assert may_pass_on(cluster[1], 1)
    assert not may_pass_on(cluster[1], 2), "its answer is not known yet"
    cluster.heal()
    await until(lambda: is_caught_up(cluster) and not old.jobs.is_exclusive)
    assert old.log_end_offset == 1
    assert not may_pass_on(cluster[1], 2)
    assert may_pass_on(cluster[1], 1)
    assert may_pass_on(cluster[1], 2), "the one before it has come again"


@on_cluster()
async def test_a_new_leader_refuses_a_batch_whose_predecessors_may_still_follow(cluster: Cluster) -> None:
    """librdkafka sent later batches to the new leader first, and lost the earlier ones: they read as duplicates."""
    cluster.cut(1, 2)
    cluster.cut(1, 3)
    for sequence in range(3):
        cluster[1].partition.append(numbered(sequence), 1)
    cluster.change(leader=2, isr=(2, 3))
    new = cluster[2].partition
    for sequence in range(3, 10):
        assert appended(new, sequence) is ErrorCode.not_enough_replicas
    assert [appended(new, sequence) for sequence in range(10)] == [ErrorCode.none] * 10
    assert new.log_end_offset == 10


@on_cluster()
async def test_a_leader_accepts_an_unknown_producer_when_none_can_follow(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer's older batches may have expired."""
    assert appended(cluster[1].partition, 5) is ErrorCode.none, "no other node has led the partition"
    monkeypatch.setattr("chronik.node.replicas.partition.EARLY_BATCHES_S", 0.05)
    cluster.change(leader=2, isr=(1, 2, 3))
    new = cluster[2].partition
    assert new.leader is not None
    refused = [appended(new, 50, producer_id=7)]
    await until(lambda: appended(new, 50, producer_id=7) is ErrorCode.none)
    assert refused == [ErrorCode.not_enough_replicas]


@on_cluster()
async def test_a_leader_that_moves_away_forwards_no_batch_after_an_unreplicated_one(cluster: Cluster) -> None:
    """Found by the simulator (five-nodes seed 703792778): a node that leaves the cluster has no replica any more."""
    old = cluster[1].partition
    await cluster[1].committed(old.append(numbered(0), 1).last_offset + 1)
    await until(lambda: is_caught_up(cluster))
    cluster.cut(1, 2)
    cluster.cut(1, 3)
    old.append(numbered(1), 1)
    cluster.change(leader=2, isr=(2, 3), replicas=(2, 3))
    host, topic = cluster[1].host, cluster.image.topics[TOPIC]
    await until(lambda: (TOPIC, 0) not in host.partitions)
    with pytest.raises(KafkaError) as refused:
        host.check_forwardable(topic, 0, numbered(2), 1)
    assert refused.value.code is ErrorCode.not_leader_or_follower
    host.check_forwardable(topic, 0, numbered(1), 1)
    host.check_forwardable(topic, 0, numbered(2), 1)


@on_cluster()
async def test_a_batch_that_the_new_leader_has_does_not_block_forwarding(cluster: Cluster) -> None:
    old = cluster[1].partition
    cluster.cut(1, 3)
    waiting = cluster[1].committed(old.append(numbered(0), 1).last_offset + 1)
    await until(lambda: cluster[2].partition.log.synced_end_offset == 1)
    cluster.change(leader=2, isr=(1, 2))
    await asyncio.wait_for(waiting, 10)
    assert may_pass_on(cluster[1], 1)


@on_cluster()
async def test_a_leader_that_hands_over_forwards_later_batches(cluster: Cluster) -> None:
    old = cluster[1].partition
    cluster.cut(1, 3)
    old.append(numbered(0), 1)
    old.hand_over(2)
    await until(lambda: cluster[2].partition.log.synced_end_offset == 1)
    cluster.cut(1, 2)
    cluster.change(leader=2)
    assert old.leader is None
    assert may_pass_on(cluster[1], 1)


@on_cluster()
async def test_a_leader_replaced_before_its_sync_does_not_acknowledge_acks_1(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    await until(lambda: is_caught_up(cluster))
    cluster.cut(1, 2)
    cluster.cut(1, 3)
    partition = cluster[1].partition
    log_sync, partition.log.sync_job = partition.log.sync_job, lambda: None  # type: ignore[method-assign]
    answers: list[KafkaError | None] = []
    partition.when_written(cluster[1].append(b"second"), answers.append)
    cluster.change(leader=2, isr=(2, 3))
    partition.log.sync_job = log_sync  # type: ignore[method-assign]
    await cluster[1].host.sync_all()
    assert answers == []
    cluster.heal()
    await until(lambda: answers)
    assert answers[0] is not None
    assert answers[0].code is ErrorCode.not_leader_or_follower


@on_cluster()
async def test_a_truncation_lowers_the_recovery_point_first(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    await until(lambda: is_caught_up(cluster))
    cluster.cut(1, 2)
    cluster.cut(1, 3)
    cluster[1].append(b"a", b"b", b"c")
    await cluster[1].host.record_recovery_points()
    points = cluster.path / "node-1" / "recovery-points"
    assert points.read_text().splitlines()[2] == f"{TOPIC} 0 {TOPIC_ID} 4"
    seen: list[str] = []
    log = cluster[1].partition.log
    truncate = log.truncate_to

    def truncate_to(offset: int) -> None:
        seen.append(points.read_text().splitlines()[2])
        truncate(offset)

    log.truncate_to = truncate_to  # type: ignore[method-assign]
    cluster.change(leader=2, isr=(2, 3))
    cluster.heal()
    await until(lambda: cluster[1].partition.log_end_offset == 1)
    assert seen == [f"{TOPIC} 0 {TOPIC_ID} 1"]


@on_cluster()
async def test_a_truncation_within_a_batch_lowers_the_recovery_point_to_where_the_log_ends(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    await until(lambda: is_caught_up(cluster))
    cluster.cut(1, 2)
    cluster.cut(1, 3)
    cluster[1].append(b"a", b"b", b"c")
    host, partition = cluster[1].host, cluster[1].partition
    await host.record_recovery_points()
    points = cluster.path / "node-1" / "recovery-points"
    assert points.read_text().splitlines()[2] == f"{TOPIC} 0 {TOPIC_ID} 4"
    cluster.change(leader=2, isr=(2, 3))
    await until(lambda: isinstance(partition.role, PartitionFollower))
    seen: list[str] = []
    truncate = partition.log.truncate_to

    def truncate_to(offset: int) -> None:
        truncate(offset)
        # A kill at this moment must not look like a loss.
        seen.append(points.read_text().splitlines()[2])

    partition.log.truncate_to = truncate_to  # type: ignore[method-assign]
    assert isinstance(partition.role, PartitionFollower)
    # DeleteRecords has moved the start of the leader's epoch into the batch.
    assert await host.replication.truncate(partition, partition.role, Truncate(3, below_watermark=False))
    assert partition.log_end_offset == 1
    assert seen == [f"{TOPIC} 0 {TOPIC_ID} 1"]


@on_cluster()
async def test_batches_that_arrive_before_the_log_is_open_are_not_overtaken(cluster: Cluster) -> None:
    host, former = cluster[1].host, cluster[1].partition
    topic, error = host.image.topics[TOPIC], KafkaError(ErrorCode.not_leader_or_follower, "its log is not open")
    del host.partitions[(TOPIC, 0)]
    for sequence in (0, 1):
        host.refused(topic, 0, numbered(sequence), error, 0)
    host._opened(topic, 0, former.log, 0)
    partition = cluster[1].partition
    assert partition is not former
    assert appended(partition, 2) is ErrorCode.not_leader_or_follower
    assert [appended(partition, sequence) for sequence in (0, 1, 2)] == [ErrorCode.none] * 3


@on_cluster()
async def test_metadata_changes_during_a_truncation_wait_until_it_ends(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    await until(lambda: is_caught_up(cluster))
    cluster.cut(1, 2)
    cluster.cut(1, 3)
    cluster[1].append(b"only here")
    partition = cluster[1].partition
    assert partition.jobs.begin()
    cluster.change(leader=2, isr=(1, 2, 3))
    cluster.heal()
    await until(lambda: partition.jobs.is_exclusive)
    assert not partition.can_flush
    cluster.change(leader=1)
    assert not partition.leads
    partition.jobs.end()
    await until(lambda: partition.leads)
    assert partition.leader_epoch == 2
    assert partition.log_end_offset == 1
    await cluster[1].produce(b"again")
    await until(lambda: is_caught_up(cluster))


@on_cluster()
async def test_an_epoch_without_records_does_not_mislead_a_follower(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    await until(lambda: is_caught_up(cluster))
    cluster.cut(1, 3)
    cluster[1].append(b"second")
    await until(lambda: cluster[2].partition.log_end_offset == 2)
    # Node 3 leads epoch 1 without writing; then it receives node 2's record of epoch 0.
    cluster[2].metadata.hold()
    cluster[1].metadata.hold()
    cluster.change(leader=3)
    cluster.change(leader=2)
    cluster.heal()
    cluster[2].metadata.release()
    cluster[1].metadata.release()
    await until(lambda: is_caught_up(cluster))
    assert cluster[3].partition.log.epochs.entries()[0] == (0, 0)
    assert cluster[3].partition.log.epoch_of(1) == 0


@on_cluster()
async def test_end_offsets_are_unavailable_until_the_watermark_reaches_the_epoch(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    await until(lambda: is_caught_up(cluster))
    # Node 1 commits a second record, and no other node learns that it is committed.
    for node in (2, 3):
        cluster[node].partition.leader_watermark_received = lambda leaders_watermark: None  # type: ignore[method-assign]
    await cluster[1].produce(b"second")
    assert (await cluster[1].end_offset())["offset"] == 2
    cluster.cut(2, 3)
    cluster.cut(1, 2)
    cluster.change(leader=2, isr=(2, 3))
    assert cluster[2].partition.high_watermark == 1
    assert (await cluster[2].end_offset())["error_code"] is ErrorCode.offset_not_available
    assert (await cluster[2].consume(0)).error_code == ErrorCode.offset_not_available
    waiting = asyncio.ensure_future(cluster[2].consume(0, max_wait_ms=5_000))
    await until(lambda: cluster[2].partition._waits.fetches, "the fetch waits")
    assert not waiting.done()
    cluster.heal()
    response = await waiting
    assert (response.error_code, response.high_watermark) == (0, 2)
    assert (await cluster[2].end_offset())["offset"] == 2


@on_cluster()
async def test_end_offsets_never_decrease_while_a_leader_has_too_few_replicas(cluster: Cluster) -> None:
    """Found by the simulator (seed 2010): two of three nodes died, and later the third returned its old watermark."""
    await cluster[1].produce(b"first")
    await until(lambda: is_caught_up(cluster))
    for node in (2, 3):
        cluster[node].partition.leader_watermark_received = lambda leaders_watermark: None  # type: ignore[method-assign]
    await cluster[1].produce(b"second")
    cluster.cut(2, 3)
    cluster.cut(1, 2)
    cluster.change(leader=2, isr=(2,))
    partition = cluster[2].partition
    much_later_ms = partition._replication.now_ms() + 3_600_000
    partition._replication.now_ms = lambda: much_later_ms  # type: ignore[method-assign]
    assert partition.high_watermark == 1
    assert (await cluster[2].consume(0)).error_code == ErrorCode.offset_not_available
    assert (await cluster[2].end_offset())["error_code"] is ErrorCode.offset_not_available


@on_cluster()
async def test_a_leader_without_a_lease_refuses_all_requests(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    waiting = asyncio.ensure_future(cluster[1].consume(1, max_wait_ms=60_000))
    await until(lambda: cluster[1].partition._waits.fetches, "the fetch waits")
    cluster[1].has_lease = False
    assert (await cluster[1].consume(0)).error_code == ErrorCode.not_leader_or_follower
    assert (await cluster[1].end_offset())["error_code"] is ErrorCode.not_leader_or_follower
    with pytest.raises(KafkaError):
        cluster[1].host.require_leader(TOPIC, 0)
    # A fetch that waited checks the lease when it is answered.
    cluster[1].append(b"second")
    response = await asyncio.wait_for(waiting, 10)
    assert response.error_code == ErrorCode.not_leader_or_follower
    assert not response.records


@on_cluster()
async def test_acks_all_fails_before_and_after_the_append_below_min_insync_replicas(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    cluster.cut(1, 2)
    cluster.cut(1, 3)
    waiting = cluster[1].produce(b"second")
    cluster.change(isr=(1,))
    assert await error_of(waiting) is ErrorCode.not_enough_replicas_after_append
    with pytest.raises(KafkaError) as raised:
        cluster[1].partition.check_enough_replicas()
    assert raised.value.code is ErrorCode.not_enough_replicas
    assert cluster[1].partition.high_watermark == 1
    cluster.heal()
    await until(lambda: len(cluster.state.isr) == 3)
    # The appended record is committed in the end.
    await until(lambda: is_caught_up(cluster))
    assert cluster[1].partition.high_watermark == 2


@on_cluster(lag_ms=700)
async def test_an_unreachable_follower_leaves_the_isr_and_rejoins_it(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    cluster.cut(1, 3)
    waiting = cluster[1].produce(b"second")
    await asyncio.wait_for(waiting, 10)
    assert set(cluster.state.isr) == {1, 2}
    cluster.heal()
    await until(lambda: set(cluster.state.isr) == {1, 2, 3})
    assert all(by == 1 for by, _, _ in cluster.proposals)


@on_cluster(lag_ms=700)
async def test_an_isr_removal_takes_effect_only_after_the_controller_confirms_it(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    cluster.refuses_proposals = True
    cluster.cut(1, 3)
    waiting = cluster[1].produce(b"second")
    await until(lambda: cluster.proposals)
    await until(lambda: cluster[2].partition.log.synced_end_offset == 2)
    assert cluster[1].partition.high_watermark == 1
    assert not waiting.done()
    cluster.refuses_proposals = False
    await asyncio.wait_for(waiting, 10)


@on_cluster(isr=(1, 2))
async def test_a_fenced_broker_does_not_join_the_isr(cluster: Cluster) -> None:
    cluster.fence(3)
    await cluster[1].produce(b"first")
    await until(lambda: cluster[3].partition.log_end_offset == 1)
    sent: list[int] = []
    wire = cluster[3].wires[-1]
    send = wire.send
    wire.send = lambda key, version, body: sent.append(key) or send(key, version, body)  # type: ignore[method-assign,func-returns-value]
    await until(lambda: len(sent) >= 2, "the leader gets two fetches from the end of its log")
    assert set(cluster.state.isr) == {1, 2}
    cluster.register(3)
    await until(lambda: set(cluster.state.isr) == {1, 2, 3})


@on_cluster()
async def test_a_handover_keeps_all_acknowledged_records(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    cluster.cut(1, 2)
    end = cluster[1].append(b"acks=1")
    cluster[1].host.hand_over([HandOver(TOPIC_ID, 0, 0, 2)])
    with pytest.raises(KafkaError) as raised:
        cluster[1].append(b"too late")
    assert raised.value.code is ErrorCode.not_leader_or_follower
    assert not cluster[1].partition.leads
    cluster.heal()
    await until(lambda: cluster.state.leader == 2)
    await cluster[2].produce(b"next")
    await until(lambda: is_caught_up(cluster))
    assert cluster[2].partition.log_end_offset == end + 1
    assert cluster.proposals[-1][2] == 2


@on_cluster()
async def test_an_impossible_handover_is_cancelled(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    cluster.cut(1, 2)
    cluster[1].append(b"second")
    cluster[1].host.hand_over([HandOver(TOPIC_ID, 0, 0, 2)])
    assert not cluster[1].partition.leads
    await until(lambda: cluster[1].partition.leads)
    assert cluster.proposals == []


@on_cluster()
async def test_a_handover_with_an_unknown_outcome_stops_serving_until_resolved(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    await until(lambda: is_caught_up(cluster))
    cluster.refuses_proposals = True
    cluster[1].host.hand_over([HandOver(TOPIC_ID, 0, 0, 2)])
    await until(lambda: len(cluster.proposals) >= 2)
    assert not cluster[1].partition.leads
    cluster.refuses_proposals = False
    await until(lambda: cluster[1].partition.leads)
    assert cluster.state.leader == 1
    assert cluster.state.partition_epoch == 1


@on_cluster()
async def test_a_leader_whose_log_fails_transfers_leadership(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    await until(lambda: is_caught_up(cluster))
    partition = cluster[1].partition
    job = partition.log.sync_job

    def failing() -> Any:
        made = job()
        if made is not None:
            made.run = lambda: (_ for _ in ()).throw(OSError("the disk is broken"))  # type: ignore[method-assign]
        return made

    partition.log.sync_job = failing  # type: ignore[method-assign]
    assert await error_of(cluster[1].produce(b"second")) is ErrorCode.kafka_storage_error
    await until(lambda: cluster.state.leader in (2, 3))
    leader = cluster[cluster.state.leader]
    await until(lambda: leader.partition.leads)
    # The record that could not be synced was replicated to the followers, so it is not lost.
    assert leader.partition.log_end_offset == 2


@on_cluster(durability="replicated")
async def test_a_leader_that_reported_a_loss_never_serves_again_in_its_epoch(
    cluster: Cluster,
) -> None:
    one = cluster[1]
    await one.produce(b"first")
    await until(lambda: is_caught_up(cluster))
    for other in (2, 3):
        cluster.cut(1, other)
    one.append(b"not replicated")  # so that the handover cannot succeed
    one.metadata.hold()  # a disk that fails cannot store metadata either
    partition = one.partition
    partition.log.read_only = partition.log.read_only_forever = True
    partition._sync_has_failed(OSError("the disk is broken"))
    await until(lambda: cluster.state.leader in (2, 3))
    leader = cluster[cluster.state.leader]
    await until(lambda: leader.partition.leads)
    await until(lambda: partition.hands_over_to == NO_LEADER, "the handover is late")
    assert partition.leader is not None and not partition.leads
    assert (await one.listed_offset(-1))["error_code"] == ErrorCode.not_leader_or_follower


@on_cluster()
async def test_the_same_leader_in_a_new_epoch_keeps_its_pending_requests(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    cluster.cut(1, 3)
    waiting = cluster[1].produce(b"second")
    cluster.register(1)
    leader = cluster[1].partition.leader
    assert isinstance(leader, PartitionLeader)
    assert leader.leader_epoch == 1
    assert leader.durable_end_of(2) == -1
    assert not waiting.done()
    cluster.heal()
    await asyncio.wait_for(waiting, 10)
