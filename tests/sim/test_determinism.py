"""The same seed leads to the same run, in any process and with any hash seed of Python."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from chronik.testing.sim.runner import SCENARIOS

PROCESSES = 3
SEEDS = 2
EVENTS = 2_500
PROGRAM = f"""
import sys
from chronik.testing.sim import run_seed
ballast = [object() for _ in range(int(sys.argv[1]))]
for scenario in sys.argv[2:]:
    for seed in range({SEEDS}):
        report = run_seed(seed, scenario, events_max={EVENTS})
        print(scenario, seed, report.trace_hash, report.events, report.counts, report.violation)
"""


@pytest.fixture(scope="module")
def outputs() -> list[list[str]]:
    """Return what each process reports of all scenarios."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(number * 10_007), *sorted(SCENARIOS)],
            env={**os.environ, "PYTHONHASHSEED": str(number * 1_000)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(PROCESSES)
    ]
    printed = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0] * PROCESSES
    return [text.splitlines() for text in printed]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_a_seed_replays_the_same_trace_whatever_the_hash_seed_and_heap_layout(
    scenario: str, outputs: list[list[str]]
) -> None:
    of_it = ["\n".join(line for line in lines if line.startswith(f"{scenario} ")) for lines in outputs]
    assert len(of_it[0].splitlines()) == SEEDS
    assert len(set(of_it)) == 1, of_it
