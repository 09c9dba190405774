"""Query the brokers of any Kafka cluster in parallel with short deadlines, so that no broker delays another."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from chronik.client.connection import Connection
from chronik.client.errors import ClientError, ConnectionLost
from chronik.client.layout import ClusterLayout, layout_of
from chronik.doctor.observations import DOCTOR_CLIENT_ID
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.fetch import FetchPartition, FetchRequest, FetchTopic, write_fetch_request

LATEST, EARLIEST = -1, -2
CONSUMER, LOG_END_READER = -1, -2
BROKER_RESOURCE = 4
ASK_TIMEOUT_S = 1.0
FIRST_TIMEOUT_S = 3.0
SILENT_TIMEOUT_S = 0.3
FETCH_BYTES = 64 * 1024
FETCH_BY_NAME_AT_MOST = 12
METADATA_AT_MOST = 12
LIST_OFFSETS_AT_MOST = 9

Address = tuple[str, int]


class Told(NamedTuple):
    """The offsets that one leader reported for one partition, or the error."""

    log_start_offset: int | None
    high_watermark: int | None
    log_end_offset: int | None
    error: str | None
    answer_ms: float


class Brokers:
    """Owned by one event loop, which must close it. A connection is reused until it closes."""

    def __init__(self, bootstrap: Sequence[Address]) -> None:
        self.addresses: dict[int, Address] = {}
        self.silent: dict[int, str] = {}
        """Brokers that did not answer the last metadata request, with the reason."""
        self._bootstrap = tuple(bootstrap)
        self._connections: dict[tuple[Address, str], Connection] = {}
        self._loop = asyncio.get_running_loop()
        self._slow: set[Address] = set()

    def _timeout_s(self, address: Address, usual_s: float = ASK_TIMEOUT_S) -> float:
        """Shorten the timeout of a broker that timed out last time, because every round waits for it."""
        return SILENT_TIMEOUT_S if address in self._slow else usual_s

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections = {}

    async def _connection(self, address: Address, purpose: str = "", timeout_s: float = ASK_TIMEOUT_S) -> Connection:
        known = self._connections.get((address, purpose))
        if known is not None and not known.is_closed:
            return known
        made = await Connection.open(*address, client_id=DOCTOR_CLIENT_ID, timeout_s=timeout_s)
        self._connections[(address, purpose)] = made
        return made

    # -- metadata ------------------------------------------------------------------------------------------------------

    async def layout(self, topic: str, timeout_s: float = ASK_TIMEOUT_S) -> ClusterLayout:
        """Return the newest metadata of all brokers that answer. If none answers, raise the last broker's error."""
        asked: dict[Address, None] = dict.fromkeys((*self._bootstrap, *self.addresses.values()))
        answers = await self._ask_all(asked, topic, timeout_s)
        layouts: list[ClusterLayout] = []
        reasons: dict[Address, str] = {}
        failure: ClientError | None = None
        for address, answer in zip(asked, answers, strict=True):
            if isinstance(answer, ClusterLayout):
                layouts.append(answer)
            else:
                failure = answer
                reasons[address] = str(answer)
        if not layouts:
            assert failure is not None
            raise failure
        self._slow = {address for address, reason in reasons.items() if "did not answer" in reason}
        newest = max(layouts, key=lambda layout: _newness(layout, topic))
        self.addresses |= {broker.node_id: (broker.host, broker.port) for broker in newest.brokers.values()}
        self.silent = {node: reasons[address] for node, address in self.addresses.items() if address in reasons}
        for partition in newest.topics[topic].partitions if topic in newest.topics else ():
            for node in partition.replicas:
                if node not in newest.brokers:
                    self.silent.setdefault(node, "it is not among the brokers that the cluster takes for alive")
        return newest

    async def _ask_all(
        self, asked: Iterable[Address], topic: str, timeout_s: float
    ) -> list[ClusterLayout | ClientError]:
        """Query all addresses. Wait past `ASK_TIMEOUT_S` only while no broker has answered."""
        tasks = [
            self._loop.create_task(self._ask_layout(address, topic, self._timeout_s(address, timeout_s)))
            for address in asked
        ]
        done, _ = await asyncio.wait(tasks, timeout=min(timeout_s, ASK_TIMEOUT_S))
        if not any(isinstance(task.result(), ClusterLayout) for task in done):
            await asyncio.wait(tasks)
        late = ConnectionLost(f"it did not answer within {ASK_TIMEOUT_S:g} s")
        answers = [task.result() if task.done() else late for task in tasks]
        for task in tasks:
            task.cancel()
        return answers

    async def _ask_layout(self, address: Address, topic: str, timeout_s: float) -> ClusterLayout | ClientError:
        values = {
            "topics": [{"name": topic, "topic_id": None}],
            "allow_auto_topic_creation": False,
            "include_topic_authorized_operations": False,
        }
        try:
            connection = await self._connection(address, timeout_s=timeout_s)
            answer = await connection.call(ApiKey.METADATA, values, timeout_s=timeout_s, at_most=METADATA_AT_MOST)
            return layout_of(answer)
        except ClientError as error:
            return error

    # -- offsets -------------------------------------------------------------------------------------------------------

    async def offsets(self, topic: str, leaders: Mapping[int, int]) -> dict[int, Told]:
        """Return the start and end of each partition, from its leader. The leaders are queried in parallel."""
        led: dict[int, list[int]] = {}
        for partition, leader in leaders.items():
            led.setdefault(leader, []).append(partition)
        answers = await asyncio.gather(*(self._leader_offsets(topic, node, parts) for node, parts in led.items()))
        return {partition: told for answer in answers for partition, told in answer.items()}

    async def _leader_offsets(self, topic: str, node: int, partitions: list[int]) -> dict[int, Told]:
        began_s = self._loop.time()
        try:
            if node not in self.addresses:
                raise KafkaError(ErrorCode.leader_not_available, "no leader is named")
            connection = await self._connection(self.addresses[node], timeout_s=self._timeout_s(self.addresses[node]))
            asked = ((EARLIEST, CONSUMER), (LATEST, CONSUMER), (LATEST, LOG_END_READER))
            starts, watermarks, ends = await asyncio.gather(
                *(_list_offsets(connection, topic, partitions, time, reader) for time, reader in asked)
            )
        except (ClientError, KafkaError) as error:
            return {partition: Told(None, None, None, str(error), 0.0) for partition in partitions}
        answer_ms = (self._loop.time() - began_s) * 1000
        return {
            partition: Told(
                starts[partition][0],
                watermarks[partition][0],
                ends[partition][0],
                watermarks[partition][1] or ends[partition][1],
                answer_ms,
            )
            for partition in partitions
        }

    # -- groups --------------------------------------------------------------------------------------------------------

    async def groups(self) -> list[str]:
        """Return the names of all groups that the responding brokers coordinate."""
        answers = await asyncio.gather(*(self._list_groups(node) for node in self.addresses))
        return sorted({name for names in answers for name in names})

    async def _list_groups(self, node: int) -> list[str]:
        try:
            connection = await self._connection(self.addresses[node], timeout_s=self._timeout_s(self.addresses[node]))
            values: dict[str, list[str]] = {"states_filter": [], "types_filter": []}
            answer = await connection.call(ApiKey.LIST_GROUPS, values, timeout_s=ASK_TIMEOUT_S)
        except ClientError:
            return []
        return [group.group_id for group in answer.groups]

    # -- probe fetch ---------------------------------------------------------------------------------------------------

    async def fetch(self, node: int, topic: str, partition: int, offset: int, timeout_s: float) -> None:
        """Fetch available records on a dedicated connection, so that the duration is what a consumer would wait."""
        connection = await self._connection(self.addresses[node], f"fetch-{partition}")
        version = connection.version(ApiKey.FETCH, FETCH_BY_NAME_AT_MOST)
        wanted = FetchPartition(partition, -1, offset, -1, -1, FETCH_BYTES)
        request = FetchRequest(
            max_wait_ms=0, min_bytes=1, max_bytes=FETCH_BYTES, topics=[FetchTopic(topic, None, [wanted])]
        )
        await connection.request(ApiKey.FETCH, version, write_fetch_request(version, request), timeout_s=timeout_s)

    # -- Chronik only --------------------------------------------------------------------------------------------------

    async def http_addresses(self) -> dict[int, str]:
        """Return the HTTP address in each broker's configuration. Brokers that are not Chronik have none."""
        found = await asyncio.gather(*(self._http_address(node) for node in self.addresses))
        return {node: http for node, http in zip(list(self.addresses), found, strict=True) if http}

    async def _http_address(self, node: int) -> str:
        resource = {
            "resource_type": BROKER_RESOURCE,
            "resource_name": str(node),
            "configuration_keys": ["listen.http"],
        }
        try:
            connection = await self._connection(self.addresses[node], timeout_s=self._timeout_s(self.addresses[node]))
            values = {"resources": [resource], "include_synonyms": False, "include_documentation": False}
            answer = await connection.call(ApiKey.DESCRIBE_CONFIGS, values, timeout_s=ASK_TIMEOUT_S)
        except ClientError:
            return ""
        return next((entry.value or "" for entry in answer.results[0].configs if entry.name == "listen.http"), "")


async def _list_offsets(
    connection: Connection, topic: str, partitions: Iterable[int], time: int, reader: int
) -> dict[int, tuple[int | None, str | None]]:
    """Return an offset or an error for each partition."""
    asked = [{"partition_index": p, "current_leader_epoch": -1, "timestamp": time} for p in partitions]
    values = {"replica_id": reader, "isolation_level": 0, "topics": [{"name": topic, "partitions": asked}]}
    answer = await connection.call(ApiKey.LIST_OFFSETS, values, timeout_s=ASK_TIMEOUT_S, at_most=LIST_OFFSETS_AT_MOST)
    return {
        told.partition_index: (None, told.error_code.name.upper())
        if told.error_code is not ErrorCode.none
        else (told.offset, None)
        for told in answer.topics[0].partitions
    }


def _newness(layout: ClusterLayout, topic: str) -> tuple[bool, int, int]:
    """Rank a layout by whether it has the topic, then by how recent its leaders are."""
    found = layout.topics.get(topic)
    partitions = () if found is None else found.partitions
    return bool(partitions), sum(partition.leader_epoch for partition in partitions), layout.controller_id
