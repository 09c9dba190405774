"""Which brokers are there: one session for each, kept alive by heartbeats.

A session ends when nothing was heard for the session timeout, or at once when the broker's address refuses connections
(its process is gone). A broker serves by a lease that is shorter than its session and counts from when it sent the
heartbeat; so when a session ends by time, the lease has ended before, whatever the messages' delay. A broker whose disk
does not take writes is heard, but that does not renew its session: it is fenced when its last lease has surely ended.

Nothing of this is in the image: a new controller starts all sessions anew, with the full timeout for everybody, since
leases of the one before may still run. Time in which the controller itself did not run is not held against anyone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from uuid import UUID

from chronik.metadata.calls import HeartbeatCall
from chronik.metadata.elections import BrokerStates
from chronik.metadata.image import BrokerImage, ClusterImage

IN_FLIGHT_MS = 250
"""A heartbeat that comes so soon after its sender was found gone was on its way before; less than their interval."""


@dataclass(slots=True)
class Session:
    """One process of one broker, as this controller has heard of it."""

    incarnation: UUID
    epoch: int
    heard_ms: int
    was_heard: bool = False
    """Whether this controller had a heartbeat of it."""
    cannot_write: bool = False
    """Whether its last heartbeat reported that its disk takes no writes."""
    applied_version: int = 0
    leaves_since_ms: int | None = None
    """When it first asked to shut down."""
    gone_ms: int | None = None
    """When its address was found to refuse connections."""
    is_condemned: bool = False
    """It is to be fenced, so it gets no lease: the command may be on its way."""
    trusts_refusals: bool = True
    """Not after it was heard of although its address had refused connections."""
    may_stop: bool = False
    """It was told that it may shut down."""
    demotions: list[tuple[int, int]] = field(default_factory=list)
    """Versions that took leaderships from it and when they came, as far as it has not applied them: first and last."""

    def demoted(self, version: int, now_ms: int) -> None:
        """`version` ended a leadership of this broker, which it may not know yet."""
        if version > self.applied_version and (not self.demotions or self.demotions[-1][0] < version):
            del self.demotions[1:]
            self.demotions.append((version, now_ms))

    def knows_by(self, now_ms: int, patience_ms: int) -> bool:
        """Whether it has applied every version that ended a leadership of its, or still has time to."""
        self._forget_known()
        return not self.demotions or now_ms - self.demotions[0][1] < patience_ms

    def serves_unaware(self, now_ms: int, lease_ms_max: int) -> bool:
        """Whether it may still serve what it leads no more: it gets no lease for that after a while."""
        self._forget_known()
        return bool(self.demotions) and now_ms - self.demotions[-1][1] < lease_ms_max

    def _forget_known(self) -> None:
        while self.demotions and self.demotions[0][0] <= self.applied_version:
            del self.demotions[0]


class Liveness:
    """The sessions of all registered brokers. Owned by the controller; time is handed in and never goes back."""

    def __init__(self, session_timeout_ms: int, stall_ms: int, now_ms: int) -> None:
        self._timeout_ms = session_timeout_ms
        self._stall_ms = stall_ms
        self._ran_ms = now_ms
        self.sessions: dict[int, Session] = {}

    def follow(self, image: ClusterImage, now_ms: int) -> None:
        """Takes over who is registered, and what has become of those to be fenced."""
        stalled_ms = now_ms - self._ran_ms
        self._ran_ms = now_ms
        if stalled_ms > self._stall_ms:
            for session in self.sessions.values():
                session.heard_ms = min(now_ms, session.heard_ms + stalled_ms)
        for broker in image.brokers.values():
            known = self.sessions.get(broker.id)
            if known is None or known.incarnation != broker.incarnation:
                self.sessions[broker.id] = Session(broker.incarnation, broker.epoch, now_ms)
            elif known.is_condemned and (broker.is_fenced or not self._is_over(known, now_ms)):
                # Fenced as decided; or the command came to nothing, and the broker is there again.
                known.is_condemned = False
        for broker_id in [known for known in self.sessions if known not in image.brokers]:
            del self.sessions[broker_id]

    def heard(self, broker: BrokerImage, call: HeartbeatCall, now_ms: int) -> Session:
        """A heartbeat of the process that is registered."""
        session = self.sessions.get(broker.id)
        if session is None or session.incarnation != broker.incarnation:
            session = Session(broker.incarnation, broker.epoch, now_ms)
            self.sessions[broker.id] = session
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

    def refused(self, broker_id: int, incarnation: UUID | None, now_ms: int) -> None:
        """The broker's address refuses connections, or another process answers there than `incarnation`."""
        session = self.sessions.get(broker_id)
        if session is None or not session.trusts_refusals or session.gone_ms is not None:
            return
        if incarnation is None or incarnation == session.incarnation:
            session.gone_ms = now_ms

    def lives(self, broker_id: int, now_ms: int) -> bool:
        """Whether the broker's session may still be in use."""
        session = self.sessions.get(broker_id)
        return session is not None and not self._is_over(session, now_ms)

    def over(self, image: ClusterImage, now_ms: int) -> list[BrokerImage]:
        """The brokers that are not fenced but whose session is over, by id. They get no lease from here on."""
        ended = []
        for broker in image.live_brokers():
            session = self.sessions.get(broker.id)
            if session is not None and (session.is_condemned or self._is_over(session, now_ms)):
                session.is_condemned = True
                ended.append(broker)
        return ended

    def ready(self, image: ClusterImage, now_ms: int) -> list[BrokerImage]:
        """The fenced brokers that are there and know that they were fenced, by id: they can be let in."""
        found = []
        for broker_id in sorted(image.brokers):
            broker = image.brokers[broker_id]
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
                found.append(broker)
        return found

    def states(
        self,
        image: ClusterImage,
        now_ms: int,
        *,
        unfenced: Collection[int] = (),
        leaving: Collection[int] = (),
    ) -> BrokerStates:
        """Who may do what now, as if the image said already that those are `unfenced` and these `leaving`.

        A broker that asks to shut down gets nothing new from then on, and keeps what it has until it is `leaving`.
        """
        serving, staying, can_lead, unaware = [], [], [], []
        for broker in image.brokers.values():
            session = self.sessions.get(broker.id)
            is_fenced = broker.is_fenced and broker.id not in unfenced
            if is_fenced or session is None or session.is_condemned or self._is_over(session, now_ms):
                continue
            serving.append(broker.id)
            # For one session it may be granted leases although it does not know, and the last of them runs for another.
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
