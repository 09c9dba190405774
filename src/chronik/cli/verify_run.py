"""One run of the experiment: create a topic, produce records at full speed, read them all, account for each record."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from chronik.cli.errors import CliError, say
from chronik.cli.options import with_cluster
from chronik.cli.output import open_ledger, progress
from chronik.cli.verify_account import Account
from chronik.cli.verify_clients import Read, Reader, Report, Sender, open_reader, open_sender
from chronik.cli.verify_timeline import Timeline
from chronik.client.cluster import Cluster
from chronik.client.errors import ClientError
from chronik.client.properties import ClientSettings, Target
from chronik.client.topics import LATEST, Topics
from chronik.wire.errors import KafkaError

SERVE_EVERY_RECORDS = 500
ACKED_MEANS = {
    "0": "sent: with acks=0 no broker confirms a record, so this counts what the client handed to the network",
    "1": "written by the partition's leader",
    "all": "written by all in-sync replicas",
}


@dataclass(frozen=True, slots=True)
class Experiment:
    """The parameters of an experiment."""

    messages: int = 5000
    partitions: int = 3
    acks: str = "1"
    bootstrap_from: str = "one"
    client: str = "kafka-python"
    timeout_s: float = 60.0
    """How long the reader waits without receiving a record before it gives up."""
    max_poll_records: int = 500


@dataclass(frozen=True, slots=True)
class Prepared:
    """The topic of a run, as the cluster created it."""

    topic: str
    bootstrap: Target
    """The bootstrap addresses that the clients receive."""
    brokers: Target
    """The addresses of all brokers, for requests while one broker is down."""
    leaders: dict[int, int]
    starts: dict[int, int]


def run(
    experiment: Experiment, target: Target, *, topic: str | None = None, ledger: str | None = None
) -> dict[str, Any]:
    """Run the experiment once and return its figures. Delete the run's own topic, unless a ledger refers to it."""
    bootstrap = ClientSettings.of(target)
    name = topic or f"verify-{time.time_ns():x}-{os.getpid()}"
    with_cluster(bootstrap, lambda cluster: _create_topic(cluster, name, experiment.partitions))
    try:
        prepared = with_cluster(bootstrap, lambda cluster: _prepare(cluster, name, experiment, bootstrap))
        return _run_on(experiment, prepared, ledger)
    finally:
        if topic is None and ledger is None:
            _delete(bootstrap, name)


async def _create_topic(cluster: Cluster, topic: str, partitions: int) -> None:
    known = (await cluster.layout([topic])).topics.get(topic)
    if known is None or known.error:
        await Topics(cluster).create(topic, partitions, None, {})
    elif len(known.partitions) != partitions:
        raise CliError(f"topic {topic} has {len(known.partitions)} partitions: pass --partitions with this number")


async def _prepare(cluster: Cluster, topic: str, experiment: Experiment, bootstrap: ClientSettings) -> Prepared:
    leaders = await cluster.leaders(topic)
    ends = await Topics(cluster).offsets(topic, LATEST)
    brokers = (await cluster.layout([topic])).brokers
    addresses = ",".join(f"{broker.host}:{broker.port}" for _, broker in sorted(brokers.items()))
    given = str(bootstrap.endpoints[0]) if experiment.bootstrap_from == "one" else addresses
    at = bootstrap.at
    return Prepared(
        topic, at(given), at(addresses), leaders, {partition: end.offset for partition, end in ends.items()}
    )


def _delete(bootstrap: ClientSettings, topic: str) -> None:
    try:
        with_cluster(bootstrap, lambda cluster: Topics(cluster).delete(topic))
    except (KafkaError, ClientError) as error:
        say(f"topic {topic} could not be deleted ({error}): chronik topic delete {topic} once the cluster is healthy")


def _run_on(experiment: Experiment, prepared: Prepared, ledger: str | None) -> dict[str, Any]:
    account = Account(experiment.messages, experiment.partitions)
    record_file = open_ledger(ledger, "--ledger")

    def reported(report: Report) -> None:
        if report.error is not None:
            account.refused(report.error)
            return
        account.acknowledged(report.number)
        if record_file is not None:
            key, value = record(report.number)
            partition = report.number % experiment.partitions
            record_file.record(prepared.topic, partition, report.offset, report.timestamp_ms, key, value)

    started_s = time.monotonic()
    client = (experiment.client, prepared.bootstrap, prepared.topic)
    with record_file or nullcontext(), closing(open_sender(*client, experiment.acks, reported)) as sender:
        _produce(sender, experiment, account)
    account.give_up_waiting()
    produce_s = time.monotonic() - started_s
    with closing(open_reader(*client, prepared.starts, experiment.max_poll_records)) as reader:
        timeline = _consume(reader, experiment, account, prepared)
    return figures(experiment, prepared, account, timeline, produce_s)


def record(number: int) -> tuple[bytes, bytes]:
    """Return the key and value of record `number`."""
    return str(number).encode(), f"Message {number}".encode()


def _produce(sender: Sender, experiment: Experiment, account: Account) -> None:
    with progress("produce", experiment.messages) as show:
        for number in range(experiment.messages):
            key, value = record(number)
            account.sent()
            sender.send(number, number % experiment.partitions, key, value)
            if number % SERVE_EVERY_RECORDS == 0:
                sender.serve_reports()
                show(account.acked, f"{account.acked:,} of {experiment.messages:,} acknowledged")
        sender.flush()
        show(account.acked, f"{account.acked:,} of {experiment.messages:,} acknowledged")


def _consume(reader: Reader, experiment: Experiment, account: Account, prepared: Prepared) -> Timeline:
    """Read until all acknowledged records are read and no partition has more, or no record comes for the timeout."""
    started_s = last_s = time.monotonic()
    timeline = Timeline(experiment.partitions, started_s)
    now_s = started_s
    with progress("consume", experiment.messages) as show:
        while now_s - last_s < experiment.timeout_s:
            began_s = time.monotonic()
            batch = reader.poll(0.5)
            now_s = time.monotonic()
            for read in batch:
                account.delivered(read.partition, read.offset, number_of(read))
            timeline.polled(began_s, now_s, {read.partition for read in batch}, len(batch))
            if batch:
                last_s = now_s
                show(account.consumed, f"{account.consumed:,} of {account.acked:,} read")
            if account.missing == 0 and is_read_to_end(account, prepared.brokers, prepared.topic, prepared.starts):
                break
    timeline.end(now_s, account.incomplete())
    return timeline


def is_read_to_end(account: Account, brokers: Target, topic: str, starts: Mapping[int, int]) -> bool:
    """Return whether every partition was read to its end: a duplicate would come after the last expected record."""
    ends = end_offsets(brokers, topic)
    return ends is not None and all(max(account.next_offset(p), starts[p]) >= end for p, end in ends.items())


def end_offsets(brokers: Target, topic: str) -> dict[int, int] | None:
    """Return the end offset of each partition as a consumer sees it, or None if it is unavailable now.

    This bypasses the client under test: after a leader change, kafka-python 3.0 queries the old leader for half a
    minute.
    """
    try:
        ends = with_cluster(brokers, lambda cluster: Topics(cluster).offsets(topic, LATEST), 10.0)
    except (KafkaError, ClientError):
        return None
    return {partition: end.offset for partition, end in ends.items()}


def number_of(read: Read) -> int | None:
    """Return the number of a record of this experiment; None for any other record."""
    return int(read.key) if read.key is not None and read.key.isdigit() else None


def figures(
    experiment: Experiment, prepared: Prepared, account: Account, timeline: Timeline, produce_s: float
) -> dict[str, Any]:
    """Return what `--json` prints for one run."""
    return {
        **asdict(experiment),
        "verdict": account.verdict,
        "produced": account.produced,
        "acked": account.acked,
        "acked_means": ACKED_MEANS[experiment.acks],
        "failed": account.failed,
        "consumed": account.consumed,
        "missing": account.missing,
        "duplicates": account.duplicates,
        "out_of_order": account.out_of_order,
        "unexpected": account.unexpected,
        "success_rate": account.success_rate,
        "produce_s": round(produce_s, 3),
        "consume_s": round(timeline.seconds, 3),
        "burst_rate": round(timeline.burst_rate(), 1),
        "empty_polls": timeline.empty_polls,
        "slowest_fetch_ms": round(timeline.slowest_fetch_s * 1000, 1),
        "imbalance": account.imbalance,
        "stalls": [stall.figures() for stall in timeline.stalls()],
        "partitions": account.partition_figures(prepared.leaders),
        "complaint": account.complaint(),
        "topic": prepared.topic,
        "bootstrap": str(prepared.bootstrap),
    }
