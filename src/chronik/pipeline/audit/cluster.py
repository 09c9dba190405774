"""What an audit reads from the cluster: log bounds, cleanup policy, committed offsets, and nodes that list batches."""

from __future__ import annotations

from collections.abc import Mapping

from chronik.client.groups import Groups
from chronik.client.node_addresses import http_addresses
from chronik.client.topics import EARLIEST, LATEST, Topics
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.source.blocking import BlockingCluster, topic_id


def partitions_of(cluster: BlockingCluster, topic: str) -> tuple[list[int], str]:
    """Return the topic's partitions and its id, which is empty if the brokers have none."""
    layout = cluster.require_topics([topic])[topic]
    return [partition.partition for partition in layout.partitions], topic_id(layout)


def log_bounds(
    cluster: BlockingCluster, topic: str, partitions: list[int], *, committed_only: bool = False
) -> dict[int, tuple[int, int]]:
    """Return the start and end of each log. Read the end first: what is below it is readable, unless it expires.

    With `committed_only`, the end is the last stable offset.
    """
    names = [(topic, partition) for partition in partitions]
    ends = cluster.offsets(names, LATEST, committed_only=committed_only)
    starts = cluster.offsets(names, EARLIEST)
    return {name[1]: (min(starts[name], ends[name]), ends[name]) for name in names}


def offsets_at(
    cluster: BlockingCluster, topic: str, logs: Mapping[int, tuple[int, int]], time_ms: int
) -> dict[int, int]:
    """Return the first offset at or after a time in each log, or its end if there is none."""
    offsets = cluster.offsets([(topic, partition) for partition in logs], time_ms)
    return {partition: offset if offset >= 0 else logs[partition][1] for (_, partition), offset in offsets.items()}


def is_compacted(cluster: BlockingCluster, topic: str) -> bool:
    configs = cluster.run(Topics(cluster.cluster).configs(topic))
    return any(entry.name == "cleanup.policy" and "compact" in (entry.value or "") for entry in configs)


def committed_offsets(cluster: BlockingCluster, group: str, topic: str) -> dict[int, int]:
    """Return the group's offsets in the topic. Raises PipelineError if there are none: all would seem undelivered."""
    committed = cluster.run(Groups(cluster.cluster).committed(group))
    offsets = {partition: offset for (name, partition), offset in committed.items() if name == topic}
    if not offsets:
        raise PipelineError(f"group {group} has committed nothing of {topic}: see chronik group describe {group}")
    return offsets


def http_nodes(cluster: BlockingCluster) -> tuple[str, ...]:
    """Return the HTTP addresses of Chronik's nodes; empty for other Kafka clusters, or if no node is reachable."""
    try:
        return cluster.run(http_addresses(cluster.cluster))
    except PipelineError:
        return ()
