"""Share sessions (KIP-932): the partitions that each member of a share group reads from this node.

A session belongs to a connection and ends with it: then everything that the member has acquired is released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from uuid import UUID

from chronik.node.serving.connection import Connection
from chronik.wire.errors import ErrorCode, KafkaError

INITIAL_EPOCH = 0
FINAL_EPOCH = -1
EPOCH_MAX = 0x7FFFFFFF
PARTITIONS_MAX = 200_000
"""The limit for all sessions together."""

PartitionId = tuple[UUID, int]


@dataclass(slots=True, eq=False)
class ShareSession:
    """One member's partitions, in the order in which they are served next."""

    group_id: str
    member_id: str
    principal: str
    connection: Connection
    epoch: int = 1
    """The epoch of the next request."""
    partitions: dict[PartitionId, None] = field(default_factory=dict)
    is_closed: bool = False

    def served(self, partition: PartitionId) -> None:
        """Move a partition that had records to the end, so that it does not starve the others."""
        if partition in self.partitions:
            del self.partitions[partition]
            self.partitions[partition] = None


class ShareSessions:
    """All sessions of a node. Owned by the loop.

    `opened` and `closed` are called for each partition that a session begins or ceases to read.
    """

    def __init__(
        self,
        sessions_max: int,
        opened: Callable[[ShareSession, PartitionId], None],
        closed: Callable[[ShareSession, PartitionId], None],
    ) -> None:
        self._sessions_max = sessions_max
        self._opened = opened
        self._closed = closed
        self._sessions: dict[tuple[str, str], ShareSession] = {}
        self._partitions = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, group_id: str, member_id: str, principal: str, connection: Connection) -> ShareSession:
        """Begin a session. An earlier one of the member ends."""
        old = self._sessions.get((group_id, member_id))
        if old is not None:
            if old.principal != principal:
                raise KafkaError(ErrorCode.invalid_share_session_epoch, "the session belongs to another principal")
            self.close(old)
        if len(self._sessions) >= self._sessions_max:
            raise KafkaError(ErrorCode.share_session_limit_reached, f"at most {self._sessions_max} share sessions")
        session = ShareSession(group_id, member_id, principal, connection)
        self._sessions[(group_id, member_id)] = session
        connection.when_closed(session, lambda: self.close(session))
        return session

    def require(
        self, group_id: str, member_id: str, principal: str, epoch: int, connection: Connection
    ) -> ShareSession:
        """Return the member's session for its next request; the final epoch does not end it yet."""
        session = self._sessions.get((group_id, member_id))
        if session is None or session.principal != principal:
            raise KafkaError(ErrorCode.share_session_not_found, f"member {member_id!r} has no share session here")
        if epoch == FINAL_EPOCH:
            return session
        if epoch != session.epoch:
            raise KafkaError(ErrorCode.invalid_share_session_epoch, f"epoch {epoch}, expected {session.epoch}")
        session.epoch = 1 if epoch == EPOCH_MAX else epoch + 1
        if connection is not session.connection:
            session.connection.forget(session)
            session.connection = connection
            connection.when_closed(session, lambda: self.close(session))
        return session

    def add(self, session: ShareSession, partitions: Iterable[PartitionId]) -> None:
        for partition in partitions:
            if partition in session.partitions or session.is_closed:
                continue
            if self._partitions >= PARTITIONS_MAX:
                self.close(session)
                raise KafkaError(ErrorCode.share_session_not_found, "too many partitions in share sessions")
            session.partitions[partition] = None
            self._partitions += 1
            self._opened(session, partition)

    def remove(self, session: ShareSession, partitions: Iterable[PartitionId]) -> None:
        for partition in partitions:
            if partition in session.partitions:
                del session.partitions[partition]
                self._partitions -= 1
                self._closed(session, partition)

    def close(self, session: ShareSession) -> None:
        if session.is_closed:
            return
        session.connection.forget(session)
        self.remove(session, list(session.partitions))
        session.is_closed = True
        del self._sessions[(session.group_id, session.member_id)]

    def close_all(self) -> None:
        for session in list(self._sessions.values()):
            self.close(session)
