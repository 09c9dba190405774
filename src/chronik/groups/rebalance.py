"""How a group moves from one generation to the next.

    Empty, Stable, CompletingRebalance --(a member joins, leaves, changes, expires)--> PreparingRebalance
    PreparingRebalance --(all have joined, or the rebalance timeout ends)--> CompletingRebalance; without members, Empty
    CompletingRebalance --(the leader's assignment is in the log)--> Stable

Every function takes the group and the `Step` of the current event.
"""

from dataclasses import dataclass
from typing import Any

from chronik.groups.any_group import GroupState
from chronik.groups.group import Group
from chronik.groups.member import Member
from chronik.groups.step import Step, Write, group_write_error
from chronik.wire.errors import ErrorCode

INITIAL_DELAYS_MAX = 30
"""A first rebalance waits for late joiners for at most this many initial delays, however many keep coming."""


def join_error(error: ErrorCode, member_id: str = "") -> dict[str, Any]:
    return {"error_code": error, "member_id": member_id}


def join_result(
    group: Group, member: Member, *, with_members: bool, leader_id: str | None = None, skip_assignment: bool = False
) -> dict[str, Any]:
    """Build a successful JoinGroup response for this generation; only the leader gets the member list."""
    return {
        "error_code": ErrorCode.none,
        "generation_id": group.generation,
        "protocol_type": group.protocol_type,
        "protocol_name": group.protocol_name,
        "leader": leader_id or group.leader_id or "",
        "skip_assignment": skip_assignment,
        "member_id": member.member_id,
        "members": [
            {
                "member_id": each.member_id,
                "group_instance_id": each.instance_id,
                "metadata": each.metadata_for(group.protocol_name),
            }
            for each in (group.members.values() if with_members else ())
        ],
    }


def sync_error(error: ErrorCode) -> dict[str, Any]:
    return {"error_code": error}


def sync_result(group: Group, member: Member) -> dict[str, Any]:
    return {
        "error_code": ErrorCode.none,
        "protocol_type": group.protocol_type,
        "protocol_name": group.protocol_name,
        "assignment": member.assignment,
    }


def answer_join(group: Group, member: Member, values: dict[str, Any], step: Step) -> None:
    step.reply(group.set_join_token(member, None), values)


def answer_sync(member: Member, values: dict[str, Any], step: Step) -> None:
    token, member.sync_token = member.sync_token, None
    step.reply(token, values)


def prepare_if_allowed(group: Group, step: Step) -> None:
    if group.state is not GroupState.PREPARING_REBALANCE:
        prepare(group, step)


def prepare(group: Group, step: Step) -> None:
    if group.state is GroupState.COMPLETING_REBALANCE:
        _fail_syncs(group, ErrorCode.rebalance_in_progress, step)
    group.sync_deadline_ms = None
    group.pending_sync.clear()
    was_empty = group.state is GroupState.EMPTY
    _enter(group, GroupState.PREPARING_REBALANCE, step)
    timeout_ms = group.rebalance_timeout_ms
    delay_ms = min(step.settings.initial_rebalance_delay_ms, timeout_ms)
    if was_empty and delay_ms > 0:
        group.member_added = False
        group.initial_delay_left_ms = min(timeout_ms, INITIAL_DELAYS_MAX * delay_ms) - delay_ms
        group.rebalance_deadline_ms = step.at.now_ms + delay_ms
    else:
        group.rebalance_deadline_ms = step.at.now_ms + timeout_ms
        complete_join_if_ready(group, step)


def complete_join_if_ready(group: Group, step: Step) -> None:
    waits_for_more = group.initial_delay_left_ms is not None
    if group.state is GroupState.PREPARING_REBALANCE and not waits_for_more and group.all_joined:
        _complete_join(group, step)


def _complete_join(group: Group, step: Step) -> None:
    group.initial_delay_left_ms = None
    # A static member stays until its session ends, so that a restart causes no rebalance.
    for member in [each for each in group.members.values() if each.join_token is None and each.instance_id is None]:
        group.remove(member)
    if group.members and not group.elect_joined_leader():
        group.rebalance_deadline_ms = step.at.now_ms + group.rebalance_timeout_ms
        return
    group.rebalance_deadline_ms = None
    group.generation += 1
    group.protocol_name = group.select_protocol()
    if not group.members:
        _enter(group, GroupState.EMPTY, step)
        group.leader_id = None
        group.is_persisted = True
        step.append([group.record()], Write(group))
        return
    _enter(group, GroupState.COMPLETING_REBALANCE, step)
    for member in group.members.values():
        if member.join_token is not None:
            values = join_result(group, member, with_members=member.member_id == group.leader_id)
            answer_join(group, member, values, step)
            member.is_new = False
            member.heard_from(step.at.now_ms)
        group.pending_sync[member.member_id] = None
    group.sync_deadline_ms = step.at.now_ms + group.rebalance_timeout_ms
    step.rebalanced(group.group_id, group.generation, len(group.members))


def _enter(group: Group, state: GroupState, step: Step) -> None:
    group.state = state
    group.state_since_ms = step.at.wall_ms


def _fail_syncs(group: Group, error: ErrorCode, step: Step) -> None:
    for member in group.members.values():
        member.assignment = b""
        if member.sync_token is not None:
            member.heard_from(step.at.now_ms)
            answer_sync(member, sync_error(error), step)


def remove_member(group: Group, member: Member, step: Step, error: ErrorCode = ErrorCode.unknown_member_id) -> None:
    """Remove a member that left or expired, answer its waiting requests, and rebalance."""
    answer_join(group, member, join_error(error, member.member_id), step)
    answer_sync(member, sync_error(error), step)
    group.remove(member)
    if group.state is GroupState.PREPARING_REBALANCE:
        complete_join_if_ready(group, step)
    elif group.state is not GroupState.EMPTY:
        prepare(group, step)


def remove_pending(group: Group, member_id: str, step: Step) -> None:
    """Forget an unused pending member id; the rebalance no longer waits for it."""
    del group.pending_members[member_id]
    complete_join_if_ready(group, step)


def assign(group: Group, assignments: dict[str, bytes], step: Step) -> None:
    """Write the leader's assignment to the log; members receive it once it is durable."""
    if group.assignment_in_flight == group.generation:
        return  # The leader sent it twice; the first one applies.
    known = {member_id: assignments.get(member_id, b"") for member_id in group.members}
    group.assignment_in_flight = group.generation
    group.is_persisted = True
    step.append([group.record(known)], AssignmentWrite(group, group.generation, known))


def on_time(group: Group, step: Step) -> None:
    now_ms = step.at.now_ms
    for member_id in [each for each, deadline_ms in group.pending_members.items() if deadline_ms <= now_ms]:
        remove_pending(group, member_id, step)
    for member in [each for each in group.members.values() if each.may_expire and each.deadline_ms <= now_ms]:
        # Removing one member may complete a rebalance that removes other members or makes them wait.
        if group.members.get(member.member_id) is member and member.may_expire and member.deadline_ms <= now_ms:
            remove_member(group, member, step)
    if group.rebalance_deadline_ms is not None and group.rebalance_deadline_ms <= now_ms:
        _on_rebalance_deadline(group, step)
    if group.sync_deadline_ms is not None and group.sync_deadline_ms <= now_ms:
        _on_sync_deadline(group, step)


def _on_rebalance_deadline(group: Group, step: Step) -> None:
    left_ms = group.initial_delay_left_ms
    if left_ms and group.member_added:
        delay_ms = min(step.settings.initial_rebalance_delay_ms, left_ms)
        group.member_added = False
        group.initial_delay_left_ms = left_ms - delay_ms
        group.rebalance_deadline_ms = step.at.now_ms + delay_ms
        return
    _complete_join(group, step)


def _on_sync_deadline(group: Group, step: Step) -> None:
    """Remove members that joined but never sent SyncGroup, and rebalance: they block the other members."""
    group.sync_deadline_ms = None
    late = [group.members[member_id] for member_id in group.pending_sync]
    for member in late:
        answer_join(group, member, join_error(ErrorCode.unknown_member_id, member.member_id), step)
        group.remove(member)
    if late:
        prepare_if_allowed(group, step)


@dataclass(slots=True)
class AssignmentWrite(Write):
    """The record of a generation with its assignment; the members' SyncGroup requests wait for it."""

    group: Group
    generation: int
    assignments: dict[str, bytes]

    def finish(self, error: ErrorCode, step: Step) -> None:
        group = self.group
        if group.assignment_in_flight == self.generation:
            group.assignment_in_flight = None
        if group.state is not GroupState.COMPLETING_REBALANCE or group.generation != self.generation:
            return
        if error is not ErrorCode.none:
            _fail_syncs(group, group_write_error(error), step)
            prepare(group, step)
            return
        _enter(group, GroupState.STABLE, step)
        for member in group.members.values():
            member.assignment = self.assignments.get(member.member_id, b"")
            if member.sync_token is not None:
                member.heard_from(step.at.now_ms)
                answer_sync(member, sync_result(group, member), step)


@dataclass(slots=True)
class StaticMemberWrite(Write):
    """The record of a static member's new id. Its JoinGroup waits for it unless a rebalance answers first."""

    group: Group
    member: Member
    generation: int
    token: int
    old_leader_id: str | None
    can_skip_assignment: bool

    def finish(self, error: ErrorCode, step: Step) -> None:
        group, member = self.group, self.member
        is_current = group.state is GroupState.STABLE and group.generation == self.generation
        if member.join_token != self.token or not is_current:
            return
        member.is_new = False
        member.heard_from(step.at.now_ms)
        if error is not ErrorCode.none:
            answer_join(group, member, join_error(group_write_error(error), member.member_id), step)
            return
        is_leader = group.leader_id == member.member_id
        if self.can_skip_assignment:
            values = join_result(group, member, with_members=is_leader, skip_assignment=is_leader)
        else:
            # An old client that sees itself as leader would assign again; the old leader id keeps it a follower.
            values = join_result(group, member, with_members=False, leader_id=self.old_leader_id)
        answer_join(group, member, values, step)
