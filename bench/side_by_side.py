"""Chronik and Apache Kafka in turn: each server is started, measured and ended before the other one starts.

A repetition runs each side once (a `Life`). The order alternates between repetitions, so that a machine that slowly
becomes faster or slower favours neither side. Within a run of the servers all requested parts run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench import (
    chronik_server,
    groups,
    java_producer,
    kafka_server,
    restarts,
    security,
    transactions,
    workloads,
)
from bench.clients import NotMeasured, Topic, drive, drive_single_requests
from bench.lives import living
from bench.processes import machine_time
from bench.samples import Samples
from bench.servers import Durability, ServerEnded, Setup, Side
from bench.workloads import Life, Run, Scale
from chronik.cli.errors import CliError
from chronik.client.errors import ClientError
from chronik.local.errors import LocalClusterError
from chronik.wire.errors import KafkaError

HEAPS_MB = (64, 80, 96, 128, 160, 192, 256, 384, 512, 768)
FAILURES = (NotMeasured, ServerEnded, CliError, LocalClusterError, ClientError, KafkaError, OSError)


@dataclass(frozen=True, slots=True)
class Part:
    """One line of the table: what runs, on which setups, and whether Kafka with its smallest heap is compared, too."""

    name: str
    run: Run
    nodes: tuple[int, ...]
    durabilities: tuple[Durability, ...] = ("replicated",)
    is_beside_small_heap: bool = False
    is_cold: bool = False
    """Whether it needs a server that has not carried load yet: such parts run before the warm-up."""

    def fits(self, setup: Setup) -> bool:
        return setup.nodes in self.nodes and setup.durability in self.durabilities


BOTH: tuple[Durability, ...] = ("replicated", "synced")
AS_SHIPPED: tuple[Durability, ...] = ("replicated", "default")
"""Against Kafka's default, which is the same on both sides: with its durability, and with Chronik's own default."""
# In the order in which they run within one life.
PARTS = (
    Part("start", workloads.start, (1, 3), is_beside_small_heap=True, is_cold=True),
    Part("memory", workloads.idle_memory, (1, 3), is_beside_small_heap=True, is_cold=True),
    Part("produce", workloads.produce, (1, 3), BOTH, is_beside_small_heap=True),
    Part("consume", workloads.consume, (1,), is_beside_small_heap=True),
    Part("latency", workloads.latency, (3,), BOTH),
    Part("keyed", workloads.keyed, (1, 3), AS_SHIPPED),
    Part("java", java_producer.produce, (1, 3), AS_SHIPPED),
    Part("requests", workloads.requests, (1,), BOTH, is_beside_small_heap=True),
    Part("requests", workloads.replicated_requests, (3,)),
    Part("transactions", transactions.produce, (3,), BOTH),
    Part("transactions", transactions.commit_latency, (3,), BOTH),
    Part("transactions", transactions.read_committed, (1,)),
    Part("memory", workloads.loaded_memory, (1, 3), is_beside_small_heap=True),
    Part("failover", workloads.failover, (3,)),
)
GROWTH_PARTS = ("partitions", "restart", "sizes", "connections", "transactional-ids")
SECURITY_PARTS = ("tls", "tls-connections", "acls")
GROUP_PARTS = {
    "groups": (groups.lost_member, groups.heartbeats, groups.classic_leave),
    "share-groups": (groups.shared,),
}
NAMES = (*dict.fromkeys(part.name for part in PARTS), *GROWTH_PARTS, *SECURITY_PARTS, *GROUP_PARTS)


@dataclass(frozen=True, slots=True)
class Plan:
    """Lives of the same kind: what is started, on which sides, how often, what runs before and after the warm-up."""

    title: str
    setup: Setup
    sides: tuple[Side, ...]
    repetitions: int
    cold: tuple[Run, ...] = ()
    warm: tuple[Run, ...] = ()

    def lives(self) -> Iterator[Side]:
        """Yield every side once for each repetition, in alternating order."""
        for repetition in range(self.repetitions):
            yield from self.sides if repetition % 2 == 0 else reversed(self.sides)


def setup_plans(names: Sequence[str], setups: Sequence[Setup], repetitions: int, small: Side | None) -> Iterator[Plan]:
    """Plan the lives of the table's parts. The smallest heap gets its own lives only if a part is compared with it."""
    for setup in setups:
        parts = [part for part in PARTS if part.name in names and part.fits(setup)]
        if not parts:
            continue
        beside = [part for part in parts if part.is_beside_small_heap]
        groups: list[tuple[list[Part], tuple[Side, ...]]] = [(parts, (chronik_server.SIDE, kafka_server.SIDE))]
        if small is not None and beside and setup == Setup(1, "replicated"):
            groups.append((beside, (small,)))
        for group, sides in groups:
            cold = tuple(part.run for part in group if part.is_cold)
            warm = tuple(part.run for part in group if not part.is_cold)
            yield Plan(str(setup), setup, sides, repetitions, cold, warm)


def growth_plans(names: Sequence[str], repetitions: int, files_max: int, say: Callable[[str], None]) -> Iterator[Plan]:
    """Plan the lives of the growth series. A point that this machine has no room for is skipped with the reason."""
    setup = Setup(1, "replicated")
    sides = (chronik_server.SIDE, kafka_server.SIDE)
    if "sizes" in names:
        yield Plan("record sizes", setup, sides, repetitions, warm=(workloads.record_sizes,))
    if "connections" in names:
        yield Plan("connections", setup, sides, repetitions, warm=(workloads.connections,))
    if "transactional-ids" in names:
        run = transactions.many_ids(10_000)
        yield Plan("10,000 transactional ids", Setup(3, "replicated"), sides, repetitions, warm=(run,))
    if "partitions" in names:
        for count in (10, 100, 1_000, 5_000):
            if reason := restarts.no_files_for(count, files_max):
                say(f"skipped: {count:,} partitions: {reason}")
                continue
            yield Plan(f"{count:,} partitions", setup, sides, repetitions, (restarts.many_partitions(count),))
    if "restart" in names:
        for gigabytes in (1, 3, 10):
            if reason := restarts.no_room_for(gigabytes * restarts.GIGABYTE):
                say(f"skipped: restart with {gigabytes} GB: {reason}")
                continue
            yield Plan(f"{gigabytes} GB", setup, sides, repetitions, (restarts.large_log(gigabytes),))


def security_plans(
    names: Sequence[str], nodes: int | None, repetitions: int, files_max: int, say: Callable[[str], None]
) -> Iterator[Plan]:
    """Plan the runs with TLS, SASL and ACLs. `nodes` limits `tls` to setups with this many nodes."""
    sides = (chronik_server.SIDE, kafka_server.SIDE)
    if "tls" in names:
        for count in (1, 3):
            if nodes in (None, count):
                setup = Setup(count, "replicated", "SASL_SSL", has_authorizer=True)
                yield Plan(str(setup), setup, sides, repetitions, warm=(security.produce, security.consume))
    if "tls-connections" in names:
        setup = Setup(1, "replicated", "SASL_SSL", has_authorizer=True)
        if reason := restarts.no_files_for(security.IDLE_CONNECTIONS, files_max, files_each=1):
            say(f"skipped: {security.IDLE_CONNECTIONS:,} idle TLS connections: {reason}")
            cold: tuple[Run, ...] = ()
        else:
            cold = (security.idle_connections,)
        yield Plan("TLS connections", setup, sides, repetitions, cold, (security.new_connections,))
    if "acls" in names:
        setup = Setup(1, "replicated", "SASL_PLAINTEXT")
        yield Plan(f"{security.ACLS:,} ACLs", setup, sides, repetitions, warm=(security.acl_cost,))


def group_plans(names: Sequence[str], repetitions: int, files_max: int, say: Callable[[str], None]) -> Iterator[Plan]:
    """Plan the runs of groups: on one node, so that all members have the same coordinator."""
    runs = [run for name, several in GROUP_PARTS.items() if name in names for run in several]
    if groups.heartbeats in runs and (
        reason := restarts.no_files_for(groups.HEARTBEATING_MEMBERS, files_max, files_each=1)
    ):
        say(f"skipped: {groups.HEARTBEATING_MEMBERS:,} members: {reason}")
        runs.remove(groups.heartbeats)
    if runs:
        setup = Setup(1, "replicated", allows_short_sessions=True)
        yield Plan("groups", setup, (chronik_server.SIDE, kafka_server.SIDE), repetitions, warm=tuple(runs))


class Comparison:
    """Runs plans and keeps their samples. A life that fails has no figures, and is reported at the end."""

    def __init__(self, samples: Samples, scale: Scale, say: Callable[[str], None]) -> None:
        self._samples = samples
        self._scale = scale
        self._say = say
        self.failures: list[str] = []

    def run(self, plans: Sequence[Plan]) -> None:
        total = sum(plan.repetitions * len(plan.sides) for plan in plans)
        self._rehearse()
        started_s, done = time.monotonic(), 0
        for plan in plans:
            for side in plan.lives():
                self._say(f"-- {bar(done, total, time.monotonic() - started_s)} {plan.title}: {side.name}")
                try:
                    self._live(plan, side)
                except FAILURES as error:
                    self.failures.append(f"{plan.title}: {side.name}: {error}")
                    self._say(f"FAILED  {self.failures[-1]}")
                # After each life: an interrupted run loses one life, not an hour.
                self._samples.save()
                done += 1

    def _rehearse(self) -> None:
        """Run each side once without measuring, so that jars and modules are in the page cache and clients imported."""
        for side in (chronik_server.SIDE, kafka_server.SIDE):
            with living(side, Setup(), self._scale):
                pass

    def _live(self, plan: Plan, side: Side) -> None:
        before = machine_time()
        with living(side, plan.setup, self._scale) as life:
            self._measure(plan.cold, life, side)
            if plan.warm:
                workloads.warm_up(life)
            self._measure(plan.warm, life, side)
        self._say(f"   of the processors' time the host took {machine_time().stolen_share_since(before):.0%}")

    def _measure(self, runs: Sequence[Run], life: Life, side: Side) -> None:
        for run in runs:
            for figure in run(life):
                self._samples.add(side.name, figure)
                self._say(f"   {figure.workload}, {figure.metric}: {figure.value:,.3f} {figure.unit}")


def smallest_heap_mb(say: Callable[[str], None]) -> int:
    """Return the smallest heap with which one broker starts and carries each kind of load."""
    for heap_mb in HEAPS_MB:
        try:
            with living(kafka_server.with_heap(heap_mb), Setup(), Scale()) as life, Topic(life.server, 4) as topic:
                drive_single_requests(topic, 10, 5, 2.0)
                drive(topic, "produce", 200_000, 1000)
                drive(topic, "consume", 200_000, 1000, clients=4)
                return heap_mb
        except FAILURES as error:
            say(f"   a heap of {heap_mb} MB is too small for Apache Kafka: {str(error).strip().splitlines()[-1]}")
    raise NotMeasured(f"Apache Kafka carried no load with a heap of up to {HEAPS_MB[-1]} MB")


def bar(done: int, total: int, passed_s: float, width: int = 20) -> str:
    """Show the progress, and the estimated time left."""
    filled = width * done // max(1, total)
    left = f", about {passed_s * (total - done) / done / 60:.0f} min left" if done else ""
    return f"[{'#' * filled}{'.' * (width - filled)}] {done} of {total}, {passed_s / 60:.1f} min{left}:"
