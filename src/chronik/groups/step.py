"""One event on its way through the state machine, and the writes that wait for the log."""

from collections.abc import Sequence
from typing import Any, Protocol

from chronik.groups.actions import Action, Append, Moment, Rebalanced, Record, Reply
from chronik.groups.group import Group
from chronik.groups.settings import GroupSettings
from chronik.wire.errors import ErrorCode


class Write(Protocol):
    """What is to happen once an append is durable, or has failed."""

    group: Group

    def finish(self, error: ErrorCode, step: "Step") -> None:
        """Go on with the log's verdict (`ErrorCode.none` when it is written)."""

    def refuse(self, error: ErrorCode, step: "Step") -> None:
        """The partition is no longer ours: answer what waits for this write, if that is not a member's own token."""


class Writes:
    """The appends that have been asked for and not been reported, by their token."""

    __slots__ = ("_token", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[int, Write] = {}
        self._token = 0

    def add(self, write: Write) -> int:
        self._token += 1
        self.waiting[self._token] = write
        return self._token


class Step:
    """The handling of one event: when it happened, and the actions that it leads to, in order."""

    __slots__ = ("_writes", "actions", "at", "settings")

    def __init__(self, at: Moment, settings: GroupSettings, writes: Writes) -> None:
        self.at = at
        self.settings = settings
        self.actions: list[Action] = []
        self._writes = writes

    def reply(self, token: int | None, values: dict[str, Any]) -> None:
        """Answer a request; None is the absence of one."""
        if token is not None:
            self.actions.append(Reply(token, values))

    def append(self, records: Sequence[Record], write: Write) -> None:
        self.actions.append(Append(write.group.partition, tuple(records), self._writes.add(write)))

    def rebalanced(self, group: Group) -> None:
        self.actions.append(Rebalanced(group.group_id, group.generation, len(group.members)))


def group_write_error(error: ErrorCode) -> ErrorCode:
    """What a member is told when its group's state could not be written: an error after which clients try again."""
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
    """What a committer is told when its offsets could not be written."""
    match error:
        case ErrorCode.message_too_large | ErrorCode.record_list_too_large:
            return ErrorCode.invalid_commit_offset_size
        case ErrorCode.request_timed_out:
            return ErrorCode.coordinator_not_available
        case _:
            return group_write_error(error)
