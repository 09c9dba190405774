"""Replica placement."""

from __future__ import annotations

from collections import Counter
from random import Random
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chronik.metadata.image import BrokerImage, ClusterImage
from chronik.metadata.placement import assign_manually, place_replicas
from chronik.wire.errors import ErrorCode, KafkaError


def broker(broker_id: int, rack: str | None = None, is_fenced: bool = False) -> BrokerImage:
    return BrokerImage(broker_id, 1, "h", 9092, UUID(int=broker_id), rack, is_fenced)


@given(st.integers(1, 7), st.integers(1, 40), st.data())
def test_placement_puts_replicas_on_different_brokers_and_spreads_leaders(
    count: int, partitions: int, data: st.DataObject
) -> None:
    factor = data.draw(st.integers(1, count))
    random = Random(data.draw(st.integers(0, 100)))
    placed = place_replicas([broker(index) for index in range(count)], partitions, factor, random)
    assert len(placed) == partitions
    for assignment in placed:
        assert len(set(assignment.replicas)) == factor
        assert assignment.isr == assignment.replicas
    leaders = Counter(assignment.replicas[0] for assignment in placed)
    assert max(leaders.values()) - min(leaders[index] for index in range(count)) <= 1


def test_replicas_are_on_different_racks_if_there_are_enough_racks() -> None:
    brokers = [broker(1, "x"), broker(2, "x"), broker(3, "y"), broker(4, "y"), broker(5, "z"), broker(6, "z")]
    racks = {member.id: member.rack for member in brokers}
    for assignment in place_replicas(brokers, 30, 3, Random(1)):
        assert len({racks[member] for member in assignment.replicas}) == 3


def test_the_same_random_seed_produces_the_same_placement() -> None:
    brokers = [broker(index) for index in range(5)]
    assert place_replicas(brokers, 9, 3, Random(7)) == place_replicas(list(reversed(brokers)), 9, 3, Random(7))


@pytest.mark.parametrize("factor", [0, -1, 4])
def test_an_invalid_or_too_large_replication_factor_is_refused(factor: int) -> None:
    with pytest.raises(KafkaError) as raised:
        place_replicas([broker(1), broker(2), broker(3)], 1, factor, Random(1))
    assert raised.value.code == ErrorCode.invalid_replication_factor


def test_a_manual_assignment_requires_distinct_known_brokers_and_a_live_broker() -> None:
    image = ClusterImage(brokers={1: broker(1), 2: broker(2, is_fenced=True)})
    assert assign_manually(image, [2, 1]).isr == (1,)
    for replicas in ([], [1, 1], [3], [2]):
        with pytest.raises(KafkaError) as raised:
            assign_manually(image, replicas)
        assert raised.value.code == ErrorCode.invalid_replica_assignment


def test_placement_adds_down_brokers_as_followers_if_too_few_brokers_are_live() -> None:
    live, down = [broker(1), broker(2)], [broker(3, is_fenced=True), broker(4, is_fenced=True)]
    placed = place_replicas(live, 4, 3, Random(1), spare=down)
    assert all(set(assignment.isr) == {1, 2} for assignment in placed)
    assert all(len(assignment.replicas) == 3 and assignment.replicas[:2] == assignment.isr for assignment in placed)
    assert {assignment.replicas[2] for assignment in placed} == {3, 4}
    assert all(len(assignment.replicas) == 2 for assignment in place_replicas(live, 4, 2, Random(1), spare=down))
    for brokers, factor in ((live, 5), ([], 1)):
        with pytest.raises(KafkaError):
            place_replicas(brokers, 1, factor, Random(1), spare=down)
