"""A short campaign with real processes and faults from a new seed: no record is lost, duplicated, reordered or changed.

`make soak` runs it for any length of time, with every fault alone and in mixes (docs/reliability.md).
"""

from __future__ import annotations

import random
import time
from itertools import islice
from pathlib import Path

import pytest
from tests.cluster.support_soak import SoakResults
from tests.faults.support_acts import ACTS, ALONE, HARD, SOFT
from tests.faults.support_campaign import Campaign, fresh_seed
from tests.faults.support_programme import programme
from tests.faults.support_stage import Stage

ACTS_PLAYED = 3
SECONDS_MAX = 40.0


@pytest.mark.timeout(300)
def test_a_short_campaign_of_single_and_combined_faults_loses_no_record(tmp_path: Path) -> None:
    seed = fresh_seed()
    print(f"seed {seed}")
    results = SoakResults("campaign")
    with Stage(tmp_path / "cluster", seed) as stage:
        stage.hold_s = (1.0, 3.0)
        Campaign(stage, results, tmp_path, print).run(time.monotonic() + SECONDS_MAX, ACTS_PLAYED)
    assert results.faults.total() >= 1


def test_a_programme_plays_every_act_alone_and_combines_only_compatible_acts() -> None:
    kinds = (list(HARD), list(SOFT), list(ALONE))
    played = list(islice(programme(random.Random(1), *kinds), 2 * len(ACTS)))
    assert {names[0] for names in played if len(names) == 1} == ACTS.keys()
    mixes = [names for names in played if len(names) > 1]
    assert any(set(names) & HARD.keys() for names in mixes) and any(set(names) & ALONE.keys() for names in mixes)
    for names in mixes:
        assert len(set(names)) == len(names)
        if set(names) & ALONE.keys():
            assert not set(names) & HARD.keys()
    assert played == list(islice(programme(random.Random(1), *kinds), 2 * len(ACTS)))
    assert set(islice(programme(random.Random(1), *kinds, only=["kill-all"]), 5)) == {("kill-all",)}
