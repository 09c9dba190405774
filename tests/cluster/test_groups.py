"""A consumer group survives its coordinator: it neither skips records nor rereads committed ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any, cast

import pytest
from tests.clients.drivers.base import PollingMember, Received, Sent
from tests.clients.drivers.confluent import Confluent, ConfluentMember
from tests.clients.drivers.java import Java, JavaMember
from tests.cluster.conftest import StartNodes
from tests.cluster.support_cluster import Nodes
from tests.cluster.support_groups import Commits
from tests.cluster.support_workload import PROGRESS, Workload
from tests.support.eventually import eventually
from tests.web.support_http import get

from chronik.testing.operations import Polled

PARTITIONS = 4


def records_of(workload: Workload, members: list[str]) -> int:
    return sum(
        len(operation.records)
        for operation in list(workload.recorder.operations)
        if isinstance(operation, Polled) and operation.consumer in members
    )


def group_goes_on(workload: Workload, members: list[str]) -> None:
    wanted = records_of(workload, members) + PROGRESS
    eventually(lambda: records_of(workload, members) >= wanted, 60, "the group is given further records")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_group_keeps_consuming_when_its_coordinator_stops(nodes: Nodes, end: str, tmp_path: Path) -> None:
    with Workload(nodes, nodes.new_topic(PARTITIONS), PARTITIONS) as workload:
        names = [member.name for member in workload.members]
        workload.proceed(PROGRESS)
        group_goes_on(workload, names)
        for _ in range(2):
            hit = nodes.coordinator(workload.group)
            (nodes.kill if end == "kill" else nodes.stop)(hit)
            workload.proceed(PROGRESS)
            group_goes_on(workload, names)
            nodes.start(hit)
            nodes.wait_in_sync()
        workload.finish(tmp_path / "history.jsonl")
        starts_where_the_group_stopped(workload)
    nodes.no_surprises()


def starts_where_the_group_stopped(workload: Workload) -> None:
    """Check that a later member receives the first record after the committed ones, and all that follow."""
    committed = workload.commits.committed()
    assert committed == workload.recorder.acknowledged(), "the group had committed all there was"
    late = workload.new_member("late")
    eventually(lambda: late.assignments > 0, 60, "the late member is given its partitions")
    with Workload(workload.nodes, workload.topic, PARTITIONS, members=0) as more:
        more.proceed(1)
        for producer in more.producers:
            producer.stop()
        ends = more.ends()

    def has_read_on() -> bool:
        return all(late.next_offsets.get(where, 0) >= end for where, end in ends.items())

    eventually(has_read_on, 60, "the late member reads on")
    late.stop()
    assert late.errors == []
    assert workload.commits.violations == []
    given = [op for op in workload.recorder.operations if isinstance(op, Polled) and op.consumer == "late"]
    first = {where: offset for op in reversed(given) for where, offset, _ in reversed(op.records)}
    assert first == committed


@pytest.mark.timeout(240)
def test_a_consumer_group_continues_when_its_coordinator_is_killed(start_nodes: StartNodes) -> None:
    nodes = start_nodes(group_consumer_min_heartbeat_interval_ms=100, group_consumer_heartbeat_interval_ms=300)
    topic = nodes.new_topic(PARTITIONS)
    members = [ConfluentMember(nodes.bootstrap, topic, topic, "server-uniform") for _ in range(2)]
    for member in members:
        member.start()

    def shared() -> bool:
        owned = [member.partitions for member in members]
        return sorted(map(len, owned)) == [2, 2] and len(frozenset().union(*owned)) == PARTITIONS

    def has_read(count: int) -> Callable[[], bool]:
        return lambda: set().union(*(member.values for member in members)) >= {b"%d" % each for each in range(count)}

    try:
        eventually(shared, 60, "the members share the partitions")
        for first in (0, 100):
            records = [Sent(b"%d" % number, partition=number % PARTITIONS) for number in range(first, first + 100)]
            Confluent().produce(nodes.bootstrap, topic, records)
            eventually(has_read(first + 100), 60, "all records are read")
            hit = nodes.coordinator(topic)
            nodes.kill(hit)
            nodes.start(hit)
            nodes.wait_in_sync()
            eventually(shared, 60, "the members share the partitions again")
        newcomer = ConfluentMember(nodes.bootstrap, topic, topic, "server-uniform")
        members.append(newcomer)
        newcomer.start()
        eventually(lambda: len(newcomer.partitions) == 1, 60, "the coordinator moves a partition")
    finally:
        for member in members:
            member.leave()
    nodes.no_surprises()


def hold(member: PollingMember) -> Event:
    """Let a member poll only while the event is set. Its client sends heartbeats, but cannot confirm a revocation."""
    may_poll, step = Event(), member.step

    def held() -> tuple[list[Received], frozenset[int]]:
        assert may_poll.wait(120)
        return step()

    may_poll.set()
    member.step = held  # type: ignore[method-assign]
    return may_poll


@pytest.mark.timeout(300)
@pytest.mark.parametrize("client", ["confluent", "java"])
def test_a_coordinator_that_is_killed_in_mid_reconciliation_grants_nothing_too_early(
    start_nodes: StartNodes, tmp_path: Path, client: str
) -> None:
    nodes = start_nodes(group_consumer_min_heartbeat_interval_ms=100, group_consumer_heartbeat_interval_ms=300)
    topic = group = nodes.new_topic(PARTITIONS)
    jvm = Java("4.3", tmp_path) if client == "java" else None

    def new_member() -> PollingMember:
        if jvm is not None:
            return JavaMember(jvm.jvm, nodes.bootstrap, topic, group, "server-uniform")
        return ConfluentMember(nodes.bootstrap, topic, group, "server-uniform")

    def described() -> dict[str, Any]:
        status, answer = get(nodes.responsive[0].http, f"/api/groups/{group}")
        assert status == 200, answer
        return cast(dict[str, Any], answer)

    def reconciles(members: int, among: list[int]) -> int | None:
        """Return the coordinator, if it is one of these nodes and a member waits for what another one must revoke."""
        known = described()
        is_reconciling = known["state"] == "Reconciling" and known["member_count"] == members
        return known["coordinator"] if is_reconciling and known["coordinator"] in among else None

    def heartbeats(node_id: int) -> int:
        text = nodes.node(node_id).get("/metrics")[1].decode()
        found = re.search(r'^chronik_requests_total\{api="ConsumerGroupHeartbeat"\} (\S+)', text, re.MULTILINE)
        return 0 if found is None else int(float(found[1]))

    owners = [new_member(), new_member()]
    may_poll = [hold(owner) for owner in owners]
    newcomer = new_member()
    members = [*owners, newcomer]
    try:
        for owner in owners:
            owner.start()
        eventually(lambda: shared_by(owners, [2, 2]), 60, "the first members share the partitions")
        for each in may_poll:
            each.clear()
        newcomer.start()
        hit = eventually(lambda: reconciles(3, nodes.ids), 60, "an owner must revoke for the newcomer")
        assert hit is not None
        nodes.kill(hit)
        others = [node.id for node in nodes.responsive]
        successor = eventually(lambda: reconciles(3, others), 60, "another coordinator continues")
        assert successor is not None
        seen = heartbeats(successor)
        eventually(lambda: heartbeats(successor) >= seen + 9, 60, "the members send heartbeats to it")
        assert newcomer.partitions == frozenset(), "no owner has released a partition"
        assert shared_by(owners, [2, 2])
        for each in may_poll:
            each.set()
        eventually(lambda: shared_by(members, [1, 1, 2]), 60, "the newcomer gets its partition")
        records = [Sent(b"%d" % number, partition=number % PARTITIONS) for number in range(40)]
        Confluent().produce(nodes.bootstrap, topic, records)
        eventually(lambda: sum(len(member.done) for member in members) >= 40, 60, "all records are read")
        assert sorted(record.value or b"" for member in members for record in member.done) == sorted(
            record.value or b"" for record in records
        )
    finally:
        for each in may_poll:
            each.set()
        for member in members:
            member.leave()
        if jvm is not None:
            jvm.jvm.close()


def shared_by(members: Sequence[PollingMember], counts: Sequence[int]) -> bool:
    """Whether these members own this many partitions, and together each partition once."""
    owned = [member.partitions for member in members]
    return sorted(map(len, owned)) == sorted(counts) and len(frozenset().union(*owned)) == PARTITIONS


@pytest.mark.timeout(240)
def test_committed_offsets_survive_a_crash_of_all_nodes(nodes: Nodes, tmp_path: Path) -> None:
    with Workload(nodes, nodes.new_topic(PARTITIONS), PARTITIONS) as workload:
        workload.proceed(PROGRESS)
        workload.finish(tmp_path / "history.jsonl")
        nodes.kill_all()
        nodes.start_all()
        starts_where_the_group_stopped(workload)


@pytest.mark.timeout(240)
def test_members_that_join_and_leave_share_the_partitions_and_skip_no_record(nodes: Nodes, tmp_path: Path) -> None:
    with Workload(nodes, nodes.new_topic(PARTITIONS), PARTITIONS, members=1) as workload:
        workload.proceed(PROGRESS)
        guest = workload.new_member("guest")
        eventually(lambda: records_of(workload, ["guest"]) > 0, 60, "the guest is given records")
        nodes.kill(nodes.coordinator(workload.group))
        workload.proceed(PROGRESS)
        guest.stop()
        assert guest.errors == []
        workload.proceed(PROGRESS)
        workload.finish(tmp_path / "history.jsonl")


def test_the_commit_checks_detect_repeated_and_skipped_records() -> None:
    commits = Commits()
    commits.asked({"t-0": 10})
    commits.acknowledged({"t-0": 10})
    commits.given("t-0", 10, "good")
    assert commits.violations == []
    commits.given("t-0", 9, "again")
    commits.given("t-0", 11, "skips")
    assert len(commits.violations) == 2
