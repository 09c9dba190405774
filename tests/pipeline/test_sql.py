"""SQL over topics: pushed-down filters never change a result, counts and LIMIT are right, records become columns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.cli.run_chronik import Outcome, chronik
from tests.conftest import StartNode
from tests.support import topics
from tests.support.node import Node

from chronik.pipeline.errors import PipelineError
from chronik.pipeline.source.decoder import next_offset_after
from chronik.pipeline.source.reading import PartitionFetches
from chronik.pipeline.sql.query import SqlSession

RECORDS = 3_000
PARTITIONS = 3
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def filled(shared_node: Node) -> Node:
    """A node with the topic `sql-orders`: batches of 1 to 37 records, some of them with equal and falling times."""
    at = shared_node.bootstrap
    topics.create(at, "sql-orders", PARTITIONS)
    for partition in range(PARTITIONS):
        records = [
            (None if n % 5 == 0 else b"k%d" % (n % 7), b"v%d" % n, (), topics.NOW_MS + 60_000 * (n // 10) - 7 * (n % 3))
            for n in range(RECORDS)
        ]
        batches = []
        while records:
            size = 1 + (len(records) * 7) % 37
            batches.append(records[:size])
            records = records[size:]
        topics.append(at, "sql-orders", partition, *batches)
    return shared_node


def rows(node: Node, query: str, **options: Any) -> list[tuple[Any, ...]]:
    with SqlSession(node.bootstrap, **options) as session:
        schema, batches = session.run(query)
        found = [
            row for batch in batches for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
        ]
        assert all(len(row) == len(schema.names) for row in found)
        return found


OFFSETS = st.integers(-3, RECORDS + 3)
TIMES = st.integers(-10, RECORDS * 6 + 10).map(
    lambda seconds: f"make_timestamptz({topics.NOW_MS * 1000} + {seconds * 1_000_000})"
)
COMPARISONS = st.sampled_from(["<", "<=", "=", ">=", ">", "!="])
SIMPLE = st.one_of(
    st.builds('"offset" {} {}'.format, COMPARISONS, OFFSETS),
    st.builds('"timestamp" {} {}'.format, COMPARISONS, TIMES),
    st.builds('"partition" {} {}'.format, COMPARISONS, st.integers(-1, PARTITIONS)),
    st.builds('"offset" BETWEEN {} AND {}'.format, OFFSETS, OFFSETS),
    st.builds('"offset" IN ({}, {}, {})'.format, OFFSETS, OFFSETS, OFFSETS),
    st.builds('"offset" % {} = 0'.format, st.integers(2, 50)),
    st.sampled_from(
        [
            "key IS NULL",
            "key IS NOT NULL",
            "key = 'k3'::BLOB",
            "value > 'v2'::BLOB",
            "topic = 'sql-orders'",
            "topic = 'x'",
        ]
    ),
)
FILTERS = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        st.builds("({} AND {})".format, inner, inner),
        st.builds("({} OR {})".format, inner, inner),
        st.builds("(NOT {})".format, inner),
    ),
    max_leaves=5,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(condition=FILTERS)
def test_a_filter_gives_the_rows_of_a_full_read(filled: Node, condition: str) -> None:
    # DuckDB does not push a filter through a materialized result.
    whole = 'WITH everything AS MATERIALIZED (SELECT * FROM "sql-orders")'
    chosen = '"partition", "offset", key, value, "timestamp"'
    expected = rows(filled, f"{whole} SELECT {chosen} FROM everything WHERE {condition} ORDER BY 1, 2")
    assert rows(filled, f'SELECT {chosen} FROM "sql-orders" WHERE {condition} ORDER BY 1, 2') == expected
    assert rows(filled, f'SELECT count(*) FROM "sql-orders" WHERE {condition}') == [(len(expected),)]


def test_counts_limits_and_joins_are_right(filled: Node, tmp_path: Path) -> None:
    assert rows(filled, 'SELECT count(*) FROM "sql-orders"') == [(RECORDS * PARTITIONS,)]
    assert rows(filled, 'SELECT "partition", count(*) FROM "sql-orders" GROUP BY 1 ORDER BY 1') == [
        (partition, RECORDS) for partition in range(PARTITIONS)
    ]
    assert len(rows(filled, 'SELECT * FROM "sql-orders" LIMIT 7')) == 7
    assert rows(filled, 'SELECT * FROM "sql-orders"; SELECT 2') == [(2,)]
    path = tmp_path / "names.csv"
    path.write_text("k,name\nk3,three\n")
    joined = f"""SELECT DISTINCT name FROM "sql-orders" JOIN '{path}' AS n ON decode(key) = n.k"""
    assert rows(filled, joined) == [("three",)]


def test_a_narrow_filter_reads_only_its_offsets(filled: Node) -> None:
    with SqlSession(filled.bootstrap) as session:
        _, batches = session.run(
            'SELECT value FROM "sql-orders" WHERE "partition" = 1 AND "offset" BETWEEN 100 AND 120'
        )
        assert sum(batch.num_rows for batch in batches) == 21
        assert session.progress.offsets_total == 21


def test_a_condition_on_the_time_reads_only_the_offsets_from_then_on(filled: Node) -> None:
    first = 2_000 // 10 * 60_000
    with SqlSession(filled.bootstrap) as session:
        since = f"make_timestamptz({(topics.NOW_MS + first) * 1000})"
        _, batches = session.run(f'SELECT "offset" FROM "sql-orders" WHERE "timestamp" >= {since}')
        found = [offset for batch in batches for offset in batch.column(0).to_pylist()]
        assert session.progress.offsets_total == PARTITIONS * (RECORDS - 2_001)
    times = [60_000 * (n // 10) - 7 * (n % 3) for n in range(RECORDS)]
    assert sorted(found) == sorted([n for n, time in enumerate(times) if time >= first] * PARTITIONS)


def test_a_limit_ends_the_fetches_early(filled: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the offsets that brokers delivered: the number of rows would be right in any case."""
    at, name, each = filled.bootstrap, "sql-limit", 4_000
    topics.create(at, name, 2)
    for partition in range(2):
        batch = [(None, os.urandom(4096), (), topics.NOW_MS)] * 100
        topics.append(at, name, partition, *[batch] * (each // 100))
    fetched: list[int] = []

    class Counted(PartitionFetches):
        def responses(self) -> Iterator[Any]:
            offset = self._requested.start
            for response in super().responses():
                end = next_offset_after(memoryview(response.records), offset)  # type: ignore[union-attr]
                fetched.append(end - offset)
                offset = end
                yield response

    monkeypatch.setattr("chronik.pipeline.sql.scan.PartitionFetches", Counted)
    assert len(rows(filled, f'SELECT value FROM "{name}" LIMIT 7')) == 7
    assert 0 < sum(fetched) <= 2 * each // 4
    fetched.clear()
    assert len(rows(filled, f'SELECT value FROM "{name}"')) == 2 * each
    assert sum(fetched) >= 2 * each


def test_aborted_records_are_not_read_unless_requested(filled: Node) -> None:
    from confluent_kafka import Producer

    at = filled.bootstrap
    topics.create(at, "sql-transactions")
    producer = Producer({"bootstrap.servers": at, "transactional.id": "sql"})
    producer.init_transactions(30)
    for end, count in ((producer.commit_transaction, 3), (producer.abort_transaction, 4)):
        producer.begin_transaction()
        for number in range(count):
            producer.produce("sql-transactions", b"%d" % number)
        producer.flush(30)
        end(30)
    query = 'SELECT count(*), count(value) FROM "sql-transactions"'
    assert rows(filled, query) == [(3, 3)]
    assert rows(filled, query, committed_only=False) == [(7, 7)]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELECT * FROM sql_orders", "topics with similar names"),
        ("SELECT * FROM sql-orders", "write names with dots or dashes in double quotes"),
        ('SELECT value + 1 FROM "sql-orders"', "keys and values are bytes"),
        ("", "there is no query"),
    ],
)
def test_errors_are_one_line_with_the_way_out(filled: Node, query: str, said: str) -> None:
    with pytest.raises(PipelineError, match=said) as raised:
        rows(filled, query)
    assert "\n" not in str(raised.value)


@pytest.fixture
def registry(filled: Node) -> Iterator[SchemaRegistryClient]:
    with SchemaRegistryClient({"url": filled.http}) as client:
        yield client


def test_values_are_typed_by_the_registry(filled: Node, registry: SchemaRegistryClient) -> None:
    at, name = filled.bootstrap, "sql-typed"
    topics.create(at, name)
    properties = {"id": {"type": "integer"}, "city": {"type": "string"}}
    text = json.dumps({"title": "Order", "type": "object", "properties": properties})
    number = registry.register_schema(f"{name}-value", Schema(text, "JSON")).to_bytes(4, "big")
    values = [b"\0" + number + json.dumps({"id": n, "city": "Bern"}).encode() for n in range(5)]
    values += [b"junk", b"\0" + number + b'{"id": "x"}']
    topics.append(at, name, 0, [(None, value, (), topics.NOW_MS) for value in values])
    query = f'SELECT "offset", id, decode_error FROM "{name}" ORDER BY 1'
    outcome = chronik("sql", query, "--json", "-b", at)
    assert outcome.code == 0, outcome
    found = outcome.json()
    assert found["columns"] == ["offset", "id", "decode_error"]
    assert [row[:2] for row in found["rows"]] == [*([n, n] for n in range(5)), [5, None], [6, None]]
    assert "has no schema id" in found["rows"][5][2] and "Expected `int | null`" in found["rows"][6][2]
    assert "2 records of sql-typed do not fit their schema" in outcome.err
    counted = chronik("sql", f'SELECT city, count(*) AS n FROM "{name}" WHERE id > 2 GROUP BY 1', "--csv", "-b", at)
    assert counted.out == "city,n\nBern,2\n"


def test_a_query_without_schemas_does_not_wait_for_pandas_and_compilers(filled: Node) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "chronik.cli", "sql", "--jsonl", "-b", filled.bootstrap]
    done = subprocess.run([*command, 'SELECT count(*) AS n FROM "sql-orders"'], capture_output=True, text=True)
    assert done.stdout.startswith('{"n":'), done
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pyarrow.dataset" in loaded and not loaded & {"pandas.core", "numba.core"}


def test_the_command_prints_tables_and_refuses_wrong_options(start_node: StartNode) -> None:
    node = start_node()
    topics.create(node.bootstrap, "t")
    topics.append(node.bootstrap, "t", 0, [(b"k", b"v\xff", (), topics.NOW_MS), (None, None, (), topics.NOW_MS)])

    def sql(*arguments: str) -> Outcome:
        return chronik("sql", *arguments, "-b", node.bootstrap)

    shown = sql("SELECT key, value FROM t ORDER BY t.offset")
    assert shown.code == 0 and "0x76ff" in shown.out and "NULL" in shown.out and "2 rows" in shown.out, shown
    assert sql("SELECT key FROM t LIMIT 1", "--jsonl").out == '{"key": "k"}\n'
    for arguments, said in (
        (("SELECT 1", "--json", "--csv"), "exclude each other"),
        (("SELECT 1", "--isolation", "dirty"), "--isolation dirty is unknown"),
        (("SELECT nothing FROM t",), "nothing"),
    ):
        outcome = sql(*arguments)
        assert outcome.code == 2 and said in outcome.err and outcome.err.count("\n") == 1, outcome
