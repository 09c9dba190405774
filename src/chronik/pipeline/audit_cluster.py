"""What an audit reads from the cluster: log bounds, cleanup policy, committed offsets, and nodes that list batches."""

from __future__ import annotations

from typing import Any

from chronik.client.cluster import Deadline
from chronik.client.errors import ClientError
from chronik.client.groups import Groups
from chronik.client.node_http import HttpError, get_json
from chronik.client.topics import Topics
from chronik.pipeline.blocking import BlockingCluster
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.options import EARLIEST, LATEST
from chronik.wire.api import ApiKey
from chronik.wire.errors import KafkaError

__all__ = ["committed", "http_nodes", "is_compacted", "log_bounds", "offsets_at", "partitions_of"]

BROKER_RESOURCE = 4
ASK_TIMEOUT_S = 3.0


def partitions_of(cluster: BlockingCluster, topic: str) -> tuple[list[int], str]:
    """Return the topic's partitions and its id, which is empty if the brokers have none."""
    found = cluster.topics([topic]).get(topic)
    if found is None:
        raise PipelineError(f"topic {topic} does not exist at {cluster.bootstrap}: create it, or check its name")
    topic_id = "" if found.id is None or found.id.int == 0 else str(found.id)
    return [place.partition for place in found.partitions], topic_id


def log_bounds(cluster: BlockingCluster, topic: str, partitions: list[int]) -> dict[int, tuple[int, int]]:
    """Return the start and end of each log. Read the end first: what is below it is readable, unless it expires."""
    places = [(topic, partition) for partition in partitions]
    ends = cluster.offsets(places, LATEST)
    starts = cluster.offsets(places, EARLIEST)
    return {place[1]: (min(starts[place], ends[place]), ends[place]) for place in places}


def offsets_at(cluster: BlockingCluster, topic: str, partitions: list[int], time_ms: int) -> dict[int, int | None]:
    """Return the first offset at or after a time, or None if there is none."""
    found = cluster.offsets([(topic, partition) for partition in partitions], time_ms)
    return {place[1]: offset if offset >= 0 else None for place, offset in found.items()}


def is_compacted(cluster: BlockingCluster, topic: str) -> bool:
    configs = cluster.run(Topics(cluster.cluster).configs(topic))
    return any(entry.name == "cleanup.policy" and "compact" in (entry.value or "") for entry in configs)


def committed(cluster: BlockingCluster, group: str, topic: str) -> dict[int, int]:
    """Return the group's offsets in the topic. Raises PipelineError if there are none: all would seem undelivered."""
    found = cluster.run(Groups(cluster.cluster).committed(group))
    mine = {partition: offset for (name, partition), offset in found.items() if name == topic}
    if not mine:
        raise PipelineError(f"group {group} has committed nothing of {topic}: see chronik group describe {group}")
    return mine


def http_nodes(cluster: BlockingCluster) -> tuple[str, ...]:
    """Return the HTTP addresses of Chronik's nodes; empty for other Kafka clusters, or if no node is reachable."""
    try:
        layout = cluster.run(cluster.cluster.layout([]))
        told = [cluster.run(_told_http(cluster, node)) for node in sorted(layout.brokers)[:3]]
    except PipelineError:
        return ()
    for address in filter(None, told):
        try:
            view = cluster.run(get_json(address, "/api/cluster", ASK_TIMEOUT_S))
        except HttpError:
            continue
        # Nodes listen on 127.0.0.1 by default. Seen from another machine, a different cluster may listen there.
        if view.get("cluster_id") == layout.cluster_id:
            others = [str(node["http"]) for node in view.get("nodes", ()) if node.get("http")]
            return tuple(dict.fromkeys((address, *others)))
    return ()


async def _told_http(cluster: BlockingCluster, node: int) -> str:
    """Return the HTTP address in a node's configuration. Kafka's brokers have no such setting."""
    resource: dict[str, Any] = {
        "resource_type": BROKER_RESOURCE,
        "resource_name": str(node),
        "configuration_keys": ["listen.http"],
    }
    values = {"resources": [resource], "include_synonyms": False, "include_documentation": False}
    try:
        connection = await cluster.cluster.connection(node, Deadline(ASK_TIMEOUT_S))
        answer = await connection.call(ApiKey.DESCRIBE_CONFIGS, values, timeout_s=ASK_TIMEOUT_S)
    except (ClientError, KafkaError):
        return ""
    return next((entry.value or "" for entry in answer.results[0].configs if entry.name == "listen.http"), "")
