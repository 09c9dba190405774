"""Fetches by replicas and from replicas: which are allowed, what they return, and which advance the watermark."""

import asyncio
from typing import Any, cast
from uuid import UUID

import pytest
from tests.node.support_replicas import (
    FETCH_VERSION,
    TOPIC_ID,
    Cluster,
    ServerConnection,
    on_cluster,
)
from tests.node.test_replication_following import is_caught_up
from tests.support.eventually import until

from chronik.wire.batch import decode_batch
from chronik.wire.errors import ErrorCode
from chronik.wire.fetch import (
    FetchPartition,
    FetchPartitionResponse,
    FetchRequest,
    FetchTopic,
    read_fetch_response,
    write_fetch_request,
)


def replica_fetch(
    cluster: Cluster,
    *,
    replica: int = 3,
    broker_epoch: int | None = None,
    leader_epoch: int = 0,
    offset: int = 0,
    last_epoch: int = -1,
    topic_id: UUID = TOPIC_ID,
    session: tuple[int, int] = (0, -1),
    max_wait_ms: int = 0,
    names: bool = True,
) -> FetchRequest:
    wanted = FetchPartition(0, leader_epoch, offset, last_epoch, 0, 1 << 20, high_watermark=3)
    return FetchRequest(
        replica_id=replica,
        replica_epoch=cluster.broker(replica).epoch if broker_epoch is None else broker_epoch,
        max_wait_ms=max_wait_ms,
        min_bytes=1,
        session_id=session[0],
        session_epoch=session[1],
        topics=[FetchTopic(None, topic_id, [wanted])] if names else [],
    )


async def answer_of(cluster: Cluster, fetch: FetchRequest, *, peer_id: int = 3, node: int = 1) -> Any:
    return await cluster[node].fetch(fetch, peer_id=peer_id)


async def told(cluster: Cluster, fetch: FetchRequest, **more: Any) -> FetchPartitionResponse:
    response = await answer_of(cluster, fetch, **more)
    assert response.error_code == 0, ErrorCode(response.error_code)
    found: FetchPartitionResponse = response.topics[0][2][0]
    return found


async def written(cluster: Cluster) -> None:
    """Write three records in epoch 0 and cut off node 3, so that its own fetches do not interfere."""
    await cluster[1].produce(b"a")
    await cluster[1].produce(b"b", b"c")
    await until(lambda: is_caught_up(cluster))
    cluster.cut(1, 3)


@on_cluster()
async def test_only_the_node_itself_may_fetch_as_a_replica(cluster: Cluster) -> None:
    await written(cluster)
    for peer_id in (None, 2):
        response = await answer_of(cluster, replica_fetch(cluster, offset=3), peer_id=cast(int, peer_id))
        assert response.error_code == ErrorCode.cluster_authorization_failed


@on_cluster()
async def test_a_fetch_from_a_previous_incarnation_of_a_replica_is_refused(cluster: Cluster) -> None:
    await written(cluster)
    old = cluster.broker(3).epoch
    cluster.register(3)
    response = await answer_of(cluster, replica_fetch(cluster, broker_epoch=old))
    assert response.error_code == ErrorCode.stale_broker_epoch
    newer = cluster.broker(3).epoch + 5
    assert (await told(cluster, replica_fetch(cluster, broker_epoch=newer))).error_code == 0
    late = await told(cluster, replica_fetch(cluster))
    assert late.error_code == ErrorCode.stale_broker_epoch


@on_cluster()
async def test_a_replica_with_another_leader_epoch_is_refused(cluster: Cluster) -> None:
    await written(cluster)
    cluster.change(leader=2)
    cluster.change(leader=1)
    fenced = await told(cluster, replica_fetch(cluster, leader_epoch=1))
    assert fenced.error_code == ErrorCode.fenced_leader_epoch
    ahead = await told(cluster, replica_fetch(cluster, leader_epoch=3))
    assert ahead.error_code == ErrorCode.unknown_leader_epoch
    silent = await told(cluster, replica_fetch(cluster, leader_epoch=-1))
    assert silent.error_code == ErrorCode.unknown_leader_epoch
    not_here = await told(cluster, replica_fetch(cluster, leader_epoch=2), node=2)
    assert not_here.error_code == ErrorCode.not_leader_or_follower


@on_cluster(replicas=(1, 2))
async def test_a_node_without_a_replica_and_an_unknown_topic_are_refused(cluster: Cluster) -> None:
    await cluster[1].produce(b"a")
    stranger = await told(cluster, replica_fetch(cluster))
    assert stranger.error_code == ErrorCode.not_leader_or_follower
    unknown = await told(cluster, replica_fetch(cluster, topic_id=UUID(int=5)))
    assert unknown.error_code == ErrorCode.unknown_topic_id


@on_cluster()
async def test_a_diverging_follower_gets_the_diverging_epoch_and_its_offset_is_ignored(cluster: Cluster) -> None:
    await written(cluster)
    cluster.change(leader=2)
    cluster.change(leader=1, isr=(1, 2, 3))
    await cluster[1].partition.jobs.ended()
    end = cluster[1].append(b"d")
    assert end == 4
    leader = cluster[1].partition.leader
    assert leader is not None
    beyond = await told(cluster, replica_fetch(cluster, leader_epoch=2, offset=9, last_epoch=0))
    assert (beyond.diverging_epoch, len(beyond.records)) == ((0, 3), 0)
    between = await told(cluster, replica_fetch(cluster, leader_epoch=2, offset=5, last_epoch=1))
    assert between.diverging_epoch == (0, 3)
    assert leader.durable_end_of(3) == -1
    fits = await told(cluster, replica_fetch(cluster, leader_epoch=2, offset=3, last_epoch=0))
    assert fits.diverging_epoch is None
    assert [record.value for record in decode_batch(fits.records)] == [b"d"]
    assert leader.durable_end_of(3) == 3


@on_cluster()
async def test_an_out_of_range_error_contains_the_leaders_log_start_offset(cluster: Cluster) -> None:
    await written(cluster)
    await cluster[1].partition.raise_log_start(3)
    below = await told(cluster, replica_fetch(cluster, offset=1, last_epoch=0))
    assert (below.error_code, below.log_start_offset) == (ErrorCode.offset_out_of_range, 3)
    above = await told(cluster, replica_fetch(cluster, offset=9))
    assert above.error_code == ErrorCode.offset_out_of_range


@on_cluster()
async def test_replicas_receive_uncommitted_records_and_consumers_do_not(cluster: Cluster) -> None:
    await written(cluster)
    cluster.cut(1, 2)
    cluster[1].append(b"d")
    assert (await told(cluster, replica_fetch(cluster, offset=3, last_epoch=0))).records
    consumed = await cluster[1].consume(3)
    assert (consumed.error_code, bytes(consumed.records), consumed.high_watermark) == (0, b"", 3)


@on_cluster(configs={"visibility": "appended"})
async def test_consumers_read_to_the_log_end_if_records_are_visible_when_appended(cluster: Cluster) -> None:
    await written(cluster)
    cluster.cut(1, 2)
    waiting = asyncio.ensure_future(cluster[1].consume(3, max_wait_ms=10_000))
    await asyncio.sleep(0)
    cluster[1].append(b"d")
    response = await waiting
    assert [record.value for record in decode_batch(response.records)] == [b"d"]
    assert response.high_watermark == 4
    assert (await cluster[1].end_offset())["offset"] == 4
    assert cluster[1].partition.high_watermark == 3


class Session:
    """A replica's fetch session, controlled step by step."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.connection = ServerConnection(3)
        self.id, self.epoch = 0, 0

    def send(self, *, names: bool, offset: int = 3, max_wait_ms: int = 60_000) -> "asyncio.Future[bytes]":
        fetch = replica_fetch(
            self.cluster,
            session=(self.id, self.epoch),
            offset=offset,
            last_epoch=0,
            max_wait_ms=max_wait_ms,
            names=names,
        )
        self.epoch += 1
        return self.cluster[1].request(self.connection, FETCH_VERSION, write_fetch_request(FETCH_VERSION, fetch))

    async def answer(self, sent: "asyncio.Future[bytes]") -> list[FetchPartitionResponse]:
        response = read_fetch_response(FETCH_VERSION, memoryview(await asyncio.wait_for(sent, 10)))
        assert response.error_code == 0, ErrorCode(response.error_code)
        self.id = response.session_id
        return [partition for _, _, partitions in response.topics for partition in partitions]

    async def begin(self) -> None:
        await self.answer(self.send(names=True, max_wait_ms=0))


@on_cluster()
async def test_a_session_returns_a_partition_once_each_time_it_is_requested(cluster: Cluster) -> None:
    await written(cluster)
    session = Session(cluster)
    await session.begin()
    waiting = session.send(names=False)
    cluster[1].append(b"d")
    (first,) = await session.answer(waiting)
    assert len(first.records)
    again = session.send(names=False)
    cluster[1].append(b"e")
    await asyncio.sleep(0.02)
    assert not again.done()
    (second,) = await session.answer(session.send(names=True, offset=4))
    assert [record.value for record in decode_batch(second.records)] == [b"e"]
    assert await session.answer(again) == []


@on_cluster()
async def test_a_waiting_fetch_is_answered_when_only_the_watermark_rises(cluster: Cluster) -> None:
    await written(cluster)
    session = Session(cluster)
    await session.begin()
    cluster[1].append(b"d")
    await session.answer(session.send(names=False))
    waiting = session.send(names=True, offset=4)
    (only,) = await session.answer(waiting)
    assert (only.high_watermark, len(only.records)) == (4, 0)
    assert cluster[1].metrics.watermark_propagation.count > 0


@on_cluster()
async def test_the_next_fetch_ends_a_waiting_fetch_with_an_empty_response(cluster: Cluster) -> None:
    await written(cluster)
    session = Session(cluster)
    await session.begin()
    first = session.send(names=False)
    await asyncio.sleep(0)
    second = session.send(names=True)
    assert await session.answer(first) == []
    assert not second.done()


@on_cluster()
async def test_a_session_gets_an_error_when_the_leader_is_replaced(cluster: Cluster) -> None:
    await written(cluster)
    session = Session(cluster)
    await session.begin()
    waiting = session.send(names=False)
    await asyncio.sleep(0)
    cluster.change(leader=2)
    (only,) = await session.answer(waiting)
    assert only.error_code == ErrorCode.not_leader_or_follower


@on_cluster()
async def test_the_session_of_a_closed_connection_is_removed(cluster: Cluster) -> None:
    await written(cluster)
    session = Session(cluster)
    await session.begin()
    session.connection.close()
    body = await session.send(names=False)
    response = read_fetch_response(FETCH_VERSION, memoryview(body))
    assert response.error_code == ErrorCode.fetch_session_id_not_found


@on_cluster()
async def test_a_read_in_progress_during_a_leader_change_returns_no_records(cluster: Cluster) -> None:
    await written(cluster)
    log = cluster[1].partition.log
    log.read = lambda *args, **more: None  # type: ignore[method-assign]
    waiting = asyncio.ensure_future(told(cluster, replica_fetch(cluster, offset=1, last_epoch=0)))
    consuming = asyncio.ensure_future(cluster[1].consume(1))
    await asyncio.sleep(0)
    cluster.change(leader=2)
    for response in (await waiting, await consuming):
        assert (response.error_code, len(response.records)) == (ErrorCode.not_leader_or_follower, 0)


RACKS = {1: "a", 2: "b", 3: "b"}


@on_cluster(racks=RACKS)
async def test_a_consumer_fetches_from_a_replica_in_its_rack_below_the_watermark(cluster: Cluster) -> None:
    await cluster[1].produce(b"a", b"b")
    await until(lambda: is_caught_up(cluster))
    assert (await cluster[1].consume(0, rack="a")).preferred_read_replica == -1
    assert (await cluster[1].consume(0, rack="elsewhere")).preferred_read_replica == -1
    sent = await cluster[1].consume(0, rack="b")
    assert sent.preferred_read_replica in (2, 3)
    assert not len(sent.records)
    served = await cluster[sent.preferred_read_replica].consume(0, rack="b")
    assert (served.error_code, served.high_watermark) == (0, 2)
    assert len(served.records)


@on_cluster(racks=RACKS)
async def test_a_follower_serves_no_consumer_without_a_rack_or_a_lease(cluster: Cluster) -> None:
    await cluster[1].produce(b"a", b"b")
    await until(lambda: is_caught_up(cluster))
    assert (await cluster[2].consume(0)).error_code == ErrorCode.not_leader_or_follower
    cluster[2].has_lease = False
    assert (await cluster[2].consume(0, rack="b")).error_code == ErrorCode.not_leader_or_follower


@pytest.mark.parametrize(("known_epoch", "preferred"), [(-1, -1), (0, -1), (1, 2)])
@on_cluster()
async def test_a_consumer_with_the_current_epoch_at_a_wrong_node_is_sent_to_the_leader(
    cluster: Cluster, known_epoch: int, preferred: int
) -> None:
    await cluster[1].produce(b"a")
    cluster.change(leader=2)
    wanted = FetchPartition(0, known_epoch, 0, -1, -1, 1 << 20)
    fetch = FetchRequest(max_wait_ms=0, min_bytes=1, topics=[FetchTopic(None, TOPIC_ID, [wanted])])
    response = (await cluster[3].fetch(fetch)).topics[0][2][0]
    assert (response.error_code, response.current_leader) == (ErrorCode.not_leader_or_follower, (2, 1))
    assert response.preferred_read_replica == preferred


@pytest.mark.parametrize("offset", [2, 3])
@on_cluster(racks=RACKS)
async def test_a_consumer_at_a_follower_waits_for_records_that_are_not_there_yet(cluster: Cluster, offset: int) -> None:
    await cluster[1].produce(b"a", b"b")
    await until(lambda: is_caught_up(cluster))
    response = await cluster[2].consume(offset, rack="b")
    if offset == 2:
        assert (response.error_code, len(response.records)) == (0, 0)
        waiting = asyncio.ensure_future(cluster[2].consume(2, rack="b", max_wait_ms=10_000))
        await asyncio.sleep(0)
        await cluster[1].produce(b"c")
        assert [record.value for record in decode_batch((await waiting).records)] == [b"c"]
    else:
        assert response.error_code == ErrorCode.offset_not_available


@on_cluster(racks=RACKS, configs={"visibility": "appended"})
async def test_followers_do_not_serve_topics_that_are_visible_when_appended(cluster: Cluster) -> None:
    await cluster[1].produce(b"a", b"b")
    await until(lambda: is_caught_up(cluster))
    response = await cluster[1].consume(0, rack="b")
    assert response.preferred_read_replica == -1
    assert len(response.records)
