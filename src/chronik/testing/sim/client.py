"""The base of all simulated clients: finding the leader, own connections, retries as in real clients, and requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, TypeVar

from chronik.client.cluster import Cluster, Deadline
from chronik.client.connection import Connection
from chronik.client.errors import RETRIABLE, ClientError, raise_for
from chronik.testing.sim.history import History, PartitionHistory
from chronik.testing.sim.world import World
from chronik.wire.api import ApiKey
from chronik.wire.batch import BatchHeader, check_batches, decode_batch, read_marker
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.fetch import FetchPartition, FetchRequest, FetchTopic, read_fetch_response, write_fetch_request
from chronik.wire.produce import ProduceRequest, ProduceTopic, read_produce_response, write_produce_request
from chronik.wire.records import Record

T = TypeVar("T")

TOPIC = "records"
"""The topic that most clients share."""
REQUEST_TIMEOUT_S = 1.0
RETRY_PAUSE_S = 0.1
TOPIC_NAMES_MAX_VERSION = 12
"""The last version of Produce and Fetch that names topics; later ones use topic ids."""
OFFSETS_BY_NAME_MAX_VERSION = 9
FETCH_SLACK_S = 0.6
PRODUCE_TIMEOUT_MS = 700
ACKS_ALL = -1
READ_COMMITTED = 1
EARLIEST, LATEST = -2, -1


@dataclass(frozen=True, slots=True)
class Service:
    """What all clients of a run share: the world, the oracle, and the addresses of the nodes."""

    world: World
    history: History
    bootstrap: list[tuple[str, int]]


class SimClient:
    """One application. After `finish` it completes its remaining work; then `is_done` is true."""

    def __init__(self, name: str, service: Service) -> None:
        self.name = name
        self.world = service.world
        self.history = service.history
        self.random: Random = service.world.random(f"client:{name}")
        self.is_finishing = False
        self.is_done = False
        self.errors: dict[str, int] = {}
        # Shuffled, so that clients do not all learn of leaders from the same node.
        nodes = service.bootstrap
        self.bootstrap = nodes if len(nodes) == 1 else self.random.sample(nodes, len(nodes))
        self.cluster = self.new_cluster(*self.bootstrap)
        self._single_nodes: dict[tuple[str, int], Cluster] = {}

    async def run(self) -> None:
        await self.work()
        await self.drop_connections()
        self.is_done = True

    async def work(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        self.is_finishing = True

    def new_cluster(self, *nodes: tuple[str, int]) -> Cluster:
        return Cluster(list(nodes), client_id=self.name, timeout_s=REQUEST_TIMEOUT_S)

    async def leader(self, topic: str, partition: int) -> Connection:
        """Return a connection to the partition's leader; retry until there is one."""
        return await self.insist(lambda: self.find_leader(topic, partition))

    async def find_leader(self, topic: str, partition: int) -> Connection:
        """Return a connection to the partition's leader. Raises KafkaError and ClientError."""
        deadline = Deadline(REQUEST_TIMEOUT_S)
        leaders = await self._any_node().leaders(topic, frozenset({partition}), deadline=deadline)
        return await self.cluster.connection(leaders[partition], deadline)

    async def coordinator(self, group: str) -> Connection:
        """Return a connection to the group's coordinator. Raises KafkaError and ClientError."""
        deadline = Deadline(REQUEST_TIMEOUT_S)
        return await self.cluster.connection(await self.cluster.coordinator(group, deadline), deadline)

    def _any_node(self) -> Cluster:
        """Return a random node to query for leaders: a node that lags may still name itself."""
        if len(self.bootstrap) == 1:
            return self.cluster
        return self.single_node(self.random.choice(self.bootstrap))

    def single_node(self, address: tuple[str, int]) -> Cluster:
        if address not in self._single_nodes:
            self._single_nodes[address] = self.new_cluster(address)
        return self._single_nodes[address]

    async def insist(self, attempt: Callable[[], Awaitable[T]], where: object = "") -> T:
        """Retry until the attempt succeeds. The scenario's deadline detects a cluster that never recovers."""
        while True:
            try:
                return await attempt()
            except (ClientError, KafkaError, TimeoutError) as error:
                self.failed(error, where)
                await self.pause()

    async def drop_connections(self) -> None:
        """Close all connections, as an impatient application does before it starts over."""
        clusters = (*self._single_nodes.values(), self.cluster)
        self._single_nodes, self.cluster = {}, self.new_cluster(*self.bootstrap)
        for cluster in clusters:
            await cluster.close()

    async def pause(self) -> None:
        await asyncio.sleep(RETRY_PAUSE_S * (0.2 + self.random.random()))

    async def rest(self, mean_s: float) -> None:
        await asyncio.sleep(self.random.expovariate(1.0) * mean_s)

    def failed(self, error: BaseException, where: object = "") -> None:
        """Count an error. Report a violation if no client may get it."""
        self.count(error)
        if isinstance(error, KafkaError) and error.code not in RETRIABLE:
            prefix = f"{where}: " if where else ""
            self.world.violated(f"{prefix}{self.name} got {error.code.name} ({error.message})")

    def count(self, error: BaseException) -> None:
        kind = error.code.name if isinstance(error, KafkaError) else type(error).__name__
        self.errors[kind] = self.errors.get(kind, 0) + 1


# -- requests that several clients share; all of them raise the broker's error as KafkaError, or ClientError -----------


def produce_request(
    version: int,
    topic: str,
    partition: int,
    batch: bytes,
    acks: int = ACKS_ALL,
    transactional_id: str | None = None,
    timeout_ms: int = PRODUCE_TIMEOUT_MS,
) -> bytes:
    topics = [ProduceTopic(topic, None, [(partition, memoryview(batch))])]
    return write_produce_request(version, ProduceRequest(transactional_id, acks, timeout_ms, topics))


def produced_offset(version: int, body: memoryview) -> int:
    """Return the base offset of the batch in a Produce response."""
    result = read_produce_response(version, body).topics[0][2][0]
    if result.error_code:
        raise KafkaError(ErrorCode(result.error_code), result.error_message or "")
    return result.base_offset


async def init_producer_id(connection: Connection) -> tuple[int, int]:
    """Return a new producer id and its epoch."""
    values = {"transactional_id": None, "transaction_timeout": 60_000, "producer_id": -1, "producer_epoch": -1}
    response = await connection.call(ApiKey.INIT_PRODUCER_ID, values, timeout_s=REQUEST_TIMEOUT_S)
    raise_for(response, "no producer id")
    return int(response.producer_id), int(response.producer_epoch)


class Fetched(NamedTuple):
    """The result of one fetch: records from the fetch offset on, decoded from whole batches."""

    records: list[Record]
    """Without markers, and with read_committed without the records of aborted transactions."""
    next_offset: int
    high_watermark: int
    last_stable_offset: int
    aborted: Sequence[tuple[int, int]]
    """The aborted transactions that the broker listed: producer id and first offset."""
    log_start_offset: int
    damage: str | None
    """Why the records could not be read."""


async def fetch_records(
    connection: Connection,
    topic: str,
    partition: int,
    position: int,
    *,
    max_bytes: int,
    max_wait_ms: int,
    isolation_level: int = 0,
) -> Fetched:
    topics = [FetchTopic(topic, None, [FetchPartition(partition, -1, position, -1, -1, max_bytes)])]
    request = FetchRequest(
        max_wait_ms=max_wait_ms, min_bytes=1, max_bytes=max_bytes, isolation_level=isolation_level, topics=topics
    )
    version = connection.version(ApiKey.FETCH, TOPIC_NAMES_MAX_VERSION)
    body = await connection.request(
        ApiKey.FETCH, version, write_fetch_request(version, request), timeout_s=max_wait_ms / 1000 + FETCH_SLACK_S
    )
    answer = read_fetch_response(version, body)
    result = answer.topics[0][2][0] if answer.topics else None
    code = answer.error_code or (result.error_code if result is not None else ErrorCode.unknown_server_error)
    if code or result is None:
        raise KafkaError(ErrorCode(code), f"fetch at {position}")
    data = memoryview(result.records)
    records: list[Record] = []
    next_offset, damage = position, None
    aborted = result.aborted_transactions or ()
    try:
        batches = check_batches(data, len(data), from_producer=False) if len(data) else []
        for start, _ in _visible(data, batches, aborted):
            records += [record for record in decode_batch(data, start) if record.offset >= position]
        next_offset = batches[-1][1].next_offset if batches else position
    except KafkaError as error:
        damage = f"{error.code.name} {error.message}"
    return Fetched(
        records,
        next_offset,
        result.high_watermark,
        result.last_stable_offset,
        aborted,
        result.log_start_offset,
        damage,
    )


def _visible(
    data: memoryview, batches: Sequence[tuple[int, BatchHeader]], aborted: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, BatchHeader]]:
    """Yield the batches that are neither markers nor aborted, as consumers do.

    Consumers rely on the order of the list: they look only at its first remaining entry.
    """
    left = deque(aborted)
    skipped: dict[int, None] = {}
    for start, header in batches:
        while left and left[0][1] <= header.last_offset:
            skipped[left.popleft()[0]] = None
        if header.is_control:
            if header.record_count and not read_marker(data, start).is_commit:
                skipped.pop(header.producer_id, None)
        elif not (header.is_transactional and header.producer_id in skipped):
            yield start, header


async def fetch(
    connection: Connection, history: PartitionHistory, position: int, reader: str, *, max_bytes: int, max_wait_ms: int
) -> int:
    """Fetch from `position`, check the result, and return the next position."""
    known_end = history.end_seen
    fetched = await fetch_records(connection, *history.name, position, max_bytes=max_bytes, max_wait_ms=max_wait_ms)
    history.end_received(fetched.high_watermark, known_end, reader)
    if fetched.damage is not None:
        history.violated(f"{reader} got a damaged batch at offset {position}: {fetched.damage}")
        return position
    end = fetched.high_watermark
    for record in fetched.records:
        if record.offset != position or record.offset >= end:
            history.violated(f"{reader} expected offset {position} and got {record.offset} of a log that ends at {end}")
            return position
        history.read(record.offset, record.value, reader)
        position += 1
    return position


async def list_offset(
    connection: Connection, partition: PartitionHistory, timestamp: int, isolation_level: int = 0
) -> int:
    """Send ListOffsets for one partition and return the offset."""
    requested = {"partition_index": partition.name.partition, "current_leader_epoch": -1, "timestamp": timestamp}
    topics = [{"name": partition.name.topic, "partitions": [requested]}]
    values = {"replica_id": -1, "isolation_level": isolation_level, "topics": topics, "timeout": 1000}
    response = await connection.call(ApiKey.LIST_OFFSETS, values, timeout_s=REQUEST_TIMEOUT_S)
    result = response.topics[0].partitions[0]
    raise_for(result, "ListOffsets")
    return int(result.offset)


async def committed_offsets(
    connection: Connection, group: str, partitions: Sequence[int], *, require_stable: bool
) -> dict[int, int]:
    """Send OffsetFetch and return the committed offsets, -1 if there is none."""
    topics = [{"name": TOPIC, "partition_indexes": list(partitions)}]
    values = {
        "group_id": group,
        "topics": topics,
        "groups": [{"group_id": group, "member_id": None, "member_epoch": -1, "topics": topics}],
        "require_stable": require_stable,
    }
    response = await connection.call(
        ApiKey.OFFSET_FETCH, values, timeout_s=REQUEST_TIMEOUT_S, at_most=OFFSETS_BY_NAME_MAX_VERSION
    )
    answer = response.groups[0] if hasattr(response, "groups") else response
    raise_for(answer, "offset fetch")
    for result in answer.topics[0].partitions:
        raise_for(result, "offset fetch")
    return {int(result.partition_index): int(result.committed_offset) for result in answer.topics[0].partitions}


async def commit_offsets(
    connection: Connection, group: str, offsets: Mapping[int, int], generation: int = -1, member_id: str = ""
) -> None:
    """Send OffsetCommit."""
    unset = {"committed_leader_epoch": -1, "committed_metadata": ""}
    partitions = [
        {"partition_index": partition, "committed_offset": offset, **unset} for partition, offset in offsets.items()
    ]
    values = {
        "group_id": group,
        "generation_id_or_member_epoch": generation,
        "member_id": member_id,
        "group_instance_id": None,
        "topics": [{"name": TOPIC, "partitions": partitions}],
    }
    response = await connection.call(
        ApiKey.OFFSET_COMMIT, values, timeout_s=REQUEST_TIMEOUT_S, at_most=OFFSETS_BY_NAME_MAX_VERSION
    )
    for result in response.topics[0].partitions:
        raise_for(result, "commit")
