"""Reports to the controller about this node's replicas: lost records and log end offsets.

A replica that lost records takes no role until the controller has committed that it is neither in sync nor eligible to
lead. Until then the proof of the loss stays on disk, so that the loss is found again after a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias
from uuid import UUID

import msgspec

from chronik.metadata.calls import ReplicaReport, ReportedResult
from chronik.metadata.elections import Loss
from chronik.metadata.image import NO_LEADER
from chronik.node.replicas.partition import Partition
from chronik.node.runtime import Runtime
from chronik.wire.errors import ErrorCode, KafkaError

REPORT_INTERVAL_S = 1.0
REPORTS_PER_CALL_MAX = 1_000
WAITING_LOGGED_S = 5.0

Report: TypeAlias = Callable[[tuple[ReplicaReport, ...], bool], Awaitable[ReportedResult]]
"""Returns when the controller has committed the changes that follow from the reports; KafkaError if it has not.

The flag: also wait until this node's image has them. A node with a failed disk would wait for that forever.
"""
OnReported: TypeAlias = Callable[[ReplicaReport, str], None]
"""Called when the controller knows of a loss. The text says why the replica stays in sync, or is empty."""


@dataclass(eq=False)
class ReplicaReports:
    """Owned by the loop. Call `flush` before the node's first heartbeat, `start` after it."""

    _runtime: Runtime
    _partitions: Mapping[tuple[str, int], Partition]
    _report: Report
    _on_reported: OnReported
    _pending: dict[tuple[UUID, int], ReplicaReport] = field(default_factory=dict)
    _urgent: dict[tuple[UUID, int], ReplicaReport] = field(default_factory=dict)
    """Reports for open logs: nothing on this node waits for the outcome."""
    _added: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._loop = self._runtime.loop
        self._log = self._runtime.log.bind(component="storage")

    def start(self) -> None:
        self._task = self._loop.create_task(self._run(), name="replica-reports")

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def add(self, report: ReplicaReport) -> None:
        """Send the report with the next call to the controller; `on_reported` is called afterwards."""
        self._pending[report.topic_id, report.partition] = report
        self._added.set()

    def _add_urgent(self, report: ReplicaReport) -> None:
        self._urgent[report.topic_id, report.partition] = report
        self._added.set()

    def may_have_lost(self, partition: Partition, reason: str) -> None:
        if len(partition.replicas) > 1:
            # The report of a sole replica changes nothing.
            partition.resign()
        self._add_urgent(report_of(partition, Loss.POSSIBLE, reason))

    def leader_lacks(self, partition: Partition, reason: str) -> None:
        report = report_of(partition, Loss.CERTAIN, reason)
        self._add_urgent(msgspec.structs.replace(report, leader_epoch=partition.leader_epoch))

    def forget(self, topic_id: UUID, index: int) -> None:
        self._pending.pop((topic_id, index), None)
        self._urgent.pop((topic_id, index), None)

    async def spoiled(self, partition: Partition, reason: str) -> None:
        """Report damage in an open log, and wait until this node's replica is neither in sync nor eligible to lead.

        By then a new leader epoch has begun, so the positions from the replica's earlier fetches are void.
        KafkaError if the replica stays because no other replica could lead, or if the controller did not respond.
        """
        partition.resign()
        (refusal,) = (await self._report((report_of(partition, Loss.SPOILED, reason),), False)).refusals
        if refusal:
            partition.report_refused()
            raise KafkaError(ErrorCode.eligible_leaders_not_available, refusal)

    async def flush(self) -> None:
        """Wait without a limit until the controller knows every loss found so far."""
        logged_s = self._loop.time()
        while self._pending:
            try:
                await self._send_losses()
            except KafkaError as error:
                if self._loop.time() - logged_s >= WAITING_LOGGED_S:
                    logged_s = self._loop.time()
                    self._log.warning("waiting_to_report_losses", replicas=len(self._pending), reason=error.message)
                await asyncio.sleep(0.1)

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_INTERVAL_S):
                    await self._added.wait()
            self._added.clear()
            try:
                await self._send_urgent()
                await self._send_losses()
                await self._send_lengths()
            except KafkaError as error:
                self._log.info("replicas_not_reported", reason=error.message)
            except Exception:
                self._log.exception("replicas_not_reported")

    async def _send_urgent(self) -> None:
        while self._urgent:
            reports = tuple(self._urgent.values())[:REPORTS_PER_CALL_MAX]
            await self._report(reports, False)
            for report in reports:
                key = report.topic_id, report.partition
                if self._urgent.get(key) is report:
                    del self._urgent[key]
                self._log.warning("loss_reported", partition=report.partition, reason=report.reason)

    async def _send_losses(self) -> None:
        while self._pending:
            reports = tuple(self._pending.values())[:REPORTS_PER_CALL_MAX]
            result = await self._report(reports, True)
            for report, refusal in zip(reports, result.refusals, strict=True):
                key = report.topic_id, report.partition
                if self._pending.get(key) is report:
                    del self._pending[key]
                    self._on_reported(report, refusal)

    async def _send_lengths(self) -> None:
        """Report log ends of leaderless partitions: if only unproven replicas are left, the longest log is elected."""
        reports = [
            report_of(partition)
            for partition in self._partitions.values()
            if (image := partition.image) is not None
            and image.leader == NO_LEADER
            and self._runtime.node_id in image.unproven
        ]
        for at in range(0, len(reports), REPORTS_PER_CALL_MAX):
            await self._report(tuple(reports[at : at + REPORTS_PER_CALL_MAX]), False)


def report_of(partition: Partition, loss: Loss | None = None, reason: str = "") -> ReplicaReport:
    lost = "" if loss is None else loss.value
    return ReplicaReport(
        partition.topic_id, partition.index, partition.log_end_offset, partition.last_epoch, lost, reason
    )
