"""Query the brokers of any Kafka cluster in parallel with short deadlines, so that no broker delays another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from chronik.client.connection import Connect, Connection
from chronik.client.errors import (
    CertificateExpired,
    ClientError,
    ConnectionLost,
    LostAtFirstRequest,
    WrongListener,
)
from chronik.client.layout import ClusterLayout, layout_of
from chronik.client.topics import CONSUMER_READER, EARLIEST, LATEST, LOG_END_READER, READ_COMMITTED, READ_UNCOMMITTED
from chronik.doctor.observations import DOCTOR_CLIENT_ID, ConnectionFault
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.fetch import FetchPartition, FetchRequest, FetchTopic, read_fetch_response, write_fetch_request

BROKER_RESOURCE = 4
REQUEST_TIMEOUT_S = 1.0
FIRST_TIMEOUT_S = 3.0
SILENT_TIMEOUT_S = 0.3
FETCH_BYTES = 64 * 1024

Address = tuple[str, int]
OffsetsOrErrors = dict[tuple[str, int], tuple[int | None, str | None]]
"""By topic and partition."""
ReportedOffsets = tuple[int | None, int | None, int | None, str | None, float, int | None]
"""Of one partition at its leader: log start, high watermark, log end, error, response time in ms, last stable end."""


class Brokers:
    """Owned by one event loop, which must close it. A connection is reused until it closes."""

    def __init__(self, bootstrap: Sequence[Address], connect: Connect = Connection.open) -> None:
        self._connect = connect
        self.addresses: dict[int, Address] = {}
        self.silent: dict[int, str] = {}
        """Brokers that did not answer the last metadata request, with the reason."""
        self.faults: tuple[ConnectionFault, ...] = ()
        """Connections that failed at the last metadata request because of a certificate or a wrong listener."""
        self.unreachable_advertised: dict[int, tuple[str, str]] = {}
        """If only addresses answer that no broker advertises: the advertised ones, and the reasons."""
        self.throttles: list[tuple[int, float]] = []
        """Node and delay in ms of each throttled request so far."""
        self._bootstrap = tuple(bootstrap)
        self._connections: dict[tuple[Address, str], Connection] = {}
        self._loop = asyncio.get_running_loop()
        self._slow: set[Address] = set()

    def _timeout_s(self, address: Address, usual_s: float = REQUEST_TIMEOUT_S) -> float:
        """Shorten the timeout of a broker that timed out last time, because every round waits for it."""
        return SILENT_TIMEOUT_S if address in self._slow else usual_s

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections = {}

    async def _connection(
        self, address: Address, purpose: str = "", timeout_s: float = REQUEST_TIMEOUT_S
    ) -> Connection:
        connection = self._connections.get((address, purpose))
        if connection is None or connection.is_closed:
            connection = await self._connect(*address, client_id=DOCTOR_CLIENT_ID, timeout_s=timeout_s)
            self._connections[(address, purpose)] = connection
        return connection

    async def _node_connection(self, node: int) -> Connection:
        address = self.addresses[node]
        return await self._connection(address, timeout_s=self._timeout_s(address))

    async def _call_all(self, key: ApiKey, values: Callable[[int], Mapping[str, object]]) -> dict[int, Any]:
        """Return the answers of all brokers, by node id. Brokers that do not answer are omitted."""

        async def call(node: int) -> Any:
            try:
                connection = await self._node_connection(node)
                return await connection.call(key, values(node), timeout_s=REQUEST_TIMEOUT_S)
            except ClientError:
                return None

        nodes = list(self.addresses)
        answers = await asyncio.gather(*(call(node) for node in nodes))
        return {node: answer for node, answer in zip(nodes, answers, strict=True) if answer is not None}

    async def layout(self, topic: str, timeout_s: float = REQUEST_TIMEOUT_S) -> ClusterLayout:
        """Return the newest metadata of all brokers that answer. If none answers, raise the last broker's error."""
        addresses = list(dict.fromkeys((*self._bootstrap, *self.addresses.values())))
        answers = dict(zip(addresses, await self._request_layouts(addresses, topic, timeout_s), strict=True))
        layouts = [answer for answer in answers.values() if isinstance(answer, ClusterLayout)]
        failures = {address: answer for address, answer in answers.items() if isinstance(answer, ClientError)}
        nodes = {address: node for node, address in self.addresses.items()}
        faults = {address: kind for address, error in failures.items() if (kind := fault_kind(error)) is not None}
        self.faults = tuple(
            ConnectionFault(kind, str(failures[address]), nodes.get(address)) for address, kind in faults.items()
        )
        if not layouts:
            raise next((failures[address] for address in faults), list(failures.values())[-1])
        reasons = {address: str(error) for address, error in failures.items()}
        self._slow = {address for address, reason in reasons.items() if "did not answer" in reason}
        newest = max(layouts, key=lambda layout: _newness(layout, topic))
        self.addresses |= {broker.node_id: (broker.host, broker.port) for broker in newest.brokers.values()}
        self.unreachable_advertised = self._unreachable_advertised(newest, answers, reasons)
        self.silent = {node: reasons[address] for node, address in self.addresses.items() if address in reasons}
        for partition in newest.topics[topic].partitions if topic in newest.topics else ():
            for node in partition.replicas:
                if node not in newest.brokers:
                    self.silent.setdefault(node, "the metadata does not list it as a live broker")
        return newest

    def _unreachable_advertised(
        self, newest: ClusterLayout, answers: Mapping[Address, object], reasons: Mapping[Address, str]
    ) -> dict[int, tuple[str, str]]:
        """Return all advertised addresses if none of them answers, although a bootstrap address does."""
        advertised = {broker.node_id: (broker.host, broker.port) for broker in newest.brokers.values()}
        if not advertised or not all(address in reasons for address in advertised.values()):
            return {}
        return {node: (f"{at[0]}:{at[1]}", reasons[at]) for node, at in advertised.items()}

    async def _request_layouts(
        self, addresses: Iterable[Address], topic: str, timeout_s: float
    ) -> list[ClusterLayout | ClientError]:
        """Query all addresses. Wait past `REQUEST_TIMEOUT_S` only while no broker has answered."""
        tasks = [
            self._loop.create_task(self._request_layout(address, topic, self._timeout_s(address, timeout_s)))
            for address in addresses
        ]
        done, _ = await asyncio.wait(tasks, timeout=min(timeout_s, REQUEST_TIMEOUT_S))
        if not any(isinstance(task.result(), ClusterLayout) for task in done):
            await asyncio.wait(tasks)
        late = ConnectionLost(f"it did not answer within {REQUEST_TIMEOUT_S:g} s")
        answers = [task.result() if task.done() else late for task in tasks]
        for task in tasks:
            task.cancel()
        return answers

    async def _request_layout(self, address: Address, topic: str, timeout_s: float) -> ClusterLayout | ClientError:
        values = {
            "topics": [{"name": topic, "topic_id": None}],
            "allow_auto_topic_creation": False,
            "include_topic_authorized_operations": False,
        }
        try:
            connection = await self._connection(address, timeout_s=timeout_s)
            answer = await connection.call(ApiKey.METADATA, values, timeout_s=timeout_s, at_most=12)
            self._note_throttle(address, answer)
            return layout_of(answer)
        except ClientError as error:
            return error

    async def offsets(self, topic: str, leaders: Mapping[int, int]) -> dict[int, ReportedOffsets]:
        """Return the start and end of each partition, from its leader. The leaders are queried in parallel."""
        led: dict[int, list[int]] = {}
        for partition, leader in leaders.items():
            led.setdefault(leader, []).append(partition)
        answers = await asyncio.gather(*(self._leader_offsets(topic, node, parts) for node, parts in led.items()))
        return {partition: offsets for answer in answers for partition, offsets in answer.items()}

    async def _leader_offsets(self, topic: str, node: int, partitions: list[int]) -> dict[int, ReportedOffsets]:
        began_s = self._loop.time()
        try:
            if node not in self.addresses:
                raise KafkaError(ErrorCode.leader_not_available, "the metadata names no leader")
            connection = await self._node_connection(node)
            starts, stable, watermarks, ends = await log_bounds(connection, {topic: partitions}, REQUEST_TIMEOUT_S)
        except (ClientError, KafkaError) as error:
            return dict.fromkeys(partitions, (None, None, None, str(error), 0.0, None))
        answer_ms = (self._loop.time() - began_s) * 1000
        reported: dict[int, ReportedOffsets] = {}
        for partition in partitions:
            start, _ = starts[topic, partition]
            stable_end, _ = stable[topic, partition]
            watermark, watermark_error = watermarks[topic, partition]
            end, end_error = ends[topic, partition]
            reported[partition] = (start, watermark, end, watermark_error or end_error, answer_ms, stable_end)
        return reported

    async def groups(self) -> list[str]:
        """Return the names of all groups that the responding brokers coordinate."""
        values: dict[str, list[str]] = {"states_filter": [], "types_filter": []}
        answers = await self._call_all(ApiKey.LIST_GROUPS, lambda node: values)
        return sorted({group.group_id for answer in answers.values() for group in answer.groups})

    def _note_throttle(self, address: Address, answer: Any) -> None:
        delay = getattr(answer, "throttle_time", None)
        node = next((node for node, at in self.addresses.items() if at == address), None)
        if delay and node is not None:
            self.throttles.append((node, delay.total_seconds() * 1000))

    async def fetch(self, node: int, topic: str, partition: int, offset: int, timeout_s: float) -> None:
        """Fetch available records on a dedicated connection, so that the duration is what a consumer would wait.

        Raises KafkaError if the broker refuses.
        """
        connection = await self._connection(self.addresses[node], f"fetch-{partition}")
        version = connection.version(ApiKey.FETCH, 12)  # later versions name topics by id
        topics = [FetchTopic(topic, None, [FetchPartition(partition, -1, offset, -1, -1, FETCH_BYTES)])]
        request = FetchRequest(max_wait_ms=0, min_bytes=1, max_bytes=FETCH_BYTES, topics=topics)
        body = write_fetch_request(version, request)
        answer = read_fetch_response(
            version, await connection.request(ApiKey.FETCH, version, body, timeout_s=timeout_s)
        )
        if answer.throttle_ms:
            self.throttles.append((node, float(answer.throttle_ms)))
        for _, _, partitions in answer.topics:
            for each in partitions:
                if each.error_code:
                    raise KafkaError(ErrorCode(each.error_code), f"fetching {topic}-{partition}")

    async def http_addresses(self) -> dict[int, str]:
        """Return the HTTP address in each broker's configuration. Brokers that are not Chronik have none."""

        def values(node: int) -> dict[str, object]:
            keys = ["listen.http"]
            resource = {"resource_type": BROKER_RESOURCE, "resource_name": str(node), "configuration_keys": keys}
            return {"resources": [resource], "include_synonyms": False, "include_documentation": False}

        return {
            node: entry.value
            for node, answer in (await self._call_all(ApiKey.DESCRIBE_CONFIGS, values)).items()
            for entry in answer.results[0].configs
            if entry.name == "listen.http" and entry.value
        }


def fault_kind(error: ClientError) -> Literal["expired-certificate", "wrong-listener"] | None:
    """Return the verdict that a failed connection proves, if any."""
    if isinstance(error, CertificateExpired):
        return "expired-certificate"
    return "wrong-listener" if isinstance(error, WrongListener | LostAtFirstRequest) else None


async def log_bounds(
    connection: Connection, partitions: Mapping[str, Iterable[int]], timeout_s: float
) -> list[OffsetsOrErrors]:
    """Return the log starts, the ends that read_committed and other consumers see, and the log ends.

    The requests are answered in this order, and none of these offsets falls: each end is at or above the one before it.
    """
    requests = (
        (EARLIEST, CONSUMER_READER, READ_UNCOMMITTED),
        (LATEST, CONSUMER_READER, READ_COMMITTED),
        (LATEST, CONSUMER_READER, READ_UNCOMMITTED),
        (LATEST, LOG_END_READER, READ_UNCOMMITTED),
    )
    return await asyncio.gather(*(_list_offsets(connection, partitions, *request, timeout_s) for request in requests))


async def _list_offsets(
    connection: Connection,
    partitions: Mapping[str, Iterable[int]],
    time_ms: int,
    reader: int,
    isolation_level: int,
    timeout_s: float,
) -> OffsetsOrErrors:
    topics = [
        {
            "name": topic,
            "partitions": [{"partition_index": p, "current_leader_epoch": -1, "timestamp": time_ms} for p in indexes],
        }
        for topic, indexes in partitions.items()
    ]
    values = {"replica_id": reader, "isolation_level": isolation_level, "topics": topics}
    answer = await connection.call(ApiKey.LIST_OFFSETS, values, timeout_s=timeout_s, at_most=9)
    return {
        (topic.name, listed.partition_index): (listed.offset, None)
        if listed.error_code is ErrorCode.none
        else (None, listed.error_code.name.upper())
        for topic in answer.topics
        for listed in topic.partitions
    }


def _newness(layout: ClusterLayout, topic: str) -> tuple[bool, int, int]:
    """Rank a layout by whether it has the topic, then by how recent its leaders are."""
    partitions = layout.topics[topic].partitions if topic in layout.topics else ()
    return bool(partitions), sum(partition.leader_epoch for partition in partitions), layout.controller_id
