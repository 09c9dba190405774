"""Commands change the image exactly as intended."""

from __future__ import annotations

from uuid import UUID

import msgspec
import pytest

from chronik.authentication.scram import ScramCredential
from chronik.metadata.apply import apply
from chronik.metadata.commands import (
    AllocateProducerIds,
    AlterConfigs,
    AlterScramCredentials,
    Assignment,
    ChangePartition,
    ChangePartitions,
    Command,
    CreateCluster,
    CreatePartitions,
    CreateTopic,
    DeleteTopic,
    FenceBroker,
    PartitionChange,
    RegisterBroker,
    ScramKey,
    ScramUpsert,
    ShutDownBroker,
    TopicChanges,
    UnfenceBroker,
)
from chronik.metadata.events import (
    BrokerFenced,
    BrokerRegistered,
    BrokerShuttingDown,
    BrokerUnfenced,
    ConfigChanged,
    Event,
    IsrChanged,
    LeaderChanged,
    PartitionsCreated,
    ProducerIdsAllocated,
    ReplicasChanged,
    ScramCredentialsChanged,
    TopicCreated,
    TopicDeleted,
)
from chronik.metadata.image import ClusterImage
from chronik.wire.errors import ErrorCode, KafkaError

ORDERS = UUID(int=1)
PAYMENTS = UUID(int=2)
ON_ONE = Assignment((1,), (1,))
ON_ALL = Assignment((1, 2, 3), (1, 2, 3))


def applied(*commands: Command, image: ClusterImage | None = None) -> tuple[ClusterImage, list[Event]]:
    """Return the image after the commands, and the events of the last one."""
    image = image or ClusterImage()
    events: list[Event] = []
    for command in commands:
        image, events = apply(image, command)
    return image, events


def refused(code: ErrorCode, *commands: Command) -> None:
    image, _ = applied(*commands[:-1])
    with pytest.raises(KafkaError) as raised:
        apply(image, commands[-1])
    assert raised.value.code == code


def test_a_created_topic_is_found_by_name_and_by_id() -> None:
    image, events = applied(CreateTopic("orders", ORDERS, (ON_ALL, ON_ONE), {"retention.ms": "5"}))
    topic = image.topics["orders"]
    assert image.topic_by_id(ORDERS) is topic
    assert [partition.leader for partition in topic.partitions] == [1, 1]
    assert topic.partitions[0].isr == (1, 2, 3)
    assert topic.configs == {"retention.ms": "5"}
    assert events == [TopicCreated(topic)]


def test_a_partition_without_a_live_replica_starts_without_a_leader() -> None:
    image, _ = applied(CreateTopic("orders", ORDERS, (Assignment((2, 1), (1,)), Assignment((2,), ()))))
    assert [partition.leader for partition in image.topics["orders"].partitions] == [1, -1]


def test_every_command_raises_the_version_by_one() -> None:
    image, _ = applied(CreateCluster("c"), CreateTopic("orders", ORDERS, (ON_ONE,)), AllocateProducerIds(1, 10))
    assert image.version == 3


def test_a_refused_command_leaves_the_image_unchanged() -> None:
    image, _ = applied(CreateTopic("orders", ORDERS, (ON_ONE,)))
    before = msgspec.structs.replace(image)
    with pytest.raises(KafkaError):
        apply(image, CreateTopic("orders", PAYMENTS, (ON_ONE,)))
    assert image == before


def test_creating_a_duplicate_topic_name_topic_id_or_cluster_is_refused() -> None:
    first = CreateTopic("orders", ORDERS, (ON_ONE,))
    refused(ErrorCode.topic_already_exists, first, CreateTopic("orders", PAYMENTS, (ON_ONE,)))
    refused(ErrorCode.invalid_request, first, CreateTopic("payments", ORDERS, (ON_ONE,)))
    refused(ErrorCode.invalid_request, CreateCluster("one"), CreateCluster("two"))


def test_a_deleted_topic_disappears_and_can_be_recreated_with_another_id() -> None:
    image, events = applied(CreateTopic("orders", ORDERS, (ON_ONE,)), DeleteTopic("orders", ORDERS))
    assert image.topics == {} and image.names_by_id == {}
    assert isinstance(events[0], TopicDeleted) and events[0].topic.id == ORDERS
    image, _ = applied(CreateTopic("orders", PAYMENTS, (ON_ONE,)), image=image)
    assert image.topics["orders"].id == PAYMENTS


def test_a_stale_deletion_does_not_delete_the_recreated_topic() -> None:
    refused(
        ErrorCode.unknown_topic_or_partition,
        CreateTopic("orders", PAYMENTS, (ON_ONE,)),
        DeleteTopic("orders", ORDERS),
    )


def test_added_partitions_continue_the_numbering() -> None:
    image, events = applied(
        CreateTopic("orders", ORDERS, (ON_ONE,)), CreatePartitions("orders", ORDERS, 1, (ON_ONE, ON_ONE))
    )
    topic = image.topics["orders"]
    assert [partition.partition for partition in topic.partitions] == [0, 1, 2]
    assert events == [PartitionsCreated(topic, topic.partitions[1:])]


def test_adding_partitions_with_a_wrong_count_or_topic_id_is_refused() -> None:
    created = CreateTopic("orders", ORDERS, (ON_ONE,))
    refused(ErrorCode.invalid_partitions, created, CreatePartitions("orders", ORDERS, 2, (ON_ONE,)))
    refused(ErrorCode.unknown_topic_or_partition, created, CreatePartitions("orders", PAYMENTS, 1, (ON_ONE,)))


def test_a_new_incarnation_bumps_only_the_epochs_of_partitions_that_it_leads() -> None:
    image, _ = applied(
        RegisterBroker(1, UUID(int=10), "a", 9092),
        CreateTopic("orders", ORDERS, (ON_ALL, Assignment((2, 1), (2, 1)))),
        CreateTopic("payments", PAYMENTS, (Assignment((2,), (2,)),)),
    )
    again, events = apply(image, RegisterBroker(1, UUID(int=11), "a", 9093))
    assert [partition.leader_epoch for partition in again.topics["orders"].partitions] == [1, 0]
    assert again.topics["payments"] is image.topics["payments"]
    assert again.brokers[1].port == 9093
    assert isinstance(events[0], BrokerRegistered)
    assert events[1:] == [LeaderChanged("orders", ORDERS, again.topics["orders"].partitions[0])]


def test_the_same_incarnation_keeps_its_broker_epoch() -> None:
    first = RegisterBroker(1, UUID(int=10), "a", 9092)
    image, _ = applied(first, CreateTopic("orders", ORDERS, (ON_ONE,)), first)
    assert image.brokers[1].epoch == 1
    assert image.topics["orders"].partitions[0].leader_epoch == 0
    image, _ = applied(RegisterBroker(1, UUID(int=11), "a", 9092), image=image)
    assert image.brokers[1].epoch == 4


def test_the_first_broker_is_the_controller() -> None:
    image, _ = applied(RegisterBroker(2, UUID(int=1), "a", 1), RegisterBroker(1, UUID(int=2), "b", 2))
    assert image.controller_id == 2


def test_a_leader_change_starts_a_new_leader_epoch_and_an_isr_change_does_not() -> None:
    created = CreateTopic("orders", ORDERS, (ON_ALL,))
    image, events = applied(created, ChangePartition(ORDERS, 0, partition_epoch=0, leader=1, isr=(1, 2)))
    partition = image.topics["orders"].partitions[0]
    assert (partition.leader_epoch, partition.partition_epoch, partition.isr) == (0, 1, (1, 2))
    assert events == [IsrChanged("orders", ORDERS, partition)]
    image, events = apply(image, ChangePartition(ORDERS, 0, partition_epoch=1, leader=2, isr=(1, 2)))
    partition = image.topics["orders"].partitions[0]
    assert (partition.leader, partition.leader_epoch, partition.partition_epoch) == (2, 1, 2)
    assert events == [LeaderChanged("orders", ORDERS, partition)]


def test_a_change_based_on_a_stale_partition_epoch_is_refused() -> None:
    refused(
        ErrorCode.invalid_update_version,
        CreateTopic("orders", ORDERS, (ON_ALL,)),
        ChangePartition(ORDERS, 0, 0, leader=1, isr=(1, 2)),
        ChangePartition(ORDERS, 0, 0, leader=2, isr=(2,)),
    )
    refused(ErrorCode.unknown_topic_or_partition, ChangePartition(ORDERS, 0, 0, leader=2, isr=(2,)))


def test_configs_are_set_and_unset_individually() -> None:
    image, _ = applied(
        CreateTopic("orders", ORDERS, (ON_ONE,), {"retention.ms": "5", "segment.ms": "6"}),
    )
    image, events = apply(image, AlterConfigs("topic", "orders", {"retention.ms": None, "flush.ms": "7"}))
    assert image.topics["orders"].configs == {"segment.ms": "6", "flush.ms": "7"}
    assert events == [
        ConfigChanged("topic", "orders", {"segment.ms": "6", "flush.ms": "7"}, ("flush.ms", "retention.ms"))
    ]
    image, _ = apply(image, AlterConfigs("broker", "", {"log.retention.ms": "8"}))
    assert image.broker_configs == {"": {"log.retention.ms": "8"}}
    with pytest.raises(KafkaError):
        apply(image, AlterConfigs("topic", "missing", {}))


def test_producer_ids_are_allocated_only_once() -> None:
    image, first = applied(AllocateProducerIds(1, 1000))
    _, second = applied(AllocateProducerIds(2, 1000), image=image)
    assert first == [ProducerIdsAllocated(1, 0, 1000)]
    assert second == [ProducerIdsAllocated(2, 1000, 1000)]


def test_changing_one_topic_shares_all_other_topics_with_the_previous_image() -> None:
    image, _ = applied(
        *(CreateTopic(f"topic-{index}", UUID(int=index), (ON_ONE,)) for index in range(50)),
    )
    after, _ = apply(image, AlterConfigs("topic", "topic-7", {"retention.ms": "5"}))
    assert all(after.topics[name] is topic for name, topic in image.topics.items() if name != "topic-7")
    assert after.names_by_id is image.names_by_id


def test_a_registration_applies_its_changes_before_it_bumps_leader_epochs() -> None:
    image, _ = applied(
        RegisterBroker(1, UUID(int=10), "a", 9092),
        CreateTopic("orders", ORDERS, (ON_ALL, ON_ALL)),
    )
    moved = PartitionChange(0, 0, 2, (2, 3))
    again, _ = apply(
        image, RegisterBroker(1, UUID(int=11), "a", 9092, changes=(TopicChanges(ORDERS, (moved,)),), starts_fenced=True)
    )
    found = again.topics["orders"].partitions
    assert [(each.leader, each.isr, each.leader_epoch) for each in found] == [(2, (2, 3), 1), (1, (1, 2, 3), 1)]
    assert again.brokers[1].is_fenced and again.brokers[1].status_version == again.version


def test_a_registration_with_one_stale_change_is_refused_entirely() -> None:
    stale = TopicChanges(ORDERS, (PartitionChange(0, 7, 2, (2, 3)),))
    refused(
        ErrorCode.invalid_update_version,
        CreateTopic("orders", ORDERS, (ON_ALL,)),
        RegisterBroker(1, UUID(int=11), "a", 9092, changes=(stale,)),
    )
    unknown = TopicChanges(PAYMENTS, (PartitionChange(0, 0, 2, (2, 3)),))
    refused(ErrorCode.unknown_topic_or_partition, RegisterBroker(1, UUID(int=11), "a", 9092, changes=(unknown,)))


def test_fencing_and_unfencing_require_the_current_broker_epoch() -> None:
    register = RegisterBroker(1, UUID(int=10), "a", 9092)
    refused(ErrorCode.stale_broker_epoch, register, FenceBroker(1, 7))
    refused(ErrorCode.broker_id_not_registered, register, FenceBroker(2, 1))
    image, events = applied(register, FenceBroker(1, 1))
    assert image.brokers[1].is_fenced and image.brokers[1].status_version == 2
    assert events == [BrokerFenced(image.brokers[1])]
    assert image.live_brokers() == []
    image, events = apply(image, UnfenceBroker(1, 1))
    assert events == [BrokerUnfenced(image.brokers[1])]
    image, events = apply(image, ShutDownBroker(1, 1))
    assert events == [BrokerShuttingDown(image.brokers[1])]
    assert (image.live_brokers(), image.staying_brokers()) == ([image.brokers[1]], [])
    image, _ = apply(image, RegisterBroker(1, UUID(int=10), "a", 9092))
    assert image.brokers[1].is_shutting_down, "the same process that asks again is what it was"
    image, _ = apply(image, RegisterBroker(1, UUID(int=11), "a", 9092))
    assert not image.brokers[1].is_shutting_down


def test_a_change_of_many_partitions_skips_stale_changes() -> None:
    created = CreateTopic("orders", ORDERS, (ON_ALL, ON_ALL))
    fits, stale = PartitionChange(0, 0, 2, (2, 3), (1,)), PartitionChange(1, 4, 2, (2, 3))
    gone = TopicChanges(PAYMENTS, (PartitionChange(0, 0, 2, (2, 3)),))
    image, events = applied(created, ChangePartitions((gone, TopicChanges(ORDERS, (fits, stale, fits)))))
    first, second = image.topics["orders"].partitions
    assert (first.leader, first.isr, first.eligible, first.partition_epoch) == (2, (2, 3), (1,), 1)
    assert second.leader == 1
    assert events == [LeaderChanged("orders", ORDERS, first), IsrChanged("orders", ORDERS, first)]
    refused(ErrorCode.invalid_update_version, created, ChangePartitions((gone, TopicChanges(ORDERS, (stale,)))))


@pytest.mark.parametrize(
    "change",
    [
        PartitionChange(0, 0, 1, (2, 3)),
        PartitionChange(0, 0, 4, (4,)),
        PartitionChange(0, 0, 1, (1, 1)),
        PartitionChange(0, 0, 1, (1, 2), (2,)),
        PartitionChange(0, 0, 1, (1, 2), (9,)),
        PartitionChange(0, 0, 1, (1, 2), (), (2, 3)),
    ],
)
def test_a_change_that_violates_an_invariant_is_refused(change: PartitionChange) -> None:
    refused(
        ErrorCode.invalid_request,
        CreateTopic("orders", ORDERS, (ON_ALL,)),
        ChangePartitions((TopicChanges(ORDERS, (change,)),)),
    )


def test_the_image_keeps_the_last_known_leader_while_a_partition_has_no_leader() -> None:
    image, _ = applied(
        CreateTopic("orders", ORDERS, (ON_ALL,)),
        ChangePartition(ORDERS, 0, 0, leader=2, isr=(2,)),
        ChangePartition(ORDERS, 0, 1, leader=-1, isr=(2,)),
        ChangePartition(ORDERS, 0, 2, leader=-1, isr=(2,), eligible=(3,)),
    )
    partition = image.topics["orders"].partitions[0]
    assert (partition.last_known_leader, partition.leader_epoch) == (2, 2)
    image, _ = apply(image, ChangePartition(ORDERS, 0, 3, leader=3, isr=(3,)))
    assert image.topics["orders"].partitions[0].last_known_leader == -1


def test_the_replicas_changed_event_precedes_the_leader_changed_event() -> None:
    image, events = applied(
        CreateTopic("orders", ORDERS, (ON_ALL,)),
        ChangePartition(ORDERS, 0, 0, 4, (4, 2), replicas=(4, 2), adding=(), removing=()),
    )
    partition = image.topics["orders"].partitions[0]
    assert events == [
        ReplicasChanged("orders", ORDERS, partition, (4,), (1, 3)),
        LeaderChanged("orders", ORDERS, partition),
        IsrChanged("orders", ORDERS, partition),
    ]


def test_a_change_of_only_the_partition_epoch_emits_an_isr_changed_event() -> None:
    image, events = applied(CreateTopic("orders", ORDERS, (ON_ALL,)), ChangePartition(ORDERS, 0, 0, 1, (1, 2, 3)))
    assert events == [IsrChanged("orders", ORDERS, image.topics["orders"].partitions[0])]


def test_scram_credentials_are_altered_as_a_whole() -> None:
    credential, other = (ScramCredential(b"salt", b"stored", b"server", count) for count in (4096, 8192))
    created = AlterScramCredentials(
        upserts=(ScramUpsert("alice", "SCRAM-SHA-256", credential), ScramUpsert("bob", "SCRAM-SHA-512", credential))
    )
    image, events = applied(created)
    assert image.scram == {"alice": {"SCRAM-SHA-256": credential}, "bob": {"SCRAM-SHA-512": credential}}
    assert events == [ScramCredentialsChanged(("alice", "bob"))]
    altered = AlterScramCredentials(
        deletions=(ScramKey("bob", "SCRAM-SHA-512"),), upserts=(ScramUpsert("alice", "SCRAM-SHA-512", other),)
    )
    image, events = applied(altered, image=image)
    assert image.scram == {"alice": {"SCRAM-SHA-256": credential, "SCRAM-SHA-512": other}}
    assert events == [ScramCredentialsChanged(("alice", "bob"))]
    missing = AlterScramCredentials(
        deletions=(ScramKey("alice", "SCRAM-SHA-256"), ScramKey("bob", "SCRAM-SHA-512")),
    )
    refused(ErrorCode.resource_not_found, created, altered, missing)


def test_no_representation_of_metadata_contains_keys() -> None:
    credential = ScramCredential(b"salt", b"the-stored-key", b"the-server-key", 4096)
    command = AlterScramCredentials(upserts=(ScramUpsert("alice", "SCRAM-SHA-256", credential),))
    image, events = applied(command)
    assert "the-s" not in f"{command!r} {image!r} {events!r}"
