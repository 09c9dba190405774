"""Changes of many partitions, gathered by topic for one command."""

from __future__ import annotations

from uuid import UUID

from chronik.metadata.commands import ChangePartitions, PartitionChange, TopicChanges

PARTITIONS_PER_COMMAND_MAX = 5_000
"""Beyond this many changes another command begins: one must not hold up the others for long."""


class Changes:
    """In the order in which they were added; one per partition."""

    def __init__(self) -> None:
        self._by_topic: dict[UUID, dict[int, PartitionChange]] = {}

    def add(self, topic_id: UUID, change: PartitionChange | None) -> None:
        """None is passed over, and so is a second change of a partition: both were decided on the same image."""
        if change is not None:
            self._by_topic.setdefault(topic_id, {}).setdefault(change.partition, change)

    def has(self, topic_id: UUID, partition: int) -> bool:
        return partition in self._by_topic.get(topic_id, {})

    def __len__(self) -> int:
        return sum(map(len, self._by_topic.values()))

    def of_topics(self) -> tuple[TopicChanges, ...]:
        return tuple(TopicChanges(topic_id, tuple(changes.values())) for topic_id, changes in self._by_topic.items())

    def command(self) -> ChangePartitions | None:
        """All in one command; None where there are none."""
        return ChangePartitions(self.of_topics()) if self._by_topic else None

    def in_parts(self) -> list[tuple[TopicChanges, ...]]:
        """In parts of at most PARTITIONS_PER_COMMAND_MAX partitions."""
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
