"""After a leader's departure: clients that request metadata learn the new leader as soon as there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from uuid import UUID

import msgspec
import pytest
from tests.node.cluster_harness import LocalNodes
from tests.support.eventually import until

from chronik.metadata.controller import Controller, ControllerSettings
from chronik.metadata.events import BrokerFenced, BrokerUnfenced
from chronik.metadata.image import NO_LEADER, BrokerImage, ClusterImage, PartitionImage, TopicImage
from chronik.node.membership import controller_service, departures, peers
from chronik.node.membership.departures import Departures
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.peers import PeerState, PeerStatus
from chronik.node.runtime import Runtime

OWN_ID, DEAD, OTHER = 1, 2, 3
MOMENT_S = 0.02


class Metadata:
    """The metadata that a node has applied; `lead` creates the next image."""

    def __init__(self) -> None:
        brokers = {number: BrokerImage(number, 0, "h", number, UUID(int=number)) for number in (OWN_ID, DEAD, OTHER)}
        self.image = ClusterImage(version=7, brokers=brokers)
        self.is_controller = False
        self.controller_id = OTHER
        self._newer = asyncio.Event()
        for name, leader in (("dead", DEAD), ("own", OWN_ID)):
            self.lead(name, leader)

    def lead(self, topic: str, leader: int, last_known_leader: int = NO_LEADER) -> None:
        led = PartitionImage(0, leader, 0, (OWN_ID, DEAD), (OWN_ID, DEAD), last_known_leader=last_known_leader)
        topics = {**self.image.topics, topic: TopicImage(topic, UUID(int=5), (led,))}
        self.image = msgspec.structs.replace(self.image, version=self.image.version + 1, topics=topics)
        self._newer.set()

    def fence(self, broker_id: int, is_fenced: bool = True) -> BrokerImage:
        broker = msgspec.structs.replace(self.image.brokers[broker_id], is_fenced=is_fenced)
        self.image = msgspec.structs.replace(self.image, brokers={**self.image.brokers, broker_id: broker})
        return broker

    async def applied(self, version: int) -> None:
        while self.image.version < version:
            self._newer.clear()
            await self._newer.wait()


class Scene:
    """A node that has just lost its connection to another node."""

    def __init__(self, lost_s_ago: float = 0.0, state: PeerState = PeerState.REFUSED) -> None:
        loop = asyncio.get_running_loop()
        self.metadata = Metadata()
        self.links = {OTHER: PeerStatus(PeerState.CONNECTED, 0.0), DEAD: PeerStatus(state, loop.time() - lost_s_ago)}
        runtime = cast(Runtime, SimpleNamespace(loop=loop, node_id=OWN_ID))
        metadata = cast(MetadataLog, self.metadata)
        self.departures = Departures(runtime, metadata, lambda node_id: self.links[node_id])

    async def waits(self, *topics: str) -> bool:
        """Return whether a response about these topics, or about all topics, is held back."""
        asking = asyncio.create_task(self.departures.wait_for_failover(topics or None))
        await asyncio.sleep(MOMENT_S)
        held = not asking.done()
        asking.cancel()
        return held

    @property
    def named(self) -> list[int]:
        return [broker.id for broker in self.departures.listed_brokers()]


async def test_metadata_waits_for_the_successor_of_a_leader_that_just_left() -> None:
    scene = Scene()
    asking = asyncio.create_task(scene.departures.wait_for_failover(["own", "dead", "no-such-topic"]))
    await asyncio.sleep(MOMENT_S)
    scene.metadata.lead("own", OWN_ID)
    await asyncio.sleep(MOMENT_S)
    assert not asking.done(), "something else has changed"
    scene.metadata.lead("dead", OTHER)
    async with asyncio.timeout(departures.FAILOVER_S / 2):
        await asking


async def test_only_metadata_about_affected_topics_waits_for_failover() -> None:
    assert await Scene().waits("dead")
    assert await Scene().waits(), "all topics"
    assert not await Scene().waits("own")
    assert not await Scene(state=PeerState.CONNECTED).waits("dead")
    assert not await Scene(lost_s_ago=departures.FAILOVER_S).waits("dead"), "nobody takes over"


async def test_metadata_waits_for_a_partition_that_is_briefly_without_a_leader() -> None:
    scene = Scene()
    scene.departures.metadata_changed(scene.metadata.image, [BrokerFenced(scene.metadata.fence(DEAD))])
    scene.metadata.lead("dead", NO_LEADER, last_known_leader=DEAD)
    assert await scene.waits("dead")
    scene.departures.metadata_changed(scene.metadata.image, [BrokerUnfenced(scene.metadata.fence(DEAD, False))])
    scene.links[DEAD] = PeerStatus(PeerState.CONNECTED, 0.0)
    assert not await scene.waits("dead"), "it is back"


async def test_the_wait_for_failover_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "FAILOVER_S", MOMENT_S)

    async with asyncio.timeout(5):
        await Scene().departures.wait_for_failover(["dead"])


async def test_metadata_lists_a_departed_node_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    fenced = scene.metadata.fence(DEAD)
    assert scene.named == [OWN_ID, OTHER], "it was gone before this node came"
    scene.departures.metadata_changed(scene.metadata.image, [BrokerFenced(fenced)])
    assert scene.named == [OWN_ID, DEAD, OTHER]
    monkeypatch.setattr(departures, "LISTED_S", 0.0)
    assert scene.named == [OWN_ID, OTHER]


async def test_a_new_controller_detects_dead_nodes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a reconnect or a session timeout would come far too late: the controller probes the links."""
    patient = ControllerSettings(session_timeout_ms=120_000)
    monkeypatch.setattr(controller_service, "Controller", partial(Controller, settings=patient))

    async with LocalNodes(tmp_path) as nodes:
        await nodes.start_all()
        monkeypatch.setattr(peers, "PAUSE_S_MIN", 120.0)
        monkeypatch.setattr(peers, "PAUSE_S_MAX", 120.0)
        former = await nodes.controller()
        others = nodes.others(former)
        await nodes.kill(former)
        await until(lambda: any(other.is_controller for other in others))
        await until(lambda: all(other.image.brokers[former.node_id].is_fenced for other in others), "it is fenced")


async def test_requests_about_all_topics_look_for_the_leaders_once_for_each_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []

    def count(topics: Iterable[TopicImage]) -> frozenset[int]:
        looked.append(scene.metadata.image.version)
        return leaders_of(topics)

    leaders_of = departures._leaders_of
    monkeypatch.setattr(departures, "_leaders_of", count)
    scene = Scene()
    asking = [asyncio.create_task(scene.departures.wait_for_failover(None)) for _ in range(5)]
    await asyncio.sleep(MOMENT_S)
    before = scene.metadata.image.version
    scene.metadata.lead("own", OTHER)
    await asyncio.sleep(MOMENT_S)
    assert looked == [before, before + 1]
    scene.metadata.lead("dead", OTHER)
    async with asyncio.timeout(departures.FAILOVER_S / 2):
        await asyncio.gather(*asking)
    assert looked == [before, before + 1, before + 2]
