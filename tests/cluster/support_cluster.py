"""The cluster of real processes that tests use: its leaders, signals to its nodes, faults of links and disks."""

from __future__ import annotations

import contextlib
import json
import os
import resource
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.cluster.support_links import Links
from tests.node.support_wire import ConnectionEnded, WireClient, unique
from tests.support.eventually import eventually
from tests.support.forked_node import spawn_node
from tests.support.slow_disk import FREEZE, HANG
from tests.support.slow_node import SLOW_NODE, slow_reads, slow_syncs, with_this_launcher

from chronik.cli.options import with_cluster
from chronik.client.brokers import Brokers
from chronik.local.cluster import READY_TIMEOUT_S, LocalCluster, clean_environment, free_port
from chronik.local.errors import LocalClusterError
from chronik.local.node import LocalNode, to_toml
from chronik.testing.tied_node import TIED_NODE, tied_environment
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

__all__ = ["LocalNode", "Nodes", "clean_environment", "free_port", "to_toml"]

NODES = 3
PREFERRED = 0
PORT_TRIES = 5
IN_SYNC_TIMEOUT_S = 120.0
COORDINATOR_TIMEOUT_S = 30.0
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


class Nodes(LocalCluster):
    """`count` nodes (three by default) in one folder, all killed on exit. They end with this process, too.

    With `cuttable`, the link between any two nodes can be cut. With `disk_switches`, the disk of each node can be made
    slow or sick while it runs.
    """

    def __init__(
        self,
        folder: Path,
        count: int = NODES,
        settings: Mapping[str, Any] | None = None,
        *,
        cuttable: bool = False,
        disk_switches: bool = False,
    ) -> None:
        environment = tied_environment()
        if disk_switches:
            environment = with_this_launcher(environment)
        command = SLOW_NODE if disk_switches else TIED_NODE
        super().__init__(str(folder), command=command, environment=environment, spawn=spawn_node)
        self.links = Links()
        self._is_cuttable = cuttable
        self._has_started = False
        self.create(count, free_port(count), settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()
        self.links.close()

    def __iter__(self) -> Iterator[LocalNode]:
        return iter(self.nodes)

    # -- processes -----------------------------------------------------------------------------------------------------

    @property
    def ids(self) -> list[int]:
        return [node.id for node in self]

    @property
    def responsive(self) -> list[LocalNode]:
        """The nodes that run and are not paused."""
        return [node for node in self if node.process.state == "running"]

    def data_folder(self, node_id: int) -> Path:
        return Path(self.node(node_id).folder)

    def introduce(self) -> None:
        super().introduce()
        if self._is_cuttable:
            for node in self:
                others = [other for other in self if other is not node]
                links = [(other.id, self.links.add(node.id, other.id, other.internal.port)) for other in others]
                node.change({"peers": [{"id": other_id, "internal": address} for other_id, address in links]})

    def start_all(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Start all nodes. At the first start, choose other ports if another process has taken these."""
        tries_left = 0 if self._has_started else PORT_TRIES
        while True:
            try:
                super().start_all(timeout_s)
                break
            except LocalClusterError as error:
                if not tries_left or "is taken" not in str(error):
                    raise
            tries_left -= 1
            self.move_to(free_port(len(self.ids)))
        self._has_started = True

    def kill_all(self) -> None:
        for node in self.running:
            self.kill(node.id)

    def elect(self, topic: str, leaders: Mapping[int, int]) -> None:
        """Make these replicas the preferred leaders of their partitions, and elect them."""
        if not leaders:
            return
        now = self.partitions(topic)
        targets = {
            (topic, index): (leader, *(other for other in now[index].replicas if other != leader))
            for index, leader in leaders.items()
        }
        with_cluster(self.bootstrap, lambda online: Brokers(online).move(targets))
        partitions = [{"topic": topic, "partitions": list(leaders)}]
        with self.connect(self.responsive[0].id, timeout_s=20.0) as client:
            values = {"election_type": PREFERRED, "topic_partitions": partitions, "timeout": 10_000}
            answer = client.call(ApiKey.ELECT_LEADERS, 2, values)
        codes = [part.error_code for result in answer.replica_election_results for part in result.partition_result]
        assert all(code in (ErrorCode.none, ErrorCode.election_not_needed) for code in codes), codes

    # -- faults --------------------------------------------------------------------------------------------------------

    def cut_off(self, node_id: int) -> None:
        """Drop all traffic between this node and the other nodes; clients still reach every node."""
        self.links.cut(node_id)

    def heal(self) -> None:
        self.links.heal()

    def slow_reads(self, node_id: int, delay_ms: int) -> None:
        slow_reads(self.node(node_id).folder).write_text(str(delay_ms))

    def slow_syncs(self, node_id: int, delay_ms: int) -> None:
        slow_syncs(self.node(node_id).folder).write_text(str(delay_ms))

    def hang(self, node_id: int) -> None:
        """Block all writes of the node's threads: syncs of segments, small files, the Raft store."""
        slow_syncs(self.node(node_id).folder).write_text(HANG)

    def freeze(self, node_id: int) -> None:
        """Block all writes of the node, including appends on its event loop."""
        slow_syncs(self.node(node_id).folder).write_text(FREEZE)

    def refuse(self, node_id: int) -> None:
        """Make every write of the node fail at once (EFBIG), for any file."""
        self._limit_files(node_id, 1)

    def cure(self, node_id: int) -> None:
        """End all faults of the node's disk."""
        for switch in (slow_reads, slow_syncs):
            switch(self.node(node_id).folder).unlink(missing_ok=True)
        if self.node(node_id).process.state is not None:
            self._limit_files(node_id, None)

    def _limit_files(self, node_id: int, size_bytes: int | None) -> None:
        pid = self.node(node_id).process.pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):
            limit_files(pid, size_bytes)

    # -- queries -------------------------------------------------------------------------------------------------------

    def connect(self, node_id: int, *, timeout_s: float = ASK_TIMEOUT_S) -> WireClient:
        endpoint = self.node(node_id).kafka
        return WireClient(endpoint.port, host=endpoint.host, timeout_s=timeout_s)

    def resident_bytes(self, node_id: int, which: str = "VmRSS") -> int:
        return resident_bytes(self.node(node_id).process.pid, which)

    def new_topic(self, partitions: int = 2, **configs: str) -> str:
        """Create a topic with three replicas, through any node that answers."""
        name = unique("topic")
        topic = {
            "name": name,
            "num_partitions": partitions,
            "replication_factor": min(NODES, len(self.ids)),
            "configs": [{"name": key.replace("_", "."), "value": value} for key, value in configs.items()],
        }
        with self.connect(self.responsive[0].id, timeout_s=60.0) as client:
            made = client.call(ApiKey.CREATE_TOPICS, 7, {"topics": [topic], "timeout": 30_000}).topics[0]
        assert made.error_code is ErrorCode.none, (made.error_code, made.error_message)
        return name

    def metadata(self, *topics: str, node_id: int | None = None) -> Any:
        """Return the metadata of one node, or of the first that answers."""
        failures: list[Exception] = []
        for node in self.responsive if node_id is None else [self.node(node_id)]:
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
        alive = {node.id for node in self.responsive}

        def found() -> int:
            leader = self.partitions(topic)[partition].leader
            return leader if leader in alive else 0

        return eventually(found, IN_SYNC_TIMEOUT_S, f"{topic}-{partition} has a leader that runs")

    def controller(self) -> int:
        """Wait until there is a running controller, and return it."""
        alive = {node.id for node in self.responsive}

        def found() -> int:
            view = self.view()
            return 0 if view is None or view["controller"] not in alive else int(view["controller"])

        return eventually(found, IN_SYNC_TIMEOUT_S, "there is a controller that runs")

    def coordinator(self, group: str, *, by: int | None = None, among: Collection[int] | None = None) -> int:
        """Wait until a node (`by`) names a coordinator that is one of these nodes (`among`), and return it."""
        allowed = {node.id for node in self.responsive} if among is None else among

        def find() -> int:
            with self.connect(by or self.responsive[0].id) as client:
                answer = client.call(ApiKey.FIND_COORDINATOR, 2, {"key": group, "key_type": 0})
            assert answer.error_code is ErrorCode.none, answer.error_code
            assert answer.node_id in allowed, f"node {answer.node_id} is named"
            return int(answer.node_id)

        return eventually(find, COORDINATOR_TIMEOUT_S, f"group {group} has a coordinator among {allowed}")

    def follower(self, topic: str) -> int:
        """Return a node that leads the fewest of the topic's partitions; if possible, not the controller."""
        leads = Counter(state.leader for state in self.partitions(topic).values())
        controller = self.controller()
        return min((node.id for node in self.responsive), key=lambda node_id: (leads[node_id], node_id == controller))

    def wait_in_sync(self, timeout_s: float = IN_SYNC_TIMEOUT_S) -> None:
        """Wait until every node runs and sees all nodes alive, and all replicas of every partition are in sync."""

        def in_sync() -> bool:
            for node in self:
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
        no_surprises_in({f"node {node_id}: ": self.log_text(node_id) for node_id in self.ids})


def resident_bytes(pid: int | None, which: str = "VmRSS") -> int:
    """Return the resident memory of a process; with `VmHWM` its peak since the start or since `reset_peak`."""
    with open(f"/proc/{pid}/status") as status:
        found = next((int(line.split()[1]) for line in status if line.startswith(f"{which}:")), None)
    assert found is not None, f"no {which} of process {pid}: it has ended"
    return found * 1024


def reset_peak(pid: int | None) -> int:
    """Reset the peak of a process to its current resident memory, and return that."""
    with open(f"/proc/{pid}/clear_refs", "w") as clear:
        clear.write("5")
    return resident_bytes(pid)


def limit_files(pid: int, size_bytes: int | None) -> None:
    """Limit the size of every file of a process; None removes the limit."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if size_bytes is None else size_bytes, hard))


def fill_disk(ballast: Path, leave_bytes: int) -> None:
    """Fill the disk of this file, except for `leave_bytes`."""
    with ballast.open("wb") as file:
        disk = os.statvfs(ballast.parent)
        size = disk.f_bavail * disk.f_frsize - leave_bytes
        if size > 0:
            os.posix_fallocate(file.fileno(), 0, size)


def no_surprises_in(logs: Mapping[str, str]) -> None:
    """Fail if a log, given with a prefix for its lines, has an unexpected exception."""
    errors = Counter(f"{prefix}{error}" for prefix, text in logs.items() for error in _unexpected_errors(text))
    shown = "\n".join(f"{count} x {error}" for error, count in errors.most_common(5))
    assert not errors, f"{errors.total()} unexpected errors in the logs, {len(errors)} different ones:\n{shown}"


def _unexpected_errors(text: str) -> Iterator[str]:
    """Yield what a node logged with a traceback, or printed as one."""
    for line in text.splitlines():
        if '"traceback"' in line:
            try:
                logged = json.loads(line)
            except ValueError:
                yield f"cut short by a full disk: {line[:1500]}"
                continue
            yield f"{logged['event']}: {logged.get('error')}\n{logged['traceback'][-1500:]}"
        elif line.startswith("Traceback"):
            yield line
