"""`chronik topic recover`: bring a partition without a leader back from one of its replicas, on any Kafka cluster.

No remaining replica can prove that it has every committed record, so an operator has to choose one. The chosen node
becomes the first of the replicas, and an unclean election picks the first replica that can lead.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer

from chronik.cli.errors import CHECK_FAILED, CliError
from chronik.cli.options import with_cluster
from chronik.cli.output import print_json, print_table
from chronik.client.brokers import Brokers
from chronik.client.cluster import Cluster, Deadline
from chronik.client.layout import PartitionLayout
from chronik.client.replica_logs import ANSWERS, ReplicaLog, loss_if_leading, replica_logs
from chronik.wire.errors import ErrorCode, KafkaError

NO_LEADER = -1


def recover_partition(
    topic: str, partition: int, node_id: int, *, accept_loss: bool, as_json: bool, bootstrap: str
) -> None:
    """Show what each replica has, and make `node_id` the leader if the loss is accepted."""
    name = f"{topic}-{partition}"
    layout, logs = with_cluster(bootstrap, lambda cluster: _survey(cluster, topic, partition))
    view: dict[str, Any] = {
        "topic": topic,
        "partition": partition,
        "from": node_id,
        "leader": layout.leader,
        "epoch": layout.leader_epoch,
        "recovered": False,
        "replicas": [_replica(log, logs) for log in logs],
    }
    if not as_json:
        _print(name, node_id, view["replicas"])
    try:
        chosen = _check(name, node_id, layout, logs)
        lost = loss_if_leading(chosen, logs)
        loss = str(lost.records) if lost.is_exact else f"{lost.records} or more"
        if not accept_loss:
            raise CliError(
                f"nothing was changed: {loss} records that other replicas of {name} have are lost if node {node_id} "
                "leads; start replicas that are down first, or pass --accept-loss to continue",
                CHECK_FAILED,
            )
        if sys.stdin.isatty() and not typer.confirm(
            f"Make node {node_id} the leader of {name}, and lose {loss} records that other replicas have?", err=True
        ):
            raise CliError("nothing was changed", CHECK_FAILED)
        elected = with_cluster(bootstrap, lambda cluster: _lead(cluster, topic, layout, node_id))
        view |= {"leader": elected.leader, "epoch": elected.leader_epoch, "recovered": True}
    finally:
        if as_json:
            print_json(view)
    if not as_json:
        print(f"node {node_id} leads {name} with leader epoch {elected.leader_epoch}; the other replicas follow it")


async def _survey(cluster: Cluster, topic: str, partition: int) -> tuple[PartitionLayout, list[ReplicaLog]]:
    layout = await _partition(cluster, topic, partition)
    return layout, await replica_logs(cluster, topic, partition, layout.replicas)


async def _partition(cluster: Cluster, topic: str, partition: int, deadline: Deadline | None = None) -> PartitionLayout:
    partitions = (await cluster.topic(topic, deadline=deadline)).partitions
    layout = next((layout for layout in partitions if layout.partition == partition), None)
    if layout is None:
        raise CliError(f"topic {topic} has no partition {partition}: it has 0 to {len(partitions) - 1}")
    return layout


def _check(name: str, node_id: int, layout: PartitionLayout, logs: Sequence[ReplicaLog]) -> ReplicaLog:
    """Return the chosen replica's log; raise CliError if there is nothing to recover, or nothing to recover from."""
    if node_id not in layout.replicas:
        known = ", ".join(map(str, layout.replicas))
        raise CliError(f"node {node_id} has no replica of {name}: choose one of {known}")
    if layout.leader == node_id:
        raise CliError(f"node {node_id} already leads {name}, so there is nothing to recover")
    if layout.leader != NO_LEADER:
        raise CliError(
            f"node {layout.leader} leads {name}, so there is nothing to recover; if node {node_id} has records "
            f"that node {layout.leader} lacks, stop node {layout.leader} first"
        )
    chosen = next(log for log in logs if log.node_id == node_id)
    if chosen.state != ANSWERS:
        raise CliError(f"node {node_id} cannot lead {name} ({chosen.state}): start it first, or choose another replica")
    return chosen


async def _lead(cluster: Cluster, topic: str, layout: PartitionLayout, node_id: int) -> PartitionLayout:
    partition = layout.partition
    brokers = Brokers(cluster)
    order = (node_id, *(replica for replica in layout.replicas if replica != node_id))
    if order != layout.replicas:
        await brokers.move({(topic, partition): order})
    await brokers.elect_unclean(topic, partition)

    async def elected(within: Deadline) -> PartitionLayout:
        current = await _partition(cluster, topic, partition, within)
        if current.leader == NO_LEADER:
            raise KafkaError(ErrorCode.leader_not_available, f"{topic}-{partition} has no leader yet")
        if current.leader != node_id:
            raise CliError(
                f"node {current.leader} leads {topic}-{partition}, not node {node_id}: it was in sync, or returned "
                "in time: see chronik topic describe",
                CHECK_FAILED,
            )
        return current

    return await cluster.retry(elected, refresh=False)


def _print(name: str, node_id: int, replicas: Sequence[dict[str, Any]]) -> None:
    columns = ("node", "state", "log start", "log end", "last epoch", "lost if it leads")
    rows = []
    for node, *cells, lost, is_exact in (replica.values() for replica in replicas):
        shown = f"{node} (chosen)" if node == node_id else node
        rows.append((shown, *cells, f"{lost} or more" if is_exact is False else lost))
    print_table(f"replicas of {name}", columns, rows, columns[2:])


def _replica(log: ReplicaLog, logs: Sequence[ReplicaLog]) -> dict[str, Any]:
    loss = loss_if_leading(log, logs) if log.state == ANSWERS else None
    return {
        "node": log.node_id,
        "state": log.state,
        "log_start_offset": log.log_start_offset,
        "log_end_offset": log.log_end_offset,
        "last_epoch": log.last_epoch if log.offsets else None,
        "lost": None if loss is None else loss.records,
        "lost_is_exact": None if loss is None else loss.is_exact,
    }
