"""What replication needs from its node: connections to other nodes, calls to the controller, and the lease."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias
from uuid import UUID

from chronik.client.connection import Connection
from chronik.client.errors import Unreachable
from chronik.metadata.calls import ReplicaReport, ReportedResult
from chronik.wire.errors import ErrorCode, KafkaError

IsrMembers: TypeAlias = tuple[tuple[int, int], ...]
"""Broker ids with their broker epochs, -1 if unknown."""

ProposeIsr: TypeAlias = Callable[[UUID, int, int, int, IsrMembers, int], Awaitable[object]]
"""(topic id, partition, leader epoch, partition epoch, members, hand over to).

The last is -1 if this node continues to lead. Returns when the controller has committed the proposal. Raises KafkaError
if it has not, or if the outcome is unknown: the proposal may still be committed.
"""


@dataclass(frozen=True, slots=True)
class ClusterLinks:
    """Supplied by the broker. `connect` opens a connection for replication only, since its requests may take long."""

    connect: Callable[[int], Awaitable[Connection]]
    propose_isr: ProposeIsr
    report_replicas: Callable[[tuple[ReplicaReport, ...], bool], Awaitable[ReportedResult]]
    lease_is_valid: Callable[[], bool]


async def _nobody(node_id: int) -> Connection:
    raise Unreachable(f"node {node_id} is not known: this node is alone")


async def _no_controller(*proposal: object) -> None:
    raise KafkaError(ErrorCode.operation_not_attempted, "this node is alone")


def _always() -> bool:
    return True


async def _keep_all(reports: tuple[ReplicaReport, ...], waits_for_image: bool) -> ReportedResult:
    return ReportedResult(("this node is alone",) * len(reports))


ALONE = ClusterLinks(_nobody, _no_controller, _keep_all, _always)
"""For a node without peers: its lease is always valid."""
