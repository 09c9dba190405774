"""A decision that takes several steps: each is bounded, all partitions that need it are examined, nothing is early."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.metadata.controlled_cluster import ORDERS, Cluster

from chronik.metadata import controller as controller_module
from chronik.metadata.calls import HeartbeatResult
from chronik.metadata.commands import AlterConfigs, ChangePartition, Command, DeleteTopic
from chronik.metadata.elections import UNCLEAN_ELECTION, Draft, Loss, TopicRules
from chronik.metadata.image import NO_LEADER

BROKERS = 4
TOPICS = 3
PLACES = ((1, 2, 3), (2, 3, 4), (3, 4), (4,), (1, 4, 2))


def topic_id(number: int) -> UUID:
    return UUID(int=500 + number)


class SteppedCluster(Cluster):
    """Drives the controller as the node does: without a pause while it is behind."""

    def due(self) -> list[Command]:
        commands = super().due()
        while self.controller.is_behind:
            commands += super().due()
        return commands

    def check_nothing_was_missed(self) -> None:
        """A controller that examined every partition now would change nothing that this one does not wait for."""
        assert self.due() == [] or self.due() == []
        controller = self.controller
        states = controller._states
        for topic in self.image.topics.values():
            rules = TopicRules.of(self.image, topic)
            for partition in topic.partitions:
                key = (topic.name, partition.partition)
                draft = Draft(partition)
                draft.settle(states, rules)
                if key not in controller._undecided:
                    assert draft.change() is None and not draft.is_waiting, (key, partition)


brokers = st.integers(1, BROKERS)
events = st.one_of(
    st.tuples(st.sampled_from(["die", "vanish", "return", "leave", "fill disk", "free disk"]), brokers),
    st.tuples(st.sampled_from(["create", "delete", "allow unclean"]), st.integers(0, TOPICS - 1)),
    st.tuples(st.sampled_from(["run", "take over"]), st.sampled_from([0, 100, 300, 2_500])),
)


def play(cluster: Cluster, event: str, number: int) -> None:
    name = f"topic-{number}"
    match event:
        case "die" | "vanish" if number in cluster.alive:
            cluster.die(number, is_noticed=event == "die")
        case "return" if number not in cluster.alive:
            cluster.restart(number)
        case "leave" if number in cluster.alive:
            cluster.leaving.add(number)
        case "fill disk":
            cluster.sick.add(number)
        case "free disk":
            cluster.sick.discard(number)
        case "create" if name not in cluster.image.topics:
            live = {broker.id for broker in cluster.image.staying_brokers()}
            places = [place for place in PLACES[number:] if live.issuperset(place)]
            if places:
                cluster.create(name, *places, topic_id=topic_id(number))
        case "delete" if name in cluster.image.topics:
            cluster.apply(DeleteTopic(name, topic_id(number)))
        case "allow unclean":
            cluster.apply(AlterConfigs("broker", "", {UNCLEAN_ELECTION: "true" if number else "false"}))
        case "run":
            cluster.run(number)
        case "take over":
            cluster.change_controller()
            cluster.run(number)


@settings(max_examples=150)
@given(st.lists(events, max_size=25), st.integers(1, 4))
def test_no_partition_that_needs_a_change_is_missed(history: list[tuple[str, int]], step: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller_module, "PARTITIONS_PER_STEP", step)
        cluster = SteppedCluster(BROKERS)
        for number in range(TOPICS):
            play(cluster, "create", number)
        for event, number in history:
            play(cluster, event, number)
            cluster.due()
        cluster.check_nothing_was_missed()


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Three brokers with five topics of one partition, and a new controller that examines one in each step."""
    cluster = Cluster()
    for number in range(4):
        cluster.create(f"a-{number}", (1, 2, 3), topic_id=topic_id(number))
    cluster.create("orders", (1, 2, 3))
    cluster.run(400)
    monkeypatch.setattr(controller_module, "PARTITIONS_PER_STEP", 1)
    cluster.change_controller()
    return cluster


def without_leader(cluster: Cluster) -> None:
    now = cluster.partition()
    cluster.apply(ChangePartition(ORDERS, 0, now.partition_epoch, NO_LEADER, (2, 3)))
    cluster.change_controller()


def test_a_step_examines_a_bounded_number_of_partitions(one_at_a_time: Cluster) -> None:
    one_at_a_time.die(1, is_noticed=True)
    steps = 1
    while one_at_a_time.controller.is_behind:
        assert len(one_at_a_time.due()) <= 1
        steps += 1
    assert steps >= 5
    one_at_a_time.run(3_000)
    assert all(topic.partitions[0].leader == 2 for topic in one_at_a_time.image.topics.values())


def test_a_broker_may_not_stop_while_partitions_are_left_to_examine(one_at_a_time: Cluster) -> None:
    one_at_a_time.leaving.add(1)
    answers: list[HeartbeatResult] = []
    for _ in range(3):
        answers.append(one_at_a_time.beat(1))
        one_at_a_time.due()
        assert one_at_a_time.controller.is_behind
        one_at_a_time.now_ms += 200
    assert not any(answer.should_shut_down for answer in answers)
    assert not one_at_a_time.broker(1).is_shutting_down


def test_nobody_is_elected_while_a_former_leader_may_be_overlooked(one_at_a_time: Cluster) -> None:
    without_leader(one_at_a_time)
    one_at_a_time.applied[1] = one_at_a_time.image.version - 1
    for broker_id in (1, 2, 3):
        one_at_a_time.beat(broker_id)
    assert one_at_a_time.report(3, loss=Loss.CERTAIN) is None
    assert one_at_a_time.isr == (2,)
    assert one_at_a_time.leader == NO_LEADER
    del one_at_a_time.applied[1]
    one_at_a_time.run(2_000)
    assert one_at_a_time.leader == 2


def test_a_partition_without_a_leader_is_examined_when_a_replica_is_first_heard(one_at_a_time: Cluster) -> None:
    """No broker is absent, and nothing waits for a former leader: the partition is as a restored image has it."""
    image = one_at_a_time.image
    topic = image.topics["orders"]
    restored = replace(topic.partitions[0], leader=NO_LEADER, isr=(3,))
    one_at_a_time.image = replace(image, topics={**image.topics, "orders": replace(topic, partitions=(restored,))})
    one_at_a_time.change_controller()
    one_at_a_time.due()
    while one_at_a_time.controller.is_behind:
        one_at_a_time.due()
    assert one_at_a_time.leader == NO_LEADER
    one_at_a_time.beat(3)
    one_at_a_time.due()
    assert one_at_a_time.leader == 3
