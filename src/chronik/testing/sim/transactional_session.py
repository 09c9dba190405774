"""A transactional producer, request by request: both generations of the protocol, retries as in real clients.

Version 1 adds partitions with AddPartitionsToTxn and AddOffsetsToTxn, and keeps its epoch. Version 2 (KIP-890) adds
them with Produce 12 and TxnOffsetCommit 5, and gets a new epoch with every EndTxn 5.

Version 1 cannot fence requests of its own that arrive late: an EndTxn of the last transaction may end the next one. On
any Kafka-compatible cluster, only a new epoch excludes that: after an unanswered request that may do harm later,
`is_uncertain` is true until the next `init`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from chronik.client.cluster import GROUP_COORDINATOR, TRANSACTION_COORDINATOR, Deadline
from chronik.client.connection import Connection
from chronik.client.errors import RETRIABLE, ClientError, raise_for
from chronik.testing.operations import (
    OffsetsSent,
    Operation,
    SendAcknowledged,
    SendInvoked,
    SendUnknown,
    TransactionEnded,
    TransactionEndInvoked,
)
from chronik.testing.sim.client import REQUEST_TIMEOUT_S, SimClient, produce_request, produced_offset
from chronik.testing.sim.history import TopicPartition
from chronik.testing.sim.host import EPOCH_MS
from chronik.wire.api import ApiKey
from chronik.wire.batch import encode_batch
from chronik.wire.errors import ErrorCode, KafkaError

Entry = tuple[bytes | None, str]
"""Key and value of a record."""

FENCED = (
    ErrorCode.producer_fenced,
    ErrorCode.invalid_producer_epoch,
    ErrorCode.invalid_producer_id_mapping,
)
REFUSED = (
    ErrorCode.transaction_abortable,
    ErrorCode.invalid_txn_state,
    ErrorCode.illegal_generation,
    ErrorCode.unknown_member_id,
    ErrorCode.rebalance_in_progress,
    ErrorCode.fenced_instance_id,
)
"""Errors after which the transaction can only be aborted."""


class Fenced(Exception):
    """Another incarnation has taken over, or the coordinator aborted the transaction: this session has ended."""


class Refused(Exception):
    """The transaction cannot be committed."""


class GaveUp(Exception):
    """The session waited for too long: the transaction has to be aborted, and its requests may still arrive."""


class Abandoned(Exception):
    """The application ended in the middle of the transaction."""


class ProtocolVersion(IntEnum):
    V1 = 1
    V2 = 2

    @property
    def produce(self) -> int:
        return 11 if self is ProtocolVersion.V1 else 12

    @property
    def end(self) -> int:
        return 4 if self is ProtocolVersion.V1 else 5

    @property
    def offset_commit(self) -> int:
        return 4 if self is ProtocolVersion.V1 else 5


class GroupPosition(NamedTuple):
    """The offsets that a group member commits with a transaction."""

    group: str
    generation: int
    member_id: str
    topic: str
    offsets: Mapping[int, int]


@dataclass(slots=True, eq=False)
class Batch:
    values: list[str]
    data: bytes


@dataclass(slots=True)
class Lane:
    """The batches of the open transaction for one partition that are not acknowledged yet."""

    partition: TopicPartition
    batches: deque[Batch] = field(default_factory=deque)


class Takeovers:
    """The incarnations of one transactional id: none may succeed after its successor was initialized."""

    def __init__(self, client: SimClient) -> None:
        self._client = client
        self._initialized: list[tuple[float, TransactionalSession]] = []

    def initialized(self, session: TransactionalSession) -> None:
        self._initialized.append((self._client.world.now, session))

    def succeeded(self, session: TransactionalSession, sent_s: float, what: str) -> None:
        for at_s, other in self._initialized:
            if other is not session and other.number > session.number and at_s < sent_s:
                self._client.world.violated(
                    f"{what} of {session.name} succeeded, sent {sent_s - at_s:.3f} s after {other.name} had replaced it"
                )


class TransactionalSession:
    """One incarnation of a transactional id, with its producer id and epoch. It has one transaction at a time.

    Its methods raise `Fenced`, `Refused` and `GaveUp`;
    any other error of the broker is a violation.
    """

    def __init__(
        self,
        client: SimClient,
        transactional_id: str,
        number: int,
        version: ProtocolVersion,
        timeout_ms: int,
        takeovers: Takeovers,
        record: Callable[[Operation], None],
    ) -> None:
        """`record` receives the operations of its transactions."""
        self.name = f"{transactional_id}.{number}"
        self.number = number
        self.version = version
        self.producer_id = -1
        self.epoch = -1
        self.is_uncertain = False
        """Whether an unanswered request may still arrive that only a new epoch fences."""
        self.is_open = False
        """Whether the coordinator may know of a transaction."""
        self.patience_s = 30.0
        """How long a request is repeated."""
        self._id = transactional_id
        self._client = client
        self._world = client.world
        self._record = record
        self._timeout_ms = timeout_ms
        self._takeovers = takeovers
        self._coordination = client.new_cluster(*client.bootstrap)
        self._sequences: dict[TopicPartition, int] = {}
        self._added: dict[TopicPartition, None] = {}
        self._transactions = 0
        self._transaction = ""
        self._is_begun = False
        """Whether the coordinator has confirmed the transaction; only with version 1."""

    @property
    def transaction(self) -> str:
        """The name of the current transaction, which is never used again."""
        return self._transaction

    async def close(self) -> None:
        await self._coordination.close()

    # -- the coordinator -----------------------------------------------------------------------------------------------

    async def init(self, *, recovers: bool = False) -> None:
        """Get a producer id and epoch. With `recovers`, prove to be the last producer that got one (KIP-360)."""
        known = recovers and self.producer_id >= 0
        sent_s = self._world.now
        values = {
            "transactional_id": self._id,
            "transaction_timeout": self._timeout_ms,
            "producer_id": self.producer_id if known else -1,
            "producer_epoch": self.epoch if known else -1,
        }
        response = await self._ask(ApiKey.INIT_PRODUCER_ID, values, at_most=5)
        if known:
            self._takeovers.succeeded(self, sent_s, "InitProducerId")
        self._took(response)
        self._takeovers.initialized(self)
        self.is_uncertain = self.is_open = False

    def _took(self, response: Any) -> None:
        """Continue with the producer id and epoch of the response; sequences begin anew."""
        self.producer_id, self.epoch = int(response.producer_id), int(response.producer_epoch)
        self._client.history.producer_id_assigned(self.producer_id, self.epoch, self.name)
        self._sequences = {}

    def begin(self) -> None:
        self._transactions += 1
        self._transaction = f"{self.name}/{self._transactions}"
        self._is_begun = False
        self._added = {}

    async def end(self, *, is_commit: bool) -> None:
        """Commit or abort. A transaction without an answer has an unknown outcome."""
        self._record(TransactionEndInvoked(self._world.now, self.name, self._transaction, is_commit))
        if not self.is_open and self.version is ProtocolVersion.V1:
            self.ended("abort")
            return
        values = {**self._identity(), "committed": is_commit}
        try:
            response = await self._ask(ApiKey.END_TXN, values, at_most=self.version.end)
        except Refused as refused:
            if is_commit or self._is_begun:
                self._world.violated(f"{self.name} cannot end its transaction: {refused.__cause__}")
                raise
            # The request that begins it was not answered. It may still arrive: only a new epoch excludes that.
            self.is_uncertain = True
            self.ended("abort")
            return
        if self.version is ProtocolVersion.V2:
            self._took(response)
            self.is_uncertain = False
        self.is_open = False
        self.ended("commit" if is_commit else "abort")

    def ended(self, outcome: str = "unknown") -> None:
        """Record the outcome: a transaction that no request ends has an unknown one."""
        if self._transaction:
            self._record(TransactionEnded(self._world.now, self.name, self._transaction, outcome))  # type: ignore[arg-type]
            self._transaction = ""

    def _identity(self) -> dict[str, Any]:
        return {"transactional_id": self._id, "producer_id": self.producer_id, "producer_epoch": self.epoch}

    async def add(self, partitions: Iterable[TopicPartition]) -> None:
        """Add partitions to the transaction; version 2 does that with the batches."""
        added = [each for each in partitions if each not in self._added]
        if self.version is ProtocolVersion.V2 or not added:
            return
        topics: dict[str, list[int]] = {}
        for topic, partition in added:
            topics.setdefault(topic, []).append(partition)
        identity = {f"v3_and_below_{name}": value for name, value in self._identity().items()}
        values = {
            **identity,
            "v3_and_below_topics": [{"name": topic, "partitions": indexes} for topic, indexes in topics.items()],
        }

        def check(response: Any) -> None:
            for topic in response.results_by_topic_v3_and_below:
                for result in topic.results_by_partition:
                    if result.partition_error_code is not ErrorCode.none:
                        raise KafkaError(result.partition_error_code, f"add {topic.name}-{result.partition_index}")

        self.is_open = True
        await self._ask(ApiKey.ADD_PARTITIONS_TO_TXN, values, at_most=3, check=check)
        self._is_begun = True
        self._added.update(dict.fromkeys(added))

    async def send_offsets(self, position: GroupPosition) -> None:
        """Commit a member's offsets with the transaction, at the group's coordinator."""
        offsets = {str(TopicPartition(position.topic, each)): offset for each, offset in position.offsets.items()}
        self._record(OffsetsSent(self._world.now, self.name, self._transaction, position.group, offsets))
        self.is_open = True
        if self.version is ProtocolVersion.V1:
            values = {**self._identity(), "group_id": position.group}
            await self._ask(ApiKey.ADD_OFFSETS_TO_TXN, values, at_most=3)
            self._is_begun = True
        await self._repeat(lambda: self._commit_offsets(position), is_harmless=False)

    async def _commit_offsets(self, position: GroupPosition) -> None:
        unset = {"committed_leader_epoch": -1, "committed_metadata": ""}
        partitions = [
            {"partition_index": each, "committed_offset": offset, **unset} for each, offset in position.offsets.items()
        ]
        values = {
            **self._identity(),
            "group_id": position.group,
            "generation_id": position.generation,
            "member_id": position.member_id,
            "group_instance_id": None,
            "topics": [{"name": position.topic, "partitions": partitions}],
        }
        coordinator = await self._coordinator(position.group, GROUP_COORDINATOR)
        sent_s = self._world.now
        response = await coordinator.call(
            ApiKey.TXN_OFFSET_COMMIT, values, timeout_s=REQUEST_TIMEOUT_S, at_most=self.version.offset_commit
        )
        for result in response.topics[0].partitions:
            raise_for(result, "TxnOffsetCommit")
        self._takeovers.succeeded(self, sent_s, "TxnOffsetCommit")

    async def _ask(
        self,
        key: ApiKey,
        values: Mapping[str, Any],
        *,
        at_most: int,
        check: Callable[[Any], None] | None = None,
    ) -> Any:
        """Send a request to the coordinator of the transactional id, repeatedly."""

        async def attempt() -> Any:
            coordinator = await self._coordinator(self._id, TRANSACTION_COORDINATOR)
            sent_s = self._world.now
            response = await coordinator.call(key, values, timeout_s=REQUEST_TIMEOUT_S, at_most=at_most)
            raise_for(response, key.name)
            if check is not None:
                check(response)
            if key is not ApiKey.INIT_PRODUCER_ID:
                self._takeovers.succeeded(self, sent_s, key.name)
            return response

        # A partition that is added late gets one more marker, or a transaction of its own that times out.
        is_harmless = key in (ApiKey.ADD_PARTITIONS_TO_TXN, ApiKey.ADD_OFFSETS_TO_TXN)
        return await self._repeat(attempt, is_harmless=is_harmless)

    async def _coordinator(self, key: str, key_type: int) -> Connection:
        deadline = Deadline(REQUEST_TIMEOUT_S)
        node_id = await self._coordination.coordinator(key, deadline, key_type)
        return await self._coordination.connection(node_id, deadline)

    async def _repeat(self, attempt: Callable[[], Awaitable[Any]], *, is_harmless: bool) -> Any:
        """Repeat the request until it is answered with success, or with an error that ends the transaction."""
        until_s = self._world.now + self.patience_s
        while True:
            try:
                return await attempt()
            except (ClientError, KafkaError, TimeoutError) as error:
                self._failed(error)
                if not isinstance(error, KafkaError) and not is_harmless:
                    self.is_uncertain = True
            if self._world.now > until_s:
                raise GaveUp
            await self._coordination.close()
            self._coordination = self._client.new_cluster(*self._client.bootstrap)
            await self._client.pause()

    def _failed(self, error: BaseException) -> None:
        """Count the error, and raise it if a repetition of the request cannot help."""
        self._client.count(error)
        if not isinstance(error, KafkaError) or error.code in RETRIABLE:
            return
        if error.code in FENCED:
            raise Fenced from error
        if error.code in REFUSED:
            raise Refused from error
        self._world.violated(f"{self.name} got {error.code.name} ({error.message})")
        raise Refused from error

    # -- records -------------------------------------------------------------------------------------------------------

    async def send(self, records: Mapping[TopicPartition, Sequence[Sequence[Entry]]]) -> None:
        """Send batches, to all partitions at once and pipelined in each, and wait until all are acknowledged."""
        await self.add(records)
        lanes = [Lane(partition, deque(self._encoded(partition, batches))) for partition, batches in records.items()]
        self.is_open = True
        outcomes = await asyncio.gather(*(self._deliver(lane) for lane in lanes), return_exceptions=True)
        for lane in lanes:
            for batch in lane.batches:
                # It may be in the log, or may still arrive: only a new epoch makes its sequences free again.
                self.is_uncertain = True
                for value in batch.values:
                    self._record(SendUnknown(self._world.now, self.name, value))
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for kind in (Fenced, Refused, GaveUp):
            for failure in failures:
                if isinstance(failure, kind):
                    raise failure
        for failure in failures:
            raise failure

    def late_batch(self, partition: TopicPartition) -> bytes:
        """Return a batch of this transaction for `send_late`. The transaction must not be committed then."""
        value = f"{self._transaction}#late"
        self._record(SendInvoked(self._world.now, self.name, value, str(partition), self._transaction))
        self._record(SendUnknown(self._world.now, self.name, value))
        return encode_batch(
            [(None, value.encode(), (), EPOCH_MS + int(self._world.now * 1000))],
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            base_sequence=self._sequences.get(partition, 0),
            is_transactional=True,
        )

    async def send_late(self, partition: TopicPartition, data: bytes) -> None:
        """Send a batch after its transaction was aborted, as if the network had delayed it.

        It must not begin another transaction, which no coordinator would end. With version 1 its epoch and sequence are
        still right: without a new `init`, it would rightly join the next transaction.
        """
        self.is_uncertain = True
        connection = await self._client.leader(*partition)
        version = connection.version(ApiKey.PRODUCE, self.version.produce)
        request = produce_request(version, *partition, data, transactional_id=self._id)
        try:
            produced_offset(version, await connection.request(ApiKey.PRODUCE, version, request, timeout_s=0.5))
        except (ClientError, KafkaError) as error:
            self._client.count(error)

    def _encoded(self, partition: TopicPartition, batches: Sequence[Sequence[Entry]]) -> Iterable[Batch]:
        for entries in batches:
            sequence = self._sequences.get(partition, 0)
            self._sequences[partition] = sequence + len(entries)
            wall_ms = EPOCH_MS + int(self._world.now * 1000)
            for _, value in entries:
                self._record(SendInvoked(self._world.now, self.name, value, str(partition), self._transaction))
            data = encode_batch(
                [(key, value.encode(), (), wall_ms) for key, value in entries],
                producer_id=self.producer_id,
                producer_epoch=self.epoch,
                base_sequence=sequence,
                is_transactional=True,
            )
            yield Batch([value for _, value in entries], data)

    async def _deliver(self, lane: Lane) -> None:
        """Send the batches of one partition, pipelined, and again from the first unacknowledged one on."""
        until_s = self._world.now + self.patience_s
        while True:
            connection = await self._client.leader(*lane.partition)
            if await self._send_all(lane, connection):
                return
            if self._world.now > until_s:
                raise GaveUp
            await self._client.pause()

    async def _send_all(self, lane: Lane, connection: Connection) -> bool:
        version = connection.version(ApiKey.PRODUCE, self.version.produce)
        sent_s = self._world.now
        answers = [
            connection.send(
                ApiKey.PRODUCE,
                version,
                produce_request(version, *lane.partition, batch.data, transactional_id=self._id),
            )
            for batch in lane.batches
        ]
        failure: BaseException | None = None
        for batch, answer in zip(list(lane.batches), answers, strict=True):
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    base_offset = produced_offset(version, await answer)
            except (ClientError, KafkaError, TimeoutError) as error:
                if isinstance(error, TimeoutError):
                    connection.close()
                failure = failure or error
                continue
            self._takeovers.succeeded(self, sent_s, f"a batch in {lane.partition}")
            lane.batches.remove(batch)
            for offset, value in enumerate(batch.values, base_offset):
                self._record(SendAcknowledged(self._world.now, self.name, value, str(lane.partition), offset))
        if failure is not None:
            self._failed(failure)
        return not lane.batches
