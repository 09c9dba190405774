"""Applications with transactions, and readers that see only what is committed.

`TransactionalApplication` writes to several partitions at once. Its incarnations overlap: one hangs, a new one with the
same transactional id takes over, and the old one resumes as a zombie. `StreamMember` consumes, transforms and produces:
a member of a group whose transactions contain the offsets of what it read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from chronik.client.connection import Connection
from chronik.client.errors import ClientError
from chronik.testing.operations import (
    Assigned,
    Polled,
    SendAcknowledged,
    SendInvoked,
)
from chronik.testing.sim.client import (
    LATEST,
    READ_COMMITTED,
    TOPIC,
    Fetched,
    Service,
    SimClient,
    committed_offsets,
    fetch_records,
    list_offset,
)
from chronik.testing.sim.group_clients import MemberSettings, SimMember
from chronik.testing.sim.history import TopicPartition
from chronik.testing.sim.producer import Appender
from chronik.testing.sim.transactional_session import (
    Abandoned,
    Entry,
    Fenced,
    GaveUp,
    GroupPosition,
    ProtocolVersion,
    Refused,
    Takeovers,
    TransactionalSession,
)
from chronik.wire.errors import ErrorCode, KafkaError

COPIES_TOPIC = "copies"
COPIERS = "copiers"
END_PATIENCE_S = 30.0
HANG_S = (0.2, 3.0)
LATE_SHARE = 0.1
"""The share of aborted transactions of which a batch arrives late."""
LATE_S = 0.1
_NOT_A_MEMBER = (ErrorCode.illegal_generation, ErrorCode.unknown_member_id, ErrorCode.rebalance_in_progress)


@dataclass(frozen=True, slots=True)
class TransactionSettings:
    version: ProtocolVersion
    timeout_ms: int
    commit_share: float
    rounds_max: int
    """How often it sends batches in one transaction."""
    batches_max: int
    """Batches in flight for one partition."""
    records_max: int
    """Records in one batch."""
    pause_s: float
    """Mean time between transactions."""
    hang_share: float
    """How often it hangs at a step of a transaction while another incarnation takes over."""
    abandon_share: float
    """How often it ends in the middle of a transaction: its successor or the timeout aborts it."""
    patience_s: float
    """How long it repeats a batch before it aborts."""

    @staticmethod
    def drawn(random: Random) -> TransactionSettings:
        return TransactionSettings(
            version=random.choice((ProtocolVersion.V1, ProtocolVersion.V2)),
            timeout_ms=random.choice((1_000, 2_500, 4_000)),
            commit_share=random.choice((0.5, 0.8, 0.8)),
            rounds_max=random.choice((1, 3)),
            batches_max=random.choice((1, 3)),
            records_max=random.choice((1, 4, 15)),
            pause_s=random.choice((5e-3, 30e-3, 150e-3)),
            hang_share=random.choice((0.0, 0.02, 0.1)),
            abandon_share=random.choice((0.0, 0.05)),
            patience_s=random.choice((0.8, 3.0, 30.0)),
        )

    def with_one_epoch(self) -> TransactionSettings:
        """Return settings for many transactions with the same epoch, one of which is open almost all the time."""
        return replace(
            self,
            version=ProtocolVersion.V1,
            timeout_ms=4_000,
            rounds_max=6,
            batches_max=1,
            records_max=2,
            pause_s=20e-3,
            hang_share=0.0,
            abandon_share=0.0,
            patience_s=30.0,
        )


class TransactionalApplication(SimClient):
    """One transactional id. Its incarnations write unique records to several partitions, and commit or abort."""

    def __init__(
        self, name: str, service: Service, partitions: Sequence[TopicPartition], settings: TransactionSettings
    ) -> None:
        super().__init__(name, service)
        self.commits = 0
        self._partitions = partitions
        self._settings = settings
        self._takeovers = Takeovers(self)
        self._incarnations = 0
        self._newest: TransactionalSession | None = None
        self._needs_successor = asyncio.Event()

    async def work(self) -> None:
        running: list[asyncio.Task[None]] = []
        while not self.is_finishing:
            session = self._newest = self._session()
            self._needs_successor.clear()
            running.append(asyncio.get_running_loop().create_task(self._run(session), name=session.name))
            await self._needs_successor.wait()
            await self.pause()
        for task in running:
            await task

    def _session(self) -> TransactionalSession:
        self._incarnations += 1
        settings, record = self._settings, self.history.transactions.record
        return TransactionalSession(
            self, self.name, self._incarnations, settings.version, settings.timeout_ms, self._takeovers, record
        )

    async def _run(self, session: TransactionalSession) -> None:
        try:
            await session.init()
            while not self.is_finishing:
                if session.is_uncertain or self.random.random() < 0.03:
                    recovers = self.random.random() < 0.6
                    if session is not self._newest and not recovers:
                        break
                    await session.init(recovers=recovers)
                await self._transact(session)
                await self.rest(self._settings.pause_s)
        except (Fenced, GaveUp, Abandoned):
            session.ended()
        await session.close()
        if session is self._newest:
            self._needs_successor.set()

    async def _transact(self, session: TransactionalSession) -> None:
        settings, random = self._settings, self.random
        session.begin()
        session.patience_s = settings.patience_s
        chosen = random.sample(self._partitions, random.randint(1, len(self._partitions)))
        count = 0
        try:
            for _ in range(random.randint(1, settings.rounds_max)):
                records: dict[TopicPartition, list[list[Entry]]] = {}
                for partition in random.sample(chosen, random.randint(1, len(chosen))):
                    batches: list[list[Entry]] = []
                    for _ in range(random.randint(1, settings.batches_max)):
                        size = random.randint(1, settings.records_max)
                        batches.append([(None, f"{session.transaction}#{count + each}") for each in range(size)])
                        count += size
                    records[partition] = batches
                await session.send(records)
                await self._hang_perhaps(session)
        except (Refused, GaveUp):
            session.patience_s = END_PATIENCE_S
            await session.end(is_commit=False)
            return
        session.patience_s = END_PATIENCE_S
        if random.random() < settings.abandon_share:
            raise Abandoned
        is_commit = random.random() < settings.commit_share
        is_late = not is_commit and (self.is_finishing or random.random() < LATE_SHARE)
        late = session.late_batch(chosen[0]) if is_late else b""
        await session.end(is_commit=is_commit)
        self.commits += is_commit
        if is_late:
            await self.rest(LATE_S)
            await session.send_late(chosen[0], late)

    async def _hang_perhaps(self, session: TransactionalSession) -> None:
        if self.random.random() < self._settings.hang_share and session is self._newest:
            self.world.note(f"{session.name} hangs in {session.transaction}")
            self._needs_successor.set()
            await asyncio.sleep(self.random.uniform(*HANG_S))


class StreamMember(SimMember):
    """Copies committed records to another topic, each exactly once, whatever fails.

    The offsets of what it has read are committed with the copies, in one transaction, with its member id and
    generation (KIP-447). It hangs longer than its session now and then, and resumes in the same transaction.
    """

    def __init__(
        self, name: str, service: Service, partitions: int, member: MemberSettings, settings: TransactionSettings
    ) -> None:
        super().__init__(name, service, partitions, member, COPIERS)
        self._transaction_settings = settings
        self._takeovers = Takeovers(self)
        self._incarnations = 0
        self._session: TransactionalSession | None = None

    async def run(self) -> None:
        await super().run()
        if self._session is not None:
            await self._session.close()

    async def _consume(self, coordinator: Connection, assigned: list[int]) -> None:
        self._next_heartbeat_s = self.world.now + self._session_s / 4
        ends_s = self.world.now + self.random.expovariate(1.0) * self._settings.stay_s
        positions: dict[int, int] | None = None
        while not self.is_finishing and self.world.now < ends_s:
            await self._heartbeat_if_due(coordinator)
            if not assigned:
                await self.pause()
                continue
            session = await self._ready_session()
            if session is None:
                positions = None
                continue
            if positions is None:
                # After the session is ready: `init` ends a transaction whose outcome is unknown.
                positions = await self._stable_positions(coordinator, assigned)
            positions = await self._copy(session, coordinator, positions)

    async def _ready_session(self) -> TransactionalSession | None:
        """Return the session with a producer id; None if it must begin anew."""
        settings = self._transaction_settings
        session = self._session
        try:
            if session is None:
                self._incarnations += 1
                session = self._session = TransactionalSession(
                    self,
                    self.name,
                    self._incarnations,
                    settings.version,
                    settings.timeout_ms,
                    self._takeovers,
                    self.history.transactions.record,
                )
                await session.init()
            elif session.is_uncertain:
                await session.init(recovers=self.random.random() < 0.5)
        except (Fenced, GaveUp):
            await self._drop_session()
            return None
        return session

    async def _drop_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.ended()
            await session.close()

    async def _stable_positions(self, coordinator: Connection, assigned: Sequence[int]) -> dict[int, int]:
        """Fetch the committed offsets; wait for transactions of other members that may still change them."""
        while True:
            await self._heartbeat_if_due(coordinator)
            groups = {each: self.history.group(self.group, TOPIC, each) for each in assigned}
            known = {each: group.committed for each, group in groups.items()}
            sent_s = self.world.now
            try:
                offsets = await committed_offsets(coordinator, self.group, assigned, require_stable=True)
            except KafkaError as error:
                if error.code is not ErrorCode.unstable_offset_commit:
                    raise
                self.count(error)
                await self.pause()
                continue
            for each, group in groups.items():
                group.fetched(offsets[each], known[each], self.name)
            self.history.transactions.offsets_fetched(self.group, TOPIC, offsets, sent_s)
            positions: dict[str, int | None] = {
                str(TopicPartition(TOPIC, each)): max(0, offset) for each, offset in offsets.items()
            }
            self.history.transactions.record(Assigned(self.world.now, self.name, positions, is_read_committed=True))
            return {each: max(0, offset) for each, offset in offsets.items()}

    async def _copy(
        self, session: TransactionalSession, coordinator: Connection, positions: dict[int, int]
    ) -> dict[int, int] | None:
        """Copy the next records in one transaction; return the next positions, or None if they must be fetched."""
        settings = self._transaction_settings
        session.begin()
        session.patience_s = settings.patience_s
        after = dict(positions)
        try:
            records: dict[TopicPartition, list[list[Entry]]] = {}
            for partition, position in positions.items():
                fetched = await self._read(partition, position, session.transaction)
                after[partition] = fetched.next_offset
                if fetched.records:
                    copies: list[Entry] = [
                        (None, f"{session.transaction}<{partition}@{record.offset}") for record in fetched.records
                    ]
                    records[TopicPartition(COPIES_TOPIC, partition)] = [copies]
                await self._heartbeat_if_due(coordinator)
            if after == positions:
                await self.pause()
                return positions
            if records:
                await session.send(records)
            await self._hang_perhaps(session)
            await self._heartbeat_if_due(coordinator)
            for partition, offset in after.items():
                self.history.group(self.group, TOPIC, partition).trying(offset)
            sent_s = self.world.now
            position_of_group = GroupPosition(self.group, self._generation, self._member_id, TOPIC, after)
            await session.send_offsets(position_of_group)
            self._ownership.answered(self.name, self._generation, sent_s, "TxnOffsetCommit")
            await self._hang_perhaps(session)
        except Fenced:
            await self._drop_session()
            return None
        except (Refused, GaveUp) as failure:
            await self._abort(session)
            if isinstance(failure.__cause__, KafkaError) and failure.__cause__.code in _NOT_A_MEMBER:
                raise failure.__cause__ from None
            return None
        except (ClientError, KafkaError, TimeoutError):
            await self._abort(session)
            raise
        return await self._end(session, positions, after)

    async def _end(
        self, session: TransactionalSession, before: dict[int, int], after: dict[int, int]
    ) -> dict[int, int] | None:
        is_commit = self.random.random() < self._transaction_settings.commit_share
        session.patience_s = END_PATIENCE_S
        groups = {each: self.history.group(self.group, TOPIC, each) for each in after}
        if is_commit:
            for each, group in groups.items():
                group.processed(before[each], after[each], self.name)
        try:
            await session.end(is_commit=is_commit)
        except (Fenced, GaveUp):
            await self._drop_session()
            return None
        if not is_commit:
            return None
        for each, group in groups.items():
            group.commit_acknowledged(after[each])
        self.commits += 1
        return after

    async def _abort(self, session: TransactionalSession) -> None:
        session.patience_s = END_PATIENCE_S
        try:
            await session.end(is_commit=False)
        except (Fenced, GaveUp):
            await self._drop_session()

    async def _read(self, partition: int, position: int, transaction: str) -> Fetched:
        connection = await self.leader(TOPIC, partition)
        return await read_committed(
            self, connection, TopicPartition(TOPIC, partition), position, 2_000, 20, transaction=transaction
        )

    async def _hang_perhaps(self, session: TransactionalSession) -> None:
        if self.random.random() < self._transaction_settings.hang_share:
            self.world.note(f"{session.name} hangs in {session.transaction}")
            await asyncio.sleep(self.random.uniform(*HANG_S))


async def read_committed(
    client: SimClient,
    connection: Connection,
    partition: TopicPartition,
    position: int,
    max_bytes: int,
    max_wait_ms: int,
    *,
    isolation_level: int = READ_COMMITTED,
    transaction: str | None = None,
) -> Fetched:
    """Fetch, check and record. The records are the input of `transaction`, if it is given."""
    history, name, sent_s = client.history.transactions, str(partition), client.world.now
    known = history.stable_known(name)
    fetched = await fetch_records(
        connection,
        *partition,
        position,
        max_bytes=max_bytes,
        max_wait_ms=max_wait_ms,
        isolation_level=isolation_level,
    )
    if fetched.damage is not None:
        client.world.violated(f"{name}: {client.name} got a damaged batch at offset {position}: {fetched.damage}")
    if isolation_level == READ_COMMITTED:
        history.stable_received(
            name, fetched.last_stable_offset, fetched.high_watermark, fetched.aborted, known, client.name
        )
        if fetched.next_offset > max(position, fetched.last_stable_offset):
            client.world.violated(
                f"{name}: {client.name} got records up to {fetched.next_offset}, above the last stable offset "
                f"{fetched.last_stable_offset}"
            )
    if fetched.records:
        values = tuple((name, record.offset, (record.value or b"").decode()) for record in fetched.records)
        history.record(Polled(client.world.now, sent_s, client.name, values, transaction))
    return fetched


class CommittedReader(SimClient):
    """Follows one partition, with either isolation level, and rereads now and then."""

    def __init__(self, name: str, service: Service, partition: TopicPartition, isolation_level: int) -> None:
        super().__init__(name, service)
        self.records_read = 0
        self._partition = partition
        self._isolation_level = isolation_level
        self._position = 0
        self._max_bytes = self.random.choice((200, 4_096, 65_536))
        self._max_wait_ms = self.random.choice((10, 100, 400))

    async def work(self) -> None:
        self._seek(0)
        while not self.is_finishing:
            connection = await self.leader(*self._partition)
            try:
                while not self.is_finishing:
                    if self.random.random() < 0.04:
                        self._seek(self.random.randint(0, self._position))
                    await self._read(connection)
                    if self.random.random() < 0.3:
                        await self.rest(20e-3)
            except (ClientError, KafkaError) as error:
                self.failed(error, self._partition)
                await self.pause()

    def _seek(self, position: int) -> None:
        self._position = position
        is_committed = self._isolation_level == READ_COMMITTED
        positions: dict[str, int | None] = {str(self._partition): position}
        self.history.transactions.record(Assigned(self.world.now, self.name, positions, is_read_committed=is_committed))

    async def _read(self, connection: Connection) -> None:
        fetched = await read_committed(
            self,
            connection,
            self._partition,
            self._position,
            self._max_bytes,
            self._max_wait_ms,
            isolation_level=self._isolation_level,
        )
        self._position = fetched.next_offset
        self.records_read += len(fetched.records)


class FinalCommittedReader(SimClient):
    """Reads every partition from beginning to end with read_committed, after all transactions have ended."""

    def __init__(self, name: str, service: Service, partitions: Sequence[TopicPartition]) -> None:
        super().__init__(name, service)
        self._partitions = partitions
        self.values: dict[TopicPartition, list[tuple[int, str]]] = {each: [] for each in partitions}

    async def work(self) -> None:
        positions: dict[str, int | None] = {str(each): 0 for each in self._partitions}
        self.history.transactions.record(Assigned(self.world.now, self.name, positions, is_read_committed=True))
        for partition in self._partitions:
            end = await self.insist(partial(self._end_offset, partition))
            position = 0
            while position < end and self.world.violation is None:
                fetched = await self.insist(partial(self._read, partition, position), partition)
                if fetched.next_offset == position:
                    self.world.violated(f"{partition} ends at {end}, and nothing is read at {position}")
                position = fetched.next_offset
                self.values[partition] += [
                    (record.offset, (record.value or b"").decode()) for record in fetched.records
                ]

    async def _end_offset(self, partition: TopicPartition) -> int:
        connection = await self.leader(*partition)
        return await list_offset(connection, self.history.partition(*partition), LATEST)

    async def _read(self, partition: TopicPartition, position: int) -> Fetched:
        return await read_committed(self, await self.leader(*partition), partition, position, 256 * 1024, 0)


class PlainProducer(SimClient):
    """Writes records outside transactions between those of transactions, to partition 0 of the topic."""

    async def work(self) -> None:
        appender = Appender(self, TOPIC)
        record = self.history.transactions.record
        partition = str(TopicPartition(TOPIC, 0))
        number = 0
        while not self.is_finishing:
            values = [f"{self.name}/{number + each}" for each in range(self.random.randint(1, 5))]
            number += len(values)
            for value in values:
                record(SendInvoked(self.world.now, self.name, value, partition))
            base_offset = await appender.append([(None, value.encode()) for value in values])
            for offset, value in enumerate(values, base_offset):
                record(SendAcknowledged(self.world.now, self.name, value, partition, offset))
            await self.rest(60e-3)
