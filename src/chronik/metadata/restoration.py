"""Rebuild lost cluster metadata from the logs on the nodes. Pure.

The logs show which topics exist, with their ids and partitions, and which replicas have every committed record. They do
not contain settings, so default ones must not delete anything: retention is off until an operator sets it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple
from uuid import UUID

from chronik.metadata.image import NO_LEADER, ClusterImage, PartitionImage, TopicImage

KEEP_ALL: Final[Mapping[str, str]] = {"retention.ms": "-1", "retention.bytes": "-1"}

EPOCHS_SKIPPED: Final = 1_000
"""Leaders that wrote nothing left no trace of their epoch, and clients ignore epochs older than the last they saw."""

PRODUCER_IDS_SKIPPED: Final = 1_000_000
"""Nodes allocate producer ids in blocks of a thousand, and an id that has written nothing yet may be in use."""

PRODUCER_ID_MAX: Final = 1 << 62
"""Only a client that invents its producer id can have a higher one. Ids are 64-bit integers."""


class FoundLog(NamedTuple):
    """One replica's log. `path` is for messages; `topic_id` is None if it is unknown.

    A log that a node had and lost is also listed: with end 0, and the node's last known high watermark.
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
    """Logs that cannot belong to one cluster. The message is one line for the operator."""


def restored_image(
    cluster_id: str,
    logs: Sequence[FoundLog],
    known_configs: Mapping[str, Mapping[str, str]],
    new_topic_id: Callable[[], UUID],
) -> ClusterImage:
    """Build the image of a cluster with these logs. `known_configs` are the configs of internal topics.

    No partition has a leader: the controller elects one from the ISR. A partition whose ISR is empty stays offline,
    since no log has every committed record. So does a partition that must have existed but has no log at all.
    """
    by_topic: dict[str, dict[int, list[FoundLog]]] = {}
    for log in sorted(logs):
        by_topic.setdefault(log.topic, {}).setdefault(log.partition, []).append(log)
    topics = {
        name: TopicImage(
            name,
            _topic_id([log for of_partition in partitions.values() for log in of_partition]) or new_topic_id(),
            tuple(
                _partition(index, partitions.get(index, ()), partitions[min(partitions)])
                for index in range(max(partitions) + 1)
            ),
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
        next_producer_id=min(highest_producer_id, PRODUCER_ID_MAX) + 1 + PRODUCER_IDS_SKIPPED,
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


def _partition(index: int, logs: Sequence[FoundLog], some: Sequence[FoundLog]) -> PartitionImage:
    """If the partition has no logs, the nodes of the topic's `some` logs become its replicas."""
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
