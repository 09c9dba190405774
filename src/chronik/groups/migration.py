"""Turns a classic group into a consumer group and back, while its members stay (KIP-848, online migration).

The first member of the new protocol that joins converts a classic group. Its classic members keep their assignment and
are notified to join again; `classic_members` serves them. When the last member of the new protocol leaves, the group
becomes classic again, and its members rebalance. So this module has what makes members leave, too.
"""

from collections import Counter
from dataclasses import replace

from chronik.groups.classic_members import encode, owned_partitions
from chronik.groups.consumer_group import ConsumerGroup, GroupImage
from chronik.groups.consumer_member import (
    STATIC_LEAVE_EPOCH,
    ClassicMetadata,
    ConsumerHeartbeat,
    ConsumerMember,
    CurrentAssignment,
    MemberMetadata,
)
from chronik.groups.consumer_protocol import read_assignment, read_subscription
from chronik.groups.group import Group
from chronik.groups.heartbeats import check_instance, remove_member
from chronik.groups.image_group import WaitingReply
from chronik.groups.member import Member
from chronik.groups.membership import refuse_all
from chronik.groups.records import CONSUMER_PROTOCOL_TYPE, GroupMetadata
from chronik.groups.records import MemberMetadata as ClassicRecord
from chronik.groups.step import GroupSettings, Step
from chronik.groups.topics import Assignment, TopicCatalog
from chronik.wire.errors import ErrorCode, KafkaError


def to_consumer_group(group: Group, catalog: TopicCatalog, step: Step) -> ConsumerGroup:
    """Return the consumer group that replaces a classic one, not yet written. GROUP_ID_NOT_FOUND if that cannot be."""
    settings = step.settings
    if group.members and not settings.migration.allows_upgrade:
        raise _refusal(group, "the online upgrade is disabled")
    if group.members and group.protocol_type != CONSUMER_PROTOCOL_TYPE:
        raise _refusal(group, "its members do not use the consumer protocol type")
    if len(group.members) > settings.consumer_members_max:
        raise _refusal(group, f"it has more than {settings.consumer_members_max} members")
    image = GroupImage(epoch=group.generation, assignment_epoch=group.generation)
    for classic in group.members.values():
        member = _converted(group, classic, catalog)
        taken = member.current.assigned & image.owners.keys()
        if taken:
            raise _refusal(group, "two members have the same partition")
        image.put(member)
        image.target[member.member_id] = member.current.assigned
    converted = ConsumerGroup(
        group.group_id, group.partition, group.offsets, image=image, origin=group, stale_version=catalog.version
    )
    refuse_all(group, ErrorCode.rebalance_in_progress, step)
    converted.restore_deadlines(step.at.now_ms, settings.session_timeout_of(group.group_id))
    return converted


def _refusal(group: Group, reason: str) -> KafkaError:
    return KafkaError(
        ErrorCode.group_id_not_found, f"Group {group.group_id} is classic and cannot become a consumer group: {reason}."
    )


def _converted(group: Group, classic: Member, catalog: TopicCatalog) -> ConsumerMember:
    subscription = read_subscription(classic.metadata_for(group.protocol_name) or classic.protocols[0][1])
    partitions = read_assignment(classic.assignment)
    if subscription is None or partitions is None:
        raise _refusal(group, "the subscription or assignment of a member cannot be read")
    metadata = MemberMetadata(
        classic.instance_id,
        subscription.rack,
        classic.client_id,
        classic.client_host,
        tuple(sorted(set(subscription.topics))),
        rebalance_timeout_ms=classic.rebalance_timeout_ms,
        classic=ClassicMetadata(classic.session_timeout_ms, classic.protocols),
    )
    assigned = owned_partitions(partitions, catalog)
    return ConsumerMember(
        classic.member_id, metadata, CurrentAssignment(group.generation, group.generation, assigned=assigned)
    )


def remove_or_convert(group: ConsumerGroup, member: ConsumerMember, catalog: TopicCatalog, step: Step) -> None:
    """Remove a member; if it was the last one of the new protocol, replace the group by a classic one."""
    if may_become_classic(group, member, step.settings):
        convert(group, member, catalog, step)
    else:
        remove_member(group, member)


def convert(group: ConsumerGroup, leaving: ConsumerMember | None, catalog: TopicCatalog, step: Step) -> None:
    """Replace the group by a classic one, without the leaving member, once that is durable."""
    group.successor = _classic_metadata(group, leaving, catalog, step.at.wall_ms)


def leave(group: ConsumerGroup, request: ConsumerHeartbeat, token: int, catalog: TopicCatalog, step: Step) -> None:
    """Handle a ConsumerGroupHeartbeat that leaves the group. Raise before anything has changed."""
    if request.instance_id is not None:
        member = check_instance(group, request.member_id, request.instance_id)
    elif request.member_id in group.image.members:
        member = group.image.members[request.member_id]
    else:
        raise KafkaError(
            ErrorCode.unknown_member_id, f"Member {request.member_id} is not a member of group {group.group_id}."
        )
    if request.epoch == STATIC_LEAVE_EPOCH:
        # It keeps its partitions until it comes back or its session ends. It owns nothing that it had to revoke.
        current = replace(member.current, epoch=STATIC_LEAVE_EPOCH, revoking=frozenset())
        group.change().put(replace(member, current=current))
        group.watch_revocation(group.image.members[member.member_id], member, step.at.now_ms)
    else:
        remove_or_convert(group, member, catalog, step)
    values = {"error_code": ErrorCode.none, "member_id": request.member_id, "member_epoch": request.epoch}
    group.continuations.append(lambda: WaitingReply(token, values, {}))


def on_time(group: ConsumerGroup, catalog: TopicCatalog, step: Step) -> None:
    """Remove the members whose session, revocation, join or sync took too long."""
    for member in group.expired(step.at.now_ms):
        if group.successor is None:
            remove_or_convert(group, member, catalog, step)


def may_become_classic(
    group: ConsumerGroup, leaving: ConsumerMember, settings: GroupSettings, *, is_replaced: bool = False
) -> bool:
    """Whether, without the leaving member, only members of the classic protocol are left.

    At least one must be left, unless a classic member replaces the leaving one.
    """
    others = [each for each in group.image.members.values() if each is not leaving]
    return (
        (bool(others) or is_replaced)
        and not leaving.uses_classic_protocol
        and all(each.uses_classic_protocol for each in others)
        and settings.migration.allows_downgrade
        and len(others) <= settings.members_max
    )


def _classic_metadata(
    group: ConsumerGroup, leaving: ConsumerMember | None, catalog: TopicCatalog, wall_ms: int
) -> GroupMetadata:
    """Return the classic group that replaces a consumer group, without the leaving member."""
    members = [each for each in group.image.members.values() if each is not leaving and each.metadata.classic]
    votes = Counter(name for each in members for name, _ in _protocols(each))
    shared = [name for name, _ in _protocols(members[0]) if votes[name] == len(members)] if members else []
    protocol_name = shared[0] if shared else None
    records = [
        ClassicRecord(
            each.member_id,
            each.metadata.instance_id,
            each.metadata.client_id,
            each.metadata.client_host,
            each.metadata.rebalance_timeout_ms,
            each.metadata.classic.session_timeout_ms if each.metadata.classic else 0,
            subscribed := dict(_protocols(each)).get(protocol_name or "", b""),
            # What it owns, not its target: it may not know the target yet, and the next conversion reads this.
            _assignment(each.current.assigned | each.current.revoking, subscribed, catalog),
        )
        for each in members
    ]
    return GroupMetadata(
        CONSUMER_PROTOCOL_TYPE if members else "", group.image.epoch, protocol_name, None, wall_ms, tuple(records)
    )


def _protocols(member: ConsumerMember) -> tuple[tuple[str, bytes], ...]:
    return () if member.metadata.classic is None else member.metadata.classic.protocols


def _assignment(owned: Assignment, subscribed: bytes, catalog: TopicCatalog) -> bytes:
    subscription = read_subscription(subscribed)
    return encode(owned, 0 if subscription is None else subscription.version, catalog)
