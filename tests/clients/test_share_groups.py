"""Share groups (KIP-932) with real share consumers: Java's KafkaShareConsumer and confluent-kafka's ShareConsumer."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from tests.cli.run_chronik import chronik
from tests.clients.conftest import NewName
from tests.clients.drivers.base import Sent
from tests.clients.drivers.confluent import Confluent
from tests.clients.drivers.share import ConfluentShares, Delivered, JavaShares, ShareMember
from tests.support.eventually import eventually

from chronik.client.cluster import Cluster
from chronik.client.groups import Groups

PARTITIONS = 3
RECORDS = 60
DELIVERED_TIMEOUT_S = 20.0
LOCK_MS = 1_500
DELIVERY_LIMIT = 3

Clients = JavaShares | ConfluentShares


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JavaShares]:
    try:
        shares = JavaShares(tmp_path_factory.mktemp("shares"))
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    yield shares
    shares.jvm.close()


@pytest.fixture(params=["java", "confluent-kafka"])
def clients(request: pytest.FixtureRequest) -> Clients:
    if request.param == "java":
        shares: JavaShares = request.getfixturevalue("java")
        return shares
    return ConfluentShares()


class Scene:
    """A topic with records, and a share group that starts with the oldest one."""

    def __init__(self, bootstrap: str, topic: str, group: str) -> None:
        self.bootstrap = bootstrap
        self.topic = topic
        self.group = group
        self.members: list[ShareMember] = []
        asyncio.run(self._set_configs())

    async def _set_configs(self) -> None:
        configs = {
            "share.auto.offset.reset": "earliest",
            "share.record.lock.duration.ms": str(LOCK_MS),
            "share.delivery.count.limit": str(DELIVERY_LIMIT),
        }
        host, _, port = self.bootstrap.rpartition(":")
        async with Cluster([(host, int(port))]) as cluster:
            await Groups(cluster).alter_configs(self.group, configs)

    def writes(self, count: int, *, since: int = 0, partitions: int = PARTITIONS) -> None:
        records = [Sent(b"%d" % number, partition=number % partitions) for number in range(since, since + count)]
        Confluent().produce(self.bootstrap, self.topic, records)

    def joins(self, clients: Clients, *, explicit: bool = False) -> ShareMember:
        member = clients.join(self.bootstrap, self.group, self.topic, explicit=explicit)
        self.members.append(member)
        return member

    def leaves(self, member: ShareMember) -> None:
        self.members.remove(member)
        member.close()

    def described(self) -> dict[str, object]:
        shown: dict[str, object] = chronik("group", "describe", self.group, "--json", "-b", self.bootstrap).json()
        return shown

    def starts(self) -> list[tuple[int | None, int | None]]:
        """The start offset and the lag of each partition."""
        partitions = self.described()["partitions"]
        assert isinstance(partitions, list)
        return [(each["start"], each["lag"]) for each in partitions]


@pytest.fixture
def scene(bootstrap: str, topic: str, new_name: NewName, create_topic: Callable[[str, int], None]) -> Iterator[Scene]:
    create_topic(topic, PARTITIONS)
    scene = Scene(bootstrap, topic, new_name("share"))
    yield scene
    for member in scene.members:
        member.close()


def take(member: ShareMember, count: int) -> list[Delivered]:
    """Poll until the member has this many records; it accepts those of each poll with the next one."""
    taken: list[Delivered] = []

    def poll() -> bool:
        taken.extend(member.poll())
        return len(taken) >= count

    eventually(poll, DELIVERED_TIMEOUT_S, f"{count} records are delivered")
    return taken


def test_every_record_is_delivered_once_to_one_of_several_members(java: JavaShares, scene: Scene) -> None:
    members = [scene.joins(java), scene.joins(java), scene.joins(ConfluentShares())]
    taken: list[Delivered] = []
    scene.writes(RECORDS)

    def is_all_delivered() -> bool:
        for member in members:
            taken.extend(member.poll())
        return len(taken) >= RECORDS

    eventually(is_all_delivered, DELIVERED_TIMEOUT_S, "all records are delivered")
    for member in members:
        member.commit()
        assert not member.poll()
    assert Counter(record.value for record in taken) == Counter(str(number) for number in range(RECORDS))
    assert scene.starts() == [(RECORDS // PARTITIONS, 0)] * PARTITIONS
    described = scene.described()
    assert (described["group_type"], described["state"]) == ("share", "Stable")


def test_released_records_come_again_and_others_do_not(clients: Clients, scene: Scene) -> None:
    scene.writes(9, partitions=1)
    member = scene.joins(clients, explicit=True)
    taken = take(member, 9)
    kinds = {record.value: ("accept", "release", "reject")[int(record.value) % 3] for record in taken}
    for record in taken:
        member.acknowledge(record, kinds[record.value])
    member.commit()
    again = take(member, 3)
    assert sorted(record.value for record in again) == sorted(each for each in kinds if kinds[each] == "release")
    assert {record.delivery_count for record in again} <= {2, None}
    for record in again:
        member.acknowledge(record, "accept")
    member.commit()
    assert not member.poll()
    assert scene.starts()[0] == (9, 0)


def test_records_of_a_member_that_leaves_go_to_another(clients: Clients, scene: Scene) -> None:
    scene.writes(6, partitions=1)
    first = scene.joins(clients, explicit=True)
    assert len(take(first, 6)) == 6
    scene.leaves(first)
    second = scene.joins(clients)
    assert sorted(int(record.value) for record in take(second, 6)) == list(range(6))
    second.commit()
    assert scene.starts()[0] == (6, 0)


def test_records_of_a_process_that_was_killed_go_to_another(
    java: JavaShares, scene: Scene, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scene.writes(6, partitions=1)
    doomed = JavaShares(tmp_path_factory.mktemp("doomed"))
    first = doomed.join(scene.bootstrap, scene.group, scene.topic, explicit=True)
    assert len(take(first, 6)) == 6
    doomed.jvm.kill()
    again = take(scene.joins(java), 6)
    assert sorted(int(record.value) for record in again) == list(range(6))
    assert {record.delivery_count for record in again} == {2}


def test_a_record_that_is_always_released_is_archived_at_the_limit(java: JavaShares, scene: Scene) -> None:
    scene.writes(1, partitions=1)
    member = scene.joins(java, explicit=True)
    counts = []
    for _ in range(DELIVERY_LIMIT):
        (record,) = take(member, 1)
        counts.append(record.delivery_count)
        member.acknowledge(record, "release")
        member.commit()
    assert counts == list(range(1, DELIVERY_LIMIT + 1))
    scene.writes(1, since=1, partitions=1)
    (record,) = take(member, 1)
    assert record.value == "1", "the poison pill does not come again"
    member.acknowledge(record, "accept")
    member.commit()
    diagnosis = json.loads(chronik("doctor", scene.topic, "--seconds", "1", "--json", "-b", scene.bootstrap).out)
    assert diagnosis["verdict"] == "poison-pill"
    assert "poison pill at offset 0 of partition 0" in diagnosis["evidence"][0]["text"]


def test_a_lock_that_expires_frees_the_record(java: JavaShares, scene: Scene) -> None:
    scene.writes(1, partitions=1)
    slow, quick = scene.joins(java, explicit=True), scene.joins(java)
    (record,) = take(slow, 1)
    (again,) = take(quick, 1)
    assert (record.delivery_count, again.delivery_count) == (1, 2)
    quick.commit()


def test_a_group_is_reset_and_deleted_while_it_is_empty(clients: Clients, scene: Scene) -> None:
    scene.writes(6, partitions=1)
    member = scene.joins(clients)
    take(member, 6)
    member.commit()
    arguments = ("group", "reset", scene.group, "--topic", scene.topic, "--to", "2", "-b", scene.bootstrap)
    assert "in use by 1 consumer" in chronik(*arguments).err
    scene.leaves(member)
    chronik(*arguments)
    assert scene.starts()[0] == (2, 4)
    member = scene.joins(clients)
    assert sorted(int(record.value) for record in take(member, 4)) == [2, 3, 4, 5]
    member.commit()
    scene.leaves(member)
    chronik("group", "delete", scene.group, "-b", scene.bootstrap)
    assert "does not exist" in chronik("group", "describe", scene.group, "-b", scene.bootstrap).err
    assert len(take(scene.joins(clients), 6)) == 6, "a new group starts again"
