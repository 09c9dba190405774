"""Detects that a cluster has no controller, for commands that would otherwise wait until their deadline.

Without a majority of nodes there is no controller: metadata cannot change, leaders lose their leases, and a retry does
not help. An election takes seconds, so the cluster must have been without a controller for longer than that. A single
node may only be disconnected, so every broker that the metadata lists is queried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from chronik.client.cluster import Cluster, Deadline
from chronik.client.connection import Connect
from chronik.client.connector import Connector
from chronik.client.errors import ClientError
from chronik.client.layout import BrokerLayout, ClusterLayout, layout_of
from chronik.client.security import PLAINTEXT_SECURITY, ClientSecurity
from chronik.wire.api import ApiKey
from chronik.wire.errors import KafkaError

_T = TypeVar("_T")

WATCH_AFTER_S = 2.0
"""Most commands are done by then, and cause no further requests."""
WITHOUT_CONTROLLER_S = 8.0
"""Several times as long as the election of a controller takes while a majority of the nodes is connected."""
POLL_INTERVAL_S = 1.0
ANSWER_TIMEOUT_S = 2.0


class NoController(ClientError):
    """The message names the brokers that do not answer, and the way out."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What every listed broker reports: its metadata, or None if it does not answer."""

    brokers: Mapping[int, BrokerLayout]
    layouts: Mapping[int, ClusterLayout | None]
    unlisted: frozenset[int]
    """Nodes that have replicas, but whose address the metadata does not list: they failed a while ago."""

    @property
    def has_controller(self) -> bool:
        return any(layout is not None and layout.controller_id >= 0 for layout in self.layouts.values())

    def explain(self) -> str:
        """Return one line: that there is no controller, which nodes do not answer, and what to do."""
        answering = [str(node_id) for node_id, layout in sorted(self.layouts.items()) if layout is not None]
        silent = [
            f"{node_id} ({self.brokers[node_id].host}:{self.brokers[node_id].port})"
            for node_id, layout in sorted(self.layouts.items())
            if layout is None
        ]
        failed = [str(node_id) for node_id in sorted(self.unlisted)]
        states = [
            f"node {names[0]} {one}" if len(names) == 1 else f"nodes {', '.join(names)} {several}"
            for names, one, several in (
                (answering, "answers", "answer"),
                (silent, "does not answer", "do not answer"),
                (failed, "had failed before", "had failed before"),
            )
            if names
        ]
        way_out = (
            "start the nodes that are down (see chronik cluster status)"
            if silent or failed
            else "check that the nodes reach each other, and that their disks complete writes (chronik cluster status)"
        )
        return (
            f"the cluster has no controller, which needs a majority of connected nodes; {'; '.join(states)}: "
            f"{way_out}, then try again"
        )


async def run_watched(
    work: Coroutine[Any, Any, _T],
    bootstrap: Sequence[tuple[str, int]],
    client_id: str,
    security: ClientSecurity = PLAINTEXT_SECURITY,
) -> _T:
    """Return the result of `work`. Cancel it and raise NoController if the cluster proves to have no controller."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_for_no_controller(bootstrap, client_id, security))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise NoController((await watching).explain())
        return await working
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_for_no_controller(
    bootstrap: Sequence[tuple[str, int]], client_id: str, security: ClientSecurity
) -> Survey:
    """Return when no broker has reported a controller for long enough. May run forever."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(WATCH_AFTER_S)
    # Own connections: requests on those of the command wait for its responses.
    timeout_s = ANSWER_TIMEOUT_S * len(bootstrap)
    async with Cluster(bootstrap, client_id=client_id, timeout_s=timeout_s, security=security) as cluster:
        since_s: float | None = None
        while True:
            try:
                has_controller = (await cluster.layout([])).controller_id >= 0
            except (ClientError, KafkaError):
                has_controller = True  # unknown: the command reports that it cannot reach a broker
            if has_controller:
                since_s = None
            elif since_s is None:
                since_s = loop.time()
            elif loop.time() - since_s >= WITHOUT_CONTROLLER_S:
                survey = await survey_controller(cluster, client_id)
                if not survey.has_controller:
                    return survey
                since_s = None
            await asyncio.sleep(POLL_INTERVAL_S)


async def survey_controller(cluster: Cluster, client_id: str) -> Survey:
    """Query the metadata of every broker that the cluster lists. An unresponsive broker costs a few seconds."""
    layout = await cluster.layout()
    brokers = layout.brokers
    connect = Connector(cluster.security).open
    layouts = await asyncio.gather(*(_layout_at(broker, connect, client_id) for broker in brokers.values()))
    replicas = {
        node_id for topic in layout.topics.values() for partition in topic.partitions for node_id in partition.replicas
    }
    return Survey(brokers, dict(zip(brokers, layouts, strict=True)), frozenset(replicas - brokers.keys()))


async def _layout_at(broker: BrokerLayout, connect: Connect, client_id: str) -> ClusterLayout | None:
    deadline = Deadline(ANSWER_TIMEOUT_S)
    values = {"topics": [], "allow_auto_topic_creation": False}
    try:
        connection = await connect(broker.host, broker.port, client_id=client_id, timeout_s=deadline.left_s)
        try:
            return layout_of(await connection.call(ApiKey.METADATA, values, timeout_s=deadline.left_s, at_most=12))
        finally:
            connection.close()
    except (ClientError, KafkaError):
        return None
