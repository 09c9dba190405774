"""A cluster of real processes for fault tests: its leaders, signals to its nodes, links that can be cut."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from tests.cluster.support_links import Links
from tests.node.support_wire import ConnectionEnded, WireClient, unique
from tests.support.eventually import eventually

from chronik.local.cluster import LocalCluster, free_port
from chronik.local.errors import LocalClusterError
from chronik.local.node import LocalNode
from chronik.testing.tied_node import TIED_NODE, tied_environment
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

NODES = 3
PORT_TRIES = 5
IN_SYNC_TIMEOUT_S = 60.0
ASK_TIMEOUT_S = 5.0
LOG_TAIL_LINES = 40
LOG_LINES_PER_EVENT = 3
LOG_LINE_CHARACTERS_MAX = 500


class PartitionState(NamedTuple):
    """A partition in a node's metadata."""

    leader: int
    epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]


class Nodes:
    """`count` nodes (three by default) in one folder. With `cuttable`, the link between any two nodes can be cut.

    `local` replaces the default cluster, which runs on loopback.
    """

    def __init__(
        self,
        folder: Path,
        count: int = NODES,
        settings: Mapping[str, Any] | None = None,
        *,
        cuttable: bool = False,
        local: LocalCluster | None = None,
    ) -> None:
        self.folder = folder
        self.local = local or LocalCluster(str(folder), command=TIED_NODE, environment=tied_environment())
        self.links = Links()
        self._is_cuttable = cuttable
        self._has_started = False
        self.local.create(count, free_port(count), settings)
        if cuttable:
            self._put_links_between()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_all()
        self.links.close()

    # -- processes -----------------------------------------------------------------------------------------------------

    @property
    def ids(self) -> list[int]:
        return [node.id for node in self.local.nodes]

    @property
    def running(self) -> list[LocalNode]:
        return [node for node in self.local.nodes if node.process.state == "running"]

    @property
    def bootstrap(self) -> str:
        return self.local.bootstrap

    def node(self, node_id: int) -> LocalNode:
        return self.local.node(node_id)

    def start_all(self) -> None:
        """Start all nodes. At the first start, choose other ports if another process has taken these."""
        tries_left = 0 if self._has_started else PORT_TRIES
        while True:
            try:
                self.local.start_all()
                break
            except LocalClusterError as error:
                if not tries_left or "is taken" not in str(error):
                    raise
            tries_left -= 1
            self.local.move_to(free_port(len(self.ids)))
            if self._is_cuttable:
                self._put_links_between()
        self._has_started = True

    def start(self, node_id: int) -> None:
        self.local.start(node_id)

    def stop(self, node_id: int) -> None:
        self.local.stop(node_id)

    def stop_all(self) -> None:
        self.local.stop_all()

    def kill(self, node_id: int) -> None:
        self.local.kill(node_id)

    def kill_all(self) -> None:
        for node in self.local.running:
            self.local.kill(node.id)

    def pause(self, node_id: int) -> None:
        self.local.pause(node_id)

    def resume(self, node_id: int) -> None:
        self.local.resume(node_id)

    def cut_off(self, node_id: int) -> None:
        """Drop all traffic between this node and the other nodes; clients still reach every node."""
        self.links.cut(node_id)

    def heal(self) -> None:
        self.links.heal()

    def resident_bytes(self, node_id: int, which: str = "VmRSS") -> int:
        """Return the node's resident memory; with `VmHWM`, its peak."""
        with open(f"/proc/{self.node(node_id).process.pid}/status") as status:
            kilobytes = next(int(line.split()[1]) for line in status if line.startswith(f"{which}:"))
        return kilobytes * 1024

    # -- queries -------------------------------------------------------------------------------------------------------

    def connect(self, node_id: int, *, timeout_s: float = ASK_TIMEOUT_S) -> WireClient:
        at = self.node(node_id).kafka
        return WireClient(at.port, host=at.host, timeout_s=timeout_s)

    def new_topic(self, partitions: int = 2, **configs: str) -> str:
        """Create a topic with three replicas, through any node that answers."""
        name = unique("topic")
        wanted = {
            "name": name,
            "num_partitions": partitions,
            "replication_factor": min(NODES, len(self.ids)),
            "configs": [{"name": key.replace("_", "."), "value": value} for key, value in configs.items()],
        }
        with self.connect(self.running[0].id, timeout_s=60.0) as client:
            made = client.call(ApiKey.CREATE_TOPICS, 7, {"topics": [wanted], "timeout": 30_000}).topics[0]
        assert made.error_code is ErrorCode.none, (made.error_code, made.error_message)
        return name

    def metadata(self, *topics: str, node_id: int | None = None) -> Any:
        """Return the metadata of one node, or of the first that answers."""
        failures: list[Exception] = []
        for node in self.running if node_id is None else [self.node(node_id)]:
            try:
                with self.connect(node.id) as client:
                    return client.metadata(*topics)
            except (OSError, ConnectionEnded) as failure:
                failures.append(failure)
        raise AssertionError(f"no node answers Metadata: {failures}")

    def partitions(self, topic: str, node_id: int | None = None) -> dict[int, PartitionState]:
        answer = self.metadata(topic, node_id=node_id)
        return {
            state.partition_index: PartitionState(
                int(state.leader_id), state.leader_epoch, tuple(state.replica_nodes), tuple(state.isr_nodes)
            )
            for state in answer.topics[0].partitions
        }

    def leader(self, topic: str, partition: int = 0) -> int:
        """Wait until the partition has a running leader, and return it."""
        alive = {node.id for node in self.running}

        def found() -> int:
            leader = self.partitions(topic)[partition].leader
            return leader if leader in alive else 0

        return eventually(found, IN_SYNC_TIMEOUT_S, f"{topic}-{partition} has a leader that runs")

    def controller(self) -> int:
        """Wait until there is a running controller, and return it."""
        alive = {node.id for node in self.running}

        def found() -> int:
            view = self.local.view()
            return 0 if view is None or view["controller"] not in alive else int(view["controller"])

        return eventually(found, IN_SYNC_TIMEOUT_S, "there is a controller that runs")

    def follower(self, topic: str) -> int:
        """Return a node that leads the fewest of the topic's partitions; if possible, not the controller."""
        leads = Counter(state.leader for state in self.partitions(topic).values())
        controller = self.controller()
        return min((node.id for node in self.running), key=lambda node_id: (leads[node_id], node_id == controller))

    def wait_in_sync(self, timeout_s: float = IN_SYNC_TIMEOUT_S) -> None:
        """Wait until every node runs and sees all nodes alive, and all replicas of every partition are in sync."""

        def in_sync() -> bool:
            for node in self.local.nodes:
                view = node.cluster_view()
                assert view is not None, f"node {node.id} does not answer"
                alive = sorted(known["id"] for known in view["nodes"] if known["state"] == "alive")
                assert alive == self.ids, f"node {node.id} takes {alive} for alive"
                assert view["under_replicated"] == 0, f"node {node.id}: {view['under_replicated_partitions']}"
                assert view["leaderless"] == 0, f"node {node.id}: {view['leaderless_partitions']}"
            return True

        eventually(in_sync, timeout_s, "all replicas are in sync")

    # -- logs ----------------------------------------------------------------------------------------------------------

    def log_text(self, node_id: int) -> str:
        path = Path(self.node(node_id).log_path)
        return path.read_text(errors="replace") if path.exists() else ""

    def log_tail(self, node_id: int, lines: int = LOG_TAIL_LINES) -> str:
        """Return the end of a node's log for a failure report: the last few lines of each event, truncated."""
        seen: Counter[str] = Counter()
        shown: list[str] = []
        for line in reversed(self.log_text(node_id).splitlines()):
            event = json.loads(line)["event"] if line.startswith("{") else "text"
            seen[event] += 1
            if seen[event] <= LOG_LINES_PER_EVENT:
                shown.append(line[:LOG_LINE_CHARACTERS_MAX])
        repeated = {event: count for event, count in seen.items() if count > LOG_LINES_PER_EVENT}
        return "\n".join([*reversed(shown[:lines]), f"more often than shown: {repeated}"])

    def no_surprises(self) -> None:
        """Fail if a node logged an unexpected exception: nodes must handle faults deliberately."""
        errors: Counter[str] = Counter()
        for node_id in self.ids:
            errors.update(
                f"node {node_id}: {error}" for error in unexpected_errors(self.log_text(node_id).splitlines())
            )
        shown = "\n".join(f"{count} x {error}" for error, count in errors.most_common(5))
        assert not errors, f"{errors.total()} unexpected errors in the logs, {len(errors)} different ones:\n{shown}"

    def _put_links_between(self) -> None:
        for node in self.local.nodes:
            others = [other for other in self.local.nodes if other is not node]
            node.change(
                {
                    "peers": [
                        {"id": other.id, "internal": self.links.add(node.id, other.id, other.internal.port)}
                        for other in others
                    ]
                }
            )


def unexpected_errors(lines: Iterable[str]) -> Iterable[str]:
    """Return what a node logged with a traceback, or printed as one."""
    for line in lines:
        if '"traceback"' in line:
            try:
                logged = json.loads(line)
            except ValueError:
                yield f"cut short by a full disk: {line[:1500]}"
                continue
            yield f"{logged['event']}: {logged.get('error')}\n{logged['traceback'][-1500:]}"
        elif line.startswith("Traceback"):
            yield line
