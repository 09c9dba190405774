"""Turns an admin request about partitions into one metadata command, planned on the newest image and then proposed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

from chronik.metadata.image import ClusterImage
from chronik.metadata.plans import Plan
from chronik.node.membership.metadata_log import MetadataLog, propose_plan
from chronik.node.serving.deadlines import bounded_wait_s
from chronik.wire.errors import ErrorCode, KafkaError


async def carry_out(metadata: MetadataLog, wait: timedelta, make_plan: Callable[[ClusterImage], Plan]) -> Plan:
    """Propose the plan, and return it with its outcomes. REQUEST_TIMED_OUT if that takes too long."""
    wait_s = bounded_wait_s(wait)
    try:
        async with asyncio.timeout(wait_s):
            return await propose_plan(metadata, make_plan)
    except TimeoutError:
        raise KafkaError(
            ErrorCode.request_timed_out, f"Not done within {int(wait_s * 1000)} ms; it may still be done."
        ) from None
