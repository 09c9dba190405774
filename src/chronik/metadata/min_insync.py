"""How many in-sync replicas a partition needs to commit a record: one rule for leaders and the controller.

The leader holds its high watermark while the ISR is smaller; the controller relies on that when it keeps replicas as
eligible leaders. So both take the number from the image alone, at the version that holds the ISR. A node's own settings
must not matter, or a leader could commit records that an eligible leader lacks.
"""

from __future__ import annotations

from collections.abc import Mapping

from chronik.metadata.broker_configs import CLUSTER_DEFAULT
from chronik.metadata.config_definitions import ConfigValue
from chronik.metadata.image import ClusterImage, PartitionImage, TopicImage
from chronik.metadata.topic_configs import TOPIC_CONFIGS
from chronik.wire.errors import KafkaError

MIN_INSYNC_REPLICAS = "min.insync.replicas"
REPLICATION_FACTOR_SAFE = 3
"""With at least this many replicas, acks=all means two of them unless the topic or the cluster sets another number."""


def min_insync_replicas(image: ClusterImage, topic: TopicImage, partition: PartitionImage) -> int:
    """The topic's setting, the cluster's, or 2 for three or more replicas; at most the number of replicas.

    Replicas being added do not count: otherwise a partition that gains some would have to wait for them.
    """
    return min_insync_of(configured_min_insync(image, topic.configs), len(partition.settled_replicas))


def configured_min_insync(image: ClusterImage, topic_configs: Mapping[str, str]) -> int | None:
    """Return the value set for the topic or the cluster, or None."""
    value = image_value(image, topic_configs, MIN_INSYNC_REPLICAS)
    return value if isinstance(value, int) else None


def min_insync_of(configured: int | None, settled_replicas: int) -> int:
    """Return the number for a partition with that many replicas, not counting those being added."""
    if configured is None:
        configured = 2 if settled_replicas >= REPLICATION_FACTOR_SAFE else 1
    return max(1, min(configured, settled_replicas))


def image_value(image: ClusterImage, topic_configs: Mapping[str, str], name: str) -> ConfigValue | None:
    """Return a topic config set in the image, on the topic or as the cluster default; None if neither sets it."""
    definition = TOPIC_CONFIGS[name]
    defaults = image.broker_configs.get(CLUSTER_DEFAULT, {})
    for text in (topic_configs.get(name), defaults.get(definition.synonym or name)):
        if text is None:
            continue
        try:
            return definition.parse(text)
        except KafkaError:
            # Another version of the software accepted this value.
            continue
    return None
