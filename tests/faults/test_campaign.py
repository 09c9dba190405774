"""A short campaign with real processes and a new seed: no record is lost, duplicated, reordered or changed.

`make soak` runs it for any length of time, with every fault alone and in mixes (docs/reliability.md).
"""

from __future__ import annotations

import random
import time
from itertools import islice
from pathlib import Path

import pytest
from tests.cluster.support_soak import SoakResults
from tests.faults.support_campaign import Campaign, fresh_seed, schedule
from tests.faults.support_faults import ALONE, CAMPAIGN, HARD, SOFT
from tests.faults.support_injector import campaign_cluster

STEPS = 1
SECONDS_MAX = 20.0


@pytest.mark.timeout(900)
def test_a_short_campaign_loses_no_record(tmp_path: Path) -> None:
    seed = fresh_seed()
    print(f"seed {seed}")
    results = SoakResults("campaign")
    with campaign_cluster(tmp_path / "cluster", seed, print) as injector:
        injector.hold_s = (1.0, 3.0)
        # Only `make soak` has time for the rebalances of transformers.
        Campaign(injector, seed, results, tmp_path, print, transformers=0).run(time.monotonic() + SECONDS_MAX, STEPS)
    assert results.faults.total() >= 1


def test_a_schedule_has_every_fault_alone_and_combines_only_compatible_ones() -> None:
    kinds = (list(HARD), list(SOFT), list(ALONE))
    steps = list(islice(schedule(random.Random(1), *kinds), 2 * len(CAMPAIGN)))
    assert {names[0] for names in steps if len(names) == 1} == CAMPAIGN.keys()
    mixes = [names for names in steps if len(names) > 1]
    assert any(set(names) & HARD.keys() for names in mixes) and any(set(names) & ALONE.keys() for names in mixes)
    for names in mixes:
        assert len(set(names)) == len(names)
        if set(names) & ALONE.keys():
            assert not set(names) & HARD.keys()
    assert steps == list(islice(schedule(random.Random(1), *kinds), 2 * len(CAMPAIGN)))
    assert set(islice(schedule(random.Random(1), *kinds, only=["kill-all"]), 5)) == {("kill-all",)}
