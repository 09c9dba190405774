"""`chronik pipeline land` on a terminal: it shows its progress, and Ctrl-C ends it with an intact table."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.run_chronik import Outcome
from tests.support import topics
from tests.support.eventually import eventually
from tests.support.landing import landed
from tests.support.node import Node
from tests.support.terminal import CTRL_C, Terminal
from tests.support.topics import numbered

from chronik.pipeline.session import java_fault

CHRONIK = Path(sys.executable).with_name("chronik")
RUN_S_MAX = 180.0
NAME = "land-terminal"
INTERRUPTED = 130

pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.skipif(java_fault() is not None, reason=str(java_fault())),
]


def is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_land_shows_its_rate_and_lag_and_ctrl_c_leaves_an_intact_table(
    shared_node: Node, tmp_path: Path, command: Callable[..., Outcome]
) -> None:
    at = shared_node.bootstrap
    topics.create(at, NAME, 2)
    topics.append(at, NAME, 0, numbered(600))
    topics.append(at, NAME, 1, numbered(300))
    land = ("pipeline", "land", NAME, "--to", str(tmp_path), "-b", at)
    spark = ("--master", "local[2]", "--conf", "spark.chronik.maxOffsetsPerTrigger=300")
    with Terminal([str(CHRONIK), *land, *spark]) as terminal:
        # A row during the run: the lag, in total and by partition, and the time until it has caught up.
        behind = rf"{NAME} +[36]00 +[\d,]+ +(600 +\d+ (s|min) +0: 400, 1: 200|300 +\d+ (s|min) +0: 200, 1: 100)"
        eventually(lambda: re.search(behind, terminal.text), RUN_S_MAX, "a row with the lag")
        assert re.search(r"topic +rows +rows/s +lag +caught up in +lag by partition", terminal.text)
        eventually(lambda: re.search(rf"{NAME} +900 +[\d,]+ +0 +0 s +0: 0, 1: 0", terminal.text), RUN_S_MAX, "the end")
        topics.append(at, NAME, 0, numbered(3000))
        eventually(lambda: re.search(rf"{NAME} +\d,\d00", terminal.text), RUN_S_MAX, "a micro-batch of the new ones")
        terminal.press(CTRL_C)
        assert terminal.process.wait(RUN_S_MAX) == INTERRUPTED, terminal.text[-2000:]
        eventually(lambda: is_gone(terminal.process.pid), RUN_S_MAX, "Spark's processes are gone")
        text = terminal.text
    assert re.search(rf"chronik: [\d,]+ rows of {NAME} landed in .* \([\d,]+/s\)\s*$", text), text[-2000:]
    assert "Traceback" not in text
    assert "Exception" not in text
    rows = landed(tmp_path / NAME)
    first = [offset for partition, offset in rows if partition == 0]
    assert first == list(range(len(first)))
    assert rows[len(first) :] == [(1, offset) for offset in range(300)]
    assert command(*land, "--once").code == 0
    assert landed(tmp_path / NAME) == [(0, offset) for offset in range(3600)] + [(1, offset) for offset in range(300)]
