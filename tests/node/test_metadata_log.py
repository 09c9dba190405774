"""The metadata log: what was answered is durable, in order, and refused before it is written."""

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

from chronik.metadata.commands import AllocateProducerIds, AlterConfigs, Assignment, CreateTopic, DeleteTopic
from chronik.metadata.events import Event, ProducerIdsAllocated, TopicCreated
from chronik.metadata.image import ClusterImage
from chronik.node import metadata_log
from chronik.node.environment import Environment
from chronik.node.metadata_log import LocalMetadataLog
from chronik.node.metadata_store import MetadataStoreError, SqliteMetadataStore
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


class CountingStore(SqliteMetadataStore):
    """Counts its transactions, notes overlapping calls, and fails or waits where a test asks for it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.appended: list[int] = []
        self.failing = False
        self.gate: threading.Event | None = None
        self.inside = 0
        self.overlapped = False

    def append(self, version: int, commands: Sequence[bytes]) -> None:
        self.inside += 1
        self.overlapped |= self.inside > 1
        if self.gate is not None:
            assert self.gate.wait(10)
        if self.failing:
            self.inside -= 1
            raise MetadataStoreError("no space")
        super().append(version, commands)
        self.appended.append(len(commands))
        self.inside -= 1


async def reopened(env: Environment, path: str) -> ClusterImage:
    log = await LocalMetadataLog.open(env, SqliteMetadataStore(path))
    image = log.image
    await log.close()
    return image


def test_what_was_proposed_is_there_after_a_restart(env: Environment, path: str) -> None:
    async def story() -> None:
        log = await LocalMetadataLog.open(env, SqliteMetadataStore(path))
        events = await log.propose(topic("orders"))
        assert isinstance(events[0], TopicCreated)
        await log.propose(AlterConfigs("topic", "orders", {"retention.ms": "5"}))
        image = log.image
        await log.close()
        assert await reopened(env, path) == image

    asyncio.run(story())


def test_an_answered_proposal_survives_a_process_that_never_closes_its_store(env: Environment, path: str) -> None:
    async def story() -> None:
        log = await LocalMetadataLog.open(env, SqliteMetadataStore(path))
        await log.propose(topic("orders"))
        # Another connection sees what a restart after kill -9 would find in the files.
        assert (await reopened(env, path)).topics.keys() == {"orders"}
        await log.close()

    asyncio.run(story())


def test_an_empty_store_beside_logs_is_refused_and_stays_empty(env: Environment, path: str) -> None:
    async def story() -> None:
        for _ in range(2):
            with pytest.raises(MetadataStoreError, match="is empty though there are logs"):
                await LocalMetadataLog.open(env, SqliteMetadataStore(path), may_be_new=False)

    asyncio.run(story())


def test_the_cluster_id_is_made_once_and_looks_like_kafkas(env: Environment, path: str) -> None:
    async def story() -> None:
        first = await reopened(env, path)
        second = await LocalMetadataLog.open(env, SqliteMetadataStore(path))
        assert second.image.cluster_id == first.cluster_id
        assert len(first.cluster_id) == 22
        await second.close()

    asyncio.run(story())


def test_a_store_of_another_cluster_is_refused(env: Environment, path: str) -> None:
    async def story() -> None:
        log = await LocalMetadataLog.open(env, SqliteMetadataStore(path), cluster_id="ours")
        assert log.image.cluster_id == "ours"
        await log.close()
        await (await LocalMetadataLog.open(env, SqliteMetadataStore(path), cluster_id="ours")).close()
        with pytest.raises(MetadataStoreError):
            await LocalMetadataLog.open(env, SqliteMetadataStore(path), cluster_id="theirs")

    asyncio.run(story())


def test_proposals_are_applied_in_order_and_share_transactions(env: Environment, path: str) -> None:
    async def story() -> None:
        store = CountingStore(path)
        log = await LocalMetadataLog.open(env, store)
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

    asyncio.run(story())


def test_a_proposal_sees_those_before_it_that_are_not_yet_durable(env: Environment, path: str) -> None:
    async def story() -> None:
        store = CountingStore(path)
        log = await LocalMetadataLog.open(env, store)
        store.gate = threading.Event()
        first = asyncio.create_task(log.propose(topic("orders", 1)))
        second = asyncio.create_task(log.propose(topic("orders", 2)))
        deletion = asyncio.create_task(
            log.propose(lambda image: DeleteTopic("orders", image.require_topic("orders").id))
        )
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

    asyncio.run(story())


def test_a_refused_proposal_writes_nothing(env: Environment, path: str) -> None:
    async def story() -> None:
        store = CountingStore(path)
        log = await LocalMetadataLog.open(env, store)
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

    asyncio.run(story())


def test_a_failed_write_fails_all_that_waits_and_the_next_proposal_starts_from_what_is_durable(
    env: Environment, path: str
) -> None:
    async def story() -> None:
        store = CountingStore(path)
        log = await LocalMetadataLog.open(env, store)
        before = log.image
        store.failing = True
        outcomes = await asyncio.gather(log.propose(topic("a", 1)), log.propose(topic("b", 2)), return_exceptions=True)
        assert [outcome.code for outcome in outcomes if isinstance(outcome, KafkaError)] == [
            ErrorCode.kafka_storage_error
        ] * 2
        assert log.image is before
        store.failing = False
        await log.propose(topic("a", 3))
        assert log.image.topics.keys() == {"a"}
        await log.close()
        assert (await reopened(env, path)).topics["a"].id == UUID(int=3)

    asyncio.run(story())


def test_a_proposer_that_gives_up_does_not_take_its_command_back(env: Environment, path: str) -> None:
    async def story() -> None:
        store = CountingStore(path)
        log = await LocalMetadataLog.open(env, store)
        store.gate = threading.Event()
        proposal = asyncio.create_task(log.propose(topic("orders")))
        await asyncio.sleep(0)
        proposal.cancel()
        await asyncio.wait([proposal])
        store.gate.set()
        await log.propose(AllocateProducerIds(1, 1))
        assert log.image.topics.keys() == {"orders"}
        await log.close()

    asyncio.run(story())


def test_a_failing_listener_is_told_to_the_proposer_and_stops_nobody_else(env: Environment, path: str) -> None:
    async def story() -> None:
        log = await LocalMetadataLog.open(env, SqliteMetadataStore(path))
        seen: list[Event] = []

        def broken(image: ClusterImage, events: Sequence[Event]) -> None:
            if isinstance(events[0], TopicCreated):
                raise RuntimeError("broken listener")

        log.subscribe(broken)
        log.subscribe(lambda image, events: seen.extend(events))
        with pytest.raises(RuntimeError):
            await log.propose(topic("orders"))
        await log.propose(AllocateProducerIds(1, 1))
        assert len(seen) == 2
        await log.close()

    asyncio.run(story())


def test_a_long_log_is_replaced_by_a_snapshot(env: Environment, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_log, "SNAPSHOT_COMMANDS", 10)

    async def story() -> None:
        log = await LocalMetadataLog.open(env, SqliteMetadataStore(path))
        for number in range(25):
            await log.propose(topic(f"topic-{number}", number))
        image = log.image
        await log.close()
        with sqlite3.connect(path) as connection:
            (commands,) = connection.execute("SELECT count(*) FROM commands").fetchone()
            (snapshots,) = connection.execute("SELECT count(*) FROM snapshot").fetchone()
        connection.close()
        assert commands < 10
        assert snapshots == 1
        again = await LocalMetadataLog.open(env, SqliteMetadataStore(path))
        assert again.image == image
        await again.propose(topic("one-more", 100))
        await again.close()
        assert (await reopened(env, path)).version == image.version + 1

    asyncio.run(story())


def test_a_full_disk_refuses_commands_until_there_is_room_again(env: Environment, path: str) -> None:
    async def story() -> None:
        store = SqliteMetadataStore(path)
        log = await LocalMetadataLog.open(env, store)
        connection = store._open()
        connection.execute("PRAGMA max_page_count = 10")
        large = AlterConfigs("broker", "", {"note": "x" * 100_000})
        with pytest.raises(KafkaError) as raised:
            await log.propose(large)
        assert raised.value.code == ErrorCode.kafka_storage_error
        assert "full" in raised.value.message
        await log.propose(topic("small"))
        connection.execute("PRAGMA max_page_count = 10000")
        await log.propose(large)
        image = log.image
        await log.close()
        assert await reopened(env, path) == image

    asyncio.run(story())


def test_a_closed_log_takes_no_proposals_and_finishes_those_it_took(env: Environment, path: str) -> None:
    async def story() -> None:
        log = await LocalMetadataLog.open(env, SqliteMetadataStore(path))
        proposal = asyncio.create_task(log.propose(topic("orders")))
        await asyncio.sleep(0)
        await log.close()
        await proposal
        with pytest.raises(KafkaError):
            await log.propose(AllocateProducerIds(1, 1))

    asyncio.run(story())


def _overwritten(path: str) -> None:
    Path(path).write_bytes(b"not a database at all" * 500)


def _cut(path: str) -> None:
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[: len(data) // 2])


def _executed(statement: str) -> Callable[[str], None]:
    def run(path: str) -> None:
        connection = sqlite3.connect(path)
        connection.execute(statement)
        connection.commit()
        connection.close()

    return run


@pytest.mark.parametrize(
    "damage",
    [
        _overwritten,
        _cut,
        _executed("UPDATE commands SET command = x'00' WHERE version = 2"),
        _executed("DELETE FROM commands WHERE version = 2"),
        _executed("UPDATE settings SET value = 99"),
    ],
    ids=["overwritten", "cut in half", "changed command", "missing command", "unknown format"],
)
def test_a_damaged_file_is_refused_in_one_line_that_names_it(
    env: Environment, path: str, damage: Callable[[str], None]
) -> None:
    async def story() -> None:
        log = await LocalMetadataLog.open(env, SqliteMetadataStore(path))
        for number in range(200):
            await log.propose(topic(f"topic-{number}", number))
        await log.close()
        damage(path)
        with pytest.raises(MetadataStoreError) as raised:
            await LocalMetadataLog.open(env, SqliteMetadataStore(path))
        assert path in str(raised.value)
        assert "\n" not in str(raised.value)

    asyncio.run(story())


def test_a_folder_that_cannot_be_written_is_said_in_one_line(env: Environment, tmp_path: Path) -> None:
    async def story() -> None:
        with pytest.raises(MetadataStoreError):
            await LocalMetadataLog.open(env, SqliteMetadataStore(str(tmp_path / "missing" / "metadata.db")))

    asyncio.run(story())


def test_a_store_that_is_ahead_of_the_log_is_not_written_over(env: Environment, path: str) -> None:
    async def story() -> None:
        log = await LocalMetadataLog.open(env, SqliteMetadataStore(path))
        other = SqliteMetadataStore(path)
        other.append(log.image.version + 1, [b"command of another writer"])
        other.close()
        with pytest.raises(KafkaError) as raised:
            await log.propose(topic("orders"))
        assert "restart the node" in raised.value.message
        await log.close()

    asyncio.run(story())
