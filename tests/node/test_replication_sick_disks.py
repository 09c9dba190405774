"""A partition on a node whose disk hangs: no wait is unbounded, another replica leads, and the node recovers."""

from __future__ import annotations

import asyncio

import pytest
from tests.node.support_replicas import Cluster, on_cluster
from tests.node.test_replication_following import is_caught_up
from tests.support.eventually import until

from chronik.storage.config import LogConfig
from chronik.storage.disk import StorageError
from chronik.storage.folder import DataFolder
from chronik.storage.log import Log
from chronik.wire.errors import ErrorCode, KafkaError

TIMEOUT_MS = 300
LAG_MS = 1_500


async def outcome(answer: asyncio.Future[None]) -> ErrorCode:
    async with asyncio.timeout(10):
        try:
            await answer
        except KafkaError as error:
            return error.code
    return ErrorCode.none


@on_cluster(disk_timeout_ms=TIMEOUT_MS)
async def test_a_leader_with_a_hung_disk_returns_request_timed_out_and_is_replaced(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    await until(lambda: is_caught_up(cluster))
    cluster[1].hang()
    assert await outcome(cluster[1].produce(b"second")) is ErrorCode.request_timed_out
    with pytest.raises(StorageError, match="does not answer"):
        cluster[1].partition.log.append(b"", [], 0, 1)
    await until(lambda: cluster.state.leader in (2, 3))
    assert 1 not in cluster.state.isr, "nobody has to wait for it"
    leader = cluster[cluster.state.leader]
    await until(lambda: leader.partition.leads)
    assert leader.partition.log_end_offset == 2, "it was in doubt, and is there"
    await leader.produce(b"third")
    cluster[1].cure()
    await until(lambda: is_caught_up(cluster))
    await until(lambda: 1 in cluster.state.isr)
    assert not cluster[1].partition.log.read_only
    assert cluster[1].contents() == leader.contents()


@on_cluster(disk_timeout_ms=TIMEOUT_MS, replicas=(1,))
async def test_a_resent_batch_with_an_unknown_outcome_waits_for_the_hung_sync(cluster: Cluster) -> None:
    one = cluster[1]
    one.hang()
    assert await outcome(one.produce(b"first")) is ErrorCode.request_timed_out
    again = one.committed(1)
    one.cure()
    assert await outcome(again) is ErrorCode.none
    assert one.partition.log_end_offset == 1


@on_cluster(disk_timeout_ms=TIMEOUT_MS, replicas=(1,))
async def test_the_only_replica_accepts_records_again_when_its_disk_recovers(cluster: Cluster) -> None:
    one = cluster[1]
    one.hang()
    assert await outcome(one.produce(b"first")) is ErrorCode.request_timed_out
    with pytest.raises(StorageError, match="does not answer"):
        one.append(b"second")
    one.cure()
    await until(lambda: not one.partition.log.read_only)
    await one.produce(b"second")
    assert one.partition.high_watermark == 2


@on_cluster(disk_timeout_ms=TIMEOUT_MS, lag_ms=LAG_MS, configs={"min.insync.replicas": "2"})
async def test_a_follower_whose_disk_hangs_leaves_the_isr_and_rejoins_it(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    await until(lambda: is_caught_up(cluster))
    cluster[3].hang()
    assert await outcome(cluster[1].produce(b"second")) is ErrorCode.none
    assert (cluster.state.leader, cluster.state.isr) == (1, (1, 2))
    await until(lambda: cluster[3].partition.log.read_only)
    cluster[3].cure()
    await until(lambda: 3 in cluster.state.isr)
    await cluster[1].produce(b"third")
    await until(lambda: is_caught_up(cluster))


@on_cluster(disk_timeout_ms=TIMEOUT_MS, durability="replicated")
async def test_a_hung_background_sync_blocks_nothing_with_replicated_durability(cluster: Cluster) -> None:
    one = cluster[1]
    await one.produce(b"first")
    one.hang()
    with pytest.raises(TimeoutError, match="does not answer"):
        await one.host.sync_all()
    assert await outcome(one.produce(b"second")) is ErrorCode.none
    assert not one.partition.log.read_only
    assert cluster.state.leader == 1


@on_cluster(disk_timeout_ms=TIMEOUT_MS, replicas=(1,))
async def test_a_node_with_a_hung_disk_still_stops_but_not_cleanly(cluster: Cluster) -> None:
    one = cluster.nodes.pop(1)
    await one.produce(b"first")
    one.hang()
    waiting = one.produce(b"second")
    async with asyncio.timeout(20 * TIMEOUT_MS / 1000):
        await one.host.close_all(7)
    assert await outcome(waiting) is ErrorCode.request_timed_out
    one.cure()
    one.folder.close()
    one.executor.shutdown()
    folder = DataFolder.open(one.env.disk, str(cluster.path / "node-1"), 1, "cluster")
    assert not folder.was_clean
    log = Log.open(one.env.disk, folder.log_path("orders", 0), LogConfig(), 1, clean=False)
    assert log.log_end_offset == 2
    log.close()
    folder.close()


@on_cluster(disk_timeout_ms=TIMEOUT_MS, replicas=(1,))
async def test_a_log_on_a_hung_disk_is_removed_when_the_disk_recovers(cluster: Cluster) -> None:
    one = cluster[1]
    one.hang()
    assert await outcome(one.produce(b"first")) is ErrorCode.request_timed_out
    cluster.delete_topic()
    await asyncio.wait_for(one.host.settled(), 10)
    assert one.folder.partitions() == [("orders", 0)]
    one.cure()
    await until(lambda: not one.host._syncer.disk.is_stuck)
    await one.host.record_recovery_points()
    await one.host.settled()
    assert one.folder.partitions() == []
