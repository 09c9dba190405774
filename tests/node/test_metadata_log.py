"""The metadata log: acknowledged proposals are durable and ordered; invalid ones are refused before the write."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import pytest
from tests.node import support_raft
from tests.node.support_raft import lone_log

from chronik.metadata.commands import AllocateProducerIds, AlterConfigs, Assignment, CreateTopic, DeleteTopic
from chronik.metadata.events import Event, ProducerIdsAllocated, TopicCreated
from chronik.metadata.image import ClusterImage
from chronik.node.environment import Environment
from chronik.node.membership import metadata_log
from chronik.node.membership.metadata_log import MetadataLog, NotController
from chronik.node.membership.raft_store import SqliteRaftStore
from chronik.raft.ready import RoleChanged, RoleKind
from chronik.raft.state import RaftSettings
from chronik.raft.store import Persist, StoreError
from chronik.storage.disk import RealDisk
from chronik.wire.errors import ErrorCode, KafkaError

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture
def env() -> Iterator[Environment]:
    with ThreadPoolExecutor(4) as executor:
        yield Environment(RealDisk(), Random(1), executor, lambda: 0)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "metadata.db")


def topic(name: str, number: int = 1) -> CreateTopic:
    return CreateTopic(name, UUID(int=number), (Assignment((1,), (1,)),))


def store_at(path: str) -> SqliteRaftStore:
    return SqliteRaftStore(path, lambda: UUID(int=7))


class CountingStore(SqliteRaftStore):
    """Counts its transactions, records overlapping calls, and fails or blocks if a test requests it."""

    def __init__(self, path: str) -> None:
        super().__init__(path, lambda: UUID(int=7))
        self.appended: list[int] = []
        self.failing = False
        self.gate: threading.Event | None = None
        self.inside = 0
        self.overlapped = False

    def persist(self, persist: Persist) -> None:
        self.inside += 1
        self.overlapped |= self.inside > 1
        if self.gate is not None:
            assert self.gate.wait(10)
        if self.failing:
            self.inside -= 1
            raise StoreError("no space")
        super().persist(persist)
        if persist.entries:
            self.appended.append(len(persist.entries))
        self.inside -= 1


async def opened(env: Environment, path: str) -> MetadataLog:
    log = await lone_log(env, store_at(path))
    assert isinstance(log, MetadataLog)
    return log


async def reopened(env: Environment, path: str) -> ClusterImage:
    log = await opened(env, path)
    image = log.image
    await log.close()
    return image


async def test_applied_commands_survive_a_restart(env: Environment, path: str) -> None:
    log = await opened(env, path)
    events = await log.propose(topic("orders"))
    assert isinstance(events[0], TopicCreated)
    await log.propose(AlterConfigs("topic", "orders", {"retention.ms": "5"}))
    image = log.image
    await log.close()
    assert await reopened(env, path) == image


async def test_the_cluster_id_is_created_once_in_kafkas_format(env: Environment, path: str) -> None:
    first = await reopened(env, path)
    second = await opened(env, path)
    assert second.image.cluster_id == first.cluster_id
    assert len(first.cluster_id) == 22
    await second.close()


async def test_proposals_are_applied_in_order_and_share_store_transactions(env: Environment, path: str) -> None:
    store = CountingStore(path)
    log = await lone_log(env, store)
    seen: list[int] = []

    def listener(image: ClusterImage, events: Sequence[Event]) -> None:
        assert image.version == log.image.version
        seen.extend(event.first for event in events if isinstance(event, ProducerIdsAllocated))

    log.subscribe(listener)
    store.appended.clear()
    answers = await asyncio.gather(*(log.propose(AllocateProducerIds(1, 10)) for _ in range(100)))
    firsts = [event.first for events in answers for event in events if isinstance(event, ProducerIdsAllocated)]
    assert firsts == seen == [index * 10 for index in range(100)]
    assert sum(store.appended) == 100
    assert len(store.appended) <= 3
    assert not store.overlapped
    await log.close()


async def test_a_proposal_sees_earlier_proposals_that_are_not_yet_durable(env: Environment, path: str) -> None:
    store = CountingStore(path)
    log = await lone_log(env, store)
    store.gate = threading.Event()
    first = asyncio.create_task(log.propose(topic("orders", 1)))
    second = asyncio.create_task(log.propose(topic("orders", 2)))
    deletion = asyncio.create_task(log.propose(lambda image: DeleteTopic("orders", image.require_topic("orders").id)))
    await asyncio.sleep(0)
    assert log.image.topics == {}
    store.gate.set()
    with pytest.raises(KafkaError) as raised:
        await second
    assert raised.value.code == ErrorCode.topic_already_exists
    await first
    await deletion
    assert log.image.topics == {}
    await log.close()


async def test_a_refused_proposal_writes_nothing(env: Environment, path: str) -> None:
    store = CountingStore(path)
    log = await lone_log(env, store)
    version = log.image.version
    store.appended.clear()

    def refuse(image: ClusterImage) -> CreateTopic:
        raise KafkaError(ErrorCode.invalid_config, "no")

    for proposal in (refuse, DeleteTopic("missing", UUID(int=1))):
        with pytest.raises(KafkaError):
            await log.propose(proposal)
    assert store.appended == []
    assert log.image.version == version
    await log.close()


async def test_a_cancelled_proposer_does_not_withdraw_its_command(env: Environment, path: str) -> None:
    store = CountingStore(path)
    log = await lone_log(env, store)
    store.gate = threading.Event()
    proposal = asyncio.create_task(log.propose(topic("orders")))
    await asyncio.sleep(0)
    proposal.cancel()
    await asyncio.wait([proposal])
    store.gate.set()
    await log.propose(AllocateProducerIds(1, 1))
    assert log.image.topics.keys() == {"orders"}
    await log.close()


async def test_a_long_log_is_replaced_by_a_snapshot(
    env: Environment, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata_log, "SNAPSHOT_COMMANDS", 10)
    monkeypatch.setattr(support_raft, "SETTINGS", RaftSettings(trailing_entries=5))

    log = await opened(env, path)
    for number in range(25):
        await log.propose(topic(f"topic-{number}", number))
    image = log.image
    await log.close()
    with sqlite3.connect(path) as connection:
        (commands,) = connection.execute("SELECT count(*) FROM entries").fetchone()
        (snapshots,) = connection.execute("SELECT count(*) FROM snapshot").fetchone()
    connection.close()
    assert commands <= 2 * 10
    assert snapshots == 1
    again = await opened(env, path)
    assert again.image == image
    await again.propose(topic("one-more", 100))
    await again.close()
    assert (await reopened(env, path)).version == image.version + 1


async def test_a_closed_log_refuses_new_proposals_and_finishes_pending_ones(env: Environment, path: str) -> None:
    log = await opened(env, path)
    proposal = asyncio.create_task(log.propose(topic("orders")))
    await asyncio.sleep(0)
    await log.close()
    await proposal
    with pytest.raises(KafkaError):
        await log.propose(AllocateProducerIds(1, 1))


async def test_a_failed_write_fails_waiting_proposals_and_is_retried(env: Environment, path: str) -> None:
    store = CountingStore(path)
    log = await lone_log(env, store)
    before = log.image
    store.failing = True
    outcomes = await asyncio.gather(log.propose(topic("a", 1)), log.propose(topic("b", 2)), return_exceptions=True)
    assert [outcome.code for outcome in outcomes if isinstance(outcome, KafkaError)] == [
        ErrorCode.kafka_storage_error
    ] * 2
    assert log.image is before
    with pytest.raises(KafkaError) as raised:
        await log.propose(topic("c", 3))
    assert raised.value.code == ErrorCode.kafka_storage_error
    store.failing = False
    await asyncio.wait_for(log.applied(before.version + 2), 10)
    await log.propose(topic("c", 4))
    await log.close()
    assert list((await reopened(env, path)).topics) == ["a", "b", "c"]


async def test_a_failing_listener_affects_neither_the_proposer_nor_other_listeners(env: Environment, path: str) -> None:
    log = await opened(env, path)
    seen: list[Event] = []

    def broken(image: ClusterImage, events: Sequence[Event]) -> None:
        raise RuntimeError("broken listener")

    log.subscribe(broken)
    log.subscribe(lambda image, events: seen.extend(events))
    await log.propose(topic("orders"))
    await log.propose(AllocateProducerIds(1, 1))
    assert len(seen) == 2
    await log.close()


async def test_a_wait_for_a_version_ends_when_it_is_applied(env: Environment, path: str) -> None:
    log = await opened(env, path)
    waiting = asyncio.create_task(log.applied(log.version + 2))
    await log.propose(AllocateProducerIds(1, 1))
    assert not waiting.done()
    await log.propose(AllocateProducerIds(1, 1))
    await asyncio.wait_for(waiting, 10)
    await log.applied(log.version)
    await log.close()


async def test_a_command_of_a_newer_version_stops_the_node_instead_of_being_skipped(
    env: Environment, path: str
) -> None:
    fatal: list[Exception] = []
    log = await lone_log(env, store_at(path), fatal.append)
    version = log.version
    log._raft.propose(b"\x81\xa4type\xabfrom_the_future")
    async with asyncio.timeout(10):
        while not fatal:
            await asyncio.sleep(0.01)
    assert "newer version" in str(fatal[0])
    assert log.version == version
    await log.close()


async def test_a_follower_refuses_proposals_and_names_the_controller(env: Environment, path: str) -> None:
    log = await opened(env, path)
    log._raft_event(RoleChanged(RoleKind.FOLLOWER, 9, 2))
    with pytest.raises(NotController):
        await log.propose(topic("orders"))
    await log.close()
