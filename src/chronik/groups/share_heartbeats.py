"""ShareGroupHeartbeat: how members join, stay and leave; and the step of a share group.

A step is: requests change members and subscriptions, then `conclude` computes the topics, the epoch and the target
assignment once for all of them, and writes the difference.
"""

import struct
import zlib
from collections.abc import Iterable
from dataclasses import replace
from uuid import UUID

from chronik.groups.assignors import AssignedMember
from chronik.groups.consumer_member import JOIN_EPOCH, LEAVE_EPOCH
from chronik.groups.heartbeats import TEXT_BYTES_MAX, assignment_values, check_subscription, refused
from chronik.groups.image_group import WaitingReply
from chronik.groups.share_assignor import assign_simple
from chronik.groups.share_group import ShareGroup
from chronik.groups.share_member import ShareAssignment, ShareHeartbeat, ShareMember
from chronik.groups.share_offsets import NO_OFFSET, initialize_later
from chronik.groups.step import Step
from chronik.groups.topics import Assignment, Topic, TopicCatalog
from chronik.wire.errors import ErrorCode, KafkaError

NOTHING: Assignment = frozenset()


def check_request(request: ShareHeartbeat) -> None:
    """Raise for a request that is invalid in every state of the group."""
    if not request.group_id:
        raise KafkaError(ErrorCode.invalid_request, "GroupId can't be empty.")
    if not request.member_id:
        raise KafkaError(ErrorCode.invalid_request, "MemberId can't be empty.")
    if request.rack == "":
        raise KafkaError(ErrorCode.invalid_request, "RackId can't be empty.")
    if any(len(text.encode()) > TEXT_BYTES_MAX for text in (request.member_id, request.rack or "")):
        raise KafkaError(ErrorCode.invalid_request, f"An id of more than {TEXT_BYTES_MAX} bytes.")
    check_subscription(request.topics)
    if request.epoch < LEAVE_EPOCH:
        raise KafkaError(ErrorCode.invalid_request, f"MemberEpoch is {request.epoch}, but must be at least -1.")
    if request.epoch == JOIN_EPOCH and not request.topics:
        raise KafkaError(ErrorCode.invalid_request, "SubscribedTopicNames must be set in first request.")


def join_or_stay(group: ShareGroup, request: ShareHeartbeat, token: int, step: Step) -> None:
    """Handle the request of a member that does not leave; `conclude` answers. Raise before anything has changed."""
    member_id = request.member_id
    known = group.image.members.get(member_id)
    if request.epoch == JOIN_EPOCH:
        if known is None and len(group.image.members) >= step.settings.share_members_max:
            raise KafkaError(
                ErrorCode.group_max_size_reached,
                f"The share group has reached its maximum capacity of {step.settings.share_members_max} members.",
            )
    else:
        known = _member(group, member_id)
        _check_epoch(known, request.epoch)
    before = ShareMember(member_id) if known is None else known
    metadata = replace(
        before.metadata,
        rack=before.metadata.rack if request.rack is None else request.rack,
        client_id=request.client_id,
        client_host=request.client_host,
        topics=before.metadata.topics if request.topics is None else tuple(sorted(set(request.topics))),
    )
    if known is None or metadata != before.metadata:
        group.change().members[member_id] = replace(before, metadata=metadata)
    if known is None or metadata.topics != before.metadata.topics:
        group.bump_epoch()
        group.subscriptions_changed = True
    if group.image.topics.initializing:
        # Perhaps the share coordinators could not be reached. Heartbeats pace the repetitions.
        group.subscriptions_changed = True
    group.session_deadlines[member_id] = step.at.now_ms + step.settings.share_session_timeout_of(group.group_id)
    interval_ms = step.settings.share_heartbeat_interval_of(group.group_id)
    was_assigned = before.current.partitions
    is_full = request.epoch == JOIN_EPOCH or request.topics is not None

    def answer() -> WaitingReply:
        member = _assigned_member(group, member_id)
        if member is None:
            values = refused(ErrorCode.unknown_member_id)
            return WaitingReply(token, values, values)
        partitions = member.current.partitions
        values = {
            "error_code": ErrorCode.none,
            "member_id": member_id,
            "member_epoch": member.current.epoch,
            "heartbeat_interval": interval_ms,
            "assignment": assignment_values(partitions) if is_full or partitions != was_assigned else None,
        }
        return WaitingReply(token, values, {"member_id": member_id})

    group.continuations.append(answer)


def _member(group: ShareGroup, member_id: str) -> ShareMember:
    member = group.image.members.get(member_id)
    if member is None:
        raise KafkaError(ErrorCode.unknown_member_id, f"Member {member_id} is not a member of group {group.group_id}.")
    return member


def _check_epoch(member: ShareMember, epoch: int) -> None:
    # The response with the new epoch may be lost: then the member repeats its request with the epoch before.
    if epoch not in (member.current.epoch, member.current.previous_epoch):
        raise KafkaError(
            ErrorCode.fenced_member_epoch,
            f"The member sent epoch {epoch}, but its epoch is {member.current.epoch}. "
            "The member must abandon all its partitions and rejoin.",
        )


def _assigned_member(group: ShareGroup, member_id: str) -> ShareMember | None:
    """Give the member its target; None if it has left."""
    image = group.image
    member = image.members.get(member_id)
    if member is None or member.current.epoch == image.assignment_epoch:
        return member
    current = ShareAssignment(image.assignment_epoch, member.current.epoch, image.target.get(member_id, NOTHING))
    after = replace(member, current=current)
    group.change().members[member_id] = after
    return after


def leave(group: ShareGroup, request: ShareHeartbeat, token: int) -> None:
    """Handle the request of a member that leaves. Raise before anything has changed."""
    remove_member(group, _member(group, request.member_id).member_id)
    values = {"error_code": ErrorCode.none, "member_id": request.member_id, "member_epoch": LEAVE_EPOCH}
    group.continuations.append(lambda: WaitingReply(token, values, {"member_id": request.member_id}))


def remove_member(group: ShareGroup, member_id: str) -> None:
    image = group.change()
    del image.members[member_id]
    image.target.pop(member_id, None)
    group.session_deadlines.pop(member_id, None)
    group.subscriptions_changed = True
    group.bump_epoch()


def on_time(group: ShareGroup, step: Step) -> None:
    """Remove the members whose session has ended."""
    for member_id in group.expired(step.at.now_ms):
        remove_member(group, member_id)


# -- the end of a step -------------------------------------------------------------------------------------------------


def conclude(group: ShareGroup, catalog: TopicCatalog, step: Step) -> None:
    """Finish a step: compute topics and the target assignment if needed, and write what has changed."""
    if group.subscriptions_changed:
        _refresh_topics(group, catalog)
    if group.must_assign(step.settings.share_assignment_interval_of(group.group_id), step.at.now_ms):
        _assign(group)
    group.write(step)


def _refresh_topics(group: ShareGroup, catalog: TopicCatalog) -> None:
    """Compute the subscribed topics, and have the state of their new partitions initialized."""
    group.subscriptions_changed = False
    image = group.image
    deleted = [topic_id for topic_id in _topic_ids(group) if catalog.name_of(topic_id) is None]
    if deleted:
        group.change().topics = image.topics.without(deleted)
        group.bump_epoch()
    names = sorted({name for member in image.members.values() for name in member.metadata.topics})
    group.subscribed = {name: topic for name in names if (topic := catalog.topic(name)) is not None}
    metadata_hash = _hash(group.subscribed.values())
    if metadata_hash != group.image.metadata_hash:
        group.change().metadata_hash = metadata_hash
        group.bump_epoch()
    topics = group.image.topics
    existing = frozenset(partition for topic in group.subscribed.values() for partition in topic.partitions())
    missing = existing - topics.initialized_partitions() - group.in_flight
    if missing:
        new = missing - topics.initializing_partitions()
        if new:
            ids = {topic.id: topic.name for topic in group.subscribed.values()}
            group.change().topics = topics.with_initializing(new, ids)
        initialize_later(group, dict.fromkeys(sorted(missing), NO_OFFSET))


def _topic_ids(group: ShareGroup) -> list[UUID]:
    topics = group.image.topics
    return [*topics.initializing, *topics.initialized, *topics.deleting]


def _hash(topics: Iterable[Topic]) -> int:
    """Return a value that changes when the topics or the numbers of their partitions do; 0 without topics."""
    described = b"".join(topic.id.bytes + struct.pack(">i", topic.partition_count) for topic in topics)
    return (zlib.crc32(described) & 0x7FFFFFFF) << 32 | zlib.adler32(described) if described else 0


def _assign(group: ShareGroup) -> None:
    image = group.change()
    ids = {name: topic.id for name, topic in group.subscribed.items()}
    members = {
        member_id: AssignedMember(
            frozenset(ids[name] for name in member.metadata.topics if name in ids), image.target.get(member_id, NOTHING)
        )
        for member_id, member in image.members.items()
    }
    existing = frozenset(partition for topic in group.subscribed.values() for partition in topic.partitions())
    image.target = assign_simple(members, image.topics.initialized_partitions() & existing)
    image.assignment_epoch = image.epoch
