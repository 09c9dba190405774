"""Topics as a consumer group sees them: the catalog of the cluster, and the expressions that select from it."""

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, TypeAlias
from uuid import UUID

from chronik.wire.errors import ErrorCode, KafkaError

TopicIdPartition: TypeAlias = tuple[UUID, int]
Assignment: TypeAlias = frozenset[TopicIdPartition]
"""Partitions by topic id. Sort it before use: the order of a set must not matter."""

EXPRESSION_BYTES_MAX = 1_024
EXPRESSION_MEMORY_BYTES_MAX = 1 << 20


class Topic(NamedTuple):
    """A topic, with the racks of the replicas of each partition, sorted; empty if they are not known."""

    name: str
    id: UUID
    racks: tuple[tuple[str, ...], ...]

    @property
    def partition_count(self) -> int:
        return len(self.racks)

    def partitions(self) -> Iterable[TopicIdPartition]:
        return ((self.id, index) for index in range(len(self.racks)))


class TopicCatalog(Protocol):
    """All topics of the cluster at one version of its metadata."""

    @property
    def version(self) -> int: ...

    def topic(self, name: str) -> Topic | None: ...

    def name_of(self, topic_id: UUID) -> str | None: ...

    def names(self) -> Iterable[str]: ...


class NoTopics:
    """The catalog before the first metadata."""

    version = -1

    def topic(self, name: str) -> Topic | None:
        return None

    def name_of(self, topic_id: UUID) -> str | None:
        return None

    def names(self) -> Iterable[str]:
        return ()


def by_topic(partitions: Iterable[TopicIdPartition]) -> dict[UUID, list[int]]:
    """Return the partitions of each topic, both in order."""
    grouped: dict[UUID, list[int]] = {}
    for topic_id, index in sorted(partitions):
        grouped.setdefault(topic_id, []).append(index)
    return grouped


def expression_matcher(expression: str) -> Callable[[str], bool]:
    """Return the filter of topic names by an RE2 expression, or raise INVALID_REGULAR_EXPRESSION.

    RE2 needs linear time, so that a hostile expression cannot block the loop. It must match the whole name.
    """
    # Imported at the first use, because few clients subscribe by expression.
    import re2

    if len(expression.encode()) > EXPRESSION_BYTES_MAX:
        raise KafkaError(
            ErrorCode.invalid_regular_expression, f"an expression of more than {EXPRESSION_BYTES_MAX} bytes"
        )
    options = re2.Options()
    options.log_errors = False
    options.max_mem = EXPRESSION_MEMORY_BYTES_MAX
    try:
        compiled = re2.compile(expression, options)
    except re2.error as error:
        raise KafkaError(
            ErrorCode.invalid_regular_expression, f"SubscribedTopicRegex {expression!r} is not valid: {error}"
        ) from None
    return lambda name: compiled.fullmatch(name) is not None
