"""Requests from brokers to the controller about themselves and the partitions they lead, and the replies.

Tagged structs, encoded as msgpack maps: readers ignore unknown fields, so a field may be added with a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

import msgspec

from chronik.metadata.image import NO_LEADER

UNKNOWN_EPOCH = -1


class RegisterBrokerCall(msgspec.Struct, frozen=True, tag="register_broker"):
    """Register a broker's process.

    `was_clean`: the previous process on this data folder stopped cleanly. `previous_epoch` proves it: the broker epoch
    that the clean stop recorded, or UNKNOWN_EPOCH if it had none. So a process that recovered a damaged log and stopped
    before it registered does not pass as clean, nor does one on a folder restored from a copy. None: the broker does
    not record it.

    `previous_incarnations`: the processes that may have been registered last on this data folder. If the controller
    knows another one, the folder is an old copy or a new one. None: the broker does not record them.
    """

    broker_id: int
    incarnation: UUID
    host: str
    port: int
    internal: str = ""
    rack: str | None = None
    was_clean: bool = True
    durability: str = "synced"
    previous_epoch: int | None = None
    folder_id: UUID | None = None
    http: str = ""
    previous_incarnations: tuple[UUID, ...] | None = None
    listeners: Mapping[str, tuple[str, int]] = {}


class HeartbeatCall(msgspec.Struct, frozen=True, tag="heartbeat"):
    """`applied_version`: the broker has applied the image up to this version. `wants_shutdown`: it waits to stop.

    `cannot_write`: its disk has not taken a write for longer than `disk_timeout_ms`.
    """

    broker_id: int
    incarnation: UUID
    broker_epoch: int
    applied_version: int
    wants_shutdown: bool = False
    cannot_write: bool = False


class HandOver(msgspec.Struct, frozen=True, array_like=True):
    """A partition that its leader should transfer to `to`: it stops appending, waits until `to` has every record, then
    proposes it by an AlterIsrCall with `hand_over_to`. So no record is lost that only the leader acknowledged."""

    topic_id: UUID
    partition: int
    leader_epoch: int
    to: int


class HeartbeatResult(msgspec.Struct, frozen=True, tag="heartbeat"):
    """`lease_ms` starts when the broker sent the heartbeat; 0 grants no lease and revokes none."""

    lease_ms: int
    is_fenced: bool
    should_shut_down: bool
    hand_overs: tuple[HandOver, ...] = ()


class ReplicaReport(msgspec.Struct, frozen=True, array_like=True):
    """One replica of the reporting broker: how far its log goes, and what it has lost.

    `loss` is a value of `elections.Loss`, empty if no loss is known; `reason` is for people. If `leader_epoch` is set,
    the leader of that epoch lost the records, not the reporting broker: it lacks records that the reporting broker
    knows to be committed.
    """

    topic_id: UUID
    partition: int
    log_end_offset: int
    last_epoch: int
    loss: str = ""
    reason: str = ""
    leader_epoch: int = UNKNOWN_EPOCH


class ReportReplicasCall(msgspec.Struct, frozen=True, tag="report_replicas"):
    """A broker reports replicas that lost records, or the end offsets of logs that decide an election."""

    broker_id: int
    broker_epoch: int
    reports: tuple[ReplicaReport, ...]


class ReportedResult(msgspec.Struct, frozen=True, tag="reported"):
    """For each report, in order, why the reported replica stays in sync or eligible; empty if it does not."""

    refusals: tuple[str, ...]


class IsrMember(msgspec.Struct, frozen=True):
    """`broker_epoch` is that of the fetches that showed the member in sync; only a member that stays may omit it."""

    broker_id: int
    broker_epoch: int = UNKNOWN_EPOCH


class AlterIsrCall(msgspec.Struct, frozen=True, tag="alter_isr"):
    """A leader proposes a new ISR for one partition, as of the epochs it knows; `broker_epoch` is its own.

    `hand_over_to`: it transfers leadership to that member, which has everything that the leader acknowledged. Only then
    may the leader leave the ISR.
    """

    broker_id: int
    topic_id: UUID
    partition: int
    leader_epoch: int
    partition_epoch: int
    new_isr: tuple[IsrMember, ...]
    broker_epoch: int = UNKNOWN_EPOCH
    hand_over_to: int = NO_LEADER
