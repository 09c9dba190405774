"""One step of the group state machine: an event with its time goes in, actions come out.

The node passes a `Moment` with each event, carries out the `Action`s in order, and reports each `Append` to
`GroupCoordinator.appended`, in append order for each partition.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from chronik.groups.any_group import AnyGroup
from chronik.groups.offsets import Producer
from chronik.groups.records import Record
from chronik.groups.topics import Assignment, TopicIdPartition
from chronik.wire.errors import ErrorCode

CONSUMER_SESSION_TIMEOUT_MS = "consumer.session.timeout.ms"
CONSUMER_HEARTBEAT_INTERVAL_MS = "consumer.heartbeat.interval.ms"
CONSUMER_ASSIGNMENT_INTERVAL_MS = "consumer.assignment.interval.ms"
SHARE_SESSION_TIMEOUT_MS = "share.session.timeout.ms"
SHARE_HEARTBEAT_INTERVAL_MS = "share.heartbeat.interval.ms"
SHARE_ASSIGNMENT_INTERVAL_MS = "share.assignment.interval.ms"


class MigrationPolicy(StrEnum):
    """Which groups may change their kind while they have members; the values are Kafka's."""

    BIDIRECTIONAL = "bidirectional"
    UPGRADE = "upgrade"
    DOWNGRADE = "downgrade"
    DISABLED = "disabled"

    @property
    def allows_upgrade(self) -> bool:
        return self in (MigrationPolicy.BIDIRECTIONAL, MigrationPolicy.UPGRADE)

    @property
    def allows_downgrade(self) -> bool:
        return self in (MigrationPolicy.BIDIRECTIONAL, MigrationPolicy.DOWNGRADE)


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The coordinator's limits and timeouts, named after Kafka's broker settings.

    `initial_rebalance_delay_ms` is how long the first rebalance of an empty group waits for more members. It is 100 ms,
    not 3 s as in Kafka: a single consumer starts almost at once, and members started together still join together.
    The assignment intervals are 0, not 1 s as in Kafka: a change is assigned at once.
    """

    session_timeout_ms_min: int = 6_000
    session_timeout_ms_max: int = 1_800_000
    initial_rebalance_delay_ms: int = 100
    members_max: int = 10_000
    offset_metadata_bytes_max: int = 4_096
    offsets_retention_ms: int = 7 * 24 * 3_600_000
    consumer_session_timeout_ms: int = 45_000
    consumer_heartbeat_interval_ms: int = 5_000
    consumer_assignment_interval_ms: int = 0
    consumer_members_max: int = 10_000
    assignors: tuple[str, ...] = ("uniform", "range")
    """The assignors of consumer groups; the first is the default."""
    migration: MigrationPolicy = MigrationPolicy.BIDIRECTIONAL
    share_session_timeout_ms: int = 45_000
    share_heartbeat_interval_ms: int = 5_000
    share_assignment_interval_ms: int = 0
    share_members_max: int = 200
    group_configs: Callable[[str], Mapping[str, str]] = lambda group_id: {}
    """Returns the configs that are set on a group, under Kafka's names."""

    def session_timeout_of(self, group_id: str) -> int:
        return self._config(group_id, CONSUMER_SESSION_TIMEOUT_MS, self.consumer_session_timeout_ms)

    def heartbeat_interval_of(self, group_id: str) -> int:
        return self._config(group_id, CONSUMER_HEARTBEAT_INTERVAL_MS, self.consumer_heartbeat_interval_ms)

    def assignment_interval_of(self, group_id: str) -> int:
        return self._config(group_id, CONSUMER_ASSIGNMENT_INTERVAL_MS, self.consumer_assignment_interval_ms)

    def share_session_timeout_of(self, group_id: str) -> int:
        return self._config(group_id, SHARE_SESSION_TIMEOUT_MS, self.share_session_timeout_ms)

    def share_heartbeat_interval_of(self, group_id: str) -> int:
        return self._config(group_id, SHARE_HEARTBEAT_INTERVAL_MS, self.share_heartbeat_interval_ms)

    def share_assignment_interval_of(self, group_id: str) -> int:
        return self._config(group_id, SHARE_ASSIGNMENT_INTERVAL_MS, self.share_assignment_interval_ms)

    def _config(self, group_id: str, name: str, default: int) -> int:
        return int(self.group_configs(group_id).get(name, default))


class Moment(NamedTuple):
    """The time of an event, by both clocks.

    `now_ms` is monotonic and measures timeouts; `wall_ms` is the time in records, which offset retention uses.
    """

    now_ms: int
    wall_ms: int


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the request that came with `token`. Every token is answered exactly once.

    The values use the field names of the newest response version; the API module reduces them to the requested one.
    """

    token: int
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Append:
    """Append the records to this partition of the offsets topic, then report `appended(token, ...)`.

    With a `producer`, they go into a batch of its transaction, unless its marker is in the log from offset
    `verified_from` on: then the report is INVALID_TXN_STATE. The report is REQUEST_TIMED_OUT only if the records are in
    the log, but not known to be committed.
    """

    partition: int
    records: tuple[Record, ...]
    token: int
    producer: Producer | None = None
    verified_from: int = -1


@dataclass(frozen=True, slots=True)
class Rebalanced:
    """A group has a new generation, or a new epoch, with at least one member; for logs and metrics."""

    group_id: str
    generation: int
    member_count: int


@dataclass(frozen=True, slots=True)
class InitializeShares:
    """Have the share coordinators write the state of these partitions, then report `shares_done(token, ...)`.

    The offsets are where the group starts; -1 leaves that to the partition's leader.
    """

    group_id: str
    token: int
    state_epoch: int
    offsets: Mapping[TopicIdPartition, int]


@dataclass(frozen=True, slots=True)
class DeleteShares:
    """Have the share coordinators delete the state of these partitions, then report `shares_done(token, ...)`."""

    group_id: str
    token: int
    partitions: Assignment


Action: TypeAlias = Reply | Append | Rebalanced | InitializeShares | DeleteShares


@dataclass(slots=True)
class Write:
    """A pending append. Subclasses say what follows; this class is for an append that no request waits for."""

    group: AnyGroup

    def finish(self, error: ErrorCode, step: "Step") -> None:
        """Continue with the result of the append (`ErrorCode.none` if it is durable)."""

    def refuse(self, error: ErrorCode, step: "Step") -> None:
        """The partition was unloaded: answer the request that waits for this write, unless a member holds its token."""


@dataclass(slots=True, eq=False)
class Step:
    """The handling of one event: its time and the resulting actions, in order."""

    at: Moment
    settings: GroupSettings
    add_write: Callable[[Write], int]
    """Keeps a pending append, and returns its token."""
    actions: list[Action] = field(default_factory=list)

    def reply(self, token: int | None, values: dict[str, Any]) -> None:
        """Answer a request; do nothing if `token` is None."""
        if token is not None:
            self.actions.append(Reply(token, values))

    def append(
        self, records: Sequence[Record], write: Write, producer: Producer | None = None, verified_from: int = -1
    ) -> None:
        token = self.add_write(write)
        self.actions.append(Append(write.group.partition, tuple(records), token, producer, verified_from))

    def rebalanced(self, group_id: str, generation: int, member_count: int) -> None:
        self.actions.append(Rebalanced(group_id, generation, member_count))


_GROUP_WRITE_ERRORS: Mapping[ErrorCode, ErrorCode] = {
    ErrorCode.unknown_topic_or_partition: ErrorCode.coordinator_not_available,
    ErrorCode.not_enough_replicas: ErrorCode.coordinator_not_available,
    ErrorCode.not_enough_replicas_after_append: ErrorCode.coordinator_not_available,
    ErrorCode.not_leader_or_follower: ErrorCode.not_coordinator,
    ErrorCode.kafka_storage_error: ErrorCode.not_coordinator,
    ErrorCode.request_timed_out: ErrorCode.rebalance_in_progress,
    ErrorCode.message_too_large: ErrorCode.unknown_server_error,
    ErrorCode.record_list_too_large: ErrorCode.unknown_server_error,
}
_OFFSET_WRITE_ERRORS: Mapping[ErrorCode, ErrorCode] = {
    **_GROUP_WRITE_ERRORS,
    ErrorCode.request_timed_out: ErrorCode.coordinator_not_available,
    ErrorCode.message_too_large: ErrorCode.invalid_commit_offset_size,
    ErrorCode.record_list_too_large: ErrorCode.invalid_commit_offset_size,
}


def group_write_error(error: ErrorCode) -> ErrorCode:
    """Map the outcome of a write of group state to a member's error, after which clients retry."""
    return _GROUP_WRITE_ERRORS.get(error, error)


def offset_write_error(error: ErrorCode) -> ErrorCode:
    """Map the outcome of a write of offsets to the committing client's error."""
    return _OFFSET_WRITE_ERRORS.get(error, error)
