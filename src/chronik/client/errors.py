"""Errors between a client and a broker, apart from the broker's own error codes."""

from __future__ import annotations

from typing import Any

from chronik.wire.errors import ErrorCode, KafkaError


class ClientError(Exception):
    """The message is one line that a person can act on."""


class Unreachable(ClientError):
    """No connection could be made, so nothing was sent."""


class Refused(Unreachable):
    """The machine is up and refuses the connection: the broker's process is gone."""


class TlsFailed(Unreachable):
    """The TLS handshake failed: one side refuses the other's certificate, or does not speak TLS."""


class ConnectionLost(ClientError):
    """The connection ended or timed out: the broker may or may not have carried out the request."""


class RequestTimedOut(ConnectionLost):
    """No response in time. The connection is closed, since later responses would arrive after the missing one."""


class LostAtFirstRequest(ConnectionLost):
    """The broker closed the connection at the first request, or after ApiVersions: it may require TLS or SASL."""


class BadResponse(ClientError):
    """The broker's response cannot be parsed; a retry would not help."""


class UnsupportedByBroker(ClientError):
    """The broker supports no version of this API that this client supports."""


class SecurityError(ClientError):
    """The client and the broker do not agree on security. A retry would not help; the message has the way out."""


class AuthenticationFailed(SecurityError):
    """The broker refused the client's identity, or did not prove its own."""


class CertificateRejected(SecurityError):
    """A certificate is not trusted, or is for another host."""


class CertificateExpired(CertificateRejected):
    """A certificate is not valid any more, or not yet."""


class WrongListener(SecurityError):
    """The listener at this address speaks another security protocol than the client."""


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
        ErrorCode.concurrent_transactions,
    }
)
"""Errors that a retry with fresh metadata may resolve."""


AUTHORIZATION_ERRORS: frozenset[ErrorCode] = frozenset(
    {
        ErrorCode.topic_authorization_failed,
        ErrorCode.group_authorization_failed,
        ErrorCode.cluster_authorization_failed,
        ErrorCode.transactional_id_authorization_failed,
        ErrorCode.delegation_token_authorization_failed,
    }
)


def raise_for(result: Any, subject: str) -> None:
    """Raise KafkaError if a response, or one result in it, has an error; `subject` says what it is about."""
    code = getattr(result, "error_code", ErrorCode.none)
    if code != ErrorCode.none:
        message = getattr(result, "error_message", None)
        raise KafkaError(code, f"{subject}: {message}" if message else subject)
