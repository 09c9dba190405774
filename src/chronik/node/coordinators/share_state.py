"""How a partition's leader and a share group's coordinator reach the share coordinators, which may be other nodes.

The keys of one call that have the same group and coordinator share a request. A call is repeated until it succeeds,
fails for good, or its time is up; repeated writes are harmless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from chronik.client.errors import ClientError
from chronik.metadata.image import NO_LEADER, SHARE_STATE_TOPIC
from chronik.node.coordinators.share_coordinator import ShareCoordinatorService
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.peers import Peers
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Values
from chronik.shares.records import Snapshot
from chronik.shares.state import (
    NO_COUNT,
    NO_LEADER_EPOCH,
    UNINITIALIZED_OFFSET,
    InitialState,
    SharePartitionKey,
    StateBatch,
    WrittenState,
)
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

PURPOSE = "shares"
REQUEST_TIMEOUT_S = 10.0
"""Longer than the coordinator's own limit for an append, so that only a silent node exceeds it."""

RETRY_MIN_S = 0.02
RETRY_MAX_S = 0.5

RETRIABLE = frozenset(
    {
        ErrorCode.not_coordinator,
        ErrorCode.coordinator_not_available,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.network_exception,
        ErrorCode.request_timed_out,
    }
)

V = TypeVar("V")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ReadState:
    """The state of a shared partition for its leader, or the error."""

    error: ErrorCode = ErrorCode.none
    state_epoch: int = 0
    start_offset: int = UNINITIALIZED_OFFSET
    batches: tuple[StateBatch, ...] = ()


@dataclass(frozen=True, slots=True)
class Summary:
    """The state of a shared partition for administrators, or the error. A key without state has start offset -1."""

    error: ErrorCode = ErrorCode.none
    state_epoch: int = 0
    leader_epoch: int = NO_LEADER_EPOCH
    start_offset: int = UNINITIALIZED_OFFSET
    delivery_complete_count: int = NO_COUNT


@dataclass(frozen=True, slots=True)
class _Operation(Generic[V, R]):
    """One API: how this node's own coordinator runs it, and how its messages carry the values of a partition."""

    api: ApiKey
    at_most: int
    here: Callable[[SharePartitionKey, V], Awaitable[R]]
    write: Callable[[V], Values]
    read: Callable[[Any], R]
    failed: Callable[[ErrorCode], R]
    error_of: Callable[[R], ErrorCode]


class ShareStateClient:
    """Asks the share coordinator of any key. Owned by the loop.

    INVALID_REQUEST: the key was never initialized, or its state was deleted. FENCED_STATE_EPOCH, FENCED_LEADER_EPOCH:
    the caller's epoch is old. UNKNOWN_TOPIC_OR_PARTITION: the partition does not exist. Other errors: no answer in
    time; the outcome of a change is unknown then.
    """

    def __init__(self, runtime: Runtime, metadata: MetadataLog, peers: Peers, service: ShareCoordinatorService) -> None:
        self._loop = runtime.loop
        self._node_id = runtime.node_id
        self._log = runtime.log.bind(component="shares")
        self._metadata = metadata
        self._peers = peers
        self._service = service

    async def initialize(
        self, states: Mapping[SharePartitionKey, InitialState], timeout_ms: int
    ) -> dict[SharePartitionKey, ErrorCode]:
        """Create the state of each key, or replace the state of an older state epoch.

        With the state epoch that is stored already, only a repetition succeeds: another start offset is
        FENCED_STATE_EPOCH. So a new start offset needs a higher state epoch.
        """
        operation = _Operation(
            ApiKey.INITIALIZE_SHARE_GROUP_STATE,
            0,
            self._service.initialize,
            lambda initial: {"state_epoch": initial.state_epoch, "start_offset": initial.start_offset},
            _error_code,
            _same,
            _same,
        )
        return await self._run(operation, states, timeout_ms)

    async def read(
        self, leader_epochs: Mapping[SharePartitionKey, int], timeout_ms: int
    ) -> dict[SharePartitionKey, ReadState]:
        """Return the state for the leader in this leader epoch. Leaders of earlier epochs can no longer write."""

        async def here(key: SharePartitionKey, leader_epoch: int) -> ReadState:
            error, state = await self._service.read(key, leader_epoch)
            if state is None:
                return ReadState(error)
            return ReadState(error, state.state_epoch, state.start_offset, state.batches)

        def read(values: Any) -> ReadState:
            batches = tuple(
                StateBatch(each.first_offset, each.last_offset, each.delivery_state, each.delivery_count)
                for each in values.state_batches
            )
            return ReadState(values.error_code, values.state_epoch, values.start_offset, batches)

        operation: _Operation[int, ReadState] = _Operation(
            ApiKey.READ_SHARE_GROUP_STATE,
            0,
            here,
            lambda leader_epoch: {"leader_epoch": leader_epoch},
            read,
            ReadState,
            lambda result: result.error,
        )
        return await self._run(operation, leader_epochs, timeout_ms)

    async def write(
        self, states: Mapping[SharePartitionKey, WrittenState], timeout_ms: int
    ) -> dict[SharePartitionKey, ErrorCode]:
        """Change the state of each key."""
        operation = _Operation(
            ApiKey.WRITE_SHARE_GROUP_STATE, 1, self._service.write, _written, _error_code, _same, _same
        )
        return await self._run(operation, states, timeout_ms)

    async def read_summary(
        self, keys: Iterable[SharePartitionKey], timeout_ms: int
    ) -> dict[SharePartitionKey, Summary]:
        """Return the start offset and the epochs of each key, without an effect on its leader."""

        async def here(key: SharePartitionKey, _: None) -> Summary:
            return summary_of(*await self._service.summary(key))

        def read(values: Any) -> Summary:
            count = values.delivery_complete_count
            return Summary(values.error_code, values.state_epoch, values.leader_epoch, values.start_offset, count)

        operation: _Operation[None, Summary] = _Operation(
            ApiKey.READ_SHARE_GROUP_STATE_SUMMARY,
            1,
            here,
            lambda _: {"leader_epoch": NO_LEADER_EPOCH},
            read,
            Summary,
            lambda result: result.error,
        )
        return await self._run(operation, dict.fromkeys(keys), timeout_ms)

    async def delete(self, keys: Iterable[SharePartitionKey], timeout_ms: int) -> dict[SharePartitionKey, ErrorCode]:
        """Delete the state of each key. A key without state counts as deleted."""

        async def here(key: SharePartitionKey, _: None) -> ErrorCode:
            return await self._service.delete(key)

        operation: _Operation[None, ErrorCode] = _Operation(
            ApiKey.DELETE_SHARE_GROUP_STATE, 0, here, lambda _: {}, _error_code, _same, _same
        )
        return await self._run(operation, dict.fromkeys(keys), timeout_ms)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _run(
        self, operation: _Operation[V, R], values: Mapping[SharePartitionKey, V], timeout_ms: int
    ) -> dict[SharePartitionKey, R]:
        """Return the result of each key. Repeat what may succeed later, until the time is up."""
        deadline_s = self._loop.time() + timeout_ms / 1000
        left = dict(values)
        results: dict[SharePartitionKey, R] = {}
        pause_s = RETRY_MIN_S
        if left and self._service.partition_count == 0:
            await self._until_the_topic_exists(deadline_s)
        while left:
            results.update(await self._round(operation, left, deadline_s))
            left = {
                key: value for key, value in left.items() if self._is_retriable(key, operation.error_of(results[key]))
            }
            if not left or self._loop.time() + pause_s >= deadline_s:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_MAX_S)
        return results

    def _is_retriable(self, key: SharePartitionKey, error: ErrorCode) -> bool:
        if error is ErrorCode.unknown_topic_or_partition:
            # The coordinator may not have applied the topic's creation yet.
            topic = self._metadata.image.topic_by_id(key.topic_id)
            return topic is not None and topic.partition(key.partition) is not None
        return error in RETRIABLE

    async def _until_the_topic_exists(self, deadline_s: float) -> None:
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._service.topic.ensure_exists()
        except (KafkaError, TimeoutError) as error:
            self._log.info("share_coordinator_not_available", reason=str(error))

    async def _round(
        self, operation: _Operation[V, R], values: Mapping[SharePartitionKey, V], deadline_s: float
    ) -> dict[SharePartitionKey, R]:
        results: dict[SharePartitionKey, R] = {}
        remote: dict[tuple[int, str], dict[SharePartitionKey, V]] = {}
        work: list[Awaitable[dict[SharePartitionKey, R]]] = []
        for key, value in values.items():
            node_id = self._coordinator_of(key)
            if node_id == NO_LEADER:
                results[key] = operation.failed(ErrorCode.coordinator_not_available)
            elif node_id == self._node_id:
                work.append(self._ask_here(operation, key, value))
            else:
                remote.setdefault((node_id, key.group_id), {})[key] = value
        for (node_id, group_id), asked in remote.items():
            work.append(self._ask(operation, node_id, group_id, asked, deadline_s))
        for answered in await asyncio.gather(*work):
            results.update(answered)
        return results

    def _coordinator_of(self, key: SharePartitionKey) -> int:
        index = self._service.partition_of(key.coordinator_key)
        partition = None if index is None else self._metadata.image.partition(SHARE_STATE_TOPIC, index)
        return NO_LEADER if partition is None else partition.leader

    async def _ask_here(
        self, operation: _Operation[V, R], key: SharePartitionKey, value: V
    ) -> dict[SharePartitionKey, R]:
        try:
            return {key: await operation.here(key, value)}
        except KafkaError as error:
            return {key: operation.failed(error.code)}
        except Exception as error:
            self._log.exception("share_coordinator_failed", key=key.coordinator_key, error=repr(error))
            return {key: operation.failed(ErrorCode.unknown_server_error)}

    async def _ask(
        self,
        operation: _Operation[V, R],
        node_id: int,
        group_id: str,
        values: Mapping[SharePartitionKey, V],
        deadline_s: float,
    ) -> dict[SharePartitionKey, R]:
        by_topic: dict[Any, list[Values]] = {}
        for key, value in values.items():
            by_topic.setdefault(key.topic_id, []).append({"partition": key.partition, **operation.write(value)})
        topics = [{"topic_id": topic_id, "partitions": partitions} for topic_id, partitions in by_topic.items()]
        results: dict[SharePartitionKey, R] = {}
        timeout_s = min(REQUEST_TIMEOUT_S, max(deadline_s - self._loop.time(), RETRY_MAX_S))
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._peers.connection(node_id, PURPOSE)
                response = await connection.call(
                    operation.api,
                    {"group_id": group_id, "topics": topics},
                    timeout_s=REQUEST_TIMEOUT_S,
                    at_most=operation.at_most,
                )
            for topic in response.results:
                for each in topic.partitions:
                    results[SharePartitionKey(group_id, topic.topic_id, each.partition)] = operation.read(each)
        except (ClientError, TimeoutError) as error:
            self._log.info("share_coordinator_not_reached", peer=node_id, reason=str(error))
        return {key: results.get(key, operation.failed(ErrorCode.network_exception)) for key in values}


def summary_of(error: ErrorCode, state: Snapshot | None) -> Summary:
    if state is None:
        return Summary(error)
    count = state.delivery_complete_count
    return Summary(error, state.state_epoch, state.leader_epoch, state.start_offset, count)


def _same(error: ErrorCode) -> ErrorCode:
    return error


def _error_code(values: Any) -> ErrorCode:
    error: ErrorCode = values.error_code
    return error


def _written(written: WrittenState) -> Values:
    return {
        "state_epoch": written.state_epoch,
        "leader_epoch": written.leader_epoch,
        "start_offset": written.start_offset,
        "delivery_complete_count": written.delivery_complete_count,
        "state_batches": [batch._asdict() for batch in written.batches],
    }
