"""How a member gets from its current assignment to its target, so that no partition has two owners.

STABLE --(new target)--> UNREVOKED_PARTITIONS, if it must revoke: it keeps its epoch until it has revoked them
UNREVOKED_PARTITIONS --(it no longer owns them)--> the target epoch
at the target epoch: STABLE, or UNRELEASED_PARTITIONS while other members still own some of its partitions
"""

from collections.abc import Callable
from dataclasses import replace

from chronik.groups.consumer_member import CurrentAssignment, MemberState
from chronik.groups.topics import Assignment, TopicIdPartition


def reconcile(
    current: CurrentAssignment,
    target: Assignment,
    target_epoch: int,
    owned: Assignment | None,
    is_free: Callable[[TopicIdPartition], bool],
) -> CurrentAssignment:
    """Return the next step towards the target.

    `owned` are the partitions that the member reports as its own; None if it does not report them: then it has revoked
    nothing. `is_free` reports whether no other member owns a partition.
    """
    if current.is_reconciled_to(target_epoch):
        return current
    if current.state is MemberState.UNREVOKED_PARTITIONS:
        if owned is None or owned & current.revoking:
            return current
        return _next(replace(current, epoch=current.epoch + 1), current.epoch, target, target_epoch, owned, is_free)
    return _next(current, current.epoch, target, target_epoch, owned, is_free)


def _next(
    current: CurrentAssignment,
    previous_epoch: int,
    target: Assignment,
    target_epoch: int,
    owned: Assignment | None,
    is_free: Callable[[TopicIdPartition], bool],
) -> CurrentAssignment:
    kept = current.assigned & target
    revoking = current.assigned - kept
    if revoking and (owned is None or owned & revoking):
        return CurrentAssignment(current.epoch, previous_epoch, MemberState.UNREVOKED_PARTITIONS, kept, revoking)
    missing = target - kept
    granted = frozenset(partition for partition in missing if is_free(partition))
    state = MemberState.STABLE if granted == missing else MemberState.UNRELEASED_PARTITIONS
    after = CurrentAssignment(target_epoch, previous_epoch, state, kept | granted)
    # A member that only waits must stay unchanged, so that its heartbeats write nothing.
    return current if _is_same(after, current) else after


def _is_same(after: CurrentAssignment, before: CurrentAssignment) -> bool:
    return replace(after, previous_epoch=before.previous_epoch) == before
