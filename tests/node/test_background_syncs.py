"""The syncs for recovery points, which no request waits for under `replicated`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

import msgspec
import pytest
from tests.node.support_replicas import TOPIC, Cluster, on_cluster
from tests.support.eventually import until

from chronik.metadata.commands import Assignment, CreateTopic
from chronik.node.replicas.partition import Partition
from chronik.node.replicas.partition_host import SYNCED_AT_ONCE
from chronik.node.replicas.syncer import Share, Syncer
from chronik.wire.batch import encode_batch

OTHER, OTHER_ID, PARTITIONS = "other", UUID(int=78), 3 * SYNCED_AT_ONCE


async def written(cluster: Cluster) -> Sequence[Partition]:
    """Create a topic on node 1, and write one record to each of its partitions."""
    one = cluster[1]
    assert one.partition.topic == TOPIC
    cluster.commit(CreateTopic(OTHER, OTHER_ID, (Assignment((1,), (1,)),) * PARTITIONS, {}))
    await until(lambda: all((OTHER, index) in one.host.partitions for index in range(PARTITIONS)))
    partitions = [one.host.partitions[(OTHER, index)] for index in range(PARTITIONS)]
    for partition in partitions:
        partition.append(memoryview(bytearray(encode_batch([(b"k", b"value", (), 1)]))), 1)
    return partitions


@on_cluster(replicas=(1,), durability="replicated")
async def test_replicated_logs_are_synced_a_few_at_a_time(cluster: Cluster) -> None:
    partitions = await written(cluster)
    host = cluster[1].host
    config = msgspec.structs.replace(host._runtime.config, recovery_point_interval_ms=20)
    host._runtime = replace(host._runtime, config=config)
    rounds: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        sync = Syncer._sync

        def counted(syncer: Syncer, jobs: Share) -> None:
            rounds.append(len(jobs))
            sync(syncer, jobs)

        patch.setattr(Syncer, "_sync", counted)
        await host.sync_all()
    assert [each.log.synced_end_offset for each in partitions] == [1] * PARTITIONS
    assert rounds == [SYNCED_AT_ONCE] * 3
