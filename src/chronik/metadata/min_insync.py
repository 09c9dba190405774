"""How many in-sync replicas a partition needs before it commits a record: one rule for leaders and the controller.

The leader stops its high watermark while the ISR is smaller; the controller relies on that when it keeps replicas as
eligible leaders. So both take the number from the image alone, at the version that holds the ISR: a node's own settings
must not enter, or a leader could commit what an eligible leader lacks.
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
"""From this many replicas on, acks=all means two of them unless the topic or the cluster says otherwise."""


def min_insync_replicas(image: ClusterImage, topic: TopicImage, partition: PartitionImage) -> int:
    """The topic's own setting, the cluster's, or 2 of three replicas; never more than there are replicas.

    Replicas on their way do not count: otherwise a partition that gains some would have to wait for them.
    """
    return min_insync_of(configured_min_insync(image, topic.configs), len(partition.settled_replicas))


def configured_min_insync(image: ClusterImage, topic_configs: Mapping[str, str]) -> int | None:
    """What was set for the topic or the cluster; None where nothing was."""
    value = image_value(image, topic_configs, MIN_INSYNC_REPLICAS)
    return value if isinstance(value, int) else None


def min_insync_of(configured: int | None, settled_replicas: int) -> int:
    """The number for a partition with that many replicas, not counting those on their way."""
    if configured is None:
        configured = 2 if settled_replicas >= REPLICATION_FACTOR_SAFE else 1
    return max(1, min(configured, settled_replicas))


def image_value(image: ClusterImage, topic_configs: Mapping[str, str], name: str) -> ConfigValue | None:
    """A topic config as the image has it, for the topic or by the cluster's default; None where neither sets it."""
    definition = TOPIC_CONFIGS[name]
    defaults = image.broker_configs.get(CLUSTER_DEFAULT, {})
    for text in (topic_configs.get(name), defaults.get(definition.synonym or name)):
        if text is None:
            continue
        try:
            return definition.parse(text)
        except KafkaError:
            # Accepted by another version than this one.
            continue
    return None
