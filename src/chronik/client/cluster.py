"""A cluster, reached through bootstrap addresses: its metadata, and a connection to each broker.

Every call has a deadline. Until then, retriable errors (a leader that moved, a coordinator that is still loading, a
broker that disconnected) are retried with increasing backoff and fresh metadata.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from chronik.authorization.acls import Operation
from chronik.client.connection import Connect, Connection
from chronik.client.connector import Connector
from chronik.client.errors import (
    AUTHORIZATION_ERRORS,
    RETRIABLE,
    ClientError,
    ConnectionLost,
    LostAtFirstRequest,
    SecurityError,
    Unreachable,
    raise_for,
)
from chronik.client.layout import ClusterLayout, TopicLayout, layout_of
from chronik.client.security import PLAINTEXT_SECURITY, ClientSecurity
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

_T = TypeVar("_T")

RETRY_PAUSE_S = 0.05
RETRY_PAUSE_S_MAX = 1.0
CONNECT_TIMEOUT_S_MAX = 10.0
REQUIRED_OPERATIONS = {
    ApiKey.CREATE_TOPICS: Operation.CREATE,
    ApiKey.DELETE_TOPICS: Operation.DELETE,
    ApiKey.CREATE_PARTITIONS: Operation.ALTER,
    ApiKey.DESCRIBE_CONFIGS: Operation.DESCRIBE_CONFIGS,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: Operation.ALTER_CONFIGS,
    ApiKey.ALTER_CONFIGS: Operation.ALTER_CONFIGS,
    ApiKey.DESCRIBE_GROUPS: Operation.DESCRIBE,
    ApiKey.DELETE_GROUPS: Operation.DELETE,
    ApiKey.OFFSET_COMMIT: Operation.READ,
    ApiKey.OFFSET_FETCH: Operation.DESCRIBE,
    ApiKey.INIT_PRODUCER_ID: Operation.WRITE,
    ApiKey.DESCRIBE_TRANSACTIONS: Operation.DESCRIBE,
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: Operation.ALTER,
    ApiKey.LIST_PARTITION_REASSIGNMENTS: Operation.DESCRIBE,
    ApiKey.UNREGISTER_BROKER: Operation.ALTER,
    ApiKey.DESCRIBE_ACLS: Operation.DESCRIBE,
    ApiKey.CREATE_ACLS: Operation.ALTER,
    ApiKey.DELETE_ACLS: Operation.ALTER,
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: Operation.DESCRIBE,
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: Operation.ALTER,
}
"""The operation that a request needs on what it names, for error messages; brokers decide."""
LOST_AT_FIRST_REQUEST_MAX = 3
"""A broker that ends this many connections at their first request requires authentication; a restart ends one."""
GROUP_COORDINATOR = 0
TRANSACTION_COORDINATOR = 1


class Deadline:
    """A point in time on the loop's clock."""

    __slots__ = ("_at_s", "_loop")

    def __init__(self, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._at_s = self._loop.time() + timeout_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._at_s - self._loop.time())

    @property
    def left_ms(self) -> int:
        return int(self.left_s * 1000)

    @property
    def for_broker_ms(self) -> int:
        """The timeout for a broker: a little shorter, so that its own timeout error still arrives."""
        return self.left_ms - min(2000, self.left_ms // 5)


class Cluster:
    """Connections to a cluster's brokers, opened on first use. Owned by one loop; close it when done."""

    def __init__(
        self,
        bootstrap: Sequence[tuple[str, int]],
        *,
        client_id: str = "chronik",
        timeout_s: float = 30.0,
        security: ClientSecurity = PLAINTEXT_SECURITY,
        connect: Connect | None = None,
    ) -> None:
        """`connect` opens connections in place of a `Connector` with `security`."""
        self.timeout_s = timeout_s
        self.security = security
        self._bootstrap = tuple(bootstrap)
        self._client_id = client_id
        self._connect = connect or Connector(security).open
        self._layout: ClusterLayout | None = None
        self._connections: dict[tuple[str, int], asyncio.Task[Connection]] = {}
        self._coordinators: dict[tuple[int, str], int] = {}

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        opening, self._connections = list(self._connections.values()), {}
        for task in opening:
            task.cancel()
        for result in await asyncio.gather(*opening, return_exceptions=True):
            if isinstance(result, Connection):
                result.close()

    # Metadata.

    @property
    def knows_controller(self) -> bool:
        """Whether the newest metadata names a controller."""
        return self._layout is not None and self._layout.controller_id >= 0

    async def layout(self, topics: Sequence[str] | None = None, *, deadline: Deadline | None = None) -> ClusterLayout:
        """Fetch fresh metadata of `topics`, or of all topics if None. This never creates topics."""
        self._layout = await self.retry(lambda until: self._fetch_layout(topics, until), deadline, refresh=False)
        return self._layout

    async def _fetch_layout(self, topics: Sequence[str] | None, deadline: Deadline) -> ClusterLayout:
        names = None if topics is None else [{"name": name} for name in topics]
        values = {"topics": names, "allow_auto_topic_creation": False}
        connection = await self.any_connection(deadline)
        layout = layout_of(await connection.call(ApiKey.METADATA, values, timeout_s=deadline.left_s, at_most=12))
        if not layout.brokers:
            raise KafkaError(ErrorCode.leader_not_available, "the cluster reports no brokers yet")
        return layout

    async def topic(self, name: str, *, deadline: Deadline | None = None) -> TopicLayout:
        """Return one topic's layout. Raises UNKNOWN_TOPIC_OR_PARTITION at once if the topic does not exist."""
        layout = (await self.layout([name], deadline=deadline)).topics.get(name)
        if layout is None or layout.error == ErrorCode.unknown_topic_or_partition:
            raise KafkaError(ErrorCode.unknown_topic_or_partition, f"topic {name} does not exist")
        if layout.error != ErrorCode.none and layout.error not in RETRIABLE:
            raise KafkaError(layout.error, f"topic {name}")
        return layout

    async def leaders(
        self, name: str, partitions: frozenset[int] | None = None, *, deadline: Deadline | None = None
    ) -> dict[int, int]:
        """Return the leader of each of these partitions, or of all; wait until all have one or the deadline passes."""

        async def attempt(until: Deadline) -> dict[int, int]:
            topic = await self.topic(name, deadline=until)
            chosen = [part for part in topic.partitions if partitions is None or part.partition in partitions]
            leaders = {part.partition: part.leader for part in chosen}
            leaderless = [partition for partition, leader in leaders.items() if leader < 0]
            if leaderless or topic.error != ErrorCode.none:
                raise KafkaError(
                    ErrorCode.leader_not_available, f"topic {name}, partitions {leaderless} have no leader"
                )
            return leaders

        missing = frozenset({ErrorCode.unknown_topic_or_partition})
        return await self.retry(attempt, deadline, give_up_on=missing, refresh=False)

    async def coordinator(self, key: str, deadline: Deadline, key_type: int = GROUP_COORDINATOR) -> int:
        """Return the coordinator of a group or transactional id, cached until a call fails."""
        if (key_type, key) not in self._coordinators:
            connection = await self.any_connection(deadline)
            values = {"key": key, "key_type": key_type, "coordinator_keys": [key]}
            response = await connection.call(ApiKey.FIND_COORDINATOR, values, timeout_s=deadline.left_s)
            coordinator = response.coordinators[0] if hasattr(response, "coordinators") else response
            raise_for(
                coordinator, f"coordinator of {'group' if key_type == GROUP_COORDINATOR else 'transactions'} {key}"
            )
            self._coordinators[(key_type, key)] = int(coordinator.node_id)
        return self._coordinators[(key_type, key)]

    # Connections.

    async def any_connection(self, deadline: Deadline) -> Connection:
        """Return a connection to any broker: an open one, else a bootstrap address, else another known broker."""
        for task in self._connections.values():
            if task.done() and _is_open(task):
                return task.result()
        known = () if self._layout is None else tuple((b.host, b.port) for b in self._layout.brokers.values())
        failure: ClientError | None = None
        addresses = list(dict.fromkeys((*self._bootstrap, *known)))
        for index, address in enumerate(addresses):
            try:
                share_s = deadline.left_s / (len(addresses) - index)
                return await self._connection_to(address, min(CONNECT_TIMEOUT_S_MAX, share_s))
            except SecurityError:
                raise  # the other brokers would refuse it too, and count it as a failed attempt
            except ClientError as error:
                failure = error
        raise failure or Unreachable("no bootstrap address was given")

    async def connection(self, node_id: int, deadline: Deadline) -> Connection:
        broker = None if self._layout is None else self._layout.brokers.get(node_id)
        if broker is None:
            broker = (await self.layout([], deadline=deadline)).brokers.get(node_id)
        if broker is None:
            raise KafkaError(ErrorCode.coordinator_not_available, f"broker {node_id} is not in the cluster now")
        return await self._connection_to((broker.host, broker.port), min(CONNECT_TIMEOUT_S_MAX, deadline.left_s))

    async def new_connection(self, host: str, port: int) -> Connection:
        """Open a connection that nothing else uses. The caller closes it."""
        return await self._connect(host, port, client_id=self._client_id, timeout_s=CONNECT_TIMEOUT_S_MAX)

    async def controller(self, deadline: Deadline) -> Connection:
        """Return a connection to the controller. Old brokers take admin calls only there; new ones anywhere."""
        layout = self._layout or await self.layout([], deadline=deadline)
        if layout.controller_id in layout.brokers:
            return await self.connection(layout.controller_id, deadline)
        return await self.any_connection(deadline)

    async def _connection_to(self, address: tuple[str, int], timeout_s: float) -> Connection:
        task = self._connections.get(address)
        if task is None or (task.done() and not _is_open(task)):
            task = asyncio.get_running_loop().create_task(
                self._connect(*address, client_id=self._client_id, timeout_s=timeout_s)
            )
            self._connections[address] = task
        return await asyncio.shield(task)

    # Calls with a deadline.

    async def call(
        self,
        key: ApiKey,
        values: Mapping[str, Any],
        read: Callable[[Any], _T],
        *,
        group: str | None = None,
        transactional_id: str | None = None,
        with_timeout: bool = False,
        at_most: int | None = None,
        give_up_on: frozenset[ErrorCode] = frozenset(),
    ) -> _T:
        """Send a request to the controller, or to a coordinator; return what `read` makes of the response.

        `read` raises the response's errors. `with_timeout` if the request has a field for the controller's own timeout.
        """

        async def attempt(deadline: Deadline) -> _T:
            if group is not None:
                connection = await self.connection(await self.coordinator(group, deadline), deadline)
            elif transactional_id is not None:
                coordinator = await self.coordinator(transactional_id, deadline, TRANSACTION_COORDINATOR)
                connection = await self.connection(coordinator, deadline)
            else:
                connection = await self.controller(deadline)
            sent = {**values, "timeout": deadline.for_broker_ms} if with_timeout else values
            response = await connection.call(key, sent, timeout_s=deadline.left_s, at_most=at_most)
            try:
                return read(response)
            except KafkaError as error:
                raise self._with_missing_right(error, key) from None

        return await self.retry(attempt, give_up_on=give_up_on)

    def _with_missing_right(self, error: KafkaError, key: ApiKey) -> KafkaError:
        """Add the principal and the operation to an authorization error: brokers send the code alone."""
        if error.code not in AUTHORIZATION_ERRORS or key not in REQUIRED_OPERATIONS:
            return error
        lacks = f"{self.security.who} is not allowed to {REQUIRED_OPERATIONS[key].name}"
        return KafkaError(error.code, f"{error.message}: {lacks}" if error.message else lacks)

    async def retry(
        self,
        attempt: Callable[[Deadline], Awaitable[_T]],
        deadline: Deadline | None = None,
        *,
        give_up_on: frozenset[ErrorCode] = frozenset(),
        refresh: bool = True,
    ) -> _T:
        """Run `attempt` until it succeeds, fails with an error that is not retriable, or the deadline passes.

        After the deadline, raise the last error from a broker if there is one: it says more than a timeout.
        """
        deadline = deadline or Deadline(self.timeout_s)
        pause_s = RETRY_PAUSE_S
        refusal: KafkaError | None = None
        lost_at_first_request = 0
        while True:
            try:
                return await attempt(deadline)
            except (KafkaError, Unreachable, ConnectionLost) as error:
                if isinstance(error, KafkaError) and (error.code not in RETRIABLE or error.code in give_up_on):
                    raise
                refusal = error if isinstance(error, KafkaError) else refusal
                self._coordinators.clear()
                lost_at_first_request += isinstance(error, LostAtFirstRequest)
                if lost_at_first_request >= LOST_AT_FIRST_REQUEST_MAX and self._layout is None:
                    raise
                if deadline.left_s <= pause_s or (isinstance(error, Unreachable) and self._layout is None):
                    raise refusal or error from None
            await asyncio.sleep(pause_s)
            pause_s = min(RETRY_PAUSE_S_MAX, pause_s * 2)
            if refresh:
                # New addresses of the controller and brokers. If this fails, the next attempt reports it.
                with contextlib.suppress(ClientError, KafkaError):
                    self._layout = await self._fetch_layout([], deadline)


def _is_open(opened: asyncio.Task[Connection]) -> bool:
    return not opened.cancelled() and opened.exception() is None and not opened.result().is_closed
