"""The assignor of share groups, which follows Kafka's `simple` one: members share partitions.

Each partition gets the same number of members: as many as are needed to give every member a partition, at least one.
The members' numbers of partitions differ by one at most. If members subscribe to different topics, this holds for each
topic by itself. As few partitions as possible change their members.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from uuid import UUID

from chronik.groups.assignors import Members
from chronik.groups.topics import Assignment, TopicIdPartition

SIMPLE = "simple"


def assign_simple(members: Members, assignable: Iterable[TopicIdPartition]) -> dict[str, Assignment]:
    """Return the partitions of each member. Only `assignable` partitions of subscribed topics are assigned."""
    partitions = sorted(assignable)
    assigned: dict[str, set[TopicIdPartition]] = {member_id: set() for member_id in sorted(members)}
    if len({member.topics for member in members.values()}) == 1:
        topics = next(iter(members.values())).topics
        _share([each for each in partitions if each[0] in topics], list(assigned), members, assigned)
    else:
        grouped: dict[UUID, list[TopicIdPartition]] = {}
        for partition in partitions:
            grouped.setdefault(partition[0], []).append(partition)
        for topic_id, own in grouped.items():
            subscribers = [each for each in assigned if topic_id in members[each].topics]
            _share(own, subscribers, members, assigned)
    return {member_id: frozenset(own) for member_id, own in assigned.items()}


def _share(
    partitions: Sequence[TopicIdPartition],
    member_ids: Sequence[str],
    members: Members,
    assigned: Mapping[str, set[TopicIdPartition]],
) -> None:
    """Assign the partitions to these members, all of which may have any of them."""
    if not partitions or not member_ids:
        return
    shared = _Shared(partitions, member_ids, members)
    shared.release()
    shared.fill()
    for member_id, own in shared.own.items():
        assigned[member_id].update(own)


class _Shared:
    """An assignment in the making.

    Invariant: `users` and `own` mirror each other.
    """

    def __init__(self, partitions: Sequence[TopicIdPartition], member_ids: Sequence[str], members: Members) -> None:
        self.users: dict[TopicIdPartition, set[str]] = {each: set() for each in partitions}
        self.own: dict[str, set[TopicIdPartition]] = {}
        for member_id in member_ids:
            self.own[member_id] = {each for each in members[member_id].before if each in self.users}
            for partition in self.own[member_id]:
                self.users[partition].add(member_id)
        self.sharing = -(-len(member_ids) // len(partitions))
        """How many members each partition gets."""
        quota, extra = divmod(self.sharing * len(partitions), len(member_ids))
        # The members with most partitions get the larger quota: fewer partitions change their members.
        by_size = sorted(member_ids, key=lambda each: -len(self.own[each]))
        self.quota = {member_id: quota + (position < extra) for position, member_id in enumerate(by_size)}

    def release(self) -> None:
        """Take partitions from members that have too many, and members from partitions that have too many."""
        for partition, users in self.users.items():
            if len(users) > self.sharing:
                by_excess = sorted(users, key=lambda each: (self.quota[each] - len(self.own[each]), each))
                for member_id in by_excess[: len(users) - self.sharing]:
                    self._take(partition, member_id)
        for member_id, own in self.own.items():
            excess = len(own) - self.quota[member_id]
            if excess > 0:
                by_users = sorted(own, key=lambda each: (-len(self.users[each]), each))
                for partition in by_users[:excess]:
                    self._take(partition, member_id)

    def fill(self) -> None:
        room = {each: self.quota[each] - len(own) for each, own in self.own.items() if self.quota[each] > len(own)}
        # The largest room first: then the last partitions still find enough different members.
        heap = [(-free, member_id) for member_id, free in room.items()]
        heapq.heapify(heap)
        left: list[TopicIdPartition] = []
        for partition, users in self.users.items():
            passed: list[tuple[int, str]] = []
            while len(users) < self.sharing and heap:
                free, member_id = heapq.heappop(heap)
                if member_id in users:
                    passed.append((free, member_id))
                    continue
                self._give(partition, member_id, room)
                if member_id in room:
                    passed.append((free + 1, member_id))
            for entry in passed:
                heapq.heappush(heap, entry)
            left += [partition] * (self.sharing - len(users))
        for partition in left:
            self._give_by_exchange(partition, room)

    def _give_by_exchange(self, partition: TopicIdPartition, room: dict[str, int]) -> None:
        """All members with room have the partition: one without room gives one of its own for it."""
        for giver, own in self.own.items():
            if partition in own:
                continue
            for member_id in list(room):
                exchanged = min(own - self.own[member_id], default=None)
                if exchanged is not None:
                    self._take(exchanged, giver)
                    self._give(exchanged, member_id, room)
                    self.own[giver].add(partition)
                    self.users[partition].add(giver)
                    return

    def _take(self, partition: TopicIdPartition, member_id: str) -> None:
        self.own[member_id].remove(partition)
        self.users[partition].remove(member_id)

    def _give(self, partition: TopicIdPartition, member_id: str, room: dict[str, int]) -> None:
        self.own[member_id].add(partition)
        self.users[partition].add(member_id)
        room[member_id] -= 1
        if not room[member_id]:
            del room[member_id]
