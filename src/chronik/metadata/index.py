"""Which partitions concern a broker, updated from image to image by looking only at changed parts.

Images share their unchanged parts, so comparing identities finds the changed partitions among thousands in well below a
millisecond. Topics that are new here wait until `update` has time for them: a new controller knows none.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import TypeAlias

from chronik.metadata.image import NO_LEADER, ClusterImage, PartitionImage, TopicImage
from chronik.metadata.layered_map import LayeredMap

Key: TypeAlias = tuple[str, int]
"""A partition: topic name and partition number."""


class PartitionIndex:
    """Owned by the controller. Uses dicts as ordered sets."""

    def __init__(self) -> None:
        self._image = ClusterImage()
        self._waiting: dict[str, None] = {}
        """Topics whose partitions are not in the index yet."""
        self._hosted: dict[int, dict[Key, None]] = {}
        self._led: dict[int, dict[Key, None]] = {}
        self.not_preferred: dict[Key, None] = {}
        """Partitions that their first replica does not lead."""
        self.unsettled: dict[Key, None] = {}
        """Partitions that lack something in the image itself (`PartitionImage.is_settled`)."""
        self.demoted_version: dict[int, int] = {}
        """For each broker, the version at which one of its leaderships was last seen to end. It may have ended before,
        if the partition had no leader when it came into the index."""

    @property
    def is_complete(self) -> bool:
        """Whether all partitions of the image are in the index. Changes of leaders are noticed even if not."""
        return not self._waiting

    @property
    def hosts(self) -> list[int]:
        """The brokers that host partitions, by id."""
        return sorted(broker_id for broker_id, hosted in self._hosted.items() if hosted)

    def hosted_by(self, broker_id: int) -> dict[Key, None]:
        return self._hosted.get(broker_id, {})

    def led_by(self, broker_id: int) -> Iterable[Key]:
        return self._led.get(broker_id, {})

    def update(self, image: ClusterImage, partitions_max: int) -> list[Key]:
        """Update from the image; return the partitions that are new or changed, or whose topic settings changed.

        Add about `partitions_max` partitions of new topics: always whole topics.
        """
        before, self._image = self._image, image
        touched: list[Key] = []
        if before.topics is not image.topics:
            for name in LayeredMap.of(image.topics).changed_since(LayeredMap.of(before.topics)):
                self._follow(name, before.topics.get(name), image.topics.get(name), touched)
        added: list[str] = []
        for name in self._waiting:
            if partitions_max <= 0:
                break
            partitions_max -= len(image.topics[name].partitions)
            added.append(name)
            self._add_topic(image.topics[name], touched)
        for name in added:
            del self._waiting[name]
        if before.broker_configs is not image.broker_configs:
            # They are defaults of topics' settings, which concern no settled partition.
            touched += self.unsettled
        return touched

    def _add_topic(self, topic: TopicImage, touched: list[Key]) -> None:
        for partition in topic.partitions:
            key = (topic.name, partition.partition)
            self._add(key, partition)
            touched.append(key)
            if partition.leader == NO_LEADER:
                # Only an earlier controller may know whether the last leader has noticed.
                self.demoted_version[partition.last_known_leader] = self._image.version

    def _follow(self, name: str, known: TopicImage | None, topic: TopicImage | None, touched: list[Key]) -> None:
        if known is None:
            self._waiting[name] = None
            return
        is_indexed = name not in self._waiting
        if topic is None:
            self._waiting.pop(name, None)
        is_same_topic = topic is not None and known.id == topic.id and known.configs == topic.configs
        partitions = () if topic is None else topic.partitions
        for number, (before, after) in enumerate(zip_longest(known.partitions, partitions)):
            if before is after and is_same_topic:
                continue
            key = (name, number)
            if before is not None and after is not None and before.leader_epoch != after.leader_epoch:
                self.demoted_version[before.leader] = self._image.version
            if before is not None and is_indexed:
                self._remove(key, before)
            if after is not None and is_indexed:
                self._add(key, after)
                touched.append(key)

    def _add(self, key: Key, partition: PartitionImage) -> None:
        for replica in partition.replicas:
            self._hosted.setdefault(replica, {})[key] = None
        self._led.setdefault(partition.leader, {})[key] = None
        if not partition.replicas or partition.leader != partition.replicas[0]:
            self.not_preferred[key] = None
        if not partition.is_settled:
            self.unsettled[key] = None

    def _remove(self, key: Key, partition: PartitionImage) -> None:
        for replica in partition.replicas:
            self._hosted[replica].pop(key, None)
        self._led[partition.leader].pop(key, None)
        self.not_preferred.pop(key, None)
        self.unsettled.pop(key, None)
