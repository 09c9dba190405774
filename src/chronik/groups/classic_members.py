"""Members of the classic protocol in a consumer group: JoinGroup, SyncGroup, Heartbeat and LeaveGroup.

The coordinator assigns for them. The generation of such a member is its member epoch, it never leads, and it gets its
assignment by SyncGroup. It is notified of changes by REBALANCE_IN_PROGRESS, and joins again to reconcile.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from chronik.groups.consumer_group import ConsumerGroup, GroupImage
from chronik.groups.consumer_member import ClassicMetadata, ConsumerMember, MemberState
from chronik.groups.consumer_protocol import Subscription, read_subscription, write_assignment
from chronik.groups.heartbeats import (
    TEXT_BYTES_MAX,
    check_instance,
    check_room,
    reconcile_member,
    remove_member,
    take_over,
    update_member,
)
from chronik.groups.image_group import WaitingReply
from chronik.groups.member import JoinRequest, SyncRequest
from chronik.groups.rebalance import join_error
from chronik.groups.records import CONSUMER_PROTOCOL_TYPE, TopicPartition
from chronik.groups.step import Step
from chronik.groups.topics import Assignment, TopicCatalog, by_topic
from chronik.wire.errors import ErrorCode, KafkaError

# -- JoinGroup ---------------------------------------------------------------------------------------------------------


def join(
    group: ConsumerGroup,
    request: JoinRequest,
    token: int,
    new_member_id: Callable[[str], str],
    catalog: TopicCatalog,
    step: Step,
) -> None:
    """Handle JoinGroup; `heartbeats.conclude` answers it. Raise before anything has changed."""
    member_id = request.member_id or new_member_id(request.instance_id or request.client_id)
    if len(member_id.encode()) > TEXT_BYTES_MAX:
        raise KafkaError(ErrorCode.invalid_request)
    check_room(group, member_id, request.instance_id, step.settings.consumer_members_max)
    subscription = _check_protocols(group, request)
    if not request.member_id and request.instance_id is None and request.member_id_required:
        step.reply(token, join_error(ErrorCode.member_id_required, member_id))
        return
    known = _find(group, request, member_id)
    before = ConsumerMember(member_id) if known is None else known
    metadata = replace(
        before.metadata,
        instance_id=request.instance_id,
        rack=subscription.rack if subscription.rack is not None else before.metadata.rack,
        client_id=request.client_id,
        client_host=request.client_host,
        topics=tuple(sorted(set(subscription.topics))),
        expression="",
        rebalance_timeout_ms=request.rebalance_timeout_ms,
        classic=ClassicMetadata(request.session_timeout_ms, request.protocols),
    )
    if known is not None and known.member_id != member_id:
        before = take_over(group, known, member_id)
    update_member(group, known is None, before, metadata)
    now_ms = step.at.now_ms
    group.join_deadlines.pop(member_id, None)
    group.session_deadlines[member_id] = now_ms + request.session_timeout_ms
    group.sync_deadlines[member_id] = now_ms + request.rebalance_timeout_ms
    owned = owned_partitions(subscription.owned, catalog)

    def answer() -> WaitingReply:
        member = None if group.successor is not None else reconcile_member(group, member_id, owned, step)
        if member is None:
            values = join_error(ErrorCode.rebalance_in_progress, member_id)
        else:
            values = {
                "error_code": ErrorCode.none,
                "generation_id": member.current.epoch,
                "protocol_type": CONSUMER_PROTOCOL_TYPE,
                "protocol_name": request.protocols[0][0],
                "leader": "",
                "skip_assignment": False,
                "member_id": member_id,
                "members": [],
            }
        return WaitingReply(token, values, {"member_id": member_id})

    group.continuations.append(answer)


def owned_partitions(owned: tuple[TopicPartition, ...], catalog: TopicCatalog) -> Assignment:
    topics = {name: catalog.topic(name) for name, _ in owned}
    return frozenset((topic.id, index) for name, index in owned if (topic := topics[name]) is not None)


def _check_protocols(group: ConsumerGroup, request: JoinRequest) -> Subscription:
    """Return the sender's subscription, if all members of the classic protocol share a protocol with it."""
    others = [
        {name for name, _ in each.metadata.classic.protocols}
        for each in group.image.members.values()
        if each.metadata.classic is not None and each.member_id != request.member_id
    ]
    is_shared = any(all(name in names for names in others) for name, _ in request.protocols)
    subscription = read_subscription(request.protocols[0][1]) if request.protocols else None
    if request.protocol_type != CONSUMER_PROTOCOL_TYPE or not is_shared or subscription is None:
        raise KafkaError(ErrorCode.inconsistent_group_protocol)
    return subscription


def _find(group: ConsumerGroup, request: JoinRequest, member_id: str) -> ConsumerMember | None:
    """Return the member, or for a static member without a member id the one that it replaces; None if it is new."""
    if request.instance_id is None:
        return group.image.members.get(member_id)
    if request.member_id:
        return check_instance(group, member_id, request.instance_id)
    return group.image.members.get(group.image.static_members.get(request.instance_id, ""))


# -- SyncGroup and Heartbeat: they read only what is durable -----------------------------------------------------------


def sync(group: ConsumerGroup, request: SyncRequest, catalog: TopicCatalog, step: Step) -> dict[str, Any]:
    member = _check_member(group.durable, request.member_id, request.instance_id, request.generation)
    if isinstance(member, ErrorCode):
        return {"error_code": member}
    assert member.metadata.classic is not None
    name, subscribed = member.metadata.classic.protocols[0]
    is_other_type = request.protocol_type not in (None, CONSUMER_PROTOCOL_TYPE)
    if is_other_type or request.protocol_name not in (None, name):
        return {"error_code": ErrorCode.inconsistent_group_protocol}
    if group.is_uncertain:
        return {"error_code": ErrorCode.coordinator_not_available}
    if member.member_id not in group.image.members:
        return {"error_code": ErrorCode.rebalance_in_progress}
    is_revoking = member.current.state is MemberState.UNREVOKED_PARTITIONS
    if group.durable.assignment_epoch > member.current.epoch and not is_revoking:
        _expect_join(group, member, step)
        return {"error_code": ErrorCode.rebalance_in_progress}
    group.sync_deadlines.pop(member.member_id, None)
    _extend(group, member, step.at.now_ms)
    subscription = read_subscription(subscribed)
    return {
        "error_code": ErrorCode.none,
        "protocol_type": CONSUMER_PROTOCOL_TYPE,
        "protocol_name": name,
        "assignment": encode(member.current.assigned, 0 if subscription is None else subscription.version, catalog),
    }


def encode(assignment: Assignment, version: int, catalog: TopicCatalog) -> bytes:
    """Return an assignment as the classic protocol has it, by topic name; without topics that were deleted."""
    named = {catalog.name_of(topic_id): indexes for topic_id, indexes in by_topic(assignment).items()}
    return write_assignment(version, {name: indexes for name, indexes in named.items() if name is not None})


def heartbeat(group: ConsumerGroup, member_id: str, generation: int, instance_id: str | None, step: Step) -> ErrorCode:
    member = _check_member(group.durable, member_id, instance_id, generation)
    if isinstance(member, ErrorCode):
        return member
    if member.member_id not in group.image.members:
        # Its removal is being written. A success would renew its session while others get its partitions.
        return ErrorCode.rebalance_in_progress
    _extend(group, member, step.at.now_ms)
    state = member.current.state
    is_released = state is MemberState.UNRELEASED_PARTITIONS and not group.durable.waits_for_others(member)
    if (
        member.current.epoch < group.durable.assignment_epoch
        or state is MemberState.UNREVOKED_PARTITIONS
        or is_released
    ):
        _expect_join(group, member, step)
        return ErrorCode.rebalance_in_progress
    return ErrorCode.none


def _extend(group: ConsumerGroup, member: ConsumerMember, now_ms: int) -> None:
    assert member.metadata.classic is not None
    group.session_deadlines[member.member_id] = now_ms + member.metadata.classic.session_timeout_ms


def _expect_join(group: ConsumerGroup, member: ConsumerMember, step: Step) -> None:
    group.join_deadlines.setdefault(member.member_id, step.at.now_ms + member.metadata.rebalance_timeout_ms)


def _check_member(
    image: GroupImage, member_id: str, instance_id: str | None, generation: int
) -> ConsumerMember | ErrorCode:
    if instance_id is not None:
        current_id = image.static_members.get(instance_id)
        if current_id is None:
            return ErrorCode.unknown_member_id
        if current_id != member_id:
            return ErrorCode.fenced_instance_id
    member = image.members.get(member_id)
    if member is None or not member.uses_classic_protocol:
        return ErrorCode.unknown_member_id
    return member if member.current.epoch == generation else ErrorCode.illegal_generation


# -- LeaveGroup --------------------------------------------------------------------------------------------------------


def leave(group: ConsumerGroup, member_id: str, instance_id: str | None) -> ErrorCode:
    """Remove one member of the classic protocol; an administrator names a static member by its instance id only."""
    image = group.image
    if instance_id is not None:
        current_id = image.static_members.get(instance_id)
        if current_id is None:
            return ErrorCode.unknown_member_id
        if member_id not in ("", current_id):
            return ErrorCode.fenced_instance_id
        member_id = current_id
    member = image.members.get(member_id)
    if member is None or not member.uses_classic_protocol:
        return ErrorCode.unknown_member_id
    remove_member(group, member)
    return ErrorCode.none
