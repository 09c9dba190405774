"""A follower whose syncs are slow receives records while it syncs earlier ones."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.cluster.conftest import StartNodes
from tests.cluster.support_cluster import Nodes
from tests.support.eventually import eventually

SYNC_MS = 5_000
BATCHES = 20
BATCH_BYTES = 600_000
"""More than half of what one fetch of a partition returns: each batch needs its own."""


def metric(nodes: Nodes, node_id: int, name: str, **labels: str) -> float:
    text = nodes.node(node_id).get("/metrics")[1].decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items())


@pytest.mark.timeout(120)
def test_a_follower_fetches_many_times_during_one_sync(start_nodes: StartNodes) -> None:
    nodes = start_nodes(disk_switches=True, disk_timeout_ms=60_000)
    topic = nodes.new_topic(1)
    leader = nodes.leader(topic)
    slow = nodes.follower(topic)

    def received() -> float:
        return metric(nodes, slow, "chronik_log_end_offset", topic=topic)

    with nodes.connect(leader, timeout_s=60.0) as client:
        client.append(topic, b"first")
        eventually(lambda: received() == 1, 30, "the follower has the first record")
        nodes.slow_syncs(slow, SYNC_MS)
        before = metric(nodes, slow, "chronik_fsync_seconds_count")
        for _ in range(BATCHES):
            client.append(topic, bytes(BATCH_BYTES))
        eventually(lambda: received() == 1 + BATCHES, 60, "the follower has received all records")
        assert metric(nodes, slow, "chronik_fsync_seconds_count") - before <= 2, "one or two syncs, many fetches"
        nodes.cure(slow)
        nodes.wait_in_sync()
        assert client.offset_at(topic, -1) == 1 + BATCHES
    nodes.no_surprises()
