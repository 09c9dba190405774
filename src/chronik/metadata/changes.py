"""Changes of many partitions, grouped by topic for one command."""

from __future__ import annotations

from uuid import UUID

from chronik.metadata.commands import ChangePartitions, PartitionChange, TopicChanges

PARTITIONS_PER_COMMAND_MAX = 5_000
"""More changes than this go into another command: one command must not delay others for long."""


class Changes:
    """One change for each partition, in the order in which they were added."""

    def __init__(self) -> None:
        self._by_topic: dict[UUID, dict[int, PartitionChange]] = {}

    def add(self, topic_id: UUID, change: PartitionChange | None) -> None:
        """Ignore None, and a second change of a partition: both changes were decided on the same image."""
        if change is not None:
            self._by_topic.setdefault(topic_id, {}).setdefault(change.partition, change)

    def has(self, topic_id: UUID, partition: int) -> bool:
        return partition in self._by_topic.get(topic_id, {})

    def __len__(self) -> int:
        return sum(map(len, self._by_topic.values()))

    def of_topics(self) -> tuple[TopicChanges, ...]:
        return tuple(TopicChanges(topic_id, tuple(changes.values())) for topic_id, changes in self._by_topic.items())

    def command(self) -> ChangePartitions | None:
        """Return all changes in one command, or None if there are none."""
        return ChangePartitions(self.of_topics()) if self._by_topic else None

    def in_parts(self) -> list[tuple[TopicChanges, ...]]:
        """Return the changes in parts of at most PARTITIONS_PER_COMMAND_MAX partitions."""
        parts: list[tuple[TopicChanges, ...]] = []
        part: list[TopicChanges] = []
        room = PARTITIONS_PER_COMMAND_MAX
        for topic_id, by_partition in self._by_topic.items():
            changes = tuple(by_partition.values())
            at = 0
            while at < len(changes):
                taken = changes[at : at + room]
                part.append(TopicChanges(topic_id, taken))
                at += len(taken)
                room -= len(taken)
                if room == 0:
                    parts.append(tuple(part))
                    part, room = [], PARTITIONS_PER_COMMAND_MAX
        if part:
            parts.append(tuple(part))
        return parts
