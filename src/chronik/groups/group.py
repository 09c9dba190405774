"""One classic group: its members, generation and state. The rules of rebalancing are in `rebalance`."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from chronik.groups.any_group import AnyGroup, GroupKind, GroupState
from chronik.groups.member import Member, Protocols
from chronik.groups.records import (
    CONSUMER_PROTOCOL_TYPE,
    GroupMetadata,
    MemberMetadata,
    Record,
    subscribed_topics,
    write_group_key,
    write_group_value,
)


@dataclass(slots=True, eq=False)
class Group(AnyGroup):
    """A classic group.

    Invariants: the generation never falls while the group is known; exactly one member leads in CompletingRebalance and
    Stable; `awaiting_join_count` is the number of members with a join token; without members the group is Empty, or
    PreparingRebalance until its timer expires. Owned by the coordinator; nothing here waits or reads a clock.
    """

    state: GroupState = GroupState.EMPTY
    state_since_ms: int = -1
    protocol_type: str | None = None
    protocol_name: str | None = None
    generation: int = 0
    leader_id: str | None = None
    members: dict[str, Member] = field(default_factory=dict)
    static_members: dict[str, str] = field(default_factory=dict)
    pending_members: dict[str, int] = field(default_factory=dict)
    """Member ids sent with MEMBER_ID_REQUIRED, and the deadline for joining with each."""
    pending_sync: dict[str, None] = field(default_factory=dict)
    """Members of this generation that have not sent SyncGroup; an ordered set."""
    awaiting_join_count: int = 0
    rebalance_deadline_ms: int | None = None
    initial_delay_left_ms: int | None = None
    """How much longer the first rebalance may wait for more members; None if it does not wait."""
    member_added: bool = False
    sync_deadline_ms: int | None = None
    assignment_in_flight: int | None = None
    """The generation whose assignment is being written."""
    is_persisted: bool = False
    """Whether the log has a record of the group, or may have one once pending writes finish."""
    _protocol_counts: Counter[str] = field(default_factory=Counter)

    # Members

    def add(self, member: Member) -> None:
        self.members[member.member_id] = member
        self._protocol_counts += Counter(dict(member.protocols).keys())
        if member.instance_id is not None:
            self.static_members[member.instance_id] = member.member_id
        if member.join_token is not None:
            self.awaiting_join_count += 1
        if self.leader_id is None:
            self.leader_id = member.member_id

    def remove(self, member: Member) -> None:
        """Remove a member whose waiting requests have been answered."""
        del self.members[member.member_id]
        self._protocol_counts -= Counter(dict(member.protocols).keys())
        if member.instance_id is not None:
            del self.static_members[member.instance_id]
        self.pending_sync.pop(member.member_id, None)
        if self.leader_id == member.member_id:
            self.leader_id = next(iter(self.members), None)

    def rename(self, member: Member, member_id: str) -> None:
        """Give a returning static member its new id; it keeps its position, role and assignment."""
        old_id = member.member_id
        member.member_id = member_id
        self.members = {each.member_id: each for each in self.members.values()}
        if member.instance_id is not None:
            self.static_members[member.instance_id] = member_id
        if self.leader_id == old_id:
            self.leader_id = member_id
        if old_id in self.pending_sync:
            del self.pending_sync[old_id]
            self.pending_sync[member_id] = None

    def change_protocols(self, member: Member, protocols: Protocols) -> None:
        self._protocol_counts -= Counter(dict(member.protocols).keys())
        member.protocols = protocols
        self._protocol_counts += Counter(dict(protocols).keys())

    def set_join_token(self, member: Member, token: int | None) -> int | None:
        """Set the member's waiting JoinGroup, or None; return the token of the previous one."""
        before = member.join_token
        self.awaiting_join_count += (token is not None) - (before is not None)
        member.join_token = token
        return before

    def accepts(self, member_id: str, members_max: int) -> bool:
        if member_id in self.pending_members:
            return len(self.members) < members_max
        member = self.members.get(member_id)
        if self.state is GroupState.PREPARING_REBALANCE:
            return (member is not None and member.join_token is not None) or self.awaiting_join_count < members_max
        return member is not None or len(self.members) + len(self.pending_members) < members_max

    # Protocols

    def supports(self, protocol_type: str, protocols: Protocols, sender: Member | None) -> bool:
        """Whether the sender and all other members share an assignor."""
        others = len(self.members) - (sender is not None)
        if not others:
            return bool(protocol_type) and bool(protocols)
        if protocol_type != self.protocol_type:
            return False
        own = dict(sender.protocols) if sender is not None else {}
        return any(self._protocol_counts.get(name, 0) - (name in own) == others for name, _ in protocols)

    def select_protocol(self) -> str | None:
        """Return the assignor that most members prefer among those that all members support."""
        candidates = {name for name, count in self._protocol_counts.items() if count == len(self.members)}
        choices = (member.vote(candidates) for member in self.members.values())
        votes = Counter(choice for choice in choices if choice is not None)
        return max(votes, key=votes.__getitem__, default=None)

    def subscribed_topics(self) -> frozenset[str] | None:
        """The topics that the members consume; None for any protocol type other than "consumer"."""
        if not self.members:
            return frozenset()
        if self.protocol_type != CONSUMER_PROTOCOL_TYPE:
            return None
        topics: set[str] = set()
        for member in self.members.values():
            # Before the first generation no assignor is chosen; each assignor's metadata lists the same topics.
            subscribed = subscribed_topics(member.metadata_for(self.protocol_name) or member.protocols[0][1])
            if subscribed is None:
                return None
            topics |= subscribed
        return frozenset(topics)

    # State

    @property
    def all_joined(self) -> bool:
        return self.awaiting_join_count == len(self.members) and not self.pending_members

    @property
    def rebalance_timeout_ms(self) -> int:
        return max([1, *(member.rebalance_timeout_ms for member in self.members.values())])

    def elect_joined_leader(self) -> bool:
        """Keep the leader if it has joined, else choose the first member that has; False if no member has joined."""
        leader = self.members.get(self.leader_id) if self.leader_id is not None else None
        if leader is not None and leader.join_token is not None:
            return True
        for member in self.members.values():
            if member.join_token is not None:
                self.leader_id = member.member_id
                return True
        return False

    def topics_in_use(self, limit_ms: int) -> frozenset[str] | None:
        """In an empty group the retention time starts when the last member left; in a stable one, at the commit."""
        is_old = self.state is GroupState.EMPTY and self.state_since_ms <= limit_ms
        return self.subscribed_topics() if is_old or self.state is GroupState.STABLE else None

    @property
    def may_expire(self) -> bool:
        return self.state is GroupState.EMPTY and not self.pending_members and not self.is_locked

    @property
    def kind(self) -> GroupKind:
        return GroupKind.CLASSIC

    @property
    def is_hollow(self) -> bool:
        return (
            self.state is GroupState.EMPTY
            and not self.is_persisted
            and not self.pending_members
            and self.offsets.is_empty
            and not self.is_locked
        )

    def next_deadline_ms(self) -> int | None:
        deadlines = [member.deadline_ms for member in self.members.values() if member.may_expire]
        deadlines += self.pending_members.values()
        if self.rebalance_deadline_ms is not None:
            deadlines.append(self.rebalance_deadline_ms)
        if self.sync_deadline_ms is not None:
            deadlines.append(self.sync_deadline_ms)
        return min(deadlines, default=None)

    # Log records

    def record(self, assignments: Mapping[str, bytes] | None = None) -> Record:
        """Return the group's record, with the given assignments instead of the members' current ones."""
        members = tuple(
            MemberMetadata(
                member.member_id,
                member.instance_id,
                member.client_id,
                member.client_host,
                member.rebalance_timeout_ms,
                member.session_timeout_ms,
                member.metadata_for(self.protocol_name),
                member.assignment if assignments is None else assignments.get(member.member_id, b""),
            )
            for member in self.members.values()
        )
        value = GroupMetadata(
            self.protocol_type or "", self.generation, self.protocol_name, self.leader_id, self.state_since_ms, members
        )
        return write_group_key(self.group_id), write_group_value(value)

    def tombstones(self) -> list[Record]:
        return [(write_group_key(self.group_id), None)]

    def restore(self, metadata: GroupMetadata, now_ms: int) -> None:
        """Restore the group from the log, with a fresh session for each member.

        Only a conversion writes members without a leader: the rebalance that follows it has not ended.
        """
        self.is_persisted = True
        self.protocol_type = metadata.protocol_type or None
        self.protocol_name = metadata.protocol_name
        self.generation = metadata.generation
        self.state_since_ms = metadata.state_since_ms
        for stored in metadata.members:
            member = Member(
                stored.member_id,
                stored.instance_id,
                stored.client_id,
                stored.client_host,
                stored.session_timeout_ms,
                stored.rebalance_timeout_ms,
                ((metadata.protocol_name or "", stored.subscription),),
                now_ms + stored.session_timeout_ms,
                stored.assignment,
            )
            self.add(member)
        if self.members and metadata.leader_id is None:
            self.state = GroupState.PREPARING_REBALANCE
            self.rebalance_deadline_ms = now_ms + self.rebalance_timeout_ms
        elif self.members:
            self.state = GroupState.STABLE
            if metadata.leader_id in self.members:
                self.leader_id = metadata.leader_id
