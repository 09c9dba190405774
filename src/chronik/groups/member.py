"""A member of a classic group, and the JoinGroup that made or refreshed it."""

from dataclasses import dataclass
from typing import TypeAlias

Protocols: TypeAlias = tuple[tuple[str, bytes], ...]
"""The assignors a member knows, the preferred first, each with the metadata for it."""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A JoinGroup request, whatever its version."""

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
    """From version 4 a dynamic member is first given its id, so that lost answers leave no ghost members."""
    can_skip_assignment: bool
    """From version 9 a leader can be told that the assignment stands."""


@dataclass(frozen=True, slots=True)
class SyncRequest:
    """A SyncGroup request, whatever its version."""

    group_id: str
    generation: int
    member_id: str
    instance_id: str | None
    protocol_type: str | None
    protocol_name: str | None
    assignments: dict[str, bytes]


@dataclass(slots=True)
class Member:
    """One member. Owned by its group, which counts `join_token`s: change them there only.

    `join_token` and `sync_token` are the requests of this member that wait for an answer. `deadline_ms` is when it is
    given up unless it is heard of; it does not count while a request of it waits here, except for a member that has
    never had an answer (`is_new`).
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

    def heard_of(self, now_ms: int) -> None:
        self.deadline_ms = now_ms + self.session_timeout_ms

    @property
    def may_expire(self) -> bool:
        return self.is_new or (self.join_token is None and self.sync_token is None)

    def vote(self, candidates: set[str]) -> str | None:
        """The one of the candidates that this member prefers."""
        return next((name for name, _ in self.protocols if name in candidates), None)
