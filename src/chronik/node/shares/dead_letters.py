"""Copies of the records that a share group gave up, in the group's dead-letter topic (KIP-1191).

A group with the config `errors.deadletterqueue.topic.name` gets a copy of each record that a member rejects or that
reaches the delivery limit. The copy names the source in its headers; it has the source's key, value and headers only
with `errors.deadletterqueue.copy.record.enable`. The source partition selects the partition. A record is archived after
its copy is committed; until then its state is Archiving, and a new leader copies it again: at least once.

The topic's name begins with `errors_deadletterqueue_topic_name_prefix`, and the topic has
`errors.deadletterqueue.group.enable`. It is created if the node's settings allow that. If it cannot be used, the
records are archived without a copy, and the node logs the reason. Other failures are retried while this node leads the
source. A copy that would exceed the topic's max.message.bytes has headers only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from chronik.client.errors import ClientError
from chronik.metadata.group_configs import DEAD_LETTER_COPY_RECORD, DEAD_LETTER_TOPIC
from chronik.metadata.image import TopicImage, is_internal
from chronik.metadata.topic_configs import DEAD_LETTERS_ENABLE
from chronik.node.admin.topics import Topics
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.peers import Peers
from chronik.node.membership.topic_plans import NewTopic
from chronik.node.replicas.partition import (
    BAD_BATCH,
    DECODED_BYTES_PER_BYTE_MAX,
    DECODED_RECORDS_MAX,
    Partition,
    is_damage,
)
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.shares.share_partitions import LedShare
from chronik.node.topic_settings import topic_defaults, topic_settings
from chronik.shares.share_partition import DeadLetter
from chronik.storage.reading import ReadJob
from chronik.wire.api import ApiKey
from chronik.wire.batch import BatchHeader, decode_batch, encode_batch, read_batch_header
from chronik.wire.errors import ErrorCode, KafkaError, MalformedRequest
from chronik.wire.produce import ProduceRequest, ProduceTopic, read_produce_response, write_produce_request
from chronik.wire.records import NewRecord, Record

PURPOSE = "dead-letters"
COPIES_AT_ONCE = 4
READ_BYTES = 256 * 1024
PRODUCE_VERSION = 11
ACKS_ALL = -1
TIMEOUT_S = 5.0
PAUSE_S_MIN = 0.1
PAUSE_S_MAX = 5.0
REFUSED = (ErrorCode.message_too_large, ErrorCode.record_list_too_large, ErrorCode.invalid_record)
"""Errors of a produce request that a repetition does not change."""

TOPIC_HEADER = "__dlq.errors.topic"
PARTITION_HEADER = "__dlq.errors.partition"
OFFSET_HEADER = "__dlq.errors.offset"
GROUP_HEADER = "__dlq.errors.group"
COUNT_HEADER = "__dlq.errors.delivery.count"
MESSAGE_HEADER = "__dlq.errors.message"


Header = tuple[str, bytes | None]


class NotUsable(Exception):
    """There is no dead-letter topic that can be used, or it does not accept the copy. A repetition changes nothing."""


class DeadLetters:
    """Owned by the loop. At most COPIES_AT_ONCE ranges are read at a time; a waiting range holds no records."""

    def __init__(
        self,
        runtime: Runtime,
        metadata: MetadataLog,
        host: PartitionHost,
        peers: Peers,
        topics: Topics,
        done: Callable[[LedShare, DeadLetter], None],
    ) -> None:
        """`done` is called when the copies of a range are committed, or cannot be written at all."""
        self._runtime = runtime
        self._metadata = metadata
        self._host = host
        self._peers = peers
        self._topics = topics
        self._done = done
        self._log = runtime.log.bind(component="shares")
        self._slots = asyncio.Semaphore(COPIES_AT_ONCE)
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._reported: dict[str, str] = {}

    def copy(self, led: LedShare, letter: DeadLetter) -> None:
        task = self._runtime.loop.create_task(self._copy(led, letter), name=f"dead-letters-{led.topic}")
        self._tasks[task] = None
        task.add_done_callback(lambda task: self._tasks.pop(task, None))

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _copy(self, led: LedShare, letter: DeadLetter) -> None:
        pause_s = PAUSE_S_MIN
        while not led.is_dropped:
            try:
                async with self._slots:
                    await self._write_all(led, letter)
                self._reported.pop(led.key.group_id, None)
            except NotUsable as error:
                self._report(led, str(error), "the records are archived without a copy")
            except (KafkaError, ClientError, MalformedRequest, TimeoutError) as error:
                self._report(led, str(error) or "no answer in time", "the node tries again")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
                continue
            except Exception:
                self._log.exception("dead_letters_failed", group=led.key.group_id, **led.log.log_fields)
                await asyncio.sleep(PAUSE_S_MAX)
                continue
            if not led.is_dropped:
                self._done(led, letter)
            return

    def _report(self, led: LedShare, reason: str, then: str) -> None:
        """Log a failure of a group once, until a copy succeeds."""
        if self._reported.get(led.key.group_id) != reason:
            self._reported[led.key.group_id] = reason
            self._log.warning(
                "dead_letters_not_written", group=led.key.group_id, **led.log.log_fields, reason=reason, then=then
            )

    async def _write_all(self, led: LedShare, letter: DeadLetter) -> None:
        configs = self._metadata.image.group_configs.get(led.key.group_id, {})
        topic = await self._topic(configs.get(DEAD_LETTER_TOPIC, ""))
        index = led.key.partition % len(topic.partitions)
        log = led.log
        # The watermark of a new leader may still be below the records: a read would find nothing to copy.
        log.check_end_is_known()
        copies = self._copies(led, letter, topic, configs.get(DEAD_LETTER_COPY_RECORD, "false") == "true")
        offset = max(letter.first_offset, log.log_start_offset)
        while offset <= letter.last_offset:
            batches, offset = await self._read(log, offset, copies)
            for batch in batches:
                async with asyncio.timeout(TIMEOUT_S):
                    await self._produce(topic.name, index, batch)

    async def _read(self, log: Partition, offset: int, copies: _Copies) -> tuple[list[bytes], int]:
        """Return batches of copies, and the offset to continue from."""
        if not log.jobs.begin():
            raise KafkaError(ErrorCode.not_leader_or_follower, "the log is being truncated")
        try:
            job = log.log.read_job(offset, READ_BYTES, log.high_watermark)
            return await self._runtime.run_blocking(partial(copies.read, job))
        except Exception as error:
            if is_damage(error):
                log.found_damaged(offset, "read", str(error))
            raise
        finally:
            log.jobs.end()

    def _copies(self, led: LedShare, letter: DeadLetter, topic: TopicImage, has_content: bool) -> _Copies:
        limit = led.machine is not None and letter.delivery_count >= led.machine.settings.delivery_count_limit
        headers: list[Header] = [
            (TOPIC_HEADER, led.topic.encode()),
            (PARTITION_HEADER, str(led.key.partition).encode()),
            (GROUP_HEADER, led.key.group_id.encode()),
            (COUNT_HEADER, str(letter.delivery_count).encode()),
            (MESSAGE_HEADER, b"The delivery limit is reached." if limit else b"A member rejected the record."),
        ]
        settings = topic_settings(topic, topic_defaults(self._runtime.config, self._metadata.image))
        return _Copies(
            letter.first_offset,
            letter.last_offset,
            headers,
            has_content,
            self._runtime.env.wall_ms(),
            settings.max_message_bytes,
            DECODED_BYTES_PER_BYTE_MAX * led.log.settings.max_message_bytes,
        )

    async def _topic(self, name: str) -> TopicImage:
        config = self._runtime.config
        if not name or is_internal(name) or not name.startswith(config.errors_deadletterqueue_topic_name_prefix):
            raise NotUsable(f"{name!r} is not the name of a dead-letter topic")
        topic = self._metadata.image.topic(name)
        if topic is None and config.errors_deadletterqueue_auto_create_topics_enable:
            try:
                await self._topics.create(NewTopic(name, configs={DEAD_LETTERS_ENABLE: "true"}))
            except KafkaError as error:
                if error.code is not ErrorCode.topic_already_exists:
                    raise
            await self._host.applied()
            topic = self._metadata.image.topic(name)
        if topic is None:
            raise NotUsable(f"the topic {name!r} does not exist")
        if topic.configs.get(DEAD_LETTERS_ENABLE, "false") != "true":
            raise NotUsable(f"the topic {name!r} does not have {DEAD_LETTERS_ENABLE}=true")
        return topic

    async def _produce(self, topic: str, index: int, batch: bytes) -> None:
        image = self._metadata.image.partition(topic, index)
        if image is None or image.leader < 0:
            raise KafkaError(ErrorCode.leader_not_available, f"{topic}-{index} has no leader")
        if image.leader == self._runtime.node_id:
            await self._host.append_internal(topic, index, batch, TIMEOUT_S)
            return
        connection = await self._peers.connection(image.leader, PURPOSE)
        produced = ProduceTopic(topic, None, [(index, memoryview(batch))])
        request = ProduceRequest(None, ACKS_ALL, int(TIMEOUT_S * 1000), [produced])
        body = await connection.send(ApiKey.PRODUCE, PRODUCE_VERSION, write_produce_request(PRODUCE_VERSION, request))
        answer = read_produce_response(PRODUCE_VERSION, body).topics[0][2][0]
        error = ErrorCode(answer.error_code)
        if error in REFUSED:
            raise NotUsable(f"the topic {topic!r} refuses a copy: {error.name} {answer.error_message or ''}".rstrip())
        if error is not ErrorCode.none:
            raise KafkaError(error, answer.error_message or "")


@dataclass(frozen=True, slots=True)
class _Copies:
    """How the records of a range are copied. `read` runs in the executor."""

    first_offset: int
    last_offset: int
    headers: Sequence[Header]
    has_content: bool
    """Whether a copy has the record's key, value and headers. One that is too large for the topic has not."""
    wall_ms: int
    batch_bytes_max: int
    decoded_bytes_max: int

    def read(self, job: ReadJob) -> tuple[list[bytes], int]:
        """Return batches of copies, and the offset to continue from."""
        data = memoryview(job())
        if job.damaged_at is not None:
            raise KafkaError(ErrorCode.corrupt_message, BAD_BATCH)
        batches: list[bytes] = []
        size_bytes, at, next_offset = 0, 0, self.last_offset + 1
        while at < len(data) and size_bytes < READ_BYTES:
            header = read_batch_header(data, at)
            if header.base_offset > self.last_offset:
                return batches, self.last_offset + 1
            if not header.is_control:
                records = self._decoded(data, at, header)
                batches += self._encoded(records, self.has_content) if records else ()
                size_bytes = sum(map(len, batches))
            at += header.size_bytes
            next_offset = header.next_offset
        return batches, next_offset

    def _decoded(self, data: memoryview, at: int, header: BatchHeader) -> list[Record]:
        if header.record_count > DECODED_RECORDS_MAX:
            raise NotUsable(f"a batch of {header.record_count} records is too large to be copied")
        try:
            records = decode_batch(data, at, self.decoded_bytes_max)
            return [record for record in records if self.first_offset <= record.offset <= self.last_offset]
        except (KafkaError, MalformedRequest) as error:
            raise NotUsable(f"the batch at offset {header.base_offset} cannot be decoded: {error}") from error

    def _encoded(self, records: Sequence[Record], has_content: bool) -> Iterator[bytes]:
        """Yield batches that fit into the dead-letter topic."""
        batch = bytes(encode_batch([self._copy(record, has_content) for record in records]))
        if len(batch) <= self.batch_bytes_max:
            yield batch
        elif len(records) > 1:
            half = len(records) // 2
            yield from self._encoded(records[:half], has_content)
            yield from self._encoded(records[half:], has_content)
        elif has_content:
            yield from self._encoded(records, False)
        else:
            raise NotUsable(f"max.message.bytes={self.batch_bytes_max} is too small for the headers of a copy")

    def _copy(self, record: Record, has_content: bool) -> NewRecord:
        headers = [*self.headers, (OFFSET_HEADER, str(record.offset).encode())]
        if not has_content:
            return None, None, headers, self.wall_ms
        return record.key, record.value, [*record.headers, *headers], self.wall_ms
