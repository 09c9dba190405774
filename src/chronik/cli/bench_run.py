"""Run a benchmark's workers on a topic, and collect their measurements."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from chronik.cli.bench_report import BenchResult, BrokerUsage
from chronik.cli.bench_workers import WorkerResult, WorkerTask, work
from chronik.cli.client_properties import librdkafka_settings
from chronik.cli.errors import CliError
from chronik.cli.options import with_cluster
from chronik.cli.output import progress
from chronik.client.cluster import Cluster
from chronik.client.node_http import Caller, HttpError, caller_of, get_blocking
from chronik.client.properties import ClientSettings, Target
from chronik.client.topics import EARLIEST, LATEST, Topics

# As in `node.config`, which a client does not load: that takes a quarter of a second.
HTTP_PORT_BELOW_KAFKA = 3000
READY_TIMEOUT_S = 90.0
END_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Workload:
    """The parameters of a measurement."""

    mode: str
    records: int
    size_bytes: int
    acks: str
    rate: float | None
    clients: int
    linger_ms: float | None
    idempotent: bool = True
    """Takes effect only with acks=all."""
    isolation_level: str | None = None
    """Of consumers. librdkafka's default is read_committed."""
    is_keyed: bool = False
    """Round trips use all partitions, chosen by keys."""


class RunningTopic:
    """The topic of a run: created for it and deleted afterwards, unless the user named one."""

    def __init__(self, bootstrap: Target, name: str | None, partitions: int) -> None:
        self.bootstrap = bootstrap
        self.name = name or f"chronik-bench-{os.getpid()}"
        self._is_own = name is None
        self._partitions = partitions
        self._brokers: list[tuple[str, int]] = []

    def __enter__(self) -> RunningTopic:
        async def prepare(cluster: Cluster) -> None:
            layout = await cluster.layout([self.name])
            if self.name not in layout.topics or layout.topics[self.name].error:
                await Topics(cluster).create(self.name, self._partitions, None, {})
            await cluster.leaders(self.name)
            self._brokers = [(broker.host, broker.port) for broker in layout.brokers.values()]

        with_cluster(self.bootstrap, prepare)
        return self

    def __exit__(self, *failure: object) -> None:
        if self._is_own:
            with_cluster(self.bootstrap, lambda cluster: Topics(cluster).delete(self.name))

    def usage(self, http: str | None) -> BrokerUsage | None:
        """Return the brokers' usage as their /metrics report it, or None if no broker serves them."""
        caller = caller_of(ClientSettings.of(self.bootstrap).security)
        usages = [usage for address in http_addresses(self._brokers, http) if (usage := _read_usage(address, caller))]
        if not usages:
            return None
        return BrokerUsage(sum(usage.cpu_s for usage in usages), sum(usage.resident_bytes for usage in usages))

    def offsets(self) -> dict[int, tuple[int, int]]:
        """Return the start and end offset of each partition."""

        async def ask(cluster: Cluster) -> dict[int, tuple[int, int]]:
            starts = await Topics(cluster).offsets(self.name, EARLIEST)
            ends = await Topics(cluster).offsets(self.name, LATEST)
            return {partition: (starts[partition].offset, ends[partition].offset) for partition in ends}

        return with_cluster(self.bootstrap, ask)

    def available(self) -> int:
        return sum(end - start for start, end in self.offsets().values())


def http_addresses(brokers: Iterable[tuple[str, int]], override: str | None) -> list[str]:
    """Return the addresses to query: the override, or 3000 below each Kafka port."""
    if override is not None:
        return [override]
    return [f"{host}:{port - HTTP_PORT_BELOW_KAFKA}" for host, port in brokers if port > HTTP_PORT_BELOW_KAFKA]


def _read_usage(address: str, caller: Caller) -> BrokerUsage | None:
    try:
        text = get_blocking(address, "/metrics", 3.0, caller).decode()
        if "chronik_" not in text:
            return None
        values = dict(line.split(" ", 1) for line in text.splitlines() if line.startswith("process_"))
        resident = float(values.get("process_resident_memory_bytes", 0))
        return BrokerUsage(float(values["process_cpu_seconds_total"]), int(resident))
    except (HttpError, KeyError, ValueError):
        return None


def run_workers(workload: Workload, topic: RunningTopic, http: str | None) -> BenchResult:
    """Start the clients, release them together, and wait for all. Lost produced records show in the end offsets."""
    offsets = topic.offsets()
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    for task in _tasks(workload, topic, offsets):
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(task, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:
            _receive_ready(pipe)
        before = topic.usage(http)
        for pipe in pipes:
            pipe.send("go")
        results = _gather(pipes, workload)
        after = topic.usage(http)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
    errors = sum(result.errors for result in results)
    if workload.mode == "produce":
        sent = sum(result.records for result in results)
        errors = max(errors, sent - _appended(topic, sum(end for _, end in offsets.values()), sent))
    return BenchResult(
        workload=workload.mode,
        records=sum(result.records for result in results),
        bytes=sum(result.bytes for result in results),
        seconds=max(result.ended_s for result in results) - min(result.started_s for result in results),
        errors=errors,
        latencies_ms=[latency for result in results for latency in result.latencies_ms],
        client_cpu_s=[result.cpu_s for result in results],
        broker_before=before,
        broker_after=after,
    )


def _appended(topic: RunningTopic, before: int, expected: int) -> int:
    """Return how far the topic's end offsets advanced. Without acks=all the followers may still be catching up."""
    deadline_s = time.monotonic() + END_TIMEOUT_S
    while True:
        appended = sum(end for _, end in topic.offsets().values()) - before
        if appended >= expected or time.monotonic() >= deadline_s:
            return appended
        time.sleep(0.05)


def _tasks(workload: Workload, topic: RunningTopic, offsets: dict[int, tuple[int, int]]) -> list[WorkerTask]:
    settings: dict[str, Any] = {
        **librdkafka_settings(topic.bootstrap),
        "client.id": "chronik-bench",
        "log_level": 0,
    }
    clients, left = workload.clients, workload.records
    shares: list[list[tuple[int, int, int]]] = [[] for _ in range(clients)]
    if workload.mode == "consume":
        # When its queue is full, librdkafka does not fetch for a second: the faster the broker, the longer it sleeps.
        settings |= {"group.id": "chronik-bench", "enable.auto.commit": False, "fetch.queue.backoff.ms": 10}
        if workload.isolation_level is not None:
            settings["isolation.level"] = workload.isolation_level
        # Client i reads the partitions i, i + clients, ..., and each partition supplies its share.
        for position, (partition, (start, end)) in enumerate(sorted(offsets.items())):
            take = min(left, end - start)
            left -= take
            if take:
                shares[position % clients].append((partition, start, take))
    else:
        is_idempotent = workload.acks == "all" and workload.idempotent
        settings |= {"acks": workload.acks, "enable.idempotence": is_idempotent}
        if workload.linger_ms is not None:
            settings["linger.ms"] = workload.linger_ms
        partitions = sorted(offsets)
        for index, share in enumerate(shares):
            share.append((partitions[index % len(partitions)], 0, left // clients + (index < left % clients)))
        if workload.is_keyed:
            if clients > 1:
                raise CliError("a client with keys reads all partitions: run it alone, with --clients 1")
            shares[0] += [(partition, 0, 0) for partition in partitions[1:]]
    rate = None if workload.rate is None else workload.rate / clients
    tasks = [
        WorkerTask(
            workload.mode, settings, topic.name, records, workload.size_bytes, rate, tuple(share), workload.is_keyed
        )
        for share in shares
        if (records := sum(count for *_, count in share))
    ]
    if workload.mode == "roundtrip" and len(tasks) > len(offsets):
        raise CliError(f"each round-trip client needs a partition: pass --partitions {len(tasks)} or more")
    return tasks


def _receive_ready(pipe: Connection) -> None:
    if not pipe.poll(READY_TIMEOUT_S):
        raise CliError(f"a client was not ready within {READY_TIMEOUT_S:g} s: is the machine overloaded?")
    kind, content = _receive(pipe)
    if kind != "ready":
        raise CliError(f"a client could not start: {content}")


def _gather(pipes: list[Connection], workload: Workload) -> list[WorkerResult]:
    done: dict[int, int] = {}
    results: dict[int, WorkerResult] = {}
    with progress(f"bench {workload.mode}", workload.records) as show:
        while len(results) < len(pipes):
            running = [pipe for index, pipe in enumerate(pipes) if index not in results]
            for pipe in wait(running, timeout=1.0):
                index = pipes.index(pipe)  # type: ignore[arg-type]
                kind, content = _receive(pipes[index])
                if kind == "failed":
                    raise CliError(f"a client failed: {content}")
                if kind == "done":
                    results[index] = content
                else:
                    done[index] = content
            total = sum(done.values())
            show(total, f"{total:,} records")
    return [result for _, result in sorted(results.items())]


def _receive(pipe: Connection) -> tuple[str, Any]:
    try:
        kind, content = pipe.recv()
    except EOFError:
        raise CliError("a client process ended without a result: see its output above") from None
    sys.stdout.flush()
    return kind, content
