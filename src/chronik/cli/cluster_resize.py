"""`chronik cluster add` and `remove`: add or remove one node, and move data while clients continue."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping

from chronik.cli.errors import CliError, say
from chronik.cli.options import with_cluster
from chronik.cli.output import progress
from chronik.cli.replica_moves import Partition, Replicas, moves_from, moves_to
from chronik.client.brokers import Brokers
from chronik.client.cluster import Cluster
from chronik.client.errors import ClientError
from chronik.client.layout import ClusterLayout
from chronik.local.cluster import LocalCluster
from chronik.wire.errors import KafkaError

STALL_S_MAX = 600.0
MOVES_AT_ONCE = 500


def add_node(cluster: LocalCluster) -> None:
    """Add a node and move its share of the replicas to it."""
    _check_all_run(cluster)
    node = cluster.add()
    try:
        cluster.start(node.id)
    except BaseException:
        # Whether or not the node has joined, its settings exist for another attempt.
        say(f"node {node.id} was added but did not start: try again with chronik cluster start {node.id}")
        raise
    print(f"node {node.id} is ready: {node.bootstrap}", flush=True)
    brokers = [known.id for known in cluster.nodes]

    async def share(online: Cluster) -> int:
        targets = moves_to(node.id, _replicas(await online.layout()), brokers)
        await _carry_out(online, targets, f"moving data to node {node.id}")
        return len(targets)

    try:
        moved = with_cluster(cluster.client_settings, share)
    except KeyboardInterrupt:
        say(f"node {node.id} stays in the cluster, and data continues to move to it: see chronik cluster status")
        raise
    print(f"node {node.id} has its share: replicas of {moved} partitions moved to it")


def remove_node(cluster: LocalCluster, node_id: int, *, fewer_replicas: bool = False) -> None:
    """Move a node's data away, then remove it; `fewer_replicas` drops replicas that no other node can take."""
    node = cluster.node(node_id)
    if len(cluster.nodes) == 1:
        raise CliError(f"node {node_id} is the last node: stop it with chronik cluster down")
    _check_all_run(cluster)
    staying = [other.id for other in cluster.nodes if other.id != node_id]
    staying_at = ",".join(other.bootstrap for other in cluster.nodes if other.id != node_id)
    target = cluster.client_settings.at(staying_at)

    async def empty(online: Cluster) -> int:
        moved = 0
        # Repeat until nothing is left: topics may be created during the moves.
        while targets := moves_from(node_id, before := _replicas(await online.layout()), staying):
            fewer = [partition for partition, after in targets.items() if len(after) < len(before[partition])]
            if fewer and not fewer_replicas:
                raise CliError(
                    f"no other node is left for the replicas of {len(fewer)} partitions on node {node_id}: "
                    "chronik cluster add first, or pass --fewer-replicas to give up one replica of each"
                )
            if fewer:
                say(f"{len(fewer)} partitions lose one replica: no other node is left for it")
            await _carry_out(online, targets, f"moving data from node {node_id}")
            moved += len(targets)
        return moved

    try:
        moved = with_cluster(target, empty)
    except KeyboardInterrupt:
        say(f"node {node_id} stays in the cluster: continue with chronik cluster remove {node_id}")
        raise
    print(f"node {node_id} is empty: {moved} partitions moved to other nodes", flush=True)
    with_cluster(target, lambda online: Brokers(online).unregister(node_id))
    cluster.stop(node_id)
    shutil.rmtree(node.folder)
    cluster.introduce()
    remain = len(cluster.nodes)
    print(f"node {node_id} has left; {'1 node remains' if remain == 1 else f'{remain} nodes remain'}")
    if remain < 3:
        say("with fewer than three nodes, the cluster stops when one node stops: add one with chronik cluster add")


def _check_all_run(cluster: LocalCluster) -> None:
    for node in cluster.nodes:
        if (state := node.process.state) != "running":
            problem, command = ("not running", "start") if state is None else ("paused", "resume")
            raise CliError(
                f"node {node.id} is {problem}, and data must move: chronik cluster {command} {node.id} first"
            )


def _replicas(layout: ClusterLayout) -> dict[Partition, Replicas]:
    return {
        (topic.name, partition.partition): partition.replicas
        for topic in layout.topics.values()
        for partition in topic.partitions
    }


async def _carry_out(online: Cluster, targets: Mapping[Partition, Replicas], what: str) -> None:
    """Request the moves, up to `MOVES_AT_ONCE` at a time, and wait until all have completed."""
    brokers = Brokers(online)
    waiting = sorted(targets)
    ongoing: set[Partition] = set()
    completed = 0
    progress_s = time.monotonic()
    with progress(what, len(targets)) as show:
        while waiting or ongoing:
            free = MOVES_AT_ONCE - len(ongoing)
            requested, waiting = waiting[:free], waiting[free:]
            if requested:
                await brokers.move({partition: targets[partition] for partition in requested})
                ongoing.update(requested)
            await asyncio.sleep(0.3)
            try:
                ongoing &= (await brokers.moves()).keys()
                stall = (
                    f"no move has completed for {STALL_S_MAX:g} s, {len(ongoing)} are in progress: "
                    "see chronik cluster status; they continue by themselves"
                )
            except (KafkaError, ClientError) as error:
                stall = f"the cluster does not report the progress of the move ({error}): the move continues by itself"
            if len(targets) - len(waiting) - len(ongoing) > completed:
                completed = len(targets) - len(waiting) - len(ongoing)
                progress_s = time.monotonic()
            show(completed, f"{completed} of {len(targets)} partitions")
            if time.monotonic() - progress_s > STALL_S_MAX:
                raise CliError(stall)
