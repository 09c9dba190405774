"""Every scenario keeps its guarantees: no acknowledged or visible record is lost, whatever fails.

The seeds of `KNOWN` are always the same; new ones run beside them, with the seed in the test's name. They are derived
from the product's source: every change of the source yields new seeds, and every test of the same source uses the same
ones. So a failure on another machine is reproduced here. Random seeds run in `make soak`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

import chronik
from chronik.testing.sim import Report, run_seed
from chronik.testing.sim.aimed_scenarios import SteppedJobs
from chronik.testing.sim.cluster_scenarios import BadDisks, ConsumerGroups, FiveNodes, ShareGroups, ThreeNodes
from chronik.testing.sim.scenario import SingleNode
from chronik.testing.sim.transaction_scenario import Transactions

SOURCE = Path(chronik.__file__).parent
KNOWN = {
    SingleNode.name: range(8),
    ThreeNodes.name: range(5, 9),
    BadDisks.name: range(5),
    FiveNodes.name: range(4),
    Transactions.name: range(4),
    ConsumerGroups.name: range(4),
    ShareGroups.name: range(27, 31),
    SteppedJobs.name: range(4),
}
FRESH = {
    SingleNode.name: 10,
    ThreeNodes.name: 4,
    BadDisks.name: 4,
    FiveNodes.name: 4,
    Transactions.name: 4,
    ConsumerGroups.name: 4,
    ShareGroups.name: 4,
    SteppedJobs.name: 4,
}
KNOWN_IN_MAKE_TEST = {SingleNode.name: 4}
"""How many of the known seeds run in `make test`, if not one. Seeds of one node are cheap."""
FRESH_IN_MAKE_TEST = dict.fromkeys(FRESH, 1) | {SingleNode.name: 4}


def fresh_seeds(scenario: str, count: int) -> range:
    content = hashlib.blake2b(scenario.encode(), digest_size=4)
    for path in sorted(SOURCE.rglob("*.py")):
        content.update(path.read_bytes())
    first = int.from_bytes(content.digest(), "big")
    return range(first, first + count)


def cases(seeds: Mapping[str, range], in_make_test: Mapping[str, int]) -> list[ParameterSet]:
    """Return all seeds of all scenarios; those after the first few only run in `make soak-counts`."""
    return [
        pytest.param(name, seed, marks=[] if number < in_make_test.get(name, 1) else pytest.mark.soak)
        for name, some in seeds.items()
        for number, seed in enumerate(some)
    ]


def check(report: Report) -> None:
    if report.violation is not None:
        pytest.fail(report.failure(), pytrace=False)


@pytest.mark.parametrize(("scenario", "seed"), cases(KNOWN, KNOWN_IN_MAKE_TEST))
def test_nothing_acknowledged_is_lost(scenario: str, seed: int) -> None:
    report = run_seed(seed, scenario)
    check(report)
    assert report.counts["acknowledged"] > 0 and report.counts["read"] > 0


@pytest.mark.parametrize(
    ("scenario", "seed"), cases({name: fresh_seeds(name, FRESH[name]) for name in FRESH}, FRESH_IN_MAKE_TEST)
)
def test_nothing_acknowledged_is_lost_with_fresh_seeds(scenario: str, seed: int) -> None:
    check(run_seed(seed, scenario))


def test_a_run_stops_after_the_maximum_number_of_events() -> None:
    report = run_seed(1, events_max=2000)
    assert report.events == 2000 and report.violation is None
