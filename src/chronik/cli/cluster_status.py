"""What `chronik cluster status` reports: process states from the pid files, all else from a node that answers."""

from __future__ import annotations

from typing import Any

from chronik.cli.output import print_table
from chronik.local.cluster import LocalCluster
from chronik.local.node import LocalNode


def status_of(cluster: LocalCluster) -> dict[str, Any]:
    """Return the status with all fields; fields that no running node can supply are null."""
    view = cluster.view() or {}
    known = {node["id"]: node for node in view.get("nodes", ())}
    return {
        "controller": view.get("controller"),
        "nodes": [_node(node, known.get(node.id, {})) for node in cluster.nodes],
        "under_replicated": view.get("under_replicated"),
        "leaderless": view.get("leaderless"),
        "topics": view.get("topics"),
        "partitions": view.get("partitions"),
        "under_replicated_partitions": view.get("under_replicated_partitions", []),
        "leaderless_partitions": view.get("leaderless_partitions", []),
        "cluster_id": view.get("cluster_id"),
        "bootstrap": cluster.bootstrap,
    }


def _node(node: LocalNode, known: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": node.id,
        "state": _state(node, known),
        "kafka": node.bootstrap,
        "http": str(node.http),
        "pid": node.process.pid,
        "leaders": known.get("leaders"),
        "replicas": known.get("replicas"),
        "in_sync": known.get("in_sync"),
    }


def _state(node: LocalNode, known: dict[str, Any]) -> str:
    """Return stopped, paused, starting, fenced (it runs, but the controller has fenced it) or running."""
    process = node.process.state
    if process != "running":
        return process or "stopped"
    if not node.is_ready:
        return "starting"
    return "fenced" if known.get("state") == "fenced" else "running"


def print_status(status: dict[str, Any]) -> None:
    columns = ("id", "state", "kafka", "http", "pid", "leaders", "replicas", "in_sync")
    rows = [
        [f"{node['id']} (controller)" if node["id"] == status["controller"] else node["id"]]
        + [node[column] for column in columns[1:]]
        for node in status["nodes"]
    ]
    print_table("", columns, rows, ("pid", "leaders", "replicas", "in_sync"))
    if status["under_replicated"] is None:
        print("no node answers, so leaders and in-sync replicas are unknown: start the nodes with chronik cluster up")
        return
    if status["controller"] is None:
        print("no controller: a majority of the nodes must run; start them with chronik cluster up")
    print(f"{status['partitions']} partitions of {status['topics']} topics")
    print(f"under-replicated: {_named(status['under_replicated'], status['under_replicated_partitions'])}")
    print(f"without a leader: {_named(status['leaderless'], status['leaderless_partitions'])}")


def _named(count: int, names: list[str]) -> str:
    """Return the count, and the first few names."""
    shown = names[:8]
    more = ", ..." if count > len(shown) else ""
    return f"{count} ({', '.join(shown)}{more})" if count else "0"
