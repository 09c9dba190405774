"""The parts of a broker that the group service and the group APIs use, with an in-memory log."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec, TypeVar, cast
from uuid import UUID

import msgspec
from tests.support.handlers import handlers_of

from chronik.groups.offsets import Producer
from chronik.groups.records import TopicPartition, group_partition
from chronik.metadata.apply import apply
from chronik.metadata.commands import Assignment, Command, CreateTopic, DeleteTopic, RegisterBroker
from chronik.metadata.events import Event
from chronik.metadata.image import DEFAULT_LISTENER, OFFSETS_TOPIC, ClusterImage, TopicImage
from chronik.node.age_clock import AgeClock
from chronik.node.config import NodeConfig
from chronik.node.coordinators.group_service import GroupService
from chronik.node.coordinators.share_state import Summary
from chronik.node.environment import Environment
from chronik.node.membership.topic_plans import NewTopic, plan_topic
from chronik.node.runtime import Runtime
from chronik.node.serving.access import OPEN_ACCESS
from chronik.node.serving.api import LargeValues
from chronik.observe.logging import make_logger
from chronik.shares.state import InitialState, SharePartitionKey
from chronik.storage.producers import ProducerStates
from chronik.wire.batch import encode_batch, encode_marker, read_batch_header, read_marker, stamp
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.messages import read_request, read_response, write_request, write_response

T = TypeVar("T")
P = ParamSpec("P")
B = TypeVar("B", bound="FakeBroker")
NODE_ID = 1
DEADLINE_S = 10.0


@dataclass
class MemoryLog:
    """A partition as the service sees it: the appended batches, all of them committed."""

    batches: list[bytes] = field(default_factory=list)
    log_start_offset: int = 0
    log_end_offset: int = 0
    leads: bool = True
    leader_epoch: int = 0
    has_other_replica: bool = False
    damaged_offsets: list[int] = field(default_factory=list)
    producers: ProducerStates = field(default_factory=lambda: ProducerStates(86_400_000))

    @property
    def high_watermark(self) -> int:
        return self.log_end_offset

    @property
    def log(self) -> MemoryLog:
        return self

    def append(self, data: bytes) -> int:
        base_offset = self.log_end_offset
        view = memoryview(data)
        while view:
            header = read_batch_header(view)
            stamped = bytearray(view[: header.size_bytes])
            view = view[header.size_bytes :]
            stamp(stamped, 0, self.log_end_offset, 0)
            if header.is_control:
                self.producers.end_transaction(header, read_marker(stamped), self.log_end_offset, 0)
            elif header.producer_id >= 0:
                self.producers.record(header, self.log_end_offset, 0)
            self.batches.append(bytes(stamped))
            self.log_end_offset = read_batch_header(stamped).next_offset
        return base_offset

    def found_damaged(self, offset: int, how: str, reason: str) -> bool:
        self.damaged_offsets.append(offset)
        return self.has_other_replica

    def when_committed(self, end_offset: int, waiter: Callable[[KafkaError | None], None]) -> None:
        waiter(None)

    def read_job(self, offset: int, max_bytes: int, upto_offset: int) -> Callable[[], bytes]:
        wanted = [batch for batch in self.batches if read_batch_header(batch).next_offset > offset]
        return lambda: b"".join(wanted)


class FakeTransactions:
    """The coordinators of all transactions: each call gets the `answer` of its time, once it `may_answer`."""

    def __init__(self) -> None:
        self.answer = ErrorCode.none
        self.calls: list[tuple[str, Producer, TopicPartition, bool]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def verify(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[TopicPartition],
        adds: bool,
    ) -> dict[TopicPartition, ErrorCode]:
        producer = Producer(producer_id, producer_epoch)
        self.calls += [(transactional_id, producer, partition, adds) for partition in partitions]
        answer = self.answer
        await self.may_answer.wait()
        return dict.fromkeys(partitions, answer)


class FakeShareState:
    """All share coordinators. Each call has the `error`, once it `may_answer`."""

    def __init__(self) -> None:
        self.states: dict[SharePartitionKey, InitialState] = {}
        self.error = ErrorCode.none
        self.call_count = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def initialize(
        self, states: dict[SharePartitionKey, InitialState], timeout_ms: int
    ) -> dict[SharePartitionKey, ErrorCode]:
        self.call_count += 1
        await self.may_answer.wait()
        if self.error is ErrorCode.none:
            self.states.update(states)
        return dict.fromkeys(states, self.error)

    async def delete(self, keys: list[SharePartitionKey], timeout_ms: int) -> dict[SharePartitionKey, ErrorCode]:
        await self.may_answer.wait()
        for key in keys if self.error is ErrorCode.none else ():
            self.states.pop(key, None)
        return dict.fromkeys(keys, self.error)

    async def read_summary(self, keys: list[SharePartitionKey], timeout_ms: int) -> dict[SharePartitionKey, Summary]:
        await self.may_answer.wait()
        states = {key: self.states.get(key, InitialState(0)) for key in keys}
        return {
            key: Summary(self.error, state.state_epoch, 3, state.start_offset, 1 if state.start_offset >= 0 else -1)
            for key, state in states.items()
        }


class FakeLogEnds:
    """Every partition ends at the same offset."""

    end = 10

    async def of(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, self.end)


class FakeMetadata:
    """Applies commands immediately."""

    def __init__(self) -> None:
        self.image = ClusterImage()
        self.listener: Callable[[ClusterImage, list[Event]], None] = lambda image, events: None

    async def propose(self, proposal: Command | Callable[[ClusterImage], Command]) -> list[Event]:
        command = proposal(self.image) if callable(proposal) else proposal
        self.image, events = apply(self.image, command)
        self.listener(self.image, list(events))
        return list(events)


class FakeBroker:
    """Owned by the test's loop. `append_error` is the error of the next appends.

    Without `has_lease`, or during a leadership transfer of a partition, the broker does not serve that partition.
    """

    def __init__(self, logs: dict[tuple[str, int], MemoryLog] | None = None, **settings: Any) -> None:
        self.config = NodeConfig(**{"group_initial_rebalance_delay_ms": 0, **settings})
        self.loop = asyncio.get_running_loop()
        self.node_id = NODE_ID
        self.wall_now_ms = 1_700_000_000_000
        self.env = Environment(
            disk=cast(Any, None),
            random=Random(1),
            executor=ThreadPoolExecutor(1),
            wall_ms=lambda: self.wall_now_ms,
        )
        self.metadata = FakeMetadata()
        self.metrics = SimpleNamespace(group_rebalances=0)
        self.lines: list[str] = []
        self.log = make_logger(self.lines.append, lambda: self.wall_now_ms)
        self.age_clock = AgeClock(self.loop.time, self.env.wall_ms, self.log)
        self.logs = {} if logs is None else logs
        self.has_lease = True
        self.hands_over: set[tuple[str, int]] = set()
        self.append_error: KafkaError | None = None
        self.append_count = 0
        self.appends_allowed = asyncio.Event()
        self.appends_allowed.set()
        self.commits_allowed = asyncio.Event()
        """Until then, appends are in the log but not committed."""
        self.commits_allowed.set()
        runtime = Runtime(self.loop, self.env, self.config, cast(Any, self.metrics), cast(Any, None), self.log)
        fake = cast(Any, self)
        self.runtime = runtime
        self.partitions = self
        self.share_state = FakeShareState()
        shares, ends = cast(Any, self.share_state), cast(Any, FakeLogEnds())
        self.groups = GroupService(
            runtime, fake.metadata, fake, fake, self.lease_is_valid, self.age_clock, shares, ends
        )
        self.transaction_coordinators = FakeTransactions()
        self.handlers = handlers_of(self)
        self.metadata.listener = self.groups.metadata_changed

    @property
    def image(self) -> ClusterImage:
        return self.metadata.image

    async def start(self) -> None:
        await self.metadata.propose(RegisterBroker(NODE_ID, UUID(int=1), "localhost", 9092))
        await self.groups.start()

    async def stop(self) -> None:
        await self.groups.stop()
        self.env.executor.shutdown()

    async def create_topic(self, name: str, partitions: int = 1) -> UUID:
        topic_id = self.env.new_uuid()
        assignment = Assignment((NODE_ID,), (NODE_ID,))
        await self.metadata.propose(CreateTopic(name, topic_id, (assignment,) * partitions))
        return topic_id

    async def delete_topic(self, name: str) -> None:
        await self.metadata.propose(DeleteTopic(name, self.image.require_topic(name).id))

    async def create(self, new: NewTopic, *, by_broker: bool = False) -> TopicImage:
        new = msgspec.structs.replace(new, by_broker=by_broker)
        await self.metadata.propose(lambda image: plan_topic(image, self.config, self.env, new))
        return self.image.require_topic(new.name)

    async def applied(self) -> None:
        """Return at once: then an empty partition is loaded before the timer of its first request, on any machine."""

    def get(self, key: tuple[str, int]) -> MemoryLog | None:
        topic, index = key
        if self.image.partition(topic, index) is None:
            return None
        log = self.logs.setdefault((topic, index), MemoryLog())
        log.leads = self.has_lease and (topic, index) not in self.hands_over
        return log

    def lease_is_valid(self) -> bool:
        return self.has_lease

    async def append_internal(self, topic: str, index: int, batch: bytes, timeout_s: float) -> int:
        try:
            async with asyncio.timeout(timeout_s):
                await self.appends_allowed.wait()
                if self.append_error is not None:
                    raise self.append_error
                log = self.get((topic, index))
                if log is None:
                    raise KafkaError(ErrorCode.not_leader_or_follower)
                self.append_count += 1
                base_offset = log.append(batch)
                await self.commits_allowed.wait()
        except TimeoutError:
            raise KafkaError(ErrorCode.request_timed_out) from None
        return base_offset

    def offsets_log(self, group_id: str) -> MemoryLog:
        return self.logs[(OFFSETS_TOPIC, group_partition(group_id, self.config.offsets_topic_partitions))]

    def write_marker(self, group_id: str, producer: Producer, is_commit: bool) -> None:
        """End a transaction in the log of the group's partition, without a report to the group service."""
        self.offsets_log(group_id).append(encode_marker(*producer, is_commit, 0, self.wall_now_ms))

    def end_transaction(self, group_id: str, producer: Producer, *, is_commit: bool) -> None:
        self.write_marker(group_id, producer, is_commit)
        partition = group_partition(group_id, self.config.offsets_topic_partitions)
        self.groups.transaction_ended(partition, *producer, is_commit)

    async def run_blocking(self, call: Callable[[], T]) -> T:
        return await self.loop.run_in_executor(self.env.executor, call)

    # Client requests

    async def ask(self, api: Any, version: int, values: dict[str, Any], *, peer_id: int | None = None) -> Any:
        """Send a request in the wire format of its version and return the response as kio reads it.

        `peer_id` is the node that sends it; None for a client.
        """
        message = read_request(api.key, version, write_request(api.key, version, values))
        request = SimpleNamespace(
            listener=DEFAULT_LISTENER,
            api_key=api.key,
            api_version=version,
            client_id="app",
            client_host="127.0.0.1",
            connection=SimpleNamespace(peer_id=peer_id),
            message=message,
            access=OPEN_ACCESS,
        )
        handle = self.handlers[api.key].cold
        assert handle is not None
        try:
            answered = await handle(cast(Any, request))
            answer = answered.make() if isinstance(answered, LargeValues) else answered
        except KafkaError as error:
            answer = {"error_code": error.code} if api.on_error is None else api.on_error(request, error.code)
        return read_response(api.key, version, write_response(api.key, version, answer))


def garbage_batch() -> bytes:
    """A batch that is intact except for one flipped bit."""
    batch = bytearray(encode_batch([(b"key", b"value", [], 0)]))
    batch[-1] ^= 1
    return bytes(batch)


def with_broker_of(
    kind: type[B], **settings: Any
) -> Callable[[Callable[Concatenate[B, P], Awaitable[None]]], Callable[P, Awaitable[None]]]:
    """Run a test with its own broker, which is its first argument, within a deadline."""

    def decorate(test: Callable[Concatenate[B, P], Awaitable[None]]) -> Callable[P, Awaitable[None]]:
        @functools.wraps(test)
        async def run(*args: P.args, **kwargs: P.kwargs) -> None:
            async with asyncio.timeout(DEADLINE_S):
                broker = kind(**settings)
                await broker.start()
                await test(broker, *args, **kwargs)
                await broker.stop()

        # pytest must not look for a fixture named `broker`.
        arguments = inspect.signature(test)
        run.__signature__ = arguments.replace(  # type: ignore[attr-defined]
            parameters=list(arguments.parameters.values())[1:]
        )
        return run

    return decorate


def with_broker(
    **settings: Any,
) -> Callable[[Callable[Concatenate[FakeBroker, P], Awaitable[None]]], Callable[P, Awaitable[None]]]:
    return with_broker_of(FakeBroker, **settings)
