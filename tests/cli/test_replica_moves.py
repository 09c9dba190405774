"""Which replicas move when a node joins or leaves."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from chronik.cli.replica_moves import Partition, Replicas, moves_from, moves_to


def round_robin(partitions: int, brokers: int, replication_factor: int) -> dict[Partition, Replicas]:
    return {
        ("t", index): tuple((index + step) % brokers + 1 for step in range(replication_factor))
        for index in range(partitions)
    }


def load(replicas: dict[Partition, Replicas]) -> Counter[int]:
    return Counter(broker for assigned in replicas.values() for broker in assigned)


def test_a_fourth_node_receives_a_quarter_of_the_replicas_and_leaders() -> None:
    before = round_robin(12, 3, 3)
    moves = moves_to(4, before, [1, 2, 3, 4])
    after = before | moves
    assert load(after) == {1: 9, 2: 9, 3: 9, 4: 9}
    assert Counter(assigned[0] for assigned in after.values())[4] == 3


def test_no_replica_moves_if_the_share_of_the_new_node_is_zero() -> None:
    assert moves_to(2, {}, [1, 2]) == {}
    assert moves_to(4, {("t", 0): (1, 2, 3)}, [1, 2, 3, 4]) == {}


def test_the_replicas_of_a_leaving_node_are_spread_evenly() -> None:
    before = round_robin(12, 4, 3)
    moves = moves_from(4, before, [1, 2, 3])
    after = before | moves
    assert all(4 not in assigned for assigned in after.values())
    assert load(after) == {1: 12, 2: 12, 3: 12}


def test_a_partition_loses_a_replica_only_if_no_other_node_is_left() -> None:
    assert moves_from(3, {("t", 0): (3, 1, 2), ("u", 0): (3,)}, [1, 2]) == {("t", 0): (1, 2), ("u", 0): (2,)}


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[int], dict[Partition, Replicas]]:
    brokers = list(range(1, draw(st.integers(2, 6)) + 1))
    count = draw(st.integers(0, 30))
    replicas = {
        ("t", index): tuple(
            draw(st.lists(st.sampled_from(brokers), min_size=1, max_size=min(3, len(brokers)), unique=True))
        )
        for index in range(count)
    }
    return brokers, replicas


@given(clusters())
def test_only_the_share_of_a_new_node_moves_to_it(
    cluster: tuple[list[int], dict[Partition, Replicas]],
) -> None:
    brokers, before = cluster
    new = len(brokers) + 1
    moves = moves_to(new, before, [*brokers, new])
    after = before | moves
    share = sum(map(len, before.values())) // (len(brokers) + 1)
    assert load(after)[new] == len(moves) <= share
    for partition, assigned in moves.items():
        assert len(assigned) == len(before[partition]) == len(set(assigned))
        assert len(set(before[partition]) - set(assigned)) == 1


@given(clusters())
def test_a_leaving_node_keeps_no_replica_and_no_node_gets_a_partition_twice(
    cluster: tuple[list[int], dict[Partition, Replicas]],
) -> None:
    brokers, before = cluster
    leaving, staying = brokers[0], brokers[1:]
    after = before | moves_from(leaving, before, staying)
    for partition, assigned in after.items():
        assert leaving not in assigned
        assert len(assigned) == len(set(assigned)) == min(len(before[partition]), len(staying))
        assert set(assigned) >= set(before[partition]) - {leaving}
