"""Followers copy their leader's log, know what is committed, and cost nothing while idle."""

import asyncio
import time
from pathlib import Path

import pytest
from tests.node.support_replicas import TOPIC, Cluster, on_cluster
from tests.support.eventually import until

from chronik.metadata.commands import AlterConfigs
from chronik.node.replicas.partition_host import PartitionHost
from chronik.wire.errors import ErrorCode, KafkaError


def is_caught_up(cluster: Cluster) -> bool:
    ends = [(n.partition.log_end_offset, n.partition.high_watermark) for n in cluster.nodes.values()]
    return len(set(ends)) == 1 and ends[0][0] == ends[0][1]


@pytest.mark.parametrize("durability", ["synced", "replicated"])
async def test_followers_store_the_leaders_bytes_and_learn_its_watermark(tmp_path: Path, durability: str) -> None:
    async with Cluster(tmp_path, durability=durability) as cluster:
        for count in range(20):
            await cluster[1].produce(b"value-%d" % count, b"x" * 1000 * count)
        await until(lambda: is_caught_up(cluster))
        assert cluster[1].partition.high_watermark == 40
        assert cluster[1].contents() == cluster[2].contents() == cluster[3].contents()


@on_cluster()
async def test_a_removed_and_readded_replica_reports_its_offset_again(cluster: Cluster) -> None:
    """Found by the simulator (three-nodes seed 5079): a reassignment that was cancelled and restarted never ended."""
    await cluster[1].produce(b"first")
    await until(lambda: is_caught_up(cluster))
    cluster[3].metadata.hold()
    cluster.change(isr=(1, 2))
    cluster.change(replicas=(1, 2))
    cluster.change(replicas=(1, 2, 3))
    leader = cluster[1].partition.leader
    assert leader is not None
    await until(lambda: leader.durable_end_of(3) == 1)
    cluster[3].metadata.release()


@on_cluster()
async def test_acks_all_waits_for_every_in_sync_replica(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    cluster.cut(1, 3)
    done = cluster[1].produce(b"second")
    await until(lambda: cluster[2].partition.log_end_offset == 2)
    await until(lambda: cluster[1].partition.log.synced_end_offset == 2)
    assert not done.done()
    assert cluster[1].partition.high_watermark == 1
    cluster.heal()
    await asyncio.wait_for(done, 10)
    assert cluster[1].partition.high_watermark == 2


@on_cluster()
async def test_acks_all_waits_until_a_follower_has_synced(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    follower = cluster[2].partition
    log_sync, follower.log.sync_job = follower.log.sync_job, lambda: None  # type: ignore[method-assign]
    done = cluster[1].produce(b"second")
    await until(lambda: follower.log_end_offset == 2 and cluster[3].partition.log.synced_end_offset == 2)
    assert follower.log.synced_end_offset == 1
    assert follower.high_watermark <= 1
    assert not done.done()
    follower.log.sync_job = log_sync  # type: ignore[method-assign]
    await cluster[2].host.sync_all()
    await asyncio.wait_for(done, 10)


@on_cluster()
async def test_a_new_follower_receives_earlier_records(cluster: Cluster) -> None:
    await cluster.stop(3)
    cluster.change(isr=(1, 2))
    for count in range(50):
        await cluster[1].produce(b"x" * 50_000, b"%d" % count)
    cluster.register(3)
    await cluster.start(3)
    await until(lambda: is_caught_up(cluster))
    await until(lambda: set(cluster.state.isr) == {1, 2, 3})
    assert cluster[1].contents() == cluster[3].contents()


@on_cluster()
async def test_an_idle_follower_sends_at_most_two_empty_fetches_a_second(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    await until(lambda: is_caught_up(cluster))
    asked: list[int] = []
    wire = cluster[2].wires[-1]
    send = wire.send
    wire.send = lambda key, version, body: asked.append(len(body)) or send(key, version, body)  # type: ignore[method-assign,func-returns-value]
    began_s = time.monotonic()
    await until(lambda: len(asked) >= 5, "the follower sends five fetches")
    assert time.monotonic() - began_s > 1.2
    assert max(asked) < 60


@on_cluster()
async def test_a_follower_retries_until_the_new_leader_knows_that_it_leads(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    await until(lambda: is_caught_up(cluster))
    connections = len(cluster[3].wires)
    cluster[2].metadata.hold()
    cluster.change(leader=2)
    await until(lambda: len(cluster[3].wires) > connections, "node 3 connects to the new leader")
    assert cluster[3].partition.leader_epoch == 1
    cluster[2].metadata.release()
    await cluster[2].produce(b"second")
    await until(lambda: is_caught_up(cluster))
    assert cluster[1].contents() == cluster[2].contents() == cluster[3].contents()


@on_cluster()
async def test_a_follower_that_learns_of_a_change_before_the_leader_loses_nothing(cluster: Cluster) -> None:
    cluster[1].metadata.hold()
    cluster.change(leader=2)
    cluster.change(leader=1)
    await until(lambda: {cluster[node].partition.leader_epoch for node in (2, 3)} == {2})
    cluster[1].metadata.release()
    await cluster[1].produce(b"first")
    await until(lambda: is_caught_up(cluster))


@on_cluster()
async def test_followers_delete_the_records_that_the_leader_deletes(cluster: Cluster) -> None:
    for _ in range(10):
        await cluster[1].produce(b"x")
    assert await cluster[1].partition.delete_records(6, 10) == 6
    await until(lambda: {node.partition.log_start_offset for node in cluster.nodes.values()} == {6})


@pytest.mark.parametrize("start", [6, 7], ids=["between batches", "inside a batch"])
@on_cluster()
async def test_a_follower_below_the_leaders_log_start_restarts_at_that_offset(cluster: Cluster, start: int) -> None:
    await cluster[1].produce(b"a", b"b")
    await until(lambda: is_caught_up(cluster))
    await cluster.stop(3)
    cluster.change(isr=(1, 2))
    for _ in range(4):
        await cluster[1].produce(b"a", b"b")
    await cluster[1].partition.delete_records(start, 10)
    cluster.register(3)
    node = await cluster.start(3)
    await until(lambda: node.partition.log_end_offset == 10 and node.partition.high_watermark == 10)
    await until(lambda: node.partition.log_start_offset == start)
    await until(lambda: 3 in cluster.state.isr)


@on_cluster()
async def test_a_removed_replica_deletes_its_log_and_fetches_anew_if_it_is_readded(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    folder = cluster.path / "node-3" / "logs" / f"{TOPIC}-0"
    assert folder.exists()
    cluster.change(isr=(1, 2), replicas=(1, 2))
    await until(lambda: not cluster[3].has_partition and not folder.exists())
    await cluster[1].produce(b"second")
    cluster.change(replicas=(1, 2, 3), adding=(3,))
    await until(lambda: cluster[3].has_partition and cluster[3].partition.high_watermark == 2)
    await until(lambda: set(cluster.state.isr) == {1, 2, 3})
    assert cluster[1].contents() == cluster[3].contents()


@on_cluster()
async def test_a_replica_readded_before_its_log_is_deleted_keeps_the_log(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    await until(lambda: is_caught_up(cluster))
    cluster.change(isr=(1, 2), replicas=(1, 2))
    cluster.change(replicas=(1, 2, 3), adding=(3,))
    await cluster[3].host.settled()
    await until(lambda: set(cluster.state.isr) == {1, 2, 3})
    assert cluster[1].contents() == cluster[3].contents()


@on_cluster()
async def test_deleting_a_topic_fails_its_requests_at_once_and_removes_its_log(cluster: Cluster) -> None:
    cluster.cut(1, 3)
    done = cluster[1].produce(b"first")
    cluster.delete_topic()
    with pytest.raises(KafkaError) as raised:
        await done
    assert raised.value.code is ErrorCode.unknown_topic_or_partition
    for node in cluster.nodes.values():
        await node.host.settled()
        assert not node.has_partition
        assert not list((cluster.path / f"node-{node.id}" / "logs").iterdir())


@on_cluster()
async def test_no_flush_of_a_removed_log_begins_while_it_is_closed(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    partition, could_flush = cluster[1].partition, list[bool]()
    close = partition.log.close

    def close_log() -> bool:
        could_flush.append(partition.can_flush)
        return close()

    partition.log.close = close_log  # type: ignore[method-assign]
    cluster.delete_topic()
    await cluster[1].host.settled()
    assert could_flush == [False]
    # Its entries in the commit log must not keep a file from being recycled.
    assert partition.can_flush
    assert partition.flush_job() is None


@on_cluster()
async def test_watermarks_and_recovery_points_survive_a_restart(cluster: Cluster) -> None:
    for _ in range(5):
        await cluster[1].produce(b"x")
    await until(lambda: is_caught_up(cluster))
    await cluster[3].host.record_recovery_points()
    await cluster.kill(3)
    cluster.cut(1, 3)
    cluster.register(3)
    node = await cluster.start(3)
    assert node.partition.high_watermark == 5


@on_cluster(replicas=(1, 2))
async def test_a_host_opens_only_partitions_assigned_by_the_image(cluster: Cluster) -> None:
    assert not cluster[3].has_partition
    assert isinstance(cluster[3].host, PartitionHost)
    await cluster[1].produce(b"x")


@pytest.mark.parametrize("side", ["leader", "follower"])
async def test_a_throttled_replica_waits_for_its_rate_and_in_sync_replicas_do_not(tmp_path: Path, side: str) -> None:
    throttled = {f"{side}.replication.throttled.replicas": "0:1,0:2,0:3"}
    rate = f"{side}.replication.throttled.rate"
    async with Cluster(tmp_path, replicas=(1, 2), configs=throttled) as cluster:
        for _ in range(4):
            await cluster[1].produce(b"x" * 100_000)
        cluster.commit(AlterConfigs("broker", "", {rate: "0"}))
        cluster.change(replicas=(1, 2, 3), adding=(3,))
        await until(lambda: cluster[3].has_partition)
        # Replica 2 is in sync: acknowledgements do not wait for the rate.
        for _ in range(4):
            await asyncio.wait_for(cluster[1].produce(b"y" * 100_000), 10)
        assert cluster[3].partition.log_end_offset == 0
        cluster.commit(AlterConfigs("broker", "", {rate: "2000000"}))
        await until(lambda: 3 in cluster.state.isr)
        assert cluster[1].contents() == cluster[3].contents()
        # In sync now: neither this replica nor producers wait for the rate.
        cluster.commit(AlterConfigs("broker", "", {rate: "0"}))
        for _ in range(2):
            await asyncio.wait_for(cluster[1].produce(b"z" * 100_000), 10)
        await until(lambda: is_caught_up(cluster))
