"""If clients have to log in, a node queries the others, and itself, on the internal listener."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.node.cluster_harness import LocalNodes
from tests.web.support_http import batch_of

from chronik.client.batches import Batches
from chronik.client.cluster import Cluster
from chronik.client.errors import ClientError
from chronik.client.topics import Topics
from chronik.doctor import Means, diagnose
from chronik.node.broker import Broker
from chronik.node.config import Security
from chronik.web.doctor import in_own_thread
from chronik.web.group_views import groups_view
from chronik.web.log_reader import leader_log
from chronik.web.node_view import NodeView, require_image
from chronik.web.offsets import CLIENT_ID, OffsetSampler
from chronik.web.transaction_views import transactions_view
from chronik.wire.api import ApiKey


def secure_view(broker: Broker) -> NodeView:
    """Return the node's view, as if its clients had to log in."""
    runtime = broker.runtime
    config = msgspec.structs.replace(runtime.config, security=Security(protocol="SASL_SSL"))
    view = NodeView(dataclasses.replace(runtime, config=config))
    view.broker = broker
    return view


async def test_the_page_and_the_doctor_use_the_internal_listener(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LocalNodes(tmp_path, 3) as nodes, asyncio.timeout(90):
        brokers = await nodes.start_all()
        bootstrap = [(broker.image.brokers[broker.node_id].host, broker.server.port) for broker in brokers]
        async with Cluster(bootstrap) as cluster:
            await Topics(cluster).create("orders", 3, 3, {})
            for partition in range(3):
                await Batches(cluster).append("orders", partition, batch_of([b"x"] * 4))
        asked: list[int] = []
        run_request = type(brokers[0].server).run_request

        def counted(server: Any, connection: Any, frame: memoryview) -> None:
            if server in [broker.server for broker in brokers]:
                asked.append(int.from_bytes(frame[:2], "big"))
            run_request(server, connection, frame)

        monkeypatch.setattr(type(brokers[0].server), "run_request", counted)
        node = secure_view(brokers[0])
        image = require_image(node)
        topic = image.topic("orders")
        assert topic is not None
        sampler = OffsetSampler(node)

        async def is_sampled() -> bool:
            await sampler.sample(image, [topic])
            return {sample.log_end_offset for sample in sampler.samples.values()} == {4} and len(sampler.samples) == 3

        while not await is_sampled():
            await asyncio.sleep(0.05)
        assert (await groups_view(node, sampler)).silent_nodes == []
        assert (await transactions_view(node, sampler)).silent_nodes == []
        await sampler.aclose()
        for each in topic.partitions:
            if each.leader != node.node_id:
                async with leader_log(node, image.brokers[each.leader], "orders", each.partition) as log:
                    assert await log.bounds() == (0, 4)
                    assert len(await log.read(0)) > 0
        means = Means(node.connect, node.caller)
        wall_ms = node.wall_ms
        diagnosis = await in_own_thread(lambda: diagnose(bootstrap, "orders", None, 1, wall_ms=wall_ms, means=means))
        assert diagnosis.verdict == "healthy", diagnosis
        assert asked == []
        own = image.brokers[node.node_id]
        connection = await node.connect(own.host, own.port, client_id=CLIENT_ID, timeout_s=5)
        other = await node.connect(own.host, own.port, client_id=CLIENT_ID, timeout_s=5)
        # One connection does not end the other.
        assert (await connection.call(ApiKey.LIST_GROUPS, {"states_filter": [], "types_filter": []})).groups == ()
        assert not other.is_closed
        connection.close()
        other.close()
        with pytest.raises(ClientError):
            await node.connect("127.0.0.1", 1, client_id=CLIENT_ID, timeout_s=1)
        # It is no peer: the node does not count its own connections.
        assert not brokers[0].member.handshake.is_present(node.node_id)
