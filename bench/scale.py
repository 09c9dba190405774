"""What the metadata of a large cluster costs: the code of controllers and brokers on an image, with virtual time.

    .venv/bin/python -m bench.scale                       # 60 nodes; 10,000, 30,000 and 100,000 partitions
    .venv/bin/python -m bench.scale --topics-of 10        # topics of 10 partitions instead of 100

Plays what one process computes: commands are encoded, decoded and applied as Raft delivers them, and heartbeats arrive
every 300 ms of virtual time. Network and disks are not played, except in the failover of the controller (bench.quorum).
CPU time is measured for each step; a busy machine disturbs it little. Each size runs in a process of its own, for its
memory. Writes bench/results/scale.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from bench.quorum import NotReached, worst_failover
from chronik.cli.start import settle_garbage_collector
from chronik.metadata.apply import apply
from chronik.metadata.calls import HeartbeatCall
from chronik.metadata.commands import (
    ChangePartition,
    Command,
    CreateCluster,
    CreateTopic,
    RegisterBroker,
    decode_command,
    encode_command,
)
from chronik.metadata.controller import DUE_INTERVAL_MS, Controller
from chronik.metadata.image import DEFAULT_LISTENER, ClusterImage, decode_image, encode_image
from chronik.metadata.placement import place_replicas
from chronik.node.admin.topic_description import AbsentBrokers
from chronik.node.apis.metadata import DescribedTopics
from chronik.wire.api import ApiKey
from chronik.wire.messages import write_response

RESULTS = Path(__file__).parent / "results" / "scale.json"
SIZES = (10_000, 30_000, 100_000)
NODES = 60
NODES_PER_MACHINE = 6
VOTERS = 5
REPLICAS = 3
HEARTBEAT_DUES = 3
"""A heartbeat of each broker arrives every third call of `due`."""
CALM_DUES = 50
"""Without a command for this long, the controller has done what an event required."""
SESSION_MS = 2_000
METADATA_VERSION = 12
Figures = dict[str, float]


class PlayedCluster:
    """One controller, and the image as every node applies it."""

    def __init__(self, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self.image = ClusterImage()
        self.now_ms = 0
        self.controller: Controller | None = None
        self.longest_ms = 0.0
        """The CPU time of the controller's longest decision, without its commands."""
        self.log: list[bytes] = []
        self._incarnations: dict[int, UUID] = {}

    def uuid(self) -> UUID:
        return UUID(int=self._random.getrandbits(128))

    def commit(self, command: Command) -> None:
        """Apply a command as a node receives it: decoded from the log."""
        data = encode_command(command)
        self.log.append(data)
        self.image, _ = apply(self.image, decode_command(data))
        if self.controller is not None:
            self.controller.image_applied(self.image)

    def start(self, nodes: int) -> None:
        self.commit(CreateCluster("scale"))
        for node in range(nodes):
            self._incarnations[node] = self.uuid()
            rack = f"machine-{node // NODES_PER_MACHINE}"
            host = f"10.0.{node // 250}.{node % 250}"
            self.commit(RegisterBroker(node, self._incarnations[node], host, 9092, rack=rack, durability="synced"))

    def create_topics(self, count: int, partitions: int) -> None:
        brokers = self.image.staying_brokers()
        for number in range(count):
            assignments = place_replicas(brokers, partitions, REPLICAS, self._random)
            self.commit(CreateTopic(f"topic-{number:06d}", self.uuid(), assignments))

    def take_over(self) -> None:
        """A new controller begins, and decides for the first time."""
        self.controller = Controller(self.image, self.now_ms)
        self.step()

    def step(self, silent: Collection[int] = ()) -> int:
        """Let one interval pass; return how many commands the controller proposed."""
        assert self.controller is not None
        self.now_ms += DUE_INTERVAL_MS
        if self.now_ms // DUE_INTERVAL_MS % HEARTBEAT_DUES == 0:
            for node in self._incarnations.keys() - set(silent):
                broker = self.image.brokers[node]
                call = HeartbeatCall(node, broker.incarnation, broker.epoch, self.image.version)
                self.controller.heartbeat(call, self.now_ms)
        count = 0
        while True:
            began_s = time.process_time()
            commands = self.controller.due(self.now_ms)
            self.longest_ms = max(self.longest_ms, 1000 * (time.process_time() - began_s))
            for command in commands:
                self.commit(command)
            count += len(commands)
            if not self.controller.is_behind:
                return count

    def step_until_calm(self, silent: Collection[int] = ()) -> int:
        """Return after how many ms of virtual time the last command was committed."""
        began_ms, last_ms, calm = self.now_ms, self.now_ms, 0
        while calm < CALM_DUES:
            if self.step(silent):
                last_ms, calm = self.now_ms, 0
            else:
                calm += 1
        return last_ms - began_ms

    def led_by(self, node: int) -> int:
        return sum(partition.leader == node for topic in self.image.topics.values() for partition in topic.partitions)


def resident_mb() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def measure(partitions: int, topics_of: int, nodes: int) -> Figures:
    """Return the figures of one size. Keys end in their unit."""
    figures: Figures = {}
    settle_garbage_collector()

    @contextmanager
    def cpu(name: str, calls: int = 1) -> Iterator[None]:
        began_s = time.process_time()
        yield
        figures[f"{name}_ms"] = round(1000 * (time.process_time() - began_s) / calls, 4)

    cluster = PlayedCluster()
    cluster.start(nodes)
    before_mb, before = resident_mb(), len(cluster.log)
    with cpu("create_all_cpu"):
        cluster.create_topics(partitions // topics_of, topics_of)
    figures["image_mb"] = round(resident_mb() - before_mb, 1)
    figures["raft_log_mb"] = round(sum(map(len, cluster.log[before:])) / 1e6, 2)
    with cpu("snapshot_encode_cpu"):
        snapshot = encode_image(cluster.image)
    figures["snapshot_mb"] = round(len(snapshot) / 1e6, 2)
    with cpu("snapshot_decode_cpu"):
        decode_image(snapshot)
    with cpu("controller_failover_cpu"):
        cluster.take_over()
    figures["controller_failover_longest_cpu_ms"] = round(cluster.longest_ms, 2)
    cluster.step_until_calm()
    idle = 100
    with cpu("idle_interval_cpu", idle):
        for _ in range(idle):
            cluster.step()
    try:
        figures |= worst_failover(cluster.log, range(VOTERS))
    except NotReached as error:
        print(f"no failover with {partitions:,} partitions: {error}", file=sys.stderr)
    dead = nodes // 2
    figures["leaderships_of_dead_node"] = cluster.led_by(dead)
    cluster.longest_ms = 0.0
    with cpu("dead_node_cpu"):
        figures["dead_node_virtual_ms"] = cluster.step_until_calm([dead])
    figures["dead_node_longest_cpu_ms"] = round(cluster.longest_ms, 2)
    assert cluster.led_by(dead) == 0
    topic = cluster.image.topics["topic-000000"]
    changes = 200
    with cpu("isr_change_cpu", changes):
        for _ in range(changes):
            _change_isr(cluster)
    absent = AbsentBrokers.on(cluster.image, DEFAULT_LISTENER)
    for name, topics, calls in (("all", [*cluster.image.topics.values()], 1), ("one", [topic], 100)):
        with cpu(f"metadata_of_{name}_cpu", calls):
            for _ in range(calls):
                values = DescribedTopics(topics, absent, {})
                brokers = {"brokers": (), "cluster_id": "scale", "controller_id": 0}
                body = write_response(ApiKey.METADATA, METADATA_VERSION, {**brokers, "topics": values})
        figures[f"metadata_of_{name}_kb"] = round(len(body) / 1e3, 1)
    return figures


def _change_isr(cluster: PlayedCluster) -> None:
    """Commit one change of a partition's ISR, and let the controller see it."""
    topic = cluster.image.topics["topic-000000"]
    partition = topic.partitions[0]
    cluster.commit(
        ChangePartition(topic.id, 0, partition.partition_epoch, partition.leader, partition.isr, partition.eligible)
    )
    assert cluster.controller is not None
    cluster.controller.due(cluster.now_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="PARTITIONS")
    parser.add_argument("--topics-of", type=int, default=100, metavar="PARTITIONS")
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)  # the process of one size
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one, options.topics_of, options.nodes)))
        return
    results = []
    for size in options.sizes:
        command = [sys.executable, "-m", "bench.scale", "--one", str(size)]
        command += ["--topics-of", str(options.topics_of), "--nodes", str(options.nodes)]
        figures = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
        results.append({"partitions": size, "topics_of": options.topics_of, "nodes": options.nodes, **figures})
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    shown = {(row["partitions"], row["topics_of"], row["nodes"]) for row in results}
    kept = [row for row in kept if (row["partitions"], row["topics_of"], row["nodes"]) not in shown]
    RESULTS.write_text(json.dumps([*kept, *results], indent=2) + "\n")
    report(results, print)


def report(results: list[dict[str, float]], say: Callable[[str], None]) -> None:
    for name in dict.fromkeys(name for row in results for name in row):
        say(f"{name:34}" + "".join(f"{row[name]:>14,}" if name in row else f"{'-':>14}" for row in results))


if __name__ == "__main__":
    main()
