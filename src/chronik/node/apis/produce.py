"""Produce (key 0), versions 3-13; 0 is advertised as the minimum.

Behaviour
- acks=0 gets no response; an error closes the connection, which is all that such a producer can notice.
- acks=1 answers when this node's log counts the batch as written, acks=all (-1) when the watermark has passed it.
- A repeated batch of an idempotent producer succeeds with the offsets it already has.
- A batch is checked whole (length, magic, CRC, count) before a byte of it is stored; each partition has its own outcome.
- A wait longer than the request's timeout ends with REQUEST_TIMED_OUT; the batch may still be committed.
Versions: 3 batch format 2 and transactional id, 5 log start offset, 7 zstd, 8 error messages, 9 flexible, 10 current
leader, 13 topic ids. 0-2 are advertised only because librdkafka switches compression off above a minimum of 0.
Not supported: transactional batches (INVALID_TXN_STATE), batch formats 0 and 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from chronik.node.api import Api, Reply, Request
from chronik.node.apis.transactions import TRANSACTIONS_REFUSED, TRANSACTIONS_REFUSED_MESSAGE
from chronik.wire.api import ApiKey
from chronik.wire.batch import read_batch_header
from chronik.wire.compression import ZSTD
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.produce import ProducePartitionResponse, ProduceTopic, read_produce_request, write_produce_response

if TYPE_CHECKING:
    from chronik.node.broker import Broker

ZSTD_FROM_VERSION = 7
TopicResponses = tuple[str | None, UUID | None, list[ProducePartitionResponse]]


def handle(broker: Broker, request: Request, reply: Reply) -> None:
    produce = read_produce_request(request.api_version, request.frame, request.body_at)
    acks = produce.acks
    if acks not in (-1, 0, 1):
        refused = KafkaError(ErrorCode.invalid_required_acks, f"acks={acks}; allowed are 0, 1 and -1")
    elif produce.transactional_id is not None:
        refused = KafkaError(TRANSACTIONS_REFUSED, TRANSACTIONS_REFUSED_MESSAGE)
    else:
        refused = None
    now_ms = broker.env.wall_ms()
    pending = PendingProduce(request, reply)
    for topic in produce.topics:
        name = _topic_name(broker, topic)
        responses: list[ProducePartitionResponse] = []
        pending.topics.append((topic.name, topic.topic_id, responses))
        for index, records in topic.partitions:
            response = ProducePartitionResponse(index)
            responses.append(response)
            try:
                if refused is not None:
                    raise refused
                if name is None:
                    raise KafkaError(ErrorCode.unknown_topic_id, f"topic id {topic.topic_id} is not known")
                _append(broker, pending, response, name, records, acks, request.api_version, now_ms)
            except KafkaError as error:
                _fail(response, error)
            except Exception:
                broker.log.exception("append_failed", topic=name, partition=index)
                _fail(response, KafkaError(ErrorCode.unknown_server_error, "unexpected error; the node's log has it"))
    if acks == 0:
        reply.send_nothing()
        if any(response.error_code for _, _, responses in pending.topics for response in responses):
            request.connection.close()
        return
    pending.started()
    if not reply.done:
        broker.deadlines.add(max(produce.timeout_ms, 0), pending)


def _fail(response: ProducePartitionResponse, error: KafkaError) -> None:
    response.error_code = error.code
    response.error_message = error.message
    response.base_offset = -1
    response.log_append_time_ms = -1
    response.log_start_offset = -1


def _topic_name(broker: Broker, topic: ProduceTopic) -> str | None:
    if topic.name is not None:
        return topic.name
    return None if topic.topic_id is None else broker.image.names_by_id.get(topic.topic_id)


def _append(
    broker: Broker,
    pending: PendingProduce,
    response: ProducePartitionResponse,
    topic: str,
    records: memoryview | None,
    acks: int,
    version: int,
    now_ms: int,
) -> None:
    partition = broker.require_partition(topic, response.partition)
    if records is None or not len(records):
        raise KafkaError(ErrorCode.invalid_record, "no records")
    if version < ZSTD_FROM_VERSION and len(records) >= 61 and read_batch_header(records).codec == ZSTD:
        raise KafkaError(ErrorCode.unsupported_compression_type, f"zstd needs Produce {ZSTD_FROM_VERSION}")
    if partition.is_internal:
        raise KafkaError(ErrorCode.invalid_topic_exception, f"{topic} is written by the cluster only")
    if acks == -1:
        partition.check_enough_replicas()
    appended = partition.append(records, now_ms)
    response.base_offset = appended.base_offset
    response.log_append_time_ms = appended.log_append_time_ms
    response.log_start_offset = partition.log_start_offset
    if acks == 1:
        pending.waiting.append(response)
        partition.when_written(appended.end_offset, lambda error: pending.partition_done(response, error))
    elif acks == -1:
        pending.waiting.append(response)
        partition.when_committed(appended.end_offset, lambda error: pending.partition_done(response, error))


class PendingProduce:
    """A produce request whose batches are appended and not all written yet. Answered once; late calls change nothing."""

    __slots__ = ("_is_started", "reply", "request", "topics", "waiting")

    def __init__(self, request: Request, reply: Reply) -> None:
        self.request = request
        self.reply = reply
        self.topics: list[TopicResponses] = []
        self.waiting: list[ProducePartitionResponse] = []
        self._is_started = False

    @property
    def is_over(self) -> bool:
        return self.reply.done

    def started(self) -> None:
        """All partitions have been appended to; answer now if none waits."""
        self._is_started = True
        if not self.waiting:
            self._answer()

    def partition_done(self, response: ProducePartitionResponse, error: KafkaError | None) -> None:
        if self.reply.done:
            return
        self.waiting = [other for other in self.waiting if other is not response]
        if error is not None:
            _fail(response, error)
        if self._is_started and not self.waiting:
            self._answer()

    def deadline_passed(self) -> None:
        timed_out = KafkaError(ErrorCode.request_timed_out, "not written everywhere within the request's timeout")
        for response in self.waiting:
            _fail(response, timed_out)
        self._answer()

    def _answer(self) -> None:
        body = write_produce_response(self.request.api_version, self.topics)
        self.reply.failed = any(r.error_code for _, _, responses in self.topics for r in responses)
        self.reply.send((body,))


API = Api(ApiKey.PRODUCE, (0, 13), hot=handle, readable_from=3)
