"""The schema registry of a node: its state from this node's replica of `_schemas`, and changes through the leader.

The leader of the topic runs one command at a time. It reads the log to its end, decides, and appends only if the log
still ends there and it still leads under its lease. So no other write comes between a decision and its records,
whichever client writes to the topic: an id is not given twice. Every replica answers lookups from its own log, up to
the high watermark, and reads it only when a request needs it. It may lag behind, so it catches up with the leader
before it answers that something does not exist. A node without a replica reads the leader's log.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import UUID

from chronik.client.errors import ClientError
from chronik.metadata.image import SCHEMAS_TOPIC
from chronik.node.admin.topics import Topics
from chronik.node.coordinators.coordinator_topic import Chunk, read_chunk
from chronik.node.membership.internal_api import InternalKey
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.peers import Peers
from chronik.node.membership.topic_plans import NewTopic
from chronik.node.replicas.partition import Partition, resolve
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, Handler
from chronik.node.serving.connection import Reply, Request
from chronik.schemas.commands import Command, run
from chronik.schemas.commands import resolve as resolve_references
from chronik.schemas.errors import MISSING, Code, Refused
from chronik.schemas.parsing import parse
from chronik.schemas.state import State, Version
from chronik.schemas.validation import SchemaCheck, is_registered
from chronik.storage.epochs import UNDEFINED
from chronik.wire.batch import encode_batch
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.records import NewRecord

PARTITION = 0
REPLICAS_MAX = 3
CONFIGS = {"cleanup.policy": "compact", "segment.bytes": str(16 * 1024 * 1024)}
READ_BYTES_MAX = 1024 * 1024
TIMEOUT_S = 10.0
APPEND_TIMEOUT_S = 5.0
TRIES_MAX = 20
RETRY_S = 0.1
WAITING_MAX = 200
"""Commands that wait for an earlier one. Further ones are refused."""
FOLLOW_S_MAX = 2.0
"""How long the answer to a forwarded command waits until this node's replica has its records."""
FOLLOW_STEP_S = 0.005
PURPOSE = "schemas"
ACCEPTED_MAX = 10_000
OFFSET_MAX = (1 << 63) - 1


@dataclass(eq=False)
class SchemaRegistry:
    """Owned by the loop. Invariant: `state` has every record below `_offset` of the topic with `_topic_id`.

    The last of them has the leader epoch `_epoch`. So a log in which an unclean election has replaced records is
    recognized, and read again from its start.
    """

    _runtime: Runtime
    _metadata: MetadataLog
    _peers: Peers
    _host: PartitionHost
    _topics: Topics
    state: State = field(default_factory=State)
    _offset: int = 0
    _epoch: int = UNDEFINED
    _topic_id: UUID | None = None
    _waiting: int = 0
    _accepted: set[tuple[str, SchemaCheck, int]] = field(default_factory=set)
    """Schemas of topics that records may have, at `_accepted_view` of the state."""
    _accepted_view: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self._reading = asyncio.Lock()
        """Held while records are applied, and while a command is decided in a thread, which reads the state."""
        self._writing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = self._runtime.log.bind(component="schemas")

    # -- lookups -------------------------------------------------------------------------------------------------------

    async def current(self) -> State:
        """Return the state up to the high watermark of this node's replica, or without a replica, of the leader."""
        topic = self._metadata.image.topic(SCHEMAS_TOPIC)
        if topic is None:
            self._forget(None)
            return self.state
        partition = self._replica()
        if partition is not None:
            await self._read_to(partition, partition.high_watermark)
        else:
            await self._read_from(topic.partitions[PARTITION].leader, topic.id)
        return self.state

    def view(self) -> tuple[State, int] | None:
        """Return what identifies the state that `current` would return, or None if it would have to read first."""
        partition = self._replica()
        if self._metadata.image.topic(SCHEMAS_TOPIC) is None or partition is None:
            return None
        return (self.state, self._offset) if self._is_current(partition, partition.high_watermark) else None

    async def caught_up(self) -> State:
        """Return a state that has all that was committed before this call. Raises Refused if that is not possible."""
        topic = self._metadata.image.topic(SCHEMAS_TOPIC)
        if topic is None or self._replica() is None:
            return await self.current()
        try:
            leader = topic.partitions[PARTITION].leader
            if leader == self._runtime.node_id:
                end_offset = self._host.require_leader(SCHEMAS_TOPIC, PARTITION).high_watermark
            else:
                async with asyncio.timeout(TIMEOUT_S):
                    end_offset = (await self._send(leader, {"read": OFFSET_MAX}))["end"]
        except (KafkaError, ClientError, TimeoutError) as error:
            raise _no_answer(error) from None
        await self._follow(end_offset)
        state = await self.current()
        if self._offset < end_offset:
            raise Refused(Code.STORE, f"this node's replica of {SCHEMAS_TOPIC} lags behind: retry")
        return state

    def _replica(self) -> Partition | None:
        partition = self._host.partitions.get((SCHEMAS_TOPIC, PARTITION))
        return None if partition is None or partition.is_closed or partition.is_damaged else partition

    def _is_current(self, partition: Partition, end_offset: int) -> bool:
        return self._offset >= end_offset and self._is_read_from(partition)

    def _is_read_from(self, partition: Partition) -> bool:
        return self._topic_id == partition.topic_id and _has(partition, self._offset, self._epoch)

    async def _read_to(self, partition: Partition, end_offset: int) -> None:
        """Apply the committed records below `end_offset`."""
        if self._is_current(partition, end_offset):
            return
        async with self._reading:
            if not self._is_read_from(partition):
                self._start_over(partition.topic_id)
            while self._offset < end_offset:
                chunk = await self._read_chunk(partition, self._offset, end_offset)
                for part in chunk.parts if chunk is not None else ():
                    for key, value in part.records:
                        self.state.apply(key, value)
                # Without a chunk, compaction has removed the remaining records.
                self._offset = end_offset if chunk is None else chunk.next_offset
                self._epoch = partition.log.epoch_of(self._offset - 1)

    async def _read_chunk(self, partition: Partition, offset: int, end_offset: int) -> Chunk | None:
        """Return records from `offset` on, or None if there are none below `end_offset`. Never skip damaged ones."""
        if partition.is_closed or not partition.jobs.begin():
            raise Refused(Code.STORE, f"the log of {SCHEMAS_TOPIC} is being truncated or closed: retry")
        with partition.jobs.running():
            read = partition.log.read_job(max(offset, partition.log_start_offset), READ_BYTES_MAX, end_offset)
            chunk = await self._runtime.run_blocking(partial(read_chunk, read))
        if chunk is not None and chunk.damages:
            damage = chunk.damages[0]
            partition.found_damaged(damage.offset, "read", damage.reason)
            raise Refused(Code.STORE, f"{SCHEMAS_TOPIC} cannot be read here: {damage.reason}; use another node")
        return chunk

    async def _read_from(self, leader: int, topic_id: UUID) -> None:
        """Apply the records that the leader has committed since the last read."""
        async with self._reading:
            self._forget(topic_id)
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    while True:
                        reply = await self._send(leader, {"read": self._offset, "epoch": self._epoch})
                        if "replaced" in reply:
                            self._start_over(topic_id)
                            continue
                        for key, value in reply["records"]:
                            self.state.apply(*(None if each is None else each.encode() for each in (key, value)))
                        self._offset, self._epoch = reply["next"], reply.get("epoch", UNDEFINED)
                        if reply["next"] >= reply["end"]:
                            return
            except (KafkaError, ClientError, TimeoutError) as error:
                raise _no_answer(error) from None

    async def _read_for(self, offset: int, epoch: int | None) -> dict[str, Any]:
        """Return committed records from an offset, for a node without a replica, whose last record has that epoch."""
        partition = self._host.require_leader(SCHEMAS_TOPIC, PARTITION)
        if epoch is not None and not _has(partition, offset, epoch):
            return {"replaced": True}
        end_offset = partition.high_watermark
        chunk = await self._read_chunk(partition, offset, end_offset) if offset < end_offset else None
        records = [record for part in chunk.parts for record in part.records] if chunk else []
        texts = [[None if each is None else each.decode(errors="replace") for each in record] for record in records]
        next_offset = chunk.next_offset if chunk else end_offset
        next_epoch = partition.log.epoch_of(next_offset - 1)
        return {"records": texts, "next": next_offset, "epoch": next_epoch, "end": end_offset}

    async def _send(self, leader: int, message: object) -> dict[str, Any]:
        if leader < 0:
            raise KafkaError(ErrorCode.leader_not_available, f"{SCHEMAS_TOPIC} has no leader")
        connection = await self._peers.connection(leader, PURPOSE)
        body = await connection.send(InternalKey.REGISTRY, 0, json.dumps(message).encode())
        reply: dict[str, Any] = json.loads(bytes(body))
        if "retry" in reply:
            raise KafkaError(ErrorCode.not_leader_or_follower, reply["retry"])
        if "code" in reply:
            raise Refused(reply["code"], reply["message"])
        return reply

    def _forget(self, topic_id: UUID | None) -> None:
        if self._topic_id != topic_id:
            self._start_over(topic_id)

    def _start_over(self, topic_id: UUID | None) -> None:
        self._topic_id = topic_id
        self.state, self._offset, self._epoch = State(), 0, UNDEFINED
        self._accepted.clear()

    # -- validation of records -----------------------------------------------------------------------------------------

    def accepts(self, topic: str, check: SchemaCheck, schema_id: int) -> bool:
        """Return whether records of the topic may have this schema, as far as the state shows it."""
        view = id(self.state), self._offset
        if self._accepted_view != view or len(self._accepted) >= ACCEPTED_MAX:
            self._accepted, self._accepted_view = set(), view
        key = topic, check, schema_id
        if key not in self._accepted:
            if not is_registered(self.state, topic, check, schema_id):
                return False
            self._accepted.add(key)
        return True

    async def refresh(self) -> None:
        await self.current()

    async def catch_up(self) -> None:
        await self.caught_up()

    async def decide(self, command: Command) -> Any:
        """Run a command that changes nothing."""
        await self.current()
        try:
            return await self._decided(command)
        except Refused as refused:
            if refused.code not in MISSING:
                raise
        await self.caught_up()
        return await self._decided(command)

    async def _decided(self, command: Command) -> Any:
        async with self._reading:
            return (await self._runtime.run_blocking(partial(run, self.state, command))).answer

    async def formatted(self, version: Version, name: str, visible: frozenset[str] | None) -> str:
        """Return the text of a version in another format, in a thread. Formats that are unknown are ignored.

        Raises Refused if a reference leads to a subject that is not `visible`; None is all of them.
        """
        texts = resolve_references(self.state, version.subject, version.references, visible)
        parsed = await self._runtime.run_blocking(partial(parse, version.kind, version.text, texts))
        return parsed.formatted(name) or version.text

    # -- commands ------------------------------------------------------------------------------------------------------

    async def submit(self, command: Command) -> Any:
        """Run a command at the leader, and return its answer when this node's replica has its records."""
        reason = f"{SCHEMAS_TOPIC} has no leader"
        code = Code.UNKNOWN_LEADER
        for _ in range(TRIES_MAX):
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    return await self._submit_once(command)
            except KafkaError as error:
                if error.code is ErrorCode.request_timed_out:
                    # The records may be committed later. A repeated registration then returns the same id.
                    raise Refused(Code.TIMED_OUT, str(error)) from None
                reason = str(error)
            except ClientError as error:
                # A repeated command is harmless: a registration returns the same id, a deletion reports what it finds.
                reason, code = str(error), Code.FORWARDING_FAILED
            except TimeoutError:
                raise Refused(Code.TIMED_OUT, f"no answer within {TIMEOUT_S:g} s") from None
            await asyncio.sleep(RETRY_S)
        raise Refused(code, f"the leader of {SCHEMAS_TOPIC} cannot be used: {reason}; retry")

    async def _submit_once(self, command: Command) -> Any:
        topic = self._metadata.image.topic(SCHEMAS_TOPIC)
        if topic is None:
            await self._create()
            topic = self._metadata.image.require_topic(SCHEMAS_TOPIC)
        leader = topic.partitions[PARTITION].leader
        if leader == self._runtime.node_id:
            answer, _ = await self._run(command)
            return answer
        reply = await self._send(leader, [*command])
        await self._follow(reply["end"])
        return reply["answer"]

    async def _follow(self, end_offset: int) -> None:
        """Wait until this node's replica has the records, so that its next lookup finds them."""
        deadline_s = self._runtime.loop.time() + FOLLOW_S_MAX
        while (partition := self._replica()) is not None and partition.high_watermark < end_offset:
            if self._runtime.loop.time() > deadline_s:
                return
            await asyncio.sleep(FOLLOW_STEP_S)

    async def _create(self) -> None:
        replicas = min(REPLICAS_MAX, max(1, len(self._metadata.image.staying_brokers())))
        try:
            await self._topics.create(NewTopic(SCHEMAS_TOPIC, 1, replicas, configs=dict(CONFIGS)), by_broker=True)
        except KafkaError as error:
            if error.code is not ErrorCode.topic_already_exists:
                raise

    async def _run(self, command: Command) -> tuple[Any, int]:
        """Run a command as the leader; return its answer, and the end offset of its records."""
        if self._waiting >= WAITING_MAX:
            raise Refused(503, f"{WAITING_MAX} commands wait, the limit: retry")
        self._waiting += 1
        try:
            async with self._writing:
                while True:
                    done = await self._try(command)
                    if done is not None:
                        return done
        finally:
            self._waiting -= 1

    async def _try(self, command: Command) -> tuple[Any, int] | None:
        """Return None if the log has grown since the command was decided: it must be decided again."""
        partition = self._host.require_leader(SCHEMAS_TOPIC, PARTITION)
        generation, end_offset = partition.generation, partition.log_end_offset
        committed: asyncio.Future[None] = self._runtime.loop.create_future()
        partition.when_committed(end_offset, partial(resolve, committed))
        await committed
        await self._read_to(partition, end_offset)
        async with self._reading:
            outcome = await self._runtime.run_blocking(partial(run, self.state, command))
        if not outcome.records:
            self._host.require_leader(SCHEMAS_TOPIC, PARTITION)
            return outcome.answer, end_offset
        if (partition.generation, partition.log_end_offset) != (generation, end_offset):
            return None
        wall_ms = self._runtime.env.wall_ms()
        records: list[NewRecord] = [(key, value, [], wall_ms) for key, value in outcome.records]
        # No other append can come in between: this runs without a wait up to the append.
        base = await self._host.append_internal(SCHEMAS_TOPIC, PARTITION, encode_batch(records), APPEND_TIMEOUT_S)
        await self._read_to(partition, base + len(records))
        return outcome.answer, base + len(records)

    # -- commands of other nodes ---------------------------------------------------------------------------------------

    def handler(self) -> Handler:
        return Handler(Api(InternalKey.REGISTRY, (0, 0)), hot=self._on_command)

    def _on_command(self, request: Request, reply: Reply) -> None:
        body = bytes(request.frame[request.body_at :])
        task = self._runtime.loop.create_task(self._answer(body, reply), name="schemas-command")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, body: bytes, reply: Reply) -> None:
        answer: dict[str, Any]
        try:
            message = json.loads(body)
            if isinstance(message, dict):
                answer = await self._read_for(message["read"], message.get("epoch"))
            else:
                # Its client waits no longer: a command must not run hours after its client got an error.
                async with asyncio.timeout(TIMEOUT_S):
                    answered, end_offset = await self._run(Command(*message))
                answer = {"answer": answered, "end": end_offset}
        except Refused as error:
            answer = {"code": error.code, "message": error.message}
        except KafkaError as error:
            timed_out = error.code is ErrorCode.request_timed_out
            answer = {"code": Code.TIMED_OUT, "message": str(error)} if timed_out else {"retry": str(error)}
        except TimeoutError:
            answer = {"code": Code.TIMED_OUT, "message": f"no answer within {TIMEOUT_S:g} s"}
        except Exception as error:
            self._log.exception("schemas_command_failed", error=repr(error))
            answer = {"code": Code.STORE, "message": "the leader failed: see its log"}
        reply.send((json.dumps(answer).encode(),))


def _has(partition: Partition, end_offset: int, epoch: int) -> bool:
    """Return whether the log still has the records below an offset, of which the last one had that epoch."""
    return partition.log_end_offset >= end_offset and partition.log.epoch_of(end_offset - 1) == epoch


def _no_answer(error: Exception) -> Refused:
    reason = str(error) or "no answer in time"
    return Refused(Code.UNKNOWN_LEADER, f"the leader of {SCHEMAS_TOPIC} did not answer: {reason}")
