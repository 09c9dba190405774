"""Metadata rebuilt from the logs that the nodes of a cluster have: for a cluster that lost all of it. Pure.

The logs tell which topics there are, with their ids and partitions, and which replicas have every committed record.
They do not tell settings, so nothing may be deleted by default ones: retention is off until an operator sets it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple
from uuid import UUID

from chronik.metadata.image import NO_LEADER, ClusterImage, PartitionImage, TopicImage

KEEP_ALL: Final[Mapping[str, str]] = {"retention.ms": "-1", "retention.bytes": "-1"}

EPOCHS_SKIPPED: Final = 1_000
"""Leaders that wrote nothing left no trace of their epoch, and clients ignore a leader of an epoch that they passed."""

PRODUCER_IDS_SKIPPED: Final = 1_000_000
"""Nodes take producer ids in blocks of a thousand, and an id that has written nothing yet may be in use."""


class FoundLog(NamedTuple):
    """One replica's log. `path` is for people; `topic_id` is None where nothing tells it.

    A log that a node had and lost is found too: with end 0, and what the node knows of its watermark.
    """

    node_id: int
    path: str
    topic: str
    partition: int
    topic_id: UUID | None
    log_end_offset: int
    last_epoch: int
    highest_producer_id: int
    high_watermark: int
    """Records below it were committed."""


class RestorationConflict(Exception):
    """Logs that cannot belong to one cluster; the message is one line for people."""


def restored_image(
    cluster_id: str,
    logs: Sequence[FoundLog],
    known_configs: Mapping[str, Mapping[str, str]],
    new_topic_id: Callable[[], UUID],
) -> ClusterImage:
    """The image of a cluster with these logs. `known_configs` are those of the cluster's own topics.

    No partition has a leader: the controller elects one of the ISR. A partition without an ISR stays offline, since no
    log has every record that was committed; so does one that has no log at all but must have been there.
    """
    by_topic: dict[str, dict[int, list[FoundLog]]] = {}
    for log in sorted(logs):
        by_topic.setdefault(log.topic, {}).setdefault(log.partition, []).append(log)
    topics = {
        name: TopicImage(
            name,
            _topic_id([log for found in partitions.values() for log in found]) or new_topic_id(),
            _partitions(partitions),
            known_configs.get(name, KEEP_ALL),
        )
        for name, partitions in by_topic.items()
    }
    highest_producer_id = max((log.highest_producer_id for log in logs), default=-1)
    return ClusterImage(
        cluster_id=cluster_id,
        version=1,
        topics=topics,
        names_by_id={topic.id: name for name, topic in topics.items()},
        next_producer_id=highest_producer_id + 1 + PRODUCER_IDS_SKIPPED,
    )


def _topic_id(logs: Sequence[FoundLog]) -> UUID | None:
    known = [log for log in logs if log.topic_id is not None]
    for log in known[1:]:
        if log.topic_id != known[0].topic_id:
            raise RestorationConflict(
                f"{known[0].path} and {log.path} belong to two topics of one name, {known[0].topic_id} and "
                f"{log.topic_id}: move the logs of the one that was deleted out of the data folders"
            )
    return known[0].topic_id if known else None


def _partitions(found: Mapping[int, Sequence[FoundLog]]) -> tuple[PartitionImage, ...]:
    some = found[min(found)]
    return tuple(_partition(index, found.get(index, ()), some) for index in range(max(found) + 1))


def _partition(index: int, logs: Sequence[FoundLog], some: Sequence[FoundLog]) -> PartitionImage:
    """`some` logs of the topic name the replicas of a partition that has none."""
    node_ids = sorted(log.node_id for log in logs or some)
    first = index % len(node_ids)
    replicas = (*node_ids[first:], *node_ids[:first])
    longest = max(((log.last_epoch, log.log_end_offset) for log in logs), default=(-1, 0))
    committed = max((log.high_watermark for log in logs), default=0)
    isr = tuple(
        log.node_id
        for log in logs
        if (log.last_epoch, log.log_end_offset) == longest and log.log_end_offset >= committed
    )
    return PartitionImage(index, NO_LEADER, longest[0] + EPOCHS_SKIPPED, replicas, isr)
