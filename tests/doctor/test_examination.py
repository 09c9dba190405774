"""The examination over the Kafka protocol alone, which any cluster supports: what it sees, and how long it waits."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from tests.node.cluster_harness import LocalNodes
from tests.node.support_transactions import TransactionalClient, create_topic, write_open
from tests.node.test_any_node import create, produce
from tests.support.eventually import until

from chronik.client.errors import ClientError
from chronik.doctor import Diagnosis
from chronik.doctor import diagnose as diagnose_at
from chronik.doctor.brokers import Brokers
from chronik.wire.errors import ErrorCode, KafkaError


@pytest.fixture(autouse=True)
def any_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers that report no HTTP address, as those of other systems."""

    async def none(self: Brokers) -> dict[int, str]:
        return {}

    monkeypatch.setattr(Brokers, "http_addresses", none)


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


async def diagnose(
    bootstrap: list[tuple[str, int]], topic: str, group: str | None = None, seconds: float = 5
) -> Diagnosis:
    return await diagnose_at(bootstrap, topic, group, seconds, wall_ms=wall_ms)


def bootstrap(nodes: LocalNodes) -> list[tuple[str, int]]:
    return [("127.0.0.1", broker.server.port) for broker in nodes.brokers.values()]


async def test_a_healthy_topic_is_healthy_and_a_note_states_the_missing_sources(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        client = await nodes.client(brokers[0])
        await create(client, "t")
        for partition in range(3):
            await produce(client, partition, b"x")
        diagnosis = await diagnose(bootstrap(nodes)[:1], "t", seconds=1)
        assert diagnosis.verdict == "healthy"
        assert [view.high_watermark for view in diagnosis.partitions] == [1, 1, 1]
        assert all(view.fetch_ms is not None for view in diagnosis.partitions)
        assert any("Kafka protocol alone" in note for note in diagnosis.notes)


async def test_unknown_topics_groups_and_brokers_are_errors(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, offsets_topic_partitions=1) as nodes:
        brokers = await nodes.start_all()
        await create(await nodes.client(brokers[0]), "t")
        # The examination does not wait long for a coordinator.
        await brokers[0].groups.topic.ensure_exists()
        with pytest.raises(KafkaError) as topic:
            await diagnose(bootstrap(nodes), "missing", seconds=1)
        assert topic.value.code is ErrorCode.unknown_topic_or_partition
        with pytest.raises(KafkaError) as group:
            await diagnose(bootstrap(nodes), "t", "missing", seconds=1)
        assert group.value.code is ErrorCode.group_id_not_found
        with pytest.raises(ClientError):
            await diagnose([("127.0.0.1", 1)], "t", seconds=1)


async def test_examination_reports_a_killed_node_without_waiting_for_it(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        await create(await nodes.client(brokers[0]), "t")
        addresses = bootstrap(nodes)
        gone = next(broker for broker in brokers if not broker.is_controller)
        await nodes.kill(gone)
        (one, *_) = nodes.brokers.values()
        await until(
            lambda: all(gone.node_id not in partition.isr for partition in one.image.topics["t"].partitions),
            "it has left every ISR",
        )
        diagnosis = await diagnose(addresses, "t", seconds=2)
        assert diagnosis.verdict == "under-replicated"
        assert {item.node for item in diagnosis.evidence} == {gone.node_id}


async def test_examination_reports_no_leader_if_all_brokers_stop_while_it_runs(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        await create(await nodes.client(brokers[0]), "t")
        loop = brokers[0].runtime.loop
        examining = loop.create_task(diagnose(bootstrap(nodes), "t", seconds=5))
        killing: list[asyncio.Task[None]] = []
        loop.call_later(1.5, lambda: killing.extend(loop.create_task(nodes.kill(broker)) for broker in brokers))
        diagnosis = await examining
        assert diagnosis.verdict == "no-leader"
        assert any("no broker returned metadata" in note for note in diagnosis.notes)


async def test_examination_finds_an_open_and_a_hanging_transaction(tmp_path: Path) -> None:
    alone = {"default_replication_factor": 1, "transaction_state_topic_partitions": 3, "offsets_topic_partitions": 1}
    async with LocalNodes(tmp_path, 1, **alone) as nodes:
        (broker,) = await nodes.start_all()
        await create_topic(nodes, "orders", 3, replicas=1)
        client = TransactionalClient(nodes, "payments")
        assert await client.init() is ErrorCode.none
        assert await client.add(("orders", 0)) is ErrorCode.none
        write_open(broker, "orders", 0, client.producer.producer_id)
        hanging = write_open(broker, "orders", 1, 999, age_ms=60_000)

        def later_ms() -> int:
            return wall_ms() + 15_000

        diagnosis = await diagnose_at(bootstrap(nodes), "orders", seconds=4, wall_ms=later_ms)
        assert diagnosis.verdict == "open-transaction"
        known, unknown = diagnosis.evidence
        assert (known.partition, known.transactional_id) == (0, "payments")
        assert known.numbers["producer_id"] == client.producer.producer_id
        assert (unknown.partition, unknown.numbers["last_stable_offset"]) == (1, hanging)
        assert diagnosis.partitions[2].last_stable_offset == 0
        client.close()
