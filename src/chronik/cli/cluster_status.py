"""What `chronik cluster status` reports: process states from the pid files, all else from a node that answers."""

from __future__ import annotations

from typing import Any

from chronik.cli.output import print_table
from chronik.local.cluster import LocalCluster
from chronik.local.node import LocalNode


def status_of(cluster: LocalCluster) -> dict[str, Any]:
    """Return the status with all fields; fields that no running node can supply are null."""
    view = cluster.view()
    known = {} if view is None else {node["id"]: node for node in view["nodes"]}
    return {
        "controller": None if view is None else view["controller"],
        "nodes": [_node(node, known.get(node.id)) for node in cluster.nodes],
        "under_replicated": None if view is None else view["under_replicated"],
        "leaderless": None if view is None else view["leaderless"],
        "topics": None if view is None else view["topics"],
        "partitions": None if view is None else view["partitions"],
        "under_replicated_partitions": [] if view is None else view["under_replicated_partitions"],
        "leaderless_partitions": [] if view is None else view["leaderless_partitions"],
        "cluster_id": None if view is None else view["cluster_id"],
        "bootstrap": cluster.bootstrap,
    }


def _node(node: LocalNode, known: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "id": node.id,
        "state": _state(node, known),
        "kafka": node.bootstrap,
        "http": str(node.http),
        "pid": node.process.pid,
        "leaders": None if known is None else known["leaders"],
        "replicas": None if known is None else known["replicas"],
        "in_sync": None if known is None else known["in_sync"],
    }


def _state(node: LocalNode, known: dict[str, Any] | None) -> str:
    """Return stopped, paused, starting, fenced (it runs, but the controller has fenced it) or running."""
    process = node.process.state
    if process is None:
        return "stopped"
    if process == "paused":
        return "paused"
    if not node.is_ready:
        return "starting"
    return "fenced" if known is not None and known["state"] == "fenced" else "running"


def print_status(status: dict[str, Any]) -> None:
    columns = ("id", "state", "kafka", "http", "pid", "leaders", "replicas", "in_sync")
    rows = [
        [f"{node['id']} (controller)" if node["id"] == status["controller"] else node["id"]]
        + [node[column] for column in columns[1:]]
        for node in status["nodes"]
    ]
    print_table("", columns, rows, ("pid", "leaders", "replicas", "in_sync"))
    if status["under_replicated"] is None:
        print("no node answers: leaders and in-sync replicas are not known; chronik cluster up starts the nodes")
        return
    if status["controller"] is None:
        print("no controller: a majority of the nodes must run; chronik cluster up starts those that do not")
    print(f"{status['partitions']} partitions of {status['topics']} topics")
    print(f"under-replicated: {_named(status['under_replicated'], status['under_replicated_partitions'])}")
    print(f"without a leader: {_named(status['leaderless'], status['leaderless_partitions'])}")


def _named(count: int, names: list[str]) -> str:
    """Return the count, and the first few names."""
    shown = names[:8]
    more = ", ..." if count > len(shown) else ""
    return f"{count} ({', '.join(shown)}{more})" if count else "0"
