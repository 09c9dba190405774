"""Bugs to plant into consumer groups (KIP-848): typical mistakes of coordinators that assign."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tests.sim.planted import Planted
from tests.sim.planted_disks import Found

from chronik.groups import commits, heartbeats, migration
from chronik.groups.consumer_group import ConsumerGroup, GroupImage
from chronik.groups.consumer_member import CurrentAssignment, MemberState
from chronik.groups.reconciliation import reconcile
from chronik.groups.topics import Assignment, TopicIdPartition
from chronik.testing.sim.aimed_scenarios import LateCommits
from chronik.testing.sim.cluster_scenarios import ConsumerGroups
from chronik.wire.errors import ErrorCode


def partitions_are_granted_while_others_own_them() -> AbstractContextManager[Any]:
    """A member gets its target at once, although another member has not revoked it yet."""

    def is_free_for(image: GroupImage, member_id: str) -> Callable[[TopicIdPartition], bool]:
        return lambda partition: True

    return patch.object(GroupImage, "is_free_for", is_free_for)


def revocations_are_assumed() -> AbstractContextManager[Any]:
    """A member that is notified of a revocation counts as having revoked, before it reports that."""

    def reconcile_at_once(
        current: CurrentAssignment, target: Assignment, target_epoch: int, owned: Assignment | None, is_free: Any
    ) -> CurrentAssignment:
        after = reconcile(current, target, target_epoch, owned, is_free)
        if after.state is MemberState.UNREVOKED_PARTITIONS:
            return reconcile(current, target, target_epoch, frozenset(), is_free)
        return after

    return patch.object(heartbeats, "reconcile", reconcile_at_once)


def waiting_members_count_as_stable() -> AbstractContextManager[Any]:
    """A member whose partitions other members still own never gets them later."""

    def reconcile_once(*args: Any) -> CurrentAssignment:
        after = reconcile(*args)
        is_waiting = after.state is MemberState.UNRELEASED_PARTITIONS
        return replace(after, state=MemberState.STABLE) if is_waiting else after

    return patch.object(heartbeats, "reconcile", reconcile_once)


def stale_commits_are_accepted() -> AbstractContextManager[Any]:
    """A commit of a member that was removed, or of an earlier epoch, is written."""

    def accept(group: ConsumerGroup, member_id: str | None, epoch: int) -> ErrorCode:
        return ErrorCode.none

    return patch.object(commits, "check_epoch", accept)


def converted_members_own_nothing() -> AbstractContextManager[Any]:
    """A classic group becomes a consumer group that does not know what its members own."""

    def nothing(*_: Any) -> Assignment:
        return frozenset()

    return patch.object(migration, "owned_partitions", nothing)


PLANTED_IN_CONSUMER_GROUPS: dict[Planted, int] = {
    partitions_are_granted_while_others_own_them: 3,
    revocations_are_assumed: 10,
}
"""Each bug, and the number of seeds that may pass before it is found: about three times the mean."""

PINNED_IN_CONSUMER_GROUPS: dict[Planted, Found] = {
    stale_commits_are_accepted: Found(LateCommits.name, 2),
    converted_members_own_nothing: Found(ConsumerGroups.name, 7),
    waiting_members_count_as_stable: Found(ConsumerGroups.name, 13),
}
"""Bugs that few seeds find, or that take long to show; the seed of each test."""

GROUP_SEEDS_MAX: dict[Planted, int] = {waiting_members_count_as_stable: 14}
"""The number of seeds from 0 on within which it must be found; only `make soak-counts` runs that many."""
