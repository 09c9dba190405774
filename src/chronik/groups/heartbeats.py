"""ConsumerGroupHeartbeat: how members of the new protocol join, stay and reconcile; and the step of a group.

A step is: requests change members and subscriptions (`join_or_stay`, `remove_member`), then `conclude` computes the
topics, the epoch and the target assignment once for all of them, reconciles each sender, and writes the difference.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

from chronik.groups.assignors import ASSIGNORS, AssignedMember
from chronik.groups.consumer_group import NOTHING, ConsumerGroup, GroupImage
from chronik.groups.consumer_member import (
    JOIN_EPOCH,
    LEAVE_EPOCH,
    STATIC_LEAVE_EPOCH,
    ConsumerHeartbeat,
    ConsumerMember,
    MemberMetadata,
)
from chronik.groups.consumer_records import ResolvedExpression
from chronik.groups.image_group import WaitingReply
from chronik.groups.reconciliation import reconcile
from chronik.groups.step import Step
from chronik.groups.topics import Assignment, TopicCatalog, by_topic, expression_matcher
from chronik.wire.errors import ErrorCode, KafkaError

TEXT_BYTES_MAX = 16_384
"""Of an id. Member ids become strings with an int16 length in the log; this is half their limit."""

SUBSCRIPTION_BYTES_MAX = 1_000_000
"""Of the names of a member's topics. They are one record, which max.message.bytes limits in Kafka."""


def refused(error: ErrorCode, message: str = "") -> dict[str, Any]:
    return {"error_code": error, "error_message": message or None}


# -- requests ----------------------------------------------------------------------------------------------------------


def check_request(request: ConsumerHeartbeat, assignors: Sequence[str]) -> None:
    """Raise for a request that is invalid in every state of the group."""
    needs_id = request.member_id_required or request.epoch > 0 or request.epoch == LEAVE_EPOCH
    if not request.group_id:
        raise KafkaError(ErrorCode.invalid_request, "GroupId can't be empty.")
    if needs_id and not request.member_id:
        raise KafkaError(ErrorCode.invalid_request, "MemberId can't be empty.")
    if request.instance_id == "" or request.rack == "":
        raise KafkaError(ErrorCode.invalid_request, "InstanceId and RackId can't be empty.")
    texts = (request.member_id, request.instance_id or "", request.rack or "")
    if any(len(text.encode()) > TEXT_BYTES_MAX for text in texts):
        raise KafkaError(ErrorCode.invalid_request, f"An id of more than {TEXT_BYTES_MAX} bytes.")
    check_subscription(request.topics)
    if request.epoch < STATIC_LEAVE_EPOCH:
        raise KafkaError(ErrorCode.invalid_request, f"MemberEpoch is {request.epoch}, but must be at least -2.")
    if request.epoch == STATIC_LEAVE_EPOCH and request.instance_id is None:
        raise KafkaError(ErrorCode.invalid_request, "InstanceId can't be null.")
    if request.epoch == JOIN_EPOCH:
        if request.rebalance_timeout_ms is None:
            raise KafkaError(ErrorCode.invalid_request, "RebalanceTimeoutMs must be provided in first request.")
        if request.owned is None or request.owned:
            raise KafkaError(ErrorCode.invalid_request, "TopicPartitions must be empty when (re-)joining.")
        if request.topics is None and request.expression is None:
            raise KafkaError(
                ErrorCode.invalid_request, "Either SubscribedTopicNames or SubscribedTopicRegex must be non-null."
            )
    if request.assignor is not None and request.assignor not in assignors:
        raise KafkaError(
            ErrorCode.unsupported_assignor,
            f"ServerAssignor {request.assignor} is not supported. Supported assignors: {', '.join(assignors)}.",
        )


def check_subscription(topics: Sequence[str] | None) -> None:
    """Raise if a member names too many topics: the coordinator keeps the names, whether or not the topics exist."""
    if sum(len(name.encode()) for name in topics or ()) > SUBSCRIPTION_BYTES_MAX:
        raise KafkaError(
            ErrorCode.invalid_request, f"SubscribedTopicNames has more than {SUBSCRIPTION_BYTES_MAX:,} bytes."
        )


def join_or_stay(
    group: ConsumerGroup, request: ConsumerHeartbeat, token: int, catalog: TopicCatalog, step: Step
) -> None:
    """Handle the request of a member that does not leave; `conclude` answers. Raise before anything has changed."""
    check_room(group, request.member_id, request.instance_id, step.settings.consumer_members_max)
    known, is_takeover = _find_sender(group, request)
    member_id = request.member_id
    before = ConsumerMember(member_id) if known is None else known
    metadata = before.metadata
    metadata = replace(
        metadata,
        instance_id=_given(request.instance_id, metadata.instance_id),
        rack=_given(request.rack, metadata.rack),
        client_id=request.client_id,
        client_host=request.client_host,
        topics=metadata.topics if request.topics is None else tuple(sorted(set(request.topics))),
        expression=_given(request.expression, metadata.expression) or "",
        rebalance_timeout_ms=_given(request.rebalance_timeout_ms, metadata.rebalance_timeout_ms),
        assignor=_given(request.assignor, metadata.assignor),
        classic=None,
    )
    resolved = _resolve(group, metadata.expression, request.may_describe, catalog, step)
    if is_takeover:
        assert known is not None
        before = take_over(group, known, member_id)
    update_member(group, known is None, before, metadata, resolved)
    group.session_deadlines[member_id] = step.at.now_ms + step.settings.session_timeout_of(group.group_id)
    group.join_deadlines.pop(member_id, None)
    group.sync_deadlines.pop(member_id, None)
    interval_ms = step.settings.heartbeat_interval_of(group.group_id)
    was_assigned = before.current.assigned

    def answer() -> WaitingReply:
        member = reconcile_member(group, member_id, request.owned, step)
        if member is None:
            values = refused(ErrorCode.unknown_member_id)
            return WaitingReply(token, values, values)
        shows_assignment = request.is_full or member.current.assigned != was_assigned
        values = {
            "error_code": ErrorCode.none,
            "member_id": member_id,
            "member_epoch": member.current.epoch,
            "heartbeat_interval": interval_ms,
            "assignment": assignment_values(member.current.assigned) if shows_assignment else None,
        }
        return WaitingReply(token, values, {})

    group.continuations.append(answer)


def _given(new: Any, old: Any) -> Any:
    return old if new is None else new


def assignment_values(assignment: Assignment) -> dict[str, Any]:
    topics = by_topic(assignment)
    return {"topic_partitions": [{"topic_id": each, "partitions": topics[each]} for each in topics]}


def check_room(group: ConsumerGroup, member_id: str, instance_id: str | None, members_max: int) -> None:
    members = group.image.members
    is_known = member_id in members or instance_id in group.image.static_members
    if len(members) >= members_max and not is_known:
        raise KafkaError(
            ErrorCode.group_max_size_reached,
            f"The consumer group has reached its maximum capacity of {members_max} members.",
        )


def _find_sender(group: ConsumerGroup, request: ConsumerHeartbeat) -> tuple[ConsumerMember | None, bool]:
    """Return the member, None if it is new, and whether the sender takes over the place of a static member."""
    image = group.image
    is_join = request.epoch == JOIN_EPOCH
    if request.instance_id is None:
        member = image.members.get(request.member_id)
        if member is None and not is_join:
            raise KafkaError(
                ErrorCode.unknown_member_id, f"Member {request.member_id} is not a member of group {group.group_id}."
            )
        if member is not None:
            _check_epoch(member, request)
        return member, False
    member = image.members.get(image.static_members.get(request.instance_id, ""))
    if not is_join:
        member = check_instance(group, request.member_id, request.instance_id)
        _check_epoch(member, request)
        return member, False
    if member is None:
        return None, False
    if member.member_id == request.member_id:
        return member, False
    if not member.uses_classic_protocol and member.current.epoch != STATIC_LEAVE_EPOCH:
        raise KafkaError(
            ErrorCode.unreleased_instance_id,
            f"Static member {request.member_id} with instance id {request.instance_id} cannot join the group because "
            f"the instance id is owned by member {member.member_id}.",
        )
    return member, True


def check_instance(group: ConsumerGroup, member_id: str, instance_id: str) -> ConsumerMember:
    """Return the static member of an instance id, if it has this member id."""
    member = group.image.members.get(group.image.static_members.get(instance_id, ""))
    if member is None:
        raise KafkaError(ErrorCode.unknown_member_id, f"Instance id {instance_id} is unknown.")
    if member.member_id != member_id:
        raise KafkaError(
            ErrorCode.fenced_instance_id,
            f"Static member {member_id} with instance id {instance_id} was fenced by member {member.member_id}.",
        )
    return member


def _check_epoch(member: ConsumerMember, request: ConsumerHeartbeat) -> None:
    current = member.current
    if request.epoch == JOIN_EPOCH:
        return  # It was fenced, or the response to its first request is lost: it owns nothing.
    # The response with the new epoch may be lost: then the member repeats its request with the epoch before.
    owns_no_other = request.owned is not None and request.owned <= current.assigned
    is_repeated = request.epoch == current.previous_epoch and owns_no_other
    if request.epoch > current.epoch or (request.epoch < current.epoch and not is_repeated):
        raise KafkaError(
            ErrorCode.fenced_member_epoch,
            f"The member sent epoch {request.epoch}, but its epoch is {current.epoch}. "
            "The member must abandon all its partitions and rejoin.",
        )


# -- changes -----------------------------------------------------------------------------------------------------------


def take_over(group: ConsumerGroup, old: ConsumerMember, member_id: str) -> ConsumerMember:
    """Give the place of a static member, with its assignment, to a new process with the same instance id."""
    image = group.change()
    target = image.target.get(old.member_id, NOTHING)
    image.remove(old.member_id)
    group.forget_deadlines(old.member_id)
    member = ConsumerMember(member_id, old.metadata, replace(old.current, epoch=0, previous_epoch=0))
    image.put(member)
    image.target[member_id] = target
    return member


def update_member(
    group: ConsumerGroup,
    is_new: bool,
    before: ConsumerMember,
    metadata: MemberMetadata,
    resolved: ResolvedExpression | None = None,
) -> None:
    """Store a member's metadata. A new member or another subscription starts a new epoch."""
    if resolved is not None and group.image.expressions.get(metadata.expression) != resolved:
        group.change().expressions[metadata.expression] = resolved
        group.subscriptions_changed = True
    old = before.metadata
    if is_new or metadata != old:
        group.change().put(replace(before, metadata=metadata))
    if is_new or (metadata.topics, metadata.expression) != (old.topics, old.expression):
        group.bump_epoch()
        group.subscriptions_changed = True


def remove_member(group: ConsumerGroup, member: ConsumerMember) -> None:
    group.change().remove(member.member_id)
    group.forget_deadlines(member.member_id)
    group.subscriptions_changed = True
    group.bump_epoch()


def _resolve(
    group: ConsumerGroup, expression: str, may_describe: Callable[[str], bool], catalog: TopicCatalog, step: Step
) -> ResolvedExpression | None:
    """Resolve the sender's expression again, if the topics may have changed; None if its topics are known."""
    if not expression:
        return None
    known = group.image.expressions.get(expression)
    version = group.resolved_versions.get(expression, -1)
    if known is not None and version >= group.stale_version:
        return None
    matches = expression_matcher(expression)
    topics = tuple(sorted(name for name in catalog.names() if matches(name) and may_describe(name)))
    group.resolved_versions[expression] = catalog.version
    if known is not None and known.topics == topics:
        return None
    return ResolvedExpression(topics, catalog.version, step.at.wall_ms)


# -- the end of a step -------------------------------------------------------------------------------------------------


def conclude(group: ConsumerGroup, catalog: TopicCatalog, step: Step) -> None:
    """Finish a step: compute the target assignment if needed, write what has changed, and answer when it is durable."""
    if group.successor is None:
        if group.subscriptions_changed:
            _refresh_topics(group, catalog)
        if group.must_assign(step.settings.assignment_interval_of(group.group_id), step.at.now_ms):
            _assign(group, step)
    group.write(step)


def _refresh_topics(group: ConsumerGroup, catalog: TopicCatalog) -> None:
    """Compute the subscribed topics that exist. If they have changed, there is a new epoch."""
    group.subscriptions_changed = False
    image = group.image
    used = {each.metadata.expression for each in image.members.values()}
    for expression in [each for each in image.expressions if each not in used]:
        image = group.change()
        del image.expressions[expression]
        group.resolved_versions.pop(expression, None)
    names = sorted({name for member in image.members.values() for name in image.topics_of(member)})
    topics = {name: topic for name in names if (topic := catalog.topic(name)) is not None}
    if topics != image.topics:
        group.change().topics = topics
        group.bump_epoch()


def _assign(group: ConsumerGroup, step: Step) -> None:
    image = group.change()
    topics = {topic.id: topic for topic in image.topics.values()}
    members = {
        member_id: AssignedMember(
            _topic_ids(image, member),
            image.target.get(member_id, NOTHING),
            member.metadata.instance_id,
            member.metadata.rack,
        )
        for member_id, member in image.members.items()
    }
    assign = ASSIGNORS[image.preferred_assignor(step.settings.assignors[0])]
    image.target = assign(members, topics)
    image.assignment_epoch = image.epoch


def _topic_ids(image: GroupImage, member: ConsumerMember) -> frozenset[UUID]:
    return frozenset(image.topics[name].id for name in image.topics_of(member) if name in image.topics)


def reconcile_member(
    group: ConsumerGroup, member_id: str, owned: Assignment | None, step: Step
) -> ConsumerMember | None:
    """Take the next step towards the member's target; None if the member has left."""
    image = group.image
    before = image.members.get(member_id)
    if before is None:
        return None
    target = image.target.get(member_id, NOTHING)
    current = reconcile(before.current, target, image.assignment_epoch, owned, image.is_free_for(member_id))
    if current is before.current:
        return before
    after = replace(before, current=current)
    group.change().put(after)
    group.watch_revocation(after, before, step.at.now_ms)
    return after
