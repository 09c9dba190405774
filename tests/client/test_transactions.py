"""No transaction is taken for a lost one while a coordinator is away or moves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from chronik.client.cluster import Cluster, Deadline
from chronik.client.layout import BrokerLayout, ClusterLayout, PartitionLayout, TopicLayout
from chronik.client.transactions import STATE_TOPIC, OpenTransaction, Transactions
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

BROKERS = {node_id: BrokerLayout(node_id, "localhost", 9090 + node_id) for node_id in (1, 2)}
OPEN = OpenTransaction("orders", 0, 7, 0, -1, 0, 0)
LOST = OpenTransaction("orders", 1, 8, 0, -1, 0, 0)


class Coordinators(Cluster):
    """Two brokers, and a state topic with one partition: `state_leaders` has its leader for each Metadata request."""

    def __init__(self, *leaders: int) -> None:
        super().__init__([("localhost", 9091)], timeout_s=0.5)
        self.state_leaders = list(leaders)
        self.listings = 0

    async def _fetch_layout(self, topics: Any, deadline: Deadline) -> ClusterLayout:
        if topics != [STATE_TOPIC]:
            return ClusterLayout("cluster", 1, BROKERS, {})
        leader = self.state_leaders.pop(0) if len(self.state_leaders) > 1 else self.state_leaders[0]
        partition = PartitionLayout(0, leader, leader, (1, 2), (1, 2))
        return ClusterLayout("cluster", 1, BROKERS, {STATE_TOPIC: TopicLayout(STATE_TOPIC, None, True, (partition,))})

    async def coordinator(self, key: str, deadline: Deadline, key_type: int = 0) -> int:
        return self.state_leaders[0]

    async def connection(self, node_id: int, deadline: Deadline) -> Any:
        async def call(key: ApiKey, values: Any, **options: Any) -> Any:
            if key is ApiKey.DESCRIBE_TRANSACTIONS:
                return SimpleNamespace(transaction_states=[described()])
            self.listings += 1
            id_ = SimpleNamespace(transactional_id="payments", producer_id=7, transaction_state="Ongoing")
            return SimpleNamespace(
                error_code=ErrorCode.none,
                unknown_state_filters=(),
                transaction_states=[id_] if node_id == self.state_leaders[0] else [],
            )

        return SimpleNamespace(call=call)


def described() -> Any:
    return SimpleNamespace(
        error_code=ErrorCode.none,
        producer_id=OPEN.producer_id,
        producer_epoch=0,
        transaction_state="Ongoing",
        transaction_timeout=timedelta(minutes=1),
        transaction_start_time=datetime(2026, 1, 1, tzinfo=UTC),
        topics=[SimpleNamespace(topic=OPEN.topic, partitions=[OPEN.partition])],
    )


async def test_transaction_that_no_coordinator_knows_is_lost() -> None:
    async with (cluster := Coordinators(2)):
        assert list(await Transactions(cluster).coordinated([OPEN, LOST])) == [OPEN.key]


async def test_nothing_is_lost_while_a_coordinator_is_away() -> None:
    async with (cluster := Coordinators(-1)):
        with pytest.raises(KafkaError, match="have no leader"):
            await Transactions(cluster).coordinated([OPEN])


async def test_list_is_repeated_if_a_coordinator_moved_meanwhile() -> None:
    async with (cluster := Coordinators(1, 3, 2)):
        assert list(await Transactions(cluster).coordinated([OPEN, LOST])) == [OPEN.key]
        assert cluster.listings > len(BROKERS)
