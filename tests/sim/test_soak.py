"""Fresh seeds on all cores for a long time; only in `make soak`. How many there were is kept beside the benchmarks."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from chronik.testing.sim.campaign import campaign
from chronik.testing.sim.runner import SCENARIOS

SECONDS = float(os.environ.get("CHRONIK_SIM_SOAK_S", "600"))
RESULTS = Path(__file__).parents[2] / "bench" / "results" / "simulator.json"
SOAK = RESULTS.parent / "soak.json"


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_no_seed_leads_to_a_violation(scenario: str) -> None:
    result = campaign(scenario, random.randrange(1 << 32), seconds=SECONDS, jobs=os.cpu_count() or 1)
    print(result.summary())
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
    if result.failures:
        pytest.fail("\n\n".join(result.failures), pytrace=False)
