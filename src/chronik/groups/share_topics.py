"""Which partitions of a share group have state at the share coordinator (KIP-932).

initializing --(the state is written)--> initialized
any --(a request deletes the state)--> deleting --(the state is deleted)--> none

Only initialized partitions are assigned. An interrupted transition is repeated: the next heartbeat initializes again,
the next request to delete deletes again.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from uuid import UUID

from chronik.groups.topics import Assignment, TopicIdPartition, by_topic


class SharedTopic(NamedTuple):
    name: str
    partitions: frozenset[int]


Topics = Mapping[UUID, SharedTopic]


@dataclass(frozen=True, slots=True)
class ShareTopics:
    initializing: Topics = field(default_factory=dict)
    initialized: Topics = field(default_factory=dict)
    deleting: Mapping[UUID, str] = field(default_factory=dict)
    """Names of topics."""

    @property
    def is_empty(self) -> bool:
        return not self.initializing and not self.initialized and not self.deleting

    def partitions(self) -> Assignment:
        """Return the partitions that may have state."""
        return _partitions(self.initializing) | _partitions(self.initialized)

    def initialized_partitions(self) -> Assignment:
        return _partitions(self.initialized)

    def initializing_partitions(self) -> Assignment:
        return _partitions(self.initializing)

    def name_of(self, topic_id: UUID) -> str | None:
        topic = self.initialized.get(topic_id) or self.initializing.get(topic_id)
        return topic.name if topic is not None else self.deleting.get(topic_id)

    def ids(self) -> dict[str, UUID]:
        """Return the topics that may have state, by name."""
        found = {name: topic_id for topic_id, name in self.deleting.items()}
        return found | {
            topic.name: each for topics in (self.initializing, self.initialized) for each, topic in topics.items()
        }

    def with_initializing(self, partitions: Iterable[TopicIdPartition], names: Mapping[UUID, str]) -> "ShareTopics":
        """The state of these partitions is about to be written, again if they have some."""
        moved = frozenset(partitions)
        ids = {topic_id for topic_id, _ in moved}
        return ShareTopics(
            _add(self.initializing, moved, names),
            _remove(self.initialized, moved),
            {topic_id: name for topic_id, name in self.deleting.items() if topic_id not in ids},
        )

    def with_initialized(self, partitions: Iterable[TopicIdPartition]) -> "ShareTopics":
        """The state of these partitions is written; partitions that are not initializing any more are ignored."""
        moved = self.initializing_partitions() & frozenset(partitions)
        names = {topic_id: topic.name for topic_id, topic in self.initializing.items()}
        return replace(
            self, initializing=_remove(self.initializing, moved), initialized=_add(self.initialized, moved, names)
        )

    def with_deleting(self, topic_ids: Collection[UUID]) -> "ShareTopics":
        names = {each: name for each in topic_ids if (name := self.name_of(each)) is not None}
        return replace(self.without(topic_ids), deleting={**self.deleting, **names})

    def without(self, topic_ids: Collection[UUID]) -> "ShareTopics":
        return ShareTopics(
            {each: topic for each, topic in self.initializing.items() if each not in topic_ids},
            {each: topic for each, topic in self.initialized.items() if each not in topic_ids},
            {each: name for each, name in self.deleting.items() if each not in topic_ids},
        )


def _partitions(topics: Topics) -> Assignment:
    return frozenset((topic_id, index) for topic_id, topic in topics.items() for index in topic.partitions)


def _add(topics: Topics, partitions: Assignment, names: Mapping[UUID, str]) -> Topics:
    added = dict(topics)
    for topic_id, indexes in by_topic(partitions).items():
        known = added.get(topic_id)
        added[topic_id] = SharedTopic(
            names[topic_id], frozenset(indexes) | (known.partitions if known else frozenset())
        )
    return added


def _remove(topics: Topics, partitions: Assignment) -> Topics:
    left = dict(topics)
    for topic_id, indexes in by_topic(partitions).items():
        if topic_id in left:
            remaining = left[topic_id].partitions - frozenset(indexes)
            left[topic_id] = left[topic_id]._replace(partitions=remaining)
            if not remaining:
                del left[topic_id]
    return left
