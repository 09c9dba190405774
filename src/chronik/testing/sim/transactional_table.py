"""A client that writes versions of a few keys in transactions, to a topic that is compacted all the time."""

from __future__ import annotations

from functools import partial

from chronik.client.topics import Topics
from chronik.metadata.image import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from chronik.testing.operations import Operation
from chronik.testing.sim.client import READ_COMMITTED, Fetched, Service, SimClient, fetch_records
from chronik.testing.sim.history import TopicPartition
from chronik.testing.sim.topic_clients import COMPACTED_CONFIGS, KEYS
from chronik.testing.sim.transactional_session import (
    Entry,
    Fenced,
    GaveUp,
    ProtocolVersion,
    Refused,
    Takeovers,
    TransactionalSession,
)
from chronik.wire.errors import ErrorCode, KafkaError

TABLE_TOPIC = "table"
TABLE = TopicPartition(TABLE_TOPIC, 0)
TIMEOUT_MS = 2_000


class TransactionalTable(SimClient):
    """The last committed record of each key survives compaction and crashes, and no aborted record is ever read.

    Also configures `__transaction_state` and `__consumer_offsets` to compact as often. Versions grow: for each key, the
    log has the version in `_committed` or a newer one whose transaction did not certainly abort.
    """

    def __init__(self, name: str, service: Service, replication_factor: int) -> None:
        super().__init__(name, service)
        self.commits = 0
        self._replication_factor = replication_factor
        self._takeovers = Takeovers(self)
        self._version = self.random.choice((ProtocolVersion.V1, ProtocolVersion.V2))
        self._sessions = 0
        self._next_version = 0
        self._committed: dict[str, int] = {}
        self._settled: dict[str, int] = {}
        """`_committed` without the last transaction, whose marker may not be written yet."""
        self._aborted: dict[int, None] = {}

    async def work(self) -> None:
        await self.insist(self._create)
        while not self.is_finishing:
            self._sessions += 1
            session = TransactionalSession(
                self, self.name, self._sessions, self._version, TIMEOUT_MS, self._takeovers, _ignore
            )
            try:
                await session.init()
                await self.insist(self._compact_often)
                while not self.is_finishing and not session.is_uncertain:
                    await self._transact(session)
                    await self.rest(30e-3)
                    if self.random.random() < 0.05:
                        await self._read_all(dict(self._settled))
            except (Fenced, GaveUp):
                pass
            await session.close()
        while not await self.insist(self._has_settled):
            await self.pause()
        await self._read_all(self._committed)

    async def _create(self) -> None:
        retention_ms = self.random.choice(("0", "200", "86400000"))
        configs = {**COMPACTED_CONFIGS, "delete.retention.ms": retention_ms}
        try:
            await Topics(self.cluster).create(TABLE_TOPIC, 1, self._replication_factor, configs)
        except KafkaError as error:
            if error.code is not ErrorCode.topic_already_exists:
                raise

    async def _compact_often(self) -> None:
        layout = await self.cluster.layout()
        changed = {name: COMPACTED_CONFIGS[name] for name in list(COMPACTED_CONFIGS)[1:]}
        for topic in (OFFSETS_TOPIC, TRANSACTIONS_TOPIC):
            if topic in layout.topics:
                await Topics(self.cluster).alter_configs(topic, changed)

    async def _transact(self, session: TransactionalSession) -> None:
        session.begin()
        entries: list[Entry] = []
        versions: dict[str, int] = {}
        for _ in range(self.random.randint(1, 4)):
            self._next_version += 1
            key = f"key-{self.random.randrange(KEYS)}"
            versions[key] = self._next_version
            entries.append((key.encode(), str(self._next_version)))
        is_commit = self.random.random() < 0.7
        try:
            await session.send({TABLE: [[entry] for entry in entries]})
            self._settled = dict(self._committed)
        except (Refused, GaveUp):
            is_commit = False
        await session.end(is_commit=is_commit)
        if is_commit:
            self._committed.update(versions)
            self.commits += 1
        else:
            self._aborted.update(dict.fromkeys(int(version) for _, version in entries))

    async def _read_all(self, expected: dict[str, int]) -> None:
        """Read up to the last stable offset. Check that versions grow and that no key lost its last version."""
        versions: dict[str, int] = {}
        position = previous = 0
        while self.world.violation is None:
            fetched = await self.insist(partial(self._fetch, position), f"{TABLE} at {position}")
            if fetched.damage is not None:
                self.world.violated(f"{TABLE} cannot be read at {position}: {fetched.damage}")
            for record in fetched.records:
                version = int(record.value or b"-1")
                if not previous < version <= self._next_version or version in self._aborted:
                    state = "an aborted" if version in self._aborted else "the"
                    self.world.violated(f"{TABLE}: {state} version {version} follows {previous} at {record.offset}")
                versions[(record.key or b"").decode()] = previous = version
            if fetched.next_offset >= fetched.last_stable_offset:
                break
            if fetched.next_offset == position:
                self.world.violated(f"{TABLE}: nothing is read at {position} of {fetched.last_stable_offset}")
            position = fetched.next_offset
        lost = {key: version for key, version in expected.items() if versions.get(key, -1) < version}
        if lost:
            self.world.violated(f"{TABLE} lost the last versions of {lost}, it has {versions}")

    async def _has_settled(self) -> bool:
        fetched = await self._fetch(0)
        return fetched.last_stable_offset == fetched.high_watermark

    async def _fetch(self, position: int) -> Fetched:
        return await fetch_records(
            await self.leader(*TABLE), *TABLE, position, max_bytes=2_000, max_wait_ms=0, isolation_level=READ_COMMITTED
        )


def _ignore(operation: Operation) -> None:
    """The history expects committed records to stay forever, which compaction does not promise."""
