"""Offsets that nodes report: they never go backwards, and followers learn the high watermark (KIP-392)."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from tests.cluster.support_cluster import Nodes
from tests.node.support_wire import ConnectionEnded, WireClient, decoded, fetch_of
from tests.support.eventually import eventually

from chronik.local.errors import LocalClusterError
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode
from chronik.wire.fetch import FetchRequest

LATEST = -1
ANSWER_TIMEOUT_S = 1.0
PAUSE_S = 0.05
WAIT_MS = 10_000


class OffsetWatch:
    """Requests the latest offset, high watermark and last stable offset of each partition from one node after another.

    Each request is sent after the previous answer, so an answer below an earlier one has gone backwards. A node that
    does not answer, or that is not the leader, reports no offset.
    """

    def __init__(self, nodes: Nodes, topic: str, partitions: Sequence[int]) -> None:
        self.violations: list[str] = []
        self.answers = 0
        self._nodes = nodes
        self._topic = topic
        self._partitions = list(partitions)
        self._highest: dict[tuple[str, int], tuple[int, int]] = {}
        self._clients: dict[int, WireClient] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="offset-watch", daemon=True)

    def __enter__(self) -> OffsetWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        if kind is None:
            assert not self._thread.is_alive()
            assert self.violations == [], "\n".join(self.violations[:10])
            assert self.answers > 0

    def _run(self) -> None:
        while not self._stop.is_set():
            for node_id in self._nodes.ids:
                try:
                    self._ask(node_id)
                except (
                    OSError,
                    ConnectionEnded,
                    LocalClusterError,
                ):  # the last: the node has left the cluster
                    client = self._clients.pop(node_id, None)
                    if client is not None:
                        client.socket.close()
            self._stop.wait(PAUSE_S)
        for client in self._clients.values():
            with contextlib.suppress(OSError):
                client.socket.close()

    def _ask(self, node_id: int) -> None:
        client = self._clients.get(node_id)
        if client is None:
            client = self._clients[node_id] = self._nodes.connect(node_id, timeout_s=ANSWER_TIMEOUT_S)
        for latest in self._latest(client):
            if latest.error_code is ErrorCode.none:
                self._reported("end offset", node_id, latest.partition_index, latest.offset)
        offsets = {partition: self._highest.get(("watermark", partition), (0, 0))[0] for partition in self._partitions}
        wanted = [(self._topic, partition, offset) for partition, offset in offsets.items()]
        answers = client.fetch(fetch_of(*wanted, partition_max_bytes=1)).topics
        for fetched in [each for _, _, partitions in answers for each in partitions]:
            partition = fetched.partition
            if fetched.error_code == 0:
                self._reported("watermark", node_id, partition, fetched.high_watermark)
                self._reported("last stable offset", node_id, partition, fetched.last_stable_offset)
                if fetched.last_stable_offset > fetched.high_watermark:
                    self._violated(
                        f"node {node_id}: {self._topic}-{partition} is stable up to {fetched.last_stable_offset}, "
                        f"above its watermark {fetched.high_watermark}"
                    )
            elif fetched.error_code == ErrorCode.offset_out_of_range:
                where = f"{self._topic}-{partition} at {offsets[partition]}"
                self._violated(f"node {node_id}: {where} is out of range, but was readable")

    def _latest(self, client: WireClient) -> Any:
        requested = [
            {"partition_index": partition, "current_leader_epoch": -1, "timestamp": LATEST}
            for partition in self._partitions
        ]
        values = {"replica_id": -1, "topics": [{"name": self._topic, "partitions": requested}]}
        return client.call(ApiKey.LIST_OFFSETS, 7, values).topics[0].partitions

    def _reported(self, what: str, node_id: int, partition: int, offset: int) -> None:
        self.answers += 1
        highest, by = self._highest.get((what, partition), (0, node_id))
        if offset < highest:
            self._violated(
                f"node {node_id} reports {what} {offset} of {self._topic}-{partition}, node {by} reported {highest}"
            )
        else:
            self._highest[(what, partition)] = (offset, node_id)

    def _violated(self, violation: str) -> None:
        if len(self.violations) < 1000:
            self.violations.append(violation)


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
                    fetched = near.fetched(waiting).topics[0][2][0]
                    seconds.append(time.monotonic() - acknowledged_s)
                    assert fetched.error_code == 0
                    assert [record.value for record in decoded(fetched.records)] == [value]
                    offset += 1
                    assert fetched.high_watermark == offset
    return seconds


def _knows(follower: WireClient, topic: str, offset: int) -> bool:
    return follower.fetch(_at_follower(topic, 0, 0)).topics[0][2][0].high_watermark == offset


def _at_follower(topic: str, offset: int, wait_ms: int) -> FetchRequest:
    """Return a fetch that a follower answers, because the consumer names a rack."""
    return dataclasses.replace(fetch_of((topic, 0, offset), max_wait_ms=wait_ms), rack_id="near")
