"""The same seed leads to the same run, in any process and with any hash seed of Python."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from chronik.testing.sim.runner import SCENARIOS

PROCESSES = 4
SEEDS = 2
EVENTS = 12_000
PROGRAM = f"""
import sys
from chronik.testing.sim import run_seed
ballast = [object() for _ in range(int(sys.argv[1]))]
for seed in range({SEEDS}):
    report = run_seed(seed, sys.argv[2], events_max={EVENTS})
    print(seed, report.trace_hash, report.events, report.counts, report.violation)
"""


@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_a_seed_replays_the_same_trace_whatever_the_hash_seed_and_heap_layout(scenario: str) -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(number * 10_007), scenario],
            env={**os.environ, "PYTHONHASHSEED": str(number * 1_000)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(PROCESSES)
    ]
    outputs = [process.communicate(timeout=100)[0] for process in running]
    assert [process.returncode for process in running] == [0] * PROCESSES
    assert len(outputs[0].splitlines()) == SEEDS
    assert len(set(outputs)) == 1, outputs
