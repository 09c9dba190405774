"""The events between two images bring a listener to the newer one, as the commands between them would."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st
from tests.metadata.test_replay import commands

from chronik.metadata.apply import apply
from chronik.metadata.commands import Assignment, Command, CreateTopic
from chronik.metadata.events import (
    BrokerFenced,
    BrokerRegistered,
    BrokerShuttingDown,
    BrokerUnfenced,
    BrokerUnregistered,
    ClusterCreated,
    ConfigChanged,
    Event,
    IsrChanged,
    LeaderChanged,
    PartitionsCreated,
    ReplicasChanged,
    ScramCredentialsChanged,
    TopicCreated,
    TopicDeleted,
    events_between,
)
from chronik.metadata.image import ClusterImage
from chronik.wire.errors import KafkaError


class Follower:
    """Knows only what the events contain."""

    def __init__(self) -> None:
        self.cluster_id = ""
        self.brokers: dict[int, Any] = {}
        self.partitions: dict[tuple[str, int], Any] = {}
        self.configs: dict[tuple[str, str], Any] = {}

    def follow(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case ClusterCreated(cluster_id=cluster_id):
                    self.cluster_id = cluster_id
                case BrokerUnregistered(broker=broker):
                    del self.brokers[broker.id]
                case (
                    BrokerRegistered(broker=broker)
                    | BrokerFenced(broker=broker)
                    | BrokerUnfenced(broker=broker)
                    | BrokerShuttingDown(broker=broker)
                ):
                    self.brokers[broker.id] = broker
                case TopicDeleted(topic=topic):
                    for partition in topic.partitions:
                        del self.partitions[(topic.name, partition.partition)]
                    self.configs.pop(("topic", topic.name), None)
                case TopicCreated(topic=topic):
                    for partition in topic.partitions:
                        assert (topic.name, partition.partition) not in self.partitions
                        self.partitions[(topic.name, partition.partition)] = partition
                    self._configure("topic", topic.name, topic.configs)
                case PartitionsCreated(topic=topic, partitions=added):
                    for partition in added:
                        assert (topic.name, partition.partition) not in self.partitions
                        self.partitions[(topic.name, partition.partition)] = partition
                case ReplicasChanged() | LeaderChanged() | IsrChanged():
                    assert (event.topic, event.partition.partition) in self.partitions
                    self.partitions[(event.topic, event.partition.partition)] = event.partition
                case ConfigChanged(resource=resource, name=name, configs=configs):
                    self._configure(resource, name, configs)

    def _configure(self, resource: str, name: str, configs: Any) -> None:
        if configs:
            self.configs[(resource, name)] = dict(configs)
        else:
            self.configs.pop((resource, name), None)

    def knows(self, image: ClusterImage) -> bool:
        expected = Follower()
        expected.follow([ClusterCreated(image.cluster_id)] if image.cluster_id else [])
        expected.follow(BrokerRegistered(broker) for broker in image.brokers.values())
        expected.follow(TopicCreated(topic) for topic in image.topics.values())
        for name, configs in image.broker_configs.items():
            expected._configure("broker", name, configs)
        return vars(self) == vars(expected)


def applied(image: ClusterImage, given_commands: list[Command]) -> ClusterImage:
    for command in given_commands:
        try:
            image, _ = apply(image, command)
        except KafkaError:
            continue
    return image


@given(st.lists(commands, max_size=12), st.lists(commands, max_size=12))
def test_applying_the_events_between_two_images_produces_the_newer_image(
    before: list[Command], after: list[Command]
) -> None:
    old = applied(ClusterImage(), before)
    new = applied(old, after)
    follower = Follower()
    follower.follow(events_between(ClusterImage(), old))
    assert follower.knows(old)
    follower.follow(events_between(old, new))
    assert follower.knows(new)
    assert events_between(new, new) == []


def test_the_events_of_a_recreated_topic_begin_with_its_deletion() -> None:
    first = applied(ClusterImage(), [CreateTopic("a", UUID(int=1), (Assignment((1,), (1,)),))])
    second = applied(ClusterImage(), [CreateTopic("a", UUID(int=2), (Assignment((1,), (1,)),))])
    kinds = [type(event) for event in events_between(first, second)]
    assert kinds == [TopicDeleted, TopicCreated]


@given(st.lists(commands, max_size=12), st.lists(commands, max_size=12))
def test_events_name_each_user_whose_credentials_changed(before: list[Command], after: list[Command]) -> None:
    old = applied(ClusterImage(), before)
    new = applied(old, after)
    named = [event.users for event in events_between(old, new) if isinstance(event, ScramCredentialsChanged)]
    changed = {user for user in {*old.scram, *new.scram} if old.scram.get(user) != new.scram.get(user)}
    assert named == ([tuple(sorted(changed))] if changed else [])
