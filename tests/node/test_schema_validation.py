"""Topics with `confluent.value.schema.validation` take only records whose schema id the registry has."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.node.cluster_harness import LocalNodes
from tests.node.test_any_node import leader_of, produce, produce_whole, values_of

from chronik.client.connection import Connection
from chronik.metadata.image import SCHEMAS_TOPIC
from chronik.node.broker import Broker
from chronik.schemas.commands import Command
from chronik.schemas.errors import Code, Refused
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

VALIDATION = "confluent.value.schema.validation"


def value(schema_id: int, content: bytes = b"x") -> bytes:
    return b"\0" + schema_id.to_bytes(4, "big") + content


async def validating_topic(nodes: LocalNodes, client: Connection) -> None:
    configs = [{"name": VALIDATION, "value": "true"}]
    topic = {"name": "t", "num_partitions": 3, "replication_factor": 3, "assignments": [], "configs": configs}
    answer = await client.call(ApiKey.CREATE_TOPICS, {"topics": [topic], "timeout": 10_000, "validate_only": False})
    assert answer.topics[0].error_code == ErrorCode.none


async def register(broker: Broker, name: str, subject: str = "t-value") -> int:
    schema = f'{{"type":"fixed","name":"{name}","size":1}}'
    await broker.schemas.submit(Command("set_config", subject, {"body": {"compatibility": "NONE"}}))
    answer = await broker.schemas.submit(Command("register", subject, {"body": {"schema": schema}}))
    return int(answer["id"])


async def test_each_node_takes_known_ids_and_refuses_other_records(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        clients = [await nodes.client(broker) for broker in brokers]
        await validating_topic(nodes, clients[0])
        known = await register(brokers[0], "A")
        other_subject = await register(brokers[0], "B", "u-value")
        # No node has read the registry for its partition yet, and two of three clients are not at the leader.
        for client in clients:
            answer = await produce(client, 0, value(known))
            assert (answer.error_code, answer.base_offset) == (0, clients.index(client))
        for client in clients:
            for bad, reason in (
                (value(other_subject), f"schema id {other_subject}"),
                (value(999), "schema id 999"),
                (b"plain", "zero byte"),
                (b"\0\0", "zero byte"),
            ):
                refused = await produce(client, 0, bad)
                assert ErrorCode(refused.error_code) is ErrorCode.invalid_record and reason in str(
                    refused.error_message
                )
                assert [number for number, _ in refused.record_errors] == [0]
        assert await values_of(nodes, 0) == [value(known)] * 3
        # A schema that is registered at one node is known at once to the leader of any partition.
        for number in range(3):
            fresh = await register(brokers[number], f"New{number}")
            answers = await produce_whole(clients[number - 1], {index: value(fresh) for index in range(3)})
            assert [each.error_code for each in answers.topics[0][2]] == [0, 0, 0]


async def test_batches_that_wait_for_the_registry_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        client = await nodes.client(brokers[0])
        await validating_topic(nodes, client)
        old = await register(brokers[0], "A")
        # The leader of the registry's topic has each registration at once, so take the leader of another partition.
        registrar = brokers[0].image.require_topic(SCHEMAS_TOPIC).partitions[0].leader
        index = next(each for each in range(3) if leader_of(nodes, each).node_id != registrar)
        leader = leader_of(nodes, index)
        direct = await nodes.client(leader)
        assert (await produce(direct, index, value(old))).error_code == 0
        registry, is_held = leader.schemas, asyncio.Event()
        read = registry.refresh

        async def refresh() -> None:
            await is_held.wait()
            await read()

        monkeypatch.setattr(registry, "refresh", refresh)
        fresh = await register(nodes.brokers[registrar], "B")
        # The leader has not read the new schema: its batch waits, and the later ones with it, whatever ids they have.
        contents = [value(fresh, b"1"), value(old, b"2"), value(999), value(old, b"3")]
        sent = [asyncio.ensure_future(produce(direct, index, each)) for each in contents]
        assert (await produce(direct, (index + 1) % 3, value(old))).error_code == 0
        assert not any(each.done() for each in sent)
        is_held.set()
        answers = await asyncio.gather(*sent)
        assert [ErrorCode(each.error_code).name for each in answers] == ["none", "none", "invalid_record", "none"]
        assert await values_of(nodes, index) == [value(old), value(fresh, b"1"), value(old, b"2"), value(old, b"3")]


async def test_an_unreachable_registry_is_a_retriable_error_and_known_ids_still_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        await validating_topic(nodes, await nodes.client(brokers[0]))
        known = await register(brokers[0], "A")
        leader = leader_of(nodes, 0)
        client = await nodes.client(leader)
        assert (await produce(client, 0, value(known))).error_code == 0

        async def unreachable() -> None:
            raise Refused(Code.UNKNOWN_LEADER, f"the leader of {SCHEMAS_TOPIC} did not answer")

        monkeypatch.setattr(leader.schemas, "catch_up", unreachable)
        refused = await produce(client, 0, value(999))
        assert ErrorCode(refused.error_code) is ErrorCode.not_enough_replicas
        assert (await produce(client, 0, value(known))).error_code == 0
