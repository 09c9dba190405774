"""`chronik transaction`: transactions, and the end of those that hang."""

from __future__ import annotations

import shlex
import time
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from chronik.cli.errors import CHECK_FAILED, CliError, say
from chronik.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, with_cluster
from chronik.cli.output import print_json, print_table
from chronik.client.cluster import Cluster
from chronik.client.transactions import OpenTransaction, TransactionDescription, Transactions
from chronik.wire.errors import ErrorCode, KafkaError

app = typer.Typer(no_args_is_help=True, help="List and describe transactions, find hanging ones, and abort them.")

ONGOING, PREPARED = "Ongoing", "Prepare"
OLDER_THAN_S = 900.0
"""Kafka's and Chronik's highest transaction timeout: an older open transaction has lost its coordinator."""


def _not_empty(transactional_id: str | None) -> str | None:
    if transactional_id == "":
        raise typer.BadParameter("a transactional id is not empty")
    return transactional_id


TransactionalId = Annotated[str, typer.Argument(metavar="ID", callback=_not_empty)]
Topic = Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="Only this topic.")]
PartitionOption = Annotated[int | None, typer.Option("--partition", metavar="N", min=0, help="Only this partition.")]


@app.command("list")
def list_transactions(
    state: Annotated[
        list[str] | None, typer.Option("--state", metavar="STATE", help="Only this state, as Ongoing. Repeatable.")
    ] = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """List transactional ids."""
    listed = with_cluster(bootstrap, lambda cluster: Transactions(cluster).listed(state or ()))
    rows = [
        {
            "transactional_id": each.transactional_id,
            "state": each.state,
            "producer_id": each.producer_id,
            "coordinator": each.coordinator,
        }
        for each in listed
    ]
    if as_json:
        print_json({"transactions": rows})
        return
    columns = ("transactional_id", "state", "producer_id", "coordinator")
    print_table("", columns, [list(row.values()) for row in rows], ("producer_id", "coordinator"))


@app.command()
def describe(
    transactional_id: TransactionalId, as_json: AsJson = False, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP
) -> None:
    """Show a transactional id: its producer, since when its transaction is open, and its partitions."""
    found = with_cluster(bootstrap, lambda cluster: Transactions(cluster).describe(transactional_id))
    described = _described(found, time.time_ns() // 1_000_000)
    if as_json:
        print_json(described)
        return
    fields = [(name, value) for name, value in described.items() if name != "partitions"]
    print_table("", ("field", "value"), fields, ())
    if found.partitions:
        partition = "partition" if found.state == ONGOING else "partition without a marker"
        print_table("", ("topic", partition), sorted(found.partitions), (partition,))


@app.command()
def hanging(
    topic: Topic = None,
    partition: PartitionOption = None,
    older_than: Annotated[
        float,
        typer.Option("--older-than", metavar="SECONDS", min=0, help="Only if the last record is older than this."),
    ] = OLDER_THAN_S,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Find transactions that no coordinator will end. read_committed consumers wait for them forever."""
    if partition is not None and topic is None:
        raise CliError("--partition needs --topic: name the topic of the partition")
    now_ms = time.time_ns() // 1_000_000

    async def find(cluster: Cluster) -> list[OpenTransaction]:
        transactions, older_than_ms = Transactions(cluster), int(older_than * 1000)
        if topic is not None:
            return await transactions.hanging(topic, older_than_ms, now_ms, partition)
        found: list[OpenTransaction] = []
        for name in sorted((await cluster.layout()).topics):
            try:
                found += await transactions.hanging(name, older_than_ms, now_ms)
            except KafkaError as error:
                # A topic that was deleted since it was listed has no transactions.
                if error.code is not ErrorCode.unknown_topic_or_partition:
                    raise
        return found

    found = with_cluster(bootstrap, find)
    rows = [
        {
            "topic": each.topic,
            "partition": each.partition,
            "start_offset": each.start_offset,
            "producer_id": each.producer_id,
            "producer_epoch": each.producer_epoch,
            "last_record": _time(each.last_timestamp_ms),
        }
        for each in found
    ]
    if as_json:
        print_json({"transactions": rows})
    else:
        columns = ("topic", "partition", "start_offset", "producer_id", "producer_epoch", "last_record")
        print_table("", columns, [list(row.values()) for row in rows], columns[1:5])
        if not found:
            say("no transaction hangs")
    if found:
        first = found[0]
        raise CliError(
            f"{len(found)} hanging: end each with chronik transaction abort --topic {first.topic} "
            f"--partition {first.partition} --start-offset {first.start_offset}",
            CHECK_FAILED,
        )


@app.command()
def abort(
    transactional_id: Annotated[str | None, typer.Argument(metavar="[ID]", callback=_not_empty)] = None,
    topic: Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="Of a hanging transaction.")] = None,
    partition: Annotated[
        int | None, typer.Option("--partition", metavar="N", min=0, help="Of a hanging transaction.")
    ] = None,
    start_offset: Annotated[
        int | None, typer.Option("--start-offset", metavar="OFFSET", min=0, help="Where the transaction begins.")
    ] = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Abort an open transaction and fence its producer, or end a hanging one in one partition."""
    if transactional_id is not None and topic is None and partition is None and start_offset is None:
        with_cluster(bootstrap, lambda cluster: _abort_open(Transactions(cluster), transactional_id))
        done: dict[str, Any] = {"transactional_id": transactional_id, "aborted": True}
        line = f"aborted the transaction of {transactional_id}, and fenced its producer"
    elif transactional_id is None and topic is not None and partition is not None and start_offset is not None:
        with_cluster(bootstrap, lambda cluster: _abort_hanging(Transactions(cluster), topic, partition, start_offset))
        done = {"topic": topic, "partition": partition, "start_offset": start_offset, "aborted": True}
        line = f"aborted the transaction at {topic}-{partition}, offset {start_offset}"
    else:
        raise CliError("name either a transactional id, or --topic, --partition and --start-offset")
    if as_json:
        print_json(done)
    else:
        say(line)


async def _abort_open(transactions: Transactions, transactional_id: str) -> None:
    described = await transactions.describe(transactional_id)
    state = described.state
    if state.startswith(PREPARED):
        raise CliError(
            f"the outcome of {transactional_id} is decided ({state}), and its coordinator writes the markers: "
            f"see the partitions without one with chronik transaction describe {shlex.quote(transactional_id)}"
        )
    if state != ONGOING:
        raise CliError(f"{transactional_id} has no open transaction, its state is {state}: nothing to abort")
    await transactions.fence(described)


async def _abort_hanging(transactions: Transactions, topic: str, partition: int, start_offset: int) -> None:
    found = [each for each in await transactions.open_in(topic, partition) if each.start_offset == start_offset]
    if not found:
        raise CliError(
            f"no open transaction begins at {topic}-{partition}, offset {start_offset}: see chronik transaction hanging"
        )
    described = (await transactions.coordinated(found)).get(found[0].key)
    if described is not None:
        raise CliError(
            "this transaction does not hang, its coordinator will end it: chronik transaction abort "
            f"{shlex.quote(described.transactional_id)}"
        )
    await transactions.write_abort(found[0])


def _described(found: TransactionDescription, now_ms: int) -> dict[str, Any]:
    is_open = found.state == ONGOING and found.start_ms is not None
    return {
        "transactional_id": found.transactional_id,
        "state": found.state,
        "coordinator": found.coordinator,
        "producer_id": found.producer_id,
        "producer_epoch": found.producer_epoch,
        "timeout_ms": found.timeout_ms,
        "started": None if found.start_ms is None else _time(found.start_ms),
        "times_out": _time((found.start_ms or 0) + found.timeout_ms) if is_open else None,
        "open_s": max(0, now_ms - (found.start_ms or 0)) / 1000 if is_open else None,
        "partitions": [{"topic": topic, "partition": index} for topic, index in sorted(found.partitions)],
    }


def _time(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
