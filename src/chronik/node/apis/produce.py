"""Produce (key 0), versions 3-13; 0 is advertised as the minimum.

Behaviour
- acks=0 gets no response; an error closes the connection, which is all that such a producer can notice.
- acks=1 is answered when the batch is durable in this node's log, acks=all (-1) when the watermark has passed it.
- A duplicate batch of an idempotent producer succeeds with the offsets of the first copy.
- If an idempotent producer's batch is refused with a retriable error, its later batches get the same error until it
  retries: OUT_OF_ORDER_SEQUENCE_NUMBER would make librdkafka begin a new epoch (see `storage.refusals`).
- A batch is validated completely (length, magic, CRC, count) before any of it is stored. Each partition has an outcome.
- A batch for a partition that another node leads is forwarded to that node. NOT_LEADER_OR_FOLLOWER, with the leader's
  address, means that the batch is certainly not in the log.
- A wait longer than the request's timeout ends with REQUEST_TIMED_OUT; the batch may still be committed.
- A transactional batch needs a transactional id in the request (TRANSACTIONAL_ID_AUTHORIZATION_FAILED). The first batch
  of a transaction in a partition waits until the coordinator has confirmed the transaction (KIP-890); later batches of
  the producer wait for it. From version 12 on, the batch itself adds the partition to the transaction.
- If a topic validates schemas, a batch with a schema id that this node's view of the registry lacks waits until the
  view has caught up, as do the partition's later batches. INVALID_RECORD names the records.
- A request over the client's quota is carried out; its response has the throttle time (KIP-219).
- If the coordinator cannot answer, the error is NOT_ENOUGH_REPLICAS, which every client retries. Before version 12 this
  includes CONCURRENT_TRANSACTIONS. Before version 11, TRANSACTION_ABORTABLE is INVALID_TXN_STATE.
Versions: 3 batch format 2 and transactional id, 5 log start offset, 7 zstd, 8 error messages, 9 flexible, 10 current
leader, 11 TRANSACTION_ABORTABLE, 12 transaction version 2, 13 topic ids. 0-2 are advertised only because librdkafka
disables compression if the minimum is above 0.
Not supported: batch formats 0 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from uuid import UUID

from chronik.authorization.acls import Operation, ResourceType
from chronik.metadata.image import TopicImage
from chronik.node.forwarding.forwarding import FORWARDED_VERSION, ForwardedBatch, ForwardedRequest, Forwarding
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.replicas.partition import Appended, Partition, Waiter
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.replicas.schema_checks import SchemaChecks
from chronik.node.replicas.verification import ProducedTransaction, UnverifiedBatch, Verification
from chronik.node.replicas.verifier import Verifier
from chronik.node.runtime import Runtime
from chronik.node.serving.access import Access
from chronik.node.serving.api import Api, Handler
from chronik.node.serving.connection import Reply, Request
from chronik.node.serving.deadlines import Deadlines
from chronik.node.serving.held_bytes import HeldBytes
from chronik.observe.traces import PartitionTrace, error_name
from chronik.wire.api import ApiKey
from chronik.wire.batch import HEADER_BYTES, read_batch_header
from chronik.wire.compression import ZSTD
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.primitives import NodeEndpoint
from chronik.wire.produce import (
    ProducePartitionResponse,
    ProduceRequest,
    read_produce_request,
    write_produce_response,
)

ZSTD_FROM_VERSION = 7
ABORTABLE_FROM_VERSION = 11
ADDS_PARTITIONS_FROM_VERSION = 12
VERIFYING_BYTES_MAX = 64 * 1024 * 1024
"""Batches whose transaction or schemas are being verified. Above it, connections that send more are held back."""
NOT_VERIFIED = frozenset(
    {
        ErrorCode.network_exception,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.coordinator_not_available,
        ErrorCode.not_coordinator,
        ErrorCode.operation_not_attempted,
    }
)
"""Errors that decide nothing about the transaction. Not every client retries a batch after each of them."""
WRITE, TOPIC, TRANSACTIONAL_ID = Operation.WRITE, ResourceType.TOPIC, ResourceType.TRANSACTIONAL_ID
"""Looking up a member of an enumeration takes as long as a decision."""
TopicResponses = tuple[str | None, UUID | None, list[ProducePartitionResponse]]


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of the node that this API uses."""

    runtime: Runtime
    metadata: MetadataLog
    host: PartitionHost
    forwarding: Forwarding
    deadlines: Deadlines
    verifier: Verifier
    verifying: HeldBytes
    schema_checks: SchemaChecks


def handle(node: Services, request: Request, reply: Reply) -> None:
    produce = read_produce_request(request.api_version, request.frame, request.body_at)
    acks = produce.acks
    refused: KafkaError | None = None
    if acks not in (-1, 0, 1):
        refused = KafkaError(ErrorCode.invalid_required_acks, f"acks={acks}; allowed are 0, 1 and -1")
    access = request.access
    transaction: ProducedTransaction | None = None
    if produce.transactional_id is not None:
        adds = request.api_version >= ADDS_PARTITIONS_FROM_VERSION
        transaction = ProducedTransaction(produce.transactional_id, adds)
        if not access.is_open and _lacks_transactional_id(access, produce, produce.transactional_id):
            refused = KafkaError(ErrorCode.transactional_id_authorization_failed)
    now_ms = node.runtime.env.wall_ms()
    pending = PendingProduce(node, request, reply, acks, produce.timeout_ms, transaction)
    for topic in produce.topics:
        name = topic.name if topic.name is not None else _topic_name(node, topic.topic_id)
        may_write = access.is_open or name is None or access.allows(WRITE, TOPIC, name)
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
                if not may_write:
                    raise KafkaError(ErrorCode.topic_authorization_failed)
                pending.append_or_forward(response, name, records, now_ms)
            except KafkaError as error:
                pending.fail(response, error)
                pending.rejected(response, name, error)
            except Exception:
                pending.fail(response, pending.unexpected(response, name))
    if acks == 0:
        if request.limits is not None:
            request.limits.settle()
        reply.send_nothing()
        if reply.failed:
            request.connection.close()
        return
    if pending.started():
        node.deadlines.add(max(produce.timeout_ms, 0), pending)


def _lacks_transactional_id(access: Access, produce: ProduceRequest, transactional_id: str) -> bool:
    """Return whether a batch is transactional, and the client may not write with the request's transactional id."""
    is_transactional = any(
        records is not None and len(records) >= HEADER_BYTES and read_batch_header(records).is_transactional
        for topic in produce.topics
        for _, records in topic.partitions
    )
    return is_transactional and not access.allows(WRITE, TRANSACTIONAL_ID, transactional_id)


def _topic_name(node: Services, topic_id: UUID | None) -> str | None:
    return None if topic_id is None else node.metadata.image.names_by_id.get(topic_id)


class PendingProduce:
    """A produce request whose batches do not all have an outcome yet. Answered once; late calls do nothing.

    It does not hold the records: they would stay in memory until the disk and the followers have them.
    """

    __slots__ = (
        "_acks",
        "_endpoints",
        "_forwarded",
        "_is_started",
        "_node",
        "_reply",
        "_request",
        "_timeout_ms",
        "_transaction",
        "_waiting",
        "topics",
    )

    def __init__(
        self,
        node: Services,
        request: Request,
        reply: Reply,
        acks: int,
        timeout_ms: int,
        transaction: ProducedTransaction | None,
    ) -> None:
        self.topics: list[TopicResponses] = []
        self._node = node
        self._request = request
        self._reply = reply
        self._acks = acks
        self._timeout_ms = timeout_ms
        self._transaction = transaction
        self._waiting: list[ProducePartitionResponse] = []
        self._endpoints: dict[int, NodeEndpoint] | None = None
        self._is_started = False
        self._forwarded: ForwardedRequest | None = None
        """Set once a batch of this request is forwarded."""

    # -- batches -------------------------------------------------------------------------------------------------------

    def append_or_forward(
        self, response: ProducePartitionResponse, name: str, records: memoryview | None, now_ms: int
    ) -> None:
        """Append locally, unless another node leads or earlier batches of this connection are still being forwarded."""
        connection = self._request.connection
        node, forwarding = self._node, self._node.forwarding
        if forwarding.has_lanes(connection):
            topic = node.metadata.image.topics.get(name)
            if topic is not None and forwarding.is_busy(connection, topic.id, response.partition):
                self._forward(response, topic, records)
                return
        try:
            self._append(response, name, records, now_ms)
            return
        except KafkaError as error:
            topic = node.metadata.image.topics.get(name)
            if error.code is not ErrorCode.not_leader_or_follower or topic is None or records is None:
                raise
            if not forwarding.can_forward(connection, topic, response.partition, self._acks):
                # This node may lead soon: its log is opened, its lease renewed, or a handover cancelled.
                node.host.refused(topic, response.partition, records, error, now_ms)
                raise
            node.host.check_forwardable(topic, response.partition, records, now_ms)
        self._forward(response, topic, records)

    def _append(
        self,
        response: ProducePartitionResponse,
        topic: str,
        records: memoryview | None,
        now_ms: int,
        answer: Waiter | None = None,
        verified: Verification | None = None,
        *,
        is_checked: bool = False,
    ) -> bool:
        """Append to this node's log; return whether the response waits. `answer` replaces this request's own waiter.

        `is_checked` means that the schemas of the records are registered.
        """
        acks = self._acks
        partition = self._node.host.require_leader(topic, response.partition, is_answer=False)
        if records is None or not len(records):
            raise KafkaError(ErrorCode.invalid_record, "no records")
        version = self._request.api_version
        if version < ZSTD_FROM_VERSION and len(records) >= 61 and read_batch_header(records).codec == ZSTD:
            raise KafkaError(ErrorCode.unsupported_compression_type, f"zstd needs Produce {ZSTD_FROM_VERSION}")
        if partition.is_internal:
            raise KafkaError(ErrorCode.invalid_topic_exception, f"{topic} is written by the cluster only")
        if partition.settings.schema_checks and not is_checked:
            try:
                must_wait = self._node.schema_checks.must_wait(partition, records)
            except KafkaError as error:
                partition.refused(records, error, now_ms)
                raise
            if must_wait:
                self._check_schemas(partition, response, records, answer)
                return True
        if partition.trace is not None:
            # Set before the append, which may raise the watermark.
            partition.trace.acks = acks
        try:
            if acks == -1:
                partition.check_enough_replicas()
            appended = partition.append(records, now_ms, self._transaction, verified)
        except UnverifiedBatch as unverified:
            self._verify(partition, response, records, unverified, answer)
            return True
        except KafkaError as error:
            partition.refused(records, error, now_ms)
            raise
        response.base_offset = appended.base_offset
        response.log_append_time_ms = appended.log_append_time_ms
        response.log_start_offset = partition.log_start_offset
        end_offset = appended.last_offset + 1
        trace = partition.trace
        if trace is not None:
            trace.appended(self._request.client_id, appended.base_offset, appended.last_offset, len(records), acks)
        is_waiting = (acks == -1 and not partition.is_committed(end_offset)) or (
            acks == 1 and not partition.is_written(end_offset)
        )
        if is_waiting:
            waiter = self._wait_for(response) if answer is None else answer
            if trace is not None:
                waiter = self._traced(trace, waiter, appended)
            if acks == 1:
                partition.when_written(end_offset, waiter)
            else:
                partition.when_committed(end_offset, waiter)
        elif trace is not None and acks != 0:
            self._trace_acknowledged(trace, appended)
        return is_waiting

    def _check_schemas(
        self, partition: Partition, response: ProducePartitionResponse, records: memoryview, answer: Waiter | None
    ) -> None:
        """Append the batch after this node's view of the registry has caught up, if its schemas are registered."""
        node = self._node
        # A copy: the connection reuses its buffer.
        copied = memoryview(bytearray(records))
        waiter = self._waiter(response, answer)

        def resume(refused: KafkaError | None) -> None:
            self._append_held(partition, response, copied, waiter, refused)

        node.schema_checks.wait(partition, copied, resume)
        node.verifying.add(self._request.connection, len(copied))

    def _verify(
        self,
        partition: Partition,
        response: ProducePartitionResponse,
        records: memoryview,
        unverified: UnverifiedBatch,
        answer: Waiter | None,
    ) -> None:
        """Append the batch after the coordinator has confirmed its transaction. Raises if it surely will not."""
        node, request = self._node, self._request
        transaction = self._transaction
        if transaction is None:
            raise unverified
        # A copy: the connection reuses its buffer.
        copied = memoryview(bytearray(records))

        def resume(verification: Verification, outcome: ErrorCode) -> None:
            refused = None if outcome is ErrorCode.none else _verification_error(outcome, request.api_version)
            self._append_held(partition, response, copied, waiter, refused, verification)

        node.verifier.verify(partition, unverified.header, transaction, resume)
        node.verifying.add(request.connection, len(copied))
        waiter = self._waiter(response, answer)

    def _waiter(self, response: ProducePartitionResponse, answer: Waiter | None) -> Waiter:
        if answer is not None:
            return answer
        return self._close_on_error if self._acks == 0 else self._wait_for(response)

    def _append_held(
        self,
        partition: Partition,
        response: ProducePartitionResponse,
        copied: memoryview,
        waiter: Waiter,
        refused: KafkaError | None,
        verified: Verification | None = None,
    ) -> None:
        """Append a batch that has waited, unless it was refused; answer if the response does not wait any longer."""
        node, topic, now_ms = self._node, partition.topic, self._node.runtime.env.wall_ms()
        node.verifying.remove(len(copied))
        try:
            if refused is not None:
                raise refused
            if not self._append(response, topic, copied, now_ms, waiter, verified, is_checked=True):
                waiter(None)
        except KafkaError as error:
            partition.refused(copied, error, now_ms)
            self.rejected(response, topic, error)
            waiter(error)
        except Exception:
            waiter(self.unexpected(response, topic))

    def _forward(self, response: ProducePartitionResponse, topic: TopicImage, records: memoryview | None) -> None:
        """Forward to the leader after the earlier batches, or append locally if this node leads by then."""
        node, request, name = self._node, self._request, topic.name
        acks = self._acks
        done = self._wait_for(response) if acks != 0 else self._close_on_error

        def answer(error: KafkaError | None) -> None:
            if error is not None and error.code is ErrorCode.not_leader_or_follower:
                self.name_leader(response, name)
            done(error)

        def outcome(error: KafkaError | None) -> None:
            if error is not None:
                self.trace_rejected(name, response.partition, error)
            answer(error)

        def append_here(records: memoryview) -> None:
            if not self._append(response, name, records, node.runtime.env.wall_ms(), answer):
                answer(None)

        if name in node.runtime.traces.topics:
            to, size_bytes = topic.partitions[response.partition].leader, len(records or b"")
            PartitionTrace(node.runtime.traces, name, response.partition).forwarded(request.client_id, to, size_bytes)
        if self._forwarded is None:
            self._forwarded = self._forwarded_request()
        batch = memoryview(b"") if records is None else records
        node.forwarding.forward(ForwardedBatch(self._forwarded, topic, response, batch, append_here, outcome))

    def _forwarded_request(self) -> ForwardedRequest:
        connection, transaction = self._request.connection, self._transaction
        if transaction is None:
            return ForwardedRequest(connection, self._acks, self._timeout_ms)
        # The version tells the leader whether the batch adds its partition, and which errors the client knows.
        version = FORWARDED_VERSION if transaction.adds else self._request.api_version
        return ForwardedRequest(connection, self._acks, self._timeout_ms, transaction.transactional_id, version)

    def _close_on_error(self, error: KafkaError | None) -> None:
        """Close the connection on an error: an acks=0 producer notices nothing else."""
        if error is not None:
            self._request.connection.close()

    # -- outcomes ------------------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self._reply.done

    def fail(self, response: ProducePartitionResponse, error: KafkaError) -> None:
        self._reply.failed = True
        response.error_code = error.code
        response.error_message = error.message
        response.record_errors = error.record_errors
        response.base_offset = -1
        response.log_append_time_ms = -1
        response.log_start_offset = -1

    def rejected(self, response: ProducePartitionResponse, topic: str | None, error: KafkaError) -> None:
        """Trace and count a batch that was not appended, and name the leader if that is another node."""
        self.trace_rejected(topic, response.partition, error)
        if error.code is ErrorCode.not_leader_or_follower and topic is not None:
            self._node.runtime.metrics.rejected(topic, response.partition)
            self.name_leader(response, topic)

    def unexpected(self, response: ProducePartitionResponse, topic: str | None) -> KafkaError:
        """Log the exception that is being handled; return the error for the client."""
        self._node.runtime.log.exception("append_failed", topic=topic, partition=response.partition)
        error = KafkaError(ErrorCode.unknown_server_error, "unexpected error; see the node's log")
        self.trace_rejected(topic, response.partition, error)
        return error

    def name_leader(self, response: ProducePartitionResponse, topic: str) -> None:
        """Add the current leader and its address to the response (KIP-951)."""
        leader = self._node.host.other_leader(topic, response.partition)
        if leader is not None:
            response.current_leader, broker = leader
            address = broker.address(self._request.listener)
            if address is not None:
                if self._endpoints is None:
                    self._endpoints = {}
                self._endpoints[broker.id] = NodeEndpoint(broker.id, *address, broker.rack)

    def started(self) -> bool:
        """Finish the appends: answer now if no partition waits, and return whether one does."""
        self._is_started = True
        if not self._waiting:
            self._answer()
        return not self._reply.done

    def _wait_for(self, response: ProducePartitionResponse) -> Waiter:
        """Delay the response until the returned function is called."""
        self._waiting.append(response)

        def done(error: KafkaError | None) -> None:
            if self._reply.done:
                return
            self._waiting = [other for other in self._waiting if other is not response]
            if error is not None:
                self.fail(response, error)
            if self._is_started and not self._waiting:
                self._answer()

        return done

    def deadline_passed(self) -> None:
        timed_out = KafkaError(ErrorCode.request_timed_out, "not written everywhere within the request's timeout")
        for response in self._waiting:
            self.fail(response, timed_out)
        waiting = {id(response) for response in self._waiting}
        for name, topic_id, responses in self.topics if self._node.runtime.traces.topics else ():
            topic = name if name is not None else _topic_name(self._node, topic_id)
            for response in responses:
                if id(response) in waiting:
                    self.trace_rejected(topic, response.partition, timed_out)
        self._answer()

    def _answer(self) -> None:
        endpoints = () if self._endpoints is None else tuple(self._endpoints.values())
        limits = self._request.limits
        throttle_ms = 0 if limits is None else limits.settle()
        body = write_produce_response(self._request.api_version, self.topics, throttle_ms, endpoints)
        self._reply.send((body,))

    # -- traces --------------------------------------------------------------------------------------------------------

    def trace_rejected(self, topic: str | None, partition: int, error: KafkaError) -> None:
        traces = self._node.runtime.traces
        if topic is not None and topic in traces.topics:
            trace = PartitionTrace(traces, topic, partition)
            trace.rejected(self._request.client_id, error_name(error.code), error.message)

    def _trace_acknowledged(self, trace: PartitionTrace, appended: Appended) -> None:
        request, acks = self._request, self._acks
        elapsed_s = self._node.runtime.loop.time() - request.started_s
        trace.acknowledged(request.client_id, appended.base_offset, appended.last_offset, acks, elapsed_s)

    def _traced(self, trace: PartitionTrace, answer: Waiter, appended: Appended) -> Waiter:
        """Return a waiter that traces the outcome of an append whose response must wait."""

        def done(error: KafkaError | None) -> None:
            if error is not None:
                trace.rejected(self._request.client_id, error_name(error.code), error.message)
            elif not self._reply.done:
                self._trace_acknowledged(trace, appended)
            answer(error)

        return done


def _verification_error(code: ErrorCode, version: int) -> KafkaError:
    """Return the error of a batch whose transaction the coordinator did not confirm, as this version's clients know it.

    NOT_ENOUGH_REPLICAS makes every client send the batch again, without asking for new metadata.
    """
    reason = f"the coordinator did not confirm the transaction: {code.name}"
    if code in NOT_VERIFIED or (code is ErrorCode.concurrent_transactions and version < ADDS_PARTITIONS_FROM_VERSION):
        return KafkaError(ErrorCode.not_enough_replicas, reason)
    if code is ErrorCode.producer_fenced:
        return KafkaError(ErrorCode.invalid_producer_epoch, reason)
    if code is ErrorCode.transaction_abortable and version < ABORTABLE_FROM_VERSION:
        return KafkaError(ErrorCode.invalid_txn_state, reason)
    return KafkaError(code, reason)


API = Api(ApiKey.PRODUCE, (0, 13), readable_from=3)


def handler(services: Services) -> Handler:
    return Handler(API, hot=partial(handle, services))
