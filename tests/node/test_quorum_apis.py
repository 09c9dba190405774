"""The Raft group of the metadata as Kafka's quorum APIs describe and change it, on three nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from tests.node.cluster_harness import LocalNodes
from tests.support.eventually import until

from chronik.client.connection import Connection
from chronik.metadata.commands import UnregisterBroker
from chronik.node.broker import Broker
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

QUORUM = [{"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}]


async def quorum(client: Connection, topics: Any = QUORUM) -> Any:
    return await client.call(ApiKey.DESCRIBE_QUORUM, {"topics": topics})


def store_of(broker: Broker, node_id: int) -> UUID:
    member = broker.member.raft.node.membership.member(node_id)
    assert member is not None
    return member.store


async def test_every_node_describes_the_raft_group_through_the_controller(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        controller = await nodes.controller()
        raft = controller.member.raft.node
        await until(lambda: all(progress.caught_up_ms is not None for progress in raft.progress.values()))
        for broker in brokers:
            client = await nodes.client(broker)
            answer = await quorum(client)
            assert answer.error_code == ErrorCode.none
            (partition,) = answer.topics[0].partitions
            assert (partition.leader_id, partition.leader_epoch) == (controller.node_id, raft.term)
            assert 0 < partition.high_watermark <= raft.last_index + 1
            assert [voter.replica_id for voter in partition.current_voters] == [1, 2, 3]
            assert partition.observers == ()
            for voter in partition.current_voters:
                assert voter.replica_directory_id == store_of(controller, voter.replica_id)
                assert 0 < voter.log_end_offset <= raft.last_index + 1
                assert voter.last_caught_up_timestamp > 0
                assert (voter.last_fetch_timestamp == -1) == (voter.replica_id == controller.node_id)
            addresses = {node.node_id: [(at.host, at.port) for at in node.listeners] for node in answer.nodes}
            assert addresses == {node_id: [("127.0.0.1", nodes.internal_port(node_id))] for node_id in (1, 2, 3)}
            (other,) = (await quorum(client, [{"topic_name": "t", "partitions": [{"partition_index": 0}]}])).topics
            assert other.partitions[0].error_code == ErrorCode.unknown_topic_or_partition
            client.close()


async def test_voters_are_refused_as_kafka_does_and_brokers_keep_their_vote(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        await nodes.start_all()
        controller = await nodes.controller()
        other = nodes.others(controller)[0]
        client = await nodes.client(other)
        voter = {"voter_id": other.node_id, "voter_directory_id": store_of(controller, other.node_id)}
        elsewhere = {**voter, "voter_directory_id": uuid4()}

        async def add(values: dict[str, Any], **more: Any) -> ErrorCode:
            listeners = [{"name": "INTERNAL", "host": "127.0.0.1", "port": 1}]
            request = {"cluster_id": None, "timeout": 5000, "listeners": listeners, **values, **more}
            return ErrorCode((await client.call(ApiKey.ADD_RAFT_VOTER, request)).error_code)

        async def remove(values: dict[str, Any], **more: Any) -> Any:
            return await client.call(ApiKey.REMOVE_RAFT_VOTER, {"cluster_id": None, **values, **more})

        assert await add(voter) == ErrorCode.duplicate_voter
        assert await add(elsewhere) == ErrorCode.voter_not_found
        assert await add({**voter, "voter_id": 9}) == ErrorCode.voter_not_found
        assert await add(voter, cluster_id="another") == ErrorCode.inconsistent_cluster_id
        assert (await remove(elsewhere)).error_code == ErrorCode.voter_not_found
        assert (await remove(voter, cluster_id="another")).error_code == ErrorCode.inconsistent_cluster_id
        refused = await remove(voter)
        assert refused.error_code == ErrorCode.invalid_request
        assert "chronik cluster remove" in refused.error_message
        assert len(controller.member.raft.node.membership.voters) == 3
        client.close()


async def test_a_voter_that_is_not_a_broker_any_more_is_removed(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path) as nodes:
        await nodes.start_all()
        controller = await nodes.controller()
        gone, kept = nodes.others(controller)
        voter = {"voter_id": gone.node_id, "voter_directory_id": store_of(controller, gone.node_id)}
        epoch = controller.image.brokers[gone.node_id].epoch
        await controller.metadata.propose(UnregisterBroker(gone.node_id, epoch))
        await nodes.kill(gone)
        request = {"cluster_id": controller.image.cluster_id, **voter}
        answer = await nodes.administer(kept, ApiKey.REMOVE_RAFT_VOTER, request)
        assert answer.error_code == ErrorCode.none
        client = await nodes.client(kept)
        (partition,) = (await quorum(client)).topics[0].partitions
        assert {voter.replica_id for voter in partition.current_voters} == {controller.node_id, kept.node_id}
        client.close()


async def test_a_learner_that_has_joined_gets_a_vote(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, count=4) as nodes:
        await nodes.start_all()
        controller = await nodes.controller()
        client = await nodes.client(nodes.others(controller)[0])

        async def observers() -> list[Any]:
            return list((await quorum(client)).topics[0].partitions[0].observers)

        (learner,) = await observers()
        voter = {"voter_id": learner.replica_id, "voter_directory_id": learner.replica_directory_id}
        values = {"cluster_id": None, "timeout": 10_000, "listeners": [], **voter}
        assert (await client.call(ApiKey.ADD_RAFT_VOTER, values)).error_code == ErrorCode.none
        assert await observers() == []
        assert len(controller.member.raft.node.membership.voters) == 4
        client.close()


@pytest.mark.parametrize("includes_fenced", [True, False])
async def test_describe_cluster_lists_fenced_brokers_on_request(tmp_path: Path, includes_fenced: bool) -> None:
    async with LocalNodes(tmp_path) as nodes:
        await nodes.start_all()
        controller = await nodes.controller()
        dead = nodes.others(controller)[0]
        await nodes.kill(dead)
        await until(lambda: controller.image.brokers[dead.node_id].is_fenced)
        client = await nodes.client(controller)
        values = {"include_cluster_authorized_operations": False, "endpoint_type": 1}
        answer = await client.call(ApiKey.DESCRIBE_CLUSTER, {**values, "include_fenced_brokers": includes_fenced})
        fenced = {broker.broker_id: broker.is_fenced for broker in answer.brokers}
        live = {node_id: False for node_id in (1, 2, 3) if node_id != dead.node_id}
        assert fenced == (live | {dead.node_id: True} if includes_fenced else live)
        client.close()
