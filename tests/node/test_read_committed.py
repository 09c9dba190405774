"""read_committed: the last stable offset and the aborted transactions in Fetch and ListOffsets, on all replicas."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.node.cluster_harness import DEADLINE_S
from tests.node.support_replicas import TOPIC, TOPIC_ID, Cluster, Node, on_cluster
from tests.node.test_replication_following import is_caught_up
from tests.node.test_transactional_produce import batch
from tests.support.eventually import until

from chronik.node.apis import describe_producers
from chronik.node.serving.access import OPEN_ACCESS
from chronik.storage.aborted import AbortedJob
from chronik.storage.log import Log
from chronik.wire.api import ApiKey
from chronik.wire.batch import decode_batch, read_batch_header
from chronik.wire.errors import ErrorCode
from chronik.wire.fetch import FetchPartition, FetchPartitionResponse, FetchRequest, FetchTopic
from chronik.wire.messages import read_request, read_response, write_request, write_response

COMMITTED = 1
WAIT_MS = 5_000


def visible(response: FetchPartitionResponse) -> list[bytes | None]:
    """Return the values that a consumer with isolation level read_committed delivers, as Kafka's clients do it."""
    assert response.error_code == 0
    aborted = sorted(response.aborted_transactions or (), key=lambda each: each[1])
    assert list(response.aborted_transactions or ()) == aborted
    skipped: set[int] = set()
    values: list[bytes | None] = []
    at = 0
    while at < len(response.records):
        header = read_batch_header(response.records, at)
        while aborted and aborted[0][1] <= header.last_offset:
            skipped.add(aborted.pop(0)[0])
        if header.is_control:
            skipped.discard(header.producer_id)
        elif header.producer_id not in skipped:
            values += [record.value for record in decode_batch(response.records, at)]
        at += header.size_bytes
    return values


async def committed(node: Node, offset: int = 0, *, max_wait_ms: int = 0, rack: str = "") -> FetchPartitionResponse:
    return await node.consume(offset, isolation_level=COMMITTED, max_wait_ms=max_wait_ms, rack=rack)


async def transact(node: Node, value: bytes, producer_id: int, is_commit: bool, *, sequence: int = 0) -> None:
    assert (await node.produce_request(batch(value, producer_id=producer_id, sequence=sequence))).error_code == 0
    await node.end_transaction(producer_id, 0, is_commit)


# -- Fetch -------------------------------------------------------------------------------------------------------------


@on_cluster()
async def test_a_fetch_ends_at_an_open_transaction_and_read_uncommitted_does_not(cluster: Cluster) -> None:
    leader = cluster[1]
    await leader.produce(b"before")
    await leader.produce_request(batch(b"open"))
    await leader.produce(b"after")
    response = await committed(leader)
    assert (response.high_watermark, response.last_stable_offset) == (3, 1)
    assert visible(response) == [b"before"]
    assert response.aborted_transactions == []
    response = await leader.consume(0)
    assert (response.high_watermark, response.last_stable_offset) == (3, 1)
    assert visible(response) == [b"before", b"open", b"after"]
    assert response.aborted_transactions is None


@on_cluster()
async def test_a_fetch_above_the_last_stable_offset_is_empty_and_no_error(cluster: Cluster) -> None:
    leader = cluster[1]
    await leader.produce_request(batch(b"open"))
    await leader.produce(b"after")
    response = await committed(leader, 2)
    assert (response.error_code, len(response.records)) == (0, 0)


@on_cluster()
async def test_records_become_visible_with_their_marker(cluster: Cluster) -> None:
    leader = cluster[1]
    await transact(leader, b"committed", 7, True)
    assert visible(await committed(leader)) == [b"committed"]
    assert leader.partition.last_stable_offset == 2


@on_cluster()
async def test_a_marker_that_is_not_committed_does_not_raise_the_last_stable_offset(cluster: Cluster) -> None:
    leader = cluster[1]
    await leader.produce_request(batch(b"a"))
    cluster.cut(1, 2)
    ending = asyncio.ensure_future(leader.end_transaction(7, 0))
    await until(lambda: leader.partition.log_end_offset == 2)
    assert (leader.partition.high_watermark, leader.partition.last_stable_offset) == (1, 0)
    cluster.heal()
    await ending
    assert leader.partition.last_stable_offset == 2


@on_cluster(configs={"visibility": "appended"})
async def test_records_that_are_visible_when_appended_are_stable_when_their_marker_is_committed(
    cluster: Cluster,
) -> None:
    leader = cluster[1]
    cluster.cut(1, 2)
    leader.append(b"plain")
    assert visible(await committed(leader)) == [b"plain"]
    leader.produce_request(batch(b"open"))
    await until(lambda: leader.partition.log_end_offset == 2)
    ending = asyncio.ensure_future(leader.end_transaction(7, 0))
    await until(lambda: leader.partition.log_end_offset == 3)
    assert leader.partition.high_watermark == 0
    assert visible(await leader.consume(0)) == [b"plain", b"open"]
    assert visible(await committed(leader)) == [b"plain"]
    cluster.heal()
    await ending
    assert visible(await committed(leader)) == [b"plain", b"open"]


@on_cluster()
async def test_the_aborted_transactions_are_listed_by_first_offset(cluster: Cluster) -> None:
    leader = cluster[1]
    for producer_id in (9, 8, 7):
        await leader.produce_request(batch(b"x", producer_id=producer_id))
    for producer_id, is_commit in ((7, False), (8, True), (9, False)):
        await leader.end_transaction(producer_id, 0, is_commit)
    response = await committed(leader)
    assert response.aborted_transactions == [(9, 0), (7, 2)]
    assert visible(response) == [b"x"]


@on_cluster()
async def test_the_aborted_list_covers_only_the_returned_range(cluster: Cluster) -> None:
    leader = cluster[1]
    await transact(leader, b"first", 7, False)
    await transact(leader, b"second", 8, False)
    response = await leader.consume(0, isolation_level=COMMITTED, max_bytes=1)
    assert read_batch_header(response.records).size_bytes == len(response.records)
    assert response.aborted_transactions == [(7, 0)]
    response = await committed(leader, 2)
    assert response.aborted_transactions == [(8, 2)]


@on_cluster()
async def test_data_from_disk_has_the_aborted_list_of_its_range(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cold read learns how far it reaches only in its thread."""
    leader = cluster[1]
    await transact(leader, b"first", 7, False)
    await transact(leader, b"second", 8, False)
    await transact(leader, b"third", 9, True)
    monkeypatch.setattr(Log, "read", lambda *_, **__: None)
    response = await leader.consume(0, isolation_level=COMMITTED, max_bytes=1)
    assert response.aborted_transactions == [(7, 0)]
    assert visible(await committed(leader)) == [b"third"]
    await asyncio.wait_for(leader.partition.jobs.ended(), DEADLINE_S)


@on_cluster()
async def test_records_are_withheld_if_the_aborted_list_cannot_be_read(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = cluster[1]
    await transact(leader, b"aborted", 7, False)

    def fail(job: AbortedJob) -> None:
        job.close()
        raise OSError("unreadable")

    monkeypatch.setattr(AbortedJob, "__call__", fail)
    response = await committed(leader)
    assert (response.error_code, len(response.records)) == (ErrorCode.kafka_storage_error, 0)
    await asyncio.wait_for(leader.partition.jobs.ended(), DEADLINE_S)


@on_cluster()
async def test_records_are_withheld_if_leadership_ends_during_the_lookup(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = cluster[1]
    await transact(leader, b"aborted", 7, False)
    run = AbortedJob.__call__

    def change_leader(job: AbortedJob) -> object:
        leader.loop.call_soon_threadsafe(lambda: cluster.change(leader=2))
        return run(job)

    monkeypatch.setattr(AbortedJob, "__call__", change_leader)
    response = await committed(leader)
    assert (response.error_code, len(response.records)) == (ErrorCode.not_leader_or_follower, 0)


# -- waiting fetches ---------------------------------------------------------------------------------------------------


@on_cluster()
async def test_a_waiting_fetch_wakes_when_the_transaction_ends(cluster: Cluster) -> None:
    leader = cluster[1]
    await leader.produce_request(batch(b"a"))
    waiting = asyncio.ensure_future(committed(leader, max_wait_ms=WAIT_MS))
    await asyncio.sleep(0)
    await leader.produce_request(batch(b"b", sequence=1))
    await leader.produce(b"plain")
    assert not waiting.done()
    await leader.end_transaction(7, 0)
    assert visible(await asyncio.wait_for(waiting, DEADLINE_S)) == [b"a", b"b", b"plain"]


@on_cluster()
async def test_a_waiting_fetch_does_not_wake_when_a_transaction_begins(cluster: Cluster) -> None:
    leader = cluster[1]
    waiting = asyncio.ensure_future(committed(leader, max_wait_ms=WAIT_MS))
    await asyncio.sleep(0)
    await leader.produce_request(batch(b"a"))
    await until(lambda: leader.partition.high_watermark == 1)
    assert not waiting.done()
    await leader.end_transaction(7, 0)
    assert visible(await asyncio.wait_for(waiting, DEADLINE_S)) == [b"a"]


@on_cluster()
async def test_a_waiting_fetch_wakes_for_plain_records(cluster: Cluster) -> None:
    leader = cluster[1]
    waiting = asyncio.ensure_future(committed(leader, max_wait_ms=WAIT_MS))
    await asyncio.sleep(0)
    await leader.produce(b"plain")
    assert visible(await asyncio.wait_for(waiting, DEADLINE_S)) == [b"plain"]


@on_cluster()
async def test_a_fetch_that_waits_for_more_bytes_keeps_no_lookup_open(cluster: Cluster) -> None:
    leader = cluster[1]
    await transact(leader, b"aborted", 7, False)
    wanted = FetchPartition(0, -1, 0, -1, -1, 1 << 20)
    fetch = FetchRequest(
        max_wait_ms=50, min_bytes=1 << 16, isolation_level=COMMITTED, topics=[FetchTopic(None, TOPIC_ID, [wanted])]
    )
    response = (await leader.fetch(fetch)).topics[0][2][0]
    assert response.aborted_transactions == [(7, 0)]
    await asyncio.wait_for(leader.partition.jobs.ended(), DEADLINE_S)


# -- followers and failover --------------------------------------------------------------------------------------------


@on_cluster(racks={1: "a", 2: "b"})
async def test_a_follower_serves_read_committed_from_its_own_log(cluster: Cluster) -> None:
    leader, follower = cluster[1], cluster[2]
    await transact(leader, b"aborted", 7, False)
    await transact(leader, b"committed", 8, True)
    await leader.produce_request(batch(b"open", producer_id=9))
    await until(lambda: is_caught_up(cluster) and follower.partition.high_watermark == 5)
    assert not follower.partition.leads
    response = await committed(follower, rack="b")
    assert (response.last_stable_offset, response.aborted_transactions) == (4, [(7, 0)])
    assert visible(response) == [b"committed"]


@on_cluster(racks={1: "a", 2: "b"})
async def test_a_fetch_that_waits_at_a_follower_wakes_when_the_transaction_ends(cluster: Cluster) -> None:
    leader, follower = cluster[1], cluster[2]
    await leader.produce_request(batch(b"a"))
    await until(lambda: follower.partition.high_watermark == 1)
    waiting = asyncio.ensure_future(committed(follower, max_wait_ms=WAIT_MS, rack="b"))
    await asyncio.sleep(0)
    await leader.end_transaction(7, 0)
    assert visible(await asyncio.wait_for(waiting, DEADLINE_S)) == [b"a"]


@on_cluster()
async def test_a_new_leader_knows_the_open_and_the_aborted_transactions(cluster: Cluster) -> None:
    await transact(cluster[1], b"aborted", 7, False)
    await cluster[1].produce_request(batch(b"open", producer_id=8))
    await until(lambda: is_caught_up(cluster))
    await cluster.kill(1)
    cluster.change(leader=2, isr=(2, 3))
    leader = cluster[2]
    await until(lambda: leader.partition.high_watermark == 3)
    response = await committed(leader)
    assert (response.last_stable_offset, response.aborted_transactions) == (2, [(7, 0)])
    assert (await leader.produce_request(batch(b"more", producer_id=8, sequence=1))).error_code == 0
    assert leader.coordinator.requests == []
    await leader.end_transaction(8, 0, coordinator_epoch=2)
    assert visible(await committed(leader)) == [b"open", b"more"]


@on_cluster()
async def test_a_restarted_node_serves_the_same(cluster: Cluster) -> None:
    await transact(cluster[1], b"aborted", 7, False)
    await cluster[1].produce_request(batch(b"open", producer_id=8))
    await until(lambda: is_caught_up(cluster))
    await cluster.kill(1)
    node = await cluster.start(1)
    await until(lambda: node.partition.leads and node.partition.high_watermark == 3)
    response = await committed(node)
    assert (response.last_stable_offset, response.aborted_transactions) == (2, [(7, 0)])


# -- ListOffsets and DescribeProducers ---------------------------------------------------------------------------------


@on_cluster()
async def test_the_latest_offset_is_the_last_stable_offset(cluster: Cluster) -> None:
    leader = cluster[1]
    await leader.produce(b"before")
    await leader.produce_request(batch(b"open"))
    assert (await leader.listed_offset(-1, isolation_level=COMMITTED))["offset"] == 1
    assert (await leader.listed_offset(-1))["offset"] == 2
    assert (await leader.listed_offset(-1, replica_id=-2, isolation_level=COMMITTED))["offset"] == 2
    await leader.end_transaction(7, 0)
    assert (await leader.listed_offset(-1, isolation_level=COMMITTED))["offset"] == 3


@on_cluster()
async def test_lookups_by_time_do_not_find_records_of_an_open_transaction(cluster: Cluster) -> None:
    leader = cluster[1]
    await leader.produce_request(batch(b"open"))
    for timestamp in (0, -3):
        assert (await leader.listed_offset(timestamp))["offset"] == 0
        assert (await leader.listed_offset(timestamp, isolation_level=COMMITTED))["offset"] == -1
    await leader.end_transaction(7, 0)
    assert (await leader.listed_offset(0, isolation_level=COMMITTED))["offset"] == 0


@on_cluster()
async def test_describe_producers_shows_open_transactions_on_every_replica(cluster: Cluster) -> None:
    await cluster[1].produce_request(batch(b"open", epoch=2, sequence=4))
    await transact(cluster[1], b"done", 8, True)
    await until(lambda: is_caught_up(cluster))
    topics = [{"name": TOPIC, "partition_indexes": [0, 9]}]
    body = write_request(ApiKey.DESCRIBE_PRODUCERS, 0, {"topics": topics})
    message = read_request(ApiKey.DESCRIBE_PRODUCERS, 0, body)
    for node in cluster.nodes.values():
        request = cast(Any, SimpleNamespace(message=message, api_version=0, access=OPEN_ACCESS))
        answer = await describe_producers.handle(node.host, request)
        written = write_response(ApiKey.DESCRIBE_PRODUCERS, 0, answer)
        hosted, missing = read_response(ApiKey.DESCRIBE_PRODUCERS, 0, written).topics[0].partitions
        assert missing.error_code is ErrorCode.unknown_topic_or_partition
        assert [
            (each.producer_id, each.producer_epoch, each.last_sequence, each.coordinator_epoch)
            for each in hosted.active_producers
        ] == [(7, 2, 4, -1), (8, 0, 0, 1)]
        assert [each.current_txn_start_offset for each in hosted.active_producers] == [0, -1]
        assert all(each.last_timestamp == 1 for each in hosted.active_producers)
