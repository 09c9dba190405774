"""Offsets in transactions in a cluster: through the APIs, across the failover of the group's coordinator."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.node.cluster_harness import DEADLINE_S, LocalNodes
from tests.node.support_transactions import RETRIED, TransactionalClient, create_topic, leader
from tests.support.eventually import until

from chronik.client.cluster import Cluster
from chronik.client.errors import ClientError
from chronik.client.transactions import Transactions
from chronik.metadata.commands import DeleteTopic
from chronik.metadata.image import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from chronik.node.broker import Broker
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

SETTINGS = {"transaction_state_topic_partitions": 3, "offsets_topic_partitions": 3}
GROUP = "readers"
PAUSE_S = 0.01
UNSTABLE = (-1, ErrorCode.unstable_offset_commit)


def group_coordinator(nodes: LocalNodes) -> Broker | None:
    """Return the node that coordinates the group, if the offsets topic exists and has a leader."""
    index = next(iter(nodes.brokers.values())).groups.partition_of(GROUP)
    return None if index is None else leader(nodes, OFFSETS_TOPIC, index)


async def call_group(nodes: LocalNodes, key: ApiKey, values: dict[str, Any], at_most: int) -> tuple[int, ErrorCode]:
    """Send a request for one partition to the group's coordinator; return the partition's offset, if any, and error.

    Repeat it, as clients do, while there is no coordinator.
    """
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                broker = group_coordinator(nodes) or next(iter(nodes.brokers.values()))
                client = await nodes.client(broker)
                answer = await client.call(key, values, at_most=at_most)
                client.close()
                group = answer.groups[0] if hasattr(answer, "groups") else answer
                error = getattr(group, "error_code", ErrorCode.none)
                if error is ErrorCode.none:
                    partition = group.topics[0].partitions[0]
                    offset, error = getattr(partition, "committed_offset", -1), partition.error_code
                    if error not in RETRIED:
                        return offset, error
            except ClientError:
                pass
            await asyncio.sleep(PAUSE_S)


async def commit(client: TransactionalClient, offset: int, **changes: Any) -> ErrorCode:
    values = {
        "transactional_id": client.id,
        "group_id": GROUP,
        "producer_id": client.producer.producer_id,
        "producer_epoch": client.producer.producer_epoch,
        "topics": [
            {
                "name": "orders",
                "partitions": [{"partition_index": 0, "committed_offset": offset, "committed_metadata": ""}],
            }
        ],
        **changes,
    }
    return (await call_group(client.nodes, ApiKey.TXN_OFFSET_COMMIT, values, 5 if client.version == 2 else 3))[1]


async def fetched(nodes: LocalNodes, *, requires_stable: bool = True) -> tuple[int, ErrorCode]:
    topics = [{"name": "orders", "partition_indexes": [0]}]
    values = {"groups": [{"group_id": GROUP, "topics": topics}], "require_stable": requires_stable}
    return await call_group(nodes, ApiKey.OFFSET_FETCH, values, 9)


async def stable_offset(nodes: LocalNodes) -> int:
    """Return the group's offset, once no transaction may change it."""
    async with asyncio.timeout(DEADLINE_S):
        while (found := await fetched(nodes)) == UNSTABLE:
            await asyncio.sleep(PAUSE_S)
    assert found[1] is ErrorCode.none
    return found[0]


@pytest.mark.parametrize("version", [0, 2])
async def test_offsets_move_if_and_only_if_their_transaction_commits(tmp_path: Path, version: int) -> None:
    async with LocalNodes(tmp_path, **SETTINGS) as nodes:
        await nodes.start_all()
        await create_topic(nodes, "orders")
        client = TransactionalClient(nodes, "app", version)
        await client.init()
        for offset, is_commit, expected in ((5, True, 5), (7, False, 5), (9, True, 9)):
            if version < 2:
                assert await client.add_offsets(GROUP) is ErrorCode.none
            assert await commit(client, offset) is ErrorCode.none
            assert await fetched(nodes) == UNSTABLE
            assert await client.end(commit=is_commit) is ErrorCode.none
            assert await stable_offset(nodes) == expected
        client.close()


async def test_old_client_must_add_the_group_to_its_transaction_first(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, **SETTINGS) as nodes:
        await nodes.start_all()
        await create_topic(nodes, "orders")
        client = TransactionalClient(nodes, "app", 0)
        await client.init()
        assert await commit(client, 5) is ErrorCode.invalid_txn_state
        assert await fetched(nodes) == (-1, ErrorCode.none)
        client.close()


@pytest.mark.parametrize("is_commit", [True, False])
async def test_new_group_coordinator_decides_the_pending_offsets_of_its_predecessor(
    tmp_path: Path, is_commit: bool
) -> None:
    async with LocalNodes(tmp_path, **SETTINGS) as nodes:
        await nodes.start_all()
        await create_topic(nodes, "orders")
        client = TransactionalClient(nodes, "app")
        await client.init()
        assert await commit(client, 5) is ErrorCode.none
        assert await client.end() is ErrorCode.none
        assert await stable_offset(nodes) == 5
        assert await commit(client, 7) is ErrorCode.none
        first = group_coordinator(nodes)
        assert first is not None
        await nodes.kill(first)
        second = await until(lambda: group_coordinator(nodes))
        assert second is not first
        assert await fetched(nodes) == UNSTABLE
        assert await fetched(nodes, requires_stable=False) == (5, ErrorCode.none)
        assert await client.end(commit=is_commit) is ErrorCode.none
        assert await stable_offset(nodes) == (7 if is_commit else 5)
        client.close()


async def test_timeout_of_the_transaction_drops_its_offsets(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, **SETTINGS) as nodes:
        await nodes.start_all()
        await create_topic(nodes, "orders")
        client = TransactionalClient(nodes, "app")
        await client.init(timeout_ms=1_000)
        assert await commit(client, 5) is ErrorCode.none
        assert await fetched(nodes) == UNSTABLE
        await client.until_state("CompleteAbort")
        assert await stable_offset(nodes) == -1
        assert await commit(client, 6) is ErrorCode.invalid_producer_epoch
        client.close()


async def test_offsets_of_a_fenced_producer_are_refused(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, **SETTINGS) as nodes:
        await nodes.start_all()
        await create_topic(nodes, "orders")
        zombie, successor = TransactionalClient(nodes, "app"), TransactionalClient(nodes, "app")
        await zombie.init()
        assert await commit(zombie, 5) is ErrorCode.none
        assert await successor.init() is ErrorCode.none
        assert await commit(zombie, 6) is ErrorCode.invalid_producer_epoch
        assert await commit(successor, 7) is ErrorCode.none
        assert await successor.end() is ErrorCode.none
        assert await stable_offset(nodes) == 7
        zombie.close()
        successor.close()


async def test_transaction_that_lost_its_coordinators_state_is_found_and_aborted(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, 1, **SETTINGS, default_replication_factor=1) as nodes:
        (broker,) = await nodes.start_all()
        await create_topic(nodes, "orders", 1, replicas=1)
        client = TransactionalClient(nodes, "app")
        await client.init()
        assert await commit(client, 5) is ErrorCode.none
        assert await fetched(nodes) == UNSTABLE
        async with Cluster([("127.0.0.1", broker.server.port)]) as cluster:
            tool = Transactions(cluster)
            later_ms = 1 << 60
            assert await tool.hanging(OFFSETS_TOPIC, 0, later_ms) == [], "its coordinator will end it"
            await broker.metadata.propose(
                DeleteTopic(TRANSACTIONS_TOPIC, broker.image.require_topic(TRANSACTIONS_TOPIC).id)
            )
            (hanging,) = await tool.hanging(OFFSETS_TOPIC, 0, later_ms)
            assert hanging.producer_id == client.producer.producer_id
            await tool.write_abort(hanging)
            assert await fetched(nodes) == (-1, ErrorCode.none)
            assert await tool.hanging(OFFSETS_TOPIC, 0, later_ms) == []
        # The application's next producer begins anew.
        assert await client.init() is ErrorCode.none
        assert await commit(client, 7) is ErrorCode.none
        assert await client.end() is ErrorCode.none
        assert await stable_offset(nodes) == 7
        client.close()
