"""Transactions of encoded batches on a real node, in both protocol generations."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
from tests.support import topics
from tests.support.node import Node
from tests.support.topics import numbered

from chronik.client import producer
from chronik.client.cluster import Cluster
from chronik.client.endpoint import parse_bootstrap
from chronik.client.groups import Groups
from chronik.client.producer import Producer, TransactionalProducer
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.pipeline.source.ranges import RecordRange
from chronik.pipeline.source.reading import ReadSettings, read_range
from chronik.wire.batch import encode_batch
from chronik.wire.errors import ErrorCode, KafkaError

FENCED = (ErrorCode.invalid_producer_epoch, ErrorCode.producer_fenced)


@pytest.fixture(params=[1, 2], ids=["generation 1", "generation 2"])
def generation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    if request.param == 1:
        monkeypatch.setattr(producer, "IMPLICIT_FROM", 100)  # no cluster has finalized that level
    yield request.param


def run(node: Node, work: Callable[[Cluster], Awaitable[None]]) -> None:
    async def main() -> None:
        async with Cluster(parse_bootstrap(node.bootstrap)) as cluster:
            await work(cluster)

    asyncio.run(main())


def values(node: Node, topic: str, partition: int) -> list[bytes]:
    """Return what a read_committed consumer reads."""
    with BlockingCluster(node.bootstrap) as cluster:
        end = cluster.offsets([(topic, partition)], -1, committed_only=True)[topic, partition]
    settings = ReadSettings(node.bootstrap, committed_only=True)
    read = read_range(RecordRange(topic, partition, 0, end), "", settings)
    return [value for batch in read for value in batch.column("value").to_pylist()]


def written(count: int, first: int = 0) -> list[bytes]:
    return [encode_batch(numbered(count, first)), encode_batch(numbered(1, first + count))]


def numbers(count: int, first: int = 0) -> list[bytes]:
    return [b"v%d" % number for number in range(first, first + count)]


def test_a_transaction_commits_its_partitions_and_offsets_together(shared_node: Node, generation: int) -> None:
    name, group = f"producer-commit-{generation}", f"producer-group-{generation}"
    topics.create(shared_node.bootstrap, name, 3)

    async def work(cluster: Cluster) -> None:
        for round in range(2):
            transaction = TransactionalProducer(cluster, name)
            await transaction.begin()
            assert transaction._is_implicit == (generation == 2)
            await transaction.append({(name, 0): written(10, 20 * round), (name, 1): written(5, 20 * round)})
            await transaction.append({(name, 0): [encode_batch(numbered(1, 20 * round + 11))]})
            await transaction.commit_offsets(group, {(name, 0): round + 7})
            await transaction.commit()
            await TransactionalProducer(cluster, name).begin()  # waits until the commit is in every partition
            assert await Groups(cluster).committed(group) == {(name, 0): round + 7}

    run(shared_node, work)
    assert values(shared_node, name, 0) == numbers(12) + numbers(12, 20)
    assert values(shared_node, name, 1) == numbers(6) + numbers(6, 20)


def test_stable_offsets_are_read_after_the_transaction_that_may_change_them(shared_node: Node, generation: int) -> None:
    name, group = f"producer-stable-{generation}", f"producer-stable-group-{generation}"
    topics.create(shared_node.bootstrap, name, 1)

    async def work(cluster: Cluster) -> None:
        transaction = TransactionalProducer(cluster, name)
        for offset in (1, 2):
            await transaction.begin()
            await transaction.append({(name, 0): written(10, 20 * offset)})
            await transaction.commit_offsets(group, {(name, 0): offset})
            if offset == 1:
                await transaction.commit()
        groups = Groups(cluster)
        assert await groups.committed(group) == {(name, 0): 1}
        stable = asyncio.create_task(groups.committed(group, is_stable=True))
        assert await asyncio.wait([stable], timeout=0.3) == (set(), {stable}), "the transaction is open"
        await transaction.commit()
        assert await stable == {(name, 0): 2}

    run(shared_node, work)


def test_an_aborted_transaction_leaves_no_record_and_no_offset(shared_node: Node, generation: int) -> None:
    name, group = f"producer-abort-{generation}", f"producer-abort-group-{generation}"
    topics.create(shared_node.bootstrap, name, 1)

    async def work(cluster: Cluster) -> None:
        transaction = TransactionalProducer(cluster, name)
        await transaction.begin()
        await transaction.append({(name, 0): written(10)})
        await transaction.commit_offsets(group, {(name, 0): 7})
        await transaction.abort()
        await transaction.begin()
        await Producer(cluster).append({(name, 0): [encode_batch(numbered(1, 50))]})
        assert await Groups(cluster).committed(group) == {}

    run(shared_node, work)
    assert values(shared_node, name, 0) == [b"v50"]


def test_a_newer_producer_aborts_and_fences_the_older_one(shared_node: Node, generation: int) -> None:
    name = f"producer-fence-{generation}"
    topics.create(shared_node.bootstrap, name, 2)

    async def work(cluster: Cluster) -> None:
        older, newer = TransactionalProducer(cluster, name), TransactionalProducer(cluster, name)
        await older.begin()
        await older.append({(name, 0): written(10)})
        await newer.begin()
        with pytest.raises(KafkaError) as raised:
            await older.append({(name, 1): written(10)})
        assert raised.value.code in FENCED
        with pytest.raises(KafkaError) as raised:
            await older.commit()
        assert raised.value.code in FENCED
        await newer.append({(name, 0): written(3, 30)})
        await newer.commit()
        await newer.begin()

    run(shared_node, work)
    assert values(shared_node, name, 0) == numbers(4, 30)
    assert values(shared_node, name, 1) == []
