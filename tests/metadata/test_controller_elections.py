"""Which replica leads after failures and restarts in any order, and which replicas never may."""

from __future__ import annotations

from itertools import permutations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.metadata.controlled_cluster import Cluster

from chronik.metadata.commands import AlterConfigs, FenceBroker
from chronik.metadata.elections import BrokerStates, Draft, TopicRules, is_settled, plan_unclean_elections
from chronik.metadata.image import NO_LEADER, PartitionImage
from chronik.wire.errors import ErrorCode


def test_the_first_live_replica_in_the_isr_becomes_the_leader() -> None:
    cluster = Cluster()
    cluster.create("orders", (3, 1, 2))
    cluster.die(3)
    assert (cluster.leader, cluster.isr) == (1, (1, 2))
    assert cluster.partition().leader_epoch == 1


def test_a_replica_outside_the_isr_is_never_elected() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.join(1, 2)
    cluster.die(1, 2)
    cluster.run(10_000)
    assert cluster.leader == NO_LEADER
    assert cluster.partition().last_known_leader in (1, 2)


def test_a_replica_that_leaves_a_large_enough_isr_is_not_eligible() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.die(3)
    assert (cluster.isr, cluster.partition().eligible) == ((1, 2), ())


def test_a_replica_that_leaves_an_isr_below_the_minimum_stays_eligible_to_lead() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.die(3)
    cluster.die(2)
    assert (cluster.leader, cluster.isr, cluster.partition().eligible) == (1, (1,), (2,))
    cluster.die(1)
    assert (cluster.leader, cluster.isr, cluster.partition().eligible) == (NO_LEADER, (1,), (2,))
    cluster.restart(3)
    cluster.run(600)
    assert cluster.leader == NO_LEADER
    cluster.restart(2)
    cluster.run(600)
    assert (cluster.leader, cluster.isr, cluster.partition().eligible) == (2, (2,), (1,))


def test_eligible_leaders_are_cleared_when_the_isr_reaches_its_minimum_again() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.die(2, 3)
    assert cluster.partition().eligible == (2, 3)
    cluster.restart(2)
    cluster.run(600)
    cluster.join(1, 2)
    assert cluster.partition().eligible == ()


@pytest.mark.parametrize("configs", [{"min.insync.replicas": "1"}, {"min.insync.replicas": None}])
def test_eligible_leaders_are_cleared_when_the_topic_minimum_changes(configs: dict[str, str | None]) -> None:
    cluster = Cluster()
    cluster.create(min_insync_replicas="2")
    cluster.die(2, 3)
    assert cluster.partition().eligible
    cluster.apply(AlterConfigs("topic", "orders", configs))
    assert (cluster.partition().eligible, cluster.isr) == ((), (1,))


def test_eligible_leaders_are_cleared_when_the_cluster_minimum_changes() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.die(2, 3)
    cluster.apply(AlterConfigs("broker", "", {"min.insync.replicas": "1"}))
    assert cluster.partition().eligible == ()


@pytest.mark.parametrize("order", permutations((1, 2, 3)))
def test_after_all_replicas_die_together_the_first_replica_to_return_leads(order: tuple[int, ...]) -> None:
    """All replicas in the ISR were killed together, so each has every committed record."""
    cluster = Cluster()
    cluster.create()
    cluster.die(1, 2, 3, is_noticed=False)
    cluster.run(3_000)
    assert (cluster.leader, cluster.isr) == (NO_LEADER, (1, 2, 3))
    cluster.change_controller()
    cluster.restart(order[0])
    cluster.run(600)
    assert cluster.leader == order[0]
    for returning in order[1:]:
        cluster.restart(returning)
        cluster.run(600)
    assert cluster.leader == order[0]
    cluster.join(1, 2, 3)
    cluster.run(8_000)
    assert (cluster.leader, sorted(cluster.isr)) == (1, [1, 2, 3])


@pytest.mark.parametrize("order", permutations((1, 2, 3)))
def test_a_partition_gets_a_leader_at_once_after_all_replicas_restart_unnoticed(order: tuple[int, ...]) -> None:
    cluster = Cluster()
    cluster.create()
    cluster.alive.clear()
    cluster.change_controller()
    for returning in order:
        cluster.restart(returning)
    assert set(cluster.isr) == {1, 2, 3}
    cluster.run(400)
    assert cluster.leader == 1
    assert cluster.partition().leader_epoch > 0


@pytest.mark.parametrize("order", permutations((1, 2, 3)))
def test_after_the_isr_dies_one_by_one_only_its_last_or_an_eligible_replica_leads(order: tuple[int, ...]) -> None:
    cluster = Cluster()
    cluster.create()
    for dying in (3, 2, 1):
        cluster.die(dying)
        cluster.run(300)
    leaders = []
    for returning in order:
        cluster.restart(returning)
        cluster.run(600)
        leaders.append(cluster.leader)
    assert next(leader for leader in leaders if leader != NO_LEADER) == next(each for each in order if each != 3)


def test_the_only_replica_leads_again_in_a_new_leader_epoch_after_a_restart() -> None:
    cluster = Cluster(1)
    cluster.create("orders", (1,))
    cluster.die(1)
    assert (cluster.leader, cluster.isr) == (NO_LEADER, (1,))
    epoch = cluster.partition().leader_epoch
    cluster.restart(1)
    cluster.run(600)
    assert cluster.leader == 1
    assert cluster.partition().leader_epoch > epoch


def test_the_controller_elects_neither_of_two_brokers_that_die_together() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.controller.broker_gone(1, cluster.now_ms)
    cluster.controller.broker_gone(2, cluster.now_ms)
    cluster.alive -= {1, 2}
    cluster.due()
    assert cluster.leader == 3
    assert cluster.partition().leader_epoch == 1


def test_a_new_controller_completes_elections_that_the_old_controller_began() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.alive.discard(1)
    cluster.controller.broker_gone(1, cluster.now_ms)
    fencing = cluster.controller.due(cluster.now_ms)[0]
    assert isinstance(fencing, FenceBroker)
    cluster.apply(msgspec.structs.replace(fencing, changes=()))
    cluster.change_controller()
    cluster.run(400)
    assert cluster.leader == 2


def test_an_unclean_election_requires_the_topic_to_enable_it() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.join(1, 2)
    cluster.die(1, 2)
    cluster.run(1_000)
    assert cluster.leader == NO_LEADER
    cluster.apply(AlterConfigs("topic", "orders", {"unclean.leader.election.enable": "true"}))
    cluster.run(200)
    assert (cluster.leader, cluster.isr, cluster.partition().eligible) == (3, (3,), ())


def test_a_requested_unclean_election_elects_a_live_replica_or_returns_an_error() -> None:
    cluster = Cluster()
    cluster.create("orders", (2, 3, 1), min_insync_replicas="1")
    cluster.join(2)
    cluster.die(2)
    states = BrokerStates.of(cluster.image)
    plan = plan_unclean_elections(cluster.image, states, [("orders", 0), ("orders", 1)])
    assert plan.command is not None
    assert plan.outcomes[0] is None
    assert plan.outcomes[1] is not None and plan.outcomes[1].code == ErrorCode.unknown_topic_or_partition
    cluster.apply(plan.command)
    assert (cluster.leader, cluster.isr) == (3, (3,))
    again = plan_unclean_elections(cluster.image, BrokerStates.of(cluster.image), [("orders", 0)])
    assert again.outcomes[0] is not None and again.outcomes[0].code == ErrorCode.election_not_needed
    cluster.die(1, 3)
    none = plan_unclean_elections(cluster.image, BrokerStates.of(cluster.image), [("orders", 0)])
    assert none.outcomes[0] is not None and none.outcomes[0].code == ErrorCode.eligible_leaders_not_available


def test_a_preferred_election_requests_a_transfer_to_an_in_sync_preferred_leader() -> None:
    cluster = Cluster()
    cluster.create()

    def outcome() -> ErrorCode | None:
        (error,) = cluster.controller.elect_preferred([("orders", 0)], cluster.now_ms)
        return None if error is None else error.code

    assert outcome() == ErrorCode.election_not_needed
    cluster.die(1)
    assert outcome() == ErrorCode.preferred_leader_not_available
    cluster.restart(1)
    cluster.run(600)
    cluster.join(1, 2, 3)
    assert outcome() is None
    assert [(each.partition, each.to) for each in cluster.beat(2).hand_overs] == [(0, 1)]
    cluster.alter_isr(cluster.proposal((1, 2, 3), hand_over_to=1))
    assert (cluster.leader, cluster.isr) == (1, (1, 2, 3))
    assert cluster.beat(2).hand_overs == ()


def cluster_with_an_unaware_leader() -> Cluster:
    """Return a cluster in which broker 1 leads, should hand over to 2, and no longer applies the metadata."""
    cluster = Cluster()
    cluster.create("orders", (2, 1, 3))
    cluster.alter_isr(cluster.proposal((1, 2, 3), hand_over_to=1))
    cluster.applied[1] = cluster.image.version
    cluster.controller.elect_preferred([("orders", 0)], cluster.now_ms)
    return cluster


def test_an_election_waits_until_the_old_leader_knows_that_it_no_longer_leads() -> None:
    """Found by the simulator (three-nodes seed 106): two leaders served for a moment, and the end offset went back."""
    cluster = cluster_with_an_unaware_leader()
    cluster.run(cluster.settings.requested_hand_over_ms + 400)
    assert (cluster.leader, cluster.partition().last_known_leader) == (NO_LEADER, 1), "1 may still serve"
    del cluster.applied[1]
    cluster.run(300)
    assert cluster.leader == 2


def test_an_election_waits_for_an_uninformed_old_leader_until_its_lease_ends() -> None:
    cluster = cluster_with_an_unaware_leader()
    cluster.run(cluster.settings.requested_hand_over_ms + 200)
    cluster.run(2 * cluster.settings.session_timeout_ms - 200)
    assert cluster.leader == NO_LEADER
    assert cluster.beat(1).lease_ms == 0
    cluster.run(600)
    assert cluster.leader == 2


def test_a_new_controller_also_waits_until_the_old_leader_knows_it_no_longer_leads() -> None:
    cluster = cluster_with_an_unaware_leader()
    while cluster.leader != NO_LEADER:
        cluster.run(100)
    cluster.change_controller()
    cluster.run(700)
    assert cluster.leader == NO_LEADER
    del cluster.applied[1]
    cluster.run(400)
    assert cluster.leader == 2


@given(st.data())
def test_a_partition_that_counts_as_settled_needs_no_change(data: st.DataObject) -> None:
    replicas = tuple(data.draw(st.permutations((1, 2, 3)))[: data.draw(st.integers(1, 3))])

    def some(members: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(member for member in members if data.draw(st.booleans(), label=f"has {member}"))

    isr = replicas if data.draw(st.booleans(), label="all in sync") else some(replicas)
    others = tuple(member for member in replicas if member not in isr)
    leader = data.draw(st.sampled_from((*isr, NO_LEADER)))
    image = PartitionImage(
        0, leader, 5, replicas, isr, eligible=some(others), adding=some(others), removing=some(replicas[1:])
    )
    image = msgspec.structs.replace(image, unproven=() if leader != NO_LEADER else some(others))
    serving = (1, 2, 3) if data.draw(st.booleans(), label="all serve") else some((1, 2, 3))
    staying = serving if data.draw(st.booleans(), label="all stay") else some(serving)
    can_lead = staying if data.draw(st.booleans(), label="all can lead") else some(staying)
    brokers = BrokerStates(*map(frozenset, (serving, staying, can_lead, some(serving))))
    if is_settled(image, brokers):
        draft = Draft(image)
        draft.settle(brokers, TopicRules(data.draw(st.sampled_from((None, 1, 2, 3))), data.draw(st.booleans())))
        assert draft.change() is None
        assert not (draft.is_waiting or draft.needs_recovery) and draft.hand_over_to is None
