"""Groups: how soon partitions have owners again, what heartbeats cost, and how fast share groups deliver.

Members of consumer groups are raw requests (`bench.group_members`), share consumers are librdkafka's
(`bench.share_consumers`). Both servers get the same session timeouts and heartbeat intervals, through group configs.
"""

from __future__ import annotations

import asyncio
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from confluent_kafka import Producer

from bench.clients import NotMeasured, Topic, drive
from bench.group_members import CHECK_S, SETTLE_S_MAX, Beating, ClassicMember, ConsumerMember, connected
from bench.processes import usage_of
from bench.samples import Figure
from bench.servers import SHORT_HEARTBEAT_MS, SHORT_SESSION_MS
from bench.share_consumers import CHECK_S as SHARE_CHECK_S
from bench.share_consumers import Acknowledging, ShareConsumers
from bench.workloads import CONSUMERS, KILOBYTE_RECORD, MEGABYTE, Life
from chronik.cli.client_properties import librdkafka_settings
from chronik.cli.options import with_cluster
from chronik.client.cluster import Cluster
from chronik.client.groups import Groups

PARTITIONS = 1_000
MEMBERS = 200
HEARTBEATING_MEMBERS = 1_000
DEFAULT_HEARTBEAT_S = 5.0
LOST_ROUNDS = 15
LEAVE_ROUNDS = 5
CLASSIC_SESSION_MS = 6_000
CLASSIC_HEARTBEAT_S = 1.0
JOINING_HEARTBEAT_S = 1.0
QUICK_SHARE = 10
WORK_S_MAX = 600.0
FIRST_WRITE_S_MAX = 10.0
SHARED_RECORDS = {"implicit": 400_000, "explicit": 400_000, "committed": 100_000}
SHARED_NAMES = {
    "implicit": "acknowledged implicitly, in batches",
    "explicit": "acknowledged one by one, sent in batches",
    "committed": "acknowledged and committed one by one",
}


def lost_member(life: Life) -> Iterator[Figure]:
    """Members go silent, one after the other. All partitions must have an owner again, by acknowledged assignment.

    The time starts when the session ends, which is the session timeout after the member sent its last heartbeat.
    """
    count, partitions = _sized(life, MEMBERS), _sized(life, PARTITIONS)

    async def measure(cluster: Cluster) -> list[float]:
        configs = {
            "consumer.session.timeout.ms": str(SHORT_SESSION_MS),
            "consumer.heartbeat.interval.ms": str(SHORT_HEARTBEAT_MS),
        }
        await Groups(cluster).alter_configs(topic.name, configs)
        async with connected(cluster, topic.name, count) as connections:
            topic_id = await _topic_id(cluster, topic.name)
            members = [ConsumerMember(connection, topic.name, topic_id) for connection in connections]
            beating = Beating(members, SHORT_HEARTBEAT_MS / 1000)
            try:
                await _until(lambda: _is_shared_evenly(members, partitions), beating, "each member has its share")
                passed_s = []
                for victim in _victims(life, members, LOST_ROUNDS):
                    await beating.silence(victim)
                    members.remove(victim)
                    await _until(lambda: _is_owned(members, partitions), beating, "all partitions have owners again")
                    passed_s.append(time.monotonic() - victim.beaten_s - SHORT_SESSION_MS / 1000)
            finally:
                await beating.stop()
        return passed_s

    with Topic(life.server, partitions) as topic:
        before = usage_of(life.server.pids)
        passed_s = with_cluster(topic.bootstrap, measure, WORK_S_MAX)
        after = usage_of(life.server.pids)
    if min(passed_s) < 0:
        raise NotMeasured(f"a member lost its partitions {-min(passed_s):.3f} s before its session ended")
    workload = f"consumer group, {MEMBERS} members on {PARTITIONS:,} partitions, {life.setup.nodes} node"
    usage: dict[str, Any] = {"cpu_s": after.cpu_s - before.cpu_s, "resident_mb": after.resident_bytes / MEGABYTE}
    metric = "session of a member ended, all partitions owned after"
    yield Figure(workload, metric, "s", statistics.median(passed_s), "<= 1.0", **usage)


def heartbeats(life: Life) -> Iterator[Figure]:
    """Heartbeats of a group that is stable. They come faster until it is, so that this takes seconds."""
    count, partitions = _sized(life, HEARTBEATING_MEMBERS), _sized(life, PARTITIONS)
    seconds = life.scale.seconds(4 * DEFAULT_HEARTBEAT_S)

    async def measure(cluster: Cluster) -> float:
        async with connected(cluster, topic.name, count) as connections:
            topic_id = await _topic_id(cluster, topic.name)
            members = [ConsumerMember(connection, topic.name, topic_id) for connection in connections]
            beating = Beating(members, JOINING_HEARTBEAT_S)
            try:
                await _until(lambda: _is_shared_evenly(members, partitions), beating, "each member has its share")
                beating.interval_s = DEFAULT_HEARTBEAT_S
                await asyncio.sleep(life.scale.seconds(DEFAULT_HEARTBEAT_S))
                before, started_s = usage_of(life.server.pids), time.monotonic()
                await asyncio.sleep(seconds)
                cpu_s, passed_s = usage_of(life.server.pids).cpu_s - before.cpu_s, time.monotonic() - started_s
                await beating.check()
            finally:
                await beating.stop()
        return 100 * cpu_s / passed_s

    with Topic(life.server, partitions) as topic:
        percent = with_cluster(topic.bootstrap, measure, WORK_S_MAX)
    workload = f"heartbeats of {HEARTBEATING_MEMBERS:,} members, one in {DEFAULT_HEARTBEAT_S:g} s each"
    yield Figure(
        f"{workload}, {life.setup.nodes} node", "server CPU", "% of a core", percent, "<= 5.0", is_own_goal=True
    )


def classic_leave(life: Life) -> Iterator[Figure]:
    """Members of the classic protocol leave, one after the other. All others must be in a later generation."""
    count, partitions = _sized(life, MEMBERS), _sized(life, PARTITIONS)

    async def measure(cluster: Cluster) -> list[float]:
        async with connected(cluster, topic.name, count) as connections:
            members = [
                ClassicMember(connection, topic.name, partitions, CLASSIC_SESSION_MS) for connection in connections
            ]
            beating = Beating(members, CLASSIC_HEARTBEAT_S)
            try:
                await _until(lambda: _has_one_generation(members, 0), beating, "all members are in one generation")
                passed_s = []
                for victim in _victims(life, members, LEAVE_ROUNDS):
                    await beating.silence(victim)
                    members.remove(victim)
                    is_stable = functools.partial(_has_one_generation, members, members[0].generation)
                    started_s = time.monotonic()
                    await victim.leave()
                    await _until(is_stable, beating, "all members are in a new generation")
                    passed_s.append(time.monotonic() - started_s)
            finally:
                await beating.stop()
        return passed_s

    with Topic(life.server, partitions) as topic:
        passed_s = with_cluster(topic.bootstrap, measure, WORK_S_MAX)
    workload = f"classic group, {MEMBERS} members on {PARTITIONS:,} partitions, {life.setup.nodes} node"
    yield Figure(workload, "a member left, all stable after", "s", statistics.median(passed_s), "<= 1.0")


def shared(life: Life) -> Iterator[Figure]:
    """Share consumers of 1 KB records that were written just before. The first way runs twice: once to warm up."""
    ways: tuple[Acknowledging, ...] = ("implicit", "implicit", "explicit", "committed")
    for number, way in enumerate(ways):
        with Topic(life.server, CONSUMERS) as topic:
            figure = _deliver(life, topic, way)
        if number > 0:
            yield figure


def _deliver(life: Life, topic: Topic, way: Acknowledging) -> Figure:
    """Let all consumers take records until nothing is left, or the time is over."""
    records = life.scale.records(SHARED_RECORDS[way])
    with_cluster(
        topic.bootstrap,
        lambda cluster: Groups(cluster).alter_configs(topic.name, {"share.auto.offset.reset": "earliest"}),
    )
    producer = Producer({**librdkafka_settings(topic.bootstrap), "log_level": 0})

    first_writes: list[int] = []

    def write_one_to_each_partition() -> None:
        for partition in range(CONSUMERS):
            producer.produce(topic.name, b"ready", partition=partition)
        producer.flush(FIRST_WRITE_S_MAX)
        first_writes.append(CONSUMERS)

    consumers = ShareConsumers(topic, CONSUMERS, way)
    try:
        consumers.wait_until_ready(write_one_to_each_partition)
        drive(topic, "produce", records, KILOBYTE_RECORD)
        os.sync()  # unwritten data must not disturb the consumers
        before, taken, started_s = usage_of(life.server.pids), consumers.taken, time.monotonic()
        consumers.go()
        until_s = started_s + life.scale.seconds(5.0)
        while consumers.taken - taken < records and time.monotonic() < until_s:
            time.sleep(SHARE_CHECK_S)
        taken, passed_s = consumers.taken - taken, time.monotonic() - started_s
        after = usage_of(life.server.pids)
        consumers.stop()
    finally:
        consumers.close()
    life.server.check()
    if not taken:
        raise NotMeasured("the share consumers took no record")
    if consumers.taken > records + sum(first_writes):
        raise NotMeasured(f"{consumers.taken - records - sum(first_writes)} records were delivered twice")
    workload = f"share group, {CONSUMERS} consumers, 1 KB, {SHARED_NAMES[way]}, {life.setup.nodes} node"
    usage: dict[str, Any] = {"cpu_s": after.cpu_s - before.cpu_s, "resident_mb": after.resident_bytes / MEGABYTE}
    return Figure(workload, "records", "1/s", taken / passed_s, ">= 1.0", **usage)


def _sized(life: Life, count: int) -> int:
    return count // QUICK_SHARE if life.scale.quick else count


def _victims(life: Life, members: Sequence[Any], rounds: int) -> list[Any]:
    """Return members whose heartbeats are spread over the interval; the first ones stay."""
    rounds = 1 if life.scale.quick else rounds
    return [members[(number + 1) * len(members) // (rounds + 1)] for number in range(rounds)]


async def _topic_id(cluster: Cluster, name: str) -> Any:
    return (await cluster.layout([name])).topics[name].id


async def _until(is_done: Callable[[], bool], beating: Beating, what: str) -> None:
    deadline_s = time.monotonic() + SETTLE_S_MAX
    while not is_done():
        await beating.check()
        if time.monotonic() > deadline_s:
            raise NotMeasured(f"not within {SETTLE_S_MAX:g} s: {what}")
        await asyncio.sleep(CHECK_S)


def _is_owned(members: Sequence[ConsumerMember], partitions: int) -> bool:
    """Whether every partition has one owner; two owners at once are a failure of the server."""
    owned = sum(len(member.owned) for member in members)
    if owned < partitions:
        return False
    return len(frozenset[int]().union(*(member.owned for member in members))) == partitions


def _is_shared_evenly(members: Sequence[ConsumerMember], partitions: int) -> bool:
    sizes = [len(member.owned) for member in members]
    return max(sizes) - min(sizes) <= 1 and _is_owned(members, partitions)


def _has_one_generation(members: Sequence[ClassicMember], after: int) -> bool:
    first = members[0].generation
    return first > after and all(member.generation == first for member in members)
