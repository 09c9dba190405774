"""Controlled shutdown: a broker hands over its leaderships; the controller moves those that remain and lets it stop.

It may stop once other brokers lead every partition that they can lead, and all live brokers know it, so that no request
reaches a stopped broker. A partition that only it can lead delays it for a while if another replica is catching up.
"""

from __future__ import annotations

from chronik.metadata.calls import HandOver
from chronik.metadata.elections import BrokerStates, first_able
from chronik.metadata.image import BrokerImage, ClusterImage
from chronik.metadata.index import PartitionIndex
from chronik.metadata.liveness import Liveness, Session

HAND_OVERS_PER_REPLY_MAX = 1_000


class Shutdowns:
    """The rules for brokers that want to stop. Their state is in the sessions and the image."""

    def __init__(self, index: PartitionIndex, liveness: Liveness, hand_over_ms: int, patience_ms: int) -> None:
        self._index = index
        self._liveness = liveness
        self._hand_over_ms = hand_over_ms
        self._patience_ms = patience_ms

    def hand_overs(self, image: ClusterImage, brokers: BrokerStates, broker: BrokerImage) -> tuple[HandOver, ...]:
        """Return the partitions that the broker leads and another ISR member can lead."""
        hand_overs: list[HandOver] = []
        for name, number in self._index.led_by(broker.id):
            partition = image.topics[name].partitions[number]
            to = first_able(partition.replicas, partition.isr, brokers)
            if to is not None and to != broker.id:
                hand_overs.append(HandOver(image.topics[name].id, number, partition.leader_epoch, to))
                if len(hand_overs) == HAND_OVERS_PER_REPLY_MAX:
                    break
        return tuple(hand_overs)

    def leaving(self, image: ClusterImage, brokers: BrokerStates, now_ms: int) -> list[BrokerImage]:
        """Return the brokers whose time to hand over has passed, or that have nothing to hand over, by id."""
        leaving: list[BrokerImage] = []
        if not self._index.is_complete:
            return leaving
        for broker in image.live_brokers():
            session = self._liveness.sessions.get(broker.id)
            if session is None or session.leaves_since_ms is None or broker.is_shutting_down:
                continue
            is_time = now_ms - session.leaves_since_ms >= self._hand_over_ms
            if broker.id in brokers.serving and (is_time or not self.hand_overs(image, brokers, broker)):
                leaving.append(broker)
        return leaving

    def may_stop(
        self, image: ClusterImage, brokers: BrokerStates, broker: BrokerImage, session: Session, now_ms: int
    ) -> bool:
        """Whether the broker may stop. A positive answer ends its session."""
        others = brokers.serving - {broker.id}
        if session.may_stop or broker.is_fenced or not others:
            return True
        if broker.is_shutting_down and session.leaves_since_ms is not None:
            is_time = now_ms - session.leaves_since_ms >= self._patience_ms
            session.may_stop = is_time or self._has_left(image, brokers, broker)
        return session.may_stop

    def _has_left(self, image: ClusterImage, brokers: BrokerStates, broker: BrokerImage) -> bool:
        if not self._index.is_complete:
            return False
        for name, number in self._index.led_by(broker.id):
            if any(replica in brokers.can_lead for replica in image.topics[name].partitions[number].replicas):
                return False
        left_version = max(broker.status_version, self._index.demoted_version.get(broker.id, 0))
        sessions = self._liveness.sessions
        return all(sessions[other].applied_version >= left_version for other in brokers.serving if other != broker.id)
