"""`chronik pipeline status` and `run --check`: what a service has reported, and what would keep it from running."""

from __future__ import annotations

import time
from pathlib import Path

from tests.cli.run_chronik import chronik, create_topic
from tests.conftest import StartNode

from chronik.client.pipelines import AuditState, PipelineJob, PipelineState, write_state
from chronik.client.pipelines import create_topic as create_states
from chronik.pipeline.catalog import open_catalog
from chronik.pipeline.land.iceberg import IcebergTable
from chronik.pipeline.land.schema import table_schema
from chronik.pipeline.source.blocking import BlockingCluster

FILE = """
name = "shop"
bootstrap = "{bootstrap}"
[[landing]]
topics = ["orders", "later"]
to = "tables"
{option}
"""


def test_status_shows_each_pipeline_with_its_jobs_and_audits(start_node: StartNode) -> None:
    node = start_node()
    nothing = chronik("pipeline", "status", "-b", node.bootstrap)
    assert nothing.code == 0 and "no pipeline has reported" in nothing.out
    now_ms = time.time_ns() // 1_000_000
    audit = AuditState("incomplete", now_ms, {"0": 7}, gaps=3, reason="partitions 0: see the audit")
    jobs = [
        PipelineJob("orders", "landing", "orders", "t/orders", "running", now_ms, rows=12_345, lag=7, audit=audit),
        PipelineJob("eu", "sink", "orders", "orders-eu", "failed", now_ms, "topic orders-eu does not exist"),
    ]
    states = [
        PipelineState("shop", "i", "host", 7, "v", "running", now_ms, now_ms, jobs),
        PipelineState("old", "j", "host", 8, "v", "running", now_ms, now_ms - 60_000),
    ]
    with BlockingCluster(node.bootstrap) as cluster:
        cluster.run(create_states(cluster.cluster))
        for state in states:
            cluster.run(write_state(cluster.cluster, state))
    shown = chronik("pipeline", "status", "-b", node.bootstrap)
    assert shown.code == 0, shown
    for text in ("shop: running, on host as process 7", "12,345", "incomplete", "partitions 0: see the audit"):
        assert text in " ".join(shown.out.split()), text
    assert "topic orders-eu does not exist" in " ".join(shown.out.split()) and "old: lost" in shown.out
    (only,) = chronik("pipeline", "status", "shop", "--json", "-b", node.bootstrap).json()["pipelines"]
    assert [(job["name"], job["state"], job["lag"]) for job in only["jobs"]] == [
        ("orders", "running", 7),
        ("eu", "failed", None),
    ]
    unknown = chronik("pipeline", "status", "none", "-b", node.bootstrap)
    assert unknown.code == 2 and "no pipeline none has reported" in unknown.error_line


def test_a_check_names_what_would_keep_a_job_from_running_and_creates_nothing(
    start_node: StartNode, tmp_path: Path
) -> None:
    node = start_node()
    create_topic(node, "orders")
    file = tmp_path / "shop.toml"
    file.write_text(FILE.format(bootstrap=node.bootstrap, option='deleted = "missing.txt"'))
    faulty = chronik("pipeline", "run", str(file), "--check")
    assert faulty.code == 1
    assert "fault: topic later does not exist" in faulty.out and "missing.txt: No such file" in faulty.out
    create_topic(node, "later")
    file.write_text(FILE.format(bootstrap=node.bootstrap, option=""))
    correct = chronik("pipeline", "run", str(file), "--check")
    assert (correct.code, correct.out) == (0, f"{file} is correct: 2 topics to land, 0 sinks\n"), correct
    assert not (tmp_path / "tables").exists()


def test_a_check_opens_the_catalog_of_iceberg_tables_and_creates_none(start_node: StartNode, tmp_path: Path) -> None:
    node, file, tables = start_node(), tmp_path / "shop.toml", tmp_path / "tables"
    for name in ("orders", "later"):
        create_topic(node, name)
    file.write_text(FILE.format(bootstrap=node.bootstrap, option='table_format = "iceberg"'))
    assert chronik("pipeline", "run", str(file), "--check").code == 0
    assert not tables.exists()
    IcebergTable.open(open_catalog(str(tables), {}), str(tables / "orders"), table_schema(None), "orders", "another")
    recreated = chronik("pipeline", "run", str(file), "--check")
    assert recreated.code == 1 and "topic orders was deleted and recreated since the table" in recreated.out
    option = 'table_format = "iceberg"\ncatalog = { type = "rest", uri = "http://127.0.0.1:1" }'
    file.write_text(FILE.format(bootstrap=node.bootstrap, option=option))
    silent = chronik("pipeline", "run", str(file), "--check")
    assert silent.code == 1 and "cannot open the catalog" in silent.out
