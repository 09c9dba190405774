"""`chronik bench`: throughput and latency with real clients, and the cost for the brokers.

Clients run in separate processes, as an application's clients would. `broker_cpu_s` comes from the nodes' /metrics.
"""

from __future__ import annotations

from typing import Annotated

import typer

from chronik.cli.bench_report import print_result
from chronik.cli.bench_run import RunningTopic, Workload, run_workers
from chronik.cli.errors import CliError
from chronik.cli.options import DEFAULT_BOOTSTRAP, Acks, AsJson, Bootstrap, parse_acks

app = typer.Typer(no_args_is_help=True, help="Measure produce, consume, round trip and single requests.")

Records = Annotated[int, typer.Option(min=1, help="Number of records, over all clients.")]
Size = Annotated[int, typer.Option(min=8, help="Size of each value in bytes.")]
Partitions = Annotated[int, typer.Option(min=1, help="Partitions of the topic that is created for the run.")]
Rate = Annotated[float | None, typer.Option(min=0.1, help="Records per second; default: as fast as possible.")]
Clients = Annotated[int, typer.Option(min=1, max=1000, help="Number of clients that share the work.")]
Topic = Annotated[str | None, typer.Option(help="Use this topic and keep it; default: a new one, deleted afterwards.")]
Http = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Where to read /metrics; default: Kafka's port minus 3000.")
]
Linger = Annotated[
    float | None, typer.Option("--linger", metavar="MS", help="linger.ms of librdkafka; default: its own default.")
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
    """Produce with librdkafka. Latency is the time from produce() to the delivery report."""
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
    """Consume with librdkafka; fills a topic first unless --topic names one. Latency is the time of one call."""
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
    keyed: Annotated[
        bool, typer.Option("--keyed", help="Records have keys, which choose among all partitions.")
    ] = False,
    topic: Topic = None,
    http: Http = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Produce at a rate and consume at the same time. Latency is the time from produce() until the consumer has it."""
    workload = Workload("roundtrip", records, size, parse_acks(acks), rate, clients, 0.0, is_keyed=keyed)
    with RunningTopic(bootstrap, topic, partitions) as target:
        print_result(run_workers(workload, target, http), as_json)


@app.command()
def requests(
    clients: Clients = 10,
    seconds: Annotated[float, typer.Option(min=0.1, help="Duration of the run in seconds.")] = 5.0,
    depth: Annotated[int, typer.Option(min=1, max=1000, help="Requests in flight on each connection.")] = 5,
    size: Size = 100,
    acks: Acks = "all",
    partitions: Partitions = 3,
    topic: Topic = None,
    http: Http = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Send one-record produce requests over raw connections. Latency is the time from request to response."""
    from chronik.cli.bench_requests import RequestWorkload, run_requests

    acks_code = {"all": -1, "1": 1}.get(parse_acks(acks))
    if acks_code is None:
        raise CliError("requests with --acks 0 have no response to count: use all or 1")
    workload = RequestWorkload(clients, depth, size, acks_code, seconds)
    with RunningTopic(bootstrap, topic, partitions) as target:
        print_result(run_requests(workload, target, http), as_json)
