"""Broker liveness: one session for each broker, kept alive by heartbeats.

A session ends when no heartbeat arrives for the session timeout, or at once when the broker's address refuses
connections (its process is gone). A broker serves under a lease that is shorter than its session and starts when it
sent the heartbeat. So when a session times out, the lease has already expired, however late messages arrive. Heartbeats
of a broker whose disk takes no writes do not renew its session: it is fenced once its last lease has surely expired.

Sessions are not in the image. A new controller starts every session with the full timeout, since leases from the
previous controller may still be valid. Time during which the controller itself was stalled does not expire sessions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from uuid import UUID

from chronik.metadata.calls import HeartbeatCall
from chronik.metadata.elections import BrokerStates
from chronik.metadata.image import BrokerImage, ClusterImage

IN_FLIGHT_MS = 250
"""A heartbeat this soon after a refused connection was already in flight; shorter than the heartbeat interval."""


@dataclass(slots=True)
class Session:
    """One process of one broker, as this controller knows it."""

    incarnation: UUID
    heard_ms: int
    was_heard: bool = False
    """Whether this controller has received a heartbeat from it."""
    cannot_write: bool = False
    """Whether its last heartbeat reported that its disk takes no writes."""
    applied_version: int = 0
    leaves_since_ms: int | None = None
    """When it first requested a shutdown."""
    gone_ms: int | None = None
    """When its address first refused connections."""
    is_condemned: bool = False
    """It is about to be fenced and gets no lease: the command may be in flight."""
    trusts_refusals: bool = True
    """False once it sent a heartbeat although its address had refused connections."""
    may_stop: bool = False
    """The controller has allowed it to stop."""
    demotions: list[tuple[int, int]] = field(default_factory=list)
    """(version, time) of the first and the last change that ended a leadership of it and that it has not applied."""

    def demoted(self, version: int, now_ms: int) -> None:
        """Record that `version` ended a leadership of this broker, which the broker may not know yet."""
        if version > self.applied_version and (not self.demotions or self.demotions[-1][0] < version):
            del self.demotions[1:]
            self.demotions.append((version, now_ms))

    def knows_demotions(self, now_ms: int, patience_ms: int) -> bool:
        """Whether it has applied every version that ended one of its leaderships, or still has time to."""
        self._drop_known_demotions()
        return not self.demotions or now_ms - self.demotions[0][1] < patience_ms

    def serves_unaware(self, now_ms: int, lease_ms_max: int) -> bool:
        """Whether it may still serve partitions that it no longer leads. It gets no lease for that after a while."""
        self._drop_known_demotions()
        return bool(self.demotions) and now_ms - self.demotions[-1][1] < lease_ms_max

    def _drop_known_demotions(self) -> None:
        while self.demotions and self.demotions[0][0] <= self.applied_version:
            del self.demotions[0]


class Liveness:
    """The sessions of all registered brokers. Owned by the controller; the caller's time never goes back."""

    def __init__(self, session_timeout_ms: int, stall_ms: int, now_ms: int) -> None:
        self._timeout_ms = session_timeout_ms
        self._stall_ms = stall_ms
        self._ran_ms = now_ms
        self.sessions: dict[int, Session] = {}

    def update(self, image: ClusterImage, now_ms: int) -> None:
        """Update the sessions from the image: registered brokers, and the outcome of pending fencing."""
        stalled_ms = now_ms - self._ran_ms
        self._ran_ms = now_ms
        if stalled_ms > self._stall_ms:
            for session in self.sessions.values():
                session.heard_ms = min(now_ms, session.heard_ms + stalled_ms)
        for broker in image.brokers.values():
            session = self._session(broker, now_ms)
            if session.is_condemned and (broker.is_fenced or not self._is_over(session, now_ms)):
                # Fenced as decided, or the command was refused and the broker is back.
                session.is_condemned = False
        for broker_id in [known for known in self.sessions if known not in image.brokers]:
            del self.sessions[broker_id]

    def _session(self, broker: BrokerImage, now_ms: int) -> Session:
        """Return the session of the registered process, which starts now if it is new."""
        session = self.sessions.get(broker.id)
        if session is None or session.incarnation != broker.incarnation:
            session = self.sessions[broker.id] = Session(broker.incarnation, now_ms)
        return session

    def heard(self, broker: BrokerImage, call: HeartbeatCall, now_ms: int) -> Session:
        session = self._session(broker, now_ms)
        if session.gone_ms is not None:
            if now_ms - session.gone_ms < IN_FLIGHT_MS:
                return session
            session.gone_ms = None
            session.trusts_refusals = False
        session.cannot_write = call.cannot_write
        if not call.cannot_write:
            session.heard_ms = now_ms
        session.was_heard = True
        session.applied_version = max(session.applied_version, call.applied_version)
        if call.wants_shutdown and session.leaves_since_ms is None:
            session.leaves_since_ms = now_ms
        return session

    def refused(self, broker_id: int, now_ms: int) -> None:
        """Record that the broker's address refuses connections."""
        session = self.sessions.get(broker_id)
        if session is not None and session.trusts_refusals and session.gone_ms is None:
            session.gone_ms = now_ms

    def is_alive(self, broker_id: int, now_ms: int) -> bool:
        session = self.sessions.get(broker_id)
        return session is not None and not self._is_over(session, now_ms)

    def expired(self, image: ClusterImage, now_ms: int) -> list[BrokerImage]:
        """Return the unfenced brokers whose session has ended, by id. They get no lease from now on."""
        expired = []
        for broker in image.live_brokers():
            session = self.sessions.get(broker.id)
            if session is not None and (session.is_condemned or self._is_over(session, now_ms)):
                session.is_condemned = True
                expired.append(broker)
        return expired

    def returned(self, image: ClusterImage, now_ms: int) -> list[BrokerImage]:
        """Return the fenced brokers that are alive and know that they are fenced, by id: they can be unfenced."""
        returned = []
        for broker_id, broker in sorted(image.brokers.items()):
            session = self.sessions.get(broker_id)
            if (
                broker.is_fenced
                and session is not None
                and session.was_heard
                and session.leaves_since_ms is None
                and not session.cannot_write
                and session.applied_version >= broker.status_version
                and not self._is_over(session, now_ms)
            ):
                returned.append(broker)
        return returned

    def states(
        self, image: ClusterImage, now_ms: int, *, unfenced: Collection[int] = (), leaving: Collection[int] = ()
    ) -> BrokerStates:
        """Return what each broker may do now, as if the image already listed `unfenced` and `leaving` brokers.

        A broker that requests a shutdown gets no new partitions, and keeps those it has until it is `leaving`.
        """
        serving, staying, can_lead, unaware = [], [], [], []
        for broker in image.brokers.values():
            session = self.sessions.get(broker.id)
            is_fenced = broker.is_fenced and broker.id not in unfenced
            if is_fenced or session is None or session.is_condemned or self._is_over(session, now_ms):
                continue
            serving.append(broker.id)
            # It may get leases for one session without knowing of the change; the last lease lasts for another session.
            if session.serves_unaware(now_ms, 2 * self._timeout_ms):
                unaware.append(broker.id)
            if broker.is_shutting_down or broker.id in leaving:
                continue
            staying.append(broker.id)
            if session.was_heard and session.leaves_since_ms is None and not session.cannot_write:
                can_lead.append(broker.id)
        return BrokerStates(frozenset(serving), frozenset(staying), frozenset(can_lead), frozenset(unaware))

    def _is_over(self, session: Session, now_ms: int) -> bool:
        return session.gone_ms is not None or session.may_stop or now_ms - session.heard_ms >= self._timeout_ms
