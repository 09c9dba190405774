"""A cluster: leaders, coordinators, retries, deadlines."""

from collections.abc import Mapping
from typing import Any

import pytest
from tests.client.fake_broker import FakeBroker, metadata

from chronik.client.cluster import Cluster
from chronik.client.errors import Unreachable
from chronik.client.groups import Groups, read_assignment
from chronik.client.topics import LATEST, Topics
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError


def offsets(request: Any, offset: int, error: int = 0) -> Mapping[str, Any]:
    return {
        "topics": [
            {
                "name": topic.name,
                "partitions": [
                    {"partition_index": partition.partition_index, "error_code": error, "offset": offset}
                    for partition in topic.partitions
                ],
            }
            for topic in request.topics
        ]
    }


async def test_offsets_are_requested_from_the_leader_of_each_partition() -> None:
    async with FakeBroker(node_id=1) as one, FakeBroker(node_id=2) as two:
        for broker in (one, two):
            broker.handlers[ApiKey.METADATA] = lambda _: metadata(one, two, topics={"t": [1, 2, 1]})
        one.handlers[ApiKey.LIST_OFFSETS] = lambda request: offsets(request, 10)
        two.handlers[ApiKey.LIST_OFFSETS] = lambda request: offsets(request, 20)
        async with Cluster([one.address]) as cluster:
            found = await Topics(cluster).offsets("t", LATEST)
        assert {partition: listed.offset for partition, listed in found.items()} == {0: 10, 1: 20, 2: 10}


async def test_the_client_finds_the_new_leader_after_a_leader_change() -> None:
    async with FakeBroker(node_id=1) as one, FakeBroker(node_id=2) as two:
        leader = 1

        def moved(request: Any) -> Mapping[str, Any]:
            nonlocal leader
            leader = 2
            return offsets(request, -1, ErrorCode.not_leader_or_follower)

        one.handlers[ApiKey.METADATA] = lambda _: metadata(one, two, topics={"t": [leader]})
        one.handlers[ApiKey.LIST_OFFSETS] = moved
        two.handlers[ApiKey.METADATA] = one.handlers[ApiKey.METADATA]
        two.handlers[ApiKey.LIST_OFFSETS] = lambda request: offsets(request, 5)
        async with Cluster([one.address]) as cluster:
            found = await Topics(cluster).offsets("t", LATEST)
        assert found[0].offset == 5


async def test_the_client_waits_for_a_partition_leader_until_the_deadline() -> None:
    async with FakeBroker() as broker:
        answers = iter([[-1], [-1], [1]])
        broker.handlers[ApiKey.METADATA] = lambda _: metadata(broker, topics={"t": next(answers, [1])})
        async with Cluster([broker.address]) as cluster:
            assert await cluster.leaders("t") == {0: 1}
        broker.handlers[ApiKey.METADATA] = lambda _: metadata(broker, topics={"t": [-1]})
        async with Cluster([broker.address], timeout_s=0.3) as cluster:
            with pytest.raises(KafkaError, match="have no leader"):
                await cluster.leaders("t")


async def test_a_missing_topic_raises_an_error_without_retries() -> None:
    async with FakeBroker() as broker:
        broker.handlers[ApiKey.METADATA] = lambda _: metadata(broker)
        async with Cluster([broker.address], timeout_s=60) as cluster:
            with pytest.raises(KafkaError, match="topic t does not exist"):
                await Topics(cluster).offsets("t", LATEST)
        assert broker.times_asked(ApiKey.METADATA) == 1


async def test_a_non_retriable_error_is_not_retried() -> None:
    async with FakeBroker() as broker:
        refusal = {"name": "t", "error_code": ErrorCode.topic_already_exists, "error_message": "there already"}
        broker.handlers[ApiKey.METADATA] = lambda _: metadata(broker)
        broker.handlers[ApiKey.CREATE_TOPICS] = lambda _: {"topics": [refusal]}
        async with Cluster([broker.address]) as cluster:
            with pytest.raises(KafkaError, match="there already"):
                await Topics(cluster).create("t", 1, None, {})
        assert broker.times_asked(ApiKey.CREATE_TOPICS) == 1


async def test_admin_calls_follow_the_controller() -> None:
    async with FakeBroker(node_id=1) as one, FakeBroker(node_id=2) as two:
        controller = 1

        def not_here(_: Any) -> Mapping[str, Any]:
            nonlocal controller
            controller = 2
            return {"topics": [{"name": "t", "error_code": ErrorCode.not_controller}]}

        for broker in (one, two):
            broker.handlers[ApiKey.METADATA] = lambda _: metadata(one, two, controller=controller)
        one.handlers[ApiKey.CREATE_TOPICS] = not_here
        two.handlers[ApiKey.CREATE_TOPICS] = lambda _: {"topics": [{"name": "t", "error_code": 0}]}
        async with Cluster([one.address]) as cluster:
            await Topics(cluster).create("t", 1, None, {})
        [(_, request)] = [asked for asked in two.asked if asked[0] == ApiKey.CREATE_TOPICS]
        assert request.topics[0].replication_factor == 2


async def test_groups_are_listed_from_all_brokers() -> None:
    async with FakeBroker(node_id=1) as one, FakeBroker(node_id=2) as two:
        for broker in (one, two):
            broker.handlers[ApiKey.METADATA] = lambda _: metadata(one, two)
        one.handlers[ApiKey.LIST_GROUPS] = lambda _: {"error_code": 0, "groups": [{"group_id": "b"}]}
        two.handlers[ApiKey.LIST_GROUPS] = lambda _: {"error_code": 0, "groups": [{"group_id": "a"}]}
        async with Cluster([two.address]) as cluster:
            assert [group.group for group in await Groups(cluster).list()] == ["a", "b"]


async def test_one_reachable_bootstrap_address_is_enough() -> None:
    async with FakeBroker() as gone:
        closed = gone.address
    async with FakeBroker() as broker:
        broker.handlers[ApiKey.METADATA] = lambda _: metadata(broker)
        async with Cluster([closed, broker.address]) as cluster:
            assert (await cluster.layout()).cluster_id == "fake"
    async with Cluster([closed]) as cluster:
        with pytest.raises(Unreachable):
            await cluster.layout()


async def test_the_client_reopens_a_lost_connection() -> None:
    async with FakeBroker() as broker:
        broker.handlers[ApiKey.METADATA] = lambda _: metadata(broker)
        async with Cluster([broker.address]) as cluster:
            await cluster.layout()
            broker.hang_up()
            await cluster.layout()


def test_an_assignment_is_decoded_from_consumer_protocol_bytes() -> None:
    encoded = b"\x00\x01\x00\x00\x00\x01\x00\x01t\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\x07\xff\xff\xff\xff"
    assert read_assignment(encoded) == (("t", 0), ("t", 7))
    for cut in range(len(encoded) - 4):
        assert read_assignment(encoded[:cut]) == ()


async def test_the_brokers_last_error_is_raised_if_a_retry_gets_no_response() -> None:
    async with FakeBroker() as broker:
        answers = iter([ErrorCode.request_timed_out])
        broker.handlers[ApiKey.METADATA] = lambda _: metadata(broker)

        def create(request: Any) -> Mapping[str, Any] | None:
            error = next(answers, None)
            return None if error is None else {"topics": [{"name": "t", "error_code": error}]}

        broker.handlers[ApiKey.CREATE_TOPICS] = create
        async with Cluster([broker.address], timeout_s=0.5) as cluster:
            with pytest.raises(KafkaError) as raised:
                await Topics(cluster).create("t", 1, 1, {})
        assert raised.value.code == ErrorCode.request_timed_out
        assert broker.times_asked(ApiKey.CREATE_TOPICS) == 2
