"""`chronik pipeline land --table-format iceberg` as a user runs it, with an audit of the table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.run_chronik import Outcome
from tests.support import topics
from tests.support.node import Node
from tests.support.rest_catalog import rest_catalog

from chronik.pipeline.catalog import open_catalog


def test_a_topic_lands_in_an_iceberg_table_and_is_audited(
    command: Callable[..., Outcome], shared_node: Node, tmp_path: Path
) -> None:
    at, name = shared_node.bootstrap, "land-iceberg"
    topics.create(at, name, partitions=2)
    (tmp_path / "s.sql").write_text("id BIGINT NOT NULL, at TIMESTAMP")
    values = [json.dumps({"id": number, "at": "2026-01-02T03:04:05Z"}).encode() for number in range(20)]
    for partition in range(2):
        topics.append(at, name, partition, [(None, value, (), topics.NOW_MS) for value in [*values, b"junk"]])
    to = str(tmp_path / "tables")
    land = ("pipeline", "land", name, "--to", to, "--once", "--table-format", "iceberg", "-b", at)
    for options in ((), (), ("--checkpoint", str(tmp_path / "lost")), ("--from", "3", "--until", "9")):
        outcome = command(*land, "--schema", str(tmp_path / "s.sql"), *options)
        assert outcome.code == 0, outcome
    table = open_catalog(to, {}).load_table(("chronik", name)).scan().to_arrow()
    assert sorted(table.column("id").to_pylist()) == sorted([*range(20)] * 2)
    assert {str(each) for each in table.column("at").to_pylist()} == {"2026-01-02 03:04:05+00:00"}
    audited = command("pipeline", "audit", name, "--table", to, "--json", "-b", at)
    assert audited.code == 0, audited
    result = json.loads(audited.out)
    assert (result["verdict"], result["landed"], result["duplicates"]) == ("complete", 42, 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--catalog", "type=rest"), "--catalog is for Iceberg tables: add --table-format iceberg"),
        (("--table-format", "hudi"), "--table-format hudi is unknown: use delta, iceberg"),
        (("--table-format", "iceberg", "--mode", "upsert"), "--mode upsert needs --table-format delta"),
    ],
)
def test_options_that_contradict_iceberg_are_refused(
    command_without_spark: Callable[..., Outcome], tmp_path: Path, given: tuple[str, ...], said: str
) -> None:
    outcome = command_without_spark("pipeline", "land", "t", "--to", str(tmp_path), *given)
    assert outcome.code == 2 and said in outcome.err, outcome


def test_a_topic_lands_in_a_rest_catalog_and_is_audited(
    command: Callable[..., Outcome], shared_node: Node, tmp_path: Path
) -> None:
    at, name, to = shared_node.bootstrap, "land-rest", str(tmp_path / "tables")
    topics.create(at, name)
    topics.append(at, name, 0, topics.numbered(20))
    with rest_catalog(tmp_path) as server:
        settings = [part for key, value in server.options.items() for part in ("--catalog", f"{key}={value}")]
        land = ("pipeline", "land", name, "--to", to, "--once", "--table-format", "iceberg", "-b", at, *settings)
        for options in ((), ("--checkpoint", str(tmp_path / "lost"))):
            outcome = command(*land, *options)
            assert outcome.code == 0, outcome
        result = command("pipeline", "audit", name, "--table", to, "--json", "-b", at, *settings).json()
        assert (result["verdict"], result["landed"], result["duplicates"]) == ("complete", 20, 0)
        refused = command(*land, "--catalog", "token=wrong")
        assert refused.code == 2 and "cannot open the catalog" in refused.err
