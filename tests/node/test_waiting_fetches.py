"""Consumers' fetches that wait: which partitions they read again, and when."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest
from tests.node.support_replicas import TOPIC, TOPIC_ID, Cluster, Node, on_cluster
from tests.support.eventually import until

from chronik.metadata.commands import Assignment, CreateTopic
from chronik.node.replicas.partition import Partition
from chronik.wire.batch import decode_batch, encode_batch
from chronik.wire.errors import ErrorCode
from chronik.wire.fetch import FetchPartition, FetchPartitionResponse, FetchRequest, FetchTopic

OTHER, OTHER_ID = "other", UUID(int=78)
LONG_MS = 60_000


def fetch_of(*requested: tuple[UUID, int], offset: int = 0, min_bytes: int = 1) -> FetchRequest:
    topics = [
        FetchTopic(None, topic, [FetchPartition(index, -1, offset, -1, -1, 1 << 20)]) for topic, index in requested
    ]
    return FetchRequest(max_wait_ms=LONG_MS, min_bytes=min_bytes, topics=topics)


async def waiting(node: Node, fetch: FetchRequest) -> asyncio.Task[list[FetchPartitionResponse]]:
    """Send a fetch, and return when it waits."""

    async def send() -> list[FetchPartitionResponse]:
        response = await node.fetch(fetch)
        return [partition for _, _, partitions in response.topics for partition in partitions]

    task = asyncio.create_task(send())
    await until(lambda: bool(node.partition._waits.fetches))
    return task


def values(response: FetchPartitionResponse) -> list[bytes | None]:
    records, at, found = response.records, 0, []
    while at < len(records):
        found += [record.value for record in decode_batch(records, at)]
        at += 12 + int.from_bytes(records[at + 8 : at + 12], "big")
    return found


@on_cluster(replicas=(1,), durability="replicated")
async def test_one_response_has_everything_that_arrives_in_a_turn_of_the_loop(cluster: Cluster) -> None:
    leader = cluster[1]
    fetch = await waiting(leader, fetch_of((TOPIC_ID, 0)))
    leader.append(b"a")
    leader.append(b"b")
    (response,) = await fetch
    assert values(response) == [b"a", b"b"]


@on_cluster(replicas=(1,), durability="replicated")
async def test_a_fetch_that_waited_reads_only_the_partitions_with_news_again(cluster: Cluster) -> None:
    cluster.commit(CreateTopic(OTHER, OTHER_ID, (Assignment((1,), (1,)),) * 3, {}))
    leader = cluster[1]
    await until(lambda: (OTHER, 2) in leader.host.partitions)
    fetch = await waiting(leader, fetch_of((OTHER_ID, 0), (TOPIC_ID, 0), (OTHER_ID, 2)))
    read: list[tuple[str, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        check = Partition.check_leader_epoch

        def checked(partition: Partition, epoch: int) -> None:
            read.append((partition.topic, partition.index))
            check(partition, epoch)

        patch.setattr(Partition, "check_leader_epoch", checked)
        batch = encode_batch([(b"k", b"z", (), 1)])
        leader.host.partitions[(OTHER, 2)].append(memoryview(bytearray(batch)), 1)
        leader.append(b"a")
        responses = await fetch
    assert read == [(TOPIC, 0), (OTHER, 2)]
    assert [(values(each), each.high_watermark) for each in responses] == [([], 0), ([b"z"], 1), ([b"a"], 1)]


@on_cluster(replicas=(1,), durability="replicated")
async def test_records_that_were_too_few_at_first_are_not_held_and_are_in_the_response(cluster: Cluster) -> None:
    cluster.commit(CreateTopic(OTHER, OTHER_ID, (Assignment((1,), (1,)),), {}))
    leader = cluster[1]
    await until(lambda: (OTHER, 0) in leader.host.partitions)
    leader.append(b"a")
    one = len(leader.contents())
    fetch = await waiting(leader, fetch_of((TOPIC_ID, 0), (OTHER_ID, 0), min_bytes=one + 1))
    (pending,) = leader.partition._waits.fetches
    assert [len(each.records) for each in pending._responses] == [0, 0]  # type: ignore[attr-defined]
    leader.host.partitions[(OTHER, 0)].append(memoryview(bytearray(encode_batch([(b"k", b"z", (), 1)]))), 1)
    first, second = await fetch
    assert (values(first), values(second)) == ([b"a"], [b"z"])


@on_cluster(replicas=(1,), durability="replicated")
async def test_a_partition_that_is_requested_twice_has_its_records_in_both_places(cluster: Cluster) -> None:
    leader = cluster[1]
    fetch = await waiting(leader, fetch_of((TOPIC_ID, 0), (TOPIC_ID, 0)))
    leader.append(b"a")
    first, second = await fetch
    assert values(first) == values(second) == [b"a"]


@on_cluster(replicas=(1,), durability="replicated")
async def test_a_waiting_fetch_is_refused_if_the_lease_expires_before_its_response(cluster: Cluster) -> None:
    leader = cluster[1]
    fetch = await waiting(leader, fetch_of((TOPIC_ID, 0)))
    leader.append(b"a")
    leader.has_lease = False
    (response,) = await fetch
    assert (response.error_code, values(response)) == (ErrorCode.not_leader_or_follower, [])


@on_cluster(replicas=(1,), durability="replicated")
async def test_data_does_not_end_a_fetch_whose_connection_closed_in_the_same_turn(cluster: Cluster) -> None:
    leader = cluster[1]
    fetch = await waiting(leader, fetch_of((TOPIC_ID, 0)))
    (pending,) = leader.partition._waits.fetches
    leader.append(b"a")
    pending._abandon()  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not fetch.done()
    fetch.cancel()
