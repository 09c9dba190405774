"""The assignors of the coordinator (KIP-848): from the members' subscriptions to the target assignment.

`uniform` balances the number of partitions, moves as few as possible from where they are, and places a partition that
must move on a member in the rack of one of its replicas, if that keeps the balance. `range` gives each member the same
range of every topic, so that topics with equally many partitions are co-partitioned; it is not sticky.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias
from uuid import UUID

from chronik.groups.topics import Assignment, Topic, TopicIdPartition

NOTHING: Assignment = frozenset()


class AssignedMember(NamedTuple):
    """A member as an assignor sees it; `before` is its assignment in the last target."""

    topics: frozenset[UUID]
    before: Assignment = NOTHING
    instance_id: str | None = None
    rack: str | None = None


Members: TypeAlias = Mapping[str, AssignedMember]
Topics: TypeAlias = Mapping[UUID, Topic]
Assignor: TypeAlias = Callable[[Members, Topics], dict[str, Assignment]]


def assign_range(members: Members, topics: Topics) -> dict[str, Assignment]:
    ordered = sorted(members, key=lambda each: _range_order(each, members[each]))
    assigned: dict[str, list[TopicIdPartition]] = {member_id: [] for member_id in ordered}
    for topic_id in sorted(topics):
        subscribers = [each for each in ordered if topic_id in members[each].topics]
        start = 0
        for position, member_id in enumerate(subscribers):
            quota, extra = divmod(topics[topic_id].partition_count, len(subscribers))
            end = start + quota + (position < extra)
            assigned[member_id] += [(topic_id, index) for index in range(start, end)]
            start = end
    return {member_id: frozenset(partitions) for member_id, partitions in assigned.items()}


def _range_order(member_id: str, member: AssignedMember) -> tuple[bool, str]:
    """Static members come first, in the order of their instance ids: a restart then moves no range."""
    is_dynamic = member.instance_id is None
    return is_dynamic, member_id if member.instance_id is None else member.instance_id


def assign_uniform(members: Members, topics: Topics) -> dict[str, Assignment]:
    if not members:
        return {}
    uniform = _Uniform(members, topics)
    subscriptions = {member.topics for member in members.values()}
    if len(subscriptions) == 1:
        uniform.assign_alike()
    else:
        uniform.assign_unlike()
    return {member_id: frozenset(partitions) for member_id, partitions in uniform.assigned.items()}


class _Uniform:
    """An assignment in the making.

    Invariants: `assigned` and `unassigned` together have each partition of a subscribed topic once; a member only has
    partitions of topics that it subscribes to.
    """

    def __init__(self, members: Members, topics: Topics) -> None:
        self.members = members
        self.topics = topics
        self.assigned: dict[str, list[TopicIdPartition]] = {}
        subscribed = sorted({topic_id for member in members.values() for topic_id in member.topics} & topics.keys())
        left = {partition: None for topic_id in subscribed for partition in topics[topic_id].partitions()}
        for member_id in sorted(members):
            member = members[member_id]
            kept = [each for each in sorted(member.before) if each in left and each[0] in member.topics]
            self.assigned[member_id] = kept
            for partition in kept:
                del left[partition]
        self.unassigned = list(left)

    def _is_near(self, partition: TopicIdPartition, member_id: str) -> bool:
        topic_id, index = partition
        rack = self.members[member_id].rack
        return rack is not None and rack in self.topics[topic_id].racks[index]

    # All members subscribe to the same topics

    def assign_alike(self) -> None:
        """Compute each member's quota first. The members with most partitions get the larger quota: it moves less."""
        count = len(self.unassigned) + sum(map(len, self.assigned.values()))
        quota, extra = divmod(count, len(self.assigned))
        by_size = sorted(self.assigned, key=lambda each: -len(self.assigned[each]))
        room: dict[str, int] = {}
        for position, member_id in enumerate(by_size):
            room[member_id] = self._fit(member_id, quota + (position < extra))
        self._fill(room)

    def _fit(self, member_id: str, quota: int) -> int:
        """Take what exceeds the quota from the member, those in other racks first; return its remaining quota."""
        partitions = self.assigned[member_id]
        if len(partitions) > quota:
            ordered = sorted(partitions, key=lambda each: not self._is_near(each, member_id))
            self.assigned[member_id] = ordered[:quota]
            self.unassigned += ordered[quota:]
        return quota - len(self.assigned[member_id])

    def _fill(self, room: dict[str, int]) -> None:
        by_rack: dict[str, list[str]] = {}
        for member_id in sorted(each for each in room if room[each]):
            rack = self.members[member_id].rack
            if rack is not None:
                by_rack.setdefault(rack, []).append(member_id)
        far: list[TopicIdPartition] = []
        for partition in sorted(self.unassigned):
            topic_id, index = partition
            racks = self.topics[topic_id].racks[index] if by_rack else ()
            near = [each for rack in racks for each in by_rack.get(rack, ()) if room[each]]
            if near:
                self._place(partition, max(near, key=room.__getitem__), room)
            else:
                far.append(partition)
        open_members = deque(sorted(each for each in room if room[each]))
        for partition in far:
            while not room[open_members[0]]:
                open_members.popleft()
            self._place(partition, open_members[0], room)
        self.unassigned = []

    def _place(self, partition: TopicIdPartition, member_id: str, room: dict[str, int]) -> None:
        self.assigned[member_id].append(partition)
        room[member_id] -= 1

    # Members subscribe to different topics

    def assign_unlike(self) -> None:
        """Give each free partition to the subscriber with the fewest, then move partitions until nothing improves."""
        subscribers: dict[UUID, list[str]] = {}
        for member_id in self.assigned:
            for topic_id in sorted(self.members[member_id].topics):
                subscribers.setdefault(topic_id, []).append(member_id)
        # A topic with few subscribers has few choices, so that it comes first.
        for partition in sorted(self.unassigned, key=lambda each: (len(subscribers[each[0]]), each)):
            candidates = subscribers[partition[0]]
            sizes = [(len(self.assigned[each]), not self._is_near(partition, each), each) for each in candidates]
            self.assigned[min(sizes)[2]].append(partition)
        self.unassigned = []
        self._balance(subscribers)

    def _balance(self, subscribers: Mapping[UUID, Sequence[str]]) -> None:
        """Shift partitions along the shortest path from a member to one that has at least two fewer, while one exists.

        Each shift lowers the sum of the squared sizes. Without such a path, no assignment is more balanced.
        """
        owned = {member_id: self._by_topic(member_id) for member_id in self.assigned}
        sizes = {member_id: len(partitions) for member_id, partitions in self.assigned.items()}
        settled: set[str] = set()
        while len(settled) < len(sizes):
            largest = max((each for each in sizes if each not in settled), key=lambda each: (sizes[each], each))
            path = self._path_from(largest, sizes, owned, subscribers)
            if path is None:
                settled.add(largest)
                continue
            for source, topic_id, sink in path:
                owned[sink].setdefault(topic_id, []).append(owned[source][topic_id].pop())
                if not owned[source][topic_id]:
                    del owned[source][topic_id]
            sizes[largest] -= 1
            sizes[path[-1][2]] += 1
        self.assigned = {each: [p for topic in owned[each].values() for p in topic] for each in owned}
        self._give_back()

    def _give_back(self) -> None:
        """Return moved partitions to the members that had them, as far as the balance stays the same.

        Either the old member has one partition fewer than the new one, or both exchange partitions. Each step returns
        one partition and takes none that a member had, so that it ends.
        """
        own = {member_id: dict.fromkeys(partitions) for member_id, partitions in self.assigned.items()}
        holders = {partition: member_id for member_id, partitions in own.items() for partition in partitions}
        for old, member in sorted(self.members.items()):
            for partition in sorted(member.before):
                holder = holders.get(partition, old)
                is_worse = self._is_near(partition, holder) and not self._is_near(partition, old)
                if holder == old or partition[0] not in member.topics or is_worse:
                    continue
                given = next((each for each in own[old] if self._may_exchange(each, old, holder)), None)
                if given is None and len(own[holder]) != len(own[old]) + 1:
                    continue
                for moved, source, sink in ((partition, holder, old), (given, old, holder)):
                    if moved is not None:
                        del own[source][moved]
                        own[sink][moved] = None
                        holders[moved] = sink
        self.assigned = {member_id: list(partitions) for member_id, partitions in own.items()}

    def _may_exchange(self, partition: TopicIdPartition, source: str, sink: str) -> bool:
        return partition not in self.members[source].before and partition[0] in self.members[sink].topics

    def _by_topic(self, member_id: str) -> dict[UUID, list[TopicIdPartition]]:
        """Return the member's partitions by topic. Those that should move first come last: new ones, in other racks."""
        before = self.members[member_id].before
        grouped: dict[UUID, list[TopicIdPartition]] = {}
        ordered = sorted(
            self.assigned[member_id], key=lambda each: (each not in before, not self._is_near(each, member_id), each)
        )
        for partition in ordered:
            grouped.setdefault(partition[0], []).append(partition)
        return grouped

    def _path_from(
        self,
        start: str,
        sizes: Mapping[str, int],
        owned: Mapping[str, Mapping[UUID, list[TopicIdPartition]]],
        subscribers: Mapping[UUID, Sequence[str]],
    ) -> list[tuple[str, UUID, str]] | None:
        came_from: dict[str, tuple[str, UUID] | None] = {start: None}
        seen_topics: set[UUID] = set()
        queue = deque([start])
        while queue:
            source = queue.popleft()
            for topic_id in owned[source]:
                if topic_id in seen_topics:
                    continue
                seen_topics.add(topic_id)
                for sink in subscribers[topic_id]:
                    if sink in came_from:
                        continue
                    came_from[sink] = (source, topic_id)
                    if sizes[sink] <= sizes[start] - 2:
                        return _steps(sink, came_from)
                    queue.append(sink)
        return None


def _steps(sink: str, came_from: Mapping[str, tuple[str, UUID] | None]) -> list[tuple[str, UUID, str]]:
    steps: list[tuple[str, UUID, str]] = []
    step = came_from[sink]
    while step is not None:
        source, topic_id = step
        steps.append((source, topic_id, sink))
        sink, step = source, came_from[source]
    return steps[::-1]


ASSIGNORS: Mapping[str, Assignor] = {"uniform": assign_uniform, "range": assign_range}
"""By name; the first is the default."""
