"""Admin requests about partitions become one metadata command each: planned on the newest image, then proposed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from chronik.metadata.commands import ChangePartitions
from chronik.metadata.image import ClusterImage
from chronik.metadata.reassignment import Plan
from chronik.node.admin.outcomes import WAIT_MS_MAX, WAIT_MS_MIN
from chronik.node.membership.metadata_log import MetadataLog
from chronik.wire.errors import ErrorCode, KafkaError

if TYPE_CHECKING:
    from chronik.node.broker import Broker


class _NothingToDo(Exception):
    """The plan has no command."""


async def carry_out(broker: Broker, wait: timedelta, make_plan: Callable[[ClusterImage], Plan]) -> Plan:
    """Proposes what the plan says, and returns it for its outcomes; REQUEST_TIMED_OUT where that takes too long."""
    wait_ms = min(max(wait / timedelta(milliseconds=1), WAIT_MS_MIN), WAIT_MS_MAX)
    try:
        async with asyncio.timeout(wait_ms / 1000):
            return await propose_plan(broker.metadata, make_plan)
    except TimeoutError:
        raise KafkaError(
            ErrorCode.request_timed_out, f"Not done within {int(wait_ms)} ms; it may still be done."
        ) from None


async def propose_plan(metadata: MetadataLog, make_plan: Callable[[ClusterImage], Plan]) -> Plan:
    """Proposes the command of the plan for the newest image, unless it has none. Returns the plan."""
    plans: list[Plan] = []

    def command(image: ClusterImage) -> ChangePartitions:
        plan = make_plan(image)
        plans.append(plan)
        if plan.command is None:
            raise _NothingToDo
        return plan.command

    with contextlib.suppress(_NothingToDo):
        await metadata.propose(command)
    return plans[-1]
