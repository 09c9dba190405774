"""`chronik demo` from start to end."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Self

import pytest
from tests.cli.run_chronik import CHRONIK, chronik

from chronik.cli import app, demo, demo_pipeline
from chronik.local.cluster import free_port
from chronik.local.errors import LocalClusterError
from chronik.local.temporary_cluster import TemporaryCluster


@pytest.mark.timeout(420)
def test_demo_passes_and_leaves_only_its_report(spark_python: None, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    report = tmp_path / "report.html"
    told = subprocess.run(
        [str(CHRONIK), "demo", "--report", str(report)],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert "3 nodes ready" in told.stdout
    assert "PASS: 100 %" in told.stdout
    assert "produced, acknowledged, read: 20,000, 20,000, 20,000" in told.stdout
    assert "missing, duplicated, out of order: 0, 0, 0" in told.stdout
    assert "all replicas in sync" in told.stdout
    assert "longest gap without an acknowledgement" in told.stdout
    assert "node 1 killed" in told.stdout or "node 2 killed" in told.stdout or "node 3 killed" in told.stdout
    page = report.read_text()
    assert "A leader killed in the middle of a stream" in page
    has_spark = "SKIPPED, Spark cannot run here" not in told.stdout
    assert page.count("Every record was acknowledged and read once, in order.") == (3 if has_spark else 2)
    if has_spark:
        assert "acknowledged, readable, landed: 5,000, 5,000, 5,000" in told.stdout
        assert "verdict of the audit: complete" in told.stdout
        assert "Per-Partition" in (tmp_path / "report-audit.html").read_text()
    assert told.stderr == ""
    assert list(temporary.iterdir()) == []


def test_demo_refuses_an_unwritable_report_path_before_it_starts(tmp_path: Path) -> None:
    refused = chronik("demo", "--report", str(tmp_path / "no-such-folder" / "report.html"))
    assert refused.code == 2
    assert refused.out == ""
    assert "choose another --report" in refused.error_line


def test_demo_falls_back_to_one_node_if_three_nodes_cannot_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refusing(TemporaryCluster):
        def __enter__(self) -> Self:
            if self._count > 1:
                self.remove()
                raise LocalClusterError("there is no room")
            return super().__enter__()

    monkeypatch.setattr(demo, "TemporaryCluster", Refusing)
    # The test of the whole demo covers Spark's part.
    monkeypatch.setattr(demo, "landed_and_audited", lambda *arguments: None)
    assert app.main(["demo"]) == 0
    told = capsys.readouterr().out
    assert "THREE NODES COULD NOT BE STARTED (there is no room)" in told
    assert "PASS: 100 %" in told
    assert "is killed" not in told


def test_demo_reports_a_failed_landing_as_a_complaint_and_not_as_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    if demo_pipeline.spark_fault() is not None:
        pytest.skip(str(demo_pipeline.spark_fault()))
    nobody = f"127.0.0.1:{free_port(1)}"
    chapter = demo_pipeline.landed_and_audited(nobody, "records", "no-ledger", "no-tables", None)
    assert chapter is not None and chapter.complaint is not None
    assert "landing failed" in chapter.complaint
    assert "SKIPPED" not in capsys.readouterr().out
