"""The marker sender: requests to leaders on other nodes, repetition, and markers that become void."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from chronik.client.errors import ConnectionLost
from chronik.metadata.apply import apply
from chronik.metadata.commands import Assignment, ChangePartition, CreateTopic, DeleteTopic, RegisterBroker
from chronik.metadata.image import ClusterImage
from chronik.node.coordinators import markers
from chronik.node.coordinators.markers import MarkerSender, MarkerWriter
from chronik.observe.logging import make_logger
from chronik.transactions.actions import WriteMarkers
from chronik.transactions.transaction import TopicPartition
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode
from chronik.wire.messages import read_request, read_response, write_request, write_response

DEADLINE_S = 10.0
HERE, THERE, ELSEWHERE = 1, 2, 3
TOPIC_ID = UUID(int=9)


class Sender:
    """A sender on node 1, with a topic of three partitions, led by nodes 1, 2 and 3. Records each request."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.image = ClusterImage()
        for node_id in (HERE, THERE, ELSEWHERE):
            self._apply(RegisterBroker(node_id, UUID(int=node_id), "localhost", 9092 + node_id))
        self.create(TOPIC_ID)
        self.lines: list[str] = []
        self.requests: list[tuple[int, Any]] = []
        self.errors: dict[TopicPartition, list[ErrorCode]] = {}
        self.losses: list[int] = []
        """Nodes that lose the connection at their next request."""
        self.allowed = asyncio.Event()
        self.allowed.set()
        self.written: list[tuple[str, TopicPartition]] = []
        self.appended: list[TopicPartition] = []
        fake = cast(Any, self)
        runtime = cast(Any, SimpleNamespace(loop=loop, node_id=HERE, log=make_logger(self.lines.append, lambda: 0)))
        writer = MarkerWriter(runtime, fake, lambda partition: True, lambda *marker: None)
        self.sender = MarkerSender(runtime, fake, fake, writer, self._on_written)

    def create(self, topic_id: UUID) -> None:
        replicas = [tuple(dict.fromkeys((each, HERE, THERE))) for each in (HERE, THERE, ELSEWHERE)]
        self._apply(CreateTopic("orders", topic_id, tuple(Assignment(each, each) for each in replicas)))

    def _apply(self, command: Any) -> None:
        self.image, _ = apply(self.image, command)

    def _on_written(self, action: WriteMarkers, partition: TopicPartition) -> None:
        self.written.append((action.transactional_id, partition))

    async def append_marker(self, topic: str, index: int, marker: Any, timeout_s: float) -> int:
        await self.allowed.wait()
        self.appended.append((topic, index))
        return 0

    async def connection(self, node_id: int, purpose: str) -> Any:
        async def call(key: ApiKey, values: Any, *, timeout_s: float, at_most: int) -> Any:
            request = read_request(key, at_most, write_request(key, at_most, values))
            self.requests.append((node_id, request))
            await self.allowed.wait()
            if node_id in self.losses:
                self.losses.remove(node_id)
                raise ConnectionLost("the node is gone")
            return read_response(key, at_most, write_response(key, at_most, self._answer(request)))

        return SimpleNamespace(call=call)

    def _answer(self, request: Any) -> dict[str, Any]:
        def error(topic: str, index: int) -> ErrorCode:
            errors = self.errors.get((topic, index))
            return errors.pop(0) if errors else ErrorCode.none

        return {
            "markers": [
                {
                    "producer_id": marker.producer_id,
                    "topics": [
                        {
                            "name": topic.name,
                            "partitions": [
                                {"partition_index": index, "error_code": error(topic.name, index)}
                                for index in topic.partition_indexes
                            ],
                        }
                        for topic in marker.topics
                    ],
                }
                for marker in request.markers
            ]
        }

    def send(self, name: str, *indexes: int, producer_id: int = 7, epoch: int = 0, partition: int = 0) -> None:
        partitions = tuple(("orders", index) for index in indexes)
        self.sender.send(WriteMarkers(name, partition, 5, producer_id, epoch, True, partitions))

    def lead(self, index: int, node_id: int) -> None:
        known = self.image.topics["orders"].partitions[index]
        self._apply(ChangePartition(TOPIC_ID, index, known.partition_epoch, node_id, known.isr))

    def delete(self) -> None:
        self._apply(DeleteTopic("orders", TOPIC_ID))

    async def until_written(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.written) < count:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def running() -> AsyncIterator[Sender]:
    async with asyncio.timeout(DEADLINE_S):
        scene = Sender()
        yield scene
        scene.sender.stop()


async def test_markers_of_one_turn_share_a_request_for_each_leader() -> None:
    async with running() as scene:
        scene.send("one", 0, 1, 2, producer_id=1)
        scene.send("two", 1, producer_id=2)
        await scene.until_written(4)
        assert scene.appended == [("orders", 0)], "its own partition needs no request"
        assert sorted(node_id for node_id, _ in scene.requests) == [THERE, ELSEWHERE]
        (request,) = (request for node_id, request in scene.requests if node_id == THERE)
        found = [
            (marker.producer_id, marker.producer_epoch, marker.transaction_result, marker.coordinator_epoch)
            for marker in request.markers
        ]
        assert found == [(1, 0, True, 5), (2, 0, True, 5)]
        assert scene.sender.pending_count() == 0


async def test_a_request_has_one_marker_of_each_producer() -> None:
    """The response names producers only, so two markers of one producer could not be told apart."""
    async with running() as scene:
        scene.send("one", 1, producer_id=1, epoch=0)
        scene.send("one", 1, producer_id=1, epoch=1)
        await scene.until_written(2)
        assert [[marker.producer_epoch for marker in request.markers] for _, request in scene.requests] == [[0], [1]]


@pytest.mark.parametrize(
    "error",
    [
        ErrorCode.not_leader_or_follower,
        ErrorCode.not_enough_replicas,
        ErrorCode.request_timed_out,
        ErrorCode.kafka_storage_error,
        ErrorCode.transaction_coordinator_fenced,
        ErrorCode.unknown_topic_or_partition,
    ],
)
async def test_marker_is_repeated_until_it_is_written(error: ErrorCode) -> None:
    async with running() as scene:
        scene.errors[("orders", 1)] = [error, error]
        scene.send("one", 1, 2)
        await scene.until_written(2)
        sent_to = [node_id for node_id, _ in scene.requests]
        assert (sent_to.count(THERE), sent_to.count(ELSEWHERE)) == (3, 1), "only the failed one is repeated"
        assert sorted(scene.written) == [("one", ("orders", 1)), ("one", ("orders", 2))]


async def test_marker_of_a_lost_connection_goes_to_the_new_leader() -> None:
    async with running() as scene:
        scene.losses.append(THERE)
        scene.allowed.clear()
        scene.send("one", 1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        scene.lead(1, HERE)
        scene.allowed.set()
        await scene.until_written(1)
        assert scene.appended == [("orders", 1)]
        assert [node_id for node_id, _ in scene.requests] == [THERE]


async def test_markers_that_wait_for_a_busy_node_go_to_the_new_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markers, "REQUESTS_MAX", 1)
    async with running() as scene:
        scene.allowed.clear()
        scene.send("one", 1, producer_id=1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        scene.send("two", 1, producer_id=2)
        await asyncio.sleep(0)
        assert len(scene.requests) == 1
        scene.lead(1, HERE)
        scene.allowed.set()
        await scene.until_written(2)
        assert len(scene.requests) == 1 and scene.appended == [("orders", 1)]


async def test_marker_of_a_deleted_topic_counts_as_written() -> None:
    async with running() as scene:
        scene.errors[("orders", 1)] = [ErrorCode.unknown_topic_or_partition]
        scene.allowed.clear()
        scene.send("one", 1)
        await asyncio.sleep(0)
        scene.delete()
        scene.allowed.set()
        await scene.until_written(1)
        scene.send("two", 2)
        assert len(scene.written) == 1, "not before the coordinator has carried out its other actions"
        await scene.until_written(2)


async def test_marker_goes_to_a_topic_that_was_created_again() -> None:
    """Its leader may have verified a batch of the transaction before the end was decided, and append it later."""
    async with running() as scene:
        scene.errors[("orders", 1)] = [ErrorCode.unknown_topic_or_partition]
        scene.allowed.clear()
        scene.send("one", 1)
        await asyncio.sleep(0)
        scene.delete()
        scene.create(UUID(int=10))
        scene.allowed.set()
        await scene.until_written(1)
        assert [node_id for node_id, _ in scene.requests] == [THERE, THERE]


async def test_marker_is_not_needed_if_its_partition_knows_a_later_epoch() -> None:
    """Only a loss of the coordinator's newest records leads there. To repeat it would block the id forever."""
    async with running() as scene:
        scene.errors[("orders", 1)] = [ErrorCode.invalid_producer_epoch]
        scene.send("one", 1, 2)
        await scene.until_written(2)
        assert sorted(node_id for node_id, _ in scene.requests) == [THERE, ELSEWHERE], "it is not repeated"
        (line,) = scene.lines
        assert "marker_refused" in line and "orders" in line


async def test_markers_are_void_after_their_coordinator_was_unloaded() -> None:
    async with running() as scene:
        scene.errors[("orders", 1)] = [ErrorCode.not_enough_replicas] * 50
        scene.send("one", 1, partition=3)
        scene.send("other", 2, partition=4)
        await scene.until_written(1)
        scene.sender.unloaded(3)
        sent_count = len(scene.requests)
        await asyncio.sleep(0.1)
        assert len(scene.requests) <= sent_count + 1, "a request that was on its way"
        assert scene.written == [("other", ("orders", 2))]
        assert scene.sender.pending_count() == 0


async def test_a_slow_partition_does_not_delay_markers_of_other_transactions() -> None:
    async with running() as scene:
        scene.allowed.clear()
        scene.send("slow", 1, producer_id=1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        scene.send("next", 1, producer_id=2)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(scene.requests) == 2
        scene.allowed.set()
        await scene.until_written(2)
