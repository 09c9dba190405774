"""A compacted topic: the last acknowledged record of each key survives compaction and crashes.

One client writes versions of a few keys, in order and each once, and sometimes reads the whole log. It also configures
`__consumer_offsets` to compact as often, so that group offsets are tested in the same way.
"""

from __future__ import annotations

from chronik.client.errors import ClientError
from chronik.client.topics import Topics
from chronik.metadata.image import OFFSETS_TOPIC
from chronik.testing.sim.client import Service, SimClient
from chronik.testing.sim.producer import Appender
from chronik.testing.sim.requests import fetch_records
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.records import Record

TOPIC = "latest"
CONFIGS = {"cleanup.policy": "compact", "segment.bytes": "3000", "min.cleanable.dirty.ratio": "0.01"}
KEYS = 8
PAUSE_S = 30e-3
READ_SHARE = 0.05


class CompactionClient(SimClient):
    """Invariant: for each key, the log has the version in `_acknowledged` or a newer one."""

    def __init__(self, name: str, service: Service, replication_factor: int) -> None:
        super().__init__(name, service)
        self._replication_factor = replication_factor
        self._acknowledged: dict[bytes, int] = {}
        self._next_version = 0
        self._acknowledged_end = 0

    async def work(self) -> None:
        await self.insist(self._create)
        appender = Appender(self, TOPIC)
        while not self.is_finishing:
            count = self.random.randint(1, 4)
            batch = [(b"key-%d" % self.random.randrange(KEYS), self._version()) for _ in range(count)]
            base_offset = await appender.append([(key, b"%d" % version) for key, version in batch])
            self._acknowledged.update(batch)
            self._acknowledged_end = base_offset + len(batch)
            await self.rest(PAUSE_S)
            if self.random.random() < READ_SHARE:
                await self._read_all()
        await self._read_all()

    def _version(self) -> int:
        self._next_version += 1
        return self._next_version

    async def _create(self) -> None:
        topics = Topics(self.cluster)
        try:
            await topics.create(TOPIC, 1, self._replication_factor, CONFIGS)
        except KafkaError as error:
            if error.code is not ErrorCode.topic_already_exists:
                raise
        layout = await self.cluster.layout()
        if OFFSETS_TOPIC in layout.topics:
            await topics.alter_configs(OFFSETS_TOPIC, {name: CONFIGS[name] for name in list(CONFIGS)[1:]})

    async def _read_all(self) -> None:
        """Read up to the last acknowledged record. Check that versions grow and that no key lost its last version."""
        expected, end_offset = dict(self._acknowledged), self._acknowledged_end
        versions: dict[bytes, int] = {}
        position = previous = 0
        while position < end_offset:
            connection = await self.leader(TOPIC, 0)
            try:
                fetched = await fetch_records(connection, TOPIC, 0, position, max_bytes=2_000, max_wait_ms=0)
            except (ClientError, KafkaError) as error:
                self.failed(error, f"{TOPIC} at {position}")
                await self.pause()
                continue
            if fetched.damage is not None or fetched.next_offset == position:
                self.world.violated(f"{TOPIC} cannot be read at {position} of {end_offset}: {fetched.damage}")
                return
            for record in fetched.records:
                previous = self._check(record, previous)
                versions[record.key or b""] = previous
            position = fetched.next_offset
        lost = {key: version for key, version in expected.items() if versions.get(key, -1) < version}
        if lost:
            self.world.violated(f"{TOPIC} lost the last versions of {lost}, it has {versions}")

    def _check(self, record: Record, previous: int) -> int:
        version = int(record.value or b"-1")
        if not previous < version <= self._next_version:
            self.world.violated(f"{TOPIC}: version {version} follows {previous} at offset {record.offset}")
        return version
