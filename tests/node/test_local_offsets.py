"""ListOffsets for the debugging consumer (replica id -2): each replica answers for its own log, leader or not."""

from __future__ import annotations

from tests.node.support_replicas import Cluster, on_cluster
from tests.node.test_replication_following import is_caught_up
from tests.support.eventually import until

from chronik.wire.errors import ErrorCode, KafkaError

CONSUMER, DEBUGGING = -1, -2
LATEST, EARLIEST, LARGEST_TIME = -1, -2, -3


@on_cluster()
async def test_a_follower_returns_the_end_of_its_own_log(cluster: Cluster) -> None:
    await cluster[1].produce(b"first", b"second")
    await until(lambda: is_caught_up(cluster))
    cluster.cut(1, 3)
    cluster[1].append(b"third")
    await until(lambda: cluster[2].partition.log_end_offset == 3)
    for node_id, end in ((1, 3), (2, 3), (3, 2)):
        latest = await cluster[node_id].listed_offset(LATEST, DEBUGGING)
        assert (latest["error_code"], latest["offset"], latest["leader_epoch"]) == (ErrorCode.none, end, 0)
        assert (await cluster[node_id].listed_offset(EARLIEST, DEBUGGING))["offset"] == 0
    assert (await cluster[2].listed_offset(LARGEST_TIME, DEBUGGING))["offset"] == 0
    refused = await cluster[2].listed_offset(LATEST, CONSUMER)
    assert refused["error_code"] is ErrorCode.not_leader_or_follower


@on_cluster()
async def test_replicas_of_a_partition_without_a_leader_return_their_log_end(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    await until(lambda: is_caught_up(cluster))
    cluster.change(leader=-1)
    await until(lambda: not cluster[1].partition.leads)
    for node_id in (1, 2, 3):
        assert (await cluster[node_id].listed_offset(LATEST, DEBUGGING))["offset"] == 1


@on_cluster()
async def test_a_closed_replica_returns_not_leader_or_follower(cluster: Cluster) -> None:
    cluster[2].partition.close(KafkaError(ErrorCode.not_leader_or_follower))
    refused = await cluster[2].listed_offset(LATEST, DEBUGGING)
    assert refused["error_code"] is ErrorCode.not_leader_or_follower
