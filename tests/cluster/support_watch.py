"""Keeps requesting the end offsets of partitions from every node, and fails if one goes backwards."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from tests.cluster.support_cluster import Nodes
from tests.node.support_wire import ConnectionEnded, WireClient, fetch_of

from chronik.local.errors import LocalClusterError
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

LATEST = -1
ANSWER_TIMEOUT_S = 1.0
PAUSE_S = 0.01


class OffsetWatch:
    """Requests the latest offset and the high watermark of each partition from one node after another.

    Each request is sent after the previous answer, so an answer below an earlier one has gone backwards. A node that
    does not answer, or that is not the leader, says nothing about offsets.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        for partition in self._partitions:
            latest = self._latest(client, partition)
            if latest.error_code is ErrorCode.none:
                self._told("end offset", node_id, partition, latest.offset)
            offset = self._highest.get(("watermark", partition), (0, 0))[0]
            fetched = client.fetch(fetch_of((self._topic, partition, offset), partition_max_bytes=1)).topics[0][2][0]
            if fetched.error_code == 0:
                self._told("watermark", node_id, partition, fetched.high_watermark)
            elif fetched.error_code == ErrorCode.offset_out_of_range:
                self._violated(
                    f"node {node_id}: {self._topic}-{partition} at {offset} is out of range, it was readable"
                )

    def _latest(self, client: WireClient, partition: int) -> Any:
        wanted = {"partition_index": partition, "current_leader_epoch": -1, "timestamp": LATEST}
        values = {"replica_id": -1, "topics": [{"name": self._topic, "partitions": [wanted]}]}
        return client.call(ApiKey.LIST_OFFSETS, 7, values).topics[0].partitions[0]

    def _told(self, what: str, node_id: int, partition: int, offset: int) -> None:
        self.answers += 1
        highest, by = self._highest.get((what, partition), (0, node_id))
        if offset < highest:
            self._violated(
                f"node {node_id} tells {what} {offset} of {self._topic}-{partition}, node {by} told {highest} before"
            )
        else:
            self._highest[(what, partition)] = (offset, node_id)

    def _violated(self, told: str) -> None:
        if len(self.violations) < 1000:
            self.violations.append(told)
