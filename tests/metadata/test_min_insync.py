"""How many replicas must be in sync: one rule for the leader and the controller."""

from __future__ import annotations

from uuid import UUID

import pytest

from chronik.metadata.elections import min_insync_replicas
from chronik.metadata.image import ClusterImage, PartitionImage, TopicImage

NAME = "min.insync.replicas"


@pytest.mark.parametrize(
    ("replicas", "adding", "topic", "cluster", "expected"),
    [
        ((1,), (), None, None, 1),
        ((1, 2), (), None, None, 1),
        ((1, 2, 3), (), None, None, 2),
        ((1, 2, 3), (), "1", "3", 1),
        ((1, 2, 3), (), None, "3", 3),
        ((1, 2), (), "3", None, 2),
        ((1, 2, 3), (2, 3), None, None, 1),
        ((1, 2, 3), (), "nonsense", None, 2),
        ((1, 2, 3), (), "0", "1", 1),
    ],
)
def test_min_insync_replicas_uses_the_topic_then_the_cluster_then_the_replica_count(
    replicas: tuple[int, ...], adding: tuple[int, ...], topic: str | None, cluster: str | None, expected: int
) -> None:
    partition = PartitionImage(0, 1, 0, replicas, (1,), adding=adding)
    named = TopicImage("orders", UUID(int=1), (partition,), {} if topic is None else {NAME: topic})
    image = ClusterImage(broker_configs={"": {} if cluster is None else {NAME: cluster}, "1": {NAME: "7"}})
    assert min_insync_replicas(image, named, partition) == expected
