"""Bugs to plant into share groups (KIP-932): typical mistakes of leaders that deliver and acknowledge."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

from tests.sim.planted import Planted
from tests.sim.planted_disks import Found

from chronik.node.shares.share_partitions import LedShare, SharePartitions
from chronik.shares.share_partition import Acknowledgement, SharePartition
from chronik.shares.state import SharePartitionKey, StateBatch
from chronik.testing.sim.aimed_scenarios import MovingShareLeaders
from chronik.testing.sim.cluster_scenarios import ShareGroups
from chronik.wire.errors import ErrorCode


def success_before_the_write() -> AbstractContextManager[Any]:
    """An acknowledgement is answered before the share coordinator has committed it."""

    async def acknowledge(
        self: SharePartitions, key: SharePartitionKey, member_id: str, acknowledgements: Sequence[Acknowledgement]
    ) -> ErrorCode:
        led = await self.led(key)
        assert led.machine is not None
        token, actions = led.machine.acknowledge(member_id, acknowledgements, self._now_ms())
        answer = led.answers[token] = self._loop.create_future()
        self._run(led, actions)
        return answer.result() if answer.done() else ErrorCode.none

    return patch.object(SharePartitions, "acknowledge", acknowledge)


def stale_leader_keeps_its_state() -> AbstractContextManager[Any]:
    """A node that leads again continues with what it knew, and no coordinator fences it."""
    stack = ExitStack()
    stack.enter_context(patch.object(SharePartitions, "metadata_changed", lambda self, image, events: None))
    stack.enter_context(patch.object(SharePartitions, "_drop_if_unread", lambda self, led: None))
    led = SharePartitions.led

    async def stale(self: SharePartitions, key: SharePartitionKey) -> LedShare:
        known = self._led.get(key)
        if known is not None and known.machine is not None:
            _, known.log = self.partition_of(key)
            known.leader_epoch = known.machine.leader_epoch = known.log.leader_epoch
        return await led(self, key)

    stack.enter_context(patch.object(SharePartitions, "led", stale))
    return stack


def locks_never_end() -> AbstractContextManager[Any]:
    """The leader forgets that locks end: what a hanging member has acquired stays locked."""
    return patch.object(SharePartition, "tick", lambda self, now_ms: [])


def delivery_counts_are_not_written() -> AbstractContextManager[Any]:
    """Released records are stored without their number of deliveries."""

    def uncounted(self: SharePartition, batch: StateBatch) -> int:
        return gather(self, batch if batch.delivery_state else batch._replace(delivery_count=0))

    gather = SharePartition._gather
    return patch.object(SharePartition, "_gather", uncounted)


def start_offset_passes_unsettled_records() -> AbstractContextManager[Any]:
    """The start offset moves to the end of the last acknowledged record, past what is still acquired."""

    def start_after(self: SharePartition, token: int) -> int:
        done = [run.last + 1 for run in self._runs if run.is_complete or (run.write == token and run.target)]
        return max([self.start_offset, *done])

    return patch.object(SharePartition, "_start_after", start_after)


PLANTED_IN_SHARE_GROUPS: dict[Planted, Found] = {
    success_before_the_write: Found(MovingShareLeaders.name, 0),
    stale_leader_keeps_its_state: Found(MovingShareLeaders.name, 2),
    locks_never_end: Found(ShareGroups.name, 1),
    delivery_counts_are_not_written: Found(MovingShareLeaders.name, 3),
    start_offset_passes_unsettled_records: Found(ShareGroups.name, 5),
}
"""The seed of each test; docs/simulator.md lists how often each bug is found."""

SHARE_GROUP_SEEDS_MAX: dict[Planted, int] = {
    success_before_the_write: 6,
    stale_leader_keeps_its_state: 10,
    locks_never_end: 12,
    delivery_counts_are_not_written: 6,
    start_offset_passes_unsettled_records: 8,
}
"""The number of seeds from 0 on within which each bug must be found; only `make soak` runs that many."""
