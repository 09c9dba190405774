"""Produce at a node that is not the leader: order, bounds, and the responses when a leader fails midway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest
from tests.node.support_async import Story, async_test

from chronik.client.connection import Connection as PeerConnection
from chronik.client.errors import ConnectionLost, Unreachable
from chronik.metadata.image import ClusterImage, PartitionImage, TopicImage
from chronik.node.forwarding.forwarding import ForwardedBatch, ForwardedRequest, Forwarding
from chronik.node.serving.connection import Connection
from chronik.node.serving.deadlines import Deadlines
from chronik.observe.metrics import Metrics
from chronik.wire.batch import encode_batch
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.produce import (
    ProducePartitionResponse,
    ProduceRequest,
    read_produce_request,
    write_produce_response,
)

TOPIC = UUID(int=77)
OWN = 1


class FakeLeader:
    """The connection to one leader: it records requests and returns the responses that the test chooses."""

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id
        self.is_closed = False
        self.sent: list[tuple[list[tuple[int, bytes]], int]] = []
        self.requests: list[tuple[int, ProduceRequest]] = []
        self.answers: list[asyncio.Future[memoryview]] = []

    def send(self, key: int, version: int, body: bytes) -> asyncio.Future[memoryview]:
        request = read_produce_request(version, memoryview(body), 0)
        batches = [(index, bytes(records or b"")) for topic in request.topics for index, records in topic.partitions]
        self.sent.append((batches, request.acks))
        self.requests.append((version, request))
        answer: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
        self.answers.append(answer)
        return answer

    def answer(self, at: int, code: ErrorCode = ErrorCode.none, base_offset: int = 0) -> None:
        """Answer request number `at` for all of its partitions."""
        partitions = [ProducePartitionResponse(index, int(code), base_offset) for index, _ in self.sent[at][0]]
        version, request = self.requests[at]
        topic = request.topics[0]
        self.answers[at].set_result(
            memoryview(write_produce_response(version, [(topic.name, topic.topic_id, partitions)]))
        )

    def lose(self) -> None:
        self.is_closed = True
        for answer in self.answers:
            if not answer.done():
                answer.set_exception(ConnectionLost("gone"))


class FakeClient:
    """A client's connection, with what forwarding uses."""

    def __init__(self) -> None:
        self.peer_id: int | None = None
        self.holds = 0
        self.closers: list[Callable[[], None]] = []

    def when_closed(self, owner: object, callback: Callable[[], None]) -> None:
        self.closers.append(callback)

    def hold(self) -> None:
        self.holds += 1

    def release(self) -> None:
        self.holds -= 1


class Scene:
    """One node with forwarding, a topic of two partitions, and fake leaders."""

    def __init__(self, bytes_max: int = 1 << 20) -> None:
        loop = asyncio.get_running_loop()
        self.hosted = SimpleNamespace(hands_over_to=-1)
        self.leaders: dict[int, FakeLeader] = {2: FakeLeader(2), 3: FakeLeader(3)}
        self.refused = False
        self.deadlines = Deadlines(loop)
        self.metrics = Metrics()
        runtime = SimpleNamespace(
            loop=loop,
            node_id=OWN,
            config=SimpleNamespace(forwarding=True, forward_bytes_max=bytes_max),
            metrics=self.metrics,
        )
        self.metadata = SimpleNamespace(image=ClusterImage())
        self.forwarding = Forwarding(
            cast(Any, runtime),
            cast(Any, self.metadata),
            cast(Any, SimpleNamespace(open_connection=self._open, connection=self._connect)),
            cast(Any, SimpleNamespace(partitions=SimpleNamespace(get=lambda key: self.hosted))),
            self.deadlines,
        )
        self.appended_here: list[bytes] = []
        self.client = FakeClient()
        self.lead(2)

    def _open(self, node_id: int, purpose: str) -> PeerConnection | None:
        leader = self.leaders[node_id]
        return None if leader.is_closed or self.refused else cast(PeerConnection, leader)

    async def _connect(self, node_id: int, purpose: str, timeout_s: float) -> PeerConnection:
        await asyncio.sleep(0)
        if self.refused or self.leaders[node_id].is_closed:
            raise Unreachable(f"node {node_id} cannot be reached")
        return cast(PeerConnection, self.leaders[node_id])

    def lead(self, leader: int) -> None:
        partitions = tuple(PartitionImage(index, leader, 5, (1, 2, 3), (1, 2, 3)) for index in range(2))
        self.topic = TopicImage("t", TOPIC, partitions)
        self.metadata.image = ClusterImage(topics={"t": self.topic}, names_by_id={TOPIC: "t"})

    def produce(
        self,
        records: bytes,
        *,
        partition: int = 0,
        acks: int = -1,
        timeout_ms: int = 10_000,
        group: ForwardedRequest | None = None,
    ) -> asyncio.Future[ProducePartitionResponse]:
        """Send one batch from the client and return its outcome."""
        outcome: asyncio.Future[ProducePartitionResponse] = asyncio.get_running_loop().create_future()
        response = ProducePartitionResponse(partition)

        def waiter(error: KafkaError | None) -> None:
            if error is not None:
                response.error_code = error.code
            outcome.set_result(response)

        def append_here(kept: memoryview) -> None:
            if self.hosted.hands_over_to >= 0:
                raise KafkaError(ErrorCode.not_leader_or_follower, "handing over")
            self.appended_here.append(bytes(kept))
            waiter(None)

        connection = cast(Connection, self.client)
        request = group if group is not None else ForwardedRequest(connection, acks, timeout_ms)
        batch = memoryview(bytearray(records))
        self.forwarding.forward(ForwardedBatch(request, self.topic, response, batch, append_here, waiter))
        return outcome

    async def turn(self) -> None:
        """Run everything that is due."""
        for _ in range(10):
            await asyncio.sleep(0)


@asynccontextmanager
async def opened(**settings: Any) -> AsyncIterator[Scene]:
    scene = Scene(**settings)
    async with asyncio.timeout(20):
        yield scene
    scene.deadlines.close()


def on_scene(**settings: Any) -> Callable[[Story], Story]:
    """Make a test of a coroutine that takes a scene."""
    return async_test(lambda: opened(**settings))


def plain(value: bytes) -> bytes:
    return encode_batch([(None, value, [], 1)])


def numbered(sequence: int, producer: int = 9, epoch: int = 0) -> bytes:
    return encode_batch([(None, b"v", [], 1)], producer_id=producer, producer_epoch=epoch, base_sequence=sequence)


def code(outcome: asyncio.Future[ProducePartitionResponse]) -> ErrorCode:
    return ErrorCode(outcome.result().error_code)


@on_scene()
async def test_the_client_receives_the_leaders_response(scene: Scene) -> None:
    outcome = scene.produce(plain(b"a"))
    await scene.turn()
    assert scene.leaders[2].sent == [([(0, plain(b"a"))], -1)]
    scene.leaders[2].answer(0, base_offset=42)
    assert (await outcome).base_offset == 42
    assert scene.metrics.produce_forwarded == 1
    assert scene.forwarding.in_flight.bytes == 0
    assert not scene.forwarding.is_busy(cast(Connection, scene.client), TOPIC, 0)


@on_scene()
async def test_batches_of_one_request_for_one_leader_are_sent_together(scene: Scene) -> None:
    group = ForwardedRequest(cast(Connection, scene.client), -1, 10_000)
    outcomes = [scene.produce(plain(b"a"), partition=index, group=group) for index in range(2)]
    await scene.turn()
    assert [[index for index, _ in batches] for batches, _ in scene.leaders[2].sent] == [[0, 1]]
    scene.leaders[2].answer(0)
    assert [code(outcome) for outcome in await _all(outcomes)] == [ErrorCode.none] * 2


@pytest.mark.parametrize("version", [3, 9, 11, 13])
@on_scene()
async def test_a_transactional_request_keeps_its_id_and_version(scene: Scene, version: int) -> None:
    """The version tells the leader whether the batch adds its partition to the transaction."""
    group = ForwardedRequest(cast(Connection, scene.client), -1, 10_000, "payments", version)
    outcomes = [scene.produce(numbered(0), partition=index, group=group) for index in range(2)]
    await scene.turn()
    ((sent_version, request),) = scene.leaders[2].requests
    assert (sent_version, request.transactional_id) == (version, "payments")
    (topic,) = request.topics
    assert (topic.name, topic.topic_id) == ((None, TOPIC) if version == 13 else ("t", None))
    scene.leaders[2].answer(0, base_offset=5)
    assert [outcome.result().base_offset for outcome in await _all(outcomes)] == [5, 5]


@on_scene()
async def test_batches_of_a_produce_lane_are_pipelined_to_one_leader_in_order(scene: Scene) -> None:
    outcomes = [scene.produce(plain(bytes([number]))) for number in range(5)]
    await scene.turn()
    assert [batches[0][1] for batches, _ in scene.leaders[2].sent] == [plain(bytes([n])) for n in range(5)]
    for number in range(5):
        scene.leaders[2].answer(number, base_offset=number)
    assert [(await outcome).base_offset for outcome in outcomes] == [0, 1, 2, 3, 4]


@on_scene()
async def test_a_lane_drains_the_old_leader_before_it_sends_to_the_new_one(scene: Scene) -> None:
    first = scene.produce(plain(b"1"))
    await scene.turn()
    scene.lead(3)
    second = scene.produce(plain(b"2"))
    other_lane = scene.produce(plain(b"x"), partition=1)
    await scene.turn()
    assert scene.leaders[3].sent == [([(1, plain(b"x"))], -1)]
    scene.leaders[2].answer(0)
    await scene.turn()
    assert scene.leaders[3].sent[1] == ([(0, plain(b"2"))], -1)
    scene.leaders[3].answer(0)
    scene.leaders[3].answer(1)
    assert [code(outcome) for outcome in await _all([first, second, other_lane])] == [ErrorCode.none] * 3


@on_scene()
async def test_a_lane_drains_the_old_leader_before_it_appends_locally(scene: Scene) -> None:
    first = scene.produce(plain(b"1"))
    await scene.turn()
    scene.lead(OWN)
    assert scene.forwarding.is_busy(cast(Connection, scene.client), TOPIC, 0)
    second = scene.produce(plain(b"2"))
    await scene.turn()
    assert scene.appended_here == []
    scene.leaders[2].answer(0)
    await _all([first, second])
    assert scene.appended_here == [plain(b"2")]


@on_scene()
async def test_after_not_leader_later_batches_fail_until_the_first_one_is_resent(scene: Scene) -> None:
    first = scene.produce(numbered(0))
    await scene.turn()
    scene.leaders[2].answer(0, ErrorCode.not_leader_or_follower)
    await scene.turn()
    assert code(first) is ErrorCode.not_leader_or_follower
    assert scene.metrics.not_leader == 1
    scene.lead(3)
    later = scene.produce(numbered(1))
    assert code(later) is ErrorCode.not_leader_or_follower
    assert scene.leaders[3].sent == []
    again = [scene.produce(numbered(0)), scene.produce(numbered(1))]
    await scene.turn()
    scene.leaders[3].answer(0)
    scene.leaders[3].answer(1)
    assert [code(outcome) for outcome in await _all(again)] == [ErrorCode.none] * 2


@pytest.mark.parametrize("error", [ErrorCode.kafka_storage_error, ErrorCode.not_enough_replicas])
@on_scene()
async def test_later_batches_do_not_overtake_a_refused_batch_at_the_next_leader(scene: Scene, error: ErrorCode) -> None:
    first = scene.produce(numbered(0))
    await scene.turn()
    scene.leaders[2].answer(0, error)
    await scene.turn()
    assert code(first) is error
    scene.lead(3)
    assert code(scene.produce(numbered(1))) is ErrorCode.not_leader_or_follower
    assert scene.leaders[3].sent == []
    again = scene.produce(numbered(0))
    await scene.turn()
    scene.leaders[3].answer(0)
    assert (await again).error_code == 0


@on_scene()
async def test_an_unknown_outcome_is_request_timed_out_and_blocks_later_batches(scene: Scene) -> None:
    first = scene.produce(numbered(0))
    await scene.turn()
    scene.lead(3)
    second = scene.produce(numbered(1))
    await scene.turn()
    scene.leaders[2].lose()
    await scene.turn()
    assert code(first) is ErrorCode.request_timed_out
    assert code(second) is ErrorCode.not_leader_or_follower
    assert code(scene.produce(numbered(2))) is ErrorCode.not_leader_or_follower
    assert scene.leaders[3].sent == []
    other_producer = scene.produce(numbered(7, producer=10))
    await scene.turn()
    scene.leaders[3].answer(0)
    assert (await other_producer).error_code == 0


@on_scene()
async def test_a_new_producer_epoch_unblocks_the_lane(scene: Scene) -> None:
    first = scene.produce(numbered(3))
    await scene.turn()
    scene.leaders[2].lose()
    await first
    scene.lead(3)
    assert code(scene.produce(numbered(4))) is ErrorCode.not_leader_or_follower
    bumped = scene.produce(numbered(0, epoch=1))
    await scene.turn()
    scene.leaders[3].answer(0)
    assert (await bumped).error_code == 0


@on_scene()
async def test_a_lane_unblocks_after_a_while_if_the_failed_batch_is_not_resent(scene: Scene) -> None:
    first = scene.produce(numbered(0))
    await scene.turn()
    scene.leaders[2].lose()
    await first
    scene.lead(3)
    while not scene.leaders[3].sent:
        scene.produce(numbered(1))
        await asyncio.sleep(0.05)


@on_scene()
async def test_an_unreachable_leader_results_in_not_leader(scene: Scene) -> None:
    scene.refused = True
    outcome = scene.produce(plain(b"a"))
    assert (await outcome).error_code == ErrorCode.not_leader_or_follower
    assert scene.leaders[2].sent == []


@on_scene()
async def test_the_request_timeout_ends_the_wait(scene: Scene) -> None:
    sent = scene.produce(plain(b"a"), timeout_ms=100)
    await scene.turn()
    scene.lead(3)
    queued = scene.produce(plain(b"b"), timeout_ms=50)
    assert (await queued).error_code == ErrorCode.not_leader_or_follower
    assert (await sent).error_code == ErrorCode.request_timed_out
    scene.leaders[2].answer(0)
    await scene.turn()
    assert scene.leaders[3].sent == []


@on_scene()
async def test_the_leaders_error_is_returned_to_the_client(scene: Scene) -> None:
    for at, error in enumerate((ErrorCode.corrupt_message, ErrorCode.not_enough_replicas, ErrorCode.invalid_record)):
        outcome = scene.produce(plain(b"a"))
        await scene.turn()
        scene.leaders[2].answer(at, error)
        assert (await outcome).error_code == error
    assert scene.metrics.not_leader == 0


@on_scene()
async def test_an_acks_0_batch_is_resent_until_there_is_a_leader(scene: Scene) -> None:
    outcomes = [scene.produce(plain(b"1"), acks=0), scene.produce(plain(b"2"), acks=0)]
    await scene.turn()
    assert [acks for _, acks in scene.leaders[2].sent] == [1]
    scene.leaders[2].answer(0, ErrorCode.not_leader_or_follower)
    scene.lead(-1)
    await asyncio.sleep(0.12)
    scene.lead(3)
    for number in range(2):
        while len(scene.leaders[3].sent) <= number:
            await asyncio.sleep(0.01)
        scene.leaders[3].answer(number)
    assert [batches[0][1] for batches, _ in scene.leaders[3].sent] == [plain(b"1"), plain(b"2")]
    assert [code(outcome) for outcome in await _all(outcomes)] == [ErrorCode.none] * 2
    assert scene.forwarding.in_flight.bytes == 0


@on_scene()
async def test_a_leader_elected_between_two_acks_0_batches_gets_them_in_order(scene: Scene) -> None:
    """Found by the simulator (three-nodes seed 7010): the leader refused batch 1, took batch 2, then took batch 1."""

    leader = scene.leaders[2]
    outcomes = [scene.produce(plain(bytes([number])), acks=0) for number in range(4)]
    await scene.turn()
    assert len(leader.sent) == 1
    leader.answer(0, ErrorCode.not_leader_or_follower)
    while len(leader.sent) < 2:
        await asyncio.sleep(0.01)
    assert len(leader.sent) == 2
    leader.answer(1)
    while len(leader.sent) < 5:
        await asyncio.sleep(0.01)
    # After the leader accepts one batch, the other batches no longer wait for each other.
    assert [batches[0][1] for batches, _ in leader.sent[1:]] == [plain(bytes([number])) for number in range(4)]
    for at in range(2, 5):
        leader.answer(at)
    await _all(outcomes)


@on_scene()
async def test_a_refused_acks_0_batch_is_dropped_if_later_ones_were_accepted(scene: Scene) -> None:
    """Found by the simulator (three-nodes seed 475192710): a lease expired briefly with batches in flight."""

    leader = scene.leaders[2]
    outcomes = [scene.produce(plain(bytes([number])), acks=0) for number in range(8)]
    await scene.turn()
    leader.answer(0)
    await scene.turn()
    await scene.turn()
    assert len(leader.sent) == 8
    # Responses come in any order: a refusal at once, an append when it is durable.
    leader.answer(2, ErrorCode.not_leader_or_follower)
    leader.answer(1)
    await asyncio.sleep(0.05)
    assert len(leader.sent) == 8, "those on their way may be taken: it is not known yet whether it is too late"
    leader.answer(3, ErrorCode.not_leader_or_follower)
    leader.answer(5)
    leader.answer(4, ErrorCode.not_leader_or_follower)
    leader.answer(6, ErrorCode.not_leader_or_follower)
    leader.answer(7, ErrorCode.not_leader_or_follower)
    # No later batch was accepted after the last two, so they are sent again.
    for at in (8, 9):
        while len(leader.sent) <= at:
            await asyncio.sleep(0.01)
        leader.answer(at)
    lost = {2, 3, 4}
    expected = [ErrorCode.not_leader_or_follower if at in lost else ErrorCode.none for at in range(8)]
    assert [code(outcome) for outcome in await _all(outcomes)] == expected
    assert [batches[0][1] for batches, _ in leader.sent[8:]] == [plain(bytes([6])), plain(bytes([7]))]
    assert scene.forwarding.in_flight.bytes == 0


@on_scene(bytes_max=1000)
async def test_reading_from_a_connection_pauses_while_too_many_bytes_are_in_flight(scene: Scene) -> None:
    outcomes = [scene.produce(plain(b"x" * 400)) for _ in range(4)]
    assert scene.client.holds == 1
    await scene.turn()
    for at in range(4):
        scene.leaders[2].answer(at)
    await _all(outcomes)
    await scene.turn()
    assert scene.client.holds == 0


@on_scene()
async def test_batches_from_a_closed_connection_are_still_forwarded(scene: Scene) -> None:
    outcome = scene.produce(plain(b"a"), acks=0)
    for closed in scene.client.closers:
        closed()
    await scene.turn()
    scene.leaders[2].answer(0)
    await outcome
    assert scene.forwarding.in_flight.bytes == 0


@on_scene()
async def test_a_batch_received_during_a_handover_waits_for_the_next_leader(scene: Scene) -> None:
    scene.lead(OWN)
    client = cast(Connection, scene.client)
    assert not scene.forwarding.can_forward(client, scene.topic, 0, -1)
    scene.hosted.hands_over_to = 3
    assert scene.forwarding.can_forward(client, scene.topic, 0, -1)
    outcomes = [scene.produce(plain(b"1")), scene.produce(plain(b"2"))]
    await asyncio.sleep(0.05)
    scene.lead(3)
    while len(scene.leaders[3].sent) < 2:
        await asyncio.sleep(0.01)
    assert [batches[0][1] for batches, _ in scene.leaders[3].sent] == [plain(b"1"), plain(b"2")]
    scene.leaders[3].answer(0)
    scene.leaders[3].answer(1)
    assert [code(outcome) for outcome in await _all(outcomes)] == [ErrorCode.none] * 2
    assert scene.appended_here == []


@on_scene()
async def test_a_request_is_forwarded_only_once_and_not_by_a_stopping_node(scene: Scene) -> None:
    client = cast(Connection, scene.client)
    assert scene.forwarding.can_forward(client, scene.topic, 0, -1)
    scene.client.peer_id = 3
    assert not scene.forwarding.can_forward(client, scene.topic, 0, -1)
    scene.client.peer_id = None
    scene.forwarding.is_leaving = True
    assert not scene.forwarding.can_forward(client, scene.topic, 0, -1)
    assert scene.forwarding.can_forward(client, scene.topic, 0, 0)
    scene.forwarding.is_leaving = False
    scene.forwarding._is_enabled = False
    assert not scene.forwarding.can_forward(client, scene.topic, 0, -1)


async def _all(
    outcomes: list[asyncio.Future[ProducePartitionResponse]],
) -> list[asyncio.Future[ProducePartitionResponse]]:
    await asyncio.wait(outcomes)
    return outcomes
