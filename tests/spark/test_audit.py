"""The audit as a Spark job against a real node: it names planted errors, and reports a clean topic as complete."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from tests.support import topics
from tests.support.node import Node
from tests.support.topics import NOW_MS

from chronik.client.batches import Batches
from chronik.client.ledger import Ledger
from chronik.pipeline.audit.blocks import SIDES
from chronik.pipeline.audit.job import AuditRequest, prepare, run
from chronik.pipeline.audit.result import AuditResult, Range
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.pipeline.source.columns import HEADERS
from chronik.wire.batch import encode_batch
from chronik.wire.compression import LZ4
from chronik.wire.records import NewRecord

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed: pip install 'chronik[spark]'")

pytestmark = pytest.mark.timeout(300)  # the first test starts Spark and compiles the checksum

Audit = Callable[..., AuditResult]
PER_BATCH = 50


@dataclasses.dataclass
class Stored:
    """One acknowledged record."""

    partition: int
    offset: int
    record: NewRecord


class Story:
    """A topic with records, and the records of each side: a test plants its errors in the lists."""

    def __init__(self, bootstrap: str, topic: str, folder: Path, counts: Sequence[int]) -> None:
        self.bootstrap, self.topic, self.folder = bootstrap, topic, folder
        topics.create(bootstrap, topic, len(counts))
        self.acked: list[Stored] = []
        with BlockingCluster(bootstrap) as cluster:
            for partition, count in enumerate(counts):
                for first in range(0, count, PER_BATCH):
                    records = [_record(partition, i) for i in range(first, min(count, first + PER_BATCH))]
                    batch = encode_batch(records, codec=LZ4 if first % 100 else 0)
                    base = cluster.run(Batches(cluster.cluster).append(topic, partition, batch))
                    self.acked += [Stored(partition, base + at, record) for at, record in enumerate(records)]
        self.delivered = list(self.acked)
        self.landed = list(self.acked)

    def at(self, partition: int, offset: int) -> Stored:
        return next(stored for stored in self.acked if (stored.partition, stored.offset) == (partition, offset))

    def request(self, **other: Any) -> AuditRequest:
        """Return a request with all sides except those given as None."""
        sides = {
            "ledger": self.lines("acked.jsonl", self.acked),
            "receipts": self.lines("delivered.jsonl", self.delivered),
            "table": self.table("tables", self.landed),
        }
        return AuditRequest(self.bootstrap, self.topic, **{**sides, **other})

    def lines(self, name: str, records: Iterable[Stored]) -> str:
        path = self.folder / name
        with Ledger(path, append=False) as ledger:
            for stored in records:
                key, value, headers, time_ms = stored.record
                ledger.record(self.topic, stored.partition, stored.offset, time_ms, key, value, list(headers))
        return str(path)

    def table(self, name: str, records: Sequence[Stored], letters: Sequence[Stored] = ()) -> str:
        folder = self.folder / name
        deltalake.write_deltalake(str(folder / self.topic), _landed(records), partition_by=["date"], mode="overwrite")
        if letters:
            deltalake.write_deltalake(str(folder / f"{self.topic}_dead_letters"), _landed(letters), mode="overwrite")
        return str(folder)


def _record(partition: int, number: int) -> NewRecord:
    """Return records of all kinds: with and without key, value and headers."""
    key = None if number % 7 == 0 else b"" if number % 11 == 0 else b"key-%d" % number
    value = None if number % 13 == 0 else b"partition %d, record %d" % (partition, number)
    headers: list[tuple[str, bytes | None]] = [("größe", b"\x00"), ("null", None)] if number % 5 == 0 else []
    return key, value, headers, NOW_MS + number * 1000


def _landed(records: Sequence[Stored]) -> pa.Table:
    columns = {
        "key": pa.array([stored.record[0] for stored in records], pa.binary()),
        "value": pa.array([stored.record[1] for stored in records], pa.binary()),
        "headers": pa.array(
            [[{"key": name, "value": held} for name, held in stored.record[2]] or None for stored in records], HEADERS
        ),
        "partition": pa.array([stored.partition for stored in records], pa.int32()),
        "offset": pa.array([stored.offset for stored in records], pa.int64()),
        "timestamp": pa.array([stored.record[3] * 1000 for stored in records], pa.timestamp("us", tz="UTC")),
        "date": pa.array(["2023-11-14"] * len(records)),
    }
    return pa.table(columns)


@pytest.fixture
def audit(spark: SparkSession) -> Audit:
    return lambda request: run(spark, prepare(request))


@pytest.fixture
def story(shared_node: Node, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Story]:
    name = "audit-" + "".join(c if c.isalnum() else "-" for c in request.node.name)
    return lambda *counts: Story(shared_node.bootstrap, name, tmp_path, counts)


def ranges(found: Iterable[Range]) -> list[tuple[str, int, int]]:
    return [(SIDES[each.side], each.first, each.last) for each in found]


def test_the_experiment_of_5000_records_is_complete_from_end_to_end(story: Callable[..., Story], audit: Audit) -> None:
    """5,000 records over three partitions, all four sides; the log is read by its headers alone."""
    told = audit(story(1667, 1667, 1666).request()).to_json()
    assert told["verdict"] == "complete"
    assert (told["acked"], told["readable"], told["delivered"], told["landed"]) == (5000, 5000, 5000, 5000)
    assert (told["log_from"], told["verified"], told["imbalance"]) == ("headers", 5000, 1)
    assert [
        (row["messages"], row["percent"], row["deviation"], row["first_offset"], row["last_offset"], row["gaps"])
        for row in told["partitions"]
    ] == [(1667, 33.3, 0, 0, 1666, 0), (1667, 33.3, 0, 0, 1666, 0), (1666, 33.3, -1, 0, 1665, 0)]
    assert sum(row["readable"] for row in told["buckets"]) == 5000


@pytest.mark.parametrize("log", ["auto", "fetch", "records"])
def test_the_audit_reports_all_planted_errors_with_their_offsets(
    story: Callable[..., Story], audit: Audit, log: str
) -> None:
    it = story(300, 300, 300)
    removed = [(0, 17), (0, 18), (1, 250)]
    third = [(2, offset) for offset in range(100, 200)]
    it.landed = [stored for stored in it.landed if (stored.partition, stored.offset) not in {*removed, *third}]
    it.landed += [it.at(0, 33), it.at(1, 44)]
    where = it.landed.index(it.at(1, 99))
    it.landed[where] = Stored(1, 99, (b"key-99", b"altered", it.at(1, 99).record[2], it.at(1, 99).record[3]))
    swap = it.delivered.index(it.at(1, 120))
    it.delivered[swap], it.delivered[swap + 1] = it.delivered[swap + 1], it.delivered[swap]
    result = audit(it.request(log=log))
    first, second, last = result.partitions
    assert result.verdict == "incomplete"
    assert ranges(first.gaps) == [("landed", 17, 18)]
    assert ranges(second.gaps) == [("landed", 250, 250)]
    assert ranges(last.gaps) == [("landed", 100, 199)]
    assert ranges([*first.duplicates, *second.duplicates]) == [("landed", 33, 33), ("landed", 44, 44)]
    assert ranges(second.disordered) == [("delivered", 120, 121)]
    assert [(item.side, item.offset) for item in second.mismatched] == [(3, 99)]
    told = result.to_json()
    assert [told[name] for name in ("gaps", "duplicates", "out_of_order", "mismatches")] == [103, 2, 1, 1]
    assert (told["acked"], told["readable"], told["delivered"], told["landed"]) == (900, 900, 900, 797)
    assert told["partitions"][2]["deviation"] == -100


def test_without_a_ledger_the_table_is_compared_with_the_log(story: Callable[..., Story], audit: Audit) -> None:
    it = story(120)
    it.landed[7] = Stored(0, 7, (b"key-7", b"altered", (), NOW_MS))
    result = audit(it.request(ledger=None, receipts=None))
    assert result.log_from == "records"
    assert [(item.side, item.offset) for item in result.partitions[0].mismatched] == [(3, 7)]
    assert result.total(0) is None


def test_a_topic_without_records_is_complete(story: Callable[..., Story], audit: Audit) -> None:
    told = audit(story(0, 0).request()).to_json()
    assert [told[side] for side in ("acked", "readable", "delivered", "landed")] == [0, 0, 0, 0]
    assert (told["verdict"], len(told["partitions"])) == ("complete", 2)


def test_dead_letters_count_as_landed(story: Callable[..., Story], audit: Audit) -> None:
    it = story(60)
    table = it.table("with-letters", it.acked[:50], letters=it.acked[50:])
    assert audit(it.request(table=table)).verdict == "complete"


def test_expired_records_are_not_lost(story: Callable[..., Story], audit: Audit) -> None:
    it = story(200)
    topics.trim(it.bootstrap, it.topic, 0, 75)
    told = audit(it.request()).to_json()
    assert (told["verdict"], told["acked"], told["readable"], told["expired"]) == ("complete", 200, 125, 75)


def test_the_committed_offsets_of_a_group_replace_receipts(story: Callable[..., Story], audit: Audit) -> None:
    it = story(100, 100)
    with BlockingCluster(it.bootstrap) as cluster:
        cluster.commit("audit-group", {(it.topic, 0): 100, (it.topic, 1): 60})
    result = audit(it.request(receipts=None, table=None, group="audit-group"))
    assert result.total(2) == 160
    assert ranges(result.partitions[1].gaps) == [("delivered", 60, 99)]
    assert result.partitions[1].lag(2) == 40


def test_a_compacted_topic_needs_only_the_latest_record_of_each_key(
    shared_node: Node, tmp_path: Path, audit: Audit
) -> None:
    at, name = shared_node.bootstrap, "audit-compacted"
    topics.create(at, name, 1)
    topics.alter(at, name, {"cleanup.policy": "compact"})
    sent: list[NewRecord] = [(b"k%d" % (i % 10), b"v%d" % i, (), NOW_MS + i) for i in range(100)]
    topics.append(at, name, 0, sent)
    it = [Stored(0, offset, record) for offset, record in enumerate(sent)]
    folder = Story.__new__(Story)
    folder.topic, folder.folder = name, tmp_path
    # An older record of k3 is missing from the ledger and the table, which is allowed; the latest of k4 is missing from
    # the table alone.
    ledger = folder.lines("acked.jsonl", [stored for stored in it if stored.offset != 3])
    table = folder.table("tables", [stored for stored in it if stored.offset not in (3, 94)])
    result = audit(AuditRequest(at, name, ledger=ledger, table=table))
    assert result.is_compacted
    assert (result.total(0), result.total(1), result.total(3)) == (10, 10, 9)
    assert ranges(result.partitions[0].gaps) == [("landed", 94, 94)]
