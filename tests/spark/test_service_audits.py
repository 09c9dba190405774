"""Continuous audits on real Spark: a fault is an alert until it is repaired, or its key is listed as deleted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from deltalake import DeltaTable
from tests.cli.run_chronik import Outcome
from tests.support import topics
from tests.support.eventually import eventually
from tests.support.landing import landed
from tests.support.node import Node
from tests.support.topics import numbered

from chronik.cli.pipeline_run import SystemClocks
from chronik.client.pipelines import AuditState, PipelineJob
from chronik.observe.logging import make_logger
from chronik.observe.metrics import render
from chronik.pipeline.service.audits import AuditedTopic, Audits
from chronik.pipeline.service.metrics import families

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AUDIT_S_MAX = 120.0

pytestmark = pytest.mark.timeout(300)  # the first test starts Spark and compiles the checksum


class LandedTopic:
    """A job of the service, as an audit sees it: how far it has landed, and the state that the audit reports."""

    def __init__(self) -> None:
        self.landed_ends: Mapping[int, int] = {}
        self.audit = AuditState()

    def set_audit(self, audit: AuditState) -> None:
        self.audit = audit

    @property
    def metrics(self) -> str:
        job = PipelineJob("orders", "landing", "orders", "t", "running", 0, audit=self.audit)
        return render(list(families([job]))).decode()


@pytest.fixture
def lines() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def start(
    spark: SparkSession, shared_node: Node, tmp_path: Path, lines: list[dict[str, Any]]
) -> Iterator[Callable[[str, LandedTopic], Audits]]:
    """Audit a topic as a new process of the service would."""
    running: list[Audits] = []

    def run(topic: str, job: LandedTopic) -> Audits:
        table, folder = str(tmp_path / "tables" / topic), str(tmp_path / ".audit")
        audited = AuditedTopic(cast("Any", job), topic, table, folder, 0.1, str(tmp_path / "deleted.txt"), True)
        log = make_logger(lambda line: lines.append(json.loads(line)), lambda: 0)
        running.append(Audits(spark, shared_node.bootstrap, [audited], SystemClocks(), log))
        running[-1].start()
        return running[-1]

    yield run
    for audits in running:
        audits.stop()


def test_a_missing_row_is_an_alert_until_its_key_is_listed_as_deleted(
    command: Callable[..., Outcome],
    start: Callable[[str, LandedTopic], Audits],
    shared_node: Node,
    tmp_path: Path,
    lines: list[dict[str, Any]],
) -> None:
    at, name, to, listed = shared_node.bootstrap, "audit-alert", str(tmp_path / "tables"), tmp_path / "deleted.txt"
    topics.create(at, name)
    listed.write_text("")

    def land(count: int, first: int, *options: str) -> None:
        topics.append(at, name, 0, numbered(count, first))
        outcome = command("pipeline", "land", name, "--to", to, "--once", "-b", at, *options)
        assert outcome.code == 0, outcome

    def has(job: LandedTopic, verdict: str, verified: int) -> bool:
        return (job.audit.verdict, job.audit.verified) == (verdict, {"0": verified})

    land(10, 0)
    job = LandedTopic()
    audits = start(name, job)
    job.landed_ends = {0: 10}
    eventually(lambda: has(job, "complete", 10), AUDIT_S_MAX, "the audit is complete")
    land(5, 10)
    DeltaTable(f"{to}/{name}").delete("offset = 12")
    job.landed_ends = {0: 15}
    eventually(lambda: has(job, "incomplete", 10), AUDIT_S_MAX, "the missing row is noticed")
    assert (job.audit.gaps, job.audit.unverified) == (1, 5) and "chronik pipeline audit" in job.audit.reason
    assert "chronik_pipeline_audit_complete{" in job.metrics and "chronik_pipeline_audit_gaps{" in job.metrics
    values = {line.partition("{")[0]: line.rpartition(" ")[2] for line in job.metrics.splitlines() if "{" in line}
    assert (values["chronik_pipeline_audit_complete"], values["chronik_pipeline_audit_gaps"]) == ("0.0", "1.0")
    checked_ms = job.audit.checked_ms
    eventually(lambda: job.audit.checked_ms != checked_ms, AUDIT_S_MAX, "the next audit")
    assert has(job, "incomplete", 10)
    listed.write_text("k12\n")  # it was deleted at a person's request
    eventually(lambda: has(job, "complete", 15), AUDIT_S_MAX, "the deletion is accounted for")
    assert (job.audit.deleted, job.audit.gaps) == (1, 0)
    audits.stop()
    events = [line["event"] for line in lines]
    assert events == ["audit_complete", "audit_incomplete", "audit_complete"], "each change is one line"

    again = LandedTopic()
    again.landed_ends = {0: 15}
    start(name, again)
    eventually(lambda: has(again, "complete", 15), AUDIT_S_MAX, "a new process continues where the last one was")

    land(3, 15, "--checkpoint", str(tmp_path / "lost"), "--deleted", str(listed))
    assert landed(Path(to) / name) == [(0, offset) for offset in range(18) if offset != 12]
    audit = ("pipeline", "audit", name, "--table", to, "--json", "-b", at)
    result = command(*audit, "--deleted", str(listed)).json()
    assert (result["verdict"], result["deleted"], result["landed"]) == ("complete", 1, 17)
    assert command(*audit).code == 1
