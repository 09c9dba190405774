"""The demo's last chapter: Spark lands a topic in a table, and audits it from acknowledgement to table."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from typing import Any

from chronik.cli.demo_report import Chapter, print_facts
from chronik.cli.output import print_table

COLUMNS = {
    "partition": "partition",
    "acknowledged": "acked",
    "readable": "readable",
    "landed": "landed",
    "gaps": "gaps",
    "duplicates": "duplicates",
    "out of order": "out_of_order",
    "checksum mismatches": "mismatches",
}
TIMEOUT_S = 300.0


def landed_and_audited(bootstrap: str, topic: str, ledger: str, tables: str, report: str | None) -> Chapter | None:
    """Return the chapter, or None if Spark cannot run here, after printing what is missing."""
    print("\n3. The records of the first part, landed in a Delta table by Spark, then audited against the ledger:")
    fault = spark_fault()
    if fault is not None:
        print(f"SKIPPED, Spark cannot run here: {fault}", flush=True)
        return None
    started_s = time.monotonic()
    landing = _chronik("pipeline", "land", topic, "--to", tables, "--once", "-b", bootstrap)
    landed_s = time.monotonic() - started_s
    if landing.returncode != 0:
        return _failed(f"landing failed: {_last_line(landing.stderr)}")
    audit = ["pipeline", "audit", topic, "--ledger", ledger, "--table", tables, "--json", "-b", bootstrap]
    auditing = _chronik(*audit, *(("--report", report) if report is not None else ()))
    try:
        result: dict[str, Any] = json.loads(auditing.stdout)
    except ValueError:
        return _failed(f"the audit failed: {_last_line(auditing.stderr)}")
    rows = [[partition[name] for name in COLUMNS.values()] for partition in result["partitions"]]
    print_table("", list(COLUMNS), rows, list(COLUMNS))
    facts = {
        "acknowledged, readable, landed": f"{result['acked']:,}, {result['readable']:,}, {result['landed']:,}",
        "verdict of the audit": str(result["verdict"]),
        "landed in": f"{landed_s:.0f} s, mostly to start Spark",
    }
    if report is not None:
        facts["the audit's own report"] = report
    print_facts(facts)
    complaint = None if result["verdict"] == "complete" else f"the audit found the data {result['verdict']}"
    return Chapter("Landed in a table, and audited", list(COLUMNS), rows, complaint, facts)


def spark_fault() -> str | None:
    """Return what Spark lacks here, or None if it can run. A job that fails later is no reason to skip the chapter."""
    if importlib.util.find_spec("pyspark") is None:
        return "pip install 'chronik[spark]'"
    from chronik.pipeline.session import java_fault

    return java_fault()


def _failed(complaint: str) -> Chapter:
    print(complaint)
    return Chapter("Landed in a table, and audited", list(COLUMNS), [], complaint, {})


def _chronik(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a chronik command in its own process: a Spark session lives as long as its process."""
    command = [sys.executable, "-m", "chronik.cli", *arguments]
    try:
        return subprocess.run(  # noqa: S603 - our own command, without a shell
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"it did not finish within {TIMEOUT_S:g} s\n")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]
