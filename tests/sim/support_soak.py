"""A long run of the simulator on new seeds; its results are kept with those of the benchmarks."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

from chronik.testing.sim.campaign import Campaign, campaign

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "simulator.json"
SOAK = RESULTS.parent / "soak.json"


def simulate(scenario: str, seconds: float) -> Campaign:
    """Run new seeds on all cores; write their number to simulator.json, and the total of all scenarios to soak.json."""
    result = campaign(scenario, random.randrange(1 << 32), seconds=seconds, jobs=os.cpu_count() or 1)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[scenario] = {
        "seeds": result.seeds,
        "first_seed": result.first_seed,
        "violations": len(result.failures),
        "events": result.events,
        "wall_s": round(result.wall_s, 1),
        "records_acknowledged": result.acknowledged,
        "faults": result.faults,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(known, indent=2) + "\n")
    soak = json.loads(SOAK.read_text()) if SOAK.exists() else {}
    soak["seeds"] = sum(part["seeds"] for part in known.values())
    SOAK.write_text(json.dumps(soak, indent=2) + "\n")
    return result
