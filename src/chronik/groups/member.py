"""A member of a classic group, and its JoinGroup and SyncGroup requests."""

from dataclasses import dataclass
from typing import TypeAlias

Protocols: TypeAlias = tuple[tuple[str, bytes], ...]
"""The assignors that a member supports, in order of preference, each with its metadata."""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A JoinGroup request, in any version."""

    group_id: str
    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: Protocols
    member_id_required: bool
    """From version 4, a dynamic member first receives its id, so that lost responses leave no ghost members."""
    can_skip_assignment: bool
    """From version 9, a leader can be notified that the assignment is still valid."""


@dataclass(frozen=True, slots=True)
class SyncRequest:
    """A SyncGroup request, in any version."""

    group_id: str
    generation: int
    member_id: str
    instance_id: str | None
    protocol_type: str | None
    protocol_name: str | None
    assignments: dict[str, bytes]


@dataclass(slots=True)
class Member:
    """One member. Owned by its group, which counts `join_token`s: change them only through the group.

    `join_token` and `sync_token` are the member's unanswered requests. The member expires at `deadline_ms` unless it
    sends a request first. The deadline does not apply while one of its requests waits here, except for a member that
    has never had a response (`is_new`).
    """

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: Protocols
    deadline_ms: int
    assignment: bytes = b""
    join_token: int | None = None
    sync_token: int | None = None
    is_new: bool = False

    def metadata_for(self, protocol_name: str | None) -> bytes:
        for name, metadata in self.protocols:
            if name == protocol_name:
                return metadata
        return b""

    def heard_from(self, now_ms: int) -> None:
        self.deadline_ms = now_ms + self.session_timeout_ms

    @property
    def may_expire(self) -> bool:
        return self.is_new or (self.join_token is None and self.sync_token is None)

    def vote(self, candidates: set[str]) -> str | None:
        return next((name for name, _ in self.protocols if name in candidates), None)
