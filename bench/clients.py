"""The clients of a comparison, the same for every server: librdkafka in `chronik bench`'s workers, and raw requests.

CPU and memory of the servers are read from /proc just before the clients start and just after they finish.
"""

from __future__ import annotations

import itertools
import socket
import time
from typing import Any

from confluent_kafka import KafkaError as ClientError
from confluent_kafka import Message, Producer

from bench.processes import usage_of
from bench.servers import Server
from chronik.cli.bench_report import BenchResult, BrokerUsage
from chronik.cli.bench_requests import RequestWorkload, run_requests
from chronik.cli.bench_run import RunningTopic, Workload, run_workers
from chronik.cli.client_properties import librdkafka_settings
from chronik.cli.options import with_cluster
from chronik.client.cluster import Cluster
from chronik.client.endpoint import parse_bootstrap
from chronik.client.errors import ConnectionLost, Unreachable
from chronik.client.properties import ClientSettings
from chronik.client.topics import Topics
from chronik.wire.errors import ErrorCode, KafkaError

READY_S_MAX = 240.0
CREATE_S_MAX = 60.0
POLL_S = 0.01

_names = itertools.count(1)
# A cluster that has just started does not know all its brokers yet.
_NOT_YET = frozenset({ErrorCode.invalid_replication_factor, ErrorCode.request_timed_out})


class NotMeasured(Exception):
    """The run lost records or did not finish, so it has no figures."""


class Topic(RunningTopic):
    """A topic for one run, with a replica on each node; the kernel accounts for the servers' usage.

    It is deleted after its run, unless `is_kept` because the server is about to end.
    """

    def __init__(self, server: Server, partitions: int, *, is_kept: bool = False) -> None:
        super().__init__(server.target, f"bench-{next(_names)}", partitions)
        self.server = server
        self.partitions = partitions
        self._is_own = not is_kept

    def __enter__(self) -> Topic:
        self.create()
        self._wait_until_known()
        return self

    def __exit__(self, *failure: object) -> None:
        try:
            super().__exit__(*failure)
        except KafkaError as error:
            # An earlier attempt succeeded, but its answer was late.
            if error.code is not ErrorCode.unknown_topic_or_partition:
                raise

    def create(self) -> None:
        async def create(cluster: Cluster) -> None:
            await Topics(cluster).create(self.name, self.partitions, self.server.setup.nodes, {})

        deadline_s = time.monotonic() + READY_S_MAX
        while True:
            try:
                with_cluster(self.bootstrap, create, CREATE_S_MAX)
                return
            except (KafkaError, Unreachable, ConnectionLost) as error:
                if isinstance(error, KafkaError) and error.code is ErrorCode.topic_already_exists:
                    return  # an earlier attempt succeeded, but its answer was lost
                passing = not isinstance(error, KafkaError) or error.code in _NOT_YET
                if not passing or time.monotonic() > deadline_s:
                    raise
            self.server.check()
            time.sleep(POLL_S)

    def _wait_until_known(self) -> None:
        """Wait until each broker knows a leader for each partition, and the leaders answer."""

        async def ask(cluster: Cluster) -> bool:
            topic = await cluster.topic(self.name)
            leaders = [partition.leader for partition in topic.partitions]
            return len(leaders) == self.partitions and min(leaders) >= 0

        deadline_s = time.monotonic() + READY_S_MAX
        client = ClientSettings.of(self.bootstrap)
        brokers = [client.at(str(endpoint)) for endpoint in client.endpoints]
        while True:
            try:
                if all(with_cluster(broker, ask) for broker in brokers) and self.offsets():
                    return
            except KafkaError as error:
                if time.monotonic() > deadline_s:
                    raise NotMeasured(f"{self.name} has no leaders after {READY_S_MAX:g} s: {error}") from None
            self.server.check()
            time.sleep(POLL_S)

    def usage(self, http: str | None) -> BrokerUsage | None:
        usage = usage_of(self.server.pids)
        return BrokerUsage(usage.cpu_s, usage.resident_bytes)


def drive(topic: Topic, mode: str, records: int, size_bytes: int, **options: Any) -> dict[str, Any]:
    """Return `chronik bench`'s figures of one run; raise if a record was lost."""
    settings = {"acks": "all", "rate": None, "clients": 1, "linger_ms": None, **options}
    result = run_workers(Workload(mode=mode, records=records, size_bytes=size_bytes, **settings), topic, None)
    return _figures(result, topic)


def drive_single_requests(
    topic: Topic, connections: int, depth: int, seconds: float, size_bytes: int = 100
) -> dict[str, Any]:
    """Send one-record produce requests with acks=all over raw connections, and return the figures."""
    return _figures(run_requests(RequestWorkload(connections, depth, size_bytes, -1, seconds), topic, None), topic)


def wait_until_listening(server: Server) -> None:
    """Wait until each node accepts connections; raise at once if the server ends."""
    deadline_s = time.monotonic() + READY_S_MAX
    for endpoint in parse_bootstrap(server.bootstrap):
        while True:
            with socket.socket() as probe:
                if probe.connect_ex((endpoint.host, endpoint.port)) == 0:
                    break
            server.check()
            if time.monotonic() > deadline_s:
                raise NotMeasured(f"no server listened at {endpoint} within {READY_S_MAX:g} s")
            time.sleep(POLL_S)


def write_to_all(topic: Topic) -> None:
    """Wait until each partition has acknowledged a record. Retries are fast, because they are not measured."""
    failures: list[str] = []

    def reported(error: ClientError | None, message: Message) -> None:
        if error is not None:
            failures.append(str(error))

    settings = {
        **librdkafka_settings(topic.bootstrap),
        "acks": "all",
        "linger.ms": 0,
        "reconnect.backoff.ms": 10,
        "reconnect.backoff.max.ms": 50,
        "retry.backoff.ms": 10,
        "retry.backoff.max.ms": 50,
        "topic.metadata.refresh.fast.interval.ms": 20,
        "log_level": 0,
    }
    producer = Producer(settings)
    for partition in range(topic.partitions):
        producer.produce(topic.name, b"first", partition=partition, on_delivery=reported)
    left = producer.flush(READY_S_MAX)
    if left or failures:
        raise NotMeasured(f"{left} first writes came to no end, {len(failures)} failed: {failures[:1]}")


def _figures(result: BenchResult, topic: Topic) -> dict[str, Any]:
    topic.server.check()
    if result.errors:
        raise NotMeasured(f"{result.errors} of {result.records} records failed or are missing")
    return result.figures()
