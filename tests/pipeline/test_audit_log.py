"""The log side of an audit, by headers over HTTP, by fetched headers and by records: equal on a Chronik node, and on
Apache Kafka, which has control batches.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from confluent_kafka import Producer
from tests.support import topics
from tests.support.apache_kafka import ApacheKafka
from tests.support.eventually import eventually
from tests.support.node import Node
from tests.support.topics import NOW_MS, numbered

from chronik.client.cluster import Cluster
from chronik.client.node_http import get_blocking
from chronik.client.producer import TransactionalProducer
from chronik.pipeline.audit import log as audit_log
from chronik.pipeline.audit.blocks import CONTROL, NO_CHECKSUM, READABLE
from chronik.pipeline.audit.cluster import http_nodes
from chronik.pipeline.audit.job import AuditPlan, AuditRequest, _log_tasks, prepare
from chronik.pipeline.audit.log import read_log
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.wire.batch import encode_batch
from chronik.wire.checksum import record_checksum
from chronik.wire.compression import LZ4

pytestmark = pytest.mark.timeout(180)


def rows(plan: AuditPlan, parts: int = 1) -> list[dict[str, Any]]:
    return [row for task in _log_tasks(plan, parts) for batch in read_log(task) for row in batch.to_pylist()]


def offsets(found: list[dict[str, Any]], side: int = READABLE) -> list[tuple[int, int]]:
    """Return each offset as often as it is covered."""
    return sorted(
        (row["partition"], offset)
        for row in found
        if row["side"] == side
        for offset in range(row["start"], row["stop"])
    )


@pytest.mark.parametrize("parts", [1, 7])
@pytest.mark.parametrize("log", ["headers", "fetch", "records"])
def test_each_way_to_read_the_log_finds_each_offset_once(shared_node: Node, log: str, parts: int) -> None:
    at, name = shared_node.bootstrap, f"audit-log-{log}-{parts}"
    topics.create(at, name, 2)
    topics.append(at, name, 0, *[numbered(50)] * 5, codec=LZ4)
    topics.append(at, name, 1, numbered(30))
    topics.trim(at, name, 0, 70)
    plan = prepare(AuditRequest(at, name, log=log))
    assert plan.how == log
    found = rows(plan, parts)
    assert offsets(found) == [(0, offset) for offset in range(70, 250)] + [(1, offset) for offset in range(30)]
    assert {row["checksum"] == NO_CHECKSUM for row in found} == {log != "records"}
    if log == "records":
        last = next(row for row in found if (row["partition"], row["start"]) == (1, 29))
        assert (last["checksum"], last["time_ms"]) == (record_checksum(b"k29", b"v29"), NOW_MS + 29)
    assert max(row["time_ms"] for row in found if row["partition"] == 1) >= NOW_MS


def test_the_audit_reads_headers_unless_it_needs_contents(shared_node: Node, tmp_path: Any) -> None:
    at, name = shared_node.bootstrap, "audit-log-ways"
    topics.create(at, name, 1)
    empty = tmp_path / "lines"
    empty.touch()
    assert prepare(AuditRequest(at, name)).how == "headers"
    assert prepare(AuditRequest(at, name, ledger=str(empty), receipts=str(empty))).how == "headers"
    assert prepare(AuditRequest(at, name, receipts=str(empty))).how == "records"
    topics.alter(at, name, {"cleanup.policy": "compact,delete"})
    compacted = prepare(AuditRequest(at, name))
    assert (compacted.how, compacted.is_compacted) == ("records", True)


def test_the_audit_fetches_a_compacted_batch_to_learn_its_offsets(
    shared_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch header has the number of remaining records, but not their offsets."""
    at, name = shared_node.bootstrap, "audit-log-thinned"
    topics.create(at, name, 1)
    topics.append(at, name, 0, numbered(10), numbered(10))
    listed = get_blocking

    def thinned(*request: Any, **query: Any) -> bytes:
        page = json.loads(listed(*request, **query))
        page["batches"][0]["count"] -= 1
        return json.dumps(page).encode()

    plan = prepare(AuditRequest(at, name))
    monkeypatch.setattr(audit_log, "get_blocking", thinned)
    found = rows(plan)
    assert offsets(found) == [(0, offset) for offset in range(20)]
    assert sorted(row["stop"] - row["start"] for row in found) == [1] * 10 + [10]


def test_the_audit_waits_for_the_high_watermark_of_a_new_leader(
    shared_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, name = shared_node.bootstrap, "audit-log-behind"
    topics.create(at, name, 1)
    topics.append(at, name, 0, numbered(10), numbered(10))
    listed, asked = get_blocking, list[dict[str, Any]]()

    def behind(*request: Any, **query: Any) -> bytes:
        asked.append(query)
        page = json.loads(listed(*request, **query))
        if len(asked) < 4:
            page |= {"batches": page["batches"][:1], "next": None, "high_watermark": 10}
            page["batches"] = [batch for batch in page["batches"] if batch["base_offset"] == 0]
        return json.dumps(page).encode()

    plan = prepare(AuditRequest(at, name))
    monkeypatch.setattr(audit_log, "get_blocking", behind)
    monkeypatch.setattr(audit_log, "WATERMARK_PAUSE_S", 0.001)
    assert offsets(rows(plan)) == [(0, offset) for offset in range(20)]
    assert len(asked) == 4
    monkeypatch.setattr(audit_log, "WATERMARK_TRIES", 1)
    asked.clear()
    with pytest.raises(PipelineError, match="was readable up to 20 and now only up to 10"):
        rows(plan)


def test_an_unreachable_node_is_a_pipeline_error(shared_node: Node) -> None:
    at, name = shared_node.bootstrap, "audit-log-silent"
    topics.create(at, name, 1)
    topics.append(at, name, 0, numbered(10))
    plan = prepare(AuditRequest(at, name))
    object.__setattr__(plan, "nodes", ("127.0.0.1:1",))
    with pytest.raises(PipelineError, match="no node lists the batches of audit-log-silent-0"):
        rows(plan)


def test_a_start_time_excludes_older_records(shared_node: Node) -> None:
    at, name = shared_node.bootstrap, "audit-log-start"
    topics.create(at, name, 2)
    topics.append(at, name, 0, *[[record] for record in numbered(20)])
    plan = prepare(AuditRequest(at, name, start_ms=NOW_MS + 12))
    assert offsets(rows(plan)) == [(0, offset) for offset in range(12, 20)]
    assert plan.bounds[1].begin == plan.bounds[1].end == 0


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("log", ["headers", "fetch", "records"])
def test_aborted_and_open_transactions_are_not_readable(shared_node: Node, log: str, parts: int) -> None:
    at, name = shared_node.bootstrap, f"audit-aborted-{log}-{parts}"
    topics.create(at, name, 1)

    async def write(cluster: Cluster) -> None:
        transaction = TransactionalProducer(cluster, name)
        for ends in (transaction.commit, transaction.abort, transaction.commit, None):
            await transaction.begin()
            await transaction.append({(name, 0): [encode_batch(numbered(3)), encode_batch(numbered(1))]})
            if ends is not None:
                await ends()

    with BlockingCluster(at) as cluster:
        cluster.run(write(cluster.cluster))
    plan = prepare(AuditRequest(at, name, log=log))
    assert plan.bounds[0].end == 15  # three transactions of four records, with their markers
    found = rows(plan, parts)
    assert offsets(found) == [(0, offset) for offset in (*range(4), *range(10, 14))]
    assert offsets(found, CONTROL) == [(0, offset) for offset in (*range(4, 10), 14)]


@pytest.mark.parametrize("log", ["auto", "records"])
def test_the_audit_recognises_control_batches_of_apache_kafka(apache_kafka: ApacheKafka, log: str) -> None:
    at, name = apache_kafka.bootstrap, f"audit-control-{log}"
    topics.create(at, name, 1)
    producer = Producer({"bootstrap.servers": at, "transactional.id": name})
    producer.init_transactions(60)
    for count in (3, 2):
        producer.begin_transaction()
        for number in range(count):
            producer.produce(name, b"v%d" % number)
        producer.commit_transaction(30)
    eventually(lambda: prepare(AuditRequest(at, name)).bounds[0].end == 7, 30, "the last marker is written")
    plan = prepare(AuditRequest(at, name, log=log))
    assert plan.how == ("fetch" if log == "auto" else "records")
    found = rows(plan)
    assert offsets(found) == [(0, 0), (0, 1), (0, 2), (0, 4), (0, 5)]
    assert offsets(found, CONTROL) == [(0, 3), (0, 6)]


def test_apache_kafka_does_not_list_batches_over_http(apache_kafka: ApacheKafka) -> None:
    with BlockingCluster(apache_kafka.bootstrap) as cluster:
        assert http_nodes(cluster) == ()
    topics.create(apache_kafka.bootstrap, "audit-http", 1)
    with pytest.raises(PipelineError, match="lists batches over HTTP"):
        prepare(AuditRequest(apache_kafka.bootstrap, "audit-http", log="headers"))
