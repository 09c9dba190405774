"""Clients with a topic of their own: one that is compacted, and one that is created and deleted again and again."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial

from chronik.client.errors import ClientError, raise_for
from chronik.client.topics import Topics
from chronik.metadata.image import OFFSETS_TOPIC
from chronik.testing.sim.client import EARLIEST, REQUEST_TIMEOUT_S, Fetched, Service, SimClient, fetch_records
from chronik.testing.sim.producer import Appender
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.records import Record

COMPACTED_TOPIC = "latest"
COMPACTED_CONFIGS = {"cleanup.policy": "compact", "segment.bytes": "3000", "min.cleanable.dirty.ratio": "0.01"}
KEYS = 8
CHURNED_TOPIC = "churned"
LATE_S = 20.0
"""A request that a cut has held up arrives sooner."""


class CompactionClient(SimClient):
    """The last acknowledged record of each key survives compaction and crashes.

    Writes versions of a few keys, in order and each once, and sometimes reads the whole log. Also configures
    `__consumer_offsets` to compact as often, so that group offsets are tested in the same way.
    Invariant: for each key, the log has the version in `_acknowledged` or a newer one.
    """

    def __init__(self, name: str, service: Service, replication_factor: int) -> None:
        super().__init__(name, service)
        self._replication_factor = replication_factor
        self._acknowledged: dict[bytes, int] = {}
        self._next_version = 0
        self._acknowledged_end = 0

    async def work(self) -> None:
        await self.insist(self._create)
        appender = Appender(self, COMPACTED_TOPIC)
        while not self.is_finishing:
            count = self.random.randint(1, 4)
            batch = [(b"key-%d" % self.random.randrange(KEYS), self._version()) for _ in range(count)]
            base_offset = await appender.append([(key, b"%d" % version) for key, version in batch])
            self._acknowledged.update(batch)
            self._acknowledged_end = base_offset + len(batch)
            await self.rest(30e-3)
            if self.random.random() < 0.05:
                await self._read_all()
        await self._read_all()

    def _version(self) -> int:
        self._next_version += 1
        return self._next_version

    async def _create(self) -> None:
        topics = Topics(self.cluster)
        try:
            await topics.create(COMPACTED_TOPIC, 1, self._replication_factor, COMPACTED_CONFIGS)
        except KafkaError as error:
            if error.code is not ErrorCode.topic_already_exists:
                raise
        layout = await self.cluster.layout()
        if OFFSETS_TOPIC in layout.topics:
            await topics.alter_configs(
                OFFSETS_TOPIC, {name: COMPACTED_CONFIGS[name] for name in list(COMPACTED_CONFIGS)[1:]}
            )

    async def _read_all(self) -> None:
        """Read up to the last acknowledged record. Check that versions grow and that no key lost its last version."""
        expected, end_offset = dict(self._acknowledged), self._acknowledged_end
        versions: dict[bytes, int] = {}
        position = previous = 0
        while position < end_offset:
            fetched = await self.insist(partial(self._fetch, position), f"{COMPACTED_TOPIC} at {position}")
            if fetched.damage is not None or fetched.next_offset == position:
                self.world.violated(f"{COMPACTED_TOPIC} cannot be read at {position} of {end_offset}: {fetched.damage}")
                return
            for record in fetched.records:
                previous = self._check(record, previous)
                versions[record.key or b""] = previous
            position = fetched.next_offset
        lost = {key: version for key, version in expected.items() if versions.get(key, -1) < version}
        if lost:
            self.world.violated(f"{COMPACTED_TOPIC} lost the last versions of {lost}, it has {versions}")

    async def _fetch(self, position: int) -> Fetched:
        return await fetch_records(
            await self.leader(COMPACTED_TOPIC, 0), COMPACTED_TOPIC, 0, position, max_bytes=2_000, max_wait_ms=0
        )

    def _check(self, record: Record, previous: int) -> int:
        version = int(record.value or b"-1")
        if not previous < version <= self._next_version:
            self.world.violated(f"{COMPACTED_TOPIC}: version {version} follows {previous} at offset {record.offset}")
        return version


class TopicChurn(SimClient):
    """Creates, writes, trims and deletes a topic, again and again: no acknowledged change is ever undone.

    It is the only client of its topic, so it knows which records must exist.

    - A topic exists once its creation is acknowledged; once its deletion is acknowledged, it goes and does not come
      back.
    - A new topic has no records of an earlier topic with the same name.
    - Records below an acknowledged DeleteRecords stay deleted. All other records exist, unless retention deleted the
      oldest or an unanswered DeleteRecords took effect.
    """

    def __init__(self, name: str, service: Service, replication_factor: int, topic: str = CHURNED_TOPIC) -> None:
        super().__init__(name, service)
        self.topics_created = 0
        self._name = self._topic = topic
        self._replication_factor = replication_factor
        self._configs = {
            "segment.bytes": self.random.choice(("1100", "100000")),
            "retention.bytes": self.random.choice(("-1", "2000")),
        }
        self._values: list[bytes] = []
        self._deleted_below = 0
        self._perhaps_deleted_below = 0

    async def work(self) -> None:
        while not self.is_finishing:
            unanswered = await self._change(
                lambda topics: topics.create(self._topic, 1, self._replication_factor, self._configs)
            )
            self.topics_created += 1
            self._values, self._deleted_below, self._perhaps_deleted_below = [], 0, 0
            appender = Appender(self, self._topic)
            for _ in range(self.random.randint(1, 8)):
                await self._append(appender)
                if self.random.random() < 0.3:
                    await self.insist(self._delete_records)
                await self._read_all()
                await self.rest(60e-3)
            until_s = self.world.now + LATE_S if unanswered else math.inf
            unanswered = await self._change(lambda topics: topics.delete(self._topic))
            # A node that lags may still list the topic for a while.
            while self._topic in (await self.insist(self.cluster.layout)).topics:
                if self.world.now > until_s:
                    unanswered += 1  # Creating it once more arrived after the deletion.
                    break
                await self.pause()
            if unanswered:
                # DeleteTopics names no topic id: a request still in flight would delete the next topic of that name.
                self._topic = f"{self._name}-{self.topics_created}"

    async def _change(self, change: Callable[[Topics], Awaitable[None]]) -> int:
        """Retry a topic change until it is done, perhaps by an unanswered attempt. Return how many were unanswered."""
        unanswered = 0

        async def attempt() -> None:
            nonlocal unanswered
            try:
                await change(Topics(self.cluster))
            except ClientError:
                unanswered += 1
                raise
            except KafkaError as error:
                if error.code not in (ErrorCode.topic_already_exists, ErrorCode.unknown_topic_or_partition):
                    raise

        await self.insist(attempt)
        return unanswered

    async def _append(self, appender: Appender) -> None:
        values = [b"%d/%d" % (self.topics_created, len(self._values) + number) for number in range(5)]
        base_offset = await appender.append([(None, value.ljust(100)) for value in values])
        if base_offset != len(self._values):
            self.world.violated(f"{self._topic}: a batch is at {base_offset}, expected at {len(self._values)}")
        self._values += values

    async def _delete_records(self) -> None:
        offset = self.random.randint(0, len(self._values))
        self._perhaps_deleted_below = max(self._perhaps_deleted_below, offset)
        connection = await self.leader(self._topic, 0)
        partitions = [{"partition_index": 0, "offset": offset}]
        values = {"topics": [{"name": self._topic, "partitions": partitions}], "timeout": 1000}
        response = await connection.call(ApiKey.DELETE_RECORDS, values, timeout_s=REQUEST_TIMEOUT_S)
        result = response.topics[0].partitions[0]
        raise_for(result, f"delete below {offset}")
        if result.low_watermark < offset:
            self.world.violated(f"{self._topic}: deleted below {offset}, and the log starts at {result.low_watermark}")
        self._deleted_below = max(self._deleted_below, offset)

    async def _read_all(self) -> None:
        position = self._deleted_below
        while position < len(self._values):
            connection = await self.leader(self._topic, 0)
            try:
                fetched = await fetch_records(connection, self._topic, 0, position, max_bytes=1_000, max_wait_ms=0)
            except (ClientError, KafkaError) as error:
                if isinstance(error, KafkaError) and error.code is ErrorCode.offset_out_of_range:
                    self.count(error)
                    position = await self._new_start(position)
                else:
                    self.failed(error, f"{self._topic} at {position}")
                    await self.pause()
                continue
            if fetched.damage is not None or fetched.next_offset == position:
                self.world.violated(f"{self._topic} cannot be read at {position}: {fetched.damage}")
                return
            if fetched.log_start_offset < self._deleted_below:
                self.world.violated(
                    f"{self._topic} starts at {fetched.log_start_offset}, deleted was below {self._deleted_below}"
                )
            for record in fetched.records:
                expected = self._values[position] if position < len(self._values) else None
                if record.offset != position or (record.value or b"").rstrip() != expected:
                    self.world.violated(
                        f"{self._topic}: {record.value!r} at {record.offset}, not {expected!r} at {position}"
                    )
                    return
                position += 1

    async def _new_start(self, position: int) -> int:
        """Return where to resume reading: retention or an unanswered DeleteRecords may have moved the log start."""
        listed = await self.insist(lambda: Topics(self.cluster).offsets(self._topic, EARLIEST))
        start = listed[0].offset
        start_max = self._perhaps_deleted_below if self._configs["retention.bytes"] == "-1" else len(self._values)
        if not position < start <= start_max:
            self.world.violated(f"{self._topic}: offset {position} does not exist, the log starts at {start}")
        return max(start, position + 1)
