"""Copies of the records that a share group gave up, in the group's dead-letter topic (KIP-1191).

A group with the config `errors.deadletterqueue.topic.name` gets a copy of each record that a member rejects or that
reaches the delivery limit. The copy names the source in its headers; it has the source's key, value and headers only
with `errors.deadletterqueue.copy.record.enable`. The source partition selects the partition. A record is archived after
its copy is committed; until then its state is Archiving, and a new leader copies it again: at least once.

Its name begins with `errors_deadletterqueue_topic_name_prefix`, and it has `errors.deadletterqueue.group.enable`.
It is created if the node's settings allow that. If it cannot be used, the records are archived without a copy, and the
log says so. Other failures are retried while this node leads the source.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from chronik.client.errors import ClientError
from chronik.metadata.group_configs import DEAD_LETTER_COPY_RECORD, DEAD_LETTER_TOPIC
from chronik.metadata.image import TopicImage, is_internal
from chronik.metadata.topic_configs import DEAD_LETTERS_ENABLE
from chronik.node.admin.topics import Topics
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.peers import Peers
from chronik.node.membership.topic_plans import NewTopic
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.shares.share_partitions import LedShare
from chronik.shares.share_partition import DeadLetter
from chronik.storage.reading import ReadJob
from chronik.wire.api import ApiKey
from chronik.wire.batch import decode_batch, encode_batch, read_batch_header
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

TOPIC_HEADER = "__dlq.errors.topic"
PARTITION_HEADER = "__dlq.errors.partition"
OFFSET_HEADER = "__dlq.errors.offset"
GROUP_HEADER = "__dlq.errors.group"
COUNT_HEADER = "__dlq.errors.delivery.count"
MESSAGE_HEADER = "__dlq.errors.message"


class NotUsable(Exception):
    """The dead-letter topic is not one, or does not exist: only an administrator can change that."""


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
        """`done` is called when the copies of a range are committed, or given up."""
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
                self._report(led, str(error) or "no answer in time", "it is tried again")
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
        copies = configs.get(DEAD_LETTER_COPY_RECORD, "false") == "true"
        index = led.key.partition % len(topic.partitions)
        log, offset = led.log, max(letter.first_offset, led.log.log_start_offset)
        while offset <= letter.last_offset:
            if not log.jobs.begin():
                raise KafkaError(ErrorCode.not_leader_or_follower, "the log is being truncated")
            try:
                job = log.log.read_job(offset, READ_BYTES, log.high_watermark)
                records, offset = await self._runtime.run_blocking(partial(_read, job, offset, letter.last_offset))
            finally:
                log.jobs.end()
            if records:
                copied = [self._record(led, letter, record, copies) for record in records]
                async with asyncio.timeout(TIMEOUT_S):
                    await self._produce(topic.name, index, bytes(encode_batch(copied)))

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

    def _record(self, led: LedShare, letter: DeadLetter, record: Record, copies: bool) -> NewRecord:
        limit = led.machine is not None and letter.delivery_count >= led.machine.settings.delivery_count_limit
        headers: list[tuple[str, bytes | None]] = [
            (TOPIC_HEADER, led.topic.encode()),
            (PARTITION_HEADER, str(led.key.partition).encode()),
            (OFFSET_HEADER, str(record.offset).encode()),
            (GROUP_HEADER, led.key.group_id.encode()),
            (COUNT_HEADER, str(letter.delivery_count).encode()),
            (MESSAGE_HEADER, b"The delivery limit is reached." if limit else b"A member rejected the record."),
        ]
        now_ms = self._runtime.env.wall_ms()
        if not copies:
            return None, None, headers, now_ms
        return record.key, record.value, [*record.headers, *headers], now_ms

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
        if answer.error_code:
            raise KafkaError(ErrorCode(answer.error_code), answer.error_message or "")


def _read(job: ReadJob, first: int, last: int) -> tuple[list[Record], int]:
    """Return the records of a range, and the offset to continue from. Runs in the executor."""
    data = memoryview(job())
    records: list[Record] = []
    at, next_offset = 0, last + 1
    while at < len(data):
        header = read_batch_header(data, at)
        if header.base_offset > last:
            return records, last + 1
        if not header.is_control:
            records += [record for record in decode_batch(data, at) if first <= record.offset <= last]
        at += header.size_bytes
        next_offset = header.next_offset
    return records, next_offset
