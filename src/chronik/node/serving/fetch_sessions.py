"""Fetch sessions (KIP-227): a client names its partitions once, and afterwards only the changes.

A session is (id, epoch). Epoch 0 requests a new session, -1 requests none; each further fetch carries the next epoch. A
broker may answer with session id 0 at any time, which means "no session". This broker does so while its cache is full
of sessions in use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from uuid import UUID

from chronik.authorization.acls import ANONYMOUS
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.fetch import FetchPartition, FetchPartitionResponse, FetchRequest

SESSION_IDLE_S = 120.0
PARTITIONS_MAX = 200_000
"""The limit for all sessions together."""
NO_SESSION = 0
INITIAL_EPOCH = 0
FINAL_EPOCH = -1
EPOCH_MAX = 0x7FFFFFFF

TopicKey = tuple[str | None, bytes | None]
PartitionKey = tuple[TopicKey, int]


def topic_key(name: str | None, topic_id: UUID | None) -> TopicKey:
    """Return what identifies a topic in a fetch. The id is in bytes, because a UUID's hash is Python code."""
    return name, None if topic_id is None else topic_id.bytes


@dataclass(slots=True)
class SessionPartition:
    """What the client requests of one partition, and the offsets last sent to it."""

    requested: FetchPartition
    high_watermark: int = -1
    log_start_offset: int = -1

    def news(self, response: FetchPartitionResponse) -> bool:
        """Return whether the client needs this response, and remember its offsets as sent."""
        changed = (
            bool(len(response.records))
            or response.error_code != 0
            or response.high_watermark != self.high_watermark
            or response.log_start_offset != self.log_start_offset
            or response.diverging_epoch is not None
            or response.preferred_read_replica >= 0
        )
        if response.error_code:
            # Sent again until the error is over, because an error has no watermark to compare.
            self.high_watermark = self.log_start_offset = -1
        else:
            self.high_watermark = response.high_watermark
            self.log_start_offset = response.log_start_offset
        return changed


@dataclass(slots=True)
class FetchSession:
    """One client's partitions, in the order in which they are served next."""

    id: int
    epoch: int
    used_s: float
    principal: str
    """Only this principal may continue the session: its partitions tell which topics exist."""
    partitions: dict[PartitionKey, SessionPartition] = field(default_factory=dict)

    def served(self, key: PartitionKey) -> None:
        """Move a partition that had data to the end, so that it does not starve the others."""
        self.partitions[key] = self.partitions.pop(key)


class FetchSessions:
    """All sessions of one node, least recently used first. Owned by the loop."""

    def __init__(self, random: Random, sessions_max: int) -> None:
        self._random = random
        self._sessions_max = sessions_max
        self._sessions: dict[int, FetchSession] = {}
        self._partitions = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def resolve(
        self, fetch: FetchRequest, now_s: float, principal: str = ANONYMOUS
    ) -> tuple[FetchSession | None, bool]:
        """Return the fetch's session, updated by the request, and whether it is incremental (only changes are sent)."""
        if fetch.session_epoch in (INITIAL_EPOCH, FINAL_EPOCH):
            self.forget(fetch.session_id, principal)
            if fetch.session_epoch == FINAL_EPOCH or not fetch.topics:
                return None, False
            return self._created(fetch, now_s, principal), False
        session = self._sessions.get(fetch.session_id)
        if session is None or session.principal != principal:
            raise KafkaError(ErrorCode.fetch_session_id_not_found, f"session {fetch.session_id} is not known")
        if session.epoch != fetch.session_epoch:
            raise KafkaError(
                ErrorCode.invalid_fetch_session_epoch, f"epoch {fetch.session_epoch}, expected {session.epoch}"
            )
        session.epoch = 1 if session.epoch == EPOCH_MAX else session.epoch + 1
        session.used_s = now_s
        self._sessions[session.id] = self._sessions.pop(session.id)
        for name, topic_id, indexes in fetch.forgotten:
            for index in indexes:
                key = (topic_key(name, topic_id), index)
                if session.partitions.pop(key, None) is not None:
                    self._partitions -= 1
        if not self._update(session, fetch):
            self.forget(session.id, principal)
            raise KafkaError(ErrorCode.fetch_session_id_not_found, "too many partitions for sessions")
        return session, True

    def forget(self, session_id: int, principal: str) -> None:
        session = self._sessions.get(session_id)
        if session is not None and session.principal == principal:
            del self._sessions[session_id]
            self._partitions -= len(session.partitions)

    def _created(self, fetch: FetchRequest, now_s: float, principal: str) -> FetchSession | None:
        if len(self._sessions) >= self._sessions_max:
            oldest = next(iter(self._sessions.values()))
            if now_s - oldest.used_s < SESSION_IDLE_S:
                return None
            self.forget(oldest.id, oldest.principal)
        session_id = NO_SESSION
        while session_id == NO_SESSION or session_id in self._sessions:
            session_id = self._random.getrandbits(31)
        session = self._sessions[session_id] = FetchSession(session_id, 1, now_s, principal)
        if not self._update(session, fetch):
            self.forget(session_id, principal)
            return None
        return session

    def _update(self, session: FetchSession, fetch: FetchRequest) -> bool:
        """Add or update the requested partitions; return False if there is no room for all of them."""
        for topic in fetch.topics:
            of_topic = topic_key(topic.name, topic.topic_id)
            for requested in topic.partitions:
                known = session.partitions.get((of_topic, requested.partition))
                if known is not None:
                    known.requested = requested
                    continue
                if self._partitions >= PARTITIONS_MAX:
                    return False
                session.partitions[(of_topic, requested.partition)] = SessionPartition(requested)
                self._partitions += 1
        return True
