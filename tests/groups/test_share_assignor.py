"""The assignor of share groups: validity, balance and stickiness for random groups that change."""

from __future__ import annotations

from collections import Counter
from random import Random
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chronik.groups.assignors import AssignedMember
from chronik.groups.share_assignor import assign_simple
from chronik.groups.topics import Assignment, TopicIdPartition

T = [UUID(int=number) for number in range(1, 5)]


def partitions_of(counts: dict[UUID, int]) -> list[TopicIdPartition]:
    return [(topic_id, index) for topic_id, count in counts.items() for index in range(count)]


def assigned(
    subscriptions: dict[str, frozenset[UUID]], counts: dict[UUID, int], before: dict[str, Assignment]
) -> dict[str, Assignment]:
    members = {name: AssignedMember(topics, before.get(name, frozenset())) for name, topics in subscriptions.items()}
    return assign_simple(members, partitions_of(counts))


def check_shared(partitions: list[TopicIdPartition], target: dict[str, Assignment]) -> None:
    """Check that these members share these partitions evenly."""
    users = Counter(partition for own in target.values() for partition in own)
    sharing = -(-len(target) // len(partitions))
    assert {users[partition] for partition in partitions} == {sharing}
    sizes = [len(own) for own in target.values()]
    assert max(sizes) - min(sizes) <= 1


@given(st.randoms(use_true_random=False))
def test_members_share_evenly_after_every_change(random: Random) -> None:
    counts = {topic_id: random.randint(1, 9) for topic_id in T[: random.randint(1, 3)]}
    names: list[str] = []
    before: dict[str, Assignment] = {}
    for step in range(12):
        if names and random.random() < 0.4:
            names.remove(random.choice(names))
        else:
            names += [f"m{step}{extra}" for extra in range(random.randint(1, 6))]
        if random.random() < 0.2:
            counts[random.choice(list(counts))] = random.randint(1, 12)
        if not names:
            continue
        target = assigned(dict.fromkeys(names, frozenset(counts)), counts, before)
        check_shared(partitions_of(counts), target)
        again = assigned(dict.fromkeys(names, frozenset(counts)), counts, target)
        assert again == target, "nothing moves without a change"
        before = target


@given(st.randoms(use_true_random=False))
def test_members_with_different_subscriptions_share_each_topic_evenly(random: Random) -> None:
    counts = {topic_id: random.randint(1, 6) for topic_id in T}
    subscriptions = {f"m{number}": frozenset(random.sample(T, random.randint(0, 4))) for number in range(7)}
    target = assigned(subscriptions, counts, {})
    for topic_id, count in counts.items():
        subscribers = [name for name, topics in subscriptions.items() if topic_id in topics]
        own = {name: frozenset(each for each in target[name] if each[0] == topic_id) for name in subscriptions}
        assert not any(own[name] for name in subscriptions if name not in subscribers)
        if subscribers and len(set(subscriptions.values())) > 1:
            check_shared([(topic_id, index) for index in range(count)], {name: own[name] for name in subscribers})


@pytest.mark.parametrize(("members", "partitions", "moved_max"), [(3, 9, 3), (4, 4, 1), (2, 10, 4), (8, 4, 4)])
def test_few_partitions_move_if_a_member_joins(members: int, partitions: int, moved_max: int) -> None:
    names = [f"m{number}" for number in range(members)]
    counts = {T[0]: partitions}
    before = assigned(dict.fromkeys(names, frozenset(counts)), counts, {})
    after = assigned(dict.fromkeys([*names, "new"], frozenset(counts)), counts, before)
    lost = sum(len(before[name] - after[name]) for name in names)
    assert lost <= moved_max


def test_a_partition_without_state_is_not_assigned() -> None:
    members = {"a": AssignedMember(frozenset({T[0]}), frozenset({(T[0], 0), (T[0], 1)}))}
    assert assign_simple(members, [(T[0], 1)]) == {"a": {(T[0], 1)}}
    assert assign_simple(members, []) == {"a": frozenset()}
    assert assign_simple({}, [(T[0], 1)]) == {}
