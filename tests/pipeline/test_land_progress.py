"""A landing's progress report, and that only one landing runs at a time."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest

from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land.claim import claim
from chronik.pipeline.land.progress import ProgressAccount, offsets_of
from chronik.pipeline.source.planner import Position


def told(second: int, rows: int, ends: dict[int, int], latest: dict[int, int]) -> dict[str, Any]:
    def position(offsets: dict[int, int]) -> dict[str, Any]:
        return Position({("t", partition): offset for partition, offset in offsets.items()}).to_json()

    return {
        "timestamp": f"2026-01-01T00:00:{second:02d}.000Z",
        "numInputRows": rows,
        "durationMs": {"triggerExecution": 1000} if rows else {},
        "sources": [{"endOffset": position(ends), "latestOffset": position(latest)}],
    }


def test_time_to_catch_up_is_the_lag_over_the_net_rate() -> None:
    account = ProgressAccount()
    first = account.take(told(0, 100, {0: 100, 1: 0}, {0: 500, 1: 100}))
    assert first is not None
    assert (first.rows_per_s, dict(first.lag), first.catch_up_s) == (100, {0: 400, 1: 100}, 5)
    second = account.take(told(1, 100, {0: 200, 1: 0}, {0: 550, 1: 100}))
    assert second is not None and second.catch_up_s == 9  # 450 waiting, 100/s minus 50/s
    third = account.take(told(2, 100, {0: 300, 1: 0}, {0: 800, 1: 100}))
    assert third is not None and third.catch_up_s is None
    idle = account.take(told(9, 0, {0: 800, 1: 100}, {0: 800, 1: 100}))
    assert idle is not None and (idle.catch_up_s, idle.rows_per_s) == (0, 100)


def test_offsets_of_both_sources_are_parsed() -> None:
    assert offsets_of('{"t": {"0": 5, "1": 7}}') == {("t", 0): 5, ("t", 1): 7}
    assert offsets_of(None) == offsets_of("x") == offsets_of('{"version": 9}') == {}


def test_a_checkpoint_folder_allows_one_landing_at_a_time(tmp_path: Path) -> None:
    folder = str(tmp_path / "c")
    with claim(folder), pytest.raises(PipelineError, match="another chronik pipeline land"), claim(folder):
        pass
    with claim(folder):
        pass


def test_a_landing_waits_for_the_jvm_of_a_killed_driver_to_exit(tmp_path: Path) -> None:
    jvm = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()", "java"], stdin=subprocess.PIPE)
    driver = (
        f"import os\nfrom chronik.pipeline.land.claim import claim\nwith claim({str(tmp_path)!r}) as record_jvm:\n"
        f"    record_jvm({jvm.pid})\n    os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", driver], check=False)

    is_killed = Event()

    def kill() -> None:
        is_killed.set()
        jvm.kill()

    Timer(0.3, kill).start()
    with claim(str(tmp_path)):
        assert is_killed.is_set()
        # It has exited, but may not be ready to be waited for.
        assert jvm.wait(10) == -signal.SIGKILL
    assert jvm.stdin is not None
    jvm.stdin.close()
