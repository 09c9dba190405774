"""Run one seed: the same seed and scenario always produce the same report."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter

from chronik.testing.sim.aimed_scenarios import (
    DeposedLeaders,
    LateCommits,
    LostCommitLogs,
    MovingShareLeaders,
    OldStores,
    SteppedJobs,
)
from chronik.testing.sim.cluster_scenarios import BadDisks, ConsumerGroups, FiveNodes, ShareGroups, ThreeNodes
from chronik.testing.sim.faults import crash_points
from chronik.testing.sim.host import release
from chronik.testing.sim.scenario import Scenario, SingleNode
from chronik.testing.sim.transaction_scenario import SeveredCoordinators, Transactions
from chronik.testing.sim.tripwires import tripwires
from chronik.testing.sim.world import World

SCENARIOS: Mapping[str, type[Scenario]] = {
    scenario.name: scenario
    for scenario in (
        SingleNode,
        ThreeNodes,
        BadDisks,
        FiveNodes,
        Transactions,
        ConsumerGroups,
        ShareGroups,
        SeveredCoordinators,
        MovingShareLeaders,
        DeposedLeaders,
        OldStores,
        LateCommits,
        LostCommitLogs,
        SteppedJobs,
    )
}
DEFAULT_SCENARIO = SingleNode.name


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a run."""

    seed: int
    scenario: str
    violation: str | None
    trace_hash: str
    events: int
    virtual_s: float
    wall_s: float = field(compare=False)
    counts: dict[str, int]
    faults: dict[str, int]
    notes: list[str]
    log_lines: list[str]

    def summary(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        faults = ", ".join(f"{name} {count}" for name, count in self.faults.items()) or "none"
        return (
            f"{self.scenario} seed {self.seed}: {'ok' if self.violation is None else 'VIOLATION'}; "
            f"{self.virtual_s:.1f} s in {self.wall_s:.2f} s, {self.events} events; {counts}; "
            f"faults: {faults}; trace {self.trace_hash}"
        )

    def failure(self) -> str:
        """Return everything that helps to understand a violation, and the command that replays this run."""
        replay = f"replay: python -m chronik.testing.sim --scenario {self.scenario} --seed {self.seed}"
        happened = ["what happened:", *self.notes[-60:], "the nodes' logs:", *self.log_lines[-40:]]
        return "\n".join([self.summary(), f"violation: {self.violation}", *happened, replay])


def run_seed(
    seed: int,
    scenario: str = DEFAULT_SCENARIO,
    *,
    events_max: int | None = None,
    print_note: Callable[[str], None] | None = None,
) -> Report:
    """Run a scenario from a seed. The report holds any violation; only faults of the simulator itself are raised."""
    world = World(seed)
    world.print_note, world.events_max = print_note, events_max
    # The garbage collector runs finalizers at times that do not depend on the seed.
    was_enabled = gc.isenabled()
    gc.disable()
    started_s = perf_counter()
    try:
        with tripwires(world), crash_points(world), SCENARIOS[scenario].conditions(world):
            played = SCENARIOS[scenario](world)
            played.run()
        report = Report(
            seed,
            scenario,
            world.violation,
            world.trace_hash,
            world.events,
            world.now,
            perf_counter() - started_s,
            played.workload.counts() | {"starts": sum(node.starts for node in played.nodes)},
            played.nemesis.counts,
            list(world.notes),
            [line for node in played.nodes for line in node.log_lines],
        )
        release(played.hosts)
    finally:
        if was_enabled:
            gc.enable()
    return report
