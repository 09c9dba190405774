"""What can go wrong between a client and a broker, apart from the broker's own error codes."""

from __future__ import annotations

from chronik.wire.errors import ErrorCode


class ClientError(Exception):
    """The text is one line that a person can act on."""


class Unreachable(ClientError):
    """No connection could be made, so nothing was sent."""


class Refused(Unreachable):
    """The machine is there and says that nobody listens at the address: the broker's process is gone."""


class ConnectionLost(ClientError):
    """The connection ended, or its answer did not come in time: what was sent may or may not have been carried out."""


class RequestTimedOut(ConnectionLost):
    """No answer before the deadline. The connection is closed, since later answers would queue behind the missing."""


class BadAnswer(ClientError):
    """The broker's answer does not parse; asking again would not help."""


class UnsupportedByBroker(ClientError):
    """The broker answers no version of this API that we speak."""


RETRIABLE: frozenset[ErrorCode] = frozenset(
    {
        ErrorCode.corrupt_message,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.leader_not_available,
        ErrorCode.not_leader_or_follower,
        ErrorCode.request_timed_out,
        ErrorCode.network_exception,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.coordinator_not_available,
        ErrorCode.not_coordinator,
        ErrorCode.not_enough_replicas,
        ErrorCode.not_enough_replicas_after_append,
        ErrorCode.not_controller,
        ErrorCode.kafka_storage_error,
        ErrorCode.fenced_leader_epoch,
        ErrorCode.unknown_leader_epoch,
        ErrorCode.offset_not_available,
        ErrorCode.unknown_topic_id,
        ErrorCode.unstable_offset_commit,
    }
)
"""Errors that another try, after looking where the leader is now, may cure."""
