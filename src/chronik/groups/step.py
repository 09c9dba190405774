"""The handling of one event, and the writes that wait for the log."""

from collections.abc import Sequence
from typing import Any, Protocol

from chronik.groups.actions import Action, Append, Moment, Rebalanced, Record, Reply
from chronik.groups.group import Group
from chronik.groups.settings import GroupSettings
from chronik.wire.errors import ErrorCode


class Write(Protocol):
    """What to do once an append is durable or has failed."""

    group: Group

    def finish(self, error: ErrorCode, step: "Step") -> None:
        """Continue with the result of the append (`ErrorCode.none` if it is durable)."""

    def refuse(self, error: ErrorCode, step: "Step") -> None:
        """The partition was unloaded: answer the request that waits for this write, unless a member holds its token."""


class Writes:
    """The appends whose result is still pending, by token."""

    __slots__ = ("_token", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[int, Write] = {}
        self._token = 0

    def add(self, write: Write) -> int:
        self._token += 1
        self.waiting[self._token] = write
        return self._token


class Step:
    """The handling of one event: its time and the resulting actions, in order."""

    __slots__ = ("_writes", "actions", "at", "settings")

    def __init__(self, at: Moment, settings: GroupSettings, writes: Writes) -> None:
        self.at = at
        self.settings = settings
        self.actions: list[Action] = []
        self._writes = writes

    def reply(self, token: int | None, values: dict[str, Any]) -> None:
        """Answer a request; do nothing if `token` is None."""
        if token is not None:
            self.actions.append(Reply(token, values))

    def append(self, records: Sequence[Record], write: Write) -> None:
        self.actions.append(Append(write.group.partition, tuple(records), self._writes.add(write)))

    def rebalanced(self, group: Group) -> None:
        self.actions.append(Rebalanced(group.group_id, group.generation, len(group.members)))


def group_write_error(error: ErrorCode) -> ErrorCode:
    """Map a failed write of group state to a member's error, after which clients retry."""
    match error:
        case (
            ErrorCode.unknown_topic_or_partition
            | ErrorCode.not_enough_replicas
            | ErrorCode.not_enough_replicas_after_append
        ):
            return ErrorCode.coordinator_not_available
        case ErrorCode.not_leader_or_follower | ErrorCode.kafka_storage_error:
            return ErrorCode.not_coordinator
        case ErrorCode.request_timed_out:
            return ErrorCode.rebalance_in_progress
        case ErrorCode.message_too_large | ErrorCode.record_list_too_large:
            return ErrorCode.unknown_server_error
        case _:
            return error


def offset_write_error(error: ErrorCode) -> ErrorCode:
    """Map a failed write of offsets to the committing client's error."""
    match error:
        case ErrorCode.message_too_large | ErrorCode.record_list_too_large:
            return ErrorCode.invalid_commit_offset_size
        case ErrorCode.request_timed_out:
            return ErrorCode.coordinator_not_available
        case _:
            return group_write_error(error)
