"""The same commands produce the same image, whether replayed from their bytes or from a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chronik.authentication.scram import ScramCredential
from chronik.metadata.apply import apply
from chronik.metadata.commands import (
    AllocateProducerIds,
    AlterClientQuotas,
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
    UnregisterBroker,
    decode_command,
    encode_command,
)
from chronik.metadata.image import ClusterImage, decode_image, encode_image
from chronik.quotas.entities import make_entity
from chronik.wire.errors import KafkaError

names = st.sampled_from(["a", "b", "c", "__consumer_offsets"])
ids = st.integers(0, 5).map(lambda number: UUID(int=number))
brokers = st.integers(1, 3)
configs = st.dictionaries(st.sampled_from(["retention.ms", "x", ""]), st.text(max_size=3), max_size=2)


@st.composite
def assignments(draw: st.DrawFn) -> Assignment:
    replicas = tuple(draw(st.lists(brokers, min_size=1, max_size=3, unique=True)))
    return Assignment(replicas, replicas[: draw(st.integers(0, len(replicas)))])


partitions = st.lists(assignments(), min_size=1, max_size=3).map(tuple)


@st.composite
def partition_changes(draw: st.DrawFn) -> PartitionChange:
    replicas = tuple(draw(st.lists(brokers, min_size=1, max_size=3, unique=True)))
    isr = replicas[: draw(st.integers(0, len(replicas)))]
    return PartitionChange(
        draw(st.integers(0, 3)),
        draw(st.integers(0, 3)),
        draw(st.sampled_from([-1, *isr])),
        isr,
        draw(st.sampled_from([(), replicas[len(isr) :]])),
        draw(st.sampled_from([None, replicas])),
        draw(st.sampled_from([None, (), replicas[-1:]])),
        draw(st.sampled_from([None, ()])),
    )


topic_changes = st.lists(
    st.builds(TopicChanges, ids, st.lists(partition_changes(), max_size=3).map(tuple)), max_size=2
).map(tuple)
users = st.sampled_from(["alice", "bob"])
mechanisms = st.sampled_from(["SCRAM-SHA-256", "SCRAM-SHA-512"])
small_bytes = st.binary(max_size=3)
credentials = st.builds(ScramCredential, small_bytes, small_bytes, small_bytes, st.integers(4096, 16384))
commands: st.SearchStrategy[Command] = st.one_of(
    st.builds(CreateCluster, st.text(min_size=1, max_size=4)),
    st.builds(
        RegisterBroker, brokers, ids, st.text(max_size=3), st.integers(0, 65535), st.none() | st.text(max_size=2)
    ),
    st.builds(CreateTopic, names, ids, partitions, configs),
    st.builds(DeleteTopic, names, ids),
    st.builds(CreatePartitions, names, ids, st.integers(0, 4), partitions),
    st.builds(
        ChangePartition, ids, st.integers(0, 3), st.integers(0, 3), brokers, st.lists(brokers, max_size=3).map(tuple)
    ),
    st.builds(
        AlterConfigs,
        st.sampled_from(["topic", "broker"]),
        names,
        st.dictionaries(st.text(max_size=2), st.none() | st.text(max_size=2), max_size=2),
    ),
    st.builds(
        AlterClientQuotas,
        st.sampled_from([make_entity([("user", "a")]), make_entity([("user", None)]), make_entity([("ip", "::1")])]),
        st.dictionaries(st.sampled_from(["producer_byte_rate", "request_percentage"]), st.none() | st.floats(1, 9)),
    ),
    st.builds(AllocateProducerIds, brokers, st.integers(1, 1000)),
    st.builds(
        RegisterBroker,
        brokers,
        ids,
        st.just("h"),
        st.just(1),
        was_clean=st.booleans(),
        durability=st.sampled_from(["synced", "replicated"]),
        folder_id=st.none() | ids,
        starts_fenced=st.booleans(),
    ),
    st.builds(FenceBroker, brokers, st.integers(1, 9), topic_changes),
    st.builds(UnfenceBroker, brokers, st.integers(1, 9), topic_changes),
    st.builds(ShutDownBroker, brokers, st.integers(1, 9), topic_changes),
    st.builds(UnregisterBroker, brokers, st.integers(1, 9)),
    st.builds(ChangePartitions, topic_changes),
    st.builds(
        AlterScramCredentials,
        st.lists(st.builds(ScramKey, users, mechanisms), max_size=2).map(tuple),
        st.lists(st.builds(ScramUpsert, users, mechanisms, credentials), max_size=2).map(tuple),
    ),
)


def run(sequence: Sequence[Command], image: ClusterImage | None = None) -> tuple[ClusterImage, list[Command]]:
    """Return the image after the commands that could be applied, and those commands."""
    image = image or ClusterImage()
    fitting = []
    for command in sequence:
        try:
            image, _ = apply(image, command)
        except KafkaError:
            continue
        fitting.append(command)
    return image, fitting


@given(st.lists(commands, max_size=20))
def test_commands_replayed_from_their_bytes_give_the_same_image(sequence: list[Command]) -> None:
    image, fitting = run(sequence)
    replayed, again = run([decode_command(encode_command(command)) for command in fitting])
    assert again == fitting
    assert replayed == image
    assert encode_image(replayed) == encode_image(image)


@given(st.lists(commands, max_size=20), st.integers(0, 20))
def test_a_snapshot_and_the_commands_after_it_give_the_same_image(sequence: list[Command], cut: int) -> None:
    image, fitting = run(sequence)
    before, _ = run(fitting[:cut])
    snapshot = decode_image(encode_image(before))
    assert snapshot == before
    after, _ = run(fitting[cut:], snapshot)
    assert after == image


@given(st.lists(commands, max_size=20))
def test_the_image_keeps_its_invariants(sequence: list[Command]) -> None:
    image, fitting = run(sequence)
    assert image.version == len(fitting)
    assert {topic.id: name for name, topic in image.topics.items()} == dict(image.names_by_id)
    assert all(image.scram.values())
    for name, topic in image.topics.items():
        assert topic.name == name
        assert [partition.partition for partition in topic.partitions] == list(range(len(topic.partitions)))
        for partition in topic.partitions:
            assert set(partition.isr) <= set(partition.replicas)
            assert partition.leader == -1 or partition.leader in partition.isr
            assert not set(partition.eligible) & set(partition.isr)


def test_a_command_of_a_newer_version_with_an_extra_field_can_be_decoded() -> None:
    data = msgspec.msgpack.decode(encode_command(DeleteTopic("a", UUID(int=1))))
    assert decode_command(msgspec.msgpack.encode({**data, "reason": "later"})) == DeleteTopic("a", UUID(int=1))


def test_a_command_of_an_older_version_with_fewer_fields_can_be_decoded() -> None:
    data = msgspec.msgpack.decode(encode_command(RegisterBroker(1, UUID(int=1), "h", 1, "r")))
    del data["rack"]
    assert decode_command(msgspec.msgpack.encode(data)) == RegisterBroker(1, UUID(int=1), "h", 1, None)


@pytest.mark.parametrize(
    ("old", "now"),
    [
        (
            {
                "type": "register_broker",
                "broker_id": 1,
                "incarnation": str(UUID(int=1)),
                "host": "h",
                "port": 1,
                "rack": None,
            },
            RegisterBroker(1, UUID(int=1), "h", 1),
        ),
        (
            {
                "type": "change_partition",
                "topic_id": str(UUID(int=1)),
                "partition": 0,
                "partition_epoch": 3,
                "leader": 2,
                "isr": [2, 1],
            },
            ChangePartition(UUID(int=1), 0, 3, 2, (2, 1)),
        ),
        (
            {"type": "change_partitions", "changes": [[str(UUID(int=1)), [[0, 3, 2, [2, 1]]]]]},
            ChangePartitions((TopicChanges(UUID(int=1), (PartitionChange(0, 3, 2, (2, 1)),)),)),
        ),
    ],
)
def test_commands_written_by_older_versions_can_be_decoded(old: dict[str, object], now: Command) -> None:
    assert decode_command(msgspec.msgpack.encode(old)) == now


def test_an_image_written_by_an_older_version_can_be_decoded() -> None:
    partition = {"partition": 0, "leader": 1, "leader_epoch": 0, "replicas": [1], "isr": [1], "partition_epoch": 0}
    topic = {"name": "a", "id": str(UUID(int=1)), "partitions": [partition], "configs": {}}
    broker = {"id": 1, "epoch": 1, "host": "h", "port": 1, "incarnation": str(UUID(int=1)), "rack": None}
    data = msgspec.msgpack.encode(
        {"cluster_id": "c", "version": 2, "topics": {"a": topic}, "brokers": {1: {**broker, "is_fenced": False}}}
    )
    image = decode_image(data)
    assert image.topics["a"].partitions[0].eligible == ()
    assert image.brokers[1].may_join_isr


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode({"type": "unheard_from"}), b"\x80"])
def test_bytes_that_are_not_a_known_command_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_command(data)


def test_an_image_of_five_thousand_partitions_survives_its_snapshot() -> None:
    image, _ = run(
        [
            CreateTopic(f"topic-{index}", UUID(int=index), (Assignment((1, 2, 3), (1, 2, 3)),) * 10)
            for index in range(500)
        ]
    )
    assert decode_image(encode_image(image)) == image
