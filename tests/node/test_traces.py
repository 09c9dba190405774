"""Traced topics record their fetches, produces and watermarks; other topics record nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.node.cluster_harness import LocalNodes
from tests.node.test_any_node import FETCH_VERSION, create, leader_of, produce
from tests.support.eventually import until

from chronik.client.connection import Connection
from chronik.metadata.image import TRACES_TOPIC
from chronik.node import trace_topic
from chronik.node.broker import Broker
from chronik.node.trace_topic import TraceTopic
from chronik.observe import watermarks
from chronik.observe.traces import (
    DataAvailable,
    FetchServed,
    FetchStarted,
    IsrChanged,
    NoData,
    ProduceAcknowledged,
    ProduceAppended,
    ProduceForwarded,
    ProduceRejected,
    Trace,
    WatermarkSeen,
    WatermarkUpdated,
    decode_trace,
)
from chronik.wire.api import ApiKey
from chronik.wire.batch import decode_batch, read_batch_header
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.fetch import FetchPartition, FetchRequest, FetchTopic, read_fetch_response, write_fetch_request

SET = 0
TOPIC_RESOURCE, BROKER_RESOURCE = 2, 4


async def set_config(client: Connection, topic: str, name: str, value: str) -> None:
    change = {"name": name, "config_operation": SET, "value": value}
    resource = {"resource_type": TOPIC_RESOURCE, "resource_name": topic, "configs": [change]}
    answer = await client.call(ApiKey.INCREMENTAL_ALTER_CONFIGS, {"resources": [resource], "validate_only": False})
    assert answer.responses[0].error_code is ErrorCode.none


async def traced(nodes: LocalNodes, is_on: bool = True) -> list[Broker]:
    """Create topic `t` and wait until every node knows whether it is traced."""
    brokers = list(nodes.brokers.values()) or await nodes.start_all()
    client = await nodes.client(brokers[0])
    if "t" not in brokers[0].image.topics:
        assert (await create(client, "t")).error_code is ErrorCode.none
    await set_config(client, "t", "chronik.trace", str(is_on).lower())
    await until(lambda: all(("t" in broker.traces.topics) is is_on for broker in brokers), "every node knows")
    return brokers


async def fetch(client: Connection, partition: int, offset: int, max_wait_ms: int = 0) -> Any:
    wanted = FetchTopic("t", None, [FetchPartition(partition, -1, offset, -1, -1, 1 << 20)])
    request = FetchRequest(topics=[wanted], max_wait_ms=max_wait_ms, min_bytes=1)
    body = await client.request(ApiKey.FETCH, FETCH_VERSION, write_fetch_request(FETCH_VERSION, request))
    return read_fetch_response(FETCH_VERSION, body).topics[0][2][0]


def events(broker: Broker, *kinds: type[Trace]) -> Sequence[Any]:
    return [event for event in broker.traces.read(0, 1000)[0] if not kinds or isinstance(event, kinds)]


async def test_events_are_traced_only_while_a_topic_enables_tracing(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        await traced(nodes)
        brokers = await traced(nodes, is_on=False)
        before = [broker.traces.last_n for broker in brokers]
        for partition in range(3):
            await produce(await nodes.client(brokers[0]), partition, b"x")
            await fetch(await nodes.client(leader_of(nodes, partition)), partition, 0)
        assert [broker.traces.last_n for broker in brokers] == before


async def test_a_produce_is_traced_from_append_to_acknowledgement(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        await traced(nodes)
        leader = leader_of(nodes, 0)
        assert (await produce(await nodes.client(leader), 0, b"x")).error_code == 0
        (appended,) = events(leader, ProduceAppended)
        (acknowledged,) = events(leader, ProduceAcknowledged)
        (rose,) = events(leader, WatermarkUpdated)
        assert (appended.client_id, appended.base_offset, appended.last_offset, appended.acks) == ("harness", 0, 0, -1)
        assert appended.bytes > 60
        assert (rose.old, rose.new, rose.acks) == (0, 1, -1)
        assert rose.why in ("replica-fetch", "sync"), "whichever replica was the last to have it"
        assert (acknowledged.base_offset, acknowledged.last_offset, acknowledged.acks) == (0, 0, -1)
        assert acknowledged.elapsed_ms > 0
        assert appended.n < rose.n < acknowledged.n
        followers = nodes.others(leader)
        await until(lambda: all(events(follower, WatermarkUpdated) for follower in followers), "followers are told")
        for follower in followers:
            (told,) = events(follower, WatermarkUpdated)
            assert (told.old, told.new, told.acks, told.why, told.node) == (0, 1, None, "leader", follower.node_id)


async def test_an_acks_1_produce_is_traced_with_its_watermark_and_acknowledgement(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        await traced(nodes)
        leader = leader_of(nodes, 0)
        await produce(await nodes.client(leader), 0, b"x", acks=1)
        await until(lambda: events(leader, WatermarkUpdated))
        assert [event.acks for event in events(leader, WatermarkUpdated)] == [1]
        assert [event.acks for event in events(leader, ProduceAcknowledged)] == [1]


async def test_a_fetch_is_traced_from_its_start_through_its_wait_to_its_response(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        await traced(nodes)
        leader = leader_of(nodes, 0)
        waiting = asyncio.create_task(fetch(await nodes.client(leader), 0, 0, max_wait_ms=10_000))
        await until(lambda: events(leader, NoData))
        await produce(await nodes.client(leader), 0, b"x")
        assert len((await waiting).records)
        (started,) = events(leader, FetchStarted)
        assert (started.client_id, started.offset, started.max_wait_ms, started.min_bytes) == ("harness", 0, 10_000, 1)
        seen = events(leader, WatermarkSeen)
        assert [(event.high_watermark, event.log_end_offset) for event in seen] == [(0, 0), (1, 1)]
        (arrived,) = events(leader, DataAvailable)
        (served,) = events(leader, FetchServed)
        assert served.bytes == arrived.bytes > 60
        assert (served.offset, served.high_watermark, served.error) == (0, 1, None)
        assert {started.fetch, arrived.fetch, served.fetch, *(event.fetch for event in seen)} == {started.fetch}
        await fetch(await nodes.client(leader), 0, 0)
        assert len(events(leader, DataAvailable)) == 2, "data that is there at once is available too"
        assert len(events(leader, NoData)) == 1


async def test_forwarded_and_rejected_requests_at_the_wrong_node_are_traced(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        await traced(nodes)
        leader = leader_of(nodes, 0)
        other = nodes.others(leader)[0]
        client = await nodes.client(other)
        assert (await produce(client, 0, b"x")).error_code == 0
        (forwarded,) = events(other, ProduceForwarded)
        assert (forwarded.to, forwarded.client_id) == (leader.node_id, "harness")
        assert events(leader, ProduceAppended)
        assert (await fetch(client, 0, 0)).error_code == ErrorCode.not_leader_or_follower
        (served,) = events(other, FetchServed)
        assert (served.error, served.bytes) == ("NOT_LEADER_OR_FOLLOWER", 0)
        assert (await produce(client, 99, b"x")).error_code
        (rejected,) = events(other, ProduceRejected)
        assert (rejected.partition, rejected.error) == (99, "UNKNOWN_TOPIC_OR_PARTITION")


async def test_an_isr_shrink_and_the_produce_that_it_rejects_are_traced(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        brokers = await traced(nodes)
        await set_config(await nodes.client(brokers[0]), "t", "min.insync.replicas", "3")
        leader = leader_of(nodes, 0)
        gone = nodes.others(leader)[0]
        await nodes.kill(gone)
        await until(lambda: events(leader, IsrChanged), "the ISR has shrunk")
        changed = next(event for event in events(leader, IsrChanged) if event.partition == 0)
        assert gone.node_id in changed.old
        assert gone.node_id not in changed.new
        assert changed.leader == leader.node_id
        refused = await produce(await nodes.client(leader), 0, b"x")
        assert refused.error_code == ErrorCode.not_enough_replicas
        (rejected,) = events(leader, ProduceRejected)
        assert (rejected.error, rejected.partition) == ("NOT_ENOUGH_REPLICAS", 0)


async def test_internal_topics_are_never_traced(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, topic_defaults={"chronik.trace": True}) as nodes:
        broker = (await nodes.start_all())[0]
        await create(await nodes.client(broker), "__mine", 1)
        assert (await create(await nodes.client(broker), "mine", 1)).error_code is ErrorCode.none
        assert broker.traces.topics == {"mine"}


async def test_clients_find_each_nodes_http_address_over_the_kafka_protocol(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, count=1) as nodes:
        (broker,) = await nodes.start_all()
        assert broker.image.brokers[1].http == "127.0.0.1:6092"
        client = await nodes.client(broker)
        resource = {"resource_type": BROKER_RESOURCE, "resource_name": "1", "configuration_keys": ["listen.http"]}
        answer = await client.call(ApiKey.DESCRIBE_CONFIGS, {"resources": [resource]})
        assert [config.value for config in answer.results[0].configs] == ["127.0.0.1:6092"]


async def test_a_stuck_watermark_is_logged_once_and_its_propagation_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watermarks, "CALM_INTERVAL_S", 0.05)
    monkeypatch.setattr(watermarks, "ALERT_INTERVAL_S", 0.05)

    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        client = await nodes.client(brokers[0])
        await create(client, "t")
        await set_config(client, "t", "min.insync.replicas", "3")
        leader = leader_of(nodes, 0)
        producer = await nodes.client(leader)
        await produce(producer, 0, b"x")
        await until(lambda: leader.metrics.watermark_propagation.count, "the followers were told")
        await nodes.kill(nodes.others(leader)[0])
        for _ in range(11):
            await produce(producer, 0, b"x", acks=1)
        (line,) = await until(lambda: nodes.events(leader.node_id, "watermark_lag"), "it is logged")
        assert (line["topic"], line["partition"], line["high_watermark"]) == ("t", 0, 1)
        assert line["lag"] == line["log_end_offset"] - 1 > 10
        text = leader.metrics.exposition().decode()
        assert 'chronik_watermark_lag{partition="0",topic="t"} 11.0' in text
        await until(lambda: leader.watermarks.monitor.age_s("t", 0) > 0.1)
        assert len(nodes.events(leader.node_id, "watermark_lag")) == 1


def records_of(broker: Broker) -> list[tuple[bytes | None, Trace]]:
    """Return the records of `__chronik_traces` from its leader's log."""
    hosted = broker.partition(TRACES_TOPIC, 0)
    if hosted is None or hosted.leader is None:
        return []
    found: list[tuple[bytes | None, Trace]] = []
    offset = 0
    while offset < hosted.log_end_offset:
        data = hosted.log.read_job(offset, 1 << 20, hosted.log_end_offset, min_one_batch=True)()
        at = 0
        while at < len(data):
            found += [(record.key, decode_trace(record.value or b"")) for record in decode_batch(data, at)]
            header = read_batch_header(data, at)
            at += header.size_bytes
            offset = header.next_offset
    return found


async def test_the_traces_topic_exists_only_with_tracing_and_gets_events_of_every_node(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        await create(await nodes.client(brokers[0]), "t")
        await produce(await nodes.client(brokers[0]), 0, b"x")
        assert TRACES_TOPIC not in brokers[0].image.topics
        await traced(nodes)
        for partition in range(3):
            await produce(await nodes.client(leader_of(nodes, partition)), partition, b"x")

        def all_arrived() -> bool:
            arrived = {(key, event.n) for broker in brokers for key, event in records_of(broker)}
            return arrived == {
                (str(broker.node_id).encode(), event.n) for broker in brokers for event in events(broker)
            }

        await until(all_arrived, "all events are in the topic")
        topic = brokers[0].image.topics[TRACES_TOPIC]
        assert [len(partition.replicas) for partition in topic.partitions] == [3]
        assert topic.configs["retention.ms"] == "3600000"
        assert sum(broker.metrics.traces_dropped for broker in brokers) == 0


async def test_events_that_miss_the_traces_topic_are_counted_and_stay_in_the_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_topic, "PAUSE_S", 0.01)

    async def refused(self: TraceTopic, batch: bytes) -> None:
        raise KafkaError(ErrorCode.leader_not_available, "nobody leads")

    monkeypatch.setattr(TraceTopic, "_produce", refused)

    async with LocalNodes(tmp_path) as nodes:
        await traced(nodes)
        leader = leader_of(nodes, 0)
        await produce(await nodes.client(leader), 0, b"x")
        await until(lambda: leader.metrics.traces_dropped, "they are given up")
        assert leader.metrics.traces_dropped <= len(events(leader))
        assert events(leader, ProduceAppended)
        (line,) = nodes.events(leader.node_id, "traces_dropped")
        assert "nobody leads" in line["reason"]
