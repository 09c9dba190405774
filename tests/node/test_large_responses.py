"""Metadata about many partitions is described and encoded beside the loop."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.node.cluster_harness import LocalNodes

from chronik.node.apis import metadata
from chronik.node.serving import server
from chronik.wire.api import ApiKey
from chronik.wire.messages import write_response


async def test_metadata_of_many_partitions_is_made_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded_in: list[int] = []

    def encode(key: int, version: int, values: Any) -> bytes:
        if key == ApiKey.METADATA:
            encoded_in.append(threading.get_ident())
        return write_response(key, version, values)

    monkeypatch.setattr(server, "write_response", encode)
    async with LocalNodes(tmp_path, count=1) as nodes:
        (broker,) = await nodes.start_all()
        topics: list[dict[str, Any]] = [
            {"name": name, "num_partitions": 2, "replication_factor": 1, "assignments": [], "configs": []}
            for name in ("first", "second")
        ]
        await nodes.administer(broker, ApiKey.CREATE_TOPICS, {"topics": topics, "timeout": 10_000})
        client = await nodes.client(broker)
        for requested in (None, [{"name": "second"}, {"name": "first"}]):
            query = {"topics": requested, "allow_auto_topic_creation": False}
            encoded_in.clear()
            small = await client.call(ApiKey.METADATA, query)
            with monkeypatch.context() as patch:
                patch.setattr(metadata, "LOOP_PARTITIONS_MAX", 3)
                large = await client.call(ApiKey.METADATA, query)
            assert large == small
            assert sum(len(topic.partitions) for topic in large.topics) == 4
            on_loop, in_thread = encoded_in
            assert on_loop == threading.get_ident() != in_thread
        client.close()
