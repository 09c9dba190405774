"""Plans: the partition changes that follow from a request or a decision, and the commands that carry them out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TypeVar
from uuid import UUID

from chronik.metadata.commands import ChangePartitions, PartitionChange, TopicChanges
from chronik.wire.errors import KafkaError

T = TypeVar("T")

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

    def of_topics(self) -> tuple[TopicChanges, ...]:
        return tuple(TopicChanges(topic_id, tuple(changes.values())) for topic_id, changes in self._by_topic.items())

    def in_parts(self) -> list[tuple[TopicChanges, ...]]:
        """Return the changes in parts of at most PARTITIONS_PER_COMMAND_MAX partitions."""
        changes = [(topic_id, change) for topic_id, of in self._by_topic.items() for change in of.values()]
        parts = [
            changes[start : start + PARTITIONS_PER_COMMAND_MAX]
            for start in range(0, len(changes), PARTITIONS_PER_COMMAND_MAX)
        ]
        return [
            tuple(
                TopicChanges(topic_id, tuple(change for _, change in of_topic))
                for topic_id, of_topic in groupby(part, key=itemgetter(0))
            )
            for part in parts
        ]


@dataclass(slots=True)
class Plan:
    """The changes for a request, and for each entry the error that refused it, if any."""

    changes: Changes = field(default_factory=Changes)
    outcomes: list[KafkaError | None] = field(default_factory=list)

    @property
    def command(self) -> ChangePartitions | None:
        changes = self.changes.of_topics()
        return ChangePartitions(changes) if changes else None


def outcomes_of(carry_out: Callable[[T], None], requests: Iterable[T]) -> list[KafkaError | None]:
    """Carry out each request independently; return for each the error that refused it, or None."""
    outcomes: list[KafkaError | None] = []
    for request in requests:
        try:
            carry_out(request)
        except KafkaError as error:
            outcomes.append(error)
        else:
            outcomes.append(None)
    return outcomes
