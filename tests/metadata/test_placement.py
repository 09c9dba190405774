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
def test_replicas_of_a_partition_are_on_different_brokers_and_leaders_are_spread(
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


def test_replicas_are_on_different_racks_where_there_are_enough() -> None:
    brokers = [broker(1, "x"), broker(2, "x"), broker(3, "y"), broker(4, "y"), broker(5, "z"), broker(6, "z")]
    racks = {member.id: member.rack for member in brokers}
    for assignment in place_replicas(brokers, 30, 3, Random(1)):
        assert len({racks[member] for member in assignment.replicas}) == 3


def test_the_same_randomness_places_alike() -> None:
    brokers = [broker(index) for index in range(5)]
    assert place_replicas(brokers, 9, 3, Random(7)) == place_replicas(list(reversed(brokers)), 9, 3, Random(7))


@pytest.mark.parametrize("factor", [0, -1, 4])
def test_a_replication_factor_that_the_brokers_cannot_carry_is_refused(factor: int) -> None:
    with pytest.raises(KafkaError) as raised:
        place_replicas([broker(1), broker(2), broker(3)], 1, factor, Random(1))
    assert raised.value.code == ErrorCode.invalid_replication_factor


def test_a_manual_assignment_names_live_brokers_once() -> None:
    image = ClusterImage(brokers={1: broker(1), 2: broker(2, is_fenced=True)})
    assert assign_manually(image, [2, 1]).isr == (1,)
    for replicas in ([], [1, 1], [3], [2]):
        with pytest.raises(KafkaError) as raised:
            assign_manually(image, replicas)
        assert raised.value.code == ErrorCode.invalid_replica_assignment


def test_brokers_that_are_down_fill_up_what_the_others_cannot_carry_and_do_not_lead() -> None:
    live, down = [broker(1), broker(2)], [broker(3, is_fenced=True), broker(4, is_fenced=True)]
    placed = place_replicas(live, 4, 3, Random(1), spare=down)
    assert all(set(assignment.isr) == {1, 2} for assignment in placed)
    assert all(len(assignment.replicas) == 3 and assignment.replicas[:2] == assignment.isr for assignment in placed)
    assert {assignment.replicas[2] for assignment in placed} == {3, 4}
    assert all(len(assignment.replicas) == 2 for assignment in place_replicas(live, 4, 2, Random(1), spare=down))
    for brokers, factor in ((live, 5), ([], 1)):
        with pytest.raises(KafkaError):
            place_replicas(brokers, 1, factor, Random(1), spare=down)
