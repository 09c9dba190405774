"""Records whose deletion was acknowledged stay deleted after every leader change."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import pytest
from tests.node.support_replicas import TOPIC, TOPIC_ID, Cluster, on_cluster
from tests.support.eventually import until

from chronik.metadata.commands import DeleteTopic
from chronik.node.config import NodeConfig
from chronik.node.replicas.housekeeping import Housekeeping
from chronik.wire.errors import ErrorCode, KafkaError

WAIT_S = 10.0
NO_WAIT_S = 0.05


async def written(cluster: Cluster) -> None:
    for _ in range(10):
        await cluster[1].produce(b"x")
    await until(lambda: all(node.partition.high_watermark == 10 for node in cluster.nodes.values()))


def starts(cluster: Cluster) -> list[int]:
    return [node.partition.durable_log_start for node in cluster.nodes.values()]


@on_cluster()
async def test_delete_records_waits_for_every_in_sync_replica(cluster: Cluster) -> None:
    await written(cluster)
    assert await cluster[1].partition.delete_records(6, WAIT_S) == 6
    assert starts(cluster) == [6, 6, 6]
    cluster.change(leader=2)
    assert cluster[2].partition.log_start_offset == 6
    # The low watermark is the one that all replicas share, although this request names a lower offset.
    await until(lambda: cluster[2].partition.leads)
    assert await cluster[2].partition.delete_records(2, WAIT_S) == 6


@on_cluster()
async def test_an_unreachable_follower_delays_delete_records_until_it_leaves_the_isr(cluster: Cluster) -> None:
    await written(cluster)
    cluster.cut(1, 3)
    with pytest.raises(TimeoutError):
        await cluster[1].partition.delete_records(6, NO_WAIT_S)
    deleted = asyncio.ensure_future(cluster[1].partition.delete_records(7, WAIT_S))
    await until(lambda: cluster[2].partition.durable_log_start == 7)
    assert not deleted.done()
    cluster.change(isr=(1, 2))
    assert await deleted == 7


@on_cluster()
async def test_delete_records_returns_a_storage_error_if_the_disk_fails(cluster: Cluster) -> None:
    """Found by the simulator (three-nodes seed 5047): UNKNOWN_SERVER_ERROR, which clients do not retry."""
    await written(cluster)
    log = cluster[1].partition.log
    increment = log.increment_log_start

    def failing(offset: int) -> Any:
        job = increment(offset)

        def run() -> None:
            raise OSError("sick")

        job.run = run  # type: ignore[method-assign]
        return job

    log.increment_log_start = failing  # type: ignore[method-assign]
    with pytest.raises(KafkaError) as failed:
        await cluster[1].partition.delete_records(6, WAIT_S)
    assert failed.value.code is ErrorCode.kafka_storage_error


@on_cluster()
async def test_delete_records_waits_until_a_followers_deletion_is_durable(cluster: Cluster) -> None:
    await written(cluster)
    log = cluster[3].partition.log
    increment, may_write = log.increment_log_start, threading.Event()

    def held(offset: int) -> Any:
        job = increment(offset)
        write = job.run
        job.run = lambda: (may_write.wait(), write())[1]  # type: ignore[method-assign]
        return job

    log.increment_log_start = held  # type: ignore[method-assign]
    deleted = asyncio.ensure_future(cluster[1].partition.delete_records(6, WAIT_S))
    await until(lambda: log.log_start_offset == 6)
    # The follower's next fetch includes the partition again, but reports only the durable log start offset.
    cluster[1].append(b"y")
    await until(lambda: cluster[3].partition.log_end_offset == 11 and cluster[1].partition.high_watermark == 11)
    assert not deleted.done()
    may_write.set()
    assert await deleted == 6


@on_cluster()
async def test_a_follower_retries_a_deletion_that_it_could_not_make_durable(cluster: Cluster) -> None:
    await written(cluster)
    log = cluster[3].partition.log
    increment = log.increment_log_start

    def failing(offset: int) -> Any:
        log.increment_log_start = increment  # type: ignore[method-assign]
        raise OSError("the disk is full")

    log.increment_log_start = failing  # type: ignore[method-assign]
    assert await cluster[1].partition.delete_records(6, WAIT_S) == 6


@on_cluster(configs={"min.insync.replicas": "2"})
async def test_delete_records_is_not_acknowledged_below_min_insync_replicas(cluster: Cluster) -> None:
    await written(cluster)
    cluster.cut(1, 2)
    cluster.cut(1, 3)
    cluster.change(isr=(1,))
    # A replica that left the ISR may now be elected, with its old log start offset.
    with pytest.raises(TimeoutError):
        await cluster[1].partition.delete_records(6, NO_WAIT_S)
    deleted = asyncio.ensure_future(cluster[1].partition.delete_records(6, WAIT_S))
    await asyncio.sleep(0)
    cluster.heal()
    assert await deleted == 6
    assert len(cluster.state.isr) > 1


@on_cluster()
async def test_a_waiting_delete_records_fails_when_the_leader_is_replaced(cluster: Cluster) -> None:
    await written(cluster)
    cluster.cut(1, 3)
    first = asyncio.ensure_future(cluster[1].partition.delete_records(6, WAIT_S))
    await until(lambda: cluster[2].partition.durable_log_start == 6)
    cluster.change(leader=2)
    with pytest.raises(KafkaError) as raised:
        await first
    assert raised.value.code is ErrorCode.not_leader_or_follower
    cluster.heal()
    await until(lambda: starts(cluster) == [6, 6, 6])
    cluster.cut(2, 3)
    second = asyncio.ensure_future(cluster[2].partition.delete_records(7, WAIT_S))
    await until(lambda: cluster[1].partition.durable_log_start == 7)
    cluster.commit(DeleteTopic(TOPIC, TOPIC_ID))
    with pytest.raises(KafkaError):
        await second


@on_cluster()
async def test_retention_at_the_leader_advances_the_followers_log_start_too(cluster: Cluster) -> None:
    await written(cluster)
    leader = cluster[1]
    settings = leader.partition.settings
    short = dataclasses.replace(settings.log_config, retention_ms=1)
    leader.partition.configure(dataclasses.replace(settings, log_config=short))
    runtime = dataclasses.replace(leader.runtime, config=NodeConfig(retention_check_interval_ms=10))
    housekeeping = Housekeeping(runtime, leader.host, lambda: 1_000_000)
    housekeeping.start()
    await until(lambda: [node.partition.log_start_offset for node in cluster.nodes.values()] == [10, 10, 10])
    await housekeeping.stop()


@on_cluster()
async def test_a_new_leader_does_not_report_a_formerly_visible_offset_out_of_range(cluster: Cluster) -> None:
    """Found by the simulator (three-nodes seed 20001)."""
    await cluster[1].produce(b"first")
    await until(lambda: all(node.partition.high_watermark == 1 for node in cluster.nodes.values()))
    cluster[2].partition.leader_watermark_received = lambda leaders_watermark: None  # type: ignore[method-assign]
    await cluster[1].produce(b"second")
    cluster.cut(2, 3)
    cluster.cut(1, 2)
    cluster.change(leader=2, isr=(2,))
    assert cluster[2].partition.high_watermark == 1
    with pytest.raises(KafkaError) as refused:
        await cluster[2].partition.delete_records(2, WAIT_S)
    assert refused.value.code is ErrorCode.offset_not_available
