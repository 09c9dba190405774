"""Followers that return to a compacted topic know the same transactions as their leader."""

from __future__ import annotations

import pytest
from tests.node.support_replicas import Cluster, Node, on_cluster
from tests.node.test_healing import contents, housekeeping
from tests.node.test_replication_following import is_caught_up
from tests.storage.helpers import headers, open_transactions
from tests.support.eventually import until

from chronik.wire.batch import encode_batch

COMPACTED = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0", "delete.retention.ms": "1000"}
DAY_MS = 86_400_000
PRODUCER = 7


def batch(sequence: int, key: bytes, value: bytes) -> bytes:
    record = (key, value, (), 1)
    return encode_batch([record], producer_id=PRODUCER, producer_epoch=0, base_sequence=sequence, is_transactional=True)


async def compact(node: Node, passes: int = 3) -> None:
    """Compact with new records each time. Markers go with the third pass, after their delete horizon."""
    for number in range(passes):
        await node.produce(b"%d" % number)
        node.partition.log.roll(1)
        work = housekeeping(node, lambda number=number: (1 + number) * DAY_MS)  # type: ignore[misc]
        await work._round("compaction", work._compact)()


def markers(node: Node) -> int:
    data = contents(node)
    return sum(header.is_control for _, header in headers(data))


@pytest.mark.parametrize("continues", [True, False])
@on_cluster(configs=COMPACTED)
async def test_a_returning_follower_learns_of_aborts_that_compaction_removed(cluster: Cluster, continues: bool) -> None:
    leader = cluster[1]
    await leader.produce_request(batch(0, b"a", b"aborted"))
    await until(lambda: is_caught_up(cluster))
    await cluster.stop(3)
    cluster.change(isr=(1, 2))
    await leader.end_transaction(PRODUCER, 0, is_commit=False)
    if continues:
        await leader.produce_request(batch(1, b"b", b"committed"))
        await leader.end_transaction(PRODUCER, 0, is_commit=True)
    else:
        leader.partition.log.producers.expire(9 * DAY_MS)
    await compact(leader)
    assert b"aborted" not in contents(leader) and markers(leader) == continues
    cluster.register(3)
    node = await cluster.start(3)
    await until(lambda: 3 in cluster.state.isr and is_caught_up(cluster))
    log = node.partition.log
    assert open_transactions(log) == {}
    assert node.partition.last_stable_offset == node.partition.high_watermark == log.log_end_offset
    assert contents(node) == contents(leader)
