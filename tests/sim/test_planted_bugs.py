"""The simulator finds each planted bug within the number of seeds that `planted` states: its oracle can fail."""

from __future__ import annotations

import pytest
from tests.sim.planted import PLANTED, Planted
from tests.sim.planted_cluster import PLANTED_IN_CLUSTER
from tests.sim.planted_commit_log import PLANTED_IN_COMMIT_LOG
from tests.sim.planted_consumer_groups import GROUP_SEEDS_MAX, PINNED_IN_CONSUMER_GROUPS, PLANTED_IN_CONSUMER_GROUPS
from tests.sim.planted_disks import PLANTED_ON_BAD_DISKS, Found
from tests.sim.planted_rot import PLANTED_IN_ROT
from tests.sim.planted_share_groups import PLANTED_IN_SHARE_GROUPS, SHARE_GROUP_SEEDS_MAX, locks_never_end
from tests.sim.planted_transactions import PLANTED_IN_TRANSACTIONS, SEEDS_MAX

from chronik.testing.sim import Report, run_seed
from chronik.testing.sim.cluster_scenarios import ConsumerGroups, ThreeNodes
from chronik.testing.sim.scenario import SingleNode


def first_violation(plant: Planted, scenario: str, seeds: range) -> Report | None:
    for seed in seeds:
        with plant():
            report = run_seed(seed, scenario)
        if report.violation is not None:
            return report
    return None


def check_found(plant: Planted, scenario: str, seeds: range) -> Report:
    report = first_violation(plant, scenario, seeds)
    assert report is not None, f"not found within {len(seeds)} seeds from {seeds.start}"
    return report


def check_found_and_replayed(plant: Planted, scenario: str, seeds: range) -> None:
    report = check_found(plant, scenario, seeds)
    with plant():
        again = run_seed(report.seed, scenario)
    assert (again.violation, again.trace_hash) == (report.violation, report.trace_hash)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_simulator_finds_and_replays_a_planted_bug(plant: Planted) -> None:
    check_found_and_replayed(plant, SingleNode.name, range(PLANTED[plant]))


@pytest.mark.parametrize("plant", PLANTED_IN_CLUSTER, ids=lambda plant: plant.__name__)
def test_simulator_finds_a_planted_bug_in_a_cluster(plant: Planted) -> None:
    first, seeds = PLANTED_IN_CLUSTER[plant]
    check_found(plant, ThreeNodes.name, range(first, first + seeds))


@pytest.mark.parametrize("plant", PLANTED_IN_CONSUMER_GROUPS, ids=lambda plant: plant.__name__)
def test_simulator_finds_a_planted_bug_in_consumer_groups(plant: Planted) -> None:
    check_found(plant, ConsumerGroups.name, range(PLANTED_IN_CONSUMER_GROUPS[plant]))


PINNED_SEEDS = 12
"""Seeds that are tried from the pinned one on: each change of the nodes' code changes what a seed does."""


PINNED: dict[Planted, Found] = {
    **PLANTED_ON_BAD_DISKS,
    **PLANTED_IN_ROT,
    **PLANTED_IN_TRANSACTIONS,
    **PLANTED_IN_COMMIT_LOG,
    **PINNED_IN_CONSUMER_GROUPS,
    **PLANTED_IN_SHARE_GROUPS,
}
SLOW = {locks_never_end}
"""Found only after the time within which a group settles: only `make soak` runs it. tests/shares has a test for it."""


def pinned_seeds(plant: Planted) -> tuple[str, range]:
    where = PINNED[plant]
    return where.scenario, range(where.seed, where.seed + PINNED_SEEDS)


@pytest.mark.parametrize(
    "plant",
    [pytest.param(plant, marks=pytest.mark.soak if plant in SLOW else []) for plant in PINNED],
    ids=lambda plant: plant.__name__,
)
def test_simulator_finds_a_planted_bug_near_its_pinned_seed(plant: Planted) -> None:
    check_found(plant, *pinned_seeds(plant))


@pytest.mark.soak
@pytest.mark.parametrize("plant", PINNED, ids=lambda plant: plant.__name__)
def test_simulator_reports_a_violation_only_with_the_planted_bug(plant: Planted) -> None:
    scenario, seeds = pinned_seeds(plant)
    report = check_found(plant, scenario, seeds)
    assert run_seed(report.seed, scenario).violation is None


SOUGHT = {**SEEDS_MAX, **GROUP_SEEDS_MAX, **SHARE_GROUP_SEEDS_MAX}
SCENARIOS = {plant: where.scenario for plant, where in {**PINNED, **PLANTED_IN_TRANSACTIONS}.items()}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("plant", SOUGHT, ids=lambda plant: plant.__name__)
def test_simulator_finds_a_bug_within_its_number_of_seeds(plant: Planted) -> None:
    check_found_and_replayed(plant, SCENARIOS[plant], range(SOUGHT[plant]))
