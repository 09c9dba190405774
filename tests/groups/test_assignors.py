"""Assignors: every partition of a subscribed topic has one owner that subscribes to it, balanced, with few moves."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chronik.groups.assignors import ASSIGNORS, AssignedMember, assign_range, assign_uniform
from chronik.groups.topics import Assignment, Topic

RACKS = ("r0", "r1", "r2")


def topic(number: int, partitions: int, racks: tuple[tuple[str, ...], ...] = ()) -> Topic:
    return Topic(f"t{number}", UUID(int=number), racks or ((),) * partitions)


@st.composite
def clusters(draw: st.DrawFn) -> dict[UUID, Topic]:
    counts = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    rack = st.lists(st.sampled_from(RACKS), max_size=2, unique=True).map(lambda each: tuple(sorted(each)))
    made = [
        topic(number, count, tuple(draw(st.lists(rack, min_size=count, max_size=count))))
        for number, count in enumerate(counts, 1)
    ]
    return {each.id: each for each in made}


@st.composite
def groups(draw: st.DrawFn) -> tuple[dict[UUID, Topic], list[dict[str, AssignedMember]]]:
    """Draw topics, and the members of a group at some moments, without what they owned before."""
    topics = draw(clusters())
    is_alike = draw(st.booleans())
    subscription = st.frozensets(st.sampled_from(sorted(topics)), min_size=1)
    shared = draw(subscription)
    names = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True))
    moments = []
    for _ in range(3):
        members = {
            f"m{name}": AssignedMember(
                shared if is_alike else draw(subscription),
                instance_id=draw(st.sampled_from((None, f"i{name}"))),
                rack=draw(st.sampled_from((None, *RACKS))),
            )
            for name in names
        }
        moments.append(members)
        names = draw(st.permutations(names))[: draw(st.integers(1, len(names)))] + draw(
            st.lists(st.integers(10, 19), max_size=3, unique=True)
        )
    return topics, moments


def check_valid(
    members: Mapping[str, AssignedMember], topics: Mapping[UUID, Topic], assigned: Mapping[str, Assignment]
) -> None:
    assert assigned.keys() == members.keys()
    owned = sorted(partition for partitions in assigned.values() for partition in partitions)
    subscribed = {topic_id for member in members.values() for topic_id in member.topics}
    assert owned == sorted(each for topic_id in subscribed for each in topics[topic_id].partitions())
    for member_id, partitions in assigned.items():
        assert {topic_id for topic_id, _ in partitions} <= members[member_id].topics


def check_balanced(members: Mapping[str, AssignedMember], assigned: Mapping[str, Assignment]) -> None:
    """No partition could move, directly, from a member to one that has at least two fewer."""
    for one, other in combinations(sorted(assigned), 2):
        for most, least in ((one, other), (other, one)):
            if len(assigned[most]) - len(assigned[least]) >= 2:
                assert not any(topic_id in members[least].topics for topic_id, _ in assigned[most])


@given(groups())
@settings(max_examples=300, deadline=None)
def test_uniform_is_valid_balanced_and_moves_only_what_it_must(
    drawn: tuple[dict[UUID, Topic], list[dict[str, AssignedMember]]],
) -> None:
    topics, moments = drawn
    before: dict[str, Assignment] = {}
    for members in moments:
        members = {name: member._replace(before=before.get(name, frozenset())) for name, member in members.items()}
        assigned = assign_uniform(members, topics)
        check_valid(members, topics, assigned)
        check_balanced(members, assigned)
        again = {name: member._replace(before=assigned[name]) for name, member in members.items()}
        assert assign_uniform(again, topics) == assigned, "nothing moves without a reason"
        if len({member.topics for member in members.values()}) == 1:
            check_fewest_moves(members, topics, assigned)
        before = assigned


def check_fewest_moves(
    members: Mapping[str, AssignedMember], topics: Mapping[UUID, Topic], assigned: Mapping[str, Assignment]
) -> None:
    """With equal subscriptions, a member keeps all that it had, up to its size in a balanced assignment."""
    count = sum(map(len, assigned.values()))
    quota, extra = divmod(count, len(members))
    had = sorted((len(_still(member, topics)) for member in members.values()), reverse=True)
    most_kept = sum(min(size, quota + (position < extra)) for position, size in enumerate(had))
    assert sum(len(assigned[name] & member.before) for name, member in members.items()) == most_kept


def _still(member: AssignedMember, topics: Mapping[UUID, Topic]) -> Assignment:
    return frozenset(each for each in member.before if each[0] in member.topics and each[0] in topics)


@given(groups())
@settings(max_examples=100, deadline=None)
def test_range_is_valid_and_gives_contiguous_ranges_of_even_size(
    drawn: tuple[dict[UUID, Topic], list[dict[str, AssignedMember]]],
) -> None:
    topics, moments = drawn
    for members in moments:
        assigned = assign_range(members, topics)
        check_valid(members, topics, assigned)
        for topic_id in topics:
            ranges = [
                sorted(index for each, index in assigned[name] if each == topic_id)
                for name in members
                if topic_id in members[name].topics
            ]
            assert all(one == list(range(one[0], one[-1] + 1)) for one in ranges if one)
            assert max(map(len, ranges), default=0) - min(map(len, ranges), default=0) <= 1


def test_range_co_partitions_topics_and_puts_static_members_first() -> None:
    topics = {each.id: each for each in (topic(1, 4), topic(2, 4))}
    members = {
        "a": AssignedMember(frozenset(topics)),
        "z": AssignedMember(frozenset(topics), instance_id="i"),
    }
    assigned = assign_range(members, topics)
    assert assigned["z"] == {(topic_id, index) for topic_id in topics for index in (0, 1)}


def test_uniform_prefers_members_in_the_rack_of_a_replica() -> None:
    orders = topic(1, 6, (("r0",), ("r1",), ("r2",)) * 2)
    members = {f"m{rack}": AssignedMember(frozenset({orders.id}), rack=rack) for rack in RACKS}
    assigned = assign_uniform(members, {orders.id: orders})
    for name, member in members.items():
        assert len(assigned[name]) == 2
        assert all(member.rack in orders.racks[index] for _, index in assigned[name])
    # A member that must give up a partition gives up one in another rack.
    far = AssignedMember(frozenset({orders.id}), frozenset((orders.id, index) for index in (0, 1, 3, 4)), rack="r0")
    kept = assign_uniform({"far": far, "new": members["mr1"]}, {orders.id: orders})["far"]
    assert {(orders.id, 0), (orders.id, 3)} <= kept


@pytest.mark.parametrize("assign", ASSIGNORS.values(), ids=list(ASSIGNORS))
def test_an_assignor_accepts_no_members_and_unknown_topics(assign: object) -> None:
    assert callable(assign)
    assert assign({}, {}) == {}
    assert assign({"a": AssignedMember(frozenset())}, {}) == {"a": frozenset()}
