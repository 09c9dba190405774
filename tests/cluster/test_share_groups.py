"""A share group survives its coordinators and leaders: nothing is lost, and nothing accepted is delivered again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from threading import Event, Thread

import pytest
from tests.clients.drivers.base import Sent
from tests.clients.drivers.confluent import Confluent
from tests.clients.drivers.share import JavaShares, ShareMember
from tests.cluster.conftest import StartNodes
from tests.cluster.support_cluster import Nodes
from tests.support.eventually import eventually

from chronik.client.cluster import Cluster
from chronik.client.groups import Groups

PARTITIONS = 4
RECORDS = 200


class Worker:
    """A member in its own thread: it accepts what it takes, and notes what was accepted for certain."""

    def __init__(self, member: ShareMember) -> None:
        self.taken: list[tuple[int, int]] = []
        self.accepted: list[tuple[int, int]] = []
        self.again: list[tuple[int, int]] = []
        """Delivered after they had been accepted for certain."""
        self._member = member
        self._stopped = Event()
        self._thread = Thread(target=self._run, daemon=True)

    def start(self, accepted: Callable[[], set[tuple[int, int]]]) -> None:
        self._all_accepted = accepted
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            known = self._all_accepted()
            records = [(record.partition, record.offset) for record in self._member.poll()]
            self.again += [record for record in records if record in known]
            self.taken += records
            if not records:
                continue
            try:
                self._member.commit()
            except AssertionError:
                continue  # Perhaps accepted: the coordinator or the leader was lost.
            self.accepted += records

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(60)
        self._member.close()


async def start_at_the_beginning(nodes: Nodes, group: str) -> None:
    addresses = [(host, int(port)) for host, _, port in (each.rpartition(":") for each in nodes.bootstrap.split(","))]
    async with Cluster(addresses) as cluster:
        await Groups(cluster).alter_configs(group, {"share.auto.offset.reset": "earliest"})


@pytest.mark.timeout(240)
def test_a_share_group_continues_when_its_coordinators_and_leaders_are_killed(
    start_nodes: StartNodes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    try:
        java = JavaShares(tmp_path_factory.mktemp("shares"))
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    nodes = start_nodes(
        group_share_min_heartbeat_interval_ms=100,
        group_share_heartbeat_interval_ms=300,
        group_share_min_record_lock_duration_ms=1_000,
        group_share_record_lock_duration_ms=3_000,
    )
    topic = group = nodes.new_topic(PARTITIONS)
    asyncio.run(start_at_the_beginning(nodes, group))
    workers = [Worker(java.join(nodes.bootstrap, group, topic)) for _ in range(3)]

    def accepted() -> set[tuple[int, int]]:
        return {record for worker in workers for record in list(worker.accepted)}

    def has_taken(expected: set[tuple[int, int]]) -> bool:
        return expected <= {record for worker in workers for record in list(worker.taken)}

    try:
        for worker in workers:
            worker.start(accepted)
        for round_number in range(3):
            first = round_number * RECORDS
            records = [Sent(b"%d" % each, partition=each % PARTITIONS) for each in range(first, first + RECORDS)]
            Confluent().produce(nodes.bootstrap, topic, records)
            hit = nodes.coordinator(group)
            nodes.kill(hit)
            each_partition = range((first + RECORDS) // PARTITIONS)
            expected = {(index, offset) for index in range(PARTITIONS) for offset in each_partition}
            eventually(partial(has_taken, expected), 60, "every record is delivered")
            nodes.start(hit)
            nodes.wait_in_sync()
    finally:
        for worker in workers:
            worker.stop()
        java.jvm.close()
    assert [record for worker in workers for record in worker.again] == []
    assert len(accepted()) > 3 * RECORDS // 2, "most commits succeed, although each round kills a node"
