"""Member requests: JoinGroup, SyncGroup, Heartbeat, LeaveGroup.

All of them check the sender in the same way (`check_member`). The member id must be known. A static member's id must be
the current one for its instance id; otherwise the sender is fenced.
"""

from collections.abc import Callable
from typing import Any

from chronik.groups import rebalance
from chronik.groups.any_group import GroupState
from chronik.groups.group import Group
from chronik.groups.member import JoinRequest, Member, SyncRequest
from chronik.groups.records import subscribed_topics
from chronik.groups.step import Step
from chronik.wire.errors import ErrorCode

NEW_MEMBER_JOIN_TIMEOUT_MS = 300_000
"""Replaces a new member's session timeout: it cannot send heartbeats before its first JoinGroup response."""


def check_member(group: Group, member_id: str, instance_id: str | None, generation: int | None = None) -> ErrorCode:
    """Check the sender of a request, and its generation if the request has one."""
    if instance_id is not None:
        current_id = group.static_members.get(instance_id)
        if current_id is None:
            return ErrorCode.unknown_member_id
        if current_id != member_id:
            return ErrorCode.fenced_instance_id
    if member_id not in group.members:
        return ErrorCode.unknown_member_id
    return ErrorCode.none if generation in (None, group.generation) else ErrorCode.illegal_generation


# JoinGroup


def join(group: Group, request: JoinRequest, token: int, new_member_id: Callable[[str], str], step: Step) -> None:
    if not group.accepts(request.member_id, step.settings.members_max):
        member = group.members.get(request.member_id)
        if member is not None:
            rebalance.remove_member(group, member, step, ErrorCode.group_max_size_reached)
        elif request.member_id in group.pending_members:
            rebalance.remove_pending(group, request.member_id, step)
        step.reply(token, rebalance.join_error(ErrorCode.group_max_size_reached))
    elif not group.supports(request.protocol_type, request.protocols, _sender(group, request)):
        step.reply(token, rebalance.join_error(ErrorCode.inconsistent_group_protocol, request.member_id))
    elif not request.member_id:
        _join_unknown(group, request, token, new_member_id(request.instance_id or request.client_id), step)
    elif request.member_id in group.pending_members:
        del group.pending_members[request.member_id]
        _add_member(group, request, token, request.member_id, step)
    else:
        _join_known(group, request, token, step)
    rebalance.complete_join_if_ready(group, step)


def _sender(group: Group, request: JoinRequest) -> Member | None:
    if not request.member_id and request.instance_id is not None:
        return group.members.get(group.static_members.get(request.instance_id, ""))
    return group.members.get(request.member_id)


def _join_unknown(group: Group, request: JoinRequest, token: int, member_id: str, step: Step) -> None:
    if request.instance_id is not None and request.instance_id in group.static_members:
        _replace_static(group, request, token, member_id, step)
    elif request.instance_id is None and request.member_id_required:
        group.pending_members[member_id] = step.at.now_ms + request.session_timeout_ms
        step.reply(token, rebalance.join_error(ErrorCode.member_id_required, member_id))
    else:
        _add_member(group, request, token, member_id, step)


def _join_known(group: Group, request: JoinRequest, token: int, step: Step) -> None:
    error = check_member(group, request.member_id, request.instance_id)
    if error is not ErrorCode.none:
        step.reply(token, rebalance.join_error(error, request.member_id))
        return
    member = group.members[request.member_id]
    is_unchanged = member.protocols == request.protocols
    is_leader = group.leader_id == member.member_id
    # In CompletingRebalance the response to its JoinGroup was lost: send the same one again.
    is_repeated = group.state is GroupState.COMPLETING_REBALANCE or (group.state is GroupState.STABLE and not is_leader)
    if is_unchanged and is_repeated:
        member.heard_from(step.at.now_ms)
        step.reply(token, rebalance.join_result(group, member, with_members=is_leader))
    else:
        # A leader that joins again requests a new assignment: its topics may have changed.
        _refresh(group, member, request, token, step)
        rebalance.prepare_if_allowed(group, step)


def _add_member(group: Group, request: JoinRequest, token: int, member_id: str, step: Step) -> None:
    if not group.members:
        group.protocol_type = request.protocol_type
    member = Member(
        member_id,
        request.instance_id,
        request.client_id,
        request.client_host,
        request.session_timeout_ms,
        request.rebalance_timeout_ms,
        request.protocols,
        step.at.now_ms + NEW_MEMBER_JOIN_TIMEOUT_MS,
        join_token=token,
        is_new=True,
    )
    group.add(member)
    group.member_added = True
    rebalance.prepare_if_allowed(group, step)


def _refresh(group: Group, member: Member, request: JoinRequest, token: int, step: Step) -> None:
    """Update a member that joins again, perhaps from a new process; answer its older JoinGroup if one still waits."""
    group.change_protocols(member, request.protocols)
    if len(group.members) == 1:
        group.protocol_type = request.protocol_type
    member.is_new = False
    member.client_id = request.client_id
    member.client_host = request.client_host
    member.session_timeout_ms = request.session_timeout_ms
    member.rebalance_timeout_ms = request.rebalance_timeout_ms
    member.heard_from(step.at.now_ms)
    older = group.set_join_token(member, token)
    step.reply(older, rebalance.join_error(ErrorCode.rebalance_in_progress, member.member_id))


def _replace_static(group: Group, request: JoinRequest, token: int, member_id: str, step: Step) -> None:
    """Replace a static member by a new process with the same instance id; the old process is fenced."""
    assert request.instance_id is not None
    member = group.members[group.static_members[request.instance_id]]
    old_leader_id = group.leader_id
    fenced = ErrorCode.fenced_instance_id
    rebalance.answer_join(group, member, rebalance.join_error(fenced, member.member_id), step)
    rebalance.answer_sync(member, rebalance.sync_error(fenced), step)
    old_topics = _subscription(group, member)
    group.rename(member, member_id)
    _refresh(group, member, request, token, step)
    if group.state is GroupState.STABLE:
        if group.select_protocol() == group.protocol_name and _subscription(group, member) == old_topics:
            # The assignment is still valid.
            write = rebalance.StaticMemberWrite(
                group, member, group.generation, token, old_leader_id, request.can_skip_assignment
            )
            step.append([group.record()], write)
        else:
            rebalance.prepare(group, step)
    elif group.state is GroupState.COMPLETING_REBALANCE:
        rebalance.prepare(group, step)


def _subscription(group: Group, member: Member) -> frozenset[str] | bytes:
    """Return what an assignor uses of a member's metadata: its topics. Owned partitions are void after a restart."""
    metadata = member.metadata_for(group.protocol_name)
    topics = subscribed_topics(metadata)
    return metadata if topics is None else topics


# SyncGroup


def sync(group: Group, request: SyncRequest, token: int, step: Step) -> None:
    error = _check_sync(group, request)
    if error is not ErrorCode.none:
        step.reply(token, rebalance.sync_error(error))
        return
    member = group.members[request.member_id]
    group.pending_sync.pop(member.member_id, None)
    if not group.pending_sync:
        group.sync_deadline_ms = None
    member.heard_from(step.at.now_ms)
    if group.state is GroupState.STABLE:
        step.reply(token, rebalance.sync_result(group, member))
        return
    rebalance.answer_sync(member, rebalance.sync_error(ErrorCode.rebalance_in_progress), step)
    member.sync_token = token
    if group.leader_id == member.member_id:
        rebalance.assign(group, request.assignments, step)


def _check_sync(group: Group, request: SyncRequest) -> ErrorCode:
    error = check_member(group, request.member_id, request.instance_id, request.generation)
    if error is not ErrorCode.none:
        return error
    if request.protocol_type is not None and request.protocol_type != group.protocol_type:
        return ErrorCode.inconsistent_group_protocol
    if request.protocol_name is not None and request.protocol_name != group.protocol_name:
        return ErrorCode.inconsistent_group_protocol
    if group.state is GroupState.PREPARING_REBALANCE:
        return ErrorCode.rebalance_in_progress
    return ErrorCode.none


# Heartbeat


def heartbeat(group: Group, member_id: str, generation: int, instance_id: str | None, now_ms: int) -> ErrorCode:
    error = check_member(group, member_id, instance_id, generation)
    if error is not ErrorCode.none:
        return error
    group.members[member_id].heard_from(now_ms)
    if group.state is GroupState.PREPARING_REBALANCE:
        return ErrorCode.rebalance_in_progress
    return ErrorCode.none


# LeaveGroup


def leave(group: Group, member_id: str, instance_id: str | None, step: Step) -> ErrorCode:
    """Remove one member. To remove a static member, an administrator sends an empty member id and the instance id."""
    if not member_id and instance_id is not None:
        member_id = group.static_members.get(instance_id, "")
    if member_id in group.pending_members and instance_id is None:
        rebalance.remove_pending(group, member_id, step)
        return ErrorCode.none
    error = check_member(group, member_id, instance_id)
    if error is ErrorCode.none:
        rebalance.remove_member(group, group.members[member_id], step)
    return error


def refuse_all(group: Group, error: ErrorCode, step: Step) -> None:
    """Answer every request that waits in this group, before it is forgotten."""
    for member in group.members.values():
        rebalance.answer_join(group, member, rebalance.join_error(error, member.member_id), step)
        rebalance.answer_sync(member, rebalance.sync_error(error), step)


def refuse_waiting(group: Group, error: ErrorCode, step: Step) -> None:
    """Answer every request that waits in this group. The members keep their place for one session, to retry."""
    for member in group.members.values():
        if member.join_token is not None or member.sync_token is not None:
            member.is_new = False
            member.heard_from(step.at.now_ms)
    refuse_all(group, error, step)


def describe(group: Group) -> dict[str, Any]:
    is_stable = group.state is GroupState.STABLE
    return {
        "error_code": ErrorCode.none,
        "group_id": group.group_id,
        "group_state": str(group.state),
        "protocol_type": group.protocol_type or "",
        "protocol_data": (group.protocol_name or "") if is_stable else "",
        "members": [
            {
                "member_id": member.member_id,
                "group_instance_id": member.instance_id,
                "client_id": member.client_id,
                "client_host": member.client_host,
                "member_metadata": member.metadata_for(group.protocol_name) if is_stable else b"",
                "member_assignment": member.assignment if is_stable else b"",
            }
            for member in group.members.values()
        ],
    }
