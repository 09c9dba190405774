"""Requested leadership changes: new preferred leaders, and their election."""

from __future__ import annotations

from collections.abc import Mapping

from tests.cluster.support_cluster import Nodes

from chronik.cli.options import with_cluster
from chronik.client.brokers import Brokers
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

PREFERRED = 0
FINE = (ErrorCode.none, ErrorCode.election_not_needed)


def elect(nodes: Nodes, topic: str, leaders: Mapping[int, int]) -> None:
    """Make these replicas the preferred leaders of their partitions, and elect them."""
    if not leaders:
        return
    now = nodes.partitions(topic)
    targets = {
        (topic, index): (leader, *(other for other in now[index].replicas if other != leader))
        for index, leader in leaders.items()
    }
    with_cluster(nodes.bootstrap, lambda online: Brokers(online).move(targets))
    wanted = [{"topic": topic, "partitions": list(leaders)}]
    with nodes.connect(nodes.running[0].id, timeout_s=20.0) as client:
        values = {"election_type": PREFERRED, "topic_partitions": wanted, "timeout": 10_000}
        answer = client.call(ApiKey.ELECT_LEADERS, 2, values)
    codes = [part.error_code for result in answer.replica_election_results for part in result.partition_result]
    assert all(code in FINE for code in codes), codes
