"""Records flow with acks=all while a node dies, hangs or is cut off: none is lost, duplicated, reordered or changed.

Two idempotent producers, a consumer by assignment and a group of two run through each fault. Their history passes the
checker, end offsets and watermarks never go backwards, and afterwards all replicas are identical.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.cluster.conftest import StartNodes
from tests.cluster.support_offsets import OffsetWatch
from tests.cluster.support_workload import PROGRESS, Workload, all_replicas_agree
from tests.faults.support_faults import NEEDS_LINKS, SINGLE, inject

PAUSE_S = 4.0
"""Twice the session timeout: the other nodes have long failed over when the node comes back."""
PARTITIONS = 2
IN_MAKE_TEST = ("kill-leader", "kill-all", "pause-leader", "cut-off-leader", "rolling-restart")
"""One of each kind; `make soak-counts` runs all, and `make soak` runs them in its campaign."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=[] if fault in IN_MAKE_TEST else pytest.mark.soak) for fault in SINGLE]
)
def test_no_record_is_lost_duplicated_or_reordered_during(fault: str, start_nodes: StartNodes, tmp_path: Path) -> None:
    nodes = start_nodes(cuttable=fault in NEEDS_LINKS)
    topic = nodes.new_topic(PARTITIONS)
    chance = random.Random(fault)
    with OffsetWatch(nodes, topic, range(PARTITIONS)), Workload(nodes, topic, PARTITIONS) as workload:
        workload.proceed(PROGRESS + chance.randrange(PROGRESS))
        inject(fault, nodes, workload, chance, PAUSE_S)
        workload.proceed(PROGRESS)
        nodes.wait_in_sync()
        workload.finish(tmp_path / "history.jsonl")
    all_replicas_agree(nodes, workload.recorder.acknowledged())
    nodes.no_surprises()
