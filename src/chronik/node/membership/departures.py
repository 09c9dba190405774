"""What clients are told of a node that has just gone, so that they find who took over from it.

librdkafka asks for metadata in the moment in which it loses a connection, before anybody can have taken over, and next
a second later. So a node that has lost a leader's connection itself holds its answer until the cluster has noticed.
librdkafka also drops a broker that is no longer named, and the partitions it knew there stay without a leader until
its next question, a second later again. So a node that is gone is named for a while longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from chronik.metadata.events import BrokerFenced, BrokerUnfenced, BrokerUnregistered, Event
from chronik.metadata.image import NO_LEADER, BrokerImage, ClusterImage, TopicImage
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.peers import PeerState, PeerStatus

NOTICED_S = 1.5
"""A leader that dies is replaced within this time, also where it was the controller."""
NAMED_S = 10.0


class Departures:
    """Who went when. Owned by the loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        node_id: int,
        metadata: MetadataLog,
        peer_status: Callable[[int], PeerStatus],
    ) -> None:
        self._loop = loop
        self._node_id = node_id
        self._metadata = metadata
        self._peer_status = peer_status
        self._fenced_s: dict[int, float] = {}

    def metadata_changed(self, image: ClusterImage, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, BrokerFenced):
                self._fenced_s[event.broker.id] = self._loop.time()
            elif isinstance(event, BrokerUnfenced | BrokerUnregistered):
                self._fenced_s.pop(event.broker.id, None)

    def named_brokers(self) -> list[BrokerImage]:
        """The brokers that serve, and those that did a moment ago, by id."""
        since_s = self._loop.time() - NAMED_S
        brokers = self._metadata.image.brokers
        return [
            brokers[broker_id]
            for broker_id in sorted(brokers)
            if not brokers[broker_id].is_fenced or self._fenced_s.get(broker_id, since_s) > since_s
        ]

    async def noticed(self, topics: Iterable[str] | None) -> None:
        """Waits while one of these topics, or of all, is led by a node that has just gone. Not for long."""
        names = None if topics is None else list(topics)
        try:
            while (until_s := self._expected_until_s(names)) is not None:
                async with asyncio.timeout_at(until_s):
                    await self._metadata.applied(self._metadata.image.version + 1)
        except TimeoutError:
            return

    def _expected_until_s(self, topics: Sequence[str] | None) -> float | None:
        """When to wait no longer for those to be replaced that have gone; None where there is nothing to wait for."""
        image, now_s = self._metadata.image, self._loop.time()
        lost = {broker_id: fenced_s + NOTICED_S for broker_id, fenced_s in self._fenced_s.items()}
        for broker in image.live_brokers():
            if broker.id != self._node_id and (status := self._peer_status(broker.id)).state is not PeerState.CONNECTED:
                lost[broker.id] = status.since_s + NOTICED_S
        lost = {broker_id: until_s for broker_id, until_s in lost.items() if until_s > now_s}
        if not lost:
            return None
        known = image.topics.values() if topics is None else filter(None, map(image.topics.get, topics))
        return max((lost[leader] for leader in _leaders(known) if leader in lost), default=None)


def _leaders(topics: Iterable[TopicImage]) -> set[int]:
    """Who leads, or did until there was nobody."""
    return {
        partition.last_known_leader if partition.leader == NO_LEADER else partition.leader
        for topic in topics
        for partition in topic.partitions
    }
