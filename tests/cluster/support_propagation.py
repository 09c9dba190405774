"""How fast a follower learns the high watermark, as seen by a consumer that fetches from it (KIP-392)."""

from __future__ import annotations

import dataclasses
import time
from functools import partial

from tests.cluster.support_cluster import Nodes
from tests.node.support_wire import WireClient, decoded, fetch_of
from tests.support.eventually import eventually

from chronik.wire.fetch import FetchRequest

WAIT_MS = 10_000


def seconds_until_followers_know(nodes: Nodes, topic: str, records: int) -> list[float]:
    """Return, for each record, the seconds from its acks=all acknowledgement until a follower returns it to a consumer.

    The consumer's fetch waits at the follower before the record is produced. It must return exactly that record.
    """
    state = nodes.partitions(topic)[0]
    followers = [replica for replica in state.replicas if replica != state.leader]
    seconds: list[float] = []
    with nodes.connect(state.leader, timeout_s=30.0) as leader:
        offset = leader.append(topic, b"first") + 1
        for follower in followers:
            with nodes.connect(follower, timeout_s=30.0) as near:
                eventually(partial(_knows, near, topic, offset), 30, f"node {follower} knows what is committed")
                for number in range(records // len(followers)):
                    value = f"{follower}/{number}".encode()
                    waiting = near.send_fetch(_at_follower(topic, offset, WAIT_MS))
                    leader.append(topic, value)
                    acknowledged_s = time.monotonic()
                    found = near.fetched(waiting).topics[0][2][0]
                    seconds.append(time.monotonic() - acknowledged_s)
                    assert found.error_code == 0
                    assert [record.value for record in decoded(found.records)] == [value]
                    offset += 1
                    assert found.high_watermark == offset
    return seconds


def _knows(follower: WireClient, topic: str, offset: int) -> bool:
    return follower.fetch(_at_follower(topic, 0, 0)).topics[0][2][0].high_watermark == offset


def _at_follower(topic: str, offset: int, wait_ms: int) -> FetchRequest:
    """Return a fetch that a follower answers, because the consumer names a rack."""
    return dataclasses.replace(fetch_of((topic, 0, offset), max_wait_ms=wait_ms), rack_id="near")
