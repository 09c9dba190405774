"""Which partitions concern a broker, updated from image to image by looking only at changed parts.

Images share their unchanged parts, so comparing identities finds the changed partitions among thousands in well below a
millisecond.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from chronik.metadata.image import NO_LEADER, ClusterImage, PartitionImage, TopicImage

Key: TypeAlias = tuple[str, int]
"""A partition: topic name and partition number."""


class PartitionIndex:
    """Owned by the controller. Uses dicts as ordered sets."""

    def __init__(self) -> None:
        self._image: ClusterImage | None = None
        self._hosted: dict[int, dict[Key, None]] = {}
        self._led: dict[int, dict[Key, None]] = {}
        self.not_preferred: dict[Key, None] = {}
        """Partitions that their first replica does not lead."""
        self.demoted_version: dict[int, int] = {}
        """For each broker, the version at which one of its leaderships was last seen to end."""

    def hosted_by(self, broker_id: int) -> Iterable[Key]:
        return self._hosted.get(broker_id, {})

    def led_by(self, broker_id: int) -> Iterable[Key]:
        return self._led.get(broker_id, {})

    def update(self, image: ClusterImage) -> list[Key]:
        """Update from the image; return the partitions that are new or changed, or whose topic settings changed."""
        before, self._image = self._image, image
        topics = {} if before is None else before.topics
        touched: list[Key] = []
        if topics is not image.topics:
            for name, topic in image.topics.items():
                known = topics.get(name)
                if known is not topic:
                    self._follow(known, topic, image.version, touched)
            for name, topic in topics.items():
                if name not in image.topics:
                    for partition in topic.partitions:
                        self._remove((name, partition.partition), partition)
        if before is None or before.broker_configs is not image.broker_configs:
            return [
                (name, partition.partition) for name, topic in image.topics.items() for partition in topic.partitions
            ]
        return touched

    def _follow(self, known: TopicImage | None, topic: TopicImage, version: int, touched: list[Key]) -> None:
        old = () if known is None else known.partitions
        is_same_topic = known is not None and known.id == topic.id and known.configs == topic.configs
        for partition in old[len(topic.partitions) :]:
            self._remove((topic.name, partition.partition), partition)
        for number, partition in enumerate(topic.partitions):
            before = old[number] if number < len(old) else None
            if before is partition and is_same_topic:
                continue
            key = (topic.name, number)
            if before is not None:
                self._remove(key, before)
                if before.leader_epoch != partition.leader_epoch and before.leader != NO_LEADER:
                    self.demoted_version[before.leader] = version
            self._add(key, partition)
            touched.append(key)

    def _add(self, key: Key, partition: PartitionImage) -> None:
        for replica in partition.replicas:
            self._hosted.setdefault(replica, {})[key] = None
        self._led.setdefault(partition.leader, {})[key] = None
        if not partition.replicas or partition.leader != partition.replicas[0]:
            self.not_preferred[key] = None

    def _remove(self, key: Key, partition: PartitionImage) -> None:
        for replica in partition.replicas:
            self._hosted[replica].pop(key, None)
        self._led[partition.leader].pop(key, None)
        self.not_preferred.pop(key, None)
