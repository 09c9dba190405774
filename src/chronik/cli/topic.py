"""`chronik topic`: create, list, describe, alter, delete and recover topics of any Kafka cluster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from chronik.cli.errors import CHECK_FAILED, CliError, say
from chronik.cli.options import CLIENT_ID, DEFAULT_BOOTSTRAP, AsJson, Bootstrap, Topic, parse_configs, with_controller
from chronik.cli.output import print_json, print_table
from chronik.client.brokers import Brokers
from chronik.client.cluster import Cluster, Deadline
from chronik.client.controller_watch import survey_controller
from chronik.client.layout import ClusterLayout, PartitionLayout, TopicLayout
from chronik.client.replica_logs import ANSWERS, Loss, ReplicaLog, loss_if_leading, replica_logs
from chronik.client.topics import EARLIEST, LATEST, LOG_END_READER, READ_COMMITTED, Topics
from chronik.wire.errors import ErrorCode, KafkaError

app = typer.Typer(no_args_is_help=True, help="Create, list, describe, alter, delete and recover topics.")

NO_LEADER = -1
Name = Annotated[str, typer.Argument(metavar="NAME")]
Configs = Annotated[
    list[str] | None, typer.Option("--config", metavar="K=V", help="A topic setting; repeatable. K= resets it.")
]


@app.command()
def create(
    name: Name,
    partitions: Annotated[int, typer.Option(min=1)] = 3,
    replication_factor: Annotated[int | None, typer.Option(min=1, help="Default: min(3, brokers).")] = None,
    config: Configs = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Create a topic."""
    configs = parse_configs("--config", config, "retention.ms=3600000")
    with_controller(bootstrap, lambda cluster: Topics(cluster).create(name, partitions, replication_factor, configs))
    say(f"created topic {name} with {partitions} partitions")


@app.command("list")
def list_topics(as_json: AsJson = False, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP) -> None:
    """List all topics."""
    layout, outdated = with_controller(bootstrap, _layout)
    if outdated is not None:
        say(f"this list may be outdated: {outdated}")
    topics = [_summary(topic) for _, topic in sorted(layout.topics.items())]
    if as_json:
        print_json({"topics": topics})
        return
    rows = [(t["name"], t["partitions"], t["replication_factor"], t["under_replicated"]) for t in topics]
    print_table("", ("topic", "partitions", "replicas", "under-replicated"), rows, ("partitions", "replicas"))


@app.command()
def describe(name: Name, as_json: AsJson = False, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP) -> None:
    """Show a topic's settings, replicas and offsets."""
    topic = with_controller(bootstrap, lambda cluster: _describe(cluster, name))
    if as_json:
        print_json(topic)
        return
    offsets = ("log_start_offset", "log_end_offset", "high_watermark", "last_stable_offset")
    columns = ("partition", "leader", "epoch", "replicas", "isr", *offsets)
    rows = [[partition[column] for column in columns] for partition in topic["partitions"]]
    print_table(f"topic {name}, id {topic['id']}", columns, rows, columns)
    configs = ", ".join(f"{key}={value}" for key, value in topic["configs"].items())
    print(f"configs: {configs or 'all default'}")


@app.command()
def alter(
    name: Name,
    config: Configs = None,
    partitions: Annotated[int | None, typer.Option(min=1, help="The new number; it can only grow.")] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Change a topic's settings, or add partitions."""
    configs = {key: value or None for key, value in parse_configs("--config", config, "retention.ms=3600000").items()}
    if not configs and partitions is None:
        raise CliError("nothing to alter: pass --config K=V or --partitions N")

    async def work(cluster: Cluster) -> None:
        topics = Topics(cluster)
        await cluster.topic(name)
        if configs:
            await topics.alter_configs(name, configs)
        if partitions is not None:
            await topics.grow(name, partitions)

    with_controller(bootstrap, work)
    say(f"altered topic {name}")


@app.command()
def delete(name: Name, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP) -> None:
    """Delete a topic and all its records."""
    with_controller(bootstrap, lambda cluster: Topics(cluster).delete(name))
    say(f"deleted topic {name}")


@app.command()
def recover(
    topic: Topic,
    partition: Annotated[int, typer.Option("--partition", metavar="P", min=0)],
    node: Annotated[int, typer.Option("--from", metavar="NODE", help="The node whose replica becomes the leader.")],
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Continue although records that NODE lacks are lost forever.")
    ] = False,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Recover a partition without a leader from one replica. Shows first which records are lost."""
    # No remaining replica can prove that it has every committed record, so an operator has to choose one. The chosen
    # node becomes the first of the replicas, and an unclean election picks the first replica that can lead.
    name = f"{topic}-{partition}"
    layout, logs, no_controller = with_controller(bootstrap, lambda cluster: _survey(cluster, topic, partition))
    view: dict[str, Any] = {
        "topic": topic,
        "partition": partition,
        "from": node,
        "leader": layout.leader,
        "epoch": layout.leader_epoch,
        "recovered": False,
        "replicas": [_replica(log, logs) for log in logs],
    }
    if not as_json:
        _print_replicas(name, node, view["replicas"])
    try:
        if no_controller is not None:
            raise CliError(f"nothing was changed: {no_controller}")
        chosen = _check(name, node, layout, logs)
        lost = loss_if_leading(chosen, logs)
        loss = "an unknown number of" if lost.records is None else str(lost)
        if not accept_loss:
            raise CliError(
                f"nothing was changed: {loss} records that other replicas of {name} have are lost if node {node} "
                "leads; start replicas that are down first, or pass --accept-loss to continue",
                CHECK_FAILED,
            )
        if sys.stdin.isatty() and not typer.confirm(
            f"Make node {node} the leader of {name}, and lose {loss} records that other replicas have?", err=True
        ):
            raise CliError("nothing was changed", CHECK_FAILED)
        elected = with_controller(bootstrap, lambda cluster: _lead(cluster, topic, layout, node))
        view |= {"leader": elected.leader, "epoch": elected.leader_epoch, "recovered": True}
    finally:
        if as_json:
            print_json(view)
    if not as_json:
        print(f"node {node} leads {name} with leader epoch {elected.leader_epoch}; the other replicas follow it")


def _summary(topic: TopicLayout) -> dict[str, Any]:
    return {
        "name": topic.name,
        "id": str(topic.id) if topic.id else None,
        "internal": topic.is_internal,
        "partitions": len(topic.partitions),
        "replication_factor": max((len(partition.replicas) for partition in topic.partitions), default=0),
        "under_replicated": sum(len(partition.isr) < len(partition.replicas) for partition in topic.partitions),
    }


async def _describe(cluster: Cluster, name: str) -> dict[str, Any]:
    """Describe a topic. Offsets are null for a partition without a leader, since no broker can supply them."""
    topics = Topics(cluster)
    topic = await cluster.topic(name)
    led = [partition.partition for partition in topic.partitions if partition.leader >= 0]
    starts = await topics.offsets(name, EARLIEST, led)
    ends = await topics.offsets(name, LATEST, led, reader=LOG_END_READER)
    watermarks = await topics.offsets(name, LATEST, led)
    stable = await topics.offsets(name, LATEST, led, isolation_level=READ_COMMITTED)
    configs = await topics.configs(name)

    def offset(listed: dict[int, Any], partition: int) -> int | None:
        return listed[partition].offset if partition in listed else None

    return {
        "name": name,
        "id": str(topic.id) if topic.id else None,
        "configs": {entry.name: entry.value for entry in configs if not entry.is_default},
        "partitions": [
            {
                "partition": partition.partition,
                "leader": partition.leader,
                "epoch": partition.leader_epoch,
                "replicas": list(partition.replicas),
                "isr": list(partition.isr),
                "log_start_offset": offset(starts, partition.partition),
                "log_end_offset": offset(ends, partition.partition),
                "high_watermark": offset(watermarks, partition.partition),
                "last_stable_offset": offset(stable, partition.partition),
            }
            for partition in topic.partitions
        ],
    }


async def _layout(cluster: Cluster) -> tuple[ClusterLayout, str | None]:
    """Return the layout, and the reason why it may be outdated, if there is one."""
    layout = await cluster.layout()
    return layout, await _no_controller(cluster)


async def _no_controller(cluster: Cluster) -> str | None:
    """Explain that the cluster has no controller now; None if it has one."""
    if cluster.knows_controller:
        return None
    survey = await survey_controller(cluster, CLIENT_ID)
    return None if survey.has_controller else survey.explain()


async def _survey(cluster: Cluster, topic: str, partition: int) -> tuple[PartitionLayout, list[ReplicaLog], str | None]:
    """Return the partition, its replicas' logs, and the reason why no leader can be elected, if there is one."""
    layout = await _partition(cluster, topic, partition)
    no_controller = await _no_controller(cluster)
    return layout, await replica_logs(cluster, topic, partition, layout.replicas), no_controller


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


def _print_replicas(name: str, node_id: int, replicas: Sequence[dict[str, Any]]) -> None:
    columns = ("node", "state", "log start", "log end", "last epoch", "lost if it leads")
    rows = []
    for replica in replicas:
        node, is_known = replica["node"], replica["state"] == ANSWERS
        values = [replica[name] for name in ("log_start_offset", "log_end_offset", "last_epoch")]
        loss = Loss(replica["lost"], bool(replica["lost_is_exact"]))
        measured = (*values, loss) if is_known else ("unknown",) * 4
        rows.append((f"{node} (chosen)" if node == node_id else node, replica["state"], *measured))
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
