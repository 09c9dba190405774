"""Overload: each client gets back-pressure or a clear error, memory is bounded, and no other client starves.

Small on one node in `make test`, at full size on three nodes in `make soak`. Each test runs beside another client with
its own topic: two idempotent producers and a consumer, whose records must all arrive, in order (`beside`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from tests.cluster.support_cluster import Nodes
from tests.cluster.support_fixtures import FAILED, nodes_of
from tests.cluster.support_recorder import number
from tests.cluster.support_soak import SoakResults
from tests.cluster.support_workload import Workload
from tests.faults.support_overload import (
    MB,
    OUTCOME_TIMEOUT_S,
    ConsumerMember,
    Flood,
    Member,
    SlowReaders,
    highest_growth_mb,
    new_group,
    reset_peaks,
)
from tests.node.support_wire import WireClient
from tests.support.eventually import eventually

IN_FLIGHT_BYTES_MAX = 64 * MB
BESIDE_PARTITIONS = 2
BESIDE_RECORDS = 50
"""Minimum records of each partition while the limit is reached."""
FETCHED_TIMEOUT_S = 120.0


class Size(NamedTuple):
    """The load: small in every run, full in a soak."""

    nodes: int
    is_full: bool

    def of(self, small: int, full: int) -> int:
        return full if self.is_full else small


Beside = Callable[[], AbstractContextManager[Workload]]


@pytest.fixture(params=[Size(1, False), pytest.param(Size(3, True), marks=pytest.mark.soak)], ids=["small", "full"])
def size(request: pytest.FixtureRequest) -> Size:
    found = request.param
    assert isinstance(found, Size)
    return found


@pytest.fixture
def nodes(request: pytest.FixtureRequest, tmp_path: Path, size: Size) -> Iterator[Nodes]:
    settings = {"in_flight_bytes_max": IN_FLIGHT_BYTES_MAX}
    nodes = Nodes(tmp_path / "cluster", size.nodes, settings, disk_switches=True)
    yield from nodes_of(request.config, nodes)


@pytest.fixture
def results(size: Size, request: pytest.FixtureRequest) -> Iterator[SoakResults]:
    """Results of full-size runs; small runs say too little to record."""
    found = SoakResults(request.node.name)
    yield found
    if size.is_full:
        found.write(passed=not request.node.stash.get(FAILED, False))


@pytest.fixture
def beside(nodes: Nodes, tmp_path: Path, results: SoakResults) -> Beside:
    @contextmanager
    def other_client() -> Iterator[Workload]:
        topic = nodes.new_topic(BESIDE_PARTITIONS)
        with Workload(nodes, topic, BESIDE_PARTITIONS, rate_per_s=200.0, members=0) as workload:
            workload.proceed(1)
            began_s = workload.recorder.now_s()
            yield workload
            results.measure(f"{results.test}: longest wait of another client", workload.longest_gap_ms(began_s), "ms")
            results.history(workload.finish(tmp_path / "beside.jsonl"))
        nodes.no_surprises()

    return other_client


def memory_is_bounded(nodes: Nodes, before: dict[int, int], results: SoakResults, mb_max: float) -> None:
    grown_mb = highest_growth_mb(nodes, before)
    results.measure(f"{results.test}: memory above what it was", grown_mb, "MB", mb_max)
    assert grown_mb <= mb_max, f"a node's memory grew by {grown_mb:.0f} MB, {mb_max:.0f} MB are allowed"


def is_readable_to(client: WireClient, topic: str, offset: int) -> bool:
    assert (end := client.offset_at(topic, -1)) == offset, f"readable to {end}"
    return True


@pytest.mark.timeout(300)
def test_a_producer_faster_than_the_disk(nodes: Nodes, size: Size, beside: Beside, results: SoakResults) -> None:
    """The producer's requests wait for the sync, the node stops reading from it, and the producer's queue fills up.

    With acks=1 the producer is as fast as the leader's disk and leaves the followers behind, so it has its own topic.
    """
    topics = {acks: nodes.new_topic(1) for acks in ("all", "1")}
    most = size.of(20_000, 150_000)  # 200 MB each: more than the node's bound, for a disk of any speed
    floods = [Flood(nodes.bootstrap, topics[acks], acks, most=most) for acks in ("all", "all", "1")]
    with beside() as other:
        for node_id in nodes.ids:
            nodes.slow_syncs(node_id, 300)
        before = reset_peaks(nodes)
        with ThreadPoolExecutor(len(floods)) as threads:
            running = [threads.submit(flood.run, size.of(3, 30)) for flood in floods]
            other.proceed(BESIDE_RECORDS)
            for flood in running:
                flood.result()
        for node_id in nodes.ids:
            nodes.cure(node_id)
        memory_is_bounded(nodes, before, results, 2 * IN_FLIGHT_BYTES_MAX / MB + 60)
    assert list(chain.from_iterable(flood.failed for flood in floods)) == []
    for topic in topics.values():
        to_it = [flood for flood in floods if flood.topic == topic]
        sent = sum(flood.sent for flood in to_it)
        assert sum(flood.acknowledged for flood in to_it) == sent
        with nodes.connect(nodes.leader(topic)) as client:
            eventually(partial(is_readable_to, client, topic, sent), OUTCOME_TIMEOUT_S, "followers have it too")


@pytest.mark.timeout(300)
def test_a_hundred_slow_consumers(nodes: Nodes, size: Size, beside: Beside, results: SoakResults) -> None:
    topic = nodes.new_topic(1)
    records = size.of(20, 60)
    with nodes.connect(nodes.leader(topic), timeout_s=30) as producer:
        for _ in range(records):
            producer.append(topic, bytes(200_000))
    with beside() as other:
        before = reset_peaks(nodes)
        readers = SlowReaders(nodes, topic, 100)
        eventually(lambda: readers.sips > 1_000, timeout_s=60, what="they have begun to read")
        other.proceed(BESIDE_RECORDS)
        memory_is_bounded(nodes, before, results, IN_FLIGHT_BYTES_MAX / MB + 100)
        given = readers.finish()
    assert len(given) == 100 * SlowReaders.PIPELINED
    for offsets in given:
        assert offsets == list(range(len(offsets))) and offsets


@pytest.mark.timeout(300)
def test_a_group_of_two_hundred_members_that_rebalances(
    nodes: Nodes, size: Size, beside: Beside, results: SoakResults
) -> None:
    """All join at once; then some leave, repeatedly. After each rebalance every partition has exactly one owner."""
    partitions, leave_at_once = 250, 10
    group = new_group()
    with beside() as other, ThreadPoolExecutor(200) as threads:
        before = reset_peaks(nodes)
        members = list(threads.map(lambda _: Member(nodes, group, partitions), range(200)))
        list(threads.map(Member.join, members))
        for round_ in range(size.of(2, 10)):
            stable(members, threads)
            owned = sorted(chain.from_iterable(member.assigned for member in members))
            assert owned == list(range(partitions)), f"round {round_}"
            leaving, members = members[:leave_at_once], members[leave_at_once:]
            list(threads.map(Member.end, leaving))
        other.proceed(BESIDE_RECORDS)
        memory_is_bounded(nodes, before, results, 80)
        for member in members:
            member.client.socket.close()


@pytest.mark.timeout(300)
def test_a_consumer_group_of_two_hundred_members_that_come_and_go(
    nodes: Nodes, size: Size, beside: Beside, results: SoakResults
) -> None:
    """The same with KIP-848, and others join: no partition has two owners at any time, and each one has one again."""
    partitions, moving = 250, 10
    group, topic = new_group(), nodes.new_topic(partitions)
    with beside() as other, ThreadPoolExecutor(200) as threads:
        before = reset_peaks(nodes)

        def more(count: int) -> list[ConsumerMember]:
            return list(threads.map(lambda _: ConsumerMember(nodes, group, topic), range(count)))

        members = more(200)
        for _ in range(size.of(2, 10)):
            eventually(partial(have_settled, members, threads, partitions), timeout_s=90, what="all have owners")
            leaving, members = members[:moving], members[moving:]
            list(threads.map(ConsumerMember.end, leaving))
            members += more(moving)
        other.proceed(BESIDE_RECORDS)
        memory_is_bounded(nodes, before, results, 80)
        for member in members:
            member.close()


def have_settled(members: list[ConsumerMember], threads: ThreadPoolExecutor, partitions: int) -> bool:
    """Send heartbeats; return whether all members are in one epoch, and each partition has an owner."""
    list(threads.map(ConsumerMember.follow, members))
    owned = sorted(chain.from_iterable(member.assigned for member in members))
    if len(owned) != len(set(owned)):
        pytest.fail(f"a partition has two owners: {owned}")
    return owned == list(range(partitions)) and len({member.epoch for member in members}) == 1


def stable(members: list[Member], threads: ThreadPoolExecutor) -> None:
    """Wait until all members are in one generation that is not rebalancing."""

    def settled() -> bool:
        list(threads.map(Member.follow, members))
        return len({member.generation for member in members}) == 1

    eventually(settled, timeout_s=90, what="one generation")


@pytest.mark.timeout(300)
def test_records_of_a_megabyte(nodes: Nodes, size: Size, beside: Beside, results: SoakResults) -> None:
    """They arrive intact and in order; one that is too large for its topic is rejected with a clear error."""
    topic = nodes.new_topic(2)
    wanted = [b"%08d" % number + bytes([number % 251]) * 1_000_000 for number in range(size.of(30, 300))]
    failed: list[KafkaError] = []
    too_large: list[KafkaError] = []
    with beside() as other:
        before = reset_peaks(nodes)
        producer = Producer(
            {"bootstrap.servers": nodes.bootstrap, "message.max.bytes": 20_000_000, "linger.ms": 0, "log_level": 2}
        )
        for number, value in enumerate(wanted):
            producer.produce(topic, value, partition=number % 2, on_delivery=kept_errors(failed))
            producer.poll(0)
        producer.produce(topic, bytes(2_000_000), partition=0, on_delivery=kept_errors(too_large))
        assert producer.flush(FETCHED_TIMEOUT_S) == 0
        found = consumed(nodes, topic, 2, len(wanted))
        other.proceed(BESIDE_RECORDS)
        memory_is_bounded(nodes, before, results, 2 * IN_FLIGHT_BYTES_MAX / MB + 60)
    assert failed == []
    assert [error.code() for error in too_large] == [KafkaError.MSG_SIZE_TOO_LARGE]
    assert found == {partition: wanted[partition::2] for partition in range(2)}


def kept_errors(into: list[KafkaError]) -> Callable[[KafkaError | None, Message], None]:
    return lambda error, message: into.append(error) if error is not None else None


def consumed(nodes: Nodes, topic: str, partitions: int, count: int) -> dict[int, list[bytes]]:
    """Read each partition from the start with a real client, and return its values."""
    consumer = Consumer({"bootstrap.servers": nodes.bootstrap, "group.id": "limits", "log_level": 2})
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    found: dict[int, list[bytes]] = {partition: [] for partition in range(partitions)}

    def all_there() -> bool:
        for message in consumer.consume(500, 1.0):
            assert message.error() is None, message.error()
            found[number(message.partition())].append(message.value() or b"")
        return sum(map(len, found.values())) >= count

    try:
        eventually(all_there, FETCHED_TIMEOUT_S, f"{count} records of {topic}")
    finally:
        consumer.close()
    return found


@pytest.mark.timeout(600)
def test_thousands_of_partitions(nodes: Nodes, size: Size, beside: Beside, results: SoakResults) -> None:
    partitions = size.of(500, 5_000)
    failed: list[KafkaError] = []
    with beside() as other:
        before = reset_peaks(nodes)
        topics = [nodes.new_topic(min(1_000, partitions)) for _ in range(-(-partitions // 1_000))]
        producer = Producer({"bootstrap.servers": nodes.bootstrap, "acks": "all", "log_level": 2})
        for topic in topics:
            for partition in range(partitions // len(topics)):
                producer.produce(topic, b"%d" % partition, partition=partition, on_delivery=kept_errors(failed))
                producer.poll(0)
        assert producer.flush(FETCHED_TIMEOUT_S) == 0
        assert failed == []
        other.proceed(BESIDE_RECORDS)
        for topic in topics:
            count = partitions // len(topics)
            assert consumed(nodes, topic, count, count) == {index: [b"%d" % index] for index in range(count)}
        memory_is_bounded(nodes, before, results, 40 + partitions * 0.06)
