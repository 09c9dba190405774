"""Bugs to plant into clusters on bad disks: the findings of a review, each reintroduced with the smallest patch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.sim.planted import Planted

from chronik.groups.coordinator import GroupCoordinator
from chronik.metadata.elections import Loss
from chronik.node.coordinators.group_service import GroupService
from chronik.node.membership import metadata_mark
from chronik.node.membership.broker_session import BrokerSession
from chronik.node.membership.cluster_member import ClusterMember
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.raft_service import RaftService
from chronik.node.replicas.healing import Healing
from chronik.node.replicas.partition_host import PartitionHost
from chronik.storage import recovery
from chronik.storage.folder import DataFolder
from chronik.storage.log import Log
from chronik.testing.sim.aimed_scenarios import OldStores
from chronik.testing.sim.cluster_scenarios import BadDisks, ThreeNodes
from chronik.wire.errors import ErrorCode, KafkaError


@contextmanager
def empty_or_short_replica_leads() -> Iterator[None]:
    """A missing log starts empty and a truncated log continues at its end: both replicas stay in sync and may lead."""
    loss_of = PartitionHost._loss_of

    def loss_of_damage(host: PartitionHost, log: Log, *args: Any) -> tuple[Loss | None, str]:
        is_short = log.recovery is not None and log.recovery.ends_below_recovery_point
        return (None, "") if is_short else loss_of(host, log, *args)

    def never(*_: Any) -> bool:
        return False

    with patch.object(PartitionHost, "_loss_of", loss_of_damage), patch.object(DataFolder, "is_lost", never):
        yield


@contextmanager
def damaged_replica_is_kept() -> Iterator[None]:
    """A damaged log is neither reported nor healed: the replica is elected although it cannot lead."""
    loss_of = PartitionHost._loss_of

    def loss_but_damage(host: PartitionHost, log: Log, *args: Any) -> tuple[Loss | None, str]:
        loss, reason = loss_of(host, log, *args)
        return (None, "") if log.recovery is not None and log.recovery.damages else (loss, reason)

    def ignore(*_: Any) -> None:
        return

    with patch.object(PartitionHost, "_loss_of", loss_but_damage), patch.object(Healing, "found", ignore):
        yield


@contextmanager
def sick_disk_keeps_its_offices() -> Iterator[None]:
    """A node whose disk fails or hangs stays controller and leader; a controller rejects what it cannot write."""
    init, write_failed, submit = BrokerSession.__init__, MetadataLog.write_failed, MetadataLog.submit

    def ignore(*_: Any) -> None:
        return

    def init_blind(session: BrokerSession, *args: Any, **kwargs: Any) -> None:
        init(session, *args, **kwargs)
        session._cannot_write = lambda: False

    def refuse_all(metadata: MetadataLog, error: Exception) -> None:
        write_failed(metadata, error)
        metadata._fail_waiting(_not_written(error))

    def submit_if_written(metadata: MetadataLog, *args: Any) -> Any:
        if metadata._raft.write_error is not None:
            raise _not_written(metadata._raft.write_error)
        return submit(metadata, *args)

    with (
        patch.object(RaftService, "_storage_changed", ignore),
        patch.object(BrokerSession, "__init__", init_blind),
        patch.object(MetadataLog, "write_failed", refuse_all),
        patch.object(MetadataLog, "submit", submit_if_written),
    ):
        yield


def _not_written(error: Exception) -> KafkaError:
    return KafkaError(ErrorCode.kafka_storage_error, f"metadata cannot be written: {error}")


def coordinator_answers_without_lease() -> AbstractContextManager[Any]:
    """A coordinator that is cut off from the other nodes keeps answering its groups."""

    def at_once(groups: GroupService, group_id: str) -> GroupCoordinator:
        return groups._coordinator

    return patch.object(GroupService, "_authority", at_once)


@contextmanager
def cluster_is_founded_beside_logs() -> Iterator[None]:
    """Nodes that all lost their Raft stores form a new cluster, which knows none of their logs and deletes them."""

    def never(*_: Any) -> bool:
        return False

    def delete(folder: DataFolder, topic: str, partition: int, now_ms: int) -> str:
        folder.disk.rmtree(folder.log_path(topic, partition))
        return ""

    with (
        patch.object(ClusterMember, "_is_metadata_lost", never),
        patch.object(DataFolder, "set_aside_log", delete),
    ):
        yield


def synced_end_is_not_read() -> AbstractContextManager[Any]:
    """A log that lost batches of the last seconds looks as if a crash had torn it, and may lead."""

    def nothing(*_: Any) -> int:
        return 0

    return patch.object(recovery, "read_synced_end", nothing)


def metadata_mark_is_not_read() -> AbstractContextManager[Any]:
    """A node votes with a Raft store that lost its last writes."""

    def nothing(*_: Any) -> None:
        return None

    return patch.object(metadata_mark, "read_numbers", nothing)


class Found(NamedTuple):
    """A seed that finds a bug, at least until the nodes' code changes."""

    scenario: str
    seed: int


PLANTED_ON_BAD_DISKS: dict[Planted, Found] = {
    empty_or_short_replica_leads: Found(BadDisks.name, 12),
    sick_disk_keeps_its_offices: Found(BadDisks.name, 15),
    damaged_replica_is_kept: Found(BadDisks.name, 1),
    coordinator_answers_without_lease: Found(ThreeNodes.name, 28),
    cluster_is_founded_beside_logs: Found(BadDisks.name, 14),
    synced_end_is_not_read: Found(BadDisks.name, 256),
    metadata_mark_is_not_read: Found(OldStores.name, 3),
}
"""Hits are far apart, so each test runs few seeds. docs/simulator.md lists how often each bug is found."""
