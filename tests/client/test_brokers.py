"""Moving replicas and decommissioning brokers, against a fake broker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tests.client.fake_broker import FakeBroker, metadata

from chronik.client.brokers import Brokers, Move
from chronik.client.cluster import Cluster
from chronik.client.errors import UnsupportedByBroker
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError


def controller(handlers: Mapping[ApiKey, Any]) -> FakeBroker:
    made = FakeBroker(handlers)
    made.versions |= dict.fromkeys(handlers, (0, 0))
    made.handlers[ApiKey.METADATA] = lambda _: metadata(made)
    return made


def moved(error: ErrorCode) -> Mapping[str, Any]:
    partitions = [{"partition_index": 0, "error_code": error, "error_message": None}]
    return {"error_code": 0, "responses": [{"name": "t", "partitions": partitions}]}


async def test_reassignments_are_requested_by_topic() -> None:
    async with controller({ApiKey.ALTER_PARTITION_REASSIGNMENTS: lambda _: moved(ErrorCode.none)}) as broker:
        async with Cluster([broker.address]) as cluster:
            await Brokers(cluster).move({("u", 3): (1,), ("t", 1): (2, 3), ("t", 0): (3, 1)})
        request = next(asked for key, asked in broker.asked if key == ApiKey.ALTER_PARTITION_REASSIGNMENTS)
        assert [
            (topic.name, [(partition.partition_index, tuple(partition.replicas)) for partition in topic.partitions])
            for topic in request.topics
        ] == [("t", [(0, (3, 1)), (1, (2, 3))]), ("u", [(3, (1,))])]


async def test_a_refused_reassignment_of_one_partition_raises_an_error() -> None:
    refusal = ErrorCode.invalid_replica_assignment
    async with controller({ApiKey.ALTER_PARTITION_REASSIGNMENTS: lambda _: moved(refusal)}) as broker:
        async with Cluster([broker.address]) as cluster:
            with pytest.raises(KafkaError, match="t-0") as raised:
                await Brokers(cluster).move({("t", 0): (9,)})
        assert raised.value.code == refusal


async def test_ongoing_reassignments_are_listed_by_partition() -> None:
    partition = {"partition_index": 2, "replicas": [1, 2, 3], "adding_replicas": [3], "removing_replicas": [1]}
    listed = {"error_code": 0, "topics": [{"name": "t", "partitions": [partition]}]}
    broker = controller({ApiKey.LIST_PARTITION_REASSIGNMENTS: lambda _: listed})
    async with broker, Cluster([broker.address]) as cluster:
        assert await Brokers(cluster).moves() == {("t", 2): Move((1, 2, 3), (3,), (1,))}


async def test_unregistering_an_unregistered_broker_succeeds() -> None:
    answers = [ErrorCode.none, ErrorCode.broker_id_not_registered, ErrorCode.invalid_request]
    broker = controller({ApiKey.UNREGISTER_BROKER: lambda _: {"error_code": answers.pop(0)}})
    async with broker, Cluster([broker.address]) as cluster:
        await Brokers(cluster).unregister(4)
        await Brokers(cluster).unregister(4)
        with pytest.raises(KafkaError, match="broker 4"):
            await Brokers(cluster).unregister(4)


def elected(error: ErrorCode) -> Mapping[str, Any]:
    partitions = [{"partition_id": 4, "error_code": error, "error_message": None}]
    return {"error_code": 0, "replica_election_results": [{"topic": "t", "partition_result": partitions}]}


@pytest.mark.parametrize("answer", [ErrorCode.none, ErrorCode.election_not_needed])
async def test_an_unclean_election_is_requested_for_one_partition(answer: ErrorCode) -> None:
    async with controller({ApiKey.ELECT_LEADERS: lambda _: elected(answer)}) as broker:
        broker.versions[ApiKey.ELECT_LEADERS] = (0, 2)
        async with Cluster([broker.address]) as cluster:
            await Brokers(cluster).elect_unclean("t", 4)
        request = next(asked for key, asked in broker.asked if key == ApiKey.ELECT_LEADERS)
        assert request.election_type == 1
        assert [(topic.topic, tuple(topic.partitions)) for topic in request.topic_partitions] == [("t", (4,))]


async def test_an_unclean_election_without_an_eligible_leader_raises_an_error() -> None:
    refusal = ErrorCode.eligible_leaders_not_available
    async with controller({ApiKey.ELECT_LEADERS: lambda _: elected(refusal)}) as broker:
        broker.versions[ApiKey.ELECT_LEADERS] = (0, 2)
        async with Cluster([broker.address]) as cluster:
            with pytest.raises(KafkaError, match="t-4") as raised:
                await Brokers(cluster).elect_unclean("t", 4)
        assert raised.value.code == refusal


async def test_a_broker_without_unclean_elections_receives_no_election_request() -> None:
    async with controller({ApiKey.ELECT_LEADERS: lambda _: elected(ErrorCode.none)}) as broker:
        async with Cluster([broker.address]) as cluster:
            with pytest.raises(UnsupportedByBroker, match="unclean"):
                await Brokers(cluster).elect_unclean("t", 4)
        assert broker.times_asked(ApiKey.ELECT_LEADERS) == 0
