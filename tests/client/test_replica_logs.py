"""Where each replica's log ends, and what is lost if that replica becomes leader; against fake brokers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tests.client.fake_broker import FakeBroker, metadata

from chronik.client import replica_logs as module
from chronik.client.cluster import Cluster
from chronik.client.replica_logs import ANSWERS, DOWN, SILENT, UNLISTED, Loss, ReplicaLog, loss_if_leading, replica_logs
from chronik.client.topics import LATEST, LOG_END_READER
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode


def log(node_id: int, start: int, end: int, epoch: int = 3) -> ReplicaLog:
    return ReplicaLog(node_id, ANSWERS, start, end, epoch if end > start else -1)


@pytest.mark.parametrize(
    ("logs", "losses"),
    [
        ([log(1, 0, 100), log(2, 0, 70), log(3, 0, 0)], [0, 30, 100]),
        ([log(1, 0, 100), log(2, 40, 100)], [0, 40]),
        ([log(1, 50, 100), log(2, 0, 0)], [0, 50]),
        ([log(1, 50, 100), log(2, 0, 20)], [20, 50]),
        ([log(1, 0, 0), log(2, 0, 0)], [0, 0]),
        ([log(1, 50, 100), log(2, 0, 50), log(3, 0, 0)], [50, 50, 100]),
        ([log(1, 60, 100), log(2, 0, 40), log(3, 20, 20)], [40, 40, 80]),
        ([log(1, 0, 100)], [0]),
    ],
)
def test_a_new_leader_loses_the_records_that_only_another_replica_has(
    logs: list[ReplicaLog], losses: list[int]
) -> None:
    assert [loss_if_leading(each, logs) for each in logs] == [Loss(lost, is_exact=True) for lost in losses]


@pytest.mark.parametrize("other", [log(2, 0, 70, epoch=4), ReplicaLog(2, DOWN), ReplicaLog(2, ANSWERS, 0, 70)])
def test_the_loss_is_inexact_if_a_replica_is_down_or_ends_in_another_epoch(other: ReplicaLog) -> None:
    logs = [log(1, 0, 100), other, log(3, 0, 80)]
    assert loss_if_leading(logs[0], logs) == Loss(0, is_exact=False)
    assert loss_if_leading(logs[2], logs) == Loss(20, is_exact=False)


def test_the_loss_is_unknown_if_no_other_replica_answers() -> None:
    logs = [ReplicaLog(1, DOWN), log(2, 0, 100), ReplicaLog(3, SILENT)]
    loss = loss_if_leading(logs[1], logs)
    assert loss == Loss(None, is_exact=False)
    assert [str(each) for each in (loss, Loss(20, is_exact=False), Loss(20, is_exact=True))] == [
        "unknown",
        "20 or more",
        "20",
    ]


def answered(request: Any, start: int, end: int, error: ErrorCode = ErrorCode.none) -> Mapping[str, Any]:
    assert request.replica_id == LOG_END_READER
    partitions = [
        {
            "partition_index": wanted.partition_index,
            "error_code": error,
            "timestamp": -1,
            "offset": end if wanted.timestamp == LATEST else start,
            "leader_epoch": 7,
        }
        for wanted in request.topics[0].partitions
    ]
    return {"topics": [{"name": "t", "partitions": partitions}]}


async def test_every_replica_is_queried_for_its_own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 1.0)

    async with FakeBroker(node_id=1) as one, FakeBroker(node_id=2) as two, FakeBroker(node_id=3) as three:
        gone = FakeBroker(node_id=4)
        async with gone:
            names = metadata(one, two, three, gone, topics={"t": [-1]})
        one.handlers = {
            ApiKey.METADATA: lambda _: names,
            ApiKey.LIST_OFFSETS: lambda request: answered(request, 5, 9),
        }
        two.handlers[ApiKey.LIST_OFFSETS] = lambda request: answered(request, -1, -1, ErrorCode.not_leader_or_follower)
        three.handlers[ApiKey.LIST_OFFSETS] = lambda _: None
        async with Cluster([one.address]) as cluster:
            found = await replica_logs(cluster, "t", 0, [4, 1, 2, 3, 5])
        assert found == [
            ReplicaLog(4, DOWN),
            ReplicaLog(1, ANSWERS, 5, 9, 7),
            ReplicaLog(2, "log is not open (not_leader_or_follower)"),
            ReplicaLog(3, SILENT),
            ReplicaLog(5, UNLISTED),
        ]
