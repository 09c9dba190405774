"""Metadata for clients after a node has failed, so that they find the new leaders quickly.

librdkafka requests metadata the moment it loses a connection, before any failover can have happened, and again only a
second later. So a node that has itself lost the connection to a leader delays its response until the failover is done.
librdkafka also forgets a broker that is missing from the response, and its partitions there stay without a leader until
the next request, another second later. So a failed node stays listed for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from chronik.metadata.events import BrokerFenced, BrokerUnfenced, BrokerUnregistered, Event
from chronik.metadata.image import NO_LEADER, BrokerImage, ClusterImage, TopicImage
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.peers import PeerState, PeerStatus
from chronik.node.runtime import Runtime

FAILOVER_S = 1.5
"""A failed leader is replaced within this time, even if it was also the controller."""
LISTED_S = 10.0


class Departures:
    """When each broker was fenced. Owned by the loop."""

    def __init__(self, runtime: Runtime, metadata: MetadataLog, peer_status: Callable[[int], PeerStatus]) -> None:
        self._loop = runtime.loop
        self._node_id = runtime.node_id
        self._metadata = metadata
        self._peer_status = peer_status
        self._fenced_s: dict[int, float] = {}
        self._known_leaders: tuple[Mapping[str, TopicImage], frozenset[int]] | None = None

    def metadata_changed(self, image: ClusterImage, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, BrokerFenced):
                self._fenced_s[event.broker.id] = self._loop.time()
            elif isinstance(event, BrokerUnfenced | BrokerUnregistered):
                self._fenced_s.pop(event.broker.id, None)

    def listed_brokers(self) -> list[BrokerImage]:
        """Return the active brokers and the recently fenced ones, sorted by id."""
        since_s = self._loop.time() - LISTED_S
        return [
            broker
            for broker_id, broker in sorted(self._metadata.image.brokers.items())
            if not broker.is_fenced or self._fenced_s.get(broker_id, since_s) > since_s
        ]

    async def wait_for_failover(self, topics: Iterable[str] | None) -> None:
        """Wait, for a bounded time, while a failed node still leads one of these topics (None: any topic)."""
        names = None if topics is None else list(topics)
        try:
            while (until_s := self._expected_until_s(names)) is not None:
                async with asyncio.timeout_at(until_s):
                    await self._metadata.applied(self._metadata.image.version + 1)
        except TimeoutError:
            return

    def _expected_until_s(self, topics: Sequence[str] | None) -> float | None:
        """Return the deadline for replacing the failed leaders of these topics; None if there are none."""
        image, now_s = self._metadata.image, self._loop.time()
        lost = {broker_id: fenced_s + FAILOVER_S for broker_id, fenced_s in self._fenced_s.items()}
        for broker in image.live_brokers():
            if broker.id != self._node_id and (status := self._peer_status(broker.id)).state is not PeerState.CONNECTED:
                lost[broker.id] = status.since_s + FAILOVER_S
        lost = {broker_id: until_s for broker_id, until_s in lost.items() if until_s > now_s}
        if not lost:
            self._known_leaders = None
            return None
        leaders = self._leaders(image) if topics is None else _leaders_of(filter(None, map(image.topics.get, topics)))
        return max((until_s for broker_id, until_s in lost.items() if broker_id in leaders), default=None)

    def _leaders(self, image: ClusterImage) -> frozenset[int]:
        """Return the leaders of all topics, found once for each image: clients that lost a connection ask together."""
        if self._known_leaders is None or self._known_leaders[0] is not image.topics:
            self._known_leaders = image.topics, _leaders_of(image.topics.values())
        return self._known_leaders[1]


def _leaders_of(topics: Iterable[TopicImage]) -> frozenset[int]:
    """Return the brokers that lead a partition of these topics, or were the last to lead it."""
    return frozenset(
        partition.last_known_leader if partition.leader == NO_LEADER else partition.leader
        for topic in topics
        for partition in topic.partitions
    )
