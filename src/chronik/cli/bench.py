"""`chronik bench`: throughput and latency with real clients, and the cost for the brokers.

Clients run in separate processes, as an application's clients would. `broker_cpu_s` comes from the nodes' /metrics.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from chronik.cli.bench_report import BenchResult, print_result
from chronik.cli.bench_run import RunningTopic, Workload, run_workers
from chronik.cli.errors import CliError
from chronik.cli.options import DEFAULT_BOOTSTRAP, Acks, AsJson, Bootstrap, parse_acks, with_cluster
from chronik.cli.output import progress

app = typer.Typer(no_args_is_help=True, help="Measure produce, consume, round trip and single requests.")

Records = Annotated[int, typer.Option(min=1, help="Records in all.")]
Size = Annotated[int, typer.Option(min=8, help="Bytes of each value.")]
Partitions = Annotated[int, typer.Option(min=1, help="Of the topic that is made for the run.")]
Rate = Annotated[float | None, typer.Option(min=0.1, help="Records per second; default: as fast as it goes.")]
Clients = Annotated[int, typer.Option(min=1, max=1000, help="How many clients share the work.")]
Topic = Annotated[str | None, typer.Option(help="Use this topic and keep it; default: one of the run's own.")]
Http = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="The node's /metrics; default: Kafka's port - 3000.")
]
Linger = Annotated[
    float | None, typer.Option("--linger", metavar="MS", help="librdkafka's linger.ms; default: its own.")
]


@app.command()
def produce(
    records: Records = 1_000_000,
    size: Size = 1024,
    acks: Acks = "all",
    partitions: Partitions = 3,
    rate: Rate = None,
    clients: Clients = 1,
    linger: Linger = None,
    topic: Topic = None,
    http: Http = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Produce with librdkafka. Latency: from produce() to the delivery report."""
    workload = Workload("produce", records, size, parse_acks(acks), rate, clients, linger)
    with RunningTopic(bootstrap, topic, partitions) as target:
        print_result(run_workers(workload, target, http), as_json)


@app.command()
def consume(
    records: Records = 1_000_000,
    size: Size = 1024,
    acks: Acks = "all",
    partitions: Partitions = 3,
    rate: Rate = None,
    clients: Clients = 1,
    topic: Topic = None,
    http: Http = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Consume with librdkafka, after filling a topic (unless --topic names a full one). Latency: one batched call."""
    with RunningTopic(bootstrap, topic, partitions) as target:
        missing = records - target.available()
        if missing > 0:
            if topic is not None:
                raise CliError(f"topic {topic} lacks {missing} of {records} records: lower --records, or fill it")
            run_workers(Workload("produce", missing, size, parse_acks(acks), None, 1, None), target, http)
        print_result(run_workers(Workload("consume", records, size, "all", rate, clients, None), target, http), as_json)


@app.command()
def roundtrip(
    records: Records = 5_000,
    size: Size = 1024,
    acks: Acks = "all",
    partitions: Partitions = 3,
    rate: Rate = 1_000.0,
    clients: Clients = 1,
    topic: Topic = None,
    http: Http = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Produce at a rate and consume at once. Latency: from produce() to the consumer having the record."""
    workload = Workload("roundtrip", records, size, parse_acks(acks), rate, clients, 0.0)
    with RunningTopic(bootstrap, topic, partitions) as target:
        print_result(run_workers(workload, target, http), as_json)


@app.command()
def requests(
    clients: Clients = 10,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to send.")] = 5.0,
    depth: Annotated[int, typer.Option(min=1, max=1000, help="Requests in flight on each connection.")] = 5,
    size: Size = 100,
    acks: Acks = "all",
    partitions: Partitions = 3,
    topic: Topic = None,
    http: Http = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """One-record produce requests over raw connections. Latency: from request to response."""
    from chronik.cli.bench_requests import drive_requests

    wanted = {"all": -1, "1": 1}.get(parse_acks(acks))
    if wanted is None:
        raise CliError("requests with --acks 0 have no answer to count: use all or 1")
    with RunningTopic(bootstrap, topic, partitions) as target, progress("bench requests", seconds) as bar:
        before, cpu_s = target.usage(http), _own_cpu_s()
        load = with_cluster(
            bootstrap,
            lambda cluster: drive_requests(cluster, target.name, clients, depth, size, wanted, seconds, bar),
        )
        result = BenchResult(
            workload="requests",
            records=load.answered,
            bytes=load.answered * size,
            seconds=load.seconds,
            errors=load.errors,
            latencies_ms=load.latencies_ms,
            client_cpu_s=[_own_cpu_s() - cpu_s],
            broker_before=before,
            broker_after=target.usage(http),
        )
    print_result(result, as_json)


def _own_cpu_s() -> float:
    return time.process_time()
