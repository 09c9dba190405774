"""The measurements on a server that has just started: one function for each part, which yields its figures.

Each function runs on the life of one server. Unmeasured load comes first, until it gets no faster (`warm_up`): a JVM
compiles code while it runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bench.clients import NotMeasured, Topic, drive, drive_single_requests
from bench.processes import usage_of
from bench.samples import Figure
from bench.servers import Server, Setup, Side
from chronik.cli.failover_stream import FailoverStream
from chronik.cli.options import with_cluster

MEGABYTE = 1_000_000
PARTITIONS = 3
CONSUMERS = 4
KILOBYTE_RECORD = 1000
SIZE_NAMES = {100: "100 B", KILOBYTE_RECORD: "1 KB"}
SETTLE_S = 2.0
WARM_UP_ROUNDS_MAX = 8
FAILOVER_RATE = 500.0
KEYED_RATE = 5_000
MANY_PARTITIONS = 100


@dataclass(frozen=True, slots=True)
class Scale:
    """The amount of load; `quick` only shows that everything works, and measures nothing worth keeping."""

    quick: bool = False

    def records(self, count: int) -> int:
        return max(500, count // 20) if self.quick else count

    def seconds(self, seconds: float) -> float:
        return 1.0 if self.quick else seconds


@dataclass(slots=True)
class Life:
    """One server from its start to its end. `start_s` is the time from its launch to its first acknowledged write."""

    server: Server
    scale: Scale
    start_s: float
    side: Side

    @property
    def setup(self) -> Setup:
        return self.server.setup


Run = Callable[[Life], Iterator[Figure]]


def start(life: Life) -> Iterator[Figure]:
    """From the start of the processes to an acknowledged write on each of three partitions of a new topic."""
    yield Figure(f"start to first produce, {_nodes(life)}", "acknowledged after", "s", life.start_s, "<= 0.3")


def idle_memory(life: Life) -> Iterator[Figure]:
    """Measure before any load, after the start has settled."""
    time.sleep(life.scale.seconds(SETTLE_S))
    yield _memory(life, "idle")


def warm_up(life: Life) -> None:
    """Repeat single requests and batches until two rounds have improved neither by 5 % over its best rate."""
    records = life.scale.records(100_000)
    best, vain = [0.0, 0.0], 0
    with Topic(life.server, PARTITIONS) as topic:
        for _ in range(WARM_UP_ROUNDS_MAX):
            requests = drive_single_requests(topic, 10, 5, life.scale.seconds(2.0))
            batches = drive(topic, "produce", records, KILOBYTE_RECORD)
            rates = [figures["records_per_s"] for figures in (requests, batches)]
            vain += all(rate < 1.05 * before for rate, before in zip(rates, best, strict=True))
            best = [max(rate, before) for rate, before in zip(rates, best, strict=True)]
            if vain == 2:
                break
        drive(topic, "consume", records, KILOBYTE_RECORD)


def produce(life: Life) -> Iterator[Figure]:
    """One producer with librdkafka's own batching; on three nodes each record is written three times."""
    for size_bytes, most in ((100, 1_000_000), (KILOBYTE_RECORD, 400_000)):
        records = life.scale.records(most if life.setup.nodes == 1 else most // 2)
        for acks in ("1", "all"):
            with Topic(life.server, PARTITIONS) as topic:
                figures = drive(topic, "produce", records, size_bytes, acks=acks)
            workload = f"produce {SIZE_NAMES[size_bytes]}, acks={acks}, {life.setup}"
            yield figure_of(figures, workload, "records", "1/s", figures["records_per_s"], ">= 1.0")
            yield figure_of(figures, workload, "server CPU", "ms/MB", figures["broker_cpu_ms_per_mb"], "<= 0.5")


def consume(life: Life) -> Iterator[Figure]:
    """Read records that were written just before, so that they come from the page cache."""
    records = life.scale.records(600_000)
    with Topic(life.server, CONSUMERS) as topic:
        drive(topic, "produce", records, KILOBYTE_RECORD)
        for clients in (1, CONSUMERS):
            figures = drive(topic, "consume", topic.available(), KILOBYTE_RECORD, clients=clients)
            workload = f"consume 1 KB, {clients} consumer{'s' if clients > 1 else ''}, {_nodes(life)}"
            yield figure_of(figures, workload, "throughput", "MB/s", figures["mb_per_s"], ">= 1.0")
            yield figure_of(figures, workload, "server CPU", "ms/MB", figures["broker_cpu_ms_per_mb"], "<= 0.5")


def latency(life: Life) -> Iterator[Figure]:
    """Measure from produce() until the consumer has the record; each client has its own partition.

    The higher rate uses librdkafka's own linger: without it, librdkafka sends each record by itself, on two cores that
    clients and servers share. It also runs without idempotence: with five requests in flight, the maximum of an
    idempotent producer, librdkafka's threads spin and take CPU from the servers.
    """
    for rate, clients, linger_ms, idempotent in (
        (1_000, 1, 0.0, True),
        (20_000, PARTITIONS, 5.0, True),
        (20_000, PARTITIONS, 5.0, False),
    ):
        with Topic(life.server, PARTITIONS) as topic:
            os.sync()  # unwritten data of earlier parts would disturb this one
            records = int(rate * life.scale.seconds(5.0))
            load = {"rate": float(rate), "clients": clients, "linger_ms": linger_ms, "idempotent": idempotent}
            figures = drive(topic, "roundtrip", records, KILOBYTE_RECORD, **load)
        kind = "acks=all" if idempotent else "acks=all, not idempotent"
        workload = f"end to end at {rate:,} records/s, {kind}, {life.setup}"
        goal = "<= 1.0" if idempotent else None  # Apache Kafka collapses there: reported, but not counted as met
        for metric in ("p50", "p99"):
            yield figure_of(figures, workload, metric, "ms", figures["latency_ms"][metric], goal)


def keyed(life: Life) -> Iterator[Figure]:
    """Measure from produce() until the consumer has the record; keys spread the records over all partitions."""
    before: dict[str, float] = {}
    for partitions in (PARTITIONS, MANY_PARTITIONS):
        with Topic(life.server, partitions) as topic:
            os.sync()  # unwritten data of earlier parts would disturb this one
            records = int(KEYED_RATE * life.scale.seconds(5.0))
            load = {"rate": float(KEYED_RATE), "linger_ms": 0.0, "is_keyed": True}
            figures = drive(topic, "roundtrip", records, KILOBYTE_RECORD, **load)
        workload = f"{KEYED_RATE:,} keyed records/s over {partitions} partitions, acks=all, {life.setup}"
        for metric in ("p50", "p99"):
            latency_ms = figures["latency_ms"][metric]
            yield figure_of(figures, workload, metric, "ms", latency_ms, "<= 1.0")
            if metric in before:
                growth = f"{metric} by that over {PARTITIONS} partitions"
                yield Figure(workload, growth, "ratio", latency_ms / before[metric], "<= 1.5", is_own_goal=True)
            before[metric] = latency_ms


def requests(life: Life) -> Iterator[Figure]:
    with Topic(life.server, PARTITIONS) as topic:
        figures = drive_single_requests(topic, 10, 5, life.scale.seconds(5.0))
    yield from _request_figures(figures, f"one-record requests, 10 connections, {life.setup}")


def replicated_requests(life: Life) -> Iterator[Figure]:
    """One request in flight on each connection; each record is written three times before its response."""
    for count in (10, 100):
        with Topic(life.server, PARTITIONS) as topic:
            figures = drive_single_requests(topic, count, 1, life.scale.seconds(5.0))
        yield from _request_figures(figures, f"one-record requests, one on each of {count} connections, {life.setup}")


def _request_figures(figures: dict[str, Any], workload: str) -> Iterator[Figure]:
    yield figure_of(figures, workload, "requests", "1/s", figures["records_per_s"], ">= 1.0")
    yield figure_of(figures, workload, "p99", "ms", figures["latency_ms"]["p99"], "<= 1.0")


def loaded_memory(life: Life) -> Iterator[Figure]:
    """Measure after 200 MB in and out, in addition to the load of other parts of the same life."""
    with Topic(life.server, CONSUMERS) as topic:
        drive(topic, "produce", life.scale.records(200_000), KILOBYTE_RECORD)
        drive(topic, "consume", topic.available(), KILOBYTE_RECORD, clients=CONSUMERS)
        yield _memory(life, "loaded")


def failover(life: Life) -> Iterator[Figure]:
    """Kill the leader of partition 0 under a steady stream, and measure the longest time without an acknowledgement.

    The stream is read back: a run that lost a record has no figure. Runs last, because it leaves a node missing.
    """
    with Topic(life.server, PARTITIONS, is_kept=True) as topic:
        leader = with_cluster(topic.bootstrap, lambda cluster: cluster.leaders(topic.name))[0]
        records = int(FAILOVER_RATE * (3.0 if life.scale.quick else 6.0))
        stream = FailoverStream(topic.bootstrap, topic.name, PARTITIONS, records, FAILOVER_RATE)
        result = stream.run(lambda: life.server.kill(leader))
    if result.account.missing or result.account.failed:
        raise NotMeasured(f"{result.account.missing} acknowledged records missing, {result.account.failed} refused")
    pause_ms = result.longest_pause_s * 1000
    yield Figure(f"failover, leader killed, {life.setup}", "no acknowledged write for", "ms", pause_ms, "<= 0.5")


def record_sizes(life: Life) -> Iterator[Figure]:
    """The largest size stays below the 1,000,000 bytes that librdkafka allows for a whole message."""
    for size_bytes in (10, 100, 1_000, 10_000, 100_000, 990_000):
        records = min(600_000, 200 * MEGABYTE // size_bytes)
        with Topic(life.server, PARTITIONS) as topic:
            figures = drive(topic, "produce", max(50, records // (20 if life.scale.quick else 1)), size_bytes)
        series, workload = "record size", f"produce {size_bytes:,} B records, {_nodes(life)}"
        cost = figures["broker_cpu_ms_per_mb"]
        yield figure_of(figures, workload, "server CPU", "ms/MB", cost, series=series, x=float(size_bytes))
        yield figure_of(figures, workload, "throughput", "MB/s", figures["mb_per_s"])


def connections(life: Life) -> Iterator[Figure]:
    """One request in flight on each connection."""
    for count in (1, 10, 100, 500, 2_000):
        with Topic(life.server, PARTITIONS) as topic:
            figures = drive_single_requests(topic, count, 1, life.scale.seconds(4.0))
        series, workload = "connections", f"one-record requests, one on each of {count:,} connections, {_nodes(life)}"
        cost = figures["broker_cpu_us_per_record"]
        yield figure_of(figures, workload, "server CPU", "us/request", cost, series=series, x=float(count))
        if count == 1:  # a single client waits for the network most of the time: reported only
            yield figure_of(figures, workload, "requests", "1/s", figures["records_per_s"])
        else:
            yield from _request_figures(figures, workload)


def _memory(life: Life, when: str) -> Figure:
    usage = usage_of(life.server.pids)
    resident_mb = usage.resident_bytes / MEGABYTE
    workload = f"resident memory, {when}, {_nodes(life)}"
    return Figure(workload, "all server processes", "MB", resident_mb, "<= 0.2", resident_mb=resident_mb)


def figure_of(
    figures: dict[str, Any], workload: str, metric: str, unit: str, value: float, goal: str | None = None, **more: Any
) -> Figure:
    usage = {"cpu_s": figures["broker_cpu_s"], "resident_mb": figures["broker_rss_bytes"] / MEGABYTE}
    return Figure(workload, metric, unit, value, goal, **usage, **more)


def _nodes(life: Life) -> str:
    return f"{life.setup.nodes} node{'s' if life.setup.nodes > 1 else ''}"
