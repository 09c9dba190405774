"""`chronik pipeline land --infer`: the columns of JSON values come from a sample, and later runs keep them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable
from tests.cli.run_chronik import Outcome
from tests.support import topics
from tests.support.landing import sql
from tests.support.node import Node
from tests.support.topics import NOW_MS

pytestmark = pytest.mark.timeout(300)

VALUES = [
    {"id": 1, "Who-Is": {"name": "ann", "A": [1, 2.5]}, "at": "2026-01-31T12:00:00Z", "x`y": True},
    {"id": 2, "Who-Is": None, "at": "2026-02-01T12:00:00", "counts": {f"k{number}": number for number in range(6)}},
    *({"counts": {f"k{number}": 1}} for number in range(60)),
    {},
]


def test_every_object_of_the_sample_lands_in_inferred_columns(
    shared_node: Node, tmp_path: Path, command: Callable[..., Outcome]
) -> None:
    at, name = shared_node.bootstrap, "land-infer"
    topics.create(at, name)
    topics.append(at, name, 0, [(None, json.dumps(value).encode(), (), NOW_MS) for value in VALUES])
    land = ("pipeline", "land", name, "--to", str(tmp_path), "--infer", "--once", "-b", at)
    first = command(*land)
    assert first.code == 0 and "5 columns of land-infer from 63 values" in first.err, first.err
    types = {field.name: str(field.type) for field in DeltaTable(str(tmp_path / name)).schema().fields}
    assert "StructType" in types["Who-Is"] and "MapType" in types["counts"] and "timestamp" in types["at"]
    assert sql(tmp_path / name, 'select count(*), sum(id), sum("Who-Is".A[2]) from landed') == [(63, 3, 2.5)]
    assert sql(tmp_path / f"{name}_dead_letters", "select 1 from landed") == []
    topics.append(at, name, 0, [(None, b'{"id": "text"}', (), NOW_MS), (None, b'{"id": 3}', (), NOW_MS)])
    again = command(*land)
    assert again.code == 0 and "remove it to infer them again" in again.err, again.err
    assert sql(tmp_path / f"{name}_dead_letters", 'select "offset" from landed') == [(63,)]
