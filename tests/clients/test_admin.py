"""The admin calls, through each client that has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.clients.conftest import GetClient, NewName
from tests.clients.drivers.base import ADMINS, FIRST_TIMESTAMP_MS, GROUP_ADMINS, Admin, ClientError, GroupAdmin, Sent
from tests.support.eventually import eventually

UNKNOWN_TOPIC_OR_PARTITION = 3
OFFSET_OUT_OF_RANGE = 1
INVALID_TOPIC_EXCEPTION = 17
TOPIC_ALREADY_EXISTS = 36
INVALID_PARTITIONS = 37
INVALID_CONFIG = 40
NON_EMPTY_GROUP = 68
CreateTopic = Callable[[str, int], None]

each_admin = pytest.mark.parametrize("admin", ADMINS, indirect=True)
each_group_admin = pytest.mark.parametrize("admin", GROUP_ADMINS, indirect=True)


@each_admin
def test_topic_is_created_listed_described_and_deleted(admin: Admin, topic: str) -> None:
    admin.create_topic(topic, 3, {"retention.ms": "3600000"})
    eventually(lambda: topic in admin.topics(), what=f"{topic} is listed")
    assert admin.partition_count(topic) == 3
    assert admin.configs(topic)["retention.ms"] == "3600000"
    admin.delete_topic(topic)
    eventually(lambda: topic not in admin.topics(), what=f"{topic} is gone")


@each_admin
def test_creating_a_topic_twice_is_refused(admin: Admin, topic: str) -> None:
    admin.create_topic(topic, 1)
    with pytest.raises(ClientError) as refused:
        admin.create_topic(topic, 1)
    assert refused.value.code == TOPIC_ALREADY_EXISTS


@each_admin
def test_invalid_topic_names_and_configs_are_refused(admin: Admin, topic: str) -> None:
    with pytest.raises(ClientError) as bad_name:
        admin.create_topic("no/such name", 1)
    assert bad_name.value.code == INVALID_TOPIC_EXCEPTION
    with pytest.raises(ClientError) as bad_config:
        admin.create_topic(topic, 1, {"retention.ms": "long"})
    assert bad_config.value.code == INVALID_CONFIG
    assert topic not in admin.topics()


@each_admin
def test_deleting_an_unknown_topic_is_refused(admin: Admin, topic: str) -> None:
    with pytest.raises(ClientError) as refused:
        admin.delete_topic(topic)
    assert refused.value.code == UNKNOWN_TOPIC_OR_PARTITION


@each_admin
def test_partitions_can_be_added_but_not_removed(admin: Admin, topic: str) -> None:
    admin.create_topic(topic, 1)
    admin.create_partitions(topic, 4)
    eventually(lambda: admin.partition_count(topic) == 4, what=f"{topic} has 4 partitions")
    with pytest.raises(ClientError) as refused:
        admin.create_partitions(topic, 2)
    assert refused.value.code == INVALID_PARTITIONS


@each_admin
def test_config_is_altered_and_described(admin: Admin, topic: str) -> None:
    admin.create_topic(topic, 1)
    assert admin.configs(topic)["cleanup.policy"] == "delete"
    admin.set_config(topic, "cleanup.policy", "compact")
    eventually(lambda: admin.configs(topic)["cleanup.policy"] == "compact", what="the new value is described")
    with pytest.raises(ClientError) as refused:
        admin.set_config(topic, "cleanup.policy", "shred")
    assert refused.value.code == INVALID_CONFIG


@each_admin
def test_deleting_records_advances_the_log_start_offset(
    admin: Admin, topic: str, get_client: GetClient, bootstrap: str, create_topic: CreateTopic
) -> None:
    create_topic(topic, 1)
    client = get_client("kafka-python")
    client.produce(bootstrap, topic, [Sent(b"%d" % number) for number in range(10)])
    assert admin.delete_records(topic, 4) == 4
    got = client.read(bootstrap, topic, 6)
    assert [(record.offset, record.value) for record in got] == [(number, b"%d" % number) for number in range(4, 10)]
    with pytest.raises(ClientError) as refused:
        admin.delete_records(topic, 99)
    assert refused.value.code == OFFSET_OUT_OF_RANGE


@each_admin
def test_group_is_listed_and_described_with_its_offsets(
    admin: Admin, topic: str, new_name: NewName, get_client: GetClient, bootstrap: str, create_topic: CreateTopic
) -> None:
    create_topic(topic, 2)
    group = new_name("group")
    client = get_client("confluent-kafka")
    client.produce(bootstrap, topic, [Sent(b"%d" % number, partition=number % 2) for number in range(10)])
    member = client.join(bootstrap, topic, group)
    try:
        eventually(lambda: len(member.done) == 10, what="the member read all")
        assert group in admin.groups()
        assert admin.describe_group(group) == ("Stable", 1)
        assert admin.committed(group, topic) == {0: 5, 1: 5}
    finally:
        member.leave()
    eventually(lambda: admin.describe_group(group) == ("Empty", 0), what="the group is empty")


@each_group_admin
def test_only_an_empty_group_can_be_deleted(
    admin: GroupAdmin, topic: str, new_name: NewName, get_client: GetClient, bootstrap: str, create_topic: CreateTopic
) -> None:
    create_topic(topic, 1)
    group = new_name("group")
    client = get_client("confluent-kafka")
    client.produce(bootstrap, topic, [Sent(b"one")])
    member = client.join(bootstrap, topic, group)
    try:
        eventually(lambda: len(member.done) == 1, what="the member read its record")
        with pytest.raises(ClientError) as refused:
            admin.delete_group(group)
        assert refused.value.code == NON_EMPTY_GROUP
    finally:
        member.leave()
    admin.delete_group(group)
    assert group not in admin.groups()


@each_group_admin
def test_list_offsets_returns_earliest_latest_and_max_timestamp_offsets(
    admin: GroupAdmin, topic: str, get_client: GetClient, bootstrap: str, create_topic: CreateTopic
) -> None:
    create_topic(topic, 1)
    times_ms = [FIRST_TIMESTAMP_MS + offset for offset in (0, 50, 900, 20, 30)]
    records = [Sent(b"record", timestamp_ms=time_ms) for time_ms in times_ms]
    get_client("kafka-python").produce(bootstrap, topic, records)
    assert admin.list_offset(topic, "earliest") == 0
    assert admin.list_offset(topic, "latest") == 5
    assert admin.list_offset(topic, "max-timestamp") == 2
