"""One-record produce requests, sent raw: what a request costs the broker, without a client library in between.

Each connection keeps `depth` requests in flight and sends the next one when an answer arrives. Requests are encoded
once; only the correlation id changes. Connections are opened, and authenticated if need be, before the measurement.

    response (Produce 7)   size int32, correlation id int32, topics int32 = 1, name string, partitions int32 = 1,
                           partition int32, error code int16, ...
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from struct import Struct

from chronik.cli.bench_report import BenchResult, BrokerUsage
from chronik.cli.bench_run import RunningTopic
from chronik.cli.errors import CliError
from chronik.cli.options import with_cluster
from chronik.cli.output import Progress, progress
from chronik.client.cluster import Cluster
from chronik.wire import frames
from chronik.wire.api import ApiKey
from chronik.wire.batch import encode_batch
from chronik.wire.produce import ProduceRequest, ProduceTopic, write_produce_request

PRODUCE_VERSION = 7
CORRELATION_AT = 8
_INT16 = Struct(">h")
_INT32 = Struct(">i")


@dataclass(slots=True)
class RequestLoad:
    """The results of all connections between the first request and the end of the measurement."""

    answered: int = 0
    errors: int = 0
    seconds: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)
    client_cpu_s: float = 0.0
    broker_before: BrokerUsage | None = None
    broker_after: BrokerUsage | None = None


class RequestDriver(asyncio.Protocol):
    """One connection: each answer is followed by another request. Owned by the event loop."""

    def __init__(self, frame: bytes, topic: str, load: RequestLoad) -> None:
        self._frame = bytearray(frame)
        self._error_at = 4 + 4 + 4 + 2 + len(topic.encode()) + 4 + 4
        self._load = load
        self._transport: asyncio.WriteTransport | None = None
        self._received = bytearray()
        self._sent_s: deque[float] = deque()
        self._correlation_id = 0
        self._stopping = False
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def stop(self) -> None:
        self._stopping = True
        if not self._sent_s and not self.finished.done():
            self.finished.set_result(None)

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        received = self._received
        received += data
        start, answered, load = 0, 0, self._load
        while len(received) - start >= 4:
            end = start + 4 + _INT32.unpack_from(received, start)[0]
            if end > len(received):
                break
            load.errors += _INT16.unpack_from(received, start + self._error_at)[0] != 0
            load.latencies_ms.append((now_s - self._sent_s.popleft()) * 1000)
            answered += 1
            start = end
        del received[:start]
        load.answered += answered
        if self._stopping:
            self.stop()
        else:
            self.send(answered)

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.errors += len(self._sent_s)
        if not self.finished.done():
            self.finished.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def send(self, count: int) -> None:
        assert self._transport is not None
        requests = []
        for _ in range(count):
            self._correlation_id = (self._correlation_id + 1) & 0x7FFFFFFF
            _INT32.pack_into(self._frame, CORRELATION_AT, self._correlation_id)
            requests.append(bytes(self._frame))
            self._sent_s.append(time.perf_counter())
        if requests:
            self._transport.write(b"".join(requests))


@dataclass(frozen=True, slots=True)
class RequestWorkload:
    """The parameters of a measurement; `acks` is -1 or 1, since acks=0 has no response to count."""

    connections: int
    depth: int
    size_bytes: int
    acks: int
    seconds: float


def run_requests(workload: RequestWorkload, topic: RunningTopic, http: str | None) -> BenchResult:
    with progress("bench requests", workload.seconds) as show:
        usage = functools.partial(topic.usage, http)
        load = with_cluster(topic.bootstrap, lambda cluster: _drive(cluster, topic.name, workload, usage, show))
        return BenchResult(
            workload="requests",
            records=load.answered,
            bytes=load.answered * workload.size_bytes,
            seconds=load.seconds,
            errors=load.errors,
            latencies_ms=load.latencies_ms,
            client_cpu_s=[load.client_cpu_s],
            broker_before=load.broker_before,
            broker_after=load.broker_after,
        )


async def _drive(
    cluster: Cluster,
    topic: str,
    workload: RequestWorkload,
    usage: Callable[[], BrokerUsage | None],
    show: Progress,
) -> RequestLoad:
    """Drive all connections. Connection i writes to partition i modulo the number of partitions, at its leader."""
    leaders = await cluster.leaders(topic)
    brokers = (await cluster.layout([])).brokers
    load = RequestLoad()
    drivers: list[RequestDriver] = []
    for index in range(workload.connections):
        partition = sorted(leaders)[index % len(leaders)]
        broker = brokers[leaders[partition]]
        connection = await cluster.new_connection(broker.host, broker.port)
        if not connection.supports(ApiKey.PRODUCE, PRODUCE_VERSION):
            connection.close()
            raise CliError(f"{connection.name} does not support Produce {PRODUCE_VERSION}: use a newer broker")
        frame = _produce_frame(topic, partition, workload.size_bytes, workload.acks)
        driver = RequestDriver(frame, topic, load)
        connection.hand_over(driver)
        drivers.append(driver)
    loop = asyncio.get_running_loop()
    load.broker_before = await loop.run_in_executor(None, usage)
    load.client_cpu_s = -time.process_time()
    started_s = time.perf_counter()
    for driver in drivers:
        driver.send(workload.depth)
    while (passed_s := time.perf_counter() - started_s) < workload.seconds:
        await asyncio.sleep(min(0.25, workload.seconds - passed_s))
        show(passed_s, f"{load.answered:,} requests")
    load.seconds = passed_s
    answered = load.answered
    for driver in drivers:
        driver.stop()
    await asyncio.wait([driver.finished for driver in drivers], timeout=10.0)
    load.answered = answered
    load.client_cpu_s += time.process_time()
    load.broker_after = await loop.run_in_executor(None, usage)
    for driver in drivers:
        driver.close()
    return load


def _produce_frame(topic: str, partition: int, size_bytes: int, acks: int) -> bytes:
    batch = encode_batch([(None, b"x" * size_bytes, [], int(time.time() * 1000))])
    request = ProduceRequest(None, acks, 30_000, [ProduceTopic(topic, None, [(partition, memoryview(batch))])])
    body = write_produce_request(PRODUCE_VERSION, request)
    whole = body if isinstance(body, bytes) else b"".join(body)
    return frames.write_request(ApiKey.PRODUCE, PRODUCE_VERSION, 0, "chronik-bench", whole)
