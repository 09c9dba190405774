"""`chronik topic`: create, list, describe, alter, delete and recover topics of any Kafka cluster."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from chronik.cli.errors import CliError, say
from chronik.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, Topic, parse_configs, with_cluster
from chronik.cli.output import print_json, print_table
from chronik.client.cluster import Cluster
from chronik.client.layout import TopicLayout
from chronik.client.topics import EARLIEST, LATEST, LOG_END_READER, Topics

app = typer.Typer(no_args_is_help=True, help="Create, list, describe, alter, delete and recover topics.")

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
    with_cluster(bootstrap, lambda cluster: Topics(cluster).create(name, partitions, replication_factor, configs))
    say(f"created topic {name} with {partitions} partitions")


@app.command("list")
def list_topics(as_json: AsJson = False, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP) -> None:
    """List all topics."""
    layout = with_cluster(bootstrap, lambda cluster: cluster.layout())
    topics = [_summary(topic) for _, topic in sorted(layout.topics.items())]
    if as_json:
        print_json({"topics": topics})
        return
    rows = [(t["name"], t["partitions"], t["replication_factor"], t["under_replicated"]) for t in topics]
    print_table("", ("topic", "partitions", "replicas", "under-replicated"), rows, ("partitions", "replicas"))


@app.command()
def describe(name: Name, as_json: AsJson = False, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP) -> None:
    """Show a topic's settings, replicas and offsets."""
    topic = with_cluster(bootstrap, lambda cluster: _describe(cluster, name))
    if as_json:
        print_json(topic)
        return
    offsets = ("log_start_offset", "log_end_offset", "high_watermark")
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

    with_cluster(bootstrap, work)
    say(f"altered topic {name}")


@app.command()
def delete(name: Name, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP) -> None:
    """Delete a topic and all its records."""
    with_cluster(bootstrap, lambda cluster: Topics(cluster).delete(name))
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
    from chronik.cli.topic_recover import recover_partition

    recover_partition(topic, partition, node, accept_loss=accept_loss, as_json=as_json, bootstrap=bootstrap)


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
            }
            for partition in topic.partitions
        ],
    }
