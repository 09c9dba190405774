"""New seeds on all cores for a long time; part of `make soak-counts` only."""

from __future__ import annotations

import os

import pytest
from tests.sim.support_soak import simulate

from chronik.testing.sim.runner import SCENARIOS

SECONDS = float(os.environ.get("CHRONIK_SIM_SOAK_S", "600"))


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_no_seed_leads_to_a_violation(scenario: str) -> None:
    result = simulate(scenario, SECONDS)
    print(result.summary())
    if result.failures:
        pytest.fail("\n\n".join(result.failures), pytrace=False)
