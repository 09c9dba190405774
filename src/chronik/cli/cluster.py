"""`chronik cluster`: nodes on this machine, in the background: up, down, status, and commands for a single node."""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import typer

from chronik.cli.errors import CliError, say
from chronik.cli.options import PROPERTIES_VARIABLE, AsJson
from chronik.cli.output import print_json, print_table
from chronik.local.cluster import NODES_MAX, LocalCluster, newest_view
from chronik.local.node import LocalNode
from chronik.local.security import ADMINISTRATOR, CLIENT_PROPERTIES, JAVA_PROPERTIES

app = typer.Typer(no_args_is_help=True, help="Run a cluster on this machine, in the background.")

Folder = Annotated[str, typer.Option("--dir", metavar="DIR", help="The folder of the cluster.")]
NodeId = Annotated[int, typer.Argument(metavar="N", min=1)]
DEFAULT_FOLDER = "chronik-data"


@app.command()
def up(
    nodes: Annotated[
        int | None, typer.Option(min=1, max=NODES_MAX, help="Number of nodes of a new cluster (default 3).")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Kafka port of the first node (default 9092).")] = None,
    secure: Annotated[
        bool, typer.Option("--secure", help="A new cluster with TLS, users and ACLs; see DIR/client.properties.")
    ] = False,
    folder: Folder = DEFAULT_FOLDER,
) -> None:
    """Start all nodes, and return when they are ready."""
    cluster = LocalCluster(folder)
    with cluster.locked(say):
        if cluster.nodes:
            _check_unchanged(cluster, nodes, port)
            if secure and not cluster.is_secured:
                raise CliError(f"{cluster.folder} holds a cluster without security: pass another --dir")
        running = cluster.running
        paused = [node.id for node in running if node.process.state == "paused"]
        if paused:
            raise CliError(f"node {paused[0]} is paused: chronik cluster resume {paused[0]}")
        if running and len(running) == len(cluster.nodes):
            print(f"already running: {len(running)} nodes in {cluster.folder}; nothing was changed")
            _print_addresses(cluster)
            return
        if not cluster.nodes:
            cluster.create(nodes or 3, 9092 if port is None else port, is_secure=secure)
        elif port is not None and port != cluster.nodes[0].kafka.port:
            cluster.move_to(port)
        started = [node.id for node in cluster.nodes if node.process.state is None]
        started_s = time.monotonic()
        cluster.start_all()
        names = "node" if len(started) == 1 else "nodes"
        print(f"{names} {', '.join(map(str, started))} ready in {time.monotonic() - started_s:.1f} s")
    _print_addresses(cluster)


def _check_unchanged(cluster: LocalCluster, nodes: int | None, port: int | None) -> None:
    """Refuse to change the size of an existing cluster, or the ports of a running one."""
    if nodes is not None and nodes != len(cluster.nodes):
        raise CliError(
            f"{cluster.folder} holds a cluster of {len(cluster.nodes)} nodes: use chronik cluster add or remove, "
            "or pass another --dir"
        )
    if port is not None and cluster.running and port != cluster.nodes[0].kafka.port:
        raise CliError(
            f"the cluster in {cluster.folder} runs at port {cluster.nodes[0].kafka.port}: chronik cluster down first, "
            "or pass another --dir"
        )


def _print_addresses(cluster: LocalCluster) -> None:
    print(f"bootstrap {cluster.bootstrap}")
    if not cluster.is_secured:
        print(f"page http://{cluster.nodes[0].http}/")
        return
    client = os.path.join(cluster.folder, CLIENT_PROPERTIES)
    print(f"page https://{cluster.nodes[0].http}/ (user {ADMINISTRATOR}, password in {client})")
    print(f"settings {client} (confluent-kafka, kcat -F), {os.path.join(cluster.folder, JAVA_PROPERTIES)} (Java)")
    print(f"try chronik topic list --properties {client}, or export {PROPERTIES_VARIABLE}={client}")


@app.command()
def status(as_json: AsJson = False, folder: Folder = DEFAULT_FOLDER) -> None:
    """Show nodes (by rack, if they have racks), controller, leaders, ISR and under-replicated partitions."""
    status = _status_of(_existing(folder))
    if as_json:
        print_json(status)
    else:
        _print_status(status)


def _status_of(cluster: LocalCluster) -> dict[str, Any]:
    """Return the status with all fields; fields that no running node can supply are null."""
    views = cluster.views()
    view = newest_view(views.values()) or {}
    known = {node["id"]: node for node in view.get("nodes", ())}
    return {
        "controller": view.get("controller"),
        "nodes": [_node(node, views.get(node.id), known.get(node.id, {})) for node in cluster.nodes],
        **{name: view.get(name) for name in ("under_replicated", "leaderless", "topics", "partitions")},
        "under_replicated_partitions": view.get("under_replicated_partitions", []),
        "leaderless_partitions": view.get("leaderless_partitions", []),
        "cluster_id": view.get("cluster_id"),
        "bootstrap": cluster.bootstrap,
    }


def _node(node: LocalNode, own: dict[str, Any] | None, known: dict[str, Any]) -> dict[str, Any]:
    """Return one row; `own` is the node's own view of the cluster, `known` what the newest view has on the node."""
    return {
        "id": node.id,
        "state": _node_state(node, own, known),
        "disk_error": own["disk_error"] if own else None,
        "kafka": node.bootstrap,
        "http": str(node.http),
        "pid": node.process.pid,
        "folder": node.folder,
        "rack": known.get("rack", node.config.rack),
        **{name: known.get(name) for name in ("leaders", "replicas", "in_sync")},
    }


def _node_state(node: LocalNode, own: dict[str, Any] | None, known: dict[str, Any]) -> str:
    """Return stopped, paused, or how a node runs that has a process.

    starting, stopping; unresponsive: it answers nothing; disk_error: its disk does not complete writes;
    disconnected: it knows no controller; fenced: the controller has fenced it; running.
    """
    process = node.process.state
    if process != "running":
        return process or "stopped"
    if own is None:
        return "unresponsive" if node.is_hanging else "starting"
    if own["disk_error"] is not None:
        return "disk_error"
    if own["state"] != "ready":
        return str(own["state"])
    return "fenced" if known.get("state") == "fenced" else "running"


def _print_status(status: dict[str, Any]) -> None:
    columns = ["id", "state", "kafka", "http", "pid", "leaders", "replicas", "in_sync"]
    nodes = status["nodes"]
    if any(node["rack"] for node in nodes):
        columns.insert(1, "rack")
        nodes = sorted(nodes, key=lambda node: (node["rack"] or "", node["id"]))
    rows = [
        [f"{node['id']} (controller)" if node["id"] == status["controller"] else node["id"]]
        + [node[column] for column in columns[1:]]
        for node in nodes
    ]
    print_table("", columns, rows, ("pid", "leaders", "replicas", "in_sync"))
    for node in status["nodes"]:
        advice = _advice(node)
        if advice is not None:
            print(f"node {node['id']} {advice}")
    if status["under_replicated"] is None:
        is_stopped = any(node["state"] == "stopped" for node in status["nodes"])
        way_out = ": start the nodes with chronik cluster up" if is_stopped else ""
        print(f"no node answers, so leaders and in-sync replicas are unknown{way_out}")
        return
    if status["controller"] is None:
        print("no controller: a majority of the nodes must run; start them with chronik cluster up")
    print(f"{status['partitions']} partitions of {status['topics']} topics")
    print(f"under-replicated: {_named(status['under_replicated'], status['under_replicated_partitions'])}")
    print(f"without a leader: {_named(status['leaderless'], status['leaderless_partitions'])}")


def _advice(node: dict[str, Any]) -> str | None:
    """Return what a running node that does not serve lacks, and what to do; None if its state explains itself."""
    node_id = node["id"]
    if node["state"] == "disk_error":
        return (
            f"runs, but its disk does not complete writes ({node['disk_error']}): check the disk of {node['folder']} "
            "and its free space; the node resumes when writes complete"
        )
    if node["state"] == "unresponsive":
        return (
            f"runs, but does not answer: check the disk of {node['folder']}, which may not complete writes, and the "
            f"load of the machine; if it stays like this, chronik cluster kill {node_id}, then start {node_id}"
        )
    return None


def _named(count: int, names: list[str]) -> str:
    """Return the count, and the first few names."""
    shown = names[:8]
    more = ", ..." if count > len(shown) else ""
    return f"{count} ({', '.join(shown)}{more})" if count else "0"


@app.command()
def down(folder: Folder = DEFAULT_FOLDER) -> None:
    """Stop all nodes cleanly. Keep their data."""
    cluster = _existing(folder)
    with cluster.locked(say):
        running = len(cluster.running)
        if not running:
            print(f"no node of {cluster.folder} is running")
            return
        cluster.stop_all()
        print(f"{running} nodes stopped; their data stays in {cluster.folder}")


@app.command()
def stop(node: NodeId, folder: Folder = DEFAULT_FOLDER) -> None:
    """Stop one node cleanly."""
    cluster = _existing(folder)
    with cluster.locked(say):
        cluster.stop(node)
    print(f"node {node} stopped")


@app.command()
def start(node: NodeId, folder: Folder = DEFAULT_FOLDER) -> None:
    """Start one node, and return when it is ready. Do nothing if it runs already."""
    cluster = _existing(folder)
    with cluster.locked(say):
        if cluster.node(node).process.state == "running":
            print(f"node {node} is already running: {cluster.node(node).bootstrap}; nothing was changed")
            return
        if cluster.start(node):
            print(f"node {node} is ready: {cluster.node(node).bootstrap}")
            return
        missing = next(other.id for other in cluster.nodes if other.process.state is None)
        print(f"node {node} runs, and waits for a majority of the nodes: chronik cluster start {missing}")


@app.command()
def kill(node: NodeId, folder: Folder = DEFAULT_FOLDER) -> None:
    """Kill one node (SIGKILL), as a crash would."""
    _existing(folder).kill(node)
    print(f"node {node} killed")


@app.command()
def pause(node: NodeId, folder: Folder = DEFAULT_FOLDER) -> None:
    """Pause one node (SIGSTOP): its connections stay open, but it does not answer."""
    _existing(folder).pause(node)
    print(f"node {node} paused")


@app.command()
def resume(node: NodeId, folder: Folder = DEFAULT_FOLDER) -> None:
    """Resume a paused node (SIGCONT)."""
    print(f"node {node} resumed" if _existing(folder).resume(node) else f"node {node} was not paused")


@app.command()
def add(folder: Folder = DEFAULT_FOLDER) -> None:
    """Add a node, and move its share of the data to it."""
    from chronik.cli.cluster_resize import add_node

    cluster = _existing(folder)
    with cluster.locked(say):
        add_node(cluster)


@app.command()
def remove(
    node: NodeId,
    fewer_replicas: Annotated[
        bool, typer.Option("--fewer-replicas", help="Continue if too few nodes remain for all replicas.")
    ] = False,
    folder: Folder = DEFAULT_FOLDER,
) -> None:
    """Move one node's data to other nodes, then remove it from the cluster and delete its folder."""
    from chronik.cli.cluster_resize import remove_node

    cluster = _existing(folder)
    with cluster.locked(say):
        remove_node(cluster, node, fewer_replicas=fewer_replicas)


@app.command("restore-metadata")
def restore_metadata(
    folder: Folder = DEFAULT_FOLDER,
    node_dirs: Annotated[
        list[str] | None,
        typer.Option("--node-dir", metavar="PATH", help="A node's data folder, instead of all in --dir; repeatable."),
    ] = None,
) -> None:
    """Rebuild the metadata of a cluster from its logs, after all nodes lost their metadata.db."""
    from chronik.cli.cluster_restore import restore, restore_local

    if node_dirs:
        restore(node_dirs, {})
        return
    cluster = _existing(folder)
    with cluster.locked(say):
        restore_local(cluster)


def _existing(folder: str) -> LocalCluster:
    cluster = LocalCluster(folder)
    if not cluster.nodes:
        raise CliError(f"there is no cluster in {cluster.folder}: start one with chronik cluster up, or pass --dir")
    return cluster
